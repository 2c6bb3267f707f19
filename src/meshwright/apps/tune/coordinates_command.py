"""`meshwright coordinates`: how activations grow with width and depth in the first steps."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from meshwright.base.errors import DONE, UNEQUAL
from meshwright.base.records import json_ready
from meshwright.config import checks, command, data_paths, flags
from meshwright.config.fields import flag, group, spelling, with_settings
from meshwright.config.problem import Problem, require, stated
from meshwright.config.schema import TrainConfig

ABOUT = (
    "Train models of several widths and depths for a few steps, print how fast activations grow with the size, and "
    "draw it. The flags of train go after --; without --data-path the data are random tokens. The exit status is 76 "
    "if the changes depend on the size."
)
HEAD = 32  # width of a head, unless the flags say another


@dataclass(frozen=True)
@group(docs="tuning")
class CoordinateFlags:
    """Sizes to compare, and what is made of them."""

    widths: list[int] = flag(
        [], "hidden sizes to compare; heads keep their width, so there are more of them"
    )
    depths: list[int] = flag([], "numbers of layers to compare")
    steps: int = flag(4, "steps, all on the same batch", bound=">0")
    tolerance: float = flag(
        0.25, "largest slope of a change over the size that counts as none", bound=">0"
    )
    picture: str = flag("coordinates.svg", "picture to write", value="FILE")
    json: bool = flag(False, "print what was measured as JSON")


@dataclass(frozen=True)
class CoordinatesConfig:
    """Settings of `meshwright coordinates`."""

    ADVICE: ClassVar[str] = "flags of train go after --"

    coordinates: CoordinateFlags = CoordinateFlags()

    def problems(self) -> list[Problem]:
        c = self.coordinates
        if not c.widths and not c.depths:
            text = "sizes are needed: meshwright coordinates --widths 64 128 256 -- FLAGS OF TRAIN"
            return [Problem(("widths", "depths"), text, "missing")]
        out = []
        for name in ("widths", "depths"):
            sizes = getattr(c, name)
            if sizes and (len(set(sizes)) < 2 or min(sizes) <= 0):
                out.append(
                    Problem((name,), f"{stated(c, name)}: give two or more different sizes above 0")
                )
        return out


def main(argv: list[str]) -> int:
    at = argv.index("--") if "--" in argv else len(argv)
    parsed = command.settings(CoordinatesConfig, argv[:at], "coordinates", ABOUT)
    if parsed is None:
        return DONE
    of_train = command.flags_of_train(argv[at + 1 :])
    # An older switch, such as --use-distributed-optimizer, is named behind "command line".
    sources = of_train.sources
    typed = [name for name in sources if sources[name].startswith("command line")]
    c = parsed.config.coordinates
    return compare(c, complete(of_train.config, c), typed, parsed.dry_run)


def complete(config: TrainConfig, c: CoordinateFlags) -> TrainConfig:
    """Fill in what a run needs and no flag names."""
    from meshwright.data import tokenizers

    m = config.model
    d = config.data
    t = config.training
    k = config.tokenizer
    # What the flags leave open is small, so that the check is quick on a CPU too.
    hidden = m.hidden_size
    if not hidden and c.widths:
        hidden = min(c.widths)
    heads = m.num_attention_heads
    if not heads and hidden:
        heads = max(1, hidden // (m.kv_channels or HEAD))
    # Random tokens stand in for data that no flag names.
    has_files = any(paths.sources for paths in data_paths.path_sets(d))
    values = {
        "num_layers": m.num_layers or 4,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "mock_data": not has_files,
        "seq_length": d.seq_length or 16,
    }
    # From more random tokens, which say little about each other, wide models would learn less.
    if not (has_files or k.vocab_size or tokenizers.is_named(k)):
        values["vocab_size"] = 64
    if not (t.micro_batch_size or t.num_accumulation_steps):
        values["micro_batch_size"] = 2
    return with_settings(config, **values)


def changed_settings(config: TrainConfig, small: TrainConfig, names: list[str]) -> list[str]:
    """Return those of the settings that have another value in the runs that are measured."""
    given, used = flags.to_dict(config), flags.to_dict(small)
    return [name for name in names if given[name] != used[name]]


def compare(c: CoordinateFlags, config: TrainConfig, typed: list[str], dry_run: bool) -> int:
    """Measure and judge all sizes; `typed` are the settings that the command line has."""
    from meshwright.apps.tune import coordinates
    from meshwright.base import device as devices

    small = coordinates.make_small(config)
    if unused := changed_settings(config, small, typed):
        print(f"note: the check does not use {', '.join(map(spelling, unused))}", file=sys.stderr)
    axes: list[tuple[coordinates.Axis, list[int]]] = [
        ("width", sorted({*c.widths})),
        ("depth", sorted({*c.depths})),
    ]
    axes = [(axis, sizes) for axis, sizes in axes if sizes]
    # All sizes are checked before the first is trained.
    for axis, sizes in axes:
        for size in sizes:
            require(checks.problems(coordinates.at_size(small, axis, size)))
    if dry_run:
        return DONE
    device = devices.open_device(small.parallel.device, 0)

    def report(line: str) -> None:
        print(line, file=sys.stderr)

    measured = [
        coordinates.measure(small, axis, sizes, c.steps, device, report) for axis, sizes in axes
    ]
    faults = [fault for growth in measured for fault in growth.faults(c.tolerance)]
    path = Path(c.picture)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(coordinates.picture(measured, path.stem), encoding="utf-8")
    # With --json, standard output has the JSON alone.
    if c.json:
        record = {
            "is_stable": not faults,
            "faults": faults,
            "measured": [growth.as_record() for growth in measured],
        }
        print(json.dumps(json_ready(record), allow_nan=False))
    else:
        for growth in measured:
            print("\n".join([*growth.table(), ""]))
        print(verdict(faults, c))
    print(path, file=sys.stderr if c.json else sys.stdout)
    return UNEQUAL if faults else DONE


def verdict(faults: list[str], c: CoordinateFlags) -> str:
    if not faults:
        return f"stable: over {c.steps} steps no change has a slope beyond ±{c.tolerance:g}, and nothing initial grows"
    return f"not stable: {'; '.join(faults)}"
