"""`meshwright quickstart`: a user's own text to a model within some minutes."""

from __future__ import annotations

import functools
import json
import math
import shlex
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from meshwright.apps.quickstart import plan as plans
from meshwright.apps.quickstart.collect import CollectedText, InputDocuments, collect
from meshwright.apps.quickstart.folder import TourProgress, require_no_model
from meshwright.apps.quickstart.plan import MeasuredSpeed, Size, TrainingPlan
from meshwright.apps.quickstart.shell import LoggedInterval, step
from meshwright.apps.quickstart.tour import Tour, prompt_from
from meshwright.base import device as devices
from meshwright.base import registry
from meshwright.base.device_profiles import DeviceProfile, load_profile, profile_of
from meshwright.base.errors import UNAVAILABLE, UserError, too_old
from meshwright.base.runs.rows import read_rows
from meshwright.config.flags import parse_settings
from meshwright.config.schema import TrainConfig

COMPILED_MINUTES = 5  # minutes from which a compiled model pays
PRECISION_MINUTES = 1  # minutes from which a trial of bfloat16 on a CPU pays
PRECISION_GAIN = 1.05  # times as fast as float32 that bfloat16 must be
TRIAL_SHARE = 0.15  # share of the time, at most, for the trial with its start
STEPPING_SECONDS = 20  # seconds of steps that are enough for it
LITTLE_TEXT = 500_000  # bytes below which a text is called small
TIME_MARGIN = 0.05  # share of the time by which the end may be late before steps are corrected
WORTH_A_START = 2  # starts whose time a correction must save or use
EVALUATED = 0.1  # share of the minutes that the evaluation gets at least
LAST_STEPS = 10  # steps left to a run out of time, in which its learning rate falls to the end
USUAL_STEPS = 1000  # steps of a run whose speed is predicted, which does not depend on them
START_SECONDS = 5  # seconds of a start that was not measured
NEW_LENGTH = "--override-opt_param-scheduler"


@dataclass(frozen=True)
class Showing:
    """What a tour shows beside the making of its model."""

    prompts: tuple[str, ...] = ()  # none: the first words of a held-out text
    resumes: bool = False  # the training is stopped half-way, and continued


@dataclass
class Deadline:
    """The minutes that were promised, and how much of them the steps after the training need."""

    minutes: float
    began: float = field(default_factory=time.perf_counter)
    after: float = 0.0
    scored: float = 0.0  # of these, the score of the whole held-out text
    start: float = START_SECONDS  # seconds that a training needs before its first step
    pace: float = math.inf  # seconds of a step on the machine for which the three hold
    slower: float = 1.0  # the pace last measured, as a multiple of that one

    @property
    def trial(self) -> float:
        """Seconds that a trial may take; a start takes a large part of a short time."""
        return min(max(TRIAL_SHARE * self.minutes * 60, 20), self.minutes * 60 / 3)

    def left(self, slower: float = 1.0) -> float:
        """Return the seconds left for training, on a machine that became so many times as slow."""
        return self.minutes * 60 - (time.perf_counter() - self.began) - slower * self.after

    def evaluated_share(self) -> float:
        """Return the share of the held-out text that can be scored in time, 1 for all of it."""
        whole = self.slower * self.scored
        left = self.left(self.slower) + whole
        seconds = max(left, EVALUATED * self.minutes * 60)
        return min(seconds / whole, 1.0) if whole else 1.0


