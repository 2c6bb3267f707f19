#!/usr/bin/env bash
# Measure and prove on two GPUs of one host what no CPU can show, a part at a time:
#
#   bash benchmarks/two_gpus.sh OUT PART ...
#
# layouts  every layout by NCCL (verify_layouts.py)
# tests    the tests that need GPUs
# fuzz     CASES (100) of the fuzz
# small    rows of 345M to 1.3B on one GPU and on two, and 345M by ZeRO 3 with and without graphs
# large    rows of 2.7B and of Llama 3 8B
# idle     the guides' rows on one GPU, with the share of a step in which the GPU idles
# decode   one text and eight, GPT-2's networks and those of --recipe modern
# guides   the guides' own scripts; VOCAB is a folder with gpt2-vocab.json and gpt2-merges.txt
# te       megatron-core with Transformer Engine (transformer_engine.sh packs it)
#
# OUT gets a folder with all logs of each part, and PART.txt with what it printed. A part that takes
# LIMIT seconds (560) is stopped; what it has measured by then stays. `layouts` and `fuzz` run
# JOBS (6) at once.
set -uo pipefail
out=$1
shift
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
export NCCL_NVLS_ENABLE=0 PYTHONUNBUFFERED=1
export PYTHONPATH=$here/../src:$here/../tests${PYTHONPATH:+:$PYTHONPATH}
mkdir -p "$out"
out=$(cd "$out" && pwd)
cd "$here/.." || exit 1

bench() { "$python" -m meshwright bench "$@"; }

layouts() {
    "$python" benchmarks/verify_layouts.py "$1" --jobs "${JOBS:-6}"
}

tests() {
    "$python" -m pytest -q -p no:cacheprovider tests/training/test_sharded_graphs.py \
        tests/training/test_stage_graphs.py tests/training/test_graph.py tests/runtime/test_cuda_graphs.py \
        tests/generation/test_layouts.py tests/generation/test_decoder.py tests/kernels 2>&1 | tail -n 30
}

fuzz() {
    "$python" -m fuzz --device cuda --cases "${CASES:-100}" --jobs "${JOBS:-6}" --json "$1/fuzz.json" | tail -n 40
}

small() {
    local rows='^(345M|345M PP2|345M micro-batch 4|345M micro-batch 4 DP2 ZeRO-3|762M|762M PP2|1.3B|1.3B DP2|1.3B PP2)$'
    bench layouts --gpus 2 --rows "$rows" --seconds 60 --out "$1/rows"
    bench layouts --gpus 2 --rows '^345M micro-batch 4 DP2 ZeRO-3$' --seconds 60 --out "$1/no-graphs" -- --cuda-graphs off
}

large() {
    bench layouts --gpus 2 --rows '^(2.7B|2.7B DP2 ZeRO-3|2.7B PP2|Llama 3 8B.*)$' --seconds 80 --out "$1"
}

idle() {
    CUDA_VISIBLE_DEVICES=0 bench seeds --steps 10 --seconds 50 --profile --out "$1"
}

decode() {
    export CUDA_VISIBLE_DEVICES=0
    "$python" benchmarks/gpu_decode.py --check
    "$python" benchmarks/gpu_decode.py --quick --sizes 345M --rows 1 8 --json "$1/gpt2.json"
    "$python" benchmarks/gpu_decode.py --quick --modern --sizes 345M --rows 1 8 --json "$1/modern.json"
}

guides() {
    cp "$VOCAB"/gpt2-vocab.json "$VOCAB"/gpt2-merges.txt "$1"
    GPUS=2 SIZES="345M_without_mp 345M" LIMIT=80 bash benchmarks/guides.sh "$1"
}

te() {
    # The other GPU measures at the same time: each ratio is of one GPU.
    CUDA_VISIBLE_DEVICES=1 "$python" benchmarks/peer_megatron.py "$1/second" --limit 75 \
        --rows '^2.7B dropout 0.1$' > "$1/second.txt" 2>&1 &
    CUDA_VISIBLE_DEVICES=0 "$python" benchmarks/peer_megatron.py "$1/first" --limit 75 \
        --rows '^(345M dropout 0.1|1.3B Llama)$'
    wait
    cat "$1/second.txt"
}

for part in "$@"; do
    case $part in
    layouts | tests | fuzz | small | large | idle | decode | guides | te) ;;
    *) echo "no part is called $part; see the top of $0" >&2 && exit 2 ;;
    esac
done
export -f bench layouts tests fuzz small large idle decode guides te
export python
for part in "$@"; do
    echo "## $part, $(date -u +%H:%M:%S)"
    mkdir -p "$out/$part"
    timeout --kill-after=10 "${LIMIT:-560}" bash -c "$part '$out/$part'" 2>&1 | tee "$out/$part.txt"
done
echo "## end, $(date -u +%H:%M:%S)"
