#!/usr/bin/env bash
# Build the part of Transformer Engine that is compiled for one torch, and pack it with megatron-core
# for peer_megatron.py on a GPU machine without internet. Neither a GPU nor a CUDA toolkit is needed:
#
#   PYTHON=python3.12 bash benchmarks/transformer_engine.sh OUT
#
# PYTHON (python3) has the version of that machine's Python and its torch, for CUDA 13, installed by
# pip. OUT, a new folder, gets te.tar.xz.aa, .ab and so on, of PART MiB each (46), and the wheel that
# was built. On the GPU machine:
#
#   mkdir /tmp/te && cat te.tar.xz.* | tar -xJ -C /tmp/te && export PYTHONPATH=/tmp/te
#   python -c 'import torch, transformer_engine.pytorch'
#
# or, without xz there, cat te.tar.xz.* > te.tar.xz && python -m tarfile -e te.tar.xz /tmp/te. MORE lists
# packages that Transformer Engine imports and that machine may have; MORE= leaves them out.
#
# Transformer Engine 2.13 and later need cublasLtGroupedMatrixLayoutInit_internal, which the cuBLAS of
# torch 2.11 (13.1) lacks. megatron-core 0.19 asks for more than 2.12 only in mixtures of experts,
# where CUDA graphs meet offloading, and where it clips gradients, which peer_megatron.py mends.
set -euo pipefail
python=${PYTHON:-python3}
engine=${ENGINE:-2.12.0}
core=${CORE:-0.19.2}
read -ra more <<< "${MORE-onnxscript onnx onnx-ir ml-dtypes pydantic pydantic-core annotated-types typing-inspection}"
mkdir "$1"
out=$(cd "$1" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# The headers of CUDA, cuDNN and NCCL that torch's packages have, and the few that they lack.
cuda=$("$python" -c 'import torch; print(torch.version.cuda)')
"$python" -m pip install -q --no-deps --target "$work/tools" \
    wheel ninja "nvidia-cuda-crt==$cuda.*" "nvidia-cuda-cccl==$cuda.*"
mkdir -p "$work/cuda/include" "$work/cuda/bin"
packages=$("$python" -c 'import nvidia; print(next(iter(nvidia.__path__)))')
for folder in "$packages"/*/include "$work/tools/nvidia"/*/include; do
    cp -rsn "$folder/." "$work/cuda/include"
done
# Only its version is asked for: all sources are C++.
printf '#!/bin/sh\necho "release %s"\n' "$cuda" > "$work/cuda/bin/nvcc"
chmod +x "$work/cuda/bin/nvcc"

export CUDA_HOME=$work/cuda NVTE_PYTORCH_FORCE_BUILD=TRUE NVTE_FRAMEWORK=pytorch MAX_JOBS=${MAX_JOBS:-2}
# A wheel in pip's cache may be of another torch.
PYTHONPATH=$work/tools PATH=$work/tools/bin:$PATH "$python" -m pip wheel --no-cache-dir --no-deps \
    --no-build-isolation -w "$out" "transformer-engine-torch==$engine"

"$python" -m pip install -q --no-deps --target "$work/site" "$out"/transformer_engine_torch-*.whl \
    "transformer-engine==$engine" "transformer-engine-cu${cuda%.*}==$engine" "megatron-core==$core" \
    einops "${more[@]}"
tar -c --exclude=__pycache__ -C "$work/site" . | xz -T0 -9 | split -b "${PART:-46}M" - "$out/te.tar.xz."
ls -l "$out"
