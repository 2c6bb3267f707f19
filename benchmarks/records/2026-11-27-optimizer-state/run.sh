# On a machine with two cores, from the root of a clone: the loss of a small model with each format
# of the optimizer's state, for AdamW and Muon, and with a second seed.
set -eu
OUT=${OUT:-$(mktemp -d)}; mkdir -p "$OUT"
export PYTHONPATH=$PWD/src OMP_NUM_THREADS=2
PYTHON=${PYTHON:-python3}
TEXT=$($PYTHON -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')
$PYTHON -m meshwright train-tokenizer --input "$TEXT"/[a-j]*.py --vocab-size 1024 --output "$OUT/tokenizer" > "$OUT/prepare.txt" 2>&1
$PYTHON -m meshwright preprocess --input "$TEXT"/*.py --tokenizer "$OUT/tokenizer" --append-eod --output-prefix "$OUT/text" >> "$OUT/prepare.txt" 2>&1
MODEL="--num-layers 3 --hidden-size 96 --num-attention-heads 4 --seq-length 128 --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --hidden-dropout 0 --attention-dropout 0"
TRAIN="--train-iters 300 --micro-batch-size 8 --global-batch-size 8 --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-warmup-iters 20 --weight-decay 0.1 --clip-grad 1.0 --split 90,10,0 --eval-interval 300 --eval-iters 20 --log-interval 50 --no-tensorboard --device cpu"
for run in "adamw 1 float32" "adamw 1 bfloat16" "adamw 1 float8" "adamw 2 float32" "muon 1 float32" "muon 1 bfloat16" "muon 1 float8" "muon 2 float32"; do
  set -- $run; rule=$1; seed=$2; dtype=$3
  echo "== $rule, seed $seed, $dtype"
  $PYTHON -m meshwright train $MODEL $TRAIN --data-path "$OUT/text_text_document" --vocab-file "$OUT/tokenizer/vocab.json" --merge-file "$OUT/tokenizer/merges.txt" --optimizer $rule --seed $seed --optimizer-state-dtype $dtype --run-dir "$OUT/$rule-$seed-$dtype" 2>/dev/null | grep -E "iteration +[0-9]+/|validation loss" | sed -E 's/.*(iteration +[0-9]+\/ +[0-9]+) .*(lm loss: [^ ]+) .*/\1 \2/'
done
