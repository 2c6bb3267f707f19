#!/usr/bin/env bash
# Benchmark a GPT with a LiBai config; on each machine:
#
#   bash tools/args_libai_gpt2.sh CONFIG [NNODES] [GPUS_PER_NODE] [NODE_RANK] [MASTER_ADDR] [MP] [PP] \
#       [USE_FP16] [ACTIVATION_CHECKPOINT] [MICRO_BATCH] [GLOBAL_BATCH] [NUM_LAYER] [RUN_COMMIT] \
#       [TRAIN_ITERS] [LOG_PERIOD] [key=value ...] [--flag of meshwright train ...]
#
# The log is test_logs/RUN_COMMIT/NnGg/LibAI_gpt2_.../output.log; train.checkpointer.period=N saves.
set -euo pipefail
fail() {
    echo "${0##*/}: $*" >&2
    exit 2
}
[[ ${1:-} != -h && ${1:-} != --help ]] || { sed -n '2,/^set/s/^# \{0,1\}//p' "$0" && exit 0; }
p=()
while [[ $# -gt 0 && $1 != --* && $1 != *=* ]]; do
    p+=("$1")
    shift
done
((${#p[@]} > 0 && ${#p[@]} < 16)) || fail "${#p[@]} parameters; give CONFIG and at most 14 more, see this script's head"
[[ -f ${p[0]} ]] || fail "there is no config ${p[0]}"
[[ "${p[7]:-true} ${p[8]:-false}" =~ ^([Tt]rue|[Ff]alse)\ ([Tt]rue|[Ff]alse)$ ]] ||
    fail "USE_FP16 is ${p[7]:-true} and ACTIVATION_CHECKPOINT ${p[8]:-false}; give true or false"
[[ ${p[13]:-220} =~ ^[1-9][0-9]{0,8}$ ]] || fail "TRAIN_ITERS is ${p[13]}; give a whole number from 1"
[[ ${p[12]:-} != */* ]] || fail "RUN_COMMIT is ${p[12]}; it names a folder of logs, so give it without a slash"
precision=FP16
[[ ${p[7]:-true} == [Tt]rue ]] || precision=FP32
folder=${p[1]:-1}n${p[2]:-8}g
log=test_logs/${p[12]:-01b1d32}/$folder/LibAI_gpt2_nl${p[11]:-24}_nah16_hs1024_${precision}_ac${p[8]:-false}
log+=_mp${p[5]:-1}_pp${p[6]:-1}_mb${p[9]:-4}_gb${p[10]:-4}_${folder}_$(date +%Y%m%d_%H%M%S%N)
mkdir -p "$log"
echo "LOG_FILENAME=$log"
tools=$(cd "$(dirname "$0")" && pwd -P)
NODE=${p[1]:-1} NODE_RANK=${p[3]:-0} ADDR=${p[4]:-127.0.0.1} bash "$tools/train.sh" "$tools/train_net.py" "${p[0]}" \
    "${p[2]:-8}" "model.cfg.num_layers=${p[11]:-24}" "train.dist.pipeline_num_layers=${p[11]:-24}" \
    "train.train_micro_batch_size=${p[9]:-4}" "train.global_batch_size=${p[10]:-4}" \
    "train.dist.tensor_parallel_size=${p[5]:-1}" "train.dist.pipeline_parallel_size=${p[6]:-1}" \
    "train.amp.enabled=${p[7]:-true}" "train.activation_checkpoint.enabled=${p[8]:-false}" \
    "train.train_iter=${p[13]:-220}" "train.log_period=${p[14]:-100}" "train.output_dir=$log" "$@" 2>&1 |
    tee -i "$log/output.log" # -i: after Ctrl-C the training still ends in order
