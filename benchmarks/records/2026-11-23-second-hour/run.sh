# On a machine with one GPU and 16 cores, from the root of a clone: windows, tests of the GPU, fuzz.
set -u
OUT=${OUT:-/tmp/second-hour}; mkdir -p "$OUT"
export PYTHONPATH=$PWD/src OMP_NUM_THREADS=1
MODEL="--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear"
TRAIN="--bf16 --lr 1.5e-4 --lr-warmup-iters 2 --hidden-dropout 0 --attention-dropout 0 --clip-grad 1.0 --mock-data --vocab-size 50257 --eval-iters 0 --train-iters 30 --log-interval 10 --no-tensorboard --seq-length 8192 --micro-batch-size 2 --global-batch-size 2"
for window in "" "--window-size 1023,0" "--window-size 1023,0 --window-attn-skip-freq 2" ""; do
  echo "== 345M, 8,192 positions: ${window:-no window}"
  OMP_NUM_THREADS=8 python3 -m meshwright train $MODEL $TRAIN $window --run-dir "$(mktemp -d)" 2>&1 | grep -E "iteration +30/"
done
python3 -m pytest -n 4 -q -m "not long" tests/kernels tests/optim tests/model tests/generation tests/training/test_graph.py tests/test_cuda_graphs.py tests/training/test_fp8_runs.py tests/training/test_diagnosis.py tests/ranks/test_links.py tests/data/test_loader.py tests/test_device.py | tee "$OUT/gpu-tests.txt"
CUDA_VISIBLE_DEVICES= PYTHONPATH=src:tests python3 -m fuzz --cases 400 --jobs 5 --seed 26 --json "$OUT/fuzz.json"
