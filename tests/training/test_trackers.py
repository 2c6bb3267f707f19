"""TensorBoard, read back from its files, and stand-ins for Weights & Biases and Trackio."""

import sys
import time
import types

import pytest
import torch

from helpers import SMALL_FLAGS
from meshwright.__main__ import main
from meshwright.base import registry
from meshwright.base.errors import UserError
from meshwright.config import fields
from meshwright.config import schema as config
from meshwright.runtime.ranks.team import Team
from meshwright.training.log.timers import Timers
from meshwright.training.log.trackers import (
    TAGS,
    RunToDraw,
    Tracker,
    open_trackers,
    tags,
    validation_tags,
)

ROW = {
    "iteration": 6,
    "loss": 2.5,
    "grad_norm": 0.5,
    "lr": 0.25,
    "loss_scale": 8.0,
    "ms": 500.0,
    "memory": 4096,
}
ROW |= {
    "batch": 16,
    "params_norm": 3.0,
    "num_zeros": 7,
    "reserved": 8192,
    "allocated_count": 9,
    "world_size": 2,
}
ROW |= {"timers": {"optimizer": 125.0}}
CHECK = {"name": "validation", "loss": 2.0, "ppl": 7.5}
EVERYTHING = {
    f"log_{what}_to_tensorboard": True
    for what in ("timers", "batch_size", "memory", "world_size", "validation_ppl")
}


def logging(**values):
    return config.Logging(**values)


def read(folder):
    """Return tag -> [(step, value)] as TensorBoard shows them, and the reader."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    return {
        tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]
    }, found


def test_names_are_megatrons():
    assert tags(logging(**EVERYTHING), ROW) == {
        "lm loss": 2.5,
        "grad-norm": 0.5,
        "learning-rate": 0.25,
        "loss-scale": 8.0,
        "batch-size": 16.0,
        "num-zeros": 7.0,
        "params-norm": 3.0,
        "world-size": 2.0,
        "mem-reserved-bytes": 8192.0,
        "mem-allocated-bytes": 4096.0,
        "mem-allocated-count": 9.0,
        "iteration-time": 0.5,
        "optimizer-time": 0.125,
    }
    assert validation_tags(logging(**EVERYTHING), CHECK) == {
        "lm loss validation": 2.0,
        "lm loss validation ppl": 7.5,
    }


@pytest.mark.flag("log_learning_rate_to_tensorboard")
def test_flags_choose():
    always = {"lm loss", "grad-norm", "num-zeros", "params-norm"}
    assert tags(logging(), ROW).keys() == always | {"learning-rate", "loss-scale"}
    none = logging(log_learning_rate_to_tensorboard=False, log_loss_scale_to_tensorboard=False)
    assert tags(none, ROW).keys() == always
    assert validation_tags(logging(), CHECK) == {"lm loss validation": 2.0}
    assert {flag for _, flag in TAGS.values() if flag} <= fields.config_fields(
        config.TrainConfig
    ).keys()


def test_missing_values_are_left_out_and_a_skipped_step_has_no_loss():
    assert tags(logging(**EVERYTHING), {"loss": 1.0, "memory": None}) == {"lm loss": 1.0}
    assert tags(logging(tensorboard_log_interval=3), ROW) and not tags(
        logging(tensorboard_log_interval=4), ROW
    )
    skipped = tags(
        logging(), {**ROW, "skipped": True, "loss": float("inf"), "grad_norm": float("nan")}
    )
    assert "lm loss" not in skipped and "grad-norm" not in skipped and skipped["loss-scale"] == 8.0


def test_tensorboard_files(tmp_path):
    (tracker,) = open_trackers(
        RunToDraw(logging(), tmp_path, {"lr": 0.1, "data_path": ["a"]}, "run")
    )
    tracker.scalars({"lm loss": 2.5}, 1, 4)
    tracker.scalars({}, 2, 8)
    tracker.scalars({"lm loss": 1.5}, 3, 12)
    tracker.close()
    curves, found = read(tmp_path / "tensorboard")
    assert curves == {"lm loss": [(1, 2.5), (3, 1.5)]}
    text = found.Tensors("arguments/text_summary")[0].tensor_proto.string_val[0].decode()
    assert text == '    lr: 0.1\n    data_path: ["a"]'
    assert read(tmp_path / "tensorboard" / "samples")[0] == {
        "lm loss vs samples": [(4, 2.5), (12, 1.5)]
    }


def test_a_resumed_run_continues_at_its_checkpoint(tmp_path, monkeypatch):
    """Killed after step 5 and resumed from step 3: no point appears twice on either curve."""
    real = time.time
    for first, last, loss in ((1, 5, 2.0), (4, 6, 1.0)):
        # Later by seconds, as attempts are: TensorBoard orders its files by name, and
        # those of one second by a number as text.
        monkeypatch.setattr(time, "time", lambda later=10 * first: real() + later)
        (tracker,) = open_trackers(
            RunToDraw(logging(), tmp_path, {}, "run", first, 4 * (first - 1))
        )
        for i in range(first, last + 1):
            tracker.scalars({"lm loss": loss}, i, 4 * i)
        tracker.close()
    expected = [(i, 2.0 if i < 4 else 1.0) for i in range(1, 7)]
    assert read(tmp_path / "tensorboard")[0]["lm loss"] == expected
    over_samples = read(tmp_path / "tensorboard" / "samples")[0]["lm loss vs samples"]
    assert over_samples == [(4 * i, loss) for i, loss in expected]


def test_folders_and_missing_packages(tmp_path, monkeypatch):
    assert open_trackers(RunToDraw(logging(tensorboard=False), tmp_path, {}, "run")) == []
    assert open_trackers(RunToDraw(logging(), None, {}, "run")) == [] and not list(
        tmp_path.iterdir()
    )
    open_trackers(RunToDraw(logging(tensorboard_dir=str(tmp_path / "here")), None, {}, "run"))[
        0
    ].close()
    assert any((tmp_path / "here").glob("events*"))
    for name in [n for n in sys.modules if n.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)  # as if it were not installed
    assert open_trackers(RunToDraw(logging(), tmp_path, {}, "run")) == []
    with pytest.raises(
        UserError, match=r"--tensorboard-dir needs .*pip install 'meshwright\[log\]'"
    ) as e:
        open_trackers(RunToDraw(logging(tensorboard_dir="x"), tmp_path, {}, "run"))
    assert e.value.status == 69


@pytest.mark.parametrize("fails", ["add_scalars", "add_text", "finish"])
def test_a_tracker_that_fails_says_so_once_and_is_off(tmp_path, capsys, monkeypatch, fails):
    (tracker,) = open_trackers(RunToDraw(logging(), tmp_path, {}, "run"))
    calls = []

    def fail(*_):
        calls.append(1)
        raise OSError("disk full")

    monkeypatch.setattr(tracker, fails, fail)
    for i in range(1, 4):
        tracker.scalars({"lm loss": 1.0}, i, i)
        tracker.text("arguments", "")
    tracker.close()
    tracker.close()
    assert calls == [1]
    assert (
        capsys.readouterr().err
        == "TensorBoard failed and is now off; the run continues (OSError: disk full)\n"
    )
    tracker.over_iterations.close(), tracker.over_samples.close()


@pytest.fixture
def wandb(monkeypatch):
    """A module with wandb's init that records the calls."""
    module = types.ModuleType("wandb")
    module.inits, module.logged, module.finished = [], [], 0

    class Run:
        summary = {}

        def log(self, values, step):
            module.logged.append((step, values))

        def finish(self):
            module.finished += 1

    def init(**values):
        module.inits.append(values)
        return Run()

    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


