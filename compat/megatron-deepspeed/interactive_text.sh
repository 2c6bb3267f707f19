#!/bin/sh

# Hold a dialogue with the model. Arguments are added as flags. No launcher is needed: one process
# reads a checkpoint of any layout.
set -eu

CHECKPOINT_PATH=${CHECKPOINT_PATH:-checkpoints/gpt2}

exec python "$(dirname "$0")/tools/generate_samples_gpt.py" \
       --load "$CHECKPOINT_PATH" \
       --fp16 \
       --out-seq-length 1024 \
       --temperature 1.0 \
       --top_p 0.9 \
       "$@"
