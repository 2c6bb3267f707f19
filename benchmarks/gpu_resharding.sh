#!/usr/bin/env bash
# A run in one layout on two GPUs saves in the background on its way; from there it goes on in other layouts, on one GPU too.
# Prints how far the losses are from those of the run that went on by itself (fp32: the order of sums differs).
# usage: [MORE="more flags"] benchmarks/gpu_resharding.sh OUTPUT_DIRECTORY SCRATCH_DIRECTORY
out=$1 scratch=$2
mkdir -p "$out" "$scratch"
export PYTHONPATH=src:${PYTHONPATH-}
args="--num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 --max-position-embeddings 1024
  --micro-batch-size 2 --global-batch-size 8 --lr 6e-4 --train-iters 20 --lr-decay-iters 20 --min-lr 6e-5
  --weight-decay 0.1 --clip-grad 1.0 --hidden-dropout 0 --attention-dropout 0 --mock-data --vocab-size 50257
  --num-workers 0 --log-interval 1 --eval-iters 0 ${MORE-}"
tp2="--tensor-model-parallel-size 2 --sequence-parallel" pp2="--pipeline-model-parallel-size 2" zero3="--zero-stage 3"
zero1="--zero-stage 1 --overlap-grad-reduce --overlap-param-gather" none=""
run() { # name, GPUs, flags
  torchrun --nproc-per-node "$2" pretrain_gpt.py $args $3 >"$out/$1.log" 2>&1 || tail -5 "$out/$1.log"
}
losses() { python3 -m meshwright report --losses "$1"; }
for first in tp2 zero3 pp2; do
  from=$scratch/$first
  run "$first" 2 "${!first} --save $from --save-interval 10"
  losses "$from" >"$out/$first.losses"
  rm -rf "$from"/iter_0000020 && echo 10 >"$from/latest_checkpointed_iteration.txt"
  for then in $([ $first = tp2 ] && echo zero3 pp2 none) $([ $first = zero3 ] && echo tp2 none) $([ $first = pp2 ] && echo zero1); do
    run "$first-$then" "$([ $then = none ] && echo 1 || echo 2)" "${!then} --load $from --save $scratch/$first-$then --no-save-optim"
    losses "$scratch/$first-$then" >"$out/$first-$then.losses"
    python3 - "$out/$first.losses" "$out/$first-$then.losses" "$first -> $then" <<'P' | tee -a "$out/table.txt"
import sys
a, b = ({line.split()[0]: float.fromhex(line.split()[1]) for line in open(p)} for p in sys.argv[1:3])
both = sorted(set(a) & set(b), key=lambda n: int(n.rstrip(":")))
print(f"{sys.argv[3]}: {len(both)} steps from {both[0]}, largest difference {max(abs(a[n] - b[n]) for n in both):.2e} at losses of {b[both[-1]]:.4f}")
P
    rm -rf "$scratch/$first-$then"
  done
  grep -hE "saving|successfully saved" "$out/$first.log" | head -3 | tee -a "$out/table.txt"
done
