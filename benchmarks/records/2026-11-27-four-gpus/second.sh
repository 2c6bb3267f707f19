# Recipes at 1M, 3M and 10M with three seeds and a grid of AdamW, and 124M with AdamW's grid beside the recipe: eight minutes.
#     OUT=FOLDER bash second.sh, in the root of the project, after first.sh on the same machine, whose token files it reads
set -u
export PYTHONPATH=src:${PYTHONPATH:-} PYTHONUNBUFFERED=1 OMP_NUM_THREADS=2
since() { echo $((SECONDS - began)); }
began=$SECONDS LIMIT=${LIMIT:-470}
back=$OUT OUT=/tmp/out; mkdir -p $OUT  # few files may come back: one archive
(while sleep 30; do tar czf $back/all.part -C $OUT . && mv $back/all.part $back/all.tar.gz; done) & archiving=$!
learn() {  # NAME SECONDS FLAGS...
    local name=$1 seconds=$2; shift 2
    python3 benchmarks/learning.py /tmp/$name --held-out 3e5 --seconds $seconds --grace 15 --flags "--bf16 --device cuda" "$@" > $OUT/$name.txt 2>&1
    cp /tmp/$name/figures.jsonl $OUT/$name.jsonl; echo "$name after $(since) s" >> $OUT/$name.txt
}
small() { for seed in 1 2 3; do
    for size in 1M:10e6:4e6:8e6 3M:15e6:6e6:12e6 10M:20e6:8e6:16e6; do IFS=: read name all less more <<< $size
        echo documents@$all@$name@$seed recipe@$less@$name@$seed recipe@$more@$name@$seed
        for lr in ${RATES:-6e-4 1.2e-3 2.4e-3 4.8e-3}; do for batch in 16 32; do echo tuned,lr=$lr,global-batch-size=$batch,lr-warmup-fraction=0.1@$all@$name@$seed; done; done
    done; done; }
learn large-first $((LIMIT - $(since))) --data /tmp/large/corpus_text_document --tokenizer /tmp/large/tokenizer --size 124M --points 8 --jobs 2 --gpus 3 \
    tuned,lr=1.2e-3,global-batch-size=16,lr-warmup-fraction=0.1@60e6 recipe@46e6 tuned,lr=6e-4,global-batch-size=16,lr-warmup-fraction=0.1@60e6 \
    tuned,lr=2.4e-3,global-batch-size=16,lr-warmup-fraction=0.1@60e6 recipe@40e6 tuned,lr=6e-4,global-batch-size=8,lr-warmup-fraction=0.1@60e6 tuned,lr=1.2e-3,global-batch-size=32,lr-warmup-fraction=0.1@60e6 recipe@20e6 &
learning=$!
learn small $(( (LIMIT - $(since)) * 2 / 3 )) --data /tmp/small/corpus_text_document --tokenizer /tmp/small/tokenizer --points 8 --jobs 30 --gpus 1,2,0 $(small)
learn large-second $((LIMIT - $(since) - 45)) --data /tmp/large/corpus_text_document --tokenizer /tmp/large/tokenizer --size 124M --points 8 --jobs 5 --gpus 0,1,2 \
    documents@60e6 tuned,lr=1.2e-3,global-batch-size=16,lr-warmup-fraction=0.1,adam-beta2=0.99@60e6 tuned,lr=1.2e-3,global-batch-size=16,lr-warmup-fraction=0.1,weight-decay=0.3@60e6 \
    tuned,lr=1.2e-3,global-batch-size=8,lr-warmup-fraction=0.1@60e6
wait $learning
for name in small large-first large-second; do tail -n 70 $OUT/$name.txt | cut -c1-110; done
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader; lscpu | grep -E "Model name|amx" | cut -c1-80
kill $archiving; tar czf $back/all.tar.gz -C $OUT .
