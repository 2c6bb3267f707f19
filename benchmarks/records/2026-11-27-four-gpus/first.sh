# Token files, tests of kernels and updates, Muon's update, the best rates with µP, and what helps quickstart's model: six minutes.
#     OUT=FOLDER FOLDERS="..." PROSE=FILE bash first.sh, in the root of the project, with FOLDERS of installed packages
set -u
export PYTHONPATH=src:${PYTHONPATH:-} PYTHONUNBUFFERED=1 OMP_NUM_THREADS=2
since() { echo $((SECONDS - began)); }
began=$SECONDS
LIMIT=${LIMIT:-555}
back=$OUT OUT=/tmp/out; mkdir -p $OUT  # few files may come back: one archive
(while sleep 30; do tar czf $back/all.part -C $OUT . && mv $back/all.part $back/all.tar.gz; done) & archiving=$!
texts() {
    python3 benchmarks/learning_text.py /tmp/small $FOLDERS --megabytes 100 --workers 10 > $OUT/text.txt 2>&1 &
    python3 benchmarks/learning_text.py /tmp/large $FOLDERS --megabytes 225 --workers 16 --keep-similar > $OUT/text-large.txt 2>&1 &
    python3 -m meshwright train-tokenizer --input $PROSE --vocab-size 4096 --output /tmp/prose-tokenizer > $OUT/prose.txt 2>&1
    python3 -m meshwright preprocess --input $PROSE --output-prefix /tmp/prose --tokenizer /tmp/prose-tokenizer --append-eod >> $OUT/prose.txt 2>&1
    echo "prose after $(since) s" >> $OUT/prose.txt
}
quickstart() {  # what helps a model of 1.3M parameters in 1.5 M tokens
    local base="--data-path /tmp/prose_text_document --tokenizer /tmp/prose-tokenizer --split 97,3,0 --num-layers 4 --hidden-size 128 --num-attention-heads 2 --swiglu
    --position-embedding-type rope --qk-layernorm --normalization RMSNorm --disable-bias-linear --hidden-dropout 0 --attention-dropout 0 --seq-length 128
    --micro-batch-size 8 --optimizer muon --adam-beta2 0.98 --weight-decay 0.1 --lr-decay-style linear --lr 8e-3 --min-lr 8e-5 --lr-warmup-iters 50
    --train-iters 1500 --eval-interval 1500 --eval-iters 100 --log-interval 100 --no-tensorboard --bf16 --device cuda --compile off --fused-kernels off --cuda-graphs off"
    printf '%s\n' "" "--seed 2" "--seed 3" "--muon-split-qkv on" "--embedding-lr 4e-3" "--embedding-lr 1.6e-2" "--embedding-lr 3.2e-2" "--vector-lr 4e-3" "--vector-lr 3.2e-2" \
        "--untie-embeddings-and-output-weights" "--untie-embeddings-and-output-weights --head-lr 4e-3" "--untie-embeddings-and-output-weights --head-lr 2e-3 --embedding-lr 2e-2" \
        "--zero-init-projections" "--cautious-weight-decay" "--weight-decay-incr-style rate --weight-decay 0.15" "--weight-decay 0" "--weight-decay 0.03" "--weight-decay 0.3" \
        "--lr 4e-3" "--lr 1.2e-2" "--lr 1.6e-2" "--lr 2.4e-2" "--adam-beta2 0.95" "--adam-beta2 0.99" "--micro-batch-size 4 --train-iters 3000" "--micro-batch-size 4 --train-iters 3000 --lr 6e-3" \
        "--micro-batch-size 16 --train-iters 750" "--seq-length 256 --micro-batch-size 4" "--seq-length 64 --micro-batch-size 16" "--seq-length 256 --micro-batch-size 2 --train-iters 3000" \
        "--squared-relu" "--muon-momentum 0.9" "--muon-momentum 0.98" "--clip-grad 0" "--final-logit-softcapping 15" "--min-lr 0" "--lr-warmup-iters 150" "--lr-warmup-iters 10" \
        "--num-attention-heads 1" "--num-attention-heads 4" "--hidden-size 192 --num-attention-heads 3" "--num-layers 6" "--num-layers 3" "--num-layers 2 --hidden-size 192 --num-attention-heads 3" \
        "--init-method-std 0.01" "--init-method-std 0.04" "--no-qk-layernorm" "--packing best-fit" "--ema 0.99" "--train-iters 3000" "--train-iters 800" \
        "--muon-split-qkv on --zero-init-projections --embedding-lr 1.6e-2 --cautious-weight-decay" > /tmp/variants
    one() { n=$1; shift; python3 -m meshwright train $base "$@" --run-dir /tmp/q/$n > /tmp/q/$n.txt 2>&1
        python3 - "$n" "$*" <<'P' >> $OUT/quickstart.txt
import json, sys
rows = [json.loads(line) for line in open(f"/tmp/q/{sys.argv[1]}/metrics.jsonl")]
loss = [row["loss"] for row in rows if row["event"] == "validation"][-1]
print(f"{loss:.4f} {sum(row['ms'] for row in rows if row['event'] == 'step')/1e3:.1f} s  {sys.argv[2]}", flush=True)
P
    }
    export -f one; export base OUT; mkdir -p /tmp/q
    CUDA_VISIBLE_DEVICES=0 xargs -a /tmp/variants -d '\n' -P 14 -I{} bash -c 'one $(echo "$1" | md5sum | cut -c1-8) $1' _ {} 2> $OUT/quickstart-errors.txt
    echo "quickstart after $(since) s" >> $OUT/quickstart.txt
}
tests() {
    CUDA_VISIBLE_DEVICES=0 timeout 200 python3 -m pytest -q -n 6 --maxfail=20 -p no:cacheprovider -m "not long" tests/kernels/test_adamw.py tests/kernels/test_moments.py \
        tests/kernels/test_muon_passes.py tests/optim tests/training/test_graph.py tests/training/test_fit.py tests/test_cuda_graphs.py > $OUT/tests.txt 2>&1
    echo "tests after $(since) s" >> $OUT/tests.txt
    CUDA_VISIBLE_DEVICES=0 timeout 60 python3 benchmarks/gpu_muon.py --models 345M > $OUT/muon.txt 2>&1
    CUDA_VISIBLE_DEVICES=0 timeout 150 python3 benchmarks/mup_rates.py /tmp/mup $PROSE --jobs 12 --device cuda > $OUT/mup.txt 2>&1
    cp /tmp/mup/mup_rates.svg $OUT/; echo "mup after $(since) s" >> $OUT/mup.txt
    (cd /tmp && PYTHONPATH=$OLDPWD/src:$OLDPWD/tests:$PYTHONPATH CUDA_VISIBLE_DEVICES=0 timeout $((LIMIT - $(since))) python3 -m fuzz --device cuda --cases 60 --jobs 6 --seed 51) > $OUT/fuzz.txt 2>&1
}
tests & testing=$!
texts; quickstart & trying=$!
while ! [ -e /tmp/large/corpus_text_document.idx ] || ! [ -e /tmp/small/corpus_text_document.idx ]; do sleep 1; [ $(since) -gt 120 ] && break; done
sleep 2; echo "texts after $(since) s" >> $OUT/text.txt
wait $testing $trying
sort $OUT/quickstart.txt; tail -n 3 $OUT/quickstart-errors.txt; tail -n 25 $OUT/tests.txt | cut -c1-160; tail -n 20 $OUT/muon.txt $OUT/mup.txt; tail -n 12 $OUT/fuzz.txt | cut -c1-200
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader; lscpu | grep -E "Model name|amx" | cut -c1-80
kill $archiving; tar czf $back/all.tar.gz -C $OUT .
