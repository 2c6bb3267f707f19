#!/usr/bin/env bash
# Train 30 steps in seven ways with the Python given, and print every loss exactly:
#     OUT=FOLDER losses.sh PYTHON      (in the root of a clone)
set -euo pipefail
python=$1
OUT=${OUT:?a folder for the runs}
export OMP_NUM_THREADS=1 MASTER_PORT=${MASTER_PORT:-29731}
say() { "$python" -m meshwright "$@" >> "$OUT/log.txt" 2>&1; }

mkdir -p "$OUT"
if [ ! -e "$OUT/text_text_document.bin" ]; then # else the token files of another version are read
    say train-tokenizer --input docs --vocab-size 2048 --output "$OUT/vocabulary"
    say preprocess --input docs --output-prefix "$OUT/text" --tokenizer "$OUT/vocabulary" --append-eod
fi
model=(--data-path "$OUT/text_text_document" --split 90,10,0 --num-layers 4 --hidden-size 64
       --num-attention-heads 4 --seq-length 64 --micro-batch-size 2 --global-batch-size 8
       --train-iters 30 --lr 2e-3 --device cpu --eval-interval 15 --eval-iters 2 --log-interval 10)

run() { # NAME RANKS FLAGS
    local name=$1 ranks=$2
    shift 2
    if [ "$ranks" = 1 ]; then
        say train "${model[@]}" --save "$OUT/$name" "$@"
    else
        say launch --nproc-per-node "$ranks" train "${model[@]}" --save "$OUT/$name" "$@"
    fi
    "$python" -m meshwright report --losses "$OUT/$name" > "$OUT/$name.losses"
}

run one-process 1
run bf16 1 --bf16
run tp2-sp 2 --tensor-model-parallel-size 2 --sequence-parallel
run pp2 2 --pipeline-model-parallel-size 2
run pp2-zero-bubble 2 --pipeline-model-parallel-size 2 --pipeline-schedule zero-bubble
run pp2-zbv 2 --pipeline-model-parallel-size 2 --pipeline-schedule zbv
run zero-3 2 --zero-stage 3
"$python" -c 'import platform, torch; print("Python", platform.python_version(), "torch", torch.__version__)'
(cd "$OUT" && sha256sum ./*.losses && tail -qn 1 ./*.losses)
