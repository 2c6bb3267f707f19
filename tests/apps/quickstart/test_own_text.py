"""The quickstart at a small scale; only trainings run in processes of their own."""

import functools
import itertools
import json
import random
import shlex
from types import SimpleNamespace

import pytest

from in_process import InProcess
from meshwright.__main__ import main
from meshwright.apps.quickstart import collect, own_text, plan, shell, start, tour
from meshwright.apps.quickstart import command as quickstart
from meshwright.apps.quickstart.collect import InputDocuments
from meshwright.apps.quickstart.folder import TourProgress, describe_changes
from meshwright.apps.quickstart.plan import Size
from meshwright.base import device as devices
from meshwright.base import registry
from meshwright.base.errors import BAD_DATA, IO, LOCKED, TOO_OLD, UNAVAILABLE, UserError
from meshwright.checkpoint import owner
from meshwright.config.text_inputs import TextInputs


@pytest.fixture
def text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(shell.subprocess, "Popen", InProcess)
    monkeypatch.setattr(plan, "SIZES", [Size(1, 16, 2, 16, 4, 1e-2)])
    chance = random.Random(0)
    words = ["".join(chance.choices("abcdefghij", k=5)) for _ in range(200)]
    lines = [json.dumps({"text": " ".join(chance.choices(words, k=60))}) for _ in range(200)]
    (tmp_path / "my notes.jsonl").write_text("\n".join(lines))
    return "my notes.jsonl"


def quickstart_of(text, *more):
    return main(["quickstart", text, "--minutes", "0.05", "--device", "cpu", *more])


@pytest.mark.whole
def test_from_text_to_a_model(text, tmp_path, capfd):
    assert quickstart_of(text) == 0
    out = capfd.readouterr().out
    folder = tmp_path / "my notes-model"
    for n in range(1, 8):
        assert f"\n{n}. " in out
    assert (
        "Opening" not in out
        and "Vocab size" not in out
        and "\n  wrote " in out
        and "SIGTERM" not in out
    )
    assert (
        "this is little text" in out and "bits per byte: this GPT" in out and "report.html" in out
    )
    assert (folder / "run/report.html").is_file() and (folder / "quickstart.log").is_file()

    # It prints the commands that it runs: they work when pasted.
    commands = [
        shlex.split(line)[2:] for line in out.splitlines() if line.startswith("$ meshwright ")
    ]
    names = [c[0] for c in commands]
    assert names == [
        "train-tokenizer",
        *2 * ["preprocess"],
        *2 * ["train"],
        "evaluate",
        *2 * ["generate"],
    ]
    assert "--greedy" in commands[-2] and main(commands[-3]) == 0
    last = [shlex.split(line)[1:] for line in out.splitlines() if line.startswith("  meshwright ")]
    assert [c[0] for c in last] == ["chat", "report", "inspect", "convert"]
    assert main(last[2]) == 0

    # Typed again, it trains nothing and names the same next commands.
    before = (folder / "quickstart.log").read_bytes()
    assert quickstart_of(text) == 0
    out = capfd.readouterr().out
    assert (
        "already done" in out
        and "bits per byte" in out
        and "$ meshwright" not in out
        and "--overwrite" in out
    )
    assert [
        shlex.split(line)[1:] for line in out.splitlines() if line.startswith("  meshwright ")
    ] == last
    assert (folder / "quickstart.log").read_bytes() == before and not (folder / "run-1").exists()


