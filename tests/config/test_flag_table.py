"""Every flag has a line in docs/flags.md, and is refused by name until it works."""

import dataclasses
import json
import typing
from pathlib import Path

import pytest

from meshwright.base.errors import UserError
from meshwright.compat.flags.megatron_flags import (
    EQUAL,
    NO_EFFECT,
    OLD_SWITCHES,
    OTHER_MODELS,
    REFUSED,
    RETIRED,
    TWO_IN_ONE,
)
from meshwright.config import fields, flags
from meshwright.config.fields import choices_of, inner_type, not_yet
from meshwright.config.problem import FLAGS
from meshwright.config.schema import TrainConfig

TESTS = Path(__file__).parents[1]
CONFIGS = fields.every_config()


def entries():
    """Return (group, field name) -> field of all commands."""
    return {(g, n): f for cls in CONFIGS for n, (g, f, _) in fields.config_fields(cls).items()}


@pytest.mark.parametrize("cls", CONFIGS)
def test_not_yet_is_refused_by_name(cls):
    """Every such flag at once, each with a value other than its default, gives one line each."""
    argv, wanted = [], set()
    for name, (_, f, kind) in fields.config_fields(cls).items():
        if fields.is_not_yet(f):
            flag, default, inner = fields.spelling(name), fields.default_of(f), inner_type(kind)
            wanted.add(flag)
            if kind is bool:
                argv.append("--no-" + flag[2:] if default else flag)
            elif typing.get_origin(inner) is typing.Literal:
                argv += [flag, next(c for c in typing.get_args(inner) if c != default)]
            else:
                argv += [flag, "7"]
    if not wanted:
        return
    with pytest.raises(UserError) as caught:
        flags.parse_settings(cls, argv, "meshwright test")
    refused = [
        line.split()[0] for line in str(caught.value).splitlines() if " is not yet in" in line
    ]
    assert sorted(refused) == sorted(wanted)


HEAD = """# Flags

Generated from the dataclasses of settings, most of them in `src/meshwright/config/schema.py`.
Every flag is also a setting of `--config FILE` (`--seq-length` is `seq_length`) and of the environment
(`MESHWRIGHT_SEQ_LENGTH`), but for [flags for one start](checkpoints.md#continue-a-run). A switch `--x`
also has `--no-x`. *Not yet*: only the default works, or all values but those named.
[Flags of other programs](#flags-of-other-programs) are at the end.
"""
OTHERS = """## Flags of other programs

Flags of Megatron-LM, Megatron-Core, Megatron-DeepSpeed and OneFlow that `train` knows by name and
does not have, and what it answers. `*` stands for any ending.
"""


def reference() -> str:
    """Return docs/flags.md: a table for each group of settings."""
    out = [HEAD]
    for name, group in {
        name: group for cls in CONFIGS for name, group in fields.config_groups(cls).items()
    }.items():
        out += [
            f"## {name.capitalize().replace('_', ' ')}",
            "",
            (group.__doc__ or "").splitlines()[0],
            "",
        ]
        out += ["| flag | other spellings | default | meaning |", "|---|---|---|---|"]
        kinds = typing.get_type_hints(group)
        for f in dataclasses.fields(group):
            aliases, default = (
                " ".join(f"`{a}`" for a in f.metadata["aliases"]),
                fields.default_of(f),
            )
            shown = "" if default in (None, []) else f"`{json.dumps(fields.as_text(default))}`"
            lacking = not_yet(f, kinds[f.name])
            meaning = fields.help_of(f) + (f" *({lacking})*" if lacking else "")
            cells = [f"`{fields.spelling(f.name)}`", aliases, shown, meaning.replace("|", "\\|")]
            out.append("| " + " | ".join(cells) + " |")
        out.append("")
    return "\n".join(out + elsewhere())


def elsewhere() -> list[str]:
    """Return the tables of flags of other programs, with the answers that they get."""
    idle = {}
    for name, (_, reason) in NO_EFFECT.items():
        idle.setdefault(reason, []).append(name)
    refused = {}
    for name, reason in REFUSED.items():
        refused.setdefault(reason, []).append(name)
    same = {}
    for name, (setting, value) in (EQUAL | OLD_SWITCHES).items():
        flag = name if name in EQUAL else fields.spelling(name)
        same.setdefault(f"{fields.spelling(setting)} {value}", []).append(flag)
    for name, (setting, other, value) in TWO_IN_ONE.items():
        meant = f"{fields.spelling(setting)} and {fields.spelling(other)} {value}"
        same.setdefault(meant, []).append(name)
    models = {
        f"for {model}": [f"--{s}*" for s in starts.split()]
        for model, starts in OTHER_MODELS.items()
    }
    tables = {
        "Not yet": {reason: names for reason, names in refused.items() if "not yet" in reason},
        "Refused": {reason: names for reason, names in refused.items() if "not yet" not in reason}
        | models,
        "Without effect": idle,
        "Renamed": {f"use {new}": [old] for old, new in RETIRED.items()} | same,
    }
    out = OTHERS.splitlines()
    for heading, table in tables.items():
        out += ["", f"### {heading}", "", "| flags | answer |", "|---|---|"]
        rows = [
            f"| {' '.join(f'`{name}`' for name in names)} | {reason} |"
            for reason, names in table.items()
        ]
        out += map(FLAGS.render, rows)
    return [*out, ""]


def test_the_page_of_flags_is_up_to_date():
    page = (TESTS.parent / "docs" / "flags.md").read_text(encoding="utf-8")
    assert page == reference(), "update it: python tests/config/test_flag_table.py > docs/flags.md"
    for _, f in entries().items():
        assert fields.help_of(f).replace("|", "\\|") in page


def test_the_page_marks_all_that_answers_not_yet():
    lines = reference().splitlines()
    for _, (_, f, kind) in fields.config_fields(TrainConfig).items():
        if only := f.metadata["only"]:
            [line] = [line for line in lines if line.startswith(f"| `{fields.spelling(f.name)}` |")]
            *_, mark = line.partition(" *(not yet")
            assert mark and all(choice in mark for choice in choices_of(kind) if choice not in only)
    begin, end = lines.index("### Not yet"), lines.index("### Refused")
    listed = "\n".join(lines[begin:end])
    assert all(f"`{name}`" in listed for name, reason in REFUSED.items() if "not yet" in reason)


if __name__ == "__main__":
    print(reference(), end="")
