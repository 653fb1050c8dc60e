#!/usr/bin/env bash
# The tiny family of tests/weights/tiny: a byte-level target trained from scratch on this Python's
# standard library, and a draft of every kind for it. Under an hour on one core.
#
#   bash proposers/training/recipes/tiny_family.sh OUT        (in a checkout)
set -euo pipefail
out="$1"
stdlib="$(python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')"
[ -f "$out/target/model.safetensors" ] || python -m tests.weights.tiny_target "$out/target"

train() {
  local kind="$1"
  shift
  graphengine train-draft target --kind "$kind" --out "$kind" --work work \
    --text "$stdlib" --text-tokens 300000 --length 256 --batch-tokens 2048 --seed 0 "$@"
}

cd "$out"
train eagle3 --taps 1,2,3 --draft-vocab 160 --steps 300
train eagle1 --steps 300
train mtp --steps 300
train draft_model --layers 2 --hidden 64 --intermediate 192 --steps 400
