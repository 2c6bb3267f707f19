"""Write checkpoints: choose the format, save in the background, and remove older steps."""

from __future__ import annotations

import contextlib
import copy
import functools
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from meshwright.base.console import remark, say
from meshwright.base.errors import IO, UserError
from meshwright.base.files import make_anew
from meshwright.base.storage.addresses import address_of
from meshwright.checkpoint import formats, loading, native, publish, steps
from meshwright.checkpoint.machines import incomplete_steps, joined
from meshwright.checkpoint.upload import Uploader

if TYPE_CHECKING:
    import torch

    from meshwright.checkpoint.background import Background
    from meshwright.checkpoint.machines import RunMachines
    from meshwright.checkpoint.sources import TensorBoxes
    from meshwright.checkpoint.steps import StepLocation
    from meshwright.config.schema import Checkpoint, TrainConfig
    from meshwright.data.tokenizers import Tokenizer
    from meshwright.parallel.layout import Layout
    from meshwright.runtime.ranks.team import Team


T = TypeVar("T")


def is_continued(c: Checkpoint) -> bool:
    """Return whether --load and --save are the same folder, however they are spelt."""
    return bool(c.load and c.save) and Path(c.load or "").resolve() == Path(c.save or "").resolve()


def check_export(config: TrainConfig) -> None:
    """Refuse a --save-hf that could not be written at the end of the run."""
    c = config.checkpoint
    if c.save_hf:
        from meshwright.checkpoint import exports
        from meshwright.checkpoint.huggingface import writer as huggingface_writer

        positions = config.model.max_position_embeddings or config.data.seq_length
        model = exports.without_idle_window(config.model, positions)
        huggingface_writer.require_expressible(model, Path(c.save_hf))
        huggingface_writer.refuse_occupied(
            Path(c.save_hf), Path(c.save) if c.save and is_continued(c) else None
        )


def is_complete(folder: str, step: int) -> bool:
    with contextlib.suppress(UserError, OSError):
        return steps.latest(folder)[0] == step
    return False


