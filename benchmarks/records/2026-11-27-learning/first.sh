# Tests of kernels and updates on a GPU, and small models: AdamW's rates, the recipe and it without each of its parts.
#     OUT=FOLDER bash first.sh, in the root of the project, with FOLDERS of installed packages
set -u
export PYTHONPATH=src:${PYTHONPATH:-} PYTHONUNBUFFERED=1
began=$SECONDS
(python3 benchmarks/learning_text.py /tmp/text $FOLDERS --megabytes 120 --workers 8 > $OUT/text.txt 2>&1; echo "text after $((SECONDS - began)) s" >> $OUT/text.txt) &
text=$!
(timeout 170 python3 -m pytest -q -n 7 -x --maxfail=20 -p no:cacheprovider -m "not long" tests/kernels/test_adamw.py tests/kernels/test_moments.py \
    tests/kernels/test_muon_passes.py tests/optim tests/training/test_graph.py tests/test_cuda_graphs.py > $OUT/tests.txt 2>&1; echo "tests after $((SECONDS - began)) s" >> $OUT/tests.txt) &
tests=$!
wait $text
python3 benchmarks/learning.py /tmp/runs --data /tmp/text/corpus_text_document --tokenizer /tmp/text/tokenizer --jobs 8 --size 10M \
    --seconds $((190 - SECONDS + began)) --grace 35 --points 1 --held-out 3e5 --flags "--bf16 --device cuda" \
    recipe@8e6 documents@20e6 tuned,lr=2.4e-3@20e6 tuned@20e6 tuned,lr=4.8e-3@20e6 recipe@4e6@1M tuned,lr=4.8e-3@10e6@1M \
    tuned,lr=2.4e-3@10e6@1M recipe@6e6@3M tuned,lr=2.4e-3@15e6@3M tuned,lr=4.8e-3@15e6@3M documents@10e6@1M each@8e6 \
    recipe,lr=8e-3@8e6 recipe,lr=2e-3@8e6 tuned,lr=9.6e-3@10e6@1M tuned,adam-beta2=0.99,lr=2.4e-3@20e6 documents@15e6@3M > $OUT/learning.txt 2>&1
cp /tmp/runs/figures.jsonl /tmp/runs/table.txt $OUT/
tail -n 30 $OUT/learning.txt
wait $tests
tail -n 40 $OUT/tests.txt | cut -c1-200
tail -n 3 $OUT/text.txt
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
