#!/bin/bash
# Four machines with eight GPUs each, in containers
: "${ONEFLOW_GTP_PRETRAIN_WITH_CONTAINER:=ON}"
source "$(dirname -- "$0")/distribute_pretrain_4n8d_2x4x4_512_2304x24.sh"
