#!/bin/bash
# Trains by ONEFLOW_GPT_* variables. The other scripts here set those of one model that are not set.
# Flags after a script's name go to the training: bash examples/pretrain_345M.sh --train-iters 10
set -euo pipefail
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    sed -n '2,3s/^# //p' "${BASH_SOURCE[0]}"
    echo "ONEFLOW_GPT_* names and values: README.md; flags: python3 -m oneflow_gpt.training --help"
    exit 0
fi
src="${ONEFLOW_GPT_SRC_DIR:-$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)}"
export PYTHONPATH="$src${PYTHONPATH:+:$PYTHONPATH}"

dataset="${ONEFLOW_GPT_DATASET:-gpt_sample_dataset_text_document}" # here, as the document makes it
[[ -n "${ONEFLOW_GPT_DATASET:-}" || -e "$dataset.idx" ]] || dataset="/data/gpt/$dataset"
nodes="${ONEFLOW_GPT_NUM_NODES:-1}"
ips="${ONEFLOW_GPT_NODE_IPS:-10.11.0.2,10.11.0.3,10.11.0.4,10.11.0.5}" # the first $nodes of these

cmd=()
[[ -z "${ONEFLOW_GTP_PROFILE_FILE:-}" ]] || cmd+=(nsys profile --stats true --output "$ONEFLOW_GTP_PROFILE_FILE")
[[ -z "${ONEFLOW_GTP_GDB:-}" ]] || cmd+=(gdb --args)
cmd+=(
    python3 -m oneflow_gpt.training
    --num-layers "${ONEFLOW_GPT_NUM_LAYERS:-16}"
    --hidden-size "${ONEFLOW_GPT_HIDDEN_SIZE:-1536}"
    --num-attention-heads "${ONEFLOW_GPT_NUM_ATTENTION_HEADS:-16}"
    --micro-batch-size "${ONEFLOW_GPT_MICRO_BATCH_SIZE:-8}"
    --num-gpus-per-node "${ONEFLOW_GPT_NUM_GPUS_PER_NODE:-4}"
    --num-nodes "$nodes"
    --train-iters "${ONEFLOW_GPT_TRAIN_ITERS:-500000}"
    --learning-rate 0.00015 --min-lr 1.0e-5
    --lr-decay-style cosine --lr-decay-iters 320000 --lr-warmup-fraction 0.01
    --optimizer adamw --weight-decay 1e-2 --clip-grad 1.0
    --dataset "$dataset" --split "949,50,1"
    --seq-length "${ONEFLOW_GPT_SEQ_LENGTH:-2048}"
    --load "${ONEFLOW_GPT_LOAD_PATH:-checkpoint}"
    --save "${ONEFLOW_GPT_SAVE_PATH:-checkpoint}"
    --save-interval "${ONEFLOW_GPT_SAVE_INTERVAL:-10000}"
    --log-interval "${ONEFLOW_GPT_LOG_INTERVAL:-100}" --metric-print-format table
    --checkpoint-activations --multihead-attention-fusion --fp16
)
add() { [[ -z "$2" ]] || cmd+=("$1" "$2"); }
add --global-batch-size "${ONEFLOW_GPT_GLOBAL_BATCH_SIZE:-}"
add --num-accumulation-steps "${ONEFLOW_GPT_NUM_ACCUMULATION_STEPS:-}"
add --tensor-model-parallel-size "${ONEFLOW_GPT_TENSOR_MODEL_PARALLEL_SIZE:-}"
add --pipeline-model-parallel-size "${ONEFLOW_GPT_PIPELINE_MODEL_PARALLEL_SIZE:-}"
add --initial-loss-scale "${ONEFLOW_GPT_INIT_LOSS_SCALE:-}"
[[ "$nodes" == 1 ]] || cmd+=(--node-ips "$ips" --use-rdma)
[[ -z "${ONEFLOW_GTP_PROFILE_FILE:-}" ]] || cmd+=(--profile-transformer-layer)
cmd+=("$@")

[[ -n "${ONEFLOW_GTP_PRETRAIN_WITH_CONTAINER:-}" ]] || exec "${cmd[@]}"
container=(python3 "$src/tools/launch_container.py" --src "$src" --cmd "$(printf '%q ' "${cmd[@]}")")
[[ -z "${ONEFLOW_DEV_IMAGE:-}" ]] || container+=(--image "$ONEFLOW_DEV_IMAGE")
[[ -z "${ONEFLOW_GPT_PYTHON_VERSION:-}" ]] || container+=(--py "$ONEFLOW_GPT_PYTHON_VERSION")
[[ -z "${ONEFLOW_WHEEL:-}" ]] || container+=(--wheel "$ONEFLOW_WHEEL")
[[ -z "${ONEFLOW_GPT_DATA_DIR:-}" ]] || container+=(--extra-mount "$ONEFLOW_GPT_DATA_DIR")
exec "${container[@]}"
