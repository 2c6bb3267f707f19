"""`meshwright preprocess`: text to .bin/.idx."""

from __future__ import annotations

import os
import shlex
import sys

from meshwright.base.console import notice
from meshwright.base.errors import DONE
from meshwright.config import command
from meshwright.config.problem import SettingsError
from meshwright.config.schema import TokenizerFlags
from meshwright.config.text_inputs import PreprocessConfig
from meshwright.runtime.ranks.world import find_world


def main(argv: list[str]) -> int:
    parsed = command.settings(PreprocessConfig, argv, "preprocess", "Text to .bin/.idx.")
    if parsed is None:
        return DONE
    if parsed.dry_run:
        show_inputs(parsed.config)
        return DONE
    # This import is late, so that --help is quick.
    from meshwright.data.text.preprocess import preprocess

    shard = parsed.config.preprocess.shard
    ranks = find_world(os.environ).size
    if ranks > 1 and shard is None:  # they would write the same files
        raise SettingsError(
            f"started as {ranks} processes, but one does the work, on all cores; start one, "
            f"or give each a part of the input: {{shard=1/{ranks}}} and so on"
        )
    prefixes = preprocess(parsed.config, sys.stdout, sys.stderr)
    if shard is None:
        notice(f"next: meshwright train --data-path {shlex.join(prefixes)} --save RUN ...")
    return DONE


def show_inputs(config: PreprocessConfig) -> None:
    """Say what --dry-run would read and write; without a tokenizer, what it would read."""
    from meshwright.data.text.inputs import find_inputs
    from meshwright.data.text.preprocess import PreprocessPlan
    from meshwright.data.text.reading import note_passed

    preparation = None
    if config.tokenizer != TokenizerFlags():
        # This is only a plan: what it would print itself is printed below.
        with open(os.devnull, "w") as nowhere:
            preparation = PreprocessPlan(config, nowhere, nowhere)
    # The plan has found the inputs already.
    inputs = preparation.inputs if preparation else find_inputs(config.preprocess)
    note_passed(inputs, config.preprocess)
    ids = f" with {preparation.tokenizer.size} ids" if preparation else ""
    print(f"would read {inputs.bytes - inputs.passed.bytes:,} bytes{ids}: {inputs.describe()}")
    for line in inputs.opened():
        print(f"  {line}")
    for line in inputs.left_out(config.preprocess.on_error, config.preprocess.encoding):
        print(line)
    # Without a tokenizer the text can be looked at, but not written.
    if preparation is None:
        print("a tokenizer is needed to write tokens: --tokenizer")
    elif config.preprocess.output_prefix and not preparation.is_done(sys.stdout, dry_run=True):
        print(
            f"would write {' and '.join(f'{prefix}.bin/.idx' for prefix in preparation.prefixes)}"
        )
