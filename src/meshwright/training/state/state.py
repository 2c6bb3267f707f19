"""The state of a run: all that a checkpoint keeps, with its loading, saving and going back."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.base.console import remark, say
from meshwright.base.errors import BAD_DATA, UserError
from meshwright.checkpoint import loading, native, owner, publish, steps
from meshwright.checkpoint.averages import has_average
from meshwright.checkpoint.manifests import DamagedCheckpoint
from meshwright.checkpoint.saved_model import GPT_NETWORK
from meshwright.checkpoint.sources import Source, TensorBoxes
from meshwright.checkpoint.steps import NATIVE
from meshwright.config.fields import with_settings
from meshwright.config.problem import SettingsError
from meshwright.data import tokenizers
from meshwright.data.history import BlendHistory
from meshwright.data.tokenizers import Tokenizer
from meshwright.optim.loss_scale import LossScale
from meshwright.optim.schedule import Schedule, build_schedule, resume_schedule
from meshwright.runtime.ranks.team import Team
from meshwright.training.state.resume import (
    describe_recovery,
    differences,
    is_kept,
    open_options,
    refuse_missing,
    require_clear_start,
    saved_settings,
)
from meshwright.training.state.saver import Saver

if TYPE_CHECKING:
    from meshwright.config.grammar import Iterations
    from meshwright.config.schema import TrainConfig
    from meshwright.training.micro_step import Network
    from meshwright.training.network import Spec

# The losses that a loss is judged against. Of so many the median deviation is known to a tenth
# (1.17 / sqrt(128)), and over so few steps the loss itself falls little.
SPIKE_WINDOW = 128


@dataclass
class Progress:
    """The counters of a run.

    With the weights, moments and loss scale they are its whole state: random draws do not depend on
    any generator's state.
    """

    iteration: int = 0  # steps that were skipped count too
    consumed_train_samples: int = 0  # likewise
    schedule_samples: int = 0  # of successful steps only; the schedule follows them
    # The tokens that these samples gave. With --seq-length-schedule, which may begin or change at a
    # resume, they do not follow from the samples.
    consumed_train_tokens: int = 0
    schedule_tokens: int = 0
    nonfinite_in_a_row: int = 0
    # Times that the run went back to the newest checkpoint; 0 once further steps are saved.
    rollbacks: int = 0
    best_iteration: int | None = None  # the one with the lowest validation loss
    best_loss: float | None = None


class State:
    """Everything that a checkpoint keeps: counters, schedule, loss scale, the network's tensors."""

    def __init__(self, spec: Spec, net: Network, team: Team, users: publish.Users) -> None:
        config = self._config = spec.config
        self.net, self.team, self.vocab, self.padded = net, team, spec.vocab, spec.padded
        # Settings that only the start finds: a micro-batch that fits, where the blend changes.
        self.found: dict[str, Any] = {}
        self.switches = spec.switches
        self.scaler = LossScale(config.precision)
        self.saver = Saver(config, net.layout, team, net.device, users)
        # A checkpoint states these sizes, since tables are saved without their padding.
        self.sizes = {
            "true_vocab_size": spec.vocab,
            "padded_vocab_size": spec.padded,
            "positions": spec.positions,
        }
        self.schedule = build_schedule(config)
        self.progress = Progress()
        t = config.training
        # Losses of the last steps, against which a spike is judged.
        self.losses = deque[float](maxlen=0 if t.on_spike.word == "off" else SPIKE_WINDOW)
        self.skipped_ranges = config.data.skip_train_iteration_range
        self.skips: list[Any] = []  # (first sample, rule) of samples not trained on, for the record
        self.blends: BlendHistory | None = None  # of the training set
        self.epochs: list[list[Any]] | None = None  # of the training set; its order depends on them
        self.finds_average = False  # whether the checkpoint that was read has the average of --ema
        self.has_loaded = False  # whether the weights are a checkpoint's
        self.loaded: int | None = None  # the step this run continues from
        self.micro_batch_before: int | None = None  # the micro-batch size of the run it continues

    @property
    def config(self) -> TrainConfig:
        """The settings as `resolve` has decided them."""
        return self._config

    @property
    def recorded(self) -> TrainConfig:
        """The settings with what the start has found, for files, the log and the data."""
        return with_settings(self.config, **self.found)

    @property
    def is_done(self) -> bool:
        return self.config.is_over(self.progress.iteration, self.progress.consumed_train_samples)

    @property
    def will_train(self) -> bool:
        return not (self.is_done or self.config.training.skip_train)

    def total_steps(self) -> int:
        """Return the steps already taken plus those to come.

        With --train-samples they are counted from here: earlier steps may have had other sizes.
        """
        c = self.config
        if c.samples is None:
            return c.steps
        iteration = self.progress.iteration
        consumed = self.progress.consumed_train_samples
        # While the batch grows the steps are counted one by one.
        while (size := c.batch(consumed)) < c.global_batch and consumed + size <= c.samples:
            iteration += 1
            consumed += size
        return iteration + max(c.samples - consumed, 0) // c.global_batch

    def range_to_skip(self) -> Iterations | None:
        """Return the --skip-train-iteration-range that holds the next iteration."""
        following = self.progress.iteration + 1
        for one in self.skipped_ranges:
            if one.first <= following <= one.last:
                return one
        return None

    def pass_over(self, last: int) -> None:
        """Count the iterations up to `last` as done, without training."""
        p = self.progress
        begin = p.consumed_train_samples
        while p.iteration < last and not self.is_done:
            p.iteration += 1
            size = self.config.batch(p.consumed_train_samples)
            p.consumed_train_samples += size
            p.consumed_train_tokens += size * self.config.sample_length(p.iteration)
        # A checkpoint keeps the decision, so that a resumed run tells the same story.
        self.skips.append([begin, f"passed over to {p.consumed_train_samples}"])

    def load(self, opened: Source | None = None) -> None:
        """Load the checkpoint of --load, if there is one; raise UserError if it is needed.

        `opened` is another program's that this process has opened before.
        """
        c = self.config.checkpoint
        assert c.load
        options = open_options(self.config)

        def want(source: Source) -> TensorBoxes:
            return self.wanted(source, options.optimizer and bool(source.state), not c.finetune)

        begun = time.perf_counter()
        try:
            loaded = loading.load_checkpoint(
                c.load, want, options=options, accept=self.accept, team=self.team, opened=opened
            )
        except DamagedCheckpoint as damage:
            hint = "to start anew, give another folder or --save-overwrite"
            raise DamagedCheckpoint(f"{damage}; {hint}", everywhere=damage.everywhere) from damage
        if loaded is None:
            self.team.run_on_all(lambda: refuse_missing(self.config))
            note = f"{c.load} holds no checkpoint yet: the weights are random"
            remark(
                f"WARNING: could not find the metadata file {Path(c.load) / steps.TRACKER}",
                on_screen=note,
            )
            say("    will not load any checkpoints and will start from random")
            return
        self.has_loaded = True
        self.begin_average()
        if loaded.state and not c.finetune:
            self.loaded = loaded.step
            seconds = time.perf_counter() - begun
            remark(
                f" > {self.team.run_on_rank_0(lambda: describe_recovery(self.config, loaded, seconds))}"
            )
            self.forget_best(is_moved=c.save_overwrite)
            # On disks of their own, another machine may have it.
            if self.team.merge(is_kept(c, loaded.step), any):
                self.saver.continue_from(loaded.step, self.best_to_keep)

    def wanted(self, source: Source, with_optimizer: bool, with_average: bool) -> TensorBoxes:
        """Return the tensors to read from a checkpoint, with the average of --ema if it has one."""
        self.finds_average = with_average and bool(source.state) and has_average(source)
        return self.net.store.named_state(with_optimizer, with_average=self.finds_average)

    def begin_average(self) -> None:
        """Begin the average of --ema with the weights, if the checkpoint that was read has none."""
        average = self.net.store.average
        if average is not None and not self.finds_average:
            average.restart()
            remark(" > --ema: the average begins with the loaded weights")

    def accept(self, source: Source) -> Source:
        """Take over a checkpoint's counters before its tensors are read, or refuse it."""
        c, state, saved = self.config.checkpoint, source.state, source.config
        if (name := state.get("network", GPT_NETWORK)) != self.net.name:
            raise SettingsError(
                f"the checkpoint holds a {name} but this run builds a {self.net.name}, so its weights cannot be used; "
                "run the program that trained it, or change {load}",
                BAD_DATA,
            )
        for line in differences(self.config, saved):
            remark(line)
        cut = self.cut_vocabulary(source)
        if c.finetune or not state:
            why = "--finetune" if c.finetune else f"{source.kind}, weights only"
            remark(f" > {why}: only the weights are loaded; step, samples and schedule begin at 0")
            return cut
        require_clear_start(self.config, source)
        if "schedule" not in state:
            remark(
                " > note: the checkpoint has no schedule; the schedule of the flags continues from its samples"
            )
        elif self.config.training.skip_train:  # no step follows the schedule: nothing to compare
            self.schedule = Schedule(**state["schedule"])
        else:
            self.schedule, lines = resume_schedule(self.schedule, state["schedule"], self.config)
            for line in lines:
                say(line)
        if c.no_load_optim:
            remark(
                " > --no-load-optim: the step and the schedule continue, the optimizer's moments begin at 0"
            )
        self.take_over(state)
        if c.no_load_optim:
            self.net.store.steps = 0
        self.epochs = state.get("epochs")
        self.blends = BlendHistory.from_state(state.get("blends"))
        before = saved.get("micro_batch_size")
        self.micro_batch_before = before if isinstance(before, int) else None
        return cut

    def take_over(self, state: dict[str, Any]) -> None:
        """Take over the state that changes with every step, besides the tensors."""
        # Checkpoints of earlier releases lack some of these.
        for f in dataclasses.fields(Progress):
            setattr(self.progress, f.name, state.get(f.name, f.default))
        # Where tokens were not counted, as by other programs, the samples say how many there were.
        for unit in ("consumed_train", "schedule"):
            if f"{unit}_tokens" not in state:
                tokens = round(self.config.tokens_of(state.get(f"{unit}_samples", 0)))
                setattr(self.progress, f"{unit}_tokens", tokens)
        self.scaler.load(state.get("loss_scale", {"dynamic": False}))
        scales = self.net.store.scales
        if scales is not None:
            scales.load(state.get("fp8"))
        self.losses.clear()
        self.losses.extend(state.get("losses", []))
        self.skips = state.get("skips", [])
        self.net.store.steps = state.get("optimizer_steps", self.progress.iteration)
        average = self.net.store.average
        if average is not None:
            # It is filled in place because CUDA graphs read this tensor.
            average.count.fill_(state.get("ema_steps", 0))

    def roll_back(self) -> int | None:
        """Load the newest checkpoint of --save into the live network; return its step, if any.

        Everything is loaded in place, as CUDA graphs go on reading the same memory.
        """
        self.saver.wait()
        save = self.config.checkpoint.save
        assert save
        options = open_options(self.config)._replace(optimizer=True)

        def take_over(source: Source) -> Source:
            self.take_over(source.state)
            return source

        loaded = loading.load_checkpoint(
            save,
            lambda source: self.wanted(source, True, True),
            options=options,
            accept=take_over,
            team=self.team,
        )
        if loaded is None:
            return None
        self.begin_average()
        self.forget_best(is_moved=False)
        self.net.store.renew_weights()
        self.saver.kept = None
        return loaded.step

    def load_mean(self) -> list[int]:
        """Replace the weights by the mean of --average-last; return its steps, [] if too few."""
        c, last = self.config.checkpoint, self.progress.iteration
        save, number = c.save or "", c.average_last
        saved: list[int] = self.team.run_on_rank_0(
            lambda: [n for n in steps.list_steps(save) if n <= last]
        )
        if len(saved) < number:
            remark(
                f" > --average-last {number}: {save} has {len(saved)} saved steps, so there is no mean to validate"
            )
            return []
        options = open_options(self.config)._replace(
            optimizer=False, weights="plain", average_last=number
        )
        store, folder = self.net.store, steps.step_folder(save, saved[0])
        loading.load_checkpoint(
            folder, lambda source: store.named_state(False), options=options, team=self.team
        )
        store.renew_weights()
        return saved[:number][::-1]

    def cut_vocabulary(self, source: Source) -> Source:
        """Return another program's checkpoint without the padding of its tables."""
        size = self.sizes["true_vocab_size"]
        if source.kind == NATIVE:  # compared with all other shapes
            return source
        if source.vocab not in (None, size):
            message = (
                f"the vocabulary has {size:,} ids, {source.folder} was made with {source.vocab:,}"
            )
            if not source.counts_padding or size > (source.vocab or 0):
                raise UserError(message, BAD_DATA)
            remark(f" > note: {message}: the extra rows are treated as padding")
        return source.of_vocabulary(size)

    @property
    def best(self) -> tuple[int, float] | None:
        """The iteration and the loss of the best validation so far."""
        p = self.progress
        if p.best_iteration is None or p.best_loss is None:
            return None
        return p.best_iteration, p.best_loss

    @property
    def best_to_keep(self) -> int | None:
        return self.progress.best_iteration if self.config.checkpoint.keep_best else None

    def forget_best(self, is_moved: bool) -> None:
        """Forget a best step that --save does not hold, so that a later one can take its place.

        `is_moved` tells that --save holds another run, which is about to be moved aside.
        """
        c, best = self.config.checkpoint, self.progress.best_iteration
        if c.keep_best and c.save and best is not None:
            save = c.save
            if is_moved or not self.team.run_on_rank_0(lambda: best in steps.list_steps(save)):
                self.progress.best_iteration = self.progress.best_loss = None

    def set_epochs(self, epochs: list[list[Any]]) -> None:
        """Record the epochs of the training set, and note if the checkpoint had others.

        All epochs are shuffled together, as in Megatron, so more epochs mean another order.
        """
        if self.epochs and epochs and epochs != self.epochs:
            now, before = (
                " and ".join(
                    f"{n} epoch{'s' * (n != 1)}{', the last one shuffled separately' * is_separate}"
                    for n, is_separate in each
                )
                for each in (epochs, self.epochs)
            )
            note = f" > note: the training set is now {now}; at the checkpoint it was {before}: all epochs are shuffled "
            remark(
                f"{note}together (as in Megatron), so the order has changed, and samples may be seen again"
            )
        self.epochs = epochs

    def check(self, tokenizer: Tokenizer | None) -> None:
        """Require the checkpoint's vocabulary, and disk space for one more checkpoint."""
        c = self.config.checkpoint
        saved_tokenizer = steps.split_path(c.load)[0] / "tokenizer" if c.load else None
        if saved_tokenizer and tokenizer:
            self.team.run_on_all(lambda: tokenizers.require_same(tokenizer, saved_tokenizer))
        if c.save and self.will_train:
            if c.ckpt_format == "torch" and self.net.name != GPT_NETWORK:
                raise SettingsError(
                    f"{{ckpt_format=torch}}: Megatron-LM has no {self.net.name}; native holds any network"
                )
            # The previous step and the new one; Megatron's format needs a temporary step too.
            copies = 3 if c.ckpt_format == "torch" else 2
            users = self.saver.users
            if publish.are_on_own_disks(c.save, users):
                # A machine has room for its part, and for those that it keeps for others.
                kept = min(c.save_copies, len({*users}))
                needed = kept * native.bytes_of(self.tensors(), self.team, users)
            else:
                needed = native.bytes_of(self.tensors(), self.team)
            publish.check_writable(c.save, needed, self.team, copies, users)

    def tensors(self) -> Any:
        with_optimizer = not self.config.checkpoint.no_save_optim
        return self.net.store.named_state(with_optimizer, to_save=True, with_average=True)

    def settings(self) -> dict[str, Any]:
        """Return the settings to save; {} on ranks other than 0, which need not read the data."""
        return {**saved_settings(self.recorded), **self.switches} if self.team.is_rank_0 else {}

    def save_weights(self, root: Path) -> None:
        """Write the weights alone, as a step in a folder other than --save."""
        state = dataclasses.asdict(self.progress) | self.sizes | {"network": self.net.name}
        with owner.lock_folder(root) if self.team.is_rank_0 else contextlib.nullcontext():
            named = self.net.store.named_state(False, to_save=True)
            native.save_step(
                root, self.progress.iteration, named, state, self.settings(), team=self.team
            )

    def save(self) -> float | None:
        """Save this state; return the seconds that the run waited, None as in Saver.save."""
        p = self.progress
        state: dict[str, Any] = {
            **dataclasses.asdict(p),
            **self.sizes,
            "schedule": dataclasses.asdict(self.schedule),
            "loss_scale": self.scaler.state(),
            "skips": self.skips,
            "optimizer_steps": self.net.store.steps,
            "network": self.net.name,
            "epochs": self.epochs,
            "blends": self.blends.state() if self.blends else None,
            "losses": list(self.losses),
        }
        if (scales := self.net.store.scales) is not None:
            state["fp8"] = scales.state(self.team.gather)
        if (average := self.net.store.average) is not None:
            state["ema_steps"] = int(average.count)
        return self.saver.save(
            p.iteration, self.tensors(), state, self.settings(), self.best_to_keep
        )