def make_model(
    tour: Tour,
    documents: InputDocuments,
    progress: TourProgress,
    deadline: Deadline,
    showing: Showing,
) -> None:
    """Run all steps that are not done yet."""
    accelerator = is_accelerated(tour.device)
    with step("1. Read the text; hold out a part that the model never sees"):
        text = read_own_text(tour, documents, progress)
    with step("2. Learn a vocabulary of words and parts of words from it"):
        if "vocabulary" not in progress.done:
            learn_vocabulary(tour, text, accelerator)
            progress.finish("vocabulary")
    with step("3. Turn the text into token numbers"):
        if "training tokens" not in progress.done:
            progress.finish("training tokens", tour.tokenize())
        tokens = progress.done["training tokens"]
    if "plan" not in progress.done:
        with step("4. Try how fast this machine is, and choose the model"):
            progress.finish("plan", choose_training(tour, text, tokens, deadline, accelerator))
    with step("5. Pre-train"):
        train_in_time(tour, progress, deadline, showing)
        print(f"  plots of the run: {tour.run}/report.html")
    with step("6. Evaluate on the text that was held out"):
        # As much of the held-out text as there is time for; the machine may have slowed down.
        parts = math.ceil(deadline.evaluated_share() * text.held_out_parts)
        is_part = parts < text.held_out_parts
        progress.finish("bits per byte", tour.evaluate(parts if is_part else None))
    with step(
        "7. Let it continue a text: by the most likely words, then by words chosen by chance"
    ):
        # The first prompt greedily, then the others, or the same by chance.
        prompts = showing.prompts or (prompt_from(Path(tour.held_out)),)
        tour.generate(prompts[0], 64, "--greedy")
        for prompt in prompts[1:] or prompts:
            tour.generate(prompt, 64, "--temperature", "0.8", "--top_p", "0.9")
    progress.finish("end", documents.bytes)
    tour.end(deadline.began)
    print_export(tour)


def require_same_text(tour: Tour, progress: TourProgress, documents: InputDocuments) -> None:
    """Refuse to go on with a finished tour if its text has changed."""
    if progress.done["end"] not in (None, documents.bytes):
        require_no_model(tour.folder, "this text as it was before a change")


def already_done(tour: Tour, progress: TourProgress) -> None:
    """Say what a finished tour gave, and what to do with it."""
    ours, theirs = progress.done["bits per byte"]
    print(
        f"already done: {tour.run} has {ours:.3f} bits per byte, a byte-trigram model {theirs:.3f}. Try next:"
    )
    tour.try_next()
    print_export(tour)
    print(
        "More --minutes train the same model further. To start again: --overwrite, which keeps this model aside,"
    )
    print("or another folder")


def print_export(tour: Tour) -> None:
    target = f"{tour.folder}/hugging-face"
    words = ["meshwright", "convert", tour.run, target, "--to", "huggingface"]
    print(f"  {shlex.join(words)}")


def is_accelerated(device: str) -> bool:
    return device != "cpu" and devices.open_device(device).type != "cpu"


def read_own_text(tour: Tour, documents: InputDocuments, progress: TourProgress) -> CollectedText:
    if "text" not in progress.done:
        text = collect(documents, tour.folder, min(documents.bytes, documents.limit))
        text = replace(text, archives=dict(documents.archives), is_sample=documents.is_sample)
        for line in documents.left_out():
            print(f"  {line}")
        progress.finish("text", asdict(text))
    saved = progress.done["text"]
    if saved.keys() != {entry.name for entry in fields(CollectedText)}:
        raise too_old(tour.folder)
    text = CollectedText(**saved)
    print(f"  {text.describe()}")
    if text.train_bytes < LITTLE_TEXT:
        print(
            f"  this is little text: below {LITTLE_TEXT:,} bytes a model learns spelling and a few phrases"
        )
    return text


def learn_vocabulary(tour: Tour, text: CollectedText, accelerator: bool) -> None:
    size = plans.vocabulary_for(text.train_bytes, text.wide, accelerator)
    print(
        f"  {size:,} entries suit {text.train_bytes / 1e6:,.1f} MB; rarer words are put together from parts"
    )
    tour.learn_vocabulary(size, text.sample)


def vocabulary_size(tour: Tour) -> int:
    return len(json.loads(Path(tour.vocabulary, "vocab.json").read_text(encoding="utf-8")))


