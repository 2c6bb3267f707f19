#!/bin/sh
# Train the "345M" GPT by data parallelism on GPUS_PER_NODE x NNODES GPUS: call this on each node,
# with its NODE_RANK and the first node's MASTER_ADDR. Flags after the script's name win.
set -eu

: "${CHECKPOINT_PATH:?set CHECKPOINT_PATH to the folder of the checkpoints}"
: "${VOCAB_FILE:?set VOCAB_FILE to the path of gpt2-vocab.json}"
: "${MERGE_FILE:?set MERGE_FILE to the path of gpt2-merges.txt}"
: "${DATA_PATH:?set DATA_PATH to the prefix of the token files, such as my-gpt2_text_document}"

here=$(dirname "$0")/..
# As torchrun, but an error ends with its own message and status
export PYTHONPATH="$here/../../src${PYTHONPATH:+:$PYTHONPATH}"
exec python3 -m meshwright launch --nproc_per_node "${GPUS_PER_NODE:-8}" --nnodes "${NNODES:-1}" \
    --node_rank "${NODE_RANK:-0}" --master_addr "${MASTER_ADDR:-localhost}" --master_port "${MASTER_PORT:-6000}" \
    "$here/pretrain_gpt.py" \
    --num-layers 24 \
    --hidden-size 1024 \
    --num-attention-heads 16 \
    --seq-length 1024 \
    --max-position-embeddings 1024 \
    --micro-batch-size "${MICRO_BATCH_SIZE:-8}" \
    --global-batch-size "${GLOBAL_BATCH_SIZE:-64}" \
    --lr 0.00015 \
    --train-iters 500000 \
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
    --split 949,50,1 \
    --log-interval 100 \
    --save-interval 10000 \
    --eval-interval 1000 \
    --eval-iters 10 \
    --distributed-backend nccl \
    --save "$CHECKPOINT_PATH" \
    --load "$CHECKPOINT_PATH" \
    "$@"