class Saver:
    """The writer of a run's checkpoints.

    `kept` is the saved step that equals the current state, None if there is none. With
    --save-error warn, `lost` are the steps whose save failed.
    """

    def __init__(
        self,
        config: TrainConfig,
        layout: Layout,
        team: Team,
        device: torch.device,
        users: publish.Users = (),
    ) -> None:
        c = config.checkpoint
        self.config, self.layout, self.team, self.folder = config, layout, team, c.save or ""
        self.kept: int | None = None
        self.lost: list[int] = []
        self.failure: UserError | None = None  # of the last failed save
        self.unrecorded: list[tuple[int, str]] = []  # steps and why their saves failed
        self.background: Background | None = None
        if c.save and (device.type != "cpu" if c.async_save is None else c.async_save):
            from meshwright.checkpoint.background import Background

            self.background = Background(team, device)
        self.uploader: Uploader | None = None
        remote = [Path(path) for path in (c.save, c.run_dir) if path and address_of(path)]
        self.users = users  # of the folder of --save
        self.folders = publish.Folders(users, c.save_copies)
        self.is_first = publish.is_first_user(users, team)
        if c.save and remote and self.is_first:
            self.uploader = Uploader(remote[0], remote[1:], team, users)

    def continue_from(self, step: int, best: int | None) -> None:
        """Note that --save holds the run's state, and remove the steps that a killed run left over.

        Otherwise each kill between a save and the removal would take the room of one more step.
        """
        self.kept = step
        if not self.config.training.skip_train:
            with self.tolerating():
                root = Path(self.folder)
                self.on_each_disk(step, lambda: publish.clear_unfinished(root), self.team)
                self.tidy_and_send(step, best, self.team)

    def save(
        self,
        step: int,
        named: TensorBoxes,
        state: dict[str, Any],
        settings: dict[str, Any],
        best: int | None,
    ) -> float | None:
        """Write a step and return the seconds that the run waited.

        None says that nothing was written: --save holds the step already, or the save failed.
        """
        began = time.perf_counter()
        # One save at a time: the one in flight reads copies that this one would overwrite.
        self.wait()
        if step == self.kept:
            for line in native.save_messages(self.folder, step):
                say(line)
            with self.tolerating():
                self.on_each_disk(step, lambda: publish.write_tracker(self.folder, step), self.team)
                self.tidy_and_send(step, best, self.team)
            return None
        # A copy, because the state has lists that the run will append to.
        write = functools.partial(self.write, step, copy.deepcopy(state), settings, best)
        # Noted before it is written; `tolerating` takes it back if the write fails.
        self.kept = step
        with self.tolerating():
            if self.background is not None and self.background.fits(named):
                self.background.begin(named, write)
            else:
                write(named, self.team)
        return time.perf_counter() - began if self.kept == step else None

    @contextlib.contextmanager
    def tolerating(self) -> Iterator[None]:
        """With --save-error warn, go on after a save that failed at the disk, on all ranks."""
        try:
            yield
        except UserError as error:
            is_shared = error.everywhere or self.team.size == 1
            if self.config.checkpoint.save_error == "stop" or error.status != IO or not is_shared:
                raise
            step = self.kept
            assert step is not None
            remark(
                f"WARNING: {error}; the run goes on and saves again as usual (--save-error warn)"
            )
            # If the step is complete, only the work after it has failed.
            is_whole = not self.keeps_folder or is_complete(self.folder, step)
            if not self.team.merge(is_whole, all):
                self.kept, self.failure = None, error
                self.lost.append(step)
                self.unrecorded.append((step, str(error)))

    def take_failures(self) -> list[tuple[int, str]]:
        """Return the steps whose saves failed since the last call, and why."""
        failures, self.unrecorded = self.unrecorded, []
        return failures

    def require_saved(self, step: int) -> None:
        """Raise the failure that the run went on after, unless its state is saved now."""
        if self.failure is not None and self.kept != step:
            raise self.failure

    def write(
        self,
        step: int,
        state: dict[str, Any],
        settings: dict[str, Any],
        best: int | None,
        named: TensorBoxes,
        team: Team,
    ) -> None:
        team.run_on_all(self.wait_for_upload)
        before, after = native.save_messages(self.folder, step)
        say(before)
        if self.config.checkpoint.ckpt_format == "torch":
            self.write_for_megatron(Path(self.folder), step, named, state, settings, team)
        else:
            native.save_step(
                self.folder,
                step,
                named,
                state,
                settings,
                team=team,
                folders=self.folders,
            )
        remark(after, f"saved step {step:,}")
        self.tidy_and_send(step, best, team)

    def write_for_megatron(
        self,
        root: Path,
        step: int,
        named: TensorBoxes,
        state: dict[str, Any],
        settings: dict[str, Any],
        team: Team,
    ) -> None:
        """Write Megatron's format by way of a temporary native step.

        Each Megatron rank reads its part from that step, so the files do not depend on how ZeRO and
        the pipeline divide the state.
        """
        write = formats.require_written(self.config.checkpoint.ckpt_format).load_writer()
        parts, at = root / publish.PARTS, self.layout.at
        self.on_each_disk(step, lambda: make_anew(parts), team)
        try:
            publish.name_disks(parts, self.users, team)
            native.save_step(
                parts,
                step,
                named,
                state,
                settings,
                team=team,
                run=root,
                folders=publish.Folders(self.users),
            )
            files_of_rank: dict[str, publish.Produce] = {}

            # Each of Megatron's files has the part of one tensor and pipeline rank.
            def lay_out(machines: RunMachines | None) -> int:
                if at("replicas", "shard", "cp"):  # another rank writes this one's file
                    return 0
                folder = steps.step_folder(parts, step)
                publish.wait_until_visible(folder, team)
                source = native.open_native(folder, step, machines=machines)
                tp, pp = self.layout.tp, self.layout.pp
                files = list(write(source, tp, pp, state["padded_vocab_size"], True).items())
                number = at("tp") * pp + at("pp")  # in the order in which the writer lists files
                files_of_rank.update([files[number]])
                return sum(file.size for file in source.manifest.values())

            with joined(parts, team) as machines:
                if machines is not None:
                    machines.share_holders(team)
                size = team.run_on_all(lambda: lay_out(machines))
                publish.write_step(
                    root, step, files_of_rank, bytes_needed=size, team=team, folders=self.folders
                )
        finally:
            if self.is_first:
                shutil.rmtree(parts, ignore_errors=True)

    def tidy_and_send(self, step: int, best: int | None, team: Team) -> None:
        """Remove old steps, and have the first rank of each machine send its files."""
        removed = self.tidy(step, best, team)
        team.run_on_all(self.explained(step, lambda: self.send(step, removed)))

    def on_each_disk(self, step: int, act: Callable[[], None], team: Team) -> None:
        """Let one rank of each folder do something there, or rank 0 alone in object storage."""
        team.run_on_all(self.explained(step, act) if self.keeps_folder else lambda: None)

    @property
    def keeps_folder(self) -> bool:
        """Whether this rank keeps the folder of --save in order, on its machine or for all."""
        if publish.are_on_own_disks(self.folder, self.users):
            return self.is_first
        return self.team.is_rank_0

    def explained(self, step: int, act: Callable[[], T]) -> Callable[[], T]:
        return publish.explain_failures(Path(self.folder), step)(act)

    def tidy(self, step: int, best: int | None, team: Team) -> list[int]:
        """Update the tracker of the best step, remove old steps, and return the removed ones."""
        c = self.config.checkpoint

        def track_best() -> None:
            self.wait_for_upload()  # it may be sending a step that is about to be removed
            if best is not None and best in steps.list_steps(self.folder):
                publish.write_tracker(self.folder, best, steps.BEST)

        self.on_each_disk(step, track_best, team)
        if not c.keep_last:
            return []

        # A step is removed everywhere or nowhere, so one that is damaged on any machine stays.
        if publish.are_on_own_disks(self.folder, self.users):
            damaged = incomplete_steps(Path(self.folder), step, self.is_first, team)
        else:
            damaged = team.run_on_rank_0(
                self.explained(step, lambda: publish.damaged_steps(self.folder, step))
            )
        kept = c.keep_last, c.keep_every, best
        removed: list[int] = team.run_on_rank_0(
            self.explained(step, lambda: publish.steps_to_remove(self.folder, step, *kept, damaged))
        )
        if removed:
            self.on_each_disk(step, lambda: publish.remove_steps(self.folder, removed), team)
        for old in removed:
            remark(f" > removed step {old}: --keep-last {c.keep_last}")
        return removed

    def send(self, step: int, removed: list[int]) -> None:
        if self.uploader is not None:
            self.end_upload()
            self.uploader.begin(step, removed if address_of(self.folder) else [])

    def wait_for_upload(self) -> None:
        """Wait until nothing is being sent: steps that were sent make room on this machine."""
        if self.uploader is not None:
            self.uploader.wait()

    def end_upload(self, at_end: bool = False) -> None:
        """Wait until nothing is being sent; a failure ends the run unless --save-error is warn."""
        if self.uploader is None:
            return
        try:
            self.uploader.end()
        except UserError as error:
            # After a takeover, what the other run wrote to storage counts.
            then = "sends it" if error.status == IO else "moves it aside"
            kept = f"{error}; the step is kept on this machine, and the next start here {then}"
            if at_end or self.config.checkpoint.save_error == "stop" or error.status != IO:
                raise UserError(kept, error.status) from error
            remark(f"WARNING: {error}; the next save sends the step again (--save-error warn)")

    @property
    def in_flight(self) -> bool:
        return self.background is not None and self.background.flying is not None

    def wait(self) -> None:
        """Wait until no save is in flight, and raise its failure if that ends the run."""
        if self.background is not None:
            with self.tolerating():
                self.background.wait()

    def export(self, tokenizer: Tokenizer | None) -> None:
        """Write --save-hf from the last saved step, on rank 0."""
        c = self.config.checkpoint
        if not c.save_hf:
            return
        if self.kept is None:
            remark(" > --save-hf: nothing was trained or saved, so nothing is written")
            return
        from meshwright.checkpoint.huggingface import writer as huggingface_writer

        target, run = Path(c.save_hf), Path(self.folder)

        def write(location: StepLocation, machines: RunMachines | None) -> None:
            source = loading.open_step(location, machines=machines)
            for note in huggingface_writer.write_huggingface(
                source, target, tokenizer=tokenizer, run=run, again=is_continued(c)
            ):
                remark(f" > {note}")

        # The other ranks serve the parts of the step that their machines have.
        loading.first_intact(
            steps.step_folder(self.folder, self.kept),
            lambda location, machines: self.team.run_on_rank_0(lambda: write(location, machines)),
            self.team,
        )
        remark(
            f" > wrote the model of iteration {self.kept} to {c.save_hf}, for Hugging Face's libraries"
        )

    def close(self) -> None:
        if self.background is not None:
            self.background.close()
        if self.uploader is not None:
            self.uploader.close()
