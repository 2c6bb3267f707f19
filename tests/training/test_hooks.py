"""What the loop does beside its steps: in which order, when, and outside of which step's time."""

import itertools

import pytest

from helpers import TinyRun
from meshwright.training import loop
from meshwright.training.hooks.hook import Hook, PrintGpus
from meshwright.training.hooks.samples import SampleWriter
from meshwright.training.hooks.saving import Saving
from meshwright.training.inflight import InFlight
from meshwright.training.validation import Validator

ORDER = [
    "Replicas",
    "CollectScores",
    "PrintGpus",
    "Validator",
    "WriteSamples",
    "Saving",
    "ScoreTasks",
]


class Scores:
    interval = 1


def hooks_with(monkeypatch, tmp_path, capsys, made) -> list[Hook]:
    """Return the hooks of a run that has every one of them."""

    def note(trainer, samples):
        trainer.replicas = trainer.replicas or Replicas()
        trainer.scores = Scores()
        trainer.score_tasks = loop.ScoreTasks(Scores(), trainer.progress, None, lambda: False)
        made.extend(real(trainer, object.__new__(SampleWriter)))
        return []

    class Replicas(loop.Replicas):
        def __init__(self):
            self.pending = None

        def look(self):
            pass

    Replicas.__name__ = "Replicas"
    real = loop.Trainer.list_hooks
    monkeypatch.setattr(loop.Trainer, "list_hooks", note)
    monkeypatch.setattr(loop.Trainer, "train", lambda trainer, startup: "stopped")
    monkeypatch.setattr(loop.Trainer, "close", lambda trainer: trainer.metrics.close())
    assert TinyRun(tmp_path, capsys).status == 0
    return made


def test_the_order_of_the_hooks_is_a_contract(monkeypatch, tmp_path, capsys):
    hooks = hooks_with(monkeypatch, tmp_path, capsys, [])
    assert [type(hook).__name__ for hook in hooks] == ORDER
    # Those within a step come first.
    assert [hook.between_steps for hook in hooks] == [False] * 2 + [True] * 5


@pytest.fixture
def calls(monkeypatch):
    """Note each hook that runs, and each pause of the clock."""
    noted: list[str] = []

    def watch(kind, name):
        real = getattr(kind, name)

        def call(self, *more):
            noted.append(f"{kind.__name__} {more[0]}" if more else kind.__name__)
            return real(self, *more)

        monkeypatch.setattr(kind, name, call)

    watch(PrintGpus, "run")
    watch(Validator, "run")
    watch(Saving, "run")
    watch(InFlight, "pause")
    monkeypatch.setattr("meshwright.training.log.metrics.Metrics.print_gpus", lambda metrics: None)
    return noted


def test_each_hook_runs_when_it_is_due_in_one_pause(calls, tmp_path, capsys):
    save = ["--save", tmp_path / "save", "--save-interval", 4, "--nvidia-smi-at", 3]
    assert TinyRun(tmp_path / "run", capsys, *save).status == 0
    assert calls == [
        "InFlight",
        "PrintGpus 3",
        "Validator 3",
        "InFlight",
        "Saving 4",
        "InFlight",
        "Validator 6",
        "Saving 6",  # at the end of the run
    ]


def test_the_best_step_is_saved_when_its_validation_has_noted_it(calls, tmp_path, capsys):
    """With --keep-best the validation makes the save due."""
    save = ["--save", tmp_path / "save", "--keep-best"]
    assert TinyRun(tmp_path / "run", capsys, *save).status == 0
    assert calls[:3] == ["InFlight", "Validator 3", "Saving 3"]


def test_no_step_counts_the_time_of_a_hook(monkeypatch, tmp_path, capsys):
    """A slow validation after step 3 leaves the seconds of step 4 as they are."""
    marks, slept = itertools.count(), [0.0]
    # Each mark is a second after the one before.
    monkeypatch.setattr("meshwright.base.device.mark", lambda device: next(marks) + slept[0])
    validate = Validator.run

    def slow(self, step):
        validate(self, step)
        slept[0] += 100.0

    monkeypatch.setattr(Validator, "run", slow)
    got = TinyRun(tmp_path, capsys)
    assert got.status == 0 and slept == [200.0]
    assert len(got.column("ms")) == 6 and max(got.column("ms")) < 10_000
