"""Log curves to TensorBoard, Weights & Biases, Trackio and other packages' trackers.

Curves have Megatron's names. metrics.jsonl is the source of truth, so a tracker that fails prints a
line and is switched off.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.base import registry
from meshwright.base.errors import UNAVAILABLE
from meshwright.base.files import own_folder, read_small, replacing, require_unlinked
from meshwright.config.problem import SettingsError
from meshwright.config.schema import Logging
from meshwright.training.before.packages import require_packages
from meshwright.training.log.columns import STEP_COLUMNS


class Tracker:
    """A program that draws curves. Its first failure is printed and switches it off."""

    name: str
    run: Any  # the program's own object, with a method `log` like wandb's
    is_off = False

    def add_scalars(self, values: dict[str, float], iteration: int, samples: int) -> None:
        self.run.log({**values, "samples": samples}, step=iteration)

    def add_text(self, name: str, text: str, iteration: int | None) -> None:
        raise NotImplementedError

    def finish(self) -> None:
        raise NotImplementedError

    def scalars(self, values: dict[str, float], iteration: int, samples: int) -> None:
        """Add points at an iteration and a number of consumed samples."""
        if values:
            self._try(self.add_scalars, values, iteration, samples)

    def text(self, name: str, text: str, iteration: int | None = None) -> None:
        self._try(self.add_text, name, text, iteration)

    def close(self) -> None:
        self._try(self.finish)
        self.is_off = True

    def _try(self, act: Callable[..., None], *values: Any) -> None:
        if self.is_off:
            return
        try:
            act(*values)
        except Exception as e:  # the network, the disk, or anything that the package raises
            self.is_off = True
            reason = f"{type(e).__name__}: {e}"
            print(
                f"{self.name} failed and is now off; the run continues ({reason})", file=sys.stderr
            )


@dataclass(frozen=True)
class RunToDraw:
    """The facts with which a tracker is opened; its first point is that of step `first`."""

    logging: Logging
    folder: Path | None
    settings: dict[str, Any]
    name: str
    first: int = 1
    samples: int = 0  # consumed before it


def open_trackers(run: RunToDraw) -> list[Tracker]:
    """Open the registered trackers that want this run.

    Each entry of the registry is a function of a RunToDraw that returns a Tracker, or None if the
    settings do not ask for it.
    """
    # Refuse a tracker whose package is missing before another one begins a run.
    require_packages(run.logging)
    opened = [open_tracker(run) for open_tracker in registry.load("trackers").values()]
    return [tracker for tracker in opened if tracker is not None]


def open_tensorboard(run: RunToDraw) -> Tracker | None:
    logging = run.logging
    # If no folder is named, curves are drawn in the run's folder, provided the package is there.
    is_named = bool(logging.tensorboard_dir)
    root: Path | None = None
    if logging.tensorboard_dir:
        root = Path(logging.tensorboard_dir)
    elif run.folder is not None:
        root = run.folder / "tensorboard"
    if not logging.tensorboard or root is None:
        return None
    if not is_named:
        require_unlinked(root)
    try:
        tracker = TensorBoard(root, logging.tensorboard_queue_size, run.first, run.samples)
    except UnicodeEncodeError:
        print(
            f"note: TensorBoard writes no files into {root!r}, whose name is not UTF-8",
            file=sys.stderr,
        )
        return None
    except ImportError as e:
        if is_named:
            raise SettingsError(f"{{tensorboard_dir}}: {e}", UNAVAILABLE) from None
        return None
    # TensorBoard shows texts as Markdown, in which four blanks make a block of code.
    lines = (f"    {key}: {json.dumps(value, default=str)}" for key, value in run.settings.items())
    tracker.text("arguments", "\n".join(lines))
    return tracker


def open_wandb(run: RunToDraw) -> Tracker | None:
    if not run.logging.wandb_project:
        return None
    return Wandb(run.logging, run.folder, run.settings, run.name, run.first)


def open_trackio(run: RunToDraw) -> Tracker | None:
    if not run.logging.trackio_project:
        return None
    return Trackio(run.logging.trackio_project, run.settings, run.name, run.first)


class TensorBoard(Tracker):
    """Points over iterations in `folder`, and over samples in `folder/samples`.

    A resumed attempt hides the points of earlier ones from its first step on. TensorBoard hides by
    step number for all tags, so points at iteration 1000 and at sample 1000 cannot share a folder.
    """

    name = "TensorBoard"

    def __init__(self, folder: Path, queue: int, first: int, samples: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        writer: Any = SummaryWriter
        self.first = first
        folder.mkdir(parents=True, exist_ok=True)
        own_folder(folder / "samples")
        self.over_iterations = writer(str(folder), max_queue=queue, purge_step=first)
        self.over_samples = writer(str(folder / "samples"), max_queue=queue, purge_step=samples + 1)

    def add_scalars(self, values: dict[str, float], iteration: int, samples: int) -> None:
        for tag, value in values.items():
            self.over_iterations.add_scalar(tag, value, iteration)
            self.over_samples.add_scalar(f"{tag} vs samples", value, samples)

    def add_text(self, name: str, text: str, iteration: int | None) -> None:
        self.over_iterations.add_text(name, text, self.first if iteration is None else iteration)

    def finish(self) -> None:
        self.over_iterations.close()
        self.over_samples.close()


class Wandb(Tracker):
    """One wandb run per run folder, whose file `wandb-id` holds its id."""

    name = "Weights & Biases"

    def __init__(
        self, logging: Logging, folder: Path | None, settings: dict[str, Any], name: str, first: int
    ) -> None:
        wandb: Any = importlib.import_module("wandb")
        root = logging.wandb_save_dir or folder
        # The id stays in the run's folder even if wandb writes elsewhere.
        id_file = folder / "wandb-id" if folder else None
        if folder and not logging.wandb_save_dir:
            require_unlinked(folder / "wandb")  # which the package makes
        # A run that goes on draws on; one that begins again in the folder gets curves of its own.
        if first > 1 and id_file is not None and id_file.exists():
            run_id = read_small(id_file, 4096, folder).decode().strip()
        else:
            run_id = uuid.uuid4().hex
        try:
            self.run = wandb.init(
                project=logging.wandb_project,
                name=logging.wandb_exp_name or name,
                dir=root and str(root),
                config=settings,
                id=run_id,
                resume="allow",
            )
        except Exception as e:
            hint = "wandb login, or WANDB_MODE=offline to upload later"
            raise SettingsError(
                f"{{wandb_project={logging.wandb_project}}}: {e} ({hint})", UNAVAILABLE
            ) from None
        if id_file:
            with replacing(id_file) as file:
                file.write(f"{run_id}\n".encode())

    def add_text(self, name: str, text: str, iteration: int | None) -> None:
        self.run.summary[name] = text

    def finish(self) -> None:
        self.run.finish()


class Trackio(Tracker):
    """A run of a Trackio project, on this machine or in the space that TRACKIO_SPACE_ID names.

    A run that is resumed continues the newest one of its name; a new one gets a curve of its own.
    """

    name = "Trackio"

    def __init__(self, project: str, settings: dict[str, Any], name: str, first: int) -> None:
        trackio: Any = importlib.import_module("trackio")
        try:
            with contextlib.redirect_stdout(sys.stderr):  # stdout is the log
                self.run = trackio.init(
                    project=project,
                    name=name,
                    config=settings,
                    resume="never" if first == 1 else "allow",
                    embed=False,
                )
        except Exception as e:
            raise SettingsError(
                f"{{trackio_project={project}}}: {e} (leave it out to go on without)", UNAVAILABLE
            ) from None
        # The package's finish, not the run's: else it would finish the run again when Python ends.
        self.markdown, self.end = trackio.Markdown, trackio.finish

    def add_text(self, name: str, text: str, iteration: int | None) -> None:
        self.run.log({name: self.markdown(text)}, step=iteration)

    def finish(self) -> None:
        with contextlib.redirect_stdout(sys.stderr):
            self.end()


# By Megatron's name of a curve: the number that it shows, and the flag that turns it on.
TAGS = {
    c.tag: (c.name, f"log_{c.tag.replace('-', '_')}_to_tensorboard" if c.needs_flag else None)
    for c in STEP_COLUMNS
    if c.tag
} | {
    "world-size": ("world_size", "log_world_size_to_tensorboard"),
    "mem-reserved-bytes": ("reserved", "log_memory_to_tensorboard"),
    "mem-allocated-bytes": ("memory", "log_memory_to_tensorboard"),
    "mem-allocated-count": ("allocated_count", "log_memory_to_tensorboard"),
}


def tags(logging: Logging, row: dict[str, Any]) -> dict[str, float]:
    """Return a step's values under Megatron's names; {} between --tensorboard-log-intervals."""
    if row.get("iteration", 0) % logging.tensorboard_log_interval:
        return {}
    # A step that was skipped has no meaningful ones.
    meaningless = {"loss", "z_loss", "grad_norm"} if row.get("skipped") else set()
    out = {}
    for tag, (key, flag) in TAGS.items():
        is_wanted = flag is None or getattr(logging, flag)
        value = row.get(key)
        if is_wanted and key not in meaningless and value is not None:
            out[tag] = float(value)
    if logging.log_timers_to_tensorboard:  # in seconds, as in Megatron
        times = {"iteration": row.get("ms"), **(row.get("timers") or {})}
        out |= {f"{name}-time": ms / 1e3 for name, ms in times.items() if ms is not None}
    return out


def validation_tags(logging: Logging, row: dict[str, Any]) -> dict[str, float]:
    """Return a validation's values; one of several sets gets the name that bigscience uses."""
    tag = f"lm loss {row['name']}"
    if row.get("set"):
        tag = f"lm-loss-validation/{row['set']}/{tag}"
    out = {tag: float(row["loss"])}
    if "ema_loss" in row:
        out[f"{tag} ema"] = float(row["ema_loss"])
    if logging.log_validation_ppl_to_tensorboard:
        out[f"{tag} ppl"] = float(row["ppl"])
    return out
