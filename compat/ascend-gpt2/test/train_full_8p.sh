#!/usr/bin/env bash
# Train one of the five sizes and save it in ckpts/ckpts_tmp, which the same command continues:
#   bash test/train_full_8p.sh --data_path=DIR [--model_size=345M] [--train_iters=500000] [--FLAG=VALUE ...]
exec bash "$(dirname "$0")/train_8p.sh" full "$@"
