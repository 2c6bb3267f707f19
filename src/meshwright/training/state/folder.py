"""The run folder beside the checkpoints: settings, vocabulary and report page."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from meshwright.base import registry
from meshwright.base.console import remark
from meshwright.base.errors import UserError
from meshwright.base.files import replacing, require_unlinked
from meshwright.base.runs.goodput import Goodput, read_goodput
from meshwright.base.runs.history import read_history
from meshwright.base.storage.addresses import address_of
from meshwright.checkpoint import owner, publish, steps
from meshwright.checkpoint.machines import joined
from meshwright.config import flags
from meshwright.config.fields import config_fields, default_of, with_settings
from meshwright.config.schema import TrainConfig
from meshwright.data import tokenizers
from meshwright.data.tokenizers import Tokenizer
from meshwright.runtime.ranks.team import Team
from meshwright.training.state.saver import is_continued

# The files of a run beside its checkpoints, which are moved aside with them. tokenizer/ is not
# among them: it is copied, because the new run may be reading it.
FILES = (
    "config.toml",
    "metrics.jsonl",
    "log.txt",
    "report.html",
    "tensorboard",
    "wandb",
    "profile",
)


def find_users(config: TrainConfig, team: Team) -> publish.Users:
    """Find out which ranks share the folder of --save, and say if machines have their own."""
    c = config.checkpoint
    save, choice = c.save, c.save_on_each_node
    if not save:
        return ()
    users: publish.Users = ()
    if team.size > 1 and (choice == "auto" or address_of(save)):
        users = publish.find_users(Path(save), team)
    elif team.size > 1 and choice == "yes":
        users = publish.users_by_machine(Path(save), team)

    # Say what was found, and which of these flags have no effect then.
    has_own_disks = publish.are_on_own_disks(save, users)
    number = len({*users})
    if has_own_disks:
        remark(
            f" > --save {save}: {number} machines have disks of their own there; each keeps its ranks' part of a "
            "step, and `meshwright collect` brings the parts together"
        )
    elif choice == "yes":
        remark(" > note: --save-on-each-node yes has no effect: all ranks save to one folder")
    if c.save_copies > 1 and not has_own_disks:
        remark(" > note: --save-copies has no effect: it is for machines with disks of their own")
    elif has_own_disks and c.save_copies > number:
        remark(
            f" > note: --save-copies {c.save_copies}: each part is kept {number} times, once on each machine"
        )
    return users


def bring_records(config: TrainConfig, team: Team) -> None:
    """Bring a run's metrics and log to rank 0's machine, if another one has written them last."""
    c = config.checkpoint
    is_beside = c.run_dir is None or c.run_dir == c.save
    if not (is_continued(c) and is_beside and c.save):
        return
    with joined(Path(c.save), team) as machines:
        if machines is not None:
            team.run_on_rank_0(machines.bring_records)


def prepare(
    folder: Path | None,
    config: TrainConfig,
    tokenizer: Tokenizer | None,
    will_train: bool = True,
    with_run_dir: bool = True,
) -> None:
    """Move an earlier run aside if it is to be replaced, and write the settings.

    A finished run keeps the settings that it has: nothing is trained with the new ones. Without
    `with_run_dir` the folder of --run-dir is left to rank 0.
    """
    c = config.checkpoint

    if c.save_overwrite and not config.training.skip_train:
        # --save and --run-dir may be one folder under two names.
        paths = (c.save, c.run_dir) if with_run_dir else (c.save,)
        roots = {Path(path).resolve(): Path(path) for path in paths if path}
        loaded = steps.split_path(c.load)[0].resolve() if c.load else None
        for real, root in roots.items():
            # A run that goes on from an earlier step of the same folder keeps its curves.
            others = [name for name in FILES if (root / name).exists() and real != loaded]
            if others or steps.list_checkpoints(root):
                remark(f"moved the earlier run to {move_aside(root, others)}")
    if c.save:  # a run with --ckpt-format torch leaves this folder if it is killed
        shutil.rmtree(Path(c.save) / publish.PARTS, ignore_errors=True)

    # An evaluation does not change how the run continues.
    if folder is None or config.training.skip_train:
        return
    is_new = not (folder / "config.toml").exists()
    if will_train or is_new:
        keep_settings(folder, config, tokenizer)


def move_aside(root: Path, others: list[str]) -> Path:
    aside = owner.move_aside(root, others)
    if (root / "tokenizer").is_dir():
        require_unlinked(root / "tokenizer")
        shutil.copytree(root / "tokenizer", aside / "tokenizer", symlinks=True)
    return aside


def keep_settings(folder: Path, config: TrainConfig, tokenizer: Tokenizer | None) -> None:
    """Write config.toml, which continues this run, and the vocabulary for generate."""
    folder.mkdir(parents=True, exist_ok=True)
    # Remove the temporary files of a killed run.
    for name in ("config.toml.*.tmp", "report.html.*.tmp", "tokenizer/*.tmp"):
        for left in folder.glob(name):
            left.unlink(missing_ok=True)
    with replacing(folder / "config.toml") as file:
        # Bytes of a folder's name that are not UTF-8 arrive as lone surrogates; write them back.
        file.write(flags.to_toml(as_continued(config)).encode(errors="surrogateescape"))
    if tokenizer is not None:
        tokenizers.save_tokenizer(tokenizer, folder / "tokenizer")


def as_continued(config: TrainConfig) -> TrainConfig:
    """Return the settings that continue this run.

    Flags for one start are left out. A run that saves nothing keeps them, so that a start from its
    config.toml is refused until they are typed. The ranks' numbers are cleared too: the next
    launcher assigns them.
    """
    # Without saved moments every start has to go on without them.
    no_load_optim = config.checkpoint.no_load_optim and config.checkpoint.no_save_optim
    config = without_flags_of_one_start(config) if config.checkpoint.save else config
    c, named = config.checkpoint, config.tokenizer.tokenizer
    if c.save:
        elsewhere = c.load is not None and Path(c.load).resolve() != Path(c.save).resolve()
        # A run that starts with another run's weights must not restart with random ones if it is
        # killed before its first save.
        must_find = c.exit_on_missing_checkpoint or elsewhere
        config = with_settings(
            config, load=c.save, no_load_optim=no_load_optim, exit_on_missing_checkpoint=must_find
        )
    if named and named != "byte" and not os.path.exists(os.path.expanduser(named)):
        config = with_settings(config, tokenizer=None)  # the run's own copy needs no download
    return with_settings(config, world_size=None, local_rank=None, trust_pickle=False)


def without_flags_of_one_start(config: TrainConfig) -> TrainConfig:
    fields = config_fields(TrainConfig)
    return with_settings(
        config, **{name: default_of(f) for name, (_, f, _) in fields.items() if f.metadata["once"]}
    )


def goodput_of(folder: Path) -> Goodput | None:
    """Return the share of the run's time that went into steps that count, if it is known."""
    try:
        return read_goodput(read_history(folder))
    except (UserError, OSError):  # a log that someone has edited
        return None


