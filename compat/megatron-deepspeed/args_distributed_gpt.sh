#!/usr/bin/env bash
# The benchmark of args_deepspeed_gpt.sh without DeepSpeed's file and ZeRO; the same parameters.
set -euo pipefail
USE_DEEPSPEED=false exec bash "$(dirname "$0")/args_deepspeed_gpt.sh" "$@"
