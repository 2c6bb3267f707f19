#!/usr/bin/env bash
# What calls 2 to 4 ran: `row NAME PROCESSES FLAGS` trains on mock data and prints the median of the
# last half of the steps.
# shellcheck disable=SC2086
runs=${1:-runs}
row() {
    local name=$1 count=$2
    shift 2
    timeout "${LIMIT:-60}" python -m torch.distributed.run --standalone --nproc-per-node="$count" -m meshwright train \
        --mock-data --run-dir "$runs/$name" --log-interval 1 --eval-iters 0 "$@" > "$runs/$name.log" 2>&1
    python - "$name" "$runs/$name/metrics.jsonl" <<'END'
import json, statistics, sys
rows = [row for row in map(json.loads, open(sys.argv[2])) if row["event"] == "step"]
half = rows[len(rows) // 2 :]
tokens, ms = (statistics.median(row[key] for row in half) for key in ("tokens_per_second", "ms"))
print(f"| {sys.argv[1]} | {tokens:,.0f} tokens/s | {ms:.1f} ms | {max(r['memory'] for r in rows) / 2**30:.1f} GiB |")
END
}
mkdir -p "$runs"
base="--bf16 --lr 1.5e-4 --lr-decay-style cosine --lr-warmup-iters 5 --weight-decay 0.1 --clip-grad 1.0 --hidden-dropout 0 --attention-dropout 0"
M345="--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --vocab-size 50257 $base"
M762="--num-layers 36 --hidden-size 1280 --num-attention-heads 20 --seq-length 1024 --vocab-size 50257 $base"
M27="--num-layers 32 --hidden-size 2560 --num-attention-heads 32 --seq-length 2048 --vocab-size 50257 $base"
L8="--preset llama3-8b --vocab-size 128256 --bf16"
PP="--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage"
G="--cuda-graphs on"

# Call 2
row "762M one" 1 $M762 --micro-batch-size 16 --global-batch-size 32 --train-iters 12
row "762M PP2 v2" 2 $M762 $PP 9 --micro-batch-size 8 --global-batch-size 64 --train-iters 12 $G
row "345M one" 1 $M345 --micro-batch-size 32 --global-batch-size 32 --train-iters 16
row "345M PP2 v3" 2 $M345 $PP 4 --pipeline-layout 5,5,5,4,4,1 --micro-batch-size 8 --global-batch-size 64 --train-iters 16 $G
Z="$M27 --zero-stage 3 --train-iters 10"
row "2.7B Z3 m8" 2 $Z --micro-batch-size 8 --global-batch-size 16
NCCL_MAX_CTAS=8 row "2.7B Z3 m8 8ctas" 2 $Z --micro-batch-size 8 --global-batch-size 16
NCCL_MAX_CTAS=4 row "2.7B Z3 m8 4ctas" 2 $Z --micro-batch-size 8 --global-batch-size 16
# "2.7B Z3 m8 alloc": the same with set_allocate_memory_from_process_group_for_comm in fsdp.py
row "2.7B Z3 m4 off" 2 $Z --micro-batch-size 4 --global-batch-size 8 --cuda-graphs off
row "2.7B Z3 m4 on" 2 $Z --micro-batch-size 4 --global-batch-size 8 $G
row "2.7B one m4" 1 $M27 --train-iters 10 --micro-batch-size 4 --global-batch-size 4
LIMIT=80 row "8B Z3 bf16" 2 $L8 --zero-stage 3 --recompute-granularity selective --micro-batch-size 1 --global-batch-size 4 --train-iters 6
LIMIT=80 row "8B Z3 fp8" 2 $L8 --zero-stage 3 --recompute-granularity selective --micro-batch-size 1 --global-batch-size 4 --train-iters 6 --fp8-format hybrid
LIMIT=80 row "8B PP2 bf16" 2 $L8 $PP 8 --pipeline-layout 9,9,8,6 --micro-batch-size 1 --global-batch-size 16 --train-iters 6 $G

# Call 3, whose tree sent by copy engines with ZeRO 3 unless a row says "collectives"
Z="$M27 --zero-stage 3 --train-iters 10 --micro-batch-size 8 --global-batch-size 16"
row "2.7B one" 1 $M27 --train-iters 8 --micro-batch-size 8 --global-batch-size 8
row "2.7B Z3 copies" 2 $Z
row "2.7B Z3 collectives" 2 $Z --data-parallel-sums collectives
row "2.7B Z3 copies graphs" 2 $Z --cuda-graphs on
Q="$M345 --zero-stage 3 --train-iters 24 --micro-batch-size 4 --global-batch-size 16"
row "345M Z3 m4 off" 2 $Q --cuda-graphs off
row "345M Z3 m4 on" 2 $Q --cuda-graphs on
row "345M Z3 m4 on collectives" 2 $Q --cuda-graphs on --data-parallel-sums collectives
row "345M PP2 v4" 2 $M345 $PP 3 --pipeline-layout 4,3,4,3,3,3,3,1 --micro-batch-size 8 --global-batch-size 64 --train-iters 12 --cuda-graphs on
row "345M PP2 v2 m16" 2 $M345 $PP 6 --pipeline-layout 7,7,7,3 --micro-batch-size 16 --global-batch-size 128 --train-iters 12 --cuda-graphs on
row "345M one 8x8" 1 $M345 --micro-batch-size 8 --global-batch-size 64 --train-iters 12

# Call 4, likewise
Z="$M27 --zero-stage 3 --train-iters 10 --micro-batch-size 8 --global-batch-size 16"
row "2.7B one" 1 $M27 --train-iters 8 --micro-batch-size 8 --global-batch-size 8
row "2.7B Z3 copies" 2 $Z
row "345M Z3 m4 auto" 2 $M345 --zero-stage 3 --train-iters 16 --micro-batch-size 4 --global-batch-size 16
LIMIT=45 row "762M PP2 10,10,10,6" 2 $M762 $PP 9 --pipeline-layout 10,10,10,6 --micro-batch-size 8 --global-batch-size 64 --train-iters 10
row "345M PP2 32 of 8" 2 $M345 $PP 6 --pipeline-layout 7,7,7,3 --micro-batch-size 8 --global-batch-size 256 --train-iters 8
N="$M345 --pipeline-model-parallel-size 2 --pipeline-layout 14,10 --micro-batch-size 2 --global-batch-size 256 --train-iters 8"
# Call 6
row "345M PP2 128 of 2 graphs" 2 $N
