"""`meshwright collect RUN`: bring the parts of a run's steps together from several machines."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from meshwright.base.console import show
from meshwright.base.errors import BAD_DATA, DONE, UserError
from meshwright.config import flags
from meshwright.config.fields import MISSING, flag


@dataclass(frozen=True)
class CollectConfig:
    run: Path = flag(
        MISSING,
        "the run's folder on this machine; the parts of other machines are added to it",
        positional=True,
    )
    sources: list[str] = flag(
        [],
        "HOST:DIR or DIR with the run on another machine, read with rsync or ssh (none: where the steps say)",
        "--from",
        value="NAME",
        word="HOST:DIR",
        docs="checkpoints",
    )


def main(argv: list[str]) -> int:
    about = (
        "Bring together the steps of a run whose machines saved on disks of their own. What is here "
        "already is not copied again, and every copied byte is verified."
    )
    c = flags.parse_settings(CollectConfig, argv, "meshwright collect", about=about).config
    from meshwright.apps.collect.collect import collect, describe

    collect(c.run, c.sources)
    lines, complete = describe(c.run)
    show("\n".join(lines))
    if not complete:
        raise UserError(
            f"no step in {c.run} is complete, see above; add --from for the rest", BAD_DATA
        )
    return DONE
