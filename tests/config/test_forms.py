"""Settings in a small language are read once, and leave as the text that was given."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from parsing import parse

from meshwright.config import flags
from meshwright.config.fields import TextForm, forms_in
from meshwright.config.grammar import (
    AttentionWindow,
    BatchSchedule,
    BlendStage,
    OnSpike,
    PipelineLayout,
    Split,
)
from meshwright.config.schema import Data, Logging, Model, Parallel, TrainConfig, Training

# One text of each setting, in a spelling that no writer would choose.
TEXTS = {
    "window_size": "(3, 0)",
    "window_attn_skip_freq": "([1]*5 + [0])*4",
    "split": "90/ 8/2.0",
    "blend_stages": ["60% :  0.5 a 0.5 b", "9e3 tokens: a"],
    "skip_train_iteration_range": ["07-9", "3-5"],
    "step_batch_size_schedule": "0:768, .25M:1536",
    "seq_length_schedule": "0:8, 7:16",
    "on_nonfinite": "skip:3",
    "on_spike": "rollback:2",
    "pipeline_layout": " 6,6, 6,6",
    "node_ips": "a, b",
    "eval_tasks": "text=a,b.txt,wikitext=c",
}


def test_every_form_leaves_as_its_text(tmp_path: Path) -> None:
    """Into config.toml and a checkpoint, and from there into equal settings."""
    groups = (Model, Data, Training, Parallel, Logging)
    assert {name for group in groups for name in forms_in(group)} == TEXTS.keys()
    argv = []
    for name, text in TEXTS.items():
        argv += [f"--{name}", *text] if isinstance(text, list) else [f"--{name}={text}"]
    config = parse(*argv).config
    saved = flags.to_dict(config)
    assert {name: saved[name] for name in TEXTS} == TEXTS

    (tmp_path / "config.toml").write_text(flags.to_toml(config))
    assert parse("--config", str(tmp_path / "config.toml")).config == config
    again = flags.build_config(
        TrainConfig, [("", flags.from_saved(TrainConfig, saved, "a checkpoint"))]
    )[0]
    assert again == config and isinstance(again.training.on_spike, OnSpike)
    # as the block of arguments prints a list
    assert repr(config.data.blend_stages) == repr(TEXTS["blend_stages"])


def test_settings_that_are_built_in_python_are_read_too() -> None:
    data = Data(split="1", blend_stages=["5: a"])  # type: ignore[arg-type, list-item]
    assert data.split == Split("1", (1.0, 0.0, 0.0)) and data.blend_stages == [
        BlendStage.read("5: a")
    ]
    assert dataclasses.replace(Model(), window_size="3,0").window_size == AttentionWindow("3,0", 3)
    with pytest.raises(ValueError, match="^window_size: '3,1' is neither L nor L,0"):
        Model(window_size="3,1")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        (OnSpike.read("rollback:12"), {"word": "rollback", "times": 12}),
        (OnSpike.read("warn"), {"word": "warn", "times": 0}),
        (Split.read("949,50,1"), {"shares": (949.0, 50.0, 1.0)}),
        (Split.read("'99,1,0'"), {"text": "99,1,0", "shares": (99.0, 1.0, 0.0)}),
        (BatchSchedule.read("0:2 .25K:1.5k"), {"stages": ((0, 2), (250, 1500))}),
        (PipelineLayout.read("[0]*2+[1]"), {"ids": (0, 0, 1), "counts": ()}),
        (PipelineLayout.read(" 2, 1"), {"ids": (), "counts": (2, 1)}),
        (
            BlendStage.read("60%: 0.5 a 0.5 b"),
            {"begin": 60.0, "unit": "%", "weights": (("a", 0.5), ("b", 0.5))},
        ),
        (AttentionWindow.read("-1,0"), {"reach": 0}),
    ],
    ids=str,
)
def test_what_a_text_means(form: TextForm, expected: dict[str, object]) -> None:
    assert {name: getattr(form, name) for name in expected} == expected
