#!/usr/bin/env bash
# Make ./data of a Wikipedia dump: GPT-2's vocabulary and my-gpt_text_sentence.bin and .idx.
#   bash test/dataset_preprocess_gpt.sh [TEXT] [--overwrite or another flag of `meshwright preprocess` ...]
# TEXT: a dump (.xml.bz2), a folder of wikiextractor, or any text that `meshwright preprocess` reads.
# Without it: ./enwiki-latest-pages-articles.xml.bz2, downloaded from DUMP_URL if it is not complete.
set -euo pipefail

text=""
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    sed -n '2,/^set/s/^# \{0,1\}//p' "$0"
    exit 0
fi
if [[ ${1:--} != -* ]]; then
    text=$1
    shift
    [[ -e $text ]] || { echo "[Error] $text: no such file or folder" >&2; exit 1; }
    text=$(cd "$(dirname "$text")" && pwd)/$(basename "$text")
fi
cd "$(dirname "$0")/.."
export PYTHONPATH=$PWD/../../src${PYTHONPATH:+:$PYTHONPATH} # a clone needs no install
gpt2=https://s3.amazonaws.com/models.huggingface.co/bert

download() { # URL FILE: a file gets its name when it is complete; a part is continued
    wget -c -O "$2.part" "$1"
    mv "$2.part" "$2"
}

if [[ -z $text ]]; then
    url=${DUMP_URL:-https://dumps.wikimedia.org/enwiki/latest/enwiki-latest-pages-articles.xml.bz2}
    text=./${url##*/}
    [[ -e $text ]] || download "$url" "$text"
fi
mkdir -p data
for name in gpt2-vocab.json gpt2-merges.txt; do
    [[ -e data/$name ]] || download "$gpt2/$name" "data/$name"
done
python3 tools/preprocess_data.py \
    --input "$text" \
    --output-prefix data/my-gpt \
    --vocab data/gpt2-vocab.json \
    --merge-file data/gpt2-merges.txt \
    --dataset-impl mmap \
    --tokenizer-type GPT2BPETokenizer \
    --split-sentences \
    --workers "$(nproc 2> /dev/null || sysctl -n hw.ncpu)" "$@"