@pytest.mark.flag("wandb_project wandb_exp_name wandb_save_dir")
@pytest.mark.promise("`--wandb-project` sends a run's metrics to Weights & Biases")
def test_wandb(tmp_path, wandb):
    asked = logging(tensorboard=False, wandb_project="gpt", wandb_exp_name="first")
    (tracker,) = open_trackers(RunToDraw(asked, tmp_path, {"lr": 0.1}, "run"))
    tracker.scalars({"lm loss": 2.5}, 3, 12)
    tracker.text("note", "words")
    assert tracker.run.summary == {"note": "words"}
    tracker.close()
    assert wandb.logged == [(3, {"lm loss": 2.5, "samples": 12})] and wandb.finished == 1
    (init,) = wandb.inits
    known = init.pop("id")
    assert init == {
        "project": "gpt",
        "name": "first",
        "dir": str(tmp_path),
        "config": {"lr": 0.1},
        "resume": "allow",
    }
    open_trackers(RunToDraw(asked, tmp_path, {}, "run", first=4))  # resumed: the same run there
    open_trackers(RunToDraw(asked, tmp_path, {}, "run"))  # begun anew: another
    again, anew = (i["id"] for i in wandb.inits[1:])
    assert again == known != anew


def test_wandb_beside_tensorboard_with_defaults_and_without_a_folder(tmp_path, wandb):
    both = open_trackers(
        RunToDraw(logging(wandb_project="gpt", wandb_save_dir="there"), tmp_path, {}, "run")
    )
    assert [t.name for t in both] == ["TensorBoard", "Weights & Biases"]
    both[0].close()
    assert (wandb.inits[0]["name"], wandb.inits[0]["dir"]) == ("run", "there")
    open_trackers(RunToDraw(logging(wandb_project="gpt"), None, {}, "run"))
    assert wandb.inits[1]["dir"] is None


