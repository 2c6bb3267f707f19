# Four GPUs, four minutes: drawn layouts of two GPUs, Muon's share of a step, steps without kernels, random cases, and what helps
# quickstart's model together.
#     OUT=FOLDER PROSE=FILE bash third.sh, in the root of the project
set -u
export PYTHONPATH=src:${PYTHONPATH:-} PYTHONUNBUFFERED=1 OMP_NUM_THREADS=2 NCCL_NVLS_ENABLE=0
since() { echo $((SECONDS - began)); }
began=$SECONDS LIMIT=${LIMIT:-250}
back=$OUT OUT=/tmp/out; mkdir -p $OUT
(while sleep 20; do tar czf $back/all.part -C $OUT . && mv $back/all.part $back/all.tar.gz; done) & archiving=$!
root=$PWD
plans() { CUDA_VISIBLE_DEVICES=0,1 timeout $LIMIT python3 benchmarks/plan_cases.py $OUT/two-gpus.jsonl --ranks 2 --seed 61 --seconds $((LIMIT - 40)) > $OUT/two-gpus.txt 2>&1; }
benches() {
    export CUDA_VISIBLE_DEVICES=2
    timeout 60 python3 benchmarks/gpu_muon.py --models 345M > $OUT/muon.txt 2>&1
    for optimizer in adamw muon; do
        timeout 70 python3 -m meshwright bench 345m --rows '^345M$' --profile --out /tmp/bench-$optimizer -- --optimizer $optimizer --global-batch-size 64 > $OUT/share-$optimizer.txt 2>&1
    done
    timeout $((LIMIT - $(since))) python3 -m meshwright bench options --rows '^345M$|no kernels' --out /tmp/bench-kernels > $OUT/kernels.txt 2>&1
}
fuzzing() {
    export CUDA_VISIBLE_DEVICES=3 PYTHONPATH=$root/src:$root/tests:$PYTHONPATH
    mkdir -p /tmp/f && cd /tmp/f
    timeout 60 python3 -m fuzz --case "$(cat $root/benchmarks/records/2026-11-27-four-gpus/case.txt)" > $OUT/case.txt 2>&1
    timeout $((LIMIT - $(since))) python3 -m fuzz --device cuda --cases 40 --jobs 6 --seed 51 --seconds 60 > $OUT/fuzz.txt 2>&1
}
quickstart() {
    python3 -m meshwright train-tokenizer --input $PROSE --vocab-size 4096 --output /tmp/prose-tokenizer > $OUT/prose.txt 2>&1
    python3 -m meshwright preprocess --input $PROSE --output-prefix /tmp/prose --tokenizer /tmp/prose-tokenizer --append-eod >> $OUT/prose.txt 2>&1
    local base="--data-path /tmp/prose_text_document --tokenizer /tmp/prose-tokenizer --split 97,3,0 --num-layers 4 --hidden-size 128 --num-attention-heads 2 --swiglu
    --position-embedding-type rope --qk-layernorm --normalization RMSNorm --disable-bias-linear --hidden-dropout 0 --attention-dropout 0 --seq-length 128
    --micro-batch-size 8 --optimizer muon --adam-beta2 0.98 --weight-decay 0.1 --lr-decay-style linear --lr 8e-3 --min-lr 8e-5 --lr-warmup-iters 50
    --train-iters 1500 --eval-interval 100000 --eval-iters 100 --log-interval 100 --no-tensorboard --bf16 --device cuda"
    local a="--lr-warmup-iters 150" u="--untie-embeddings-and-output-weights"
    for seed in 1 2; do
        printf "%s --seed $seed\n" "" "$a" "$a --lr 6e-3" "$a --lr 4e-3" "$a --lr 6e-3 --weight-decay 0.3" "$a --lr 6e-3 --muon-momentum 0.9" "$a --lr 6e-3 --init-method-std 0.04" \
            "$a --lr 6e-3 $u" "$a --lr 6e-3 $u --embedding-lr 2e-2" "$a --lr 6e-3 --muon-split-qkv on" "$a --lr 6e-3 --weight-decay 0.3 --muon-momentum 0.9 --muon-split-qkv on --embedding-lr 2e-2" \
            "$a --lr 6e-3 --weight-decay 0.3 --muon-momentum 0.9 --muon-split-qkv on $u --embedding-lr 2e-2 --init-method-std 0.04" "$a --lr 6e-3 $u --seq-length 256 --micro-batch-size 4" \
            "--lr-warmup-iters 75 --train-iters 750 --micro-batch-size 16" "--lr-warmup-iters 75 --train-iters 750 --micro-batch-size 16 --lr 6e-3 $u" "--lr-warmup-iters 75 --train-iters 750 --micro-batch-size 16 --lr 1.2e-2 $u" \
            "--train-iters 750" "--train-iters 750 --lr-warmup-iters 75 --lr 6e-3" "--train-iters 750 --lr-warmup-iters 75 --lr 6e-3 $u --weight-decay 0.3" "--train-iters 3000" "--train-iters 3000 --lr-warmup-iters 300 --lr 6e-3" "--train-iters 3000 --lr-warmup-iters 300 --lr 6e-3 $u --weight-decay 0.3"
    done > /tmp/variants
    one() { n=$1; shift; python3 -m meshwright train $base "$@" --run-dir /tmp/q/$n > /tmp/q/$n.txt 2>&1
        python3 - "$n" "$*" <<'P' >> $OUT/quickstart.txt
import json, sys
rows = [json.loads(line) for line in open(f"/tmp/q/{sys.argv[1]}/metrics.jsonl")]
loss = [row["loss"] for row in rows if row["event"] == "validation"][-1]
print(f"{loss:.4f} {sum(row['ms'] for row in rows if row['event'] == 'step')/1e3:.1f} s  {sys.argv[2]}", flush=True)
P
    }
    export -f one; export base OUT; mkdir -p /tmp/q
    CUDA_VISIBLE_DEVICES=3 timeout $((LIMIT - $(since))) xargs -a /tmp/variants -d '\n' -P 16 -I{} bash -c 'one $(echo "$1" | md5sum | cut -c1-8) $1' _ {} 2> $OUT/quickstart-errors.txt
    echo "quickstart after $(since) s" >> $OUT/quickstart.txt
}
batches() {  # tokens a second of two cores
    export OMP_NUM_THREADS=2
    for turn in 1 2; do for batch in 8 16 32; do
        taskset -c 60,61 python3 -m meshwright train $cpu --micro-batch-size $batch --train-iters $((400 / batch)) --run-dir /tmp/b$turn-$batch > /tmp/b.txt 2>&1
        python3 -c "import json, statistics; print($batch, statistics.median(r['ms'] for r in map(json.loads, open('/tmp/b$turn-$batch/metrics.jsonl')) if r['event'] == 'step') / $batch, 'ms a sample')" >> $OUT/batches.txt 2>&1
    done; done
}
cpu="--data-path /tmp/prose_text_document --tokenizer /tmp/prose-tokenizer --num-layers 4 --hidden-size 128 --num-attention-heads 2 --swiglu --position-embedding-type rope --qk-layernorm --normalization RMSNorm
    --disable-bias-linear --hidden-dropout 0 --attention-dropout 0 --seq-length 128 --optimizer muon --lr 8e-3 --lr-warmup-iters 2 --eval-iters 0 --log-interval 1 --no-tensorboard --bf16 --device cpu"
plans & planning=$!
benches & benching=$!
fuzzing & fuzzing=$!
quickstart & trying=$!
sleep 60; batches & batching=$!
wait $planning $benching $fuzzing $trying $batching
tail -n 12 $OUT/muon.txt $OUT/share-*.txt $OUT/kernels.txt $OUT/case.txt; cut -c1-700 $OUT/fuzz.txt | tail -n 40; sort $OUT/quickstart.txt; cat $OUT/batches.txt; tail -n 3 $OUT/quickstart-errors.txt
cut -c1-150 $OUT/two-gpus.txt | tail -n 30
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
kill $archiving; tar czf $back/all.tar.gz -C $OUT .