@pytest.mark.parametrize(
    "tokens, seconds, steps",
    [
        # at 0.1 s a step, with 10 s to start and to evaluate, and validations
        (10**6, 60, 200 + 460),
        (64 * 40, 60, 480),  # twelve readings of the text
        (64 * 10, 60, None),  # which it had
    ],
)
def test_more_minutes_continue_the_model(tmp_path, monkeypatch, capsys, tokens, seconds, steps):
    """The command keeps its model; only its length grows, by the pace that it had."""
    monkeypatch.setattr(own_text, "time", Trial(0, []))
    rows = [{"event": "step", "iteration": n + 1, "ms": 100.0} for n in range(200)]
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    progress = TourProgress(tmp_path / "progress", {"minutes": 1})
    command = [
        "train",
        "--seq-length",
        "16",
        "--micro-batch-size",
        "4",
        "--train-iters",
        "200",
        "--save",
        "run",
    ]
    progress.done["training tokens"] = tokens
    progress.finish("plan", {"command": command, "most": 999, "start": 4, "after": 6})
    progress.finish("bits per byte", (2, 3))
    progress.finish("end", 9)
    progress = TourProgress(tmp_path / "progress", {"minutes": 1 + seconds / 60})
    assert progress.resume()
    deadline = own_text.Deadline(1 + seconds / 60, began=0.0)
    assert own_text.train_longer(tour.Tour(tmp_path, "log", "cpu"), progress, deadline) == (
        steps is not None
    )
    if steps is None:
        assert "would only teach it by heart" in capsys.readouterr().out and "end" in progress.done
        return
    longer = [*command[:6], str(steps), *command[7:], "--override-opt_param-scheduler"]
    longer[5:7] = ["--train-iters", str(steps)]
    assert progress.done["plan"]["command"] == longer and "end" not in progress.done
    assert not TourProgress(tmp_path / "progress", {"minutes": 1}).resume()  # what it was before


def test_the_progress_of_a_release_before_0_15_is_refused(tmp_path):
    progress = TourProgress(tmp_path / "progress", {})
    progress.done["text"] = {"documents": 3, "train_bytes": 900, "held_out_bytes": 100}
    with pytest.raises(UserError, match=TOO_OLD):
        own_text.read_own_text(SimpleNamespace(folder=tmp_path), None, progress)


def test_a_failed_attempt_leaves_nothing_behind(text, tmp_path, monkeypatch):
    """Unless a step was finished, from which the same command goes on."""
    before = sorted(tmp_path.rglob("*"))
    (tmp_path / "tiny.jsonl").write_text('{"text": "three words only"}\n')
    assert quickstart_of("tiny.jsonl") == BAD_DATA
    (tmp_path / "tiny.jsonl").unlink()
    assert sorted(tmp_path.rglob("*")) == before

    def fail(tour, documents, progress, *more):
        progress.finish("text")
        raise UserError("no memory", BAD_DATA)

    monkeypatch.setattr(start, "make_model", fail)
    assert (
        quickstart_of(text) == BAD_DATA
        and (tmp_path / "my notes-model/.meshwright-quickstart").is_file()
    )


def test_validation_is_drawn_from_all_files(tmp_path):
    """As the held-out text is: the last files of a folder may be of another kind."""
    for n in range(40):
        (tmp_path / f"{n:02}.txt").write_text(f"{'code' if n > 37 else 'prose'} {n} " * 900)
    collect.collect(InputDocuments(TextInputs(input=[str(tmp_path)]), 1e9), tmp_path)
    t = tour.Tour(tmp_path, "log", "cpu")
    command = t.training(plan.SIZES[0], 0, 20)
    assert "--split" not in command
    assert command[command.index("--valid-data-path") + 1] == f"{tmp_path}/held_out_text_document"
    held_out = (tmp_path / "held_out.jsonl").read_text()
    assert held_out.count("prose") > held_out.count("code")
    calls = []
    t.call = lambda *argv, **how: calls.append(argv)
    with pytest.raises(UserError):  # nothing is written
        t.tokenize()
    assert [argv[argv.index("--output-prefix") + 1] for argv in calls] == [
        f"{tmp_path}/train",
        f"{tmp_path}/held_out",
    ]


def test_what_a_finished_quickstart_holds_is_not_replaced(text, tmp_path, monkeypatch, capsys):
    """The same text gives the same answer; other settings and a changed text need --overwrite."""
    made = []
    monkeypatch.setattr(start, "make_model", lambda *given: made.append(given))
    assert quickstart_of(text, "--output", "out") == 0 and len(made) == 1
    progress = made[0][2]
    progress.finish("bits per byte", (1.5, 2.5))
    progress.finish("end", made[0][1].bytes)
    assert quickstart_of(text, "--output", "out") == 0 and len(made) == 2  # there is no model
    (tmp_path / "out/run").mkdir()
    capsys.readouterr()
    assert quickstart_of(text, "--output", "out") == 0 and len(made) == 2
    out = capsys.readouterr().out
    assert "\nMore --minutes train the same model further. To start again: --overwrite" in out
    assert "already done: out/run has 1.500 bits per byte, a byte-trigram model 2.500" in out
    assert quickstart_of(text, "--output", "out", "--minutes", "0.01") == LOCKED
    assert "other settings: --minutes was 0.05, not 0.01; --overwrite" in capsys.readouterr().err
    (tmp_path / "b.txt").write_text("other text")
    assert (
        main(["quickstart", "b.txt", "--minutes", "0.05", "--output", "out", "--device", "cpu"])
        == LOCKED
    )
    assert (
        f"the text was {tmp_path / text}, not {tmp_path / 'b.txt'}; --overwrite"
        in capsys.readouterr().err
    )
    with open(text, "a") as file:
        file.write('{"text": "one more"}\n')
    assert quickstart_of(text, "--output", "out") == LOCKED and len(made) == 2
    assert "before a change; --overwrite" in capsys.readouterr().err
    assert quickstart_of(text, "--output", "out", "--overwrite") == 0 and len(made) == 3
    assert (tmp_path / "out/run-1").is_dir()


