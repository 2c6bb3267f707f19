#! /bin/bash

# Train the "345M" parameter model on this machine, or on one of several.
#
#   bash pretrain_gpt2.sh [NODE_RANK] [FLAG ...]
#
# Variables change the defaults: GPUS_PER_NODE, NNODES, MASTER_ADDR, MASTER_PORT, TP, PP,
# DATA_PATH, CHECKPOINT_PATH. Flags after the number of the machine are added to the training's.
# Scripts that start `deepspeed` find it here after: export PATH="$PWD/bin:$PATH"
set -euo pipefail

case ${1:-} in
    -h | --help) sed -n '3,/^set/s/^# \{0,1\}//p' "$0"; exit 0 ;;
esac
NODE_RANK=${1:-0}
[[ "$NODE_RANK" =~ ^[0-9]+$ ]] || { echo "the first argument is this machine's number, not $NODE_RANK" >&2; exit 2; }
[ $# -eq 0 ] || shift

DATA_PATH=${DATA_PATH:-data/meg-gpt2_text_document}
CHECKPOINT_PATH=${CHECKPOINT_PATH:-checkpoints/gpt2}

# Meshwright's launcher, unlike torch's, keeps the status of a rank and prints its error once.
PYTHONPATH=$(dirname "$0")/../../src${PYTHONPATH:+:$PYTHONPATH} exec python -m meshwright launch \
       --nproc-per-node "${GPUS_PER_NODE:-8}" \
       --nnodes "${NNODES:-1}" \
       --node-rank "$NODE_RANK" \
       --master-addr "${MASTER_ADDR:-localhost}" \
       --master-port "${MASTER_PORT:-6000}" \
       train \
       --tensor-model-parallel-size "${TP:-2}" \
       --pipeline-model-parallel-size "${PP:-2}" \
       --num-layers 24 \
       --hidden-size 1024 \
       --num-attention-heads 16 \
       --micro-batch-size 8 \
       --global-batch-size 16 \
       --seq-length 1024 \
       --max-position-embeddings 1024 \
       --train-iters 5000 \
       --lr-decay-iters 320000 \
       --save "$CHECKPOINT_PATH" \
       --load "$CHECKPOINT_PATH" \
       --data-path "$DATA_PATH" \
       --split 949,50,1 \
       --lr 0.00015 \
       --lr-decay-style cosine \
       --min-lr 1.0e-5 \
       --weight-decay 1e-2 \
       --clip-grad 1.0 \
       --lr-warmup-fraction .01 \
       --checkpoint-activations \
       --log-interval 10 \
       --save-interval 500 \
       --eval-interval 100 \
       --eval-iters 10 \
       --fp16 \
       "$@"
