#!/usr/bin/env bash
# Benchmark a GPT of 16 heads and hidden size 1024 on sequences of 1024 tokens; on each machine:
#
#   bash args_deepspeed_gpt.sh [NNODES] [GPUS_PER_NODE] [NODE_RANK] [MASTER_ADDR] [MP] [PP] \
#       [USE_FP16] [ACTIVATION_CHECKPOINT] [MICRO_BATCH] [GLOBAL_BATCH] [NUM_LAYER] [RUN_COMMIT] \
#       [TRAIN_ITERS] [LOG_PERIOD] [CHECKPOINT_PATH] [VOCAB] [MERGE] [DATA] [--flag of train ...]
#
# The defaults are below. A checkpoint of the benchmark before is moved to CHECKPOINT_PATH/replaced-N,
# of which the last is kept. The log is kept in test_logs/RUN_COMMIT/NnGg/ beside this script, which
# ends with the training's status. Environment: SAVE=false saves no checkpoint, MASTER_PORT is the
# port on machine 0, USE_DEEPSPEED=false leaves out ds_config.json and ZeRO 1. Scripts that start
# `deepspeed` find it here after: export PATH="$PWD/bin:$PATH"
set -euo pipefail

fail() {
    echo "${0##*/}: $*" >&2
    exit 2
}
require_number() {
    local least=1
    [[ $1 != NODE_RANK ]] || least=0
    [[ $2 =~ ^(0|[1-9][0-9]{0,8})$ && $2 -ge $least ]] || fail "$1 is '$2'; give a whole number from $least"
}
require_switch() {
    [[ $2 == true || $2 == false ]] || fail "$1 is '$2'; give true or false"
}

case ${1:-} in
    -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit 0 ;;
