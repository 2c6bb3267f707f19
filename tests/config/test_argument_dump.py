"""The block of arguments at the head of the log has every name, with the values of this run."""

from __future__ import annotations

import pytest

from helpers import TINY_FLAGS
from meshwright.compat.flags.argument_dump import dumped_arguments
from meshwright.config import flags
from meshwright.config.schema import TrainConfig


def dump(*words: str) -> dict[str, str]:
    parsed = flags.parse_settings(TrainConfig, [*TINY_FLAGS, *words], "train")
    return {
        name: str(value)
        for name, value in dumped_arguments(parsed.config, parsed.ignored, "gloo").items()
    }


@pytest.mark.parametrize(
    "words, shown",
    [
        (
            "",
            "params_dtype=torch.float32 start_weight_decay=0.01 kv_channels=8 rampup_batch_size=None",
        ),
        ("--fp16", "params_dtype=torch.float16 initial_loss_scale=4294967296"),
        ("--fp16 --initial-loss-scale 65536", "initial_loss_scale=65536.0"),
        ("--bf16", "params_dtype=torch.bfloat16"),
        (
            "--position-embedding-type rope",
            "add_position_embedding=False use_rotary_position_embeddings=True",
        ),
        ("--checkpoint-activations", "recompute_granularity=full recompute_method=uniform"),
        ("--recompute-activations", "recompute_granularity=selective recompute_method=None"),
        ("--ffn-hidden-size 48", "ffn_hidden_size=48"),
        ("--no-load-optim", "no_load_optim=True no_save_optim=None"),
        (
            "--weight-decay-incr-style linear --start-weight-decay 0.1 --end-weight-decay 0.2",
            "start_weight_decay=0.1 end_weight_decay=0.2",
        ),
        ("", "tokenizer_type=None"),
        ("--vocab-file v.json --merge-file m.txt", "tokenizer_type=GPT2BPETokenizer"),
        ("--tokenizer byte", "tokenizer=byte tokenizer_type=None"),
        # Flags without effect are shown as given.
        (
            "--DDP-impl torch --no-masked-softmax-fusion",
            "DDP_impl=torch masked_softmax_fusion=False",
        ),
        ("--no-load-rng --no-initialization", "no_load_rng=True perform_initialization=False"),
        (
            "--no-persist-layer-norm --use-flash-attn",
            "no_persist_layer_norm=True use_flash_attn=True",
        ),
        ("--no-contiguous-buffers-in-local-ddp", "use_contiguous_buffers_in_local_ddp=False"),
        ("--profile-ranks 0 1 --log-progress", "profile_ranks=['0', '1'] log_progress=True"),
        ("--no-mmap-bin-files", "no_mmap_bin_files=True"),
    ],
)
def test_values_of_this_run(words: str, shown: str) -> None:
    got = dump(*words.split())
    pairs = [pair.split("=") for pair in shown.replace(", ", ",").split()]
    assert {name: got[name].replace(", ", ",") for name, _ in pairs} == dict(pairs)
