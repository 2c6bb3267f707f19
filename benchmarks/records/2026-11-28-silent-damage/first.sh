# All layouts of two GPUs beside one process, and the tests that use a GPU: two GPUs, six minutes.
#     OUT=FOLDER bash first.sh, in the root of the project
set -u
here=$(dirname $0)
export PYTHONPATH=$PWD/src:${PYTHONPATH:-} PYTHONUNBUFFERED=1 NCCL_NVLS_ENABLE=0
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | head -1; nproc
CUDA_VISIBLE_DEVICES=1 timeout 400 python3 -m pytest -q -n 12 -p no:cacheprovider -m "not long" tests/kernels tests/optim tests/generation/test_decoder.py \
    tests/training/test_graph.py tests/test_cuda_graphs.py tests/test_device.py tests/model > /tmp/tests.txt 2>&1 &
JOBS=5 timeout 540 python3 $here/verify.py /tmp/verify
wait
grep -E "^(FAILED|ERROR)|passed|failed" /tmp/tests.txt | cut -c1-200 | tail -40
cp /tmp/tests.txt $OUT/tests.txt
tar czf $OUT/verify.tar.gz -C /tmp verify
