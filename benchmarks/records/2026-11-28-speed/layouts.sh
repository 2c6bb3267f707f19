# The layouts on two GPUs, ZeRO 3 with collectives (before) and copies (after), a line each.
#     OUT=FOLDER bash layouts.sh [CASE ...], in the root of the project
# Without cases: tp zero-before zero-after dp.
set -u
given=${PYTHONPATH:-}
export PYTHONPATH=$PWD/src:$given PYTHONUNBUFFERED=1 NCCL_NVLS_ENABLE=0 CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0,1}
LIMIT=${LIMIT:-560} began=$SECONDS back=$OUT OUT=$(mktemp -d)
mkdir -p $back
TP="^2.7B TP2 SP$ --micro-batch-size 4 --global-batch-size 4"
ZERO="^2.7B DP2 ZeRO-3$ --micro-batch-size 4 --global-batch-size 8"
DP="^1.3B DP2$"
declare -A cases=(
    [one-2.7B]="^2.7B$ --micro-batch-size 4 --global-batch-size 4"
    [one-2.7B-8]="^2.7B$ --micro-batch-size 4 --global-batch-size 8"
    [one-1.3B]="^1.3B$"
    [one-345M]="^345M$"
    [dp-345M]="^345M DP2$"
    [tp]="$TP"
    [zero-before]="$ZERO --data-parallel-sums collectives"
    [zero-after]="$ZERO --data-parallel-sums copies"
    [dp]="$DP"
)
# A row on several GPUs would bring the one of one GPU each time.
bench='import dataclasses, runpy, sys
from meshwright.bench import rows
of_set = rows.rows_of
rows.rows_of = lambda *set_of: [dataclasses.replace(row, beside="") for row in of_set(*set_of)]
sys.argv[0] = "meshwright"
runpy.run_module("meshwright", run_name="__main__")'
[ $# = 0 ] && set -- tp zero-before zero-after dp
for name in "$@"; do
    [ $((LIMIT - SECONDS + began)) -lt 15 ] && echo "$name: no time left" && continue
    at=$SECONDS row=${cases[$name]}; pattern=${row%% --*} more=${row#"$pattern"}
    # A barrier that is never left would otherwise take the time of all later cases.
    timeout -k 5 ${EACH:-70} python3 -c "$bench" bench ${PROFILE---profile} layouts --gpus 2 --rows "$pattern" \
        --out $OUT/$name -- $more > $OUT/$name.txt 2>&1 || echo "$name: status $?"
    tar czf $back/all.tar.gz -C $OUT .
    # The row, its kinds of time, and what the run said about its copies, graphs and memory.
    python3 - $OUT/$name $name $((SECONDS - at)) <<'EOF'
import json, pathlib, sys

folder, name, seconds = pathlib.Path(sys.argv[1]), *sys.argv[2:]
try:
    for row in json.loads((folder / "results.json").read_text())["rows"]:
        shares = {k: f"{100 * v:.1f}" for k, v in ((row.get("profile") or {}).get("shares") or {}).items()}
        print(f"{name:18} {row.get('ms') or 0:7.1f} ms  {(row.get('peak_bytes') or 0) / 2**30:5.1f} GiB  "
              f"loss {row.get('first_loss')} {row.get('last_loss')}  {seconds} s  {shares} {row['failed'] or ''}")
except OSError as error:
    print(f"{name:18} nothing: {error}")
said = [p for p in folder.glob("*/console.txt")]
lines = {line.strip() for p in said for line in p.read_text(errors="replace").splitlines()
         if any(w in line for w in ("parallelism:", "CUDA graphs", "plan:", "Error", "error"))}
print(*(f"    {line[:170]}" for line in sorted(lines)[:8]), sep="\n")
EOF
done
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | head -n 2
