#!/usr/bin/env bash
# What train_full_8p.sh and train_performance_8p.sh share. RANK_SIZE is the number of devices (8).
# Other arguments, --FLAG=VALUE, are flags of `meshwright train`, which refuses unknown ones.
set -euo pipefail

SIZES="345M 1.3B 2.7B 3.7B 345M_without_mp"
kind=$1
shift
size=345M data="" iterations="" save=ckpts/ckpts_tmp flags=()
for word; do
    case $word in
        --train_iters= | --save=) echo "[Error] $word needs a value" >&2; exit 2 ;;
        --data_path=*) data=${word#*=} ;;
        --model_size=*) size=${word#*=} ;;
        --train_iters=*) iterations=${word#*=} ;;
        --save=*) save=${word#*=} ;;
        --data_path | --model_size | --train_iters) echo "[Error] $word needs a value: $word=..." >&2; exit 2 ;;
        -h | --help) sed -n '2,/^exec/s/^# \{0,1\}//p' "$(dirname "$0")/train_${kind}_8p.sh"; exit 0 ;;
        --*) flags+=("$word") ;;
        *) echo "[Error] $word is no option; give --data_path=DIR, --model_size=SIZE or --FLAG=VALUE" >&2; exit 2 ;;
    esac
done
if [[ -z $data ]]; then
    echo '[Error] para "data_path" must be confing'
    exit 1
fi
parallel=(--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2)
case $size in
    345M) parallel=(--pipeline-model-parallel-size 2) ;;
    345M_without_mp) parallel=() ;;
    1.3B | 2.7B | 3.7B) ;;
    *) echo "Invalid model size. Please choose from: $SIZES"; exit 1 ;;
esac
if [[ ! -d $data ]]; then
    echo "[Error] --data_path=$data is no folder, seen from $PWD; test/dataset_preprocess_gpt.sh makes ./data" >&2
    exit 1
fi
data=$(cd "$data" && pwd)
cd "$(dirname "$0")/.."
[[ -e data ]] || ln -sfn "$data" data
[[ $data -ef data ]] || echo "./data is there already, and another folder: training reads $data"

preset=ascend-$(tr '[:upper:]_' '[:lower:]-' <<< "$size")
log=./test/output/0/train_0.log
mkdir -p "$(dirname "$log")"
changed=${flags[*]+", ${flags[*]}"} # the row of the table is not the size's own then
if [[ $kind == full ]]; then
    mkdir -p "$save"
    kept=$(cat "$save/model_size" 2> /dev/null || echo "$size")
    if [[ $kept != "$size" ]]; then
        echo "[Error] $save holds a run of $kept, not $size: move it away, or give --model_size=$kept" >&2
        exit 1
    fi
    echo "$size" > "$save/model_size"
    flags=(--train-iters "${iterations:-500000}" --save-interval 100000 --save "$save" --load "$save"
        --tensorboard-dir "$save/tensorboard_dir" ${flags[@]+"${flags[@]}"})
    # A run that continues adds to its log: the figures at the end are those of all its parts.
    [[ -e $save/latest_checkpointed_iteration.txt ]] || : > "$log"
else
    flags=(--train-iters "${iterations:-300}" --lr-decay-iters "${iterations:-300}"
        --run-dir "test/output/0/performance_${size}_$(date +%Y-%m-%d_%H-%M-%S)" ${flags[@]+"${flags[@]}"})
    : > "$log"
fi

export PYTHONPATH=$PWD/../../src${PYTHONPATH:+:$PYTHONPATH} # a clone needs no install
echo "Running $size model on ${RANK_SIZE:-8} devices... (log: $log)"
started=$SECONDS
before=$(wc -l < "$log")
python3 -m meshwright launch --nproc-per-node "${RANK_SIZE:-8}" train --preset "$preset" \
    ${parallel[@]+"${parallel[@]}"} --zero-stage 0 --steps-per-print 1 \
    --data-path "$data/my-gpt_text_sentence" --vocab-file "$data/gpt2-vocab.json" --merge-file "$data/gpt2-merges.txt" \
    "${flags[@]}" >> "$log" 2>&1 &
child=$!
trap 'kill -TERM "$child" 2> /dev/null || true' INT TERM # training saves and ends
status=0
wait "$child" || status=$?
while kill -0 "$child" 2> /dev/null; do
    status=0
    wait "$child" || status=$?
done
if ((status)); then
    tail -n "+$((before + 1))" "$log" | tail -n 20 >&2
    echo "[Error] training ended with status $status; its log is $log" >&2
    exit "$status"
fi

# Columns are found by the words before them, so that a longer line changes nothing.
speed=$(awk '{ for (i = 1; i < NF; i++) if ($i == "samples/sec:") v[++n] = $(i + 1) }
    END { for (i = n > 100 ? n - 99 : 1; i <= n; i++) s += v[i]; if (n) print s / (n > 100 ? 100 : n) }' "$log")
perplexity=$(awk '/validation loss at (iteration|the end of training for val)/ {
    for (i = 1; i < NF; i++) if ($i == "PPL:" && $(i + 1) ~ /^[0-9]/) v = $(i + 1) + 0
    if (v && (min == "" || v < min)) min = v }
    END { print min }' "$log")
length=$(awk '$1 == "seq_length" { print $NF; exit }' "$log")
steps=$(awk '$1 == "steps:" { n = $2 } END { print n }' "$log")
echo "| NAME | params | PPL | samples/s | seq_len | Steps |"
echo "| ${RANK_SIZE:-8}p | $size$changed | ${perplexity:--} | ${speed:--} | ${length:--} | ${steps:--} |"
echo "------------------ Final result ------------------"
echo "Final Performance samples/sec : ${speed:-no step is in $log}"
echo "Final Train lm loss PPL(accuracy): ${perplexity:-no validation is in $log}"
echo "E2E Training Duration sec : $((SECONDS - started))"
[[ -n $speed && -n $perplexity ]]
