"""The commands of Ascend's GPT-2, on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from documents import ROUNDING, SEED_001, as_one_process, assert_same, by_deepspeed, smaller, steps

pytestmark = [pytest.mark.whole, pytest.mark.timeout(180)]


@pytest.mark.parametrize(
    ("name", "tp", "pp", "heads", "micro", "batch", "scale"),
    [
        ("345m", 1, 2, 16, 1, 2, 0),
        ("1.3b", 2, 2, 16, 2, 4, 0),
        ("2.7b", 2, 2, 32, 2, 4, 0),
        ("3.7b", 2, 2, 32, 1, 2, 0),
        ("345m-without-mp", 1, 1, 16, 2, 8, 65536),
    ],
)
def test_seed_001(
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    tp: int,
    pp: int,
    heads: int,
    micro: int,
    batch: int,
    scale: int,
) -> None:
    """Its five sizes on half its devices: their heads and parallel sizes, micro-batches a step,
    recomputing, loss scales.
    """
    file = {
        "train_batch_size": batch,
        "train_micro_batch_size_per_gpu": micro,
        "steps_per_print": 1,
        "zero_optimization": {"stage": 0},
        "gradient_clipping": 1.0,
        "prescale_gradients": True,
        "fp16": {
            "enabled": True,
            "loss_scale": scale,
            "loss_scale_window": 500,
            "hysteresis": 2,
            "min_loss_scale": 1,
            "initial_scale_power": 12,
        },
        "wall_clock_breakdown": False,
    }
    (place / "ds_config.json").write_text(json.dumps(file))
    text = SEED_001.format(tp=tp, pp=pp, layers=4, hidden=64, heads=heads, seq=32, micro=micro, batch=batch)
    text = smaller(text, num_attention_heads=heads, hidden_size=64, num_layers=4, log_interval=1)
    if scale:
        text = text.replace("--deepspeed-activation-checkpointing", "")
    flags = [f"--preset=ascend-{name}", *text.replace("ckpts/ckpts_tmp", f"ckpts/{name}").split()]
    ends, logs = by_deepspeed(place, [flags], 4)
    assert ends == [0] * 4, "\n".join(logs)
    assert f"tensor-model-parallel size: {tp}, pipeline-model-parallel size: {pp}" in logs[0]
    assert f"loss scale: {scale or 4096}.0" in logs[0]
    assert_same(steps(place / "ckpts" / name), as_one_process(place, flags, monkeypatch), ROUNDING)