def speed_flags(accelerator: bool, minutes: float) -> list[str]:
    """Return the flags that are fastest here; compiling takes about a minute."""
    compiled = [] if minutes >= COMPILED_MINUTES else ["--compile", "off"]
    return ["--bf16", *compiled] if accelerator else []


def choose_training(
    tour: Tour, text: CollectedText, tokens: int, deadline: Deadline, accelerator: bool
) -> dict[str, Any]:
    """Measure a trial; return the command of the run, and what limits its length."""
    vocab = vocabulary_size(tour)
    profile, room = find_profile(tour.device)
    predict = functools.cache(functools.partial(expected_speed, tour, vocab, profile, room))

    # Measure.
    size = plans.trial_size(tokens, accelerator, predict, deadline.left() - deadline.trial)
    flags, trial = choose_precision(tour, size, deadline, accelerator)
    machine = MeasuredSpeed(size, trial.tokens_per_second, predict, accelerator)

    # Keep time for what follows: three commands start, the score reads each token twice in a
    # third of a training step's time, and the trigram model reads the text.
    share = text.held_out_bytes / max(text.train_bytes, 1)
    deadline.start = trial.start
    deadline.scored = 2 / 3 * share * tokens / trial.tokens_per_second
    # The trigram model counts 10 MB a second, after a second to start.
    trigram = 1 + min(text.train_bytes, 5e7) / 1e7
    deadline.after = 3 * trial.bare_start + deadline.scored + trigram

    # Choose.
    seconds = deadline.left() - deadline.start
    plan = plans.plan_training(tokens, machine, seconds)
    for line in describe_plan(plan, machine, tokens, vocab, max(seconds, 0)):
        print(f"  {line}")
    # A fifth more than what is missing, since what follows takes longer too.
    missing = plans.useful(machine) - seconds
    if plan.limit == "time" and missing > 0:
        enough = math.ceil(deadline.minutes + 1.2 * missing / 60)
        print(
            f"  these minutes are too few for a useful model on this machine; --minutes {enough} would do"
        )
    deadline.pace = plan.size.tokens / machine.speed(plan.size)
    return {
        "command": tour.run_command(plan.size, plan.dropout, plan.steps, *flags),
        "most": plans.most_steps(plan.size, tokens),
        "start": deadline.start,
        "after": deadline.after,
        "scored": deadline.scored,
    }


def find_profile(device: str) -> tuple[DeviceProfile, float]:
    """Return the plan's profile of this machine's device, and the bytes that are free there.

    An accelerator without a profile is taken for an A100: its own trial then sets the speed.
    """
    opened = devices.open_device(device)
    if opened.type == "cpu":
        return load_profile("cpu"), math.inf
    profile = profile_of(devices.device_name(opened)) or load_profile("a100-80")
    return profile, devices.free_memory(opened)


class PredictedRun(Protocol):
    """What the plan says of a run, computed when asked."""

    @property
    def need(self) -> int:
        """Bytes of the fullest rank's process."""

    @property
    def tokens_per_second(self) -> float: ...


def predictor() -> Callable[[TrainConfig, DeviceProfile, int], PredictedRun]:
    """Return what predicts a run, with a vocabulary, on a device; `plan` registers it."""
    found: Callable[[TrainConfig, DeviceProfile, int], PredictedRun] | None = registry.find(
        "apps", "predict"
    )
    if found is None:
        raise lacking("apps/plan predicts how fast a model of each size trains here")
    return found


def require_parts() -> None:
    """Refuse to begin what could not be finished, because an app is not installed."""
    predictor()
    if registry.find("commands", "evaluate") is None:
        raise lacking("apps/evaluate scores the model")


def lacking(part: str) -> UserError:
    return UserError(f"{part}: {registry.LACKING}", UNAVAILABLE)


