# Layouts of two GPUs, tests and kernels, and 124M: four GPUs, nine minutes.
#     OUT=FOLDER FOLDERS="..." bash first.sh, in the root of the project, with FOLDERS of installed packages
# Two GPUs: drawn layouts, on cores that nothing else uses. One: tests of fp8 and graphs, kernels beside torch.compile, generation, random cases.
# One: 124M, a run at a time.
set -u
given=${PYTHONPATH:-}
export PYTHONPATH=$PWD/src:$given PYTHONUNBUFFERED=1 NCCL_NVLS_ENABLE=0 OMP_NUM_THREADS=2
since() { echo $((SECONDS - began)); }
began=$SECONDS LIMIT=${LIMIT:-540} root=$PWD
back=$OUT OUT=/tmp/out; rm -rf $OUT; mkdir -p $OUT
(while sleep 20; do tar czf $back/all.part -C $OUT . 2> /dev/null && mv $back/all.part $back/all.tar.gz; done) & archiving=$!
plans() {
    local big="--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 2048 --micro-batch-size 1 --vocab-size 50257 --hidden-dropout 0 --attention-dropout 0 --bf16 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --world-size 2"
    CUDA_VISIBLE_DEVICES=0,1 timeout $LIMIT taskset -c 0-15 python3 benchmarks/plan_cases.py $OUT/two-gpus.jsonl --ranks 2 --seed 62 --seconds $((LIMIT - 60)) --first \
        "$big --global-batch-size 1 --tensor-model-parallel-size 2 --sequence-parallel" "$big --global-batch-size 2 --zero-stage 3" > $OUT/two-gpus.txt 2>&1
}
checks() {
    export CUDA_VISIBLE_DEVICES=2
    timeout 130 taskset -c 16-31 python3 -m pytest -q -n 6 -p no:cacheprovider -m "not long" tests/kernels/test_fp8.py tests/kernels/test_fp8_fused.py tests/training/test_graph.py tests/test_cuda_graphs.py > $OUT/tests.txt 2>&1
    timeout 180 taskset -c 16-31 python3 benchmarks/gpu_kernels.py --compiled --json $OUT/kernels.json > $OUT/kernels.txt 2>&1
    timeout 110 taskset -c 16-31 python3 benchmarks/gpu_decode.py --torch --quick --sizes 345M > $OUT/decode.txt 2>&1
    mkdir -p /tmp/f && cd /tmp/f
    PYTHONPATH=$root/src:$root/tests:$given timeout $((LIMIT - $(since))) taskset -c 16-31 python3 -m fuzz --device cuda --cases 200 --jobs 6 --seed 52 --seconds $((LIMIT - 60 - $(since))) > $OUT/fuzz.txt 2>&1
}
learning() {
    python3 benchmarks/learning_text.py /tmp/large $FOLDERS --megabytes 225 --workers 24 --keep-similar > $OUT/text.txt 2>&1
    echo "text after $(since) s" >> $OUT/text.txt
    python3 benchmarks/learning.py /tmp/runs --data /tmp/large/corpus_text_document --tokenizer /tmp/large/tokenizer --size 124M --points 8 --held-out 1e6 --gpus 3 \
        --seconds $((LIMIT - $(since) - 20)) --grace 10 --flags "--bf16 --device cuda" recipe@40e6 recipe@20e6 tuned,lr=3e-4,global-batch-size=16,lr-warmup-fraction=0.1@60e6 \
        tuned,lr=6e-4,global-batch-size=8,lr-warmup-fraction=0.1@60e6 > $OUT/large.txt 2>&1
    cp /tmp/runs/figures.jsonl $OUT/large.jsonl
}
plans & planning=$!
checks & checking=$!
learning & training=$!
wait $planning $checking $training
cut -c1-150 $OUT/two-gpus.txt | tail -n 20; tail -n 5 $OUT/tests.txt; cut -c1-400 $OUT/fuzz.txt | tail -n 12; cat $OUT/decode.txt; tail -n 12 $OUT/large.txt; tail -n 5 $OUT/text.txt
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader; lscpu | grep "Model name"
kill $archiving; tar czf $back/all.tar.gz -C $OUT .