esac
given=()
while [[ $# -gt 0 && $1 != --* ]]; do
    given+=("$1")
    shift
done
((${#given[@]} <= 18)) || fail "${#given[@]} parameters, at most 18 are known; further ones must be flags of train"
NNODES=${given[0]:-1}
GPUS_PER_NODE=${given[1]:-8}
NODE_RANK=${given[2]:-0}
MASTER_ADDR=${given[3]:-127.0.0.1}
MP=${given[4]:-1}
PP=${given[5]:-1}
USE_FP16=${given[6]:-true}
ACTIVATION_CHECKPOINT=${given[7]:-false}
MICRO_BATCH=${given[8]:-4}
GLOBAL_BATCH=${given[9]:-4}
NUM_LAYER=${given[10]:-24}
RUN_COMMIT=${given[11]:-01b1d32}
TRAIN_ITERS=${given[12]:-220}
LOG_PERIOD=${given[13]:-100}
CHECKPOINT_PATH=${given[14]:-checkpoints/gpt2}
VOCAB=${given[15]:-gpt2-vocab.json}
MERGE=${given[16]:-gpt2-merges.txt}
DATA=${given[17]:-my-gpt2_text_document}
SAVE=${SAVE:-true}
USE_DEEPSPEED=${USE_DEEPSPEED:-true}
for name in NNODES GPUS_PER_NODE NODE_RANK MP PP MICRO_BATCH GLOBAL_BATCH NUM_LAYER TRAIN_ITERS LOG_PERIOD; do
    require_number "$name" "${!name}"
done
for name in USE_FP16 ACTIVATION_CHECKPOINT SAVE USE_DEEPSPEED; do
    require_switch "$name" "${!name}"
done
[[ $RUN_COMMIT != */* ]] || fail "RUN_COMMIT is '$RUN_COMMIT'; it names a folder of logs, so give it without a slash"

here=$(cd "$(dirname "$0")" && pwd -P)
if [[ -d $here/../../src/meshwright ]]; then # a clone works without an install
    export PYTHONPATH="$here/../../src${PYTHONPATH:+:$PYTHONPATH}"
fi

flags=(--num-layers "$NUM_LAYER" --hidden-size 1024 --num-attention-heads 16 --seq-length 1024
    --max-position-embeddings 1024 --micro-batch-size "$MICRO_BATCH" --global-batch-size "$GLOBAL_BATCH"
    --lr 0.00015 --train-iters "$TRAIN_ITERS" --lr-decay-iters 320000 --lr-decay-style cosine
    --lr-warmup-fraction .01 --vocab-file "$VOCAB" --merge-file "$MERGE" --data-path "$DATA"
    --log-interval "$LOG_PERIOD" --eval-interval 1000 --eval-iters 10
    --nvidia-smi-at $((TRAIN_ITERS < 99 ? TRAIN_ITERS : 99))
    --tensor-model-parallel-size "$MP" --pipeline-model-parallel-size "$PP" --DDP-impl local)
if $SAVE; then # a benchmark replaces the checkpoint of the one before
    flags+=(--save "$CHECKPOINT_PATH" --save-overwrite --save-interval 10000)
fi
if $USE_FP16; then flags+=(--fp16); fi
if $ACTIVATION_CHECKPOINT; then flags+=(--checkpoint-activations); fi
if $USE_DEEPSPEED; then
    file=ds_config.json # of each machine its own: they may share this folder
    if [[ $NODE_RANK != 0 ]]; then file=ds_config_$NODE_RANK.json; fi
    cat >"$file" <<END
{
  "train_micro_batch_size_per_gpu": $MICRO_BATCH,
  "train_batch_size": $GLOBAL_BATCH,
  "gradient_clipping": 1.0,
  "zero_optimization": {
    "stage": 1
  },
  "fp16": {
    "enabled": $USE_FP16,
    "loss_scale": 0,
    "loss_scale_window": 500,
    "hysteresis": 2,
    "min_loss_scale": 1,
    "initial_scale_power": 12
  },
  "steps_per_print": 2000,
  "wall_clock_breakdown": false
}
END
    flags+=(--deepspeed --deepspeed_config "./$file" --zero-stage 1)
    if $ACTIVATION_CHECKPOINT; then flags+=(--deepspeed-activation-checkpointing); fi
fi

# torch.distributed.launch would turn every status into 1; --wait is for the person who goes to
# the next machine.
command=(python3 -m meshwright launch --nproc_per_node "$GPUS_PER_NODE" --nnodes "$NNODES" --node_rank "$NODE_RANK"
    --master_addr "$MASTER_ADDR" --master_port "${MASTER_PORT:-6000}" --wait 600 train "${flags[@]}" "$@")

precision=FP32
if $USE_FP16; then precision=FP16; fi
logs=$here/test_logs/$RUN_COMMIT/${NNODES}n${GPUS_PER_NODE}g
mkdir -p "$logs"
log=$logs/Megatron-Deepspeed_gpt2_nl${NUM_LAYER}_nah16_hs1024_${precision}_ac${ACTIVATION_CHECKPOINT}_mp${MP}_pp${PP}
log+=_mb${MICRO_BATCH}_gb${GLOBAL_BATCH}_${NNODES}n${GPUS_PER_NODE}g_$(date +%Y%m%d_%H%M%S%N).log
{
    printf 'Run cmd'
    printf ' %q' "${command[@]}"
    printf '\n'
    "${command[@]}"
} 2>&1 | tee -i "$log" # -i: after Ctrl-C the training still saves and says so

# Of the benchmarks that were moved aside, the last one stays. Other trainings of this folder, which
# have not both of these settings, are left alone. -t: the last one that was moved comes first.
if $SAVE && [[ $NODE_RANK == 0 ]]; then
    kept=""
    while read -r folder; do
        grep -qx 'save_interval = 10000' "$folder/config.toml" 2>/dev/null || continue
        grep -q '^nvidia_smi_at = \[' "$folder/config.toml" || continue
        if [[ -n $kept ]]; then
            rm -rf -- "$folder"
            echo "removed $folder, an earlier benchmark; $kept is kept"
        fi
        kept=${kept:-$folder}
    done < <(ls -1dt "$CHECKPOINT_PATH"/replaced-* 2>/dev/null)
fi
