set -e
flags="--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 16 --max-position-embeddings 1024
  --micro-batch-size 1 --global-batch-size 1 --lr 1e-5 --train-iters 1 --eval-iters 0 --mock-data --vocab-size 50257
  --fp16 --initial-loss-scale 4096 --no-tensorboard --log-interval 1"
for form in native torch; do
  meshwright train $flags --ckpt-format $form --save $form
done
meshwright convert native weights --to torch --no-optimizer --dtype float16
ls -l native/iter_0000001 torch/iter_0000001/mp_rank_00 weights/iter_0000001/mp_rank_00
