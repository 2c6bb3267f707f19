# 124M: the documents' recipe for 60 M tokens, `--recipe modern` for a quarter of them.
#     OUT=FOLDER FOLDERS="..." bash second.sh, in the root of the project, with FOLDERS of installed packages
set -u
export PYTHONPATH=src:${PYTHONPATH:-} PYTHONUNBUFFERED=1
began=$SECONDS
python3 benchmarks/learning_text.py /tmp/text $FOLDERS --megabytes 225 --workers 14 --keep-similar > $OUT/text.txt 2>&1
echo "text after $((SECONDS - began)) s" >> $OUT/text.txt
(sleep 95; timeout 60 python3 -m pytest -q -n 4 -p no:cacheprovider -m "not long" tests/kernels/test_moments.py tests/optim/test_rounded_state.py > $OUT/tests.txt 2>&1) &
python3 benchmarks/learning.py /tmp/runs --data /tmp/text/corpus_text_document --tokenizer /tmp/text/tokenizer --jobs 2 --size 124M \
    --seconds 200 --grace 5 --points 4 --held-out 1e6 --flags "--bf16 --device cuda" documents@60e6 recipe@15e6 > $OUT/learning.txt 2>&1
cp /tmp/runs/figures.jsonl /tmp/runs/table.txt $OUT/
for run in /tmp/runs/*/; do cp $run/metrics.jsonl $OUT/$(basename $run).metrics.jsonl; done
tail -n 20 $OUT/learning.txt; tail -n 4 $OUT/text.txt; tail -n 8 $OUT/tests.txt | cut -c1-160
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