def find_page() -> Callable[[Path], object] | None:
    """Return the function that draws the page of a run's folder, if this installation has it.

    It is registered as `report` in the group `meshwright.parts`.
    """
    draw: Callable[[Path], object] | None = registry.find("parts", "report")
    return draw


def write_report(folder: Path) -> None:
    """Write the report page, if one is drawn; a failure is printed and does not fail the run."""
    if (draw := find_page()) is None:
        return
    try:
        draw(folder)
    except Exception as e:
        reason = e.strerror if isinstance(e, OSError) and e.strerror else e
        print(f"note: no report.html: {reason}", file=sys.stderr)


DRAW = """
import os, pathlib, sys
sys.path.remove("")  # the files beside the run are no modules
os.nice(19)
from meshwright.training.state.folder import find_page
find_page()(pathlib.Path(sys.argv[1]))
"""


class LivePage:
    """The report page of a run that goes on, drawn again from time to time.

    A process of the lowest priority draws it, which shares nothing with the training: at most twice
    a minute, and so seldom that it takes at most a fiftieth of the run's time on a processor.
    """

    FIRST, EVERY, SHARE = 3.0, 30.0, 0.02  # seconds, seconds, processor time per time

    def __init__(self, folder: Path) -> None:
        self.folder, self.is_closed = folder, False
        self.process: subprocess.Popen[bytes] | None = None
        self.begun, self.next, self.used = 0.0, time.monotonic() + self.FIRST, 0.0

    def update(self) -> None:
        """Start to draw the page if it is time; the caller does not wait."""
        now = time.monotonic()
        if self.is_closed or now < self.next:
            return
        if self.process is not None:
            if self.process.poll() is None:
                return
            self.process = None
            self.next = self.begun + max(self.EVERY, (children_seconds() - self.used) / self.SHARE)
        if now >= self.next:
            self.begun, self.next, self.used = now, now + self.EVERY, children_seconds()
            self.process = self.draw()

    def draw(self) -> subprocess.Popen[bytes] | None:
        root = str(Path(__file__).parents[3])  # of a clone that is not installed
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        none = subprocess.DEVNULL
        try:
            return subprocess.Popen(
                [sys.executable, "-c", DRAW, str(self.folder)],
                stdin=none,
                stdout=none,
                stderr=none,
                env=environment,
                start_new_session=True,
            )
        except OSError:  # no memory or too many processes: the page is drawn later
            return None

    def close(self, failed: bool = False) -> None:
        """Stop drawing. After a failure draw once more, in a process that outlives this one."""
        if self.is_closed:
            return
        self.is_closed = True
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            for left in self.folder.glob(f"report.html.{self.process.pid}.*.tmp"):
                left.unlink(missing_ok=True)
            self.process = None
        if failed and (last := self.draw()) is not None:
            # Waited for, it leaves no zombie in a program that goes on.
            threading.Thread(target=last.wait, daemon=True).start()


def children_seconds() -> float:
    """Return the processor time of the processes that this one has started and waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
