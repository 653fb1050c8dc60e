#!/usr/bin/env bash
# The EAGLE-3 head for SmolLM2-135M of proposers/weights/smollm2-135m-eagle3, from what the model
# itself writes. Hours on two cores, most of them for that; run it again after it was stopped.
#
#   bash proposers/training/recipes/smollm2_eagle3.sh OUT [more flags of train-draft]
set -euo pipefail
out="$1"
shift
questions="$(mktemp)"
python -m proposers.training.recipes.questions 2887 > "$questions"
graphengine train-draft smollm2-135m --kind eagle3 --out "$out" \
  --chats 2560 --questions "$questions" --length 512 --draft-vocab 4800 --taps 2,15,27 \
  --steps 2400 --batch-tokens 1024 --learning-rate 1.5e-3 \
  --unroll 3 --first-only 0.4 --decay 0.8 --measure-every 300 --seed 0 "$@"
