#!/bin/sh
# The distributed script with 2 tensor-parallel ranks x 2 pipeline stages.
set -eu
export MICRO_BATCH_SIZE="${MICRO_BATCH_SIZE:-4}" GLOBAL_BATCH_SIZE="${GLOBAL_BATCH_SIZE:-16}"
exec sh "$(dirname "$0")/pretrain_gpt_distributed.sh" \
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel "$@"
