#!/usr/bin/env bash
# Nsight Systems around a module that marks its measured part with the CUDA profiler API, then the
# table of a step. Loading, capture and warm-up are not in the report.
#
#   profiles/nsys.sh OUT profiles.marked_steps --mode cuda --batch 1 --k 3
#
# Writes OUT.nsys-rep, OUT.sqlite and OUT.json. GRAPH_TRACE=node shows the kernels of a graph, at a
# cost to each; the default shows a graph as one piece of work. PYTHON chooses the interpreter.
set -euo pipefail

if (($# < 2)); then
  sed -n '2,9s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
if ! command -v nsys >/dev/null; then
  echo "nsys.sh: nsys is not on PATH: install Nsight Systems, or add its bin folder to PATH" >&2
  exit 3
fi
out=$(realpath -m "$1")  # before the folder changes
module=$2
shift 2
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}

nsys profile \
  --trace=cuda,nvtx,osrt \
  --sample=none --cpuctxsw=none \
  --capture-range=cudaProfilerApi --capture-range-end=stop \
  --cuda-graph-trace="${GRAPH_TRACE:-graph}" \
  --force-overwrite=true --output="$out" \
  "$python" -m "$module" "$@"
if [[ ! -f $out.nsys-rep ]]; then
  echo "nsys.sh: no report: $module has not called torch.cuda.profiler.start and stop" >&2
  exit 4
fi
nsys export --type=sqlite --force-overwrite=true --output="$out.sqlite" "$out.nsys-rep"
"$python" -m profiles.nsys_table "$out.sqlite" --json "$out.json"
