"""A quickstart ends in the minutes that it was given, on a machine with a clock of its own."""

import json
from types import SimpleNamespace

import pytest

from meshwright.apps.quickstart import own_text, tour
from meshwright.apps.quickstart.collect import CollectedText
from meshwright.apps.quickstart.folder import TourProgress
from meshwright.apps.quickstart.shell import LoggedInterval
from meshwright.config.flags import parse_settings
from meshwright.config.schema import TrainConfig
from meshwright.optim.schedule import build_schedule

MARGIN = 0.1  # of the minutes
TOKENS = 3_000_000
PARTS, SCORED = 50, 5  # of the held-out text, and the seconds that a model needs for them


def number_of(argv, name):
    return int(argv[argv.index(name) + 1])


class Machine(tour.Tour):
    """Takes 0.1 s for a step and 3 s for the start of a command, times its slowness then."""

    def __init__(self, folder, slowness):
        super().__init__(folder, "log", "cpu")
        self.now, self.iteration, self.slowness, self.trained, self.begun = 0.0, 0, slowness, [], []

    def perf_counter(self):
        return self.now

    def work(self, seconds):
        for _ in range(round(seconds / 0.1)):
            self.now += 0.1 * self.slowness(self.now)

    def call(self, name, *argv, show=None, stop=None):
        self.begun.append((name, self.now))
        self.work(3)
        if name == "train":
            self.train_steps(argv, stop, is_run="--save" in argv)
        else:
            self.work({"generate": 1, "evaluate": 0}.get(name, 5))
        return ""

    def train_steps(self, argv, stop, is_run):
        steps, interval = number_of(argv, "--train-iters"), number_of(argv, "--log-interval")
        every, checked = (
            (number_of(argv, f"--eval-{name}") for name in ("interval", "iters"))
            if is_run
            else (1, 0)
        )
        first = self.iteration if is_run else 0
        if is_run:
            self.trained.append(argv)
        self.work(0.5)  # the first step takes longer
        row = (first, self.now - 0.5)
        for at in range(first + 1, steps + 1):
            self.work(0.1)
            self.iteration = at if is_run else self.iteration
            if at % interval == 0:
                seconds = (self.now - row[1]) / (at - row[0])
                if stop is not None and at < steps and stop(LoggedInterval(at, steps, seconds, 1)):
                    return
                row = (at, self.now)
            if checked and (at % every == 0 or at == steps):
                before = self.now
                self.work(checked * 0.1 / 3)
                row = (row[0], row[1] + self.now - before)

    def tokenize(self):
        self.work(5)
        return TOKENS

    def evaluate(self, parts=None):
        self.call("evaluate")
        self.evaluated = PARTS if parts is None else parts
        self.work(SCORED * self.evaluated / PARTS)
        return 1.5, 2.5


def train_on_machine(tmp_path, monkeypatch, minutes, slowness):
    machine = Machine(tmp_path, slowness)
    monkeypatch.setattr(own_text, "time", machine)
    text = CollectedText(100, 8_000_000, 200_000, held_out_parts=PARTS)
    monkeypatch.setattr(own_text, "read_own_text", lambda *given: machine.work(2) or text)
    monkeypatch.setattr(own_text, "vocabulary_size", lambda tour: 2048)
    monkeypatch.setattr(
        own_text,
        "expected_speed",
        lambda tour, vocab, profile, room, size: size.cost(vocab) ** -0.7,
    )
    monkeypatch.setattr(own_text.devices, "multiplies_bf16_fast", lambda: False)
    monkeypatch.setattr(own_text, "prompt_from", lambda file: "The")
    progress = TourProgress(tmp_path / "progress", {})
    deadline = own_text.Deadline(minutes, began=0.0)
    own_text.make_model(machine, SimpleNamespace(bytes=1), progress, deadline, own_text.Showing())
    return machine


def change(*pace):
    """Return a slowness that changes at shares of the minutes: pairs of an end and a factor."""
    return lambda minutes: (
        lambda now: next((slow for end, slow in pace if now < end * 60 * minutes), pace[-1][1])
    )


@pytest.mark.parametrize("minutes", [2, 3, 10])
@pytest.mark.parametrize(
    "slowness, lengths",
    [
        (change((1, 1.0)), 1),
        (change((0.5, 1.0), (1, 3.0)), 2),
        (change((0.5, 1.0), (1, 1 / 3)), 2),
        (change((1, 3.0)), 1),
        (change((0.2, 1.0), (0.5, 2.0), (1, 1.0)), 3),
    ],
    ids=["steady", "slower", "faster", "slow", "slow for a while"],
)
def test_it_ends_in_time(tmp_path, monkeypatch, minutes, slowness, lengths):
    """Everything counts, from the reading of the text to the samples at the end."""
    machine = train_on_machine(tmp_path, monkeypatch, minutes, slowness(minutes))
    assert abs(machine.now - 60 * minutes) < MARGIN * 60 * minutes
    assert len(machine.trained) == lengths  # no restart without a reason
    # The schedule is at its end.
    last = machine.trained[-1]
    assert machine.iteration == number_of(last, "--train-iters")
    schedule = build_schedule(parse_settings(TrainConfig, last, "train", check=False).config)
    assert schedule.lr(machine.iteration * number_of(last, "--micro-batch-size")) == schedule.min_lr
    assert (
        schedule.lr(0.9 * machine.iteration * number_of(last, "--micro-batch-size"))
        > schedule.min_lr
    )


