#!/bin/bash
# The accuracy of LAMBADA's last tokens, {"text": ...} a line; --strict-lambada counts whole words.
set -euo pipefail
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    echo "CHECKPOINT_PATH=DIR VALID_DATA=lambada_test.jsonl bash $0 [FLAG of meshwright evaluate ...]"
    exit 0
fi
if [[ ! -e "${CHECKPOINT_PATH:-}" || ! -e "${VALID_DATA:-}" ]]; then
    echo "$0: set CHECKPOINT_PATH to a --save folder and VALID_DATA to lambada_test.jsonl; see README.md" >&2
    exit 2
fi
src="$(cd -P -- "$(dirname -- "${BASH_SOURCE[0]}")/../../../src" && pwd)"
export PYTHONPATH="$src${PYTHONPATH:+:$PYTHONPATH}"
words=(--task LAMBADA --valid-data "$VALID_DATA")
[[ -z "${VOCAB_FILE:-}" ]] || words+=(--vocab-file "$VOCAB_FILE" --merge-file "${MERGE_FILE:-}")
exec python3 -m meshwright evaluate "$CHECKPOINT_PATH" "${words[@]}" "$@"
