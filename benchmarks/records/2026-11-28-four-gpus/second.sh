# 124M and 345M, a run a GPU: four GPUs, seven and a half minutes.
#     OUT=FOLDER bash second.sh, in the root of the project, after first.sh on the same machine, whose token files it reads
set -u
export PYTHONPATH=$PWD/src:${PYTHONPATH:-} PYTHONUNBUFFERED=1 OMP_NUM_THREADS=2
LIMIT=${LIMIT:-450}
t=lr-warmup-fraction=0.1
python3 benchmarks/learning.py /tmp/runs --data /tmp/large/corpus_text_document --tokenizer /tmp/large/tokenizer --size 124M --points 8 --held-out 1e6 --jobs 4 --gpus 0,1,2,3 \
    --seconds $((LIMIT - 20)) --grace 15 --flags "--bf16 --device cuda" \
    recipe@23e6@345M tuned,lr=6e-4,global-batch-size=8,$t@30e6@345M tuned,lr=3e-4,global-batch-size=8,$t@30e6@345M tuned,lr=3e-4,global-batch-size=8,$t@60e6 \
    tuned,lr=3e-4,global-batch-size=4,$t@60e6 recipe@15e6@345M tuned,lr=6e-4,global-batch-size=8,$t,adam-beta2=0.99@60e6 tuned,lr=6e-4,global-batch-size=8,$t,weight-decay=0.3@60e6 \
    documents@60e6 tuned,lr=6e-4,global-batch-size=4,$t@60e6 recipe@30e6 tuned,lr=1.2e-3,global-batch-size=8,$t@60e6 > $OUT/second.txt 2>&1
cp /tmp/runs/figures.jsonl $OUT/second.jsonl; tar czf $OUT/logs.tar.gz -C /tmp/runs --exclude 'checkpoints*' --exclude '*.pt' --exclude '*.safetensors' $(cd /tmp/runs && ls */output.txt) 2> /dev/null
tail -n 30 $OUT/second.txt | cut -c1-150
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