@pytest.fixture
def trackio(monkeypatch):
    """A stand-in for the package, which prints as it does."""
    fake = types.ModuleType("trackio")
    fake.inits, fake.logged, fake.finished = [], [], 0

    class Run:
        def log(self, values, step=None):
            fake.logged.append((step, values))

    def init(**given):
        print("* Trackio project initialized")
        fake.inits.append(given)
        return Run()

    def finish():
        print("* Run finished")
        fake.finished += 1

    fake.init, fake.finish, fake.Markdown = init, finish, lambda text: f"markdown {text}"
    monkeypatch.setitem(sys.modules, "trackio", fake)
    return fake


@pytest.mark.flag("trackio_project")
def test_trackio(tmp_path, trackio, capsys):
    asked = logging(tensorboard=False, trackio_project="gpt")
    (tracker,) = open_trackers(RunToDraw(asked, tmp_path, {"lr": 0.1}, "run"))
    tracker.scalars({"lm loss": 2.5}, 3, 12)
    tracker.text("sample 0", "words", 3)
    tracker.close()
    assert trackio.logged == [
        (3, {"lm loss": 2.5, "samples": 12}),
        (3, {"sample 0": "markdown words"}),
    ]
    open_trackers(RunToDraw(asked, tmp_path, {}, "run", first=4))
    asked_for = [(i["project"], i["name"], i["config"], i["resume"]) for i in trackio.inits]
    assert (
        asked_for == [("gpt", "run", {"lr": 0.1}, "never"), ("gpt", "run", {}, "allow")]
        and trackio.finished == 1
    )
    out, err = capsys.readouterr()
    assert out == "" and "* Trackio" in err and "* Run finished" in err  # stdout has the log alone


@pytest.mark.parametrize(
    ("name", "refusal", "way_out"),
    [
        ("wandb", "no API key", r"WANDB_MODE=offline"),
        ("trackio", "no such space", "leave it out to go on without"),
    ],
)
def test_a_missing_or_refusing_package_is_reported_before_the_first_step(
    tmp_path, wandb, trackio, monkeypatch, name, refusal, way_out
):
    asked = logging(tensorboard=False, **{f"{name}_project": "gpt"})

    def init(**_):
        raise ValueError(refusal)

    monkeypatch.setattr(sys.modules[name], "init", init)
    with pytest.raises(UserError, match=f"--{name}-project gpt: {refusal} .*{way_out}"):
        open_trackers(RunToDraw(asked, tmp_path, {}, "run"))
    assert not (tmp_path / "wandb-id").exists()
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match="pip install ") as e:
        open_trackers(RunToDraw(asked, tmp_path, {}, "run"))
    assert e.value.status == 69


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_a_missing_package_is_reported_before_the_data_are_opened(
    tmp_path, monkeypatch, capsys, more
):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr(
        "meshwright.training.run.run_resolved", lambda *_: pytest.fail("the run has begun")
    )
    assert (
        main(["train", *SMALL_FLAGS, "--wandb-project", "gpt", "--run-dir", str(tmp_path), *more])
        == 69
    )
    assert (
        "--wandb-project needs wandb: install it with pip install 'meshwright[wandb]'"
        in capsys.readouterr().err
    )


def test_timers_wait_for_their_own_work_alone(monkeypatch):
    """Do not wait for a receive in flight: its data may not have been sent yet."""
    waited = []

    class Stream:
        def synchronize(self):
            waited.append("stream")

    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: Stream())
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda *a: waited.append("device"))
    with Timers(1, "minmax", torch.device("cuda", 0), Team()).time("optimizer", 1):
        pass
    assert waited == ["stream", "stream"]
    with Timers(1, "minmax", torch.device("cpu"), Team()).time("optimizer", 1):
        pass
    assert len(waited) == 2


def test_another_packages_tracker_is_opened(tmp_path, monkeypatch):
    class Own(Tracker):
        name = "ours"

        def __init__(self, run):
            self.run, self.points = run, []

        def add_scalars(self, values, iteration, samples):
            self.points.append((values, iteration, samples))

    monkeypatch.setattr(
        registry, "load", lambda group: {"own": Own, "not asked for": lambda run: None}
    )
    (tracker,) = open_trackers(RunToDraw(logging(), tmp_path, {"lr": 0.1}, "run", first=3))
    tracker.scalars({"lm loss": 1.5}, 3, 12)
    assert tracker.run.first == 3 and tracker.points == [({"lm loss": 1.5}, 3, 12)]
