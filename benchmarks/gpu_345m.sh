#!/usr/bin/env bash
# Tokens per second and memory of GPT-2 345M by the product's own command, random tokens, for several micro-batches.
# usage: benchmarks/gpu_345m.sh OUTPUT_DIRECTORY
out=$1
mkdir -p "$out"
model="--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024"
run="--lr 1.5e-4 --lr-decay-style cosine --eval-iters 0 --log-interval 5 --mock-data --vocab-size 50257 --bf16"
python3 -c 'import torch; print("torch", torch.__version__, torch.cuda.get_device_name())' | tee "$out/table.txt"
for dropout in 0.1 0.0; do
  for micro in 1 8 32; do
    log=$out/345m-mbs$micro-dropout$dropout.log
    python3 pretrain_gpt.py $model $run --micro-batch-size $micro --global-batch-size $micro --train-iters 25 \
      --hidden-dropout $dropout --attention-dropout $dropout >"$log" 2>&1 || tail -20 "$log"
    grep -E "^ iteration +25/" "$log" | sed -E "s/.*elapsed time per iteration \(ms\): ([0-9.]+) .*tokens per second: ([0-9]+) .*MFU: ([0-9.]+%).*memory \(GiB\): ([0-9.]+).*/micro-batch $micro dropout $dropout: \1 ms a step, \2 tokens\/s, MFU \3, peak \4 GiB/" | tee -a "$out/table.txt"
  done
done
