# After the mends: all layouts once more, the time of each step in the log, tests of what changed: two GPUs, seven minutes.
#     OUT=FOLDER bash second.sh, in the root of the project
set -u
here=$(dirname $0)
export PYTHONPATH=$PWD/src:${PYTHONPATH:-} PYTHONUNBUFFERED=1 NCCL_NVLS_ENABLE=0
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | head -1
common="--mock-data --vocab-size 50257 --lr 1e-4 --log-interval 1 --eval-interval 6 --eval-iters 2 --train-iters 14 --seq-length 1024 --max-position-embeddings 1024"
steps() {  # name, then the command: iteration, time and TFLOPs of each line, wall time between lines beside it
    name=$1; shift
    timeout 150 "$@" > /tmp/$name.txt 2>&1; echo "$name: status $?"
    grep -oE "iteration +[0-9]+/|elapsed time per iteration \(ms\): [0-9.]+|TFLOPs: [0-9.]+" /tmp/$name.txt | paste - - - | sed -E 's/ +/ /g; s/elapsed time per iteration/time/'
}
steps zero3 python3 -m meshwright launch --nproc-per-node 2 train --preset gpt2-1.5b $common --bf16 --zero-stage 3 --micro-batch-size 4 --global-batch-size 16
steps recomputed python3 -m meshwright train --preset gpt2-1.5b $common --fp16 --checkpoint-activations --micro-batch-size 8 --global-batch-size 16
steps graphs python3 -m meshwright train --preset gpt2-345m $common --bf16 --micro-batch-size 16 --global-batch-size 16
CUDA_VISIBLE_DEVICES=1 timeout 300 python3 -m pytest -n 12 -p no:cacheprovider -m "not long" tests/kernels/test_decode.py tests/generation \
    tests/training/test_graph.py tests/training/test_loop.py tests/training/test_gone_back.py tests/test_cuda_graphs.py tests/test_device.py tests/ranks \
    tests/parallel tests/verify > /tmp/tests.txt 2>&1 &
JOBS=5 timeout 300 python3 $here/verify.py /tmp/verify
wait
grep -E "^(FAILED|ERROR)|passed|failed" /tmp/tests.txt | cut -c1-200 | tail -40
cp /tmp/tests.txt $OUT/tests.txt
tar czf $OUT/verify.tar.gz -C /tmp verify zero3.txt recomputed.txt graphs.txt
