#!/usr/bin/env bash
# Train with a LiBai config; on each machine:
#
#   bash tools/train.sh tools/train_net.py CONFIG.py GPUS [--resume|--eval-only|--fast-dev-run] \
#       [key=value ...] [--flag of meshwright train ...]
#
# Environment: NODE machines (1), NODE_RANK this one's number (0), ADDR and PORT of machine 0.
set -euo pipefail
[[ ${1:-} != -h && ${1:-} != --help ]] || { sed -n '2,/^set/s/^# \{0,1\}//p' "$0" && exit 0; }
(($# > 2)) || { echo "usage: train.sh tools/train_net.py CONFIG.py GPUS [flags] [key=value ...]" >&2 && exit 2; }
source=$(cd "$(dirname "$0")" && pwd -P)/../../../src
[[ ! -d $source/meshwright ]] || export PYTHONPATH="$source${PYTHONPATH:+:$PYTHONPATH}" # no install is needed
python3 -m meshwright launch --nproc_per_node "$3" --nnodes "${NODE:-1}" --node_rank "${NODE_RANK:-0}" \
    --master_addr "${ADDR:-127.0.0.1}" --master_port "${PORT:-12345}" --wait 600 "$1" --config-file "$2" "${@:4}"