def expected_speed(
    tour: Tour, vocab: int, profile: DeviceProfile, room: float, size: Size
) -> float:
    """Return the tokens per second that the plan expects of a size, 0 if there is no room.

    The smallest is tried in any case: training says what to do where memory runs out.
    """
    how = speed_flags(profile.kind != "cpu", 0)
    # The flags of the run's own command, as train reads them.
    _, *words = tour.training(size, 0, USUAL_STEPS, *how)
    config = parse_settings(TrainConfig, words, "train", check=False).config
    prediction = predictor()(config, profile, vocab)
    is_smallest = size.hidden <= plans.SIZES[0].hidden
    # The memory that a run needs is asked for, which takes long, only where there is a limit.
    if not is_smallest and math.isfinite(room) and prediction.need > room:
        return 0.0
    return prediction.tokens_per_second


class SpeedTrial(NamedTuple):
    """What some steps without saving showed; times in seconds."""

    tokens_per_second: float
    start: float  # of a training, with all that its first steps do once, such as compiling
    bare_start: float  # of a command without that


def choose_precision(
    tour: Tour, size: Size, deadline: Deadline, accelerator: bool
) -> tuple[list[str], SpeedTrial]:
    """Return the fastest flags of this machine, and the trial with them.

    On a CPU, bfloat16 is tried beside float32 if the processor has instructions for it. Master
    weights, the optimizer's state and sums of gradients are float32 in either.
    """
    if accelerator or deadline.minutes < PRECISION_MINUTES or not devices.multiplies_bf16_fast():
        flags = speed_flags(accelerator, deadline.minutes)
        return flags, measure_speed(tour, size, deadline.trial, flags, accelerator)
    began = time.perf_counter()
    fp32 = measure_speed(tour, size, deadline.trial / 2, [])
    took = time.perf_counter() - began
    # Without time for a second trial, the format that was tried is taken.
    if took > deadline.trial:
        print(
            f"  precision: fp32; its trial took {took:.0f} s, which leaves no time for one of bf16"
        )
        return [], fp32
    bf16 = measure_speed(tour, size, deadline.trial / 2, ["--bf16"])
    ratio = bf16.tokens_per_second / fp32.tokens_per_second
    is_faster = ratio >= PRECISION_GAIN
    print(
        f"  precision: {'bf16' if is_faster else 'fp32'}, because bf16 is {ratio:.2f} times as fast as fp32; "
        "the weights it updates are fp32"
    )
    return (["--bf16"], bf16) if is_faster else ([], fp32)


