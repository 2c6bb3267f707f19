"""`meshwright preprocess`: text to .bin/.idx."""

from __future__ import annotations

import os
import shlex
import sys

from meshwright.console import notice
from meshwright.errors import DONE
from meshwright.launch.world import find_world
from meshwright.settings import command
from meshwright.settings.preprocess import PreprocessConfig


def main(argv: list[str]) -> int:
    parsed = command.settings(PreprocessConfig, argv, "preprocess", "Text to .bin/.idx.")
    if parsed is None:
        return DONE
    if parsed.dry_run:
        from meshwright import tokenizers
        from meshwright.data.prepare import sentences
        from meshwright.data.prepare.inputs import find

        p = parsed.config.preprocess
        found = find(p)
        if p.split_sentences:
            sentences.build(p.lang, p.keep_newlines)
        size = tokenizers.build(parsed.config.tokenizer).size
        print(f"would read {found.bytes:,} bytes with {size} ids: {found.describe()}")
        for line in found.opened():
            print(f"  {line}")
        if found.passed:
            print(found.passed.line())
        return DONE
    from meshwright.data.prepare.preprocess import run
    from meshwright.launch import rendezvous

    world = find_world(os.environ)
    try:
        prefixes = run(parsed.config, sys.stdout, sys.stderr, world)
    except RuntimeError as error:
        raise (rendezvous.explain_lost_rank(error) if world.size > 1 else None) or error from None
    finally:
        if world.size > 1:
            rendezvous.leave()
    if world.rank == 0:
        notice(f"next: meshwright train --data-path {shlex.quote(prefixes[0])} --save RUN ...")
    return DONE
