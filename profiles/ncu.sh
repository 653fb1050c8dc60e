#!/usr/bin/env bash
# Nsight Compute over the kernels of one eager step and of a plain copy, then the bandwidth of each
# over the copy's.
#
#   profiles/ncu.sh OUT --model smollm2-135m --batch 1 --k 3
#
# Writes OUT.csv. Clocks are left as they are; the copy runs under the same ones. PYTHON chooses the
# interpreter.
set -euo pipefail

if (($# < 1)); then
  sed -n '2,8s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
if ! command -v ncu >/dev/null; then
  echo "ncu.sh: ncu is not on PATH: install Nsight Compute, or add its folder to PATH" >&2
  exit 3
fi
out=$(realpath -m "$1")  # before the folder changes
shift
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}

ncu \
  --csv --page raw --print-units base \
  --metrics dram__bytes.sum,gpu__time_duration.sum \
  --profile-from-start off --clock-control none \
  --kernel-name-base function \
  --log-file "$out.csv" \
  "$python" -m profiles.marked_steps --mode eager --steps 1 --ceiling "$@"
"$python" -m profiles.ncu_table "$out.csv"
