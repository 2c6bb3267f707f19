#!/usr/bin/env bash
# Run the guides' own benchmark scripts on the GPUs of this machine, a few steps each, and print
# what each says of its speed:
#
#   bash benchmarks/guides.sh DATA [STEPS]
#
# DATA is a folder with gpt2-vocab.json and gpt2-merges.txt; token files of random words are made in
# it. Each row is stopped after LIMIT seconds (90).
set -uo pipefail
data=$(cd "$1" && pwd)
steps=${2:-24}
gpus=${GPUS:-$(nvidia-smi --list-gpus | wc -l)}
here=$(cd "$(dirname "$0")/.." && pwd)
limit=${LIMIT:-90}

if [[ ! -e $data/my-gpt_text_sentence.bin ]]; then
    python3 - "$data" <<'END'
import json, random, sys
rng = random.Random(1)
words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9))) for _ in range(4000)]
with open(sys.argv[1] + "/text.jsonl", "w") as file:
    for _ in range(20000):
        file.write(json.dumps({"text": " ".join(rng.choices(words, k=120)) + "."}) + "\n")
END
    python3 -m meshwright preprocess --input "$data/text.jsonl" --output-prefix "$data/my-gpt" \
        --vocab-file "$data/gpt2-vocab.json" --merge-file "$data/gpt2-merges.txt" --append-eod > /dev/null
    for end in bin idx; do
        cp "$data/my-gpt_text_document.$end" "$data/my-gpt_text_sentence.$end"
    done
fi

echo "| script | settings | samples/s | TFLOP/s | GPUs |"
echo "|---|---|---|---|---|"
cd "$here/compat/ascend-gpt2" || exit 1
for count in $(seq 1 "$gpus" | awk '$1 == 1 || $1 == 2 || $1 == 8'); do
    for size in ${SIZES-345M 345M_without_mp 1.3B 2.7B 3.7B}; do
        # Pipelines and tensor parallelism need two devices, or four.
        case $size in 345M_without_mp) least=1 ;; 345M) least=2 ;; *) least=4 ;; esac
        ((count >= least)) || continue
        out=$(RANK_SIZE=$count timeout "$limit" bash test/train_performance_8p.sh --data_path="$data" \
            --model_size="$size" --train_iters="$steps" --eval-iters=1 2>&1)
        speed=$(awk '/^Final Performance/ { print $NF }' <<< "$out")
        echo "| train_performance_8p.sh | $size | ${speed:-$(tail -n 1 <<< "$out")} | | $count |"
    done
done

cd "$here/compat/megatron-deepspeed" || exit 1
while read -r tp pp again micro batch; do
    ((tp * pp <= gpus)) || continue
    SAVE=false timeout "$limit" bash args_deepspeed_gpt.sh 1 "$gpus" 0 127.0.0.1 "$tp" "$pp" true "$again" \
        "$micro" "$batch" 24 bench "$((steps / 2))" 4 none "$data/gpt2-vocab.json" "$data/gpt2-merges.txt" \
        "$data/my-gpt_text_document" --eval-iters 1 > /tmp/row.log 2>&1 < /dev/null
    last=$(grep -E "^ iteration" /tmp/row.log | tail -n 1)
    speed=$(sed -nE 's/.*samples per second: ([0-9.]+).*/\1/p' <<< "$last")
    flops=$(sed -nE 's/.*TFLOPs: ([0-9.]+).*/\1/p' <<< "$last")
    settings="TP $tp, PP $pp, recomputed: $again, $micro of $batch"
    echo "| args_deepspeed_gpt.sh | $settings | ${speed:-$(tail -n 1 /tmp/row.log)} | $flops | $gpus |"
done <<END
1 1 false 4 64
1 1 true 32 512
2 1 true 32 512
1 2 true 32 512
END
