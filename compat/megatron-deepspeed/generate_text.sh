#!/bin/sh

# Write two samples from nothing into unconditional_samples.json. Arguments are added as flags.
set -eu

CHECKPOINT_PATH=${CHECKPOINT_PATH:-checkpoints/gpt2}

exec python "$(dirname "$0")/tools/generate_samples_gpt.py" \
       --load "$CHECKPOINT_PATH" \
       --fp16 \
       --micro-batch-size 2 \
       --out-seq-length 1024 \
       --temperature 1.0 \
       --top_p 0.9 \
       --genfile unconditional_samples.json \
       --num-samples 2 \
       "$@"
