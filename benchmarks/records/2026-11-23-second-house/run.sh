# In a clone, with the sources of commit edb86b5 in .base/src (git archive edb86b5 src | tar x -C .base) and OUT a folder.
set -u
export TRITON_CACHE_DIR=/tmp/tc
R='^345M$|^345M dropout 0.1$|^345M micro-batch 4$|^345M fp8$|^345M Muon$'
B="--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --bf16 --lr 1.5e-4 --lr-warmup-iters 5 --weight-decay 0.1 --clip-grad 1.0 --mock-data --vocab-size 50257 --eval-iters 0 --train-iters 60 --log-interval 10 --no-tensorboard"
for pass in old1 new1 old2 new2; do
  case $pass in old*) S=$PWD/.base/src;; *) S=$PWD/src;; esac
  echo "== $pass"; PYTHONPATH=$S timeout 150 python3 -m meshwright bench 345m --rows "$R" --out /tmp/$pass > /tmp/$pass.log 2>&1; echo rc $?
  cat /tmp/$pass/table.txt 2>/dev/null || tail -5 /tmp/$pass.log
  cp /tmp/$pass/table.txt $OUT/$pass.txt 2>/dev/null
done
export PYTHONPATH=$PWD/src
for mb in 1 8; do for n in a b; do
  timeout 60 python3 -m meshwright train $B --micro-batch-size $mb --global-batch-size $mb --run-dir /tmp/with_${mb}_$n > /tmp/w.log 2>&1 || tail -3 /tmp/w.log
  timeout 60 python3 benchmarks/records/2026-11-23-second-house/without_embedding_kernel.py train $B --micro-batch-size $mb --global-batch-size $mb --run-dir /tmp/wo_${mb}_$n > /tmp/w.log 2>&1 || tail -3 /tmp/w.log
  python3 benchmarks/records/2026-11-23-second-house/speed.py /tmp/with_${mb}_$n /tmp/wo_${mb}_$n
done; done