@pytest.mark.parametrize("minutes, seconds", [(0.5, 10), (1, 20), (2, 20), (10, 90)])
def test_the_trial_takes_a_part_of_the_time(minutes, seconds):
    assert own_text.Deadline(minutes).trial == seconds


class Trial:
    """A machine with a clock of its own that logs steps of so many seconds."""

    device, run = "cpu", "run"

    def __init__(self, start, seconds):
        self.now, self.start, self.seconds, self.steps = 0.0, start, seconds, 0

    def perf_counter(self):
        return self.now

    def training(self, *what):
        return []

    run_command = training

    def call(self, *argv, show, stop):
        self.now += self.start
        for seconds in self.seconds:
            self.steps += 1
            self.now += seconds
            if stop(shell.LoggedInterval(self.steps, 40, seconds, 1)):
                return


@pytest.mark.parametrize(
    "start, seconds, steps, speed, starts",
    [
        (5, [1.0] + 39 * [0.1], 40, 10_240, (5.9, 5)),  # the first step takes longer, once
        (30, 40 * [1.0], 2, 1024, (30, 30)),  # the start alone takes longer than the trial may
        (5, 40 * [3.0], 6, 1024 / 3, (5, 5)),  # more than 20 s
        (2, [10.0] + 39 * [4.0], 4, 256, (8, 2)),
    ],
)
def test_a_trial_ends_in_time(monkeypatch, capsys, start, seconds, steps, speed, starts):
    trial = Trial(start, seconds)
    monkeypatch.setattr(own_text, "time", trial)
    found = own_text.measure_speed(trial, plan.SIZES[0], 20, [])
    assert trial.steps == steps and found == pytest.approx((speed, *starts))


@pytest.mark.parametrize(
    "minutes, fast, speeds, chosen, tried",
    [
        (4, True, [1000, 1500], ["--bf16"], 2),
        (4, True, [1000, 1020], [], 2),  # too little gained
        (4, False, [1000], [], 1),  # no instructions for it
        (0.5, True, [1000], [], 1),  # no time for a second trial
    ],
)
def test_the_faster_precision_of_a_cpu_is_chosen(
    monkeypatch, capsys, minutes, fast, speeds, chosen, tried
):
    trials = []

    def measure(tour, size, most, how, accelerator=False):
        trials.append((how, most))
        return own_text.SpeedTrial(float(speeds[len(trials) - 1]), 2.0, 1.0)

    monkeypatch.setattr(own_text, "measure_speed", measure)
    monkeypatch.setattr(own_text.devices, "multiplies_bf16_fast", lambda: fast)
    deadline = own_text.Deadline(minutes)
    how, found = own_text.choose_precision(None, plan.SIZES[0], deadline, accelerator=False)
    assert how == chosen and found[0] == speeds[bool(chosen)] and len(trials) == tried
    assert sum(most for _, most in trials) == deadline.trial  # together no longer than one
    line = f"precision: {'bf16' if chosen else 'fp32'}, because bf16 is"
    assert (line in capsys.readouterr().out) == (tried == 2)


