"""The benchmarks of Megatron-DeepSpeed and LiBai, on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from documents import CONFIG_003, ROUNDING, SEED_003, as_one_process, assert_same, by_deepspeed, smaller, steps

pytestmark = [pytest.mark.whole, pytest.mark.timeout(180)]


def seed_003(place: Path, micro: int, batch: int) -> list[str]:
    file = place / f"ds_config-{batch}.json"
    file.write_text(CONFIG_003.replace("$MICRO", str(micro)).replace("$GLOBAL", str(batch)))
    text = SEED_003.format(micro=micro, batch=batch).replace("./ds_config.json", file.name)
    text = smaller(text, num_layers=4).replace("checkpoints/gpt2", "checkpoints/003")
    return [*text.split(), "--fp16", "--checkpoint-activations"]


def test_seed_003(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TP2 x PP4 on two nodes, ZeRO 1 and fp16 by the JSON file, everything recomputed."""
    flags = seed_003(place, 2, 8)
    ends, logs = by_deepspeed(place, [flags, flags], 4)
    assert ends == [0] * 8, "\n".join(logs)
    assert "loss scale: 4096.0" in logs[0]
    assert_same(steps(place / "checkpoints/003"), as_one_process(place, flags, monkeypatch), ROUNDING)


def test_seed_003_with_its_two_batch_sizes(place: Path) -> None:
    """The document starts its second node with twice the batch: refused on all ranks, by name, not
    trained or hung on.
    """
    ends, logs = by_deepspeed(place, [seed_003(place, 2, 8), seed_003(place, 2, 16)], 4)
    assert ends == [2] * 8
    told = "global_batch_size: 8 on ranks 0-3, 16 on ranks 4-7"
    assert [told in log for log in logs] == [True, False, False, False] * 2  # on each node once
