#!/usr/bin/env bash
# Measure the speed of one of the five sizes; no weights are saved:
#   bash test/train_performance_8p.sh --data_path=DIR [--model_size=345M] [--train_iters=300] [--FLAG=VALUE ...]
exec bash "$(dirname "$0")/train_8p.sh" performance "$@"
