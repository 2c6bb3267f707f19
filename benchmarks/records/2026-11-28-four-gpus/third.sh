# The plan once more after its mends, the table's gradient by other tiles, and tests of them: four GPUs, under five minutes.
#     OUT=FOLDER bash third.sh, in the root of the project
# Two GPUs: layouts that were off, then drawn ones. One: configurations that were off, then drawn ones. One: a profile of the machine, tiles, tests.
set -u
given=${PYTHONPATH:-}
export PYTHONPATH=$PWD/src:$given PYTHONUNBUFFERED=1 NCCL_NVLS_ENABLE=0 OMP_NUM_THREADS=2
since() { echo $((SECONDS - began)); }
began=$SECONDS LIMIT=${LIMIT:-290} root=$PWD
back=$OUT OUT=/tmp/out; rm -rf $OUT; mkdir -p $OUT
(while sleep 15; do tar czf $back/all.part -C $OUT . 2> /dev/null && mv $back/all.part $back/all.tar.gz; done) & archiving=$!
S="--num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 --vocab-size 50257 --hidden-dropout 0 --attention-dropout 0 --bf16 --world-size 2 --cuda-graphs off --micro-batch-size 8"
D="--vocab-size 50257 --hidden-dropout 0 --attention-dropout 0"
two() {
    CUDA_VISIBLE_DEVICES=0,1 timeout $LIMIT taskset -c 0-23 python3 benchmarks/plan_cases.py $OUT/two-gpus.jsonl --ranks 2 --seed 63 --seconds $((LIMIT - 35)) --first \
        "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 --micro-batch-size 8 --global-batch-size 64 --vocab-size 50257 --z-loss-coef 1e-4 --hidden-dropout 0.1 --attention-dropout 0.1 --fp16 --recompute-granularity full --recompute-method block --recompute-num-layers 6 --pipeline-model-parallel-size 2 --world-size 2" \
        "--num-layers 14 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 --micro-batch-size 8 --global-batch-size 8 --final-logit-softcapping 30 $D --bf16 --optimizer muon --cuda-graphs off --tensor-model-parallel-size 2 --sequence-parallel --world-size 2" \
        "--num-layers 6 --hidden-size 1024 --num-attention-heads 16 --seq-length 4096 --micro-batch-size 1 --global-batch-size 4 --use-parallel-residual $D --recompute-granularity selective --cuda-graphs off --pipeline-model-parallel-size 2 --pipeline-schedule zero-bubble --world-size 2" \
        "$S --global-batch-size 16 --tensor-model-parallel-size 2 --sequence-parallel" "$S --global-batch-size 16 --context-parallel-size 2" > $OUT/two-gpus.txt 2>&1
}
one() {
    CUDA_VISIBLE_DEVICES=2 timeout $LIMIT taskset -c 24-39 python3 benchmarks/plan_cases.py $OUT/one-gpu.jsonl --seed 64 --seconds $((LIMIT - 30)) --first \
        "--num-layers 36 --hidden-size 1280 --num-attention-heads 20 --seq-length 4096 --micro-batch-size 4 --global-batch-size 4 --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights $D --bf16 --fp8-format hybrid --recompute-granularity full --recompute-method uniform --recompute-num-layers 1" \
        "--num-layers 7 --hidden-size 768 --num-attention-heads 12 --seq-length 2048 --micro-batch-size 1 --global-batch-size 3 $D --bf16" \
        "--num-layers 20 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --micro-batch-size 8 --global-batch-size 24 --vocab-size 50257 --qk-layernorm --hidden-dropout 0.1 --attention-dropout 0.1 --fp16 --fused-kernels off --compile off --cuda-graphs off" \
        "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 4096 --micro-batch-size 4 --global-batch-size 8 --qk-layernorm $D --bf16 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1" \
        "${S/ --world-size 2/} --global-batch-size 8" > $OUT/one-gpu.txt 2>&1
}
checks() {
    export CUDA_VISIBLE_DEVICES=3
    timeout 110 taskset -c 40-55 python3 -m meshwright bench --calibrate --out $OUT/profile > $OUT/calibrate.txt 2>&1
    timeout 40 taskset -c 40-55 python3 benchmarks/gpu_kernels.py embedding --sweep > $OUT/embedding.txt 2>&1
    timeout 80 taskset -c 40-55 python3 -m pytest -q -n 6 -p no:cacheprovider -m "not long" tests/kernels/test_embedding.py tests/training/test_graph.py tests/test_cuda_graphs.py tests/test_device.py > $OUT/tests.txt 2>&1
    mkdir -p /tmp/f; cd /tmp/f
    PYTHONPATH=$root/src:$root/tests:$given timeout $((LIMIT - $(since))) taskset -c 40-55 python3 -m fuzz --device cuda --cases 200 --jobs 4 --seed 53 --seconds $((LIMIT - 20 - $(since))) > $OUT/fuzz.txt 2>&1
}
two & a=$!
one & b=$!
checks & c=$!
wait $a $b $c
grep -E "^(measured|failed)" $OUT/two-gpus.txt $OUT/one-gpu.txt | cut -c1-120; tail -n 4 $OUT/tests.txt; tail -n 30 $OUT/embedding.txt; tail -n 5 $OUT/calibrate.txt; cut -c1-300 $OUT/fuzz.txt | tail -n 12
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
kill $archiving; tar czf $back/all.tar.gz -C $OUT .
