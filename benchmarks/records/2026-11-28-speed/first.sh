# The rows of speed that earlier records miss, with where their time goes: four GPUs, under ten minutes.
#     OUT=FOLDER bash first.sh, in the root of the project
# GPU 0: rows of one GPU. GPU 1: generation of one text, tests, the plan's memory. GPUs 2 and 3: layouts.
set -u
given=${PYTHONPATH:-}
export PYTHONPATH=$PWD/src:$given PYTHONUNBUFFERED=1 NCCL_NVLS_ENABLE=0
LIMIT=${LIMIT:-560} began=$SECONDS back=$OUT OUT=/tmp/out
left() { echo $((LIMIT - SECONDS + began)); }
rm -rf $OUT; mkdir -p $OUT
(while sleep 15; do tar czf $back/all.part -C $OUT . 2> /dev/null && mv $back/all.part $back/all.tar.gz; done) & archiving=$!
bench() { timeout $(left) python3 -m meshwright bench --profile "$@"; }
one() {
    export CUDA_VISIBLE_DEVICES=0
    bench 345m --rows '^345M( micro-batch 64| accumulation 4 x 16| micro-batch 4|, 16 micro-batches| Muon.*)?$' --out $OUT/one
    bench 345m --rows '^345M( Muon)?$' --out $OUT/muon-64k -- --micro-batch-size 64 --global-batch-size 64
}
decode() {
    export CUDA_VISIBLE_DEVICES=1
    timeout 60 python3 benchmarks/gpu_decode.py --check > $OUT/decode-check.txt 2>&1
    [ -e trials/decode_try.py ] && timeout 190 python3 trials/decode_try.py 345M 1.3B > $OUT/decode-try.txt 2>&1
    timeout 60 python3 benchmarks/gpu_decode.py --profile --rows 1 8 > $OUT/decode-profile.txt 2>&1
    timeout 90 python3 benchmarks/gpu_decode.py --rows 1 8 > $OUT/decode.txt 2>&1
    timeout 100 python3 -m pytest -q -n 6 -p no:cacheprovider -m "not long" tests/kernels/test_decode.py tests/generation > $OUT/tests.txt 2>&1
    S="--num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 --vocab-size 50257 --hidden-dropout 0 --attention-dropout 0 --bf16 --cuda-graphs off --micro-batch-size 8"
    D="--vocab-size 50257 --hidden-dropout 0 --attention-dropout 0"
    timeout $(left) python3 benchmarks/plan_cases.py $OUT/one-gpu.jsonl --seed 64 --seconds $(($(left) - 20)) --first \
        "--num-layers 36 --hidden-size 1280 --num-attention-heads 20 --seq-length 4096 --micro-batch-size 4 --global-batch-size 4 --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights $D --bf16 --fp8-format hybrid --recompute-granularity full --recompute-method uniform --recompute-num-layers 1" \
        "--num-layers 7 --hidden-size 768 --num-attention-heads 12 --seq-length 2048 --micro-batch-size 1 --global-batch-size 3 $D --bf16" \
        "--num-layers 20 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --micro-batch-size 8 --global-batch-size 24 --vocab-size 50257 --qk-layernorm --hidden-dropout 0.1 --attention-dropout 0.1 --fp16 --fused-kernels off --compile off --cuda-graphs off" \
        "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 4096 --micro-batch-size 4 --global-batch-size 8 --qk-layernorm $D --bf16 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1" \
        "$S --global-batch-size 8" > $OUT/one-gpu.txt 2>&1
}
layouts() {
    export CUDA_VISIBLE_DEVICES=2,3
    bench layouts --gpus 2 --rows '^(345M|1.3B)( DP2)?$' --out $OUT/layouts
    bench layouts --gpus 2 --rows '^2.7B( TP2 SP)?$' --out $OUT/layouts-2.7B -- --micro-batch-size 4 --global-batch-size 4
    bench layouts --gpus 2 --rows '^2.7B DP2 ZeRO-3$' --out $OUT/layouts-zero-3 -- --micro-batch-size 4 --global-batch-size 8
}
(one) > $OUT/one.txt 2>&1 & a=$!
(decode) & b=$!
(layouts) > $OUT/layouts.txt 2>&1 & c=$!
wait $a $b $c
cat $OUT/decode-try.txt; tail -n 4 $OUT/decode-check.txt $OUT/tests.txt; cat $OUT/decode.txt; grep -v "^ *$" $OUT/one.txt $OUT/layouts.txt | cut -c1-150 | tail -n 60
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
kill $archiving; tar czf $back/all.tar.gz -C $OUT .
