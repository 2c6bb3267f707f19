#!/usr/bin/env bash
# Megatron-LM's documented 345M command on one GPU (in bfloat16, 200 steps), undisturbed, then killed with SIGKILL and
# resumed by the same command; both again with --deterministic-mode. Prints how many of the 200 losses differ.
# usage: benchmarks/gpu_resume.sh OUTPUT_DIRECTORY DATA_PREFIX VOCAB_FILE MERGE_FILE SCRATCH_DIRECTORY
out=$1 data=$2 vocab=$3 merges=$4 scratch=$5
mkdir -p "$out" "$scratch"
args="--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024
  --micro-batch-size 1 --global-batch-size 2 --lr 0.00015 --train-iters 200 --lr-decay-iters 200 --lr-decay-style cosine
  --min-lr 1.0e-5 --weight-decay 1e-2 --lr-warmup-fraction 0 --clip-grad 1.0 --bf16
  --data-path $data --vocab-file $vocab --merge-file $merges --data-impl mmap --split 700,200,100
  --log-interval 10 --save-interval 50 --eval-interval 1000 --eval-iters 10"
report() { python3 -m meshwright report --losses "$1"; }
for mode in "" --deterministic-mode; do
  name=plain$mode
  for kind in undisturbed killed; do
    run=$scratch/$name-$kind
    rm -rf "$run"
    command="torchrun pretrain_gpt.py $args $mode --save $run --load $run"
    if [ $kind = killed ]; then
      $command >"$out/$name-$kind-1.log" 2>&1 &
      until grep -qs "iteration *120/" "$out/$name-$kind-1.log"; do sleep 0.2; done
      pkill -9 -f "pretrain_gpt.py .*$run" || true
      wait
    fi
    $command >"$out/$name-$kind.log" 2>&1 || tail -5 "$out/$name-$kind.log"
    report "$run" >"$out/$name-$kind.losses"
    grep -E "iteration +200/" "$out/$name-$kind.log" | sed -E 's/.*elapsed time per iteration \(ms\): ([0-9.]+) .*lm loss: ([0-9.E+-]+) .*tokens per second: ([0-9]+) .*memory \(GiB\): ([0-9.]+).*/'"$name $kind"': \1 ms a step, \3 tokens\/s, loss \2, peak \4 GiB/' | tee -a "$out/resume.txt"
    rm -rf "$run"/iter_*
  done
  differing=$(diff "$out/$name-undisturbed.losses" "$out/$name-killed.losses" | grep -c '^<')
  python3 - "$out/$name-undisturbed.losses" "$out/$name-killed.losses" <<'P' | tee -a "$out/resume.txt"
import sys
a, b = ([float.fromhex(line.split()[1]) for line in open(p)] for p in sys.argv[1:])
print(f"  steps {len(a)} and {len(b)}, largest difference of losses {max(abs(x - y) for x, y in zip(a, b)):.3g}")
P
  echo "  differing lines (loss, gradient norm, rate): $differing of 200" | tee -a "$out/resume.txt"
done
grep -h "saving\|successfully saved" "$out/plain-undisturbed.log" | head -2
