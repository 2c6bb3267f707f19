"""The formats that compat registers: how checkpoints are recognised, found and read."""

from __future__ import annotations

from meshwright.checkpoint.registry import (
    DEEPSPEED,
    LIBAI,
    LITGPT,
    MEGATRON,
    MEGATRON_RANK,
    NANOGPT,
    ONEFLOW,
    TORCH_DIST,
    UNIVERSAL,
    Format,
)

FORMATS = (
    Format(
        MEGATRON,
        order=-1,
        reader="meshwright.compat.formats.megatron.reader:open_megatron",
        writer="meshwright.compat.formats.megatron.writer:megatron_files",
        files=(MEGATRON_RANK,),
        steps=r"iter_\d{7,}|release",
        tracker="latest_checkpointed_iteration.txt",
        tracked=r"(\d{1,15})",
        unfinished=r"mp_rank_.*",
    ),
    Format(
        TORCH_DIST,
        order=-1,
        reader="meshwright.compat.formats.megatron.torch_dist:open_torch_dist",
        files=(r"\.metadata", r".*\.distcp"),
        steps=r"iter_\d{7,}|release",
        tracker="latest_checkpointed_iteration.txt",
        tracked=r"(\d{1,15})",
        unfinished=r".*\.distcp|\.metadata|common\.pt",
    ),
    Format(
        UNIVERSAL,
        order=-1,
        reader="meshwright.compat.formats.megatron.deepspeed:open_deepspeed",
        files=(r"zero", r"mp_rank_\d+_model_states\.pt"),
        steps=r"global_step\d+_universal",
        tracker="latest",
        tracked=r"global_step(\d{1,15})",
    ),
    Format(
        DEEPSPEED,
        order=-1,
        reader="meshwright.compat.formats.megatron.deepspeed:open_deepspeed",
        files=(r"(layer_\d+-model_\d+|mp_rank_\d+|zero_pp_rank_\d+_mp_rank_\d+)(-|_)model_states\.pt",),
        steps=r"global_step\d+",
        tracker="latest",
        tracked=r"global_step(\d{1,15})",
    ),
    Format(
        LITGPT,
        order=-1,  # its folders have the files of Hugging Face that it was made from, too
        reader="meshwright.compat.formats.litgpt:open_litgpt",
        files=(r"lit_model\.pth",),
        is_numbered=False,
        counts_padding=True,
    ),
    Format(
        LIBAI,
        order=1,
        reader="meshwright.compat.formats.libai.reader:open_libai",
        files=(r"(model|module)\S*|System-\S*|snapshot_done",),
        folder=r"model_\w+",
        tracker="last_checkpoint",
    ),
    Format(
        ONEFLOW,
        order=1,
        reader="meshwright.compat.formats.libai.reader:open_libai",
        files=(r"(model|module)\S*|System-\S*|snapshot_done",),
        folder=r"iter\d+_snapshot",
        steps=r"iter\d+_snapshot",
    ),
    Format(
        NANOGPT,
        order=1,
        reader="meshwright.compat.formats.nanogpt:open_nanogpt",
        files=(r"ckpt\.pt",),
        is_numbered=False,
        yields=True,
        counts_padding=True,
    ),
)
