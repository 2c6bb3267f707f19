#!/usr/bin/env bash
# Layouts on a machine of two or four GPUs, and the peer beside them. Run from the repository's root.
# usage: benchmarks/gpu_layouts.sh small|large|overhead OUTPUT_DIRECTORY DATA_PREFIX [SECONDS]
#
#   small     345M, 1.3B and megatron-core on three cells of 1.3B     about 280 s: start 25, 345M 30, 1.3B 105, peer 110
#   large     2.7B, eight cells                                       about 400 s with 10 + 20 steps, 220 s with STEPS="4 8"
#   overhead  345M on one GPU: our step against a loop without parallel/                                  about 60 s
#
# SECONDS (default 270): when these have passed, no further cell is begun. STEPS="10 20": steps of a cell before and while its
# time is taken. A step of the 2.7B model takes 2 s on one GPU (8 steps are enough there) and 1.05 to 1.3 s on
# four; the rest of a cell is 2 to 12 s of compiling and 1 to 4 s of profiling. EXTRA: more flags of gpu_layouts.py.
# GPUS: how many of them (default: all that the machine has).
set -u
what=$1 out=$2 data=$3 seconds=${4:-270} steps=${STEPS:-10 20} gpus=${GPUS:-$(nvidia-smi -L | wc -l)}
mkdir -p "$out"
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=8 TORCHINDUCTOR_COMPILE_THREADS=8 PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}"
export NCCL_NVLS_ENABLE=0 TORCH_NCCL_ASYNC_ERROR_HANDLING=1  # NVLink multicast stays off
until=$(($(date +%s) + seconds))
layouts() {
  # shellcheck disable=SC2086
  timeout -k 5 $((seconds + 90)) python3 -m torch.distributed.run --nproc-per-node "$gpus" --max-restarts 6 \
    benchmarks/gpu_layouts.py "$out" "$@" --steps $steps --data "$data" --limit 90 --until "$until" ${EXTRA:-}
}
run() {
  case $what in
    small)
      until=$((until - 110)) # the peer's
      layouts 345M 1.3B
      # shellcheck disable=SC2086
      CUDA_DEVICE_MAX_CONNECTIONS=1 timeout -k 5 150 python3 -m torch.distributed.run --nproc-per-node "$gpus" \
        benchmarks/peer_megatron.py "$out" --model 1.3B --steps $steps --limit 140
      ;;
    large) layouts 2.7B ;;
    overhead) timeout -k 5 $seconds python3 benchmarks/gpu_layouts.py "$out" 345M --overhead --data "$data" --pairs 12 ;;
    *) sed -n 2,11p "$0" && exit 2 ;;
  esac
}
{
  date '+%F %T'
  nvidia-smi --query-gpu=index,name,memory.total,driver_version,power.limit,clocks.sm --format=csv
  nvidia-smi topo -m
  start=$SECONDS
  run
  echo "in all $((SECONDS - start)) s"
} 2>&1 | tee "$out/log.txt"