def test_a_machine_that_becomes_slow_near_the_end_takes_no_step_too_many(tmp_path, monkeypatch):
    """What follows the training takes longer than the minutes that are left."""
    machine = train_on_machine(tmp_path, monkeypatch, 3, lambda now: 1.0 if now < 135 else 4.0)
    times = dict(reversed(machine.begun))
    assert len(machine.trained) == 2 and machine.iteration < 1200
    assert times["evaluate"] - 135 < 45
    assert 30 <= machine.evaluated < PARTS  # for a tenth of the minutes


@pytest.mark.parametrize(
    "now, slower, share",
    [
        (50, 1.0, 1),  # 70 s are left for 20 s of scores and the 8 s of what else follows
        (100, 1.0, 12 / 20),
        (80, 2.0, 24 / 40),  # twice as slow
        (100, 3.0, 12 / 60),  # no time is left: a tenth of the minutes
    ],
)
def test_the_share_of_the_held_out_text_that_is_scored(monkeypatch, now, slower, share):
    monkeypatch.setattr(own_text, "time", SimpleNamespace(perf_counter=lambda: now))
    deadline = own_text.Deadline(2, began=0.0, after=28.0, scored=20.0, slower=slower)
    assert deadline.evaluated_share() == pytest.approx(share)


def test_the_scores_of_few_parts_are_of_the_same_parts(tmp_path, monkeypatch, capsys):
    trip, called = tour.Tour(tmp_path, "log", "cpu"), []
    for name, texts in {"train": ["abcabc " * 9], "held_out": ["abcabc", "xyz" * 99]}.items():
        (tmp_path / f"{name}.jsonl").write_text(
            "".join(json.dumps({"text": text}) + "\n" for text in texts)
        )
    monkeypatch.setattr(trip, "call", lambda *argv: called.append(argv) or "bits per byte 1.5")
    (_, of_one), (_, of_all) = trip.evaluate(1), trip.evaluate()
    assert "--limit 1" in " ".join(called[0]) and "--limit" not in called[1]
    assert of_one < of_all
    assert "on the first 1 of the held-out parts" in capsys.readouterr().out


@pytest.mark.parametrize(
    "at, pace, begun, most, expected",
    [
        # as planned: 900 steps of 0.1 s are to come, and validations of 3 s
        (100, 0.1, 0, 9999, 1000),
        (100, 0.3, 0, 9999, 100 + 225),  # 103 s less three times as long a start and what follows
        (900, 0.1, -86, 9999, 1000),  # so late that a start takes as long as what is left
        (100, 0.05, 0, 9999, 100 + 1887),  # faster
        (100, 0.107, 0, 9999, 100 + 824),  # 7 s late, which is too much;
        (100, 0.093, 0, 9999, 1000),  # 7 s early, which is not
        (100, 0.05, 0, 1000, 1000),  # the text does not ask for more
        (100, 0.3, 0, 1000, 100 + 225),
        (300, 0.3, -110, 9999, 310),  # no time is left
    ],
)
def test_the_length_that_ends_in_time(monkeypatch, at, pace, begun, most, expected):
    monkeypatch.setattr(own_text, "time", SimpleNamespace(perf_counter=lambda: 17.0))
    deadline = own_text.Deadline(2, began=begun, after=10.0, start=1.0, pace=0.1)
    deadline.slower = pace / deadline.pace
    assert own_text.correct_steps(at, pace, 1000, deadline, most) == pytest.approx(expected, abs=2)


def test_one_odd_interval_changes_nothing():
    watch = own_text.PaceWatch(
        {"command": ["train", "--train-iters", "1000"], "most": 9999}, deadline_of(100), False
    )
    paces = [9.0, 0.1, 0.5, 0.1, 0.5, 0.1, 0.5, 0.5]
    reasons = [watch.stop(LoggedInterval(10 * n, 1000, pace, 1)) for n, pace in enumerate(paces, 1)]
    assert reasons[:-1] == [None] * 7 and reasons[-1].startswith(
        "a step takes 500 ms now: it saves and goes on, to "
    )
    assert (
        number_of(watch.next_command, "--train-iters") < 1000
        and own_text.NEW_LENGTH in watch.next_command
    )


def test_a_pace_is_measured_as_long_as_a_start_takes():
    """Two log lines of a busy machine agree by chance too often."""
    plan = {"command": ["train", "--train-iters", "1000"], "most": 9999}
    watch = own_text.PaceWatch(plan, deadline_of(100, start=10.0), False)
    paces = [0.4, 0.4, 0.6, 0.3, 0.7]  # two windows of 10 s, after the first interval
    reasons = [watch.stop(LoggedInterval(10 * n, 1000, pace, 1)) for n, pace in enumerate(paces, 1)]
    assert reasons[:-1] == [None] * 4 and reasons[-1].startswith("a step takes 500 ms now")


def deadline_of(seconds, start=1.0):
    """Return a deadline in so many seconds, of a machine that takes 0.1 s a step."""
    return own_text.Deadline(seconds / 60 + 0.1, after=6.0, start=start, pace=0.1)


def test_less_than_a_minute_is_not_corrected():
    watch = own_text.PaceWatch(
        {"command": ["train", "--train-iters", "1000"], "most": 9999}, deadline_of(30), False
    )
    assert [watch.stop(LoggedInterval(10 * n, 1000, 0.5, 1)) for n in range(1, 9)] == [None] * 8
