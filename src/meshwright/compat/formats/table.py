"""The table of other programs' checkpoints, but for Hugging Face's, which the core reads itself."""

from __future__ import annotations

from meshwright.checkpoint.formats import Format

MEGATRON = "Megatron"
TORCH_DIST = "Megatron-Core"
DEEPSPEED = "DeepSpeed"
UNIVERSAL = "universal"
LIBAI = "LiBai"
ONEFLOW = "OneFlow-GPT"
NANOGPT = "nanoGPT"
LITGPT = "litgpt"

HERE = "meshwright.compat.formats"
MEGATRON_RANK = r"mp_rank_\d\d+(_\d{3,}){0,2}"

# `order` decides which format is asked first about a folder: the files of an earlier one may match
# the pattern of a later one too.
FORMATS = (
    Format(
        MEGATRON,
        reader=f"{HERE}.megatron.reader:open_megatron",
        files=(MEGATRON_RANK,),
        order=10,
        steps=r"iter_\d{7,}|release",
        ranks=MEGATRON_RANK,
        tracker="latest_checkpointed_iteration.txt",
        tracked=r"(\d{1,15})",
        unfinished=r"mp_rank_.*",
        target="torch",
        writer=f"{HERE}.megatron.writer:megatron_files",
    ),
    Format(
        TORCH_DIST,
        reader=f"{HERE}.megatron.torch_dist:open_torch_dist",
        files=(r"\.metadata", r".*\.distcp"),
        order=20,
        steps=r"iter_\d{7,}|release",
        tracker="latest_checkpointed_iteration.txt",
        tracked=r"(\d{1,15})",
        unfinished=r".*\.distcp|\.metadata|common\.pt",
    ),
    Format(
        UNIVERSAL,
        reader=f"{HERE}.megatron.deepspeed:open_deepspeed",
        files=(r"zero", r"mp_rank_\d+_model_states\.pt"),
        order=30,
        steps=r"global_step\d+_universal",
        tracker="latest",
        tracked=r"global_step(\d{1,15})",
    ),
    Format(
        DEEPSPEED,
        reader=f"{HERE}.megatron.deepspeed:open_deepspeed",
        files=(
            r"(layer_\d+-model_\d+|mp_rank_\d+|zero_pp_rank_\d+_mp_rank_\d+)(-|_)model_states\.pt",
        ),
        order=40,
        steps=r"global_step\d+",
        tracker="latest",
        tracked=r"global_step(\d{1,15})",
    ),
    Format(
        LITGPT,
        reader=f"{HERE}.litgpt:open_litgpt",
        files=(r"lit_model\.pth",),
        order=50,
        is_numbered=False,
        counts_padding=True,
    ),
    Format(
        LIBAI,
        reader=f"{HERE}.libai.reader:open_libai",
        files=(r"(model|module)\S*|System-\S*|snapshot_done",),
        order=70,
        folder=r"model_\w+",
        tracker="last_checkpoint",
    ),
    Format(
        ONEFLOW,
        reader=f"{HERE}.libai.reader:open_libai",
        files=(r"(model|module)\S*|System-\S*|snapshot_done",),
        order=80,
        folder=r"iter\d+_snapshot",
        steps=r"iter\d+_snapshot",
    ),
    Format(
        NANOGPT,
        reader=f"{HERE}.nanogpt:open_nanogpt",
        files=(r"ckpt\.pt",),
        order=90,
        is_numbered=False,
        yields=True,
        counts_padding=True,
    ),
)
