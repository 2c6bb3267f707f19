"""`meshwright inspect DIR`: what a checkpoint holds, and how two of them differ."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from meshwright.base.console import fit
from meshwright.base.errors import BAD_DATA, DONE, UserError
from meshwright.base.storage.addresses import shown
from meshwright.config import flags
from meshwright.config.fields import MISSING, flag
from meshwright.config.problem import Problem


@dataclass(frozen=True)
class InspectCheckpointConfig:
    dir: Path = flag(
        MISSING,
        "a --save folder, the folder of one step in it, or any folder that --load accepts",
        positional=True,
        remote=True,
    )
    other: Path | None = flag(
        None, "a second one: print only the differences", positional=True, remote=True
    )
    step: int | None = flag(
        None, "show only this step (none: all steps, with details of the newest)"
    )
    tensors: bool = flag(False, "list every tensor with its shape, type and size")
    boxes: bool = flag(
        False, "list also where each part of a tensor lies: its file and ranges of elements"
    )
    full: bool = flag(False, "verify every byte")
    num_attention_heads: int | None = flag(
        None, "attention heads of the model, if the checkpoint does not say", docs="checkpoints"
    )
    trust_pickle: bool = flag(
        False,
        "run whatever another program's checkpoint asks for; only for files whose author you trust",
        docs="checkpoints",
    )

    def problems(self) -> list[Problem]:
        if self.other is not None and (self.step is not None or self.tensors or self.boxes):
            one = "{step}, {tensors=True} and {boxes=True} are for one checkpoint"
            return [
                Problem(
                    ("step", "tensors", "boxes"), f"{one}; to compare two steps give their folders"
                )
            ]
        return []


def main(argv: list[str]) -> int:
    about = "Show what a checkpoint of any program holds, or how two checkpoints differ."
    c = flags.parse_settings(
        InspectCheckpointConfig, argv, "meshwright inspect", about=about
    ).config
    from meshwright.checkpoint import mirror, steps
    from meshwright.checkpoint.inspect import Detail, compare_checkpoints, describe_folder
    from meshwright.checkpoint.loading import OpenOptions

    options = OpenOptions("full" if c.full else "read", c.trust_pickle, c.num_attention_heads)
    # Two checkpoints are compared by their tensors, wherever each lies.
    if c.other is not None:
        print(shown("\n".join(compare_checkpoints(c.dir, c.other, options) or ["no differences"])))
        return DONE
    mirror.fetch(c.dir)
    lines, undamaged = describe_folder(c.dir, c.step, Detail(c.full, c.tensors, c.boxes), options)
    print(fit(shown("\n".join(lines))))
    # The newest whole step decides whether a run can be continued at all.
    if not undamaged:
        root, _ = steps.split_path(c.dir)
        steps.latest(root)  # raises if all are damaged
        raise UserError(f"a checkpoint in {root} is damaged, see above", BAD_DATA)
    return DONE
