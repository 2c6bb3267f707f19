#!/bin/sh
# Train the "345M" GPT on the GPUs of CUDA_VISIBLE_DEVICES, on one without that variable.
# The environment can set every path; flags after the script's name win over those below:
#   CHECKPOINT_PATH=ckpt DATA_PATH=my-gpt2_text_document sh examples/pretrain_gpt.sh --train-iters 100
set -eu

CHECKPOINT_PATH=${CHECKPOINT_PATH:-/workspace/model/megatron-models/345m}
VOCAB_FILE=${VOCAB_FILE:-/workspace/model/gpt2-vocab/gpt2-vocab.json}
MERGE_FILE=${MERGE_FILE:-/workspace/model/gpt2-vocab/gpt2-merges.txt}
DATA_PATH=${DATA_PATH:-/workspace/data/my-gpt2_text_document}
GPUS=${GPUS:-$(echo "${CUDA_VISIBLE_DEVICES:-0}" | tr ',' '\n' | grep -c .)}

here=$(dirname "$0")/..
# As torchrun, but an error ends with its own message and status
export PYTHONPATH="$here/../../src${PYTHONPATH:+:$PYTHONPATH}"
exec python3 -m meshwright launch --nproc_per_node "$GPUS" "$here/pretrain_gpt.py" \
    --num-layers 24 \
    --hidden-size 1024 \
    --num-attention-heads 16 \
    --seq-length 1024 \
    --max-position-embeddings 1024 \
    --micro-batch-size 1 \
    --global-batch-size 2 \
    --lr 0.00015 \
    --train-iters 5000 \
    --lr-decay-iters 320000 \
    --lr-decay-style cosine \
    --min-lr 1.0e-5 \
    --weight-decay 1e-2 \
    --lr-warmup-fraction .01 \
    --clip-grad 1.0 \
    --fp16 \
    --data-path "$DATA_PATH" \
    --vocab-file "$VOCAB_FILE" \
    --merge-file "$MERGE_FILE" \
    --data-impl mmap \
    --split 700,200,100 \
    --log-interval 100 \
    --save-interval 10000 \
    --eval-interval 1000 \
    --eval-iters 10 \
    --save "$CHECKPOINT_PATH" \
    --load "$CHECKPOINT_PATH" \
    "$@"