def test_a_slow_trial_leaves_no_time_for_another(monkeypatch, capsys):
    """On a busy machine each start takes a minute."""
    clock, trials = [0.0], []

    def measure(tour, size, most, how, accelerator=False):
        trials.append(how)
        clock[0] += 50.0
        return own_text.SpeedTrial(100.0, 40.0, 40.0)

    monkeypatch.setattr(own_text, "measure_speed", measure)
    monkeypatch.setattr(own_text, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(own_text.devices, "multiplies_bf16_fast", lambda: True)
    how, _ = own_text.choose_precision(
        None, plan.SIZES[0], own_text.Deadline(2, began=0.0), accelerator=False
    )
    assert (
        how == []
        and trials == [[]]
        and "precision: fp32; its trial took 50 s" in capsys.readouterr().out
    )


def test_an_accelerator_computes_in_bf16_without_a_choice(monkeypatch):
    given = []
    monkeypatch.setattr(
        own_text, "measure_speed", lambda *how: given.append(how) or (1.0, 1.0, 1.0)
    )
    how, _ = own_text.choose_precision(None, plan.SIZES[0], own_text.Deadline(10), accelerator=True)
    assert how == ["--bf16"] and len(given) == 1 and given[0][-1] is True


@pytest.mark.parametrize("seconds, fast", [(1, True), (4, False)])
def test_products_are_timed(monkeypatch, seconds, fast):
    """A CPU that takes as long for bfloat16 as for float32 has no instructions for it."""
    ticks = itertools.accumulate(itertools.cycle([0, 4, 0, seconds]))
    monkeypatch.setattr(devices.time, "perf_counter", lambda: next(ticks))
    assert devices.multiplies_bf16_fast(8) == fast


@pytest.mark.parametrize("minutes, enough", [(0.5, 5), (1, 4), (3.5, 4), (4, None), (10, None)])
def test_too_few_minutes_are_said_before_the_training(monkeypatch, capsys, minutes, enough):
    trial = Trial(20, 40 * [0.5])
    monkeypatch.setattr(own_text, "time", trial)
    monkeypatch.setattr(own_text, "vocabulary_size", lambda tour: 1024)
    monkeypatch.setattr(own_text, "expected_speed", lambda *given: 1.0)
    monkeypatch.setattr(own_text.devices, "multiplies_bf16_fast", lambda: False)
    text = collect.CollectedText(100, 10**6, 50_000)
    own_text.choose_training(
        trial, text, 300_000, own_text.Deadline(minutes, began=0.0), accelerator=False
    )
    out = capsys.readouterr().out
    assert ("too few for a useful model" in out) == (enough is not None)
    assert f"--minutes {enough} would do" in out or not enough


def test_the_plan_compares_sizes(tmp_path):
    """In batches that keep the device busy, a larger model reads fewer tokens a second."""
    made = tour.Tour(tmp_path, "log", "cpu")
    for profile in map(own_text.load_profile, ("cpu", "h100")):
        grown = [plan.grow(size, 10**9) for size in plan.SIZES]
        speeds = [own_text.expected_speed(made, 1024, profile, 1e12, size) for size in grown]
        assert speeds == sorted(speeds, reverse=True) and speeds[0] > 4 * speeds[-1] > 0
    assert own_text.find_profile("cpu")[0].name == "cpu"
    small = functools.partial(own_text.expected_speed, made, 1024, profile, 8e9)  # bytes
    assert [small(size) > 0 for size in grown] == [True] * 5 + [False]
    assert plan.trial_size(10**9, True, small, 1e6) == grown[4]
    none = functools.partial(own_text.expected_speed, made, 1024, profile, 0.0)
    assert [none(size) > 0 for size in grown] == [True] + [False] * 5
    assert plan.trial_size(10**9, True, none, 1e6) == grown[0]


@pytest.mark.parametrize(
    "place, part", [("apps.plan.prediction:", "apps/plan"), ("apps.evaluate.", "apps/evaluate")]
)
def test_an_app_that_is_missing_is_named_before_the_work(
    text, tmp_path, monkeypatch, capsys, place, part
):
    is_there = registry.is_there
    monkeypatch.setattr(registry, "is_there", lambda name: place not in name and is_there(name))
    assert quickstart_of(text) == UNAVAILABLE
    error = capsys.readouterr().err
    assert f"{part} " in error and "this installation lacks the part for it; install" in error
    assert not (tmp_path / "my notes-model").exists()


def test_what_is_passed_over_is_said(tmp_path, capsys):
    for n in range(30):
        (tmp_path / f"{n}.md").write_text(f"text {n} " * 200)
    (tmp_path / "style.css").write_text("p {}")
    (tmp_path / "zero.txt").write_bytes(b"\0")
    documents = InputDocuments(TextInputs(input=[str(tmp_path)]), 1e9)
    (tmp_path / "out").mkdir()
    own_text.read_own_text(
        tour.Tour(tmp_path / "out", "log", "cpu"),
        documents,
        TourProgress(tmp_path / "progress", {}),
    )
    out = capsys.readouterr().out
    assert (
        "passed over 2 files: 1 binary, 1 with other suffixes (.css); choose with --include" in out
    )
    assert "30 documents: 2" in out and " to learn from (" in out and " held out (" in out


def test_the_lines_of_a_training_say_each_thing_once():
    shorten, step = (
        shell.TrainingLines(),
        " iteration {}/ 20 | elapsed time per iteration (ms): 9.0 | lm loss: 5 ",
    )
    step += "| tokens per second: 10 | ETA: 1s"
    check, saved = (
        " validation loss at {} | lm loss value: 5.6E+00 | ",
        "  successfully saved checkpoint at iteration 20",
    )
    end = check.format("the end of training for val data")
    for line, shown in (
        (step.format(" 20"), "iteration     20 of 20   loss 5.000   10 tokens/s   1s left"),
        (check.format("iteration 20"), "validation loss at iteration 20: 5.600"),
        (saved, saved.strip()),
        (end, "validation loss at the end of training for val data: 5.600, on other batches"),
        (saved, None),
        ("other", None),
    ):
        assert shorten(line) == shown


def test_the_environment_does_not_change_the_lines_that_are_read(monkeypatch):
    # no times in it: the trial's speed was infinite
    monkeypatch.setenv("MESHWRIGHT_LOG_FORMAT", "short")
    assert shell.environment()["MESHWRIGHT_LOG_FORMAT"] == "megatron"


@pytest.mark.parametrize("steps, iters", [(20, 1), (200, 10), (400, 20), (9000, 20)])
def test_validation_takes_a_small_part_of_a_short_run(tmp_path, steps, iters):
    command = tour.Tour(tmp_path, "log", "cpu").run_command(plan.SIZES[0], 0, steps)
    assert command[command.index("--eval-iters") + 1] == str(iters)


def test_a_folder_that_cannot_be_taken_is_changed_by_its_own_flag(text, tmp_path, capsys):
    for folder in ("texts", "mine"):
        (tmp_path / folder).mkdir()
    (tmp_path / "texts" / "own.txt").touch()
    (tmp_path / "mine" / ".meshwright-quickstart").touch()
    with owner.lock_folder(tmp_path / "mine"):
        for output in (text, "texts", "mine"):
            assert quickstart_of(text, "--output", output) == LOCKED
            assert "name another folder by --output" in capsys.readouterr().err
    assert quickstart_of(text, "--output", f"{text}/in a file") == IO
    assert "Not a directory; name another folder by --output" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text, folder",
    [
        ("my notes.txt", "my notes-model"),
        ("-", "text-model"),
        (".config", "config-model"),
        ("a/*.txt", "txt-model"),
        ("笔记", "笔记-model"),
    ],
)
def test_no_shell_and_no_command_takes_the_folder_for_something_else(text, folder):
    assert str(quickstart.default_folder(text)) == folder


@pytest.mark.parametrize(
    "texts, prompt",
    [
        (
            ["# Title\n- A line that is long enough to begin with"],
            "A line that is long enough to begin",
        ),
        (["春眠不觉晓\n处处闻啼鸟，夜来风雨声\n"], "处处闻啼鸟，夜来风雨声"),
        (["\n---\n"], "The"),
    ],
)
def test_a_prompt_from_the_text(tmp_path, texts, prompt):
    (tmp_path / "held_out.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts)
    )
    assert tour.prompt_from(tmp_path / "held_out.jsonl") == prompt


def test_a_setting_that_was_not_given_before_is_said_to_be_new():
    assert describe_changes({}, {"encoding": "gb18030"}) == "no --encoding was given, now gb18030"
    assert (
        describe_changes({"include": []}, {"include": ["*.md"]})
        == "no --include was given, now *.md"
    )
    assert describe_changes({"encoding": "big5"}, {}) == "--encoding was big5, now none is given"