def measure_speed(
    tour: Tour, size: Size, most: float, flags: list[str], accelerator: bool = False
) -> SpeedTrial:
    """Train a few steps without saving; on a slow machine the trial ends after `most` seconds."""
    steps, interval = (200, 5) if accelerator else (40, 1)
    seen: list[LoggedInterval] = []

    def stop(at: LoggedInterval) -> str | None:
        seen.append(at)
        if len(seen) < 2:  # the first interval has all that is done once
            return None
        stepping = sum(interval * at.seconds for at in seen[1:])
        if stepping > STEPPING_SECONDS or time.perf_counter() - began > most:
            return "stopped: these steps are enough to know the speed of this machine"
        return None

    logging = ["--log-interval", str(interval), "--eval-iters", "0"]
    command = tour.training(size, 0, steps, *logging, *flags)
    began = time.perf_counter()
    tour.call(*command, show=lambda line: None, stop=stop)
    took = time.perf_counter() - began

    # The pace is that of the last two thirds; all other seconds were the start.
    steady = seen[max(len(seen) // 3, 1) :] or seen
    pace = max(sum(at.seconds for at in steady) / max(len(steady), 1), 1e-9)
    speed = size.tokens / pace
    start = max(took - pace * interval * len(seen), 1.0)
    stepping = interval * sum(at.seconds for at in seen)
    precision = "bf16" if "--bf16" in flags else "fp32"
    print(
        f"  {speed:,.0f} tokens/s with {size.layers} layers of width {size.hidden} in {precision}"
    )
    return SpeedTrial(speed, start, min(max(took - stepping, 1.0), start))


def describe_plan(
    plan: TrainingPlan, machine: MeasuredSpeed, tokens: int, vocab: int, seconds: float
) -> list[str]:
    """Say what was chosen, and why."""
    size = plan.size
    read = plan.steps * size.tokens
    if plan.limit == "text":
        why = "more readings of so little text would only teach it by heart"
    elif plan.steps == plans.FEWEST_STEPS:
        needed = read / machine.speed(size)
        why = f"the fewest that make a run: they take about {needed:.0f} s, and about {seconds:.0f} s are left for it"
    else:
        why = f"as many as fit into the {seconds / 60:.1f} minutes left for it"
    millions = size.cost(vocab) / 1e6
    out = [
        f"model: {size.layers} layers of width {size.hidden}, {millions:,.1f} million parameters",
        f"steps: {plan.steps:,} of {size.tokens:,} tokens, {why}",
        f"the text has {tokens:,} tokens: {readings(read / max(tokens, 1))}",
    ]
    if plan.dropout:
        out.append(f"dropout {plan.dropout:g}, because it reads the text more than once")
    return out


def readings(times: float) -> str:
    """Say how often a text is read, which may be less than once."""
    if times < 0.01:
        return "less than 1 % of it is read"
    if times < 0.95:
        return f"{100 * times:.0f} % of it is read"
    return f"each is read {times:.1f} times"


def with_steps(command: list[str], steps: int) -> list[str]:
    """Return the command of a run that has a new length."""
    changed = list(command)
    changed[changed.index("--train-iters") + 1] = str(steps)
    # A run keeps the schedule of its checkpoint, unless it is told to take the new one.
    if NEW_LENGTH not in changed:
        changed.append(NEW_LENGTH)
    return changed


def number_of(command: list[str], flag: str) -> int:
    return int(command[command.index(flag) + 1])


def steps_of(command: list[str]) -> int:
    return number_of(command, "--train-iters")


def train_longer(tour: Tour, progress: TourProgress, deadline: Deadline) -> bool:
    """Plan a training again that was planned for fewer minutes; return whether it is longer now.

    A run that has taken steps keeps its model, and gets as many further steps as the further
    minutes allow at the pace that it had.
    """
    plan = progress.done.get("plan")
    if not progress.more_minutes or plan is None:
        return False
    # What earlier attempts logged says how fast the machine was.
    rows = run_rows(Path(tour.run))
    if not rows:
        del progress.done["plan"]  # for a new trial
        return True
    deadline.minutes = progress.more_minutes
    deadline.start = plan.get("start", START_SECONDS)
    deadline.after = plan.get("after", 2 * START_SECONDS)
    deadline.scored = plan.get("scored", 0.0)
    deadline.pace = pace_of(rows)

    # As many further steps as fit into the minutes, and in all no more than the text is worth.
    command = plan["command"]
    per_step = number_of(command, "--seq-length") * number_of(command, "--micro-batch-size")
    most = plans.EPOCHS * progress.done["training tokens"] // per_step
    before = steps_of(command)
    further = (deadline.left() - deadline.start) / deadline.pace
    wanted = before + max(int(further / plans.validating(before)), plans.FEWEST_STEPS)
    steps = min(wanted, most) // 10 * 10
    if steps <= before:
        print(
            f"{before:,} steps have read the text {plans.EPOCHS} times; more would only teach it by heart"
        )
        return False
    minutes = f"{deadline.minutes:g} minute{'s' * (deadline.minutes != 1)}"
    print(f"training the model for another {minutes}: from step {before:,} to step {steps:,}")
    for name in ("bits per byte", "end"):
        progress.done.pop(name, None)
    progress.finish("plan", {**plan, "command": with_steps(command, steps), "most": most})
    return True


def run_rows(folder: Path) -> list[dict[str, Any]]:
    """Return the steps that a run has taken."""
    return [row for row in read_rows(folder) if row["event"] == "step"]


def train_in_time(tour: Tour, progress: TourProgress, deadline: Deadline, showing: Showing) -> None:
    """Train; where the machine becomes faster or slower, correct the number of steps."""
    # A run that has steps has been continued already.
    is_shown = showing.resumes and not run_rows(Path(tour.run))
    while True:
        plan = progress.done["plan"]
        watch = PaceWatch(plan, deadline, is_shown)
        tour.pre_train(plan["command"], watch.stop if watch.is_timed or is_shown else None)
        if watch.next_command == plan["command"]:
            is_shown = False
            print("  the same command continues from the checkpoint:")
        elif not watch.next_command:
            return
        progress.finish("plan", {**plan, "command": watch.next_command})


class PaceWatch:
    """A rule that stops a training to correct its length, or to show that it can be resumed.

    `next_command` then continues it. A run that is continued after an interruption keeps its
    length, as a very short one does. A busy machine's pace varies from step to step, so it is
    measured over windows, each as long as a start.
    """

    def __init__(self, plan: dict[str, Any], deadline: Deadline, is_shown: bool) -> None:
        self.command = plan["command"]
        self.most = plan.get("most", 0)
        self.deadline = deadline
        self.is_shown = is_shown
        self.is_timed = deadline.after > 0 and deadline.minutes >= 1
        self.next_command: list[str] = []
        self.seen: int | None = None  # the step of the last log line
        self.steps, self.seconds = 0, 0.0  # of the window so far
        self.before = 0  # the correction that the window before asked for: 1, -1 or 0

    def stop(self, at: LoggedInterval) -> str | None:
        """Return the reason to stop after this interval; None if the training is to go on."""
        steps = steps_of(self.command)
        pace = self.measure(at)
        if self.is_timed and pace is not None:
            self.deadline.slower = pace / self.deadline.pace
            new = correct_steps(at.iteration, pace, steps, self.deadline, self.most)
            # 1 for more steps, -1 for fewer, 0 for none.
            way = (new > steps) - (new < steps)
            is_second = way != 0 and way == self.before  # two windows agree
            self.before = way
            if is_second:
                self.next_command = with_steps(self.command, new)
                why = f"a step takes {pace * 1000:.0f} ms now"
                return f"{why}: it saves and goes on, to {new:,} steps in place of {steps:,}, so as to end in time"
        if self.is_shown and at.iteration >= steps // 2:
            self.next_command = self.command
            return "SIGTERM, as a cluster's scheduler sends it: the training saves and ends"
        return None

    def measure(self, at: LoggedInterval) -> float | None:
        """Return the seconds of a step if a window ends here. The first interval is in none."""
        if self.seen is not None:
            steps = at.iteration - self.seen
            self.steps += steps
            self.seconds += steps * at.seconds
        self.seen = at.iteration
        if self.seconds < self.deadline.start or not self.steps:
            return None
        pace = self.seconds / self.steps
        self.steps, self.seconds = 0, 0.0
        return pace


def pace_of(rows: list[dict[str, Any]]) -> float:
    """Return the seconds that the last steps of a run took each."""
    return float(statistics.median(row["ms"] for row in rows[-200:])) / 1000


def correct_steps(done: int, pace: float, steps: int, deadline: Deadline, most: int) -> int:
    """Return the number of steps that ends in time, `steps` if that does.

    `done` steps are taken, and one takes `pace` seconds now. On a machine that became slower, the
    commands after the training take longer too. No correction is made that would save or use hardly
    more time than another start takes.
    """
    # Does it end in time as it is? To be late is worse.
    left = deadline.left(deadline.slower)
    step = pace * plans.validating(steps)
    spare = left - (steps - done) * step
    if -TIME_MARGIN < spare / (deadline.minutes * 60) < 2 * TIME_MARGIN:
        return steps

    # As many steps as fit beside another start, if that is worth it.
    start = deadline.slower * deadline.start
    fitting = done + int((left - start) / step)
    new = min(max(fitting, done + LAST_STEPS, plans.FEWEST_STEPS), most)
    if abs(new - steps) * step < WORTH_A_START * start:
        return steps
    return new
