"""What is written beside the checkpoints of a run: its settings, its vocabulary, its page."""

from __future__ import annotations

import dataclasses
import shutil
import sys
from pathlib import Path

from meshwright import tokenizers
from meshwright.checkpoint import publish, steps
from meshwright.console import say
from meshwright.files import replacing
from meshwright.report.page import write_report as write_page_of
from meshwright.settings import flags
from meshwright.settings.schema import TrainConfig
from meshwright.tokenizers import Tokenizer


def prepare(folder: Path | None, config: TrainConfig, tokenizer: Tokenizer | None) -> None:
    """The first moment when something is changed: earlier checkpoints make way, the settings are written."""
    c = config.checkpoint
    if c.save and c.save_overwrite and steps.list_checkpoints(c.save):
        say(f"moved earlier checkpoints to {publish.move_aside(c.save)}")
    if c.save:  # of a run with --ckpt-format torch that was killed
        shutil.rmtree(Path(c.save) / publish.PARTS, ignore_errors=True)
    if folder is not None and not config.training.skip_train:  # a look at a run is not how it is continued
        keep_settings(folder, config, tokenizer)


def keep_settings(folder: Path, config: TrainConfig, tokenizer: Tokenizer | None) -> None:
    """config.toml, which goes on with this run, and the vocabulary, so that generate needs no flags."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config.toml.*.tmp", "report.html.*.tmp", "tokenizer/*.tmp"):  # a run that was killed left them
        for left in folder.glob(name):
            left.unlink(missing_ok=True)
    with replacing(folder / "config.toml") as file:
        # The name of a folder may be bytes that are no text: they come as lone surrogates and go as they came.
        file.write(flags.to_toml(as_continued(config)).encode(errors="surrogateescape"))
    if tokenizer is not None:
        tokenizers.save(tokenizer, folder / "tokenizer")


def as_continued(config: TrainConfig) -> TrainConfig:
    """What goes on with this run, however it began: ranks are the next launcher's to number, and what was meant for the first
    start alone is done."""
    c = config.checkpoint
    if c.save:
        elsewhere = c.load is not None and Path(c.load).resolve() != Path(c.save).resolve()
        c = dataclasses.replace(
            c,
            load=c.save,
            finetune=False,
            save_overwrite=False,
            use_checkpoint_args=False,
            no_load_optim=c.no_load_optim and c.no_save_optim,
            # What began with another run's weights must not begin with random ones if
            # it was killed before its first save.
            exit_on_missing_checkpoint=c.exit_on_missing_checkpoint or elsewhere,
        )
    p = dataclasses.replace(config.parallel, world_size=None, local_rank=None)
    return dataclasses.replace(config, checkpoint=c, parallel=p)


def write_report(folder: Path) -> None:
    """The page with pictures; a run is not spoilt by a picture that failed."""
    try:
        write_page_of(folder)
    except Exception as e:
        print(f"note: no report.html: {e}", file=sys.stderr)
