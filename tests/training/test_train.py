"""The training command: its log, counters and exit statuses, and what it refuses."""

import errno
import functools
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import meshwright.checkpoint.native
import meshwright.cli.train
import meshwright.training.loop
import meshwright.training.micro_step
import meshwright.training.run
import meshwright.training.setup
import warm
from helpers import SMALL_FLAGS, TINY_FLAGS, error_of, read_losses, read_rows, write_counting
from meshwright.__main__ import main
from meshwright.base import console, device
from meshwright.base.errors import BAD_DATA, TOO_OLD, UserError
from meshwright.base.files import replacing
from meshwright.config.command import out_of_memory
from meshwright.config.data_paths import TokenFiles
from meshwright.config.flags import parse_settings
from meshwright.config.schema import Parallel, TrainConfig, Training
from meshwright.training.before.resolve import NO_VOCABULARY, TrainingRun
from meshwright.training.run import print_settings
from meshwright.training.state.resume import require_chosen_batch


def start(*more):
    return main(["train", *SMALL_FLAGS, *map(str, more)])


def train(tmp_path, *more, save="run"):
    status = start("--save", tmp_path / save, *more)
    return status, read_rows(tmp_path / save)


@pytest.mark.pictures
def test_loss_falls_and_everything_is_written(tmp_path, capsys):
    flags = "--save-interval 3 --train-iters 15 --log-interval 5 --vocab-size 8"
    status, steps = train(tmp_path, *flags.split(), "--hidden-dropout=0", "--attention-dropout=0")
    assert status == 0 and len(steps) == 15
    assert sum(s["loss"] for s in steps[-5:]) < sum(s["loss"] for s in steps[:5])
    run = tmp_path / "run"
    files = {p.name for p in run.iterdir() if not p.name.startswith(".")}
    steps_saved = {f"iter_{i:07d}" for i in range(3, 16, 3)}
    assert files == steps_saved | set(
        "config.toml latest_checkpointed_iteration.txt log.txt metrics.jsonl report.html".split()
    )
    assert (run / "latest_checkpointed_iteration.txt").read_text() == "15"
    assert (
        len(read_rows(run, "validation")) == 5 + 2
        and read_rows(run, "end")[0]["reason"] == "all iterations done"
    )
    out = capsys.readouterr().out
    assert len(re.findall(r"^ iteration +\d+/ +15 \|", out, re.M)) == 3


def test_log_lines_in_megatrons_order(tmp_path, capsys):
    train(tmp_path, "--load", tmp_path / "run", "--save-interval", "3")
    out = capsys.readouterr().out
    order = [
        r"using world size: 1, data-parallel-size: 1, tensor-model-parallel size: 1, pipeline-model-parallel size: 1 $",
        r"using torch\.float32 for parameters \.\.\.$",
        r"------------------------ arguments ------------------------$",
        r"  adam_beta1 \.{38} 0\.9$",
        r"  num_layers \.{38} 1$",
        r"-------------------- end of arguments ---------------------$",
        r"setting number of micro-batches to constant 1$",
        r" > padded vocab \(size: 64\) with 64 dummy tokens \(new size: 128\)$",
        r"> initializing torch distributed \.\.\.$",
        r"> initialized tensor model parallel with size 1$",
        r"> initialized pipeline model parallel with size 1$",
        r"> setting random seeds to 1234 \.\.\.$",
        r"time to initialize megatron \(seconds\): \d+\.\d{3}$",
        r"\[after megatron is initialized\] datetime: \d{4}-\d\d-\d\d \d\d:\d\d:\d\d $",
        r"building GPT model \.\.\.$",
        r" > number of parameters on \(tensor, pipeline\) model parallel rank \(0, 0\): 17376$",
        r"> learning rate decay style: linear$",
        r"WARNING: could not find the metadata file .*latest_checkpointed_iteration\.txt",
        r"    will not load any checkpoints and will start from random$",
        r"\(min, max\) time across ranks \(ms\):$",
        r"    load-checkpoint \.{32}: \(\d+\.\d\d, \d+\.\d\d\)$",
        r"\[after model, optimizer, and learning rate scheduler are built\] datetime:",
        r"> building train, validation, and test datasets \.\.\.$",
        r"    train:      24$",
        r"    validation: 12$",
        r"    test:       4$",
        r"> finished creating GPT datasets \.\.\.$",
        r"\[after dataloaders are built\] datetime:",
        r"done with setup \.\.\.$",
        r"    model-and-optimizer-setup \.{22}: ",
        r"    train/valid/test-data-iterators-setup \.{10}: ",
        r"training \.\.\.$",
        r"\[before the start of training step\] datetime:",
        r" iteration        1/       6 \| consumed samples:            4 \| "
        r"elapsed time per iteration \(ms\): \d+\.\d \| "
        r"learning rate: 8\.333E-03 \| global batch size:     4 \| lm loss: \d\.\d{6}E\+00 \| loss scale: 1\.0 \| "
        r"grad norm: \d+\.\d{3} \| number of skipped iterations:   0 \| number of nan iterations:   0 \|",
        r"-{50,}$",
        r" validation loss at iteration 3 \| lm loss value: \d\.\d{6}E\+00 \| lm loss PPL: \d\.\d{6}E\+01 \| $",
        r"-{50,}$",
        r"saving checkpoint at iteration       3 to ",
        r"  successfully saved checkpoint at iteration       3 to ",
        r"\[after training is done\] datetime:",
        r" validation loss at the end of training for val data \| lm loss value:",
        r"saving checkpoint at iteration       6 to ",
        r" validation loss at the end of training for test data \| lm loss value:",
    ]
    at = 0
    for pattern in order:
        found = re.search("^" + pattern, out[at:], re.M)
        assert found, f"not found after position {at}: {pattern}\n{out[at : at + 800]}"
        at += found.end()


def test_finished_run_again_takes_no_step(tmp_path, capsys):
    train(tmp_path, "--load", tmp_path / "run")
    before = (tmp_path / "run/iter_0000006/manifest.json").stat().st_mtime_ns
    capsys.readouterr()
    status, steps = train(tmp_path, "--load", tmp_path / "run")
    out = capsys.readouterr().out
    assert status == 0 and len(steps) == 6
    assert "successfully loaded checkpoint" in out and " iteration " not in out.replace(
        "at iteration ", ""
    )
    places = [
        out.index(s)
        for s in ("for val data", "saved checkpoint at iteration       6", "for test data")
    ]
    assert places == sorted(places)
    # the same, not written again
    assert (tmp_path / "run/iter_0000006/manifest.json").stat().st_mtime_ns == before


def test_without_save_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert start() == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.flag("fp16 bf16 params_dtype")
def test_precisions_agree(tmp_path):
    curves = {}
    for flag in ("--params-dtype=float64", "--params-dtype=float32", "--bf16", "--fp16"):
        _, steps = train(
            tmp_path, flag, "--initial-loss-scale", "1024", "--lr", "1e-3", save=flag.strip("-")
        )
        curves[flag] = [s["loss"] for s in steps]
    exact = curves["--params-dtype=float64"]
    assert curves["--params-dtype=float32"] == pytest.approx(exact, rel=1e-5)
    assert curves["--bf16"] == pytest.approx(exact, rel=2e-2) and curves["--bf16"] != exact
    assert curves["--fp16"] == pytest.approx(exact, rel=3e-3)


def test_fp16_overflow_is_skipped_and_counted(tmp_path, capsys):
    _, steps = train(tmp_path, "--fp16", "--lr-warmup-iters", "2", "--train-iters", "30")
    skipped = [s["skipped"] for s in steps]
    assert skipped[0] and not all(skipped)
    n = skipped.index(False)
    assert [s["loss_scale"] for s in steps[: n + 1]] == [
        2.0**32,
        *(2.0 ** (32 - k) for k in range(n)),
    ]
    # the schedule waits
    assert all(s["lr"] == 0 for s in steps[: n + 1]) and steps[n + 1]["lr"] > 0
    assert steps[n]["consumed_samples"] == 4 * (n + 1)  # the data does not
    # Megatron's line of a skipped step has no norm of the gradients.
    first, *_, last = re.findall(r"^ iteration .*", capsys.readouterr().out, re.M)
    assert "loss scale: 4294967296.0 | number of skipped iterations:   1" in first
    assert "| grad norm: " in last


def test_non_finite_loss_stops_with_70(tmp_path, capsys, monkeypatch):
    calls, good = [], meshwright.training.micro_step.loss_sum

    def bad(*args):
        calls.append(1)
        return good(*args) * (float("nan") if len(calls) == 3 else 1)

    monkeypatch.setattr(meshwright.training.micro_step, "loss_sum", bad)
    status, steps = train(tmp_path, "--save-interval", "2", "--eval-iters", "0")
    captured = capsys.readouterr()
    assert status == 70 and steps[-1]["loss"] == "nan" and len(steps) == 3
    assert (
        "lm loss" not in captured.out.splitlines()[-1]
        or "nan" in captured.out.splitlines()[-1].lower()
    )
    assert (
        "iteration 3" in captured.err
        and "not applied" in captured.err
        and "--bf16" not in captured.err
    )
    assert sorted(p.name for p in (tmp_path / "run").glob("iter_*")) == ["iter_0000002"]


@pytest.mark.fault("F13")
def test_second_run_on_the_folder_is_refused(tmp_path, capsys, monkeypatch):
    """Before torch is imported, which takes seconds."""
    from meshwright.checkpoint import owner

    monkeypatch.setattr(
        meshwright.training.run.devices, "open_device", lambda *_: pytest.fail("too late")
    )
    (tmp_path / "run").mkdir()
    with owner.lock_folder(tmp_path / "run"):
        status = start("--save", tmp_path / "run")
    assert status == 73 and str(os.getpid()) in capsys.readouterr().err


def test_a_refused_start_leaves_nothing_behind(tmp_path, monkeypatch):
    """Also one that is refused after the folders are locked."""

    def refuse(*_):
        assert (tmp_path / "a/b/.lock").exists() and (tmp_path / "a/b/logs/.lock").exists()
        raise UserError("no data")

    monkeypatch.setattr(meshwright.training.setup, "build_trainer", refuse)
    status, _ = train(tmp_path, "--run-dir", tmp_path / "a/b/logs", save="a/b")
    assert status == 2 and not list(tmp_path.iterdir())


def test_a_run_that_fails_behind_its_set_up_is_closed(tmp_path, monkeypatch):
    """As where its log cannot be opened: data, scores and savers are at work by then."""
    closed = []

    def refuse(self):
        raise UserError("no log")

    trainer = SimpleNamespace(close=lambda: closed.append(1))
    monkeypatch.setattr(meshwright.training.setup, "build_trainer", lambda *_: trainer)
    monkeypatch.setattr(meshwright.training.run.Startup, "line", refuse)
    assert train(tmp_path)[0] == 2 and closed == [1]


def test_a_folder_of_texts_is_noted_before_a_run_lies_in_it(tmp_path, capsys):
    """Once, and not for what else may lie beside a run."""
    run = tmp_path / "run"
    run.mkdir()
    for name in ("log.txt", "ds_config.json", "README.md", "run.sh", "job.log"):
        (run / name).write_text("x")
    note = f"note: --save {run} holds texts (a.txt, b.jsonl): `preprocess` on this folder would also read"
    train(tmp_path, "--dry-run")
    assert "holds texts" not in capsys.readouterr().out
    for name in ("a.txt", "b.jsonl"):
        (run / name).write_text("{}")
    assert train(tmp_path, "--dry-run")[0] == 0 and note in capsys.readouterr().out
    assert (
        train(tmp_path, "--exit-interval", "1")[0] == 0 and capsys.readouterr().out.count(note) == 1
    )
    assert train(tmp_path, "--load", run, "--exit-interval", "2")[0] == 0
    assert "holds texts" not in capsys.readouterr().out


@pytest.mark.flag("device")
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--device", "cuda"], "torch sees no GPU"),
        (
            "--micro-batch-size 100000000 --global-batch-size 100000000".split(),
            "for the logits of 100000000 x 16",
        ),
        (["--hidden-size", "1000000000"], "the device has"),
    ],
)
def test_what_this_machine_lacks_is_refused(tmp_path, capsys, flags, words):
    if flags[0] == "--device" and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    status = start("--save", tmp_path / "run", *flags)
    assert status == 2 and words in capsys.readouterr().err
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_half_an_environment_is_refused(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert start() == 2 and "RANK is not" in capsys.readouterr().err


@pytest.mark.flag("exit_on_missing_checkpoint")
def test_missing_checkpoint_can_be_an_error(tmp_path, capsys):
    status = start("--load", tmp_path / "none", "--exit-on-missing-checkpoint")
    assert (
        status == 65
        and "no such folder, but --exit-on-missing-checkpoint needs one" in capsys.readouterr().err
    )
    (tmp_path / "none").mkdir()
    assert main(["train", "--load", str(tmp_path / "none"), "--mock-data", "--hidden-size=8"]) == 65
    message = (
        "no checkpoint found, and without one --num-layers, --num-attention-heads must be given"
    )
    assert message in capsys.readouterr().err


def test_contradicting_architecture_is_refused(tmp_path, capsys, finished):
    finished(tmp_path / "run")
    run = str(tmp_path / "run")
    assert start("--load", run, "--hidden-size", "64") == 65
    err = capsys.readouterr().err
    assert "32" in err and "64" in err
    assert start("--load", run, "--num-attention-heads", "2") == 65
    err = capsys.readouterr().err
    # which follows
    assert "--num-attention-heads 2, the checkpoint has 4" in err and "group-query" not in err
    unsized = [flag for flag in SMALL_FLAGS if not flag.startswith(("--max-position", "--hidden"))]
    assert main(["train", *unsized, "--load", run, "--seq-length", "64"]) == 2
    assert (
        f"the model of {run} was made for 16 positions, and --seq-length 64 is more: "
        in capsys.readouterr().err
    )
    assert main(["train", *unsized, "--load", run, "--num-attention-heads", "5"]) == 2
    assert (
        f"--hidden-size 32 of {run} is not a multiple of --num-attention-heads 5"
        in capsys.readouterr().err
    )


def test_the_length_that_a_loaded_model_reads_is_named(tmp_path, capsys):
    """An exported model states its positions, but not the length of its samples."""
    llama = "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --eval-iters=0"
    train(
        tmp_path,
        *llama.split(),
        "--train-iters=1",
        "--tokenizer-type=NullTokenizer",
        "--vocab-size=63",
    )
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "hf"), "--to=huggingface"]) == 0
    words = [f for f in SMALL_FLAGS if f[2:5] not in ("num", "hid", "seq", "max")]
    assert main(["train", *words, "--load", str(tmp_path / "hf"), "--finetune"]) == 2
    assert (
        "--seq-length is needed: tokens of one sample; the model reads up to 16"
        in capsys.readouterr().err
    )


def test_config_toml_from_another_folder_says_where_to_run(tmp_path, capsys, monkeypatch):
    (tmp_path / "start").mkdir()
    (tmp_path / "other").mkdir()
    write_counting(tmp_path / "start" / "x", [30] * 9)
    monkeypatch.chdir(tmp_path / "start")
    flags = [f for f in SMALL_FLAGS if f not in ("--mock-data", "--vocab-size=64")]
    flags += "--data-path=x --tokenizer-type=NullTokenizer --vocab-size=270 --eval-iters=0".split()
    assert main(["train", *flags, "--save", "run", "--load", "run", "--exit-interval=1"]) == 0
    monkeypatch.chdir(tmp_path / "other")
    for more in ([], ["--dry-run"]):
        assert main(["train", "--config", "../start/run/config.toml", *more]) == 65
        err = capsys.readouterr().err
        assert (
            "relative paths in ../start/run/config.toml count from the folder where the run was started"
            in err
        )
        assert f"; run it there: cd {tmp_path}/start" in err


def test_config_toml_of_a_run_that_was_moved(tmp_path, capsys, monkeypatch):
    """It neither begins a new run where the old one was, nor goes on with what was copied."""
    monkeypatch.chdir(tmp_path)
    flags = [*SMALL_FLAGS, "--save=run", "--load=run", "--eval-iters=0", "--train-iters=2"]
    assert main(["train", *flags, "--exit-interval=1"]) == 0
    shutil.copytree("run", "copy")
    Path("other").mkdir()
    shutil.copytree("run", "other/run")
    for folder, more in (
        ("copy", ""),
        ("other/run", f", or start it where its relative paths begin: cd {tmp_path}/other"),
    ):
        words = ["train", "--config", f"{folder}/config.toml"]
        for dry in ([], ["--dry-run"]):
            assert main([*words, *dry]) == 2
        said = f"--save run, but its run is in {folder} and would not be continued; "
        assert f"{said}add --save {folder} --load {folder}{more}\n" in capsys.readouterr().err
        assert main([*words, "--save", folder, "--load", folder]) == 0
        assert Path(folder, "latest_checkpointed_iteration.txt").read_text() == "2"
    # A link is the folder, and settings alone are nobody's run.
    Path("link").symlink_to("run")
    Path("settings").mkdir()
    shutil.copy("run/config.toml", "settings")
    assert main(["train", "--config", "settings/config.toml"]) == 0
    assert main(["train", "--config", "link/config.toml"]) == 0
    assert Path("run", "latest_checkpointed_iteration.txt").read_text() == "2"


def test_a_finetuning_lists_what_a_new_run_changes_in_one_line():
    """What changes the function that the weights were trained for has a line of its own."""
    from meshwright.training.state.resume import differences, saved_settings

    given = [*SMALL_FLAGS, "--position-embedding-type=rope", "--load=a", "--save=b"]
    changes = "--rotary-base=500000 --train-iters=9 --clip-grad=0.5 --seed=7".split()
    saved = saved_settings(parse_settings(TrainConfig, given, "train").config)
    tuned = parse_settings(TrainConfig, [*given, "--finetune", *changes], "train").config
    assert differences(tuned, saved) == [
        " > note: rotary_base is 500000.0, the checkpoint was trained with 10000.0",
        " > note: with --finetune, these settings are not the checkpoint's: train_iters, seed, clip_grad",
    ]
    resumed = parse_settings(TrainConfig, [*given, *changes[1:]], "train").config
    assert [line.split()[2] for line in differences(resumed, saved)] == [
        "train_iters",
        "seed",
        "clip_grad",
    ]


def test_a_batch_that_follows_the_ranks_is_said_and_kept(tmp_path, capsys):
    """A resumed run has the checkpoint's batch, or another one that is named."""
    follows = ["--global-batch-size=none", "--eval-iters=0"]
    train(tmp_path, *follows, "--micro-batch-size=4", "--exit-interval=3")
    run = ["--load", str(tmp_path / "run"), "--save", str(tmp_path / "run")]
    run += ["--micro-batch-size=2"]
    for more in ([], ["--dry-run"]):
        assert start(*follows, *run, *more) == 2
        assert (
            "the checkpoint's global batch was 4, and without --global-batch-size it would be 2 now "
            "(--micro-batch-size 2 on one data-parallel rank); add --global-batch-size 4 to continue"
            in capsys.readouterr().err
        )
    assert start(*follows, *run, "--global-batch-size=4") == 0
    config = TrainConfig(
        training=Training(micro_batch_size=2, train_iters=1), parallel=Parallel(world_size=3)
    )
    capsys.readouterr()
    print_settings(TrainingRun(config, NO_VOCABULARY), "gloo")
    assert (
        "a step has 6 samples, 2 from each of 3 data-parallel ranks; --global-batch-size"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("ranks", "before", "words"),
    [
        (
            2,
            8,
            "would be 16 now (--micro-batch-size 8 x 2 data-parallel ranks); add --global-batch-size 8 --micro-bat",
        ),
        (
            2,
            8,
            "--micro-batch-size 4 to continue with the same batch, which keeps the losses, or add --global-batch-",
        ),
        (1, 16, "add --global-batch-size 16 to continue"),
        (2, 24, "add --global-batch-size 24 --micro-batch-size 6 to continue"),
        (
            3,
            8,
            "take a number of data-parallel ranks that divides 8 to keep the batch and the losses",
        ),
    ],
)
def test_more_ranks_keep_the_losses_by_a_smaller_micro_batch(ranks, before, words):
    config = TrainConfig(
        training=Training(micro_batch_size=8, train_iters=1), parallel=Parallel(world_size=ranks)
    )
    with pytest.raises(UserError, match=re.escape(words)):
        require_chosen_batch(config, before)


def test_printed_config_runs_again(tmp_path, capsys, finished):
    finished(tmp_path / "run")
    shown = tmp_path / "shown.toml"
    capsys.readouterr()
    assert start("--print-config") == 0
    shown.write_text(capsys.readouterr().out)
    assert main(["train", "--config", str(shown), "--save", str(tmp_path / "again")]) == 0
    assert read_losses(tmp_path / "again") == [r["loss"] for r in read_rows(tmp_path / "run")]


@pytest.mark.parametrize(
    ("number", "want"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGUSR1, 138)]
)
@pytest.mark.fault("F16")
def test_signal_finishes_the_step_and_saves(tmp_path, capfd, monkeypatch, number, want):
    real, calls = meshwright.training.loop.train_step, []

    def interrupted(*args):
        calls.append(1)
        if len(calls) == 4:
            os.kill(os.getpid(), number)
        return real(*args)

    monkeypatch.setattr(meshwright.training.loop, "train_step", interrupted)
    status, steps = train(tmp_path, "--train-iters", "100")
    captured = capfd.readouterr()
    assert status == want and f"exiting program after receiving {number.name}." in captured.out
    again = "" if number == signal.SIGUSR1 else "; send it again to stop at once"
    assert captured.err == f"{number.name}: finishing this step and saving{again}\n"
    assert (
        len(steps) == 4
        and (tmp_path / "run" / "latest_checkpointed_iteration.txt").read_text() == "4"
    )


@pytest.mark.whole
def test_dry_run_writes_nothing_and_needs_no_torch(tmp_path):
    code = (
        "import sys; from meshwright.__main__ import main; s = main(sys.argv[1:]); "
        "assert 'torch' not in sys.modules; sys.exit(s)"
    )
    start = time.perf_counter()
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            code,
            "train",
            "--dry-run",
            "--preset",
            "gpt3-175b",
            "--save",
            str(tmp_path / "x"),
        ],
        capture_output=True,
        text=True,
    )
    print(f"dry run: {time.perf_counter() - start:.2f} s")
    assert done.returncode == 2, done.stderr  # no machine's memory holds it
    assert (
        "174,6" in done.stdout
        and "--data-path is needed" in done.stdout
        and not (tmp_path / "x").exists()
    )


@pytest.mark.flag("deterministic_mode")
def test_deterministic_mode_is_set(tmp_path):
    try:
        status, _ = train(tmp_path, "--deterministic-mode")
        assert status == 0 and torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_overwriting_waits_until_the_run_can_begin(tmp_path, finished):
    finished(tmp_path / "run")
    assert train(tmp_path, "--save-overwrite", "--vocab-file", tmp_path / "none.json")[0] != 0
    assert (tmp_path / "run/iter_0000006").is_dir()


def test_a_constant_scale_that_always_overflows_stops(tmp_path, capsys):
    status, steps = train(tmp_path, "--fp16", "--loss-scale", "1e38", "--train-iters", "30")
    assert status == 70 and len(steps) == 20 and "1e+38" in capsys.readouterr().err


def test_another_vocabulary_of_the_same_size_is_refused(tmp_path, capsys):
    from meshwright.data.tokenizers import train_bpe

    for name, text in (("a", "some words to learn from"), ("b", "quite other letters, zz")):
        train_bpe([text * 50], 262, tmp_path / name)
    size = "--vocab-size=262"
    files = [
        [f"--vocab-file={tmp_path}/{n}/vocab.json", f"--merge-file={tmp_path}/{n}/merges.txt", size]
        for n in "ab"
    ]
    assert train(tmp_path, *files[0])[0] == 0
    kept = (tmp_path / "run/tokenizer/merges.txt").read_bytes()
    more = ["--load", str(tmp_path / "run"), "--train-iters", "8", "--lr-decay-iters", "6"]
    assert (
        train(tmp_path, *files[1], *more)[0] == 65 and "vocabulary files" in capsys.readouterr().err
    )
    assert (tmp_path / "run/tokenizer/merges.txt").read_bytes() == kept
    assert train(tmp_path, *files[0], *more)[0] == 0


@pytest.mark.whole
def test_an_unread_result_is_no_failure_but_lost_work_is(tmp_path):
    shell = f"{warm.python()} -m meshwright"
    bash = functools.partial(
        subprocess.run, executable="/bin/bash", shell=True, capture_output=True, text=True
    )
    assert bash(f"{shell} --help | true; echo ${{PIPESTATUS[0]}}").stdout == "0\n"
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\n')
    work = f"cd {tmp_path}; {shell} preprocess --input x.jsonl --output-prefix x --tokenizer-type ByteTokenizer"
    done = bash(f"{work} | (exec <&-; sleep 2); echo ${{PIPESTATUS[0]}}")
    assert (
        done.stdout == "0\n"
        if (tmp_path / "x_text_document.idx").exists()
        else done.stdout == "74\n"
    )


@pytest.mark.parametrize("damage", [{"data_sets": [[]]}, {"data_fingerprint": 5}])
def test_settings_of_data_that_no_run_states_are_refused(damage):
    from meshwright.training.state.resume import files_by_path

    good = {"data_sets": [["train", [["x", None, 0.0, 1.0]]]], "data_fingerprint": ["f", "g"]}
    assert TOO_OLD in error_of(lambda: files_by_path(good), BAD_DATA)
    good["data_contents"] = ["c", "d"]
    assert files_by_path(good) == {"x": ("f", "c")}
    assert "does not state its data" in error_of(lambda: files_by_path(good | damage))


@pytest.mark.fault("F26")
@pytest.mark.flag("data_changed")
def test_changed_data_is_refused_on_resume(tmp_path, capsys):
    import numpy as np

    from meshwright.data.files.writer import Writer

    def write(lengths, tokens, name="data"):
        sizes = np.random.RandomState(lengths).randint(30, 50, 30)
        rng = np.random.RandomState(tokens)
        with Writer(tmp_path / name, np.uint16) as writer:
            for size in sizes:
                writer.add(rng.randint(0, 64, size))
                writer.end_document()

    write(1, 1)
    flags = [f for f in SMALL_FLAGS if f != "--mock-data"] + ["--data-path", str(tmp_path / "data")]
    flags += [
        "--save",
        str(tmp_path / "run"),
        "--load",
        str(tmp_path / "run"),
        "--lr-decay-iters",
        "6",
    ]
    assert main(["train", *flags]) == main(["train", *flags, "--train-iters", "7"]) == 0
    assert "have changed" not in capsys.readouterr().out
    again = ["train", *flags, "--train-iters", "8"]
    write(1, 2)  # the same lengths
    assert main(again) == main([*again, "--dry-run"]) == 65
    assert (
        "data.bin has as many tokens as" in (error := capsys.readouterr().err)
        and "--data-changed ok" in error
    )
    write(1, 2, "moved")  # another path, so that the blend is compared by its files
    assert main([*again, "--data-path", str(tmp_path / "moved")]) == 65
    assert re.search(r"moved\.bin has as many tokens as .*/data\.bin had", capsys.readouterr().err)
    write(1, 1, "moved")
    assert main([*again, "--data-path", str(tmp_path / "moved")]) == 0
    write(2, 1, "moved")
    longer = [*again, "--data-path", str(tmp_path / "moved"), "--train-iters", "9"]
    assert (
        main(longer) == 65
        and "moved.idx has other documents than before" in capsys.readouterr().err
    )
    assert main([*longer, "--data-changed", "ok"]) == 0
    assert "have changed since the checkpoint: " in capsys.readouterr().out
    assert (
        json.loads((tmp_path / "run/iter_0000009/config.json").read_text())["data_changed"] == "ok"
    )
    assert 'data_changed = "refuse"' in (tmp_path / "run/config.toml").read_text()


@pytest.mark.fault("F6")
def test_full_disk_keeps_the_last_checkpoint(tmp_path, capsys, monkeypatch):
    from meshwright.checkpoint import publish, steps

    def full(fd, data, at):
        raise OSError(errno.ENOSPC, "No space left on device")

    def save(*args, **more):
        if (tmp_path / "run/iter_0000003").exists():
            monkeypatch.setattr(publish.os, "pwrite", full)
        return real(*args, **more)

    real = meshwright.checkpoint.native.save_step
    monkeypatch.setattr(meshwright.checkpoint.native, "save_step", save)
    status, _ = train(tmp_path, "--save-interval", "3")
    monkeypatch.undo()
    err = capsys.readouterr().err
    assert status == 74 and "No space left" in err
    assert steps.latest(tmp_path / "run")[0] == 3


def test_overwriting_the_continued_folder_is_refused(tmp_path, capsys, finished):
    """The checkpoint that it continues from is not moved, however the folder is spelt."""
    finished(tmp_path / "run")
    status, _ = train(tmp_path, "--load", f"{tmp_path}/./run", "--save-overwrite")
    assert status == 2 and "the same folder" in capsys.readouterr().err
    assert (tmp_path / "run/iter_0000006").is_dir()


@pytest.mark.parametrize(
    "more", [[], ["--untie-embeddings-and-output-weights", "--swiglu", "--embed-layernorm"]]
)
def test_parameters_of_each_pipeline_rank_are_those_it_builds(more):
    """The ends of the model have more parameters; tensor ranks share those that the table cuts."""
    from meshwright.model.gpt import GPT, Options
    from meshwright.parallel.layout import Layout
    from meshwright.parallel.pipeline import stages
    from meshwright.parallel.shard import rule
    from meshwright.training.parameters import parameters_of_ranks

    argv = (
        "--world-size=4 --tensor-model-parallel-size=2 --pipeline-model-parallel-size=2 "
        "--num-layers=5"
    ).split()
    argv += [
        "--num-query-groups=2",
        "--group-query-attention",
        "--qk-layernorm",
    ]
    c = parse_settings(TrainConfig, [*SMALL_FLAGS, *argv, *more], "train", check=False).config
    counted = []
    for rank in range(2):
        layout = Layout(2, 1, 1, 1, 1, rank)
        with torch.device("meta"):
            parts = stages(lambda: GPT(c.model, 64, 128, 16, options=Options()), c.stages, layout)
        own = dict(named for part in parts for named in part.named_parameters())
        counted.append(
            sum(p.numel() // (2 if rule(n).cut is not None else 1) for n, p in own.items())
        )
    assert parameters_of_ranks(c, 128) == counted and counted[0] != counted[1]


def test_dry_run_prints_sizes(tmp_path, capsys):
    assert main(["train", *TINY_FLAGS, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert (
        "2 micro-batches\n" in out
        and "optimizer: 0.5 MiB, activations" in out
        and "data: random ids" in out
    )
    more = ["--world-size=8", "--tensor-model-parallel-size=2", "--pipeline-model-parallel-size=2"]
    assert main(["train", *TINY_FLAGS, *more, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert (
        "1 micro-batch\n" in out
        and "8 ranks = 2 data x 2 tensor x 2 pipeline; layers of each stage: 1 1" in out
    )
    assert (
        "parameters on pipeline rank 0, the largest" in out
        and "MiB on pipeline rank 0, activations apart" in out
    )


def test_dry_run_says_what_does_not_fit_the_device(monkeypatch, capsys):
    flags = [*SMALL_FLAGS, "--dry-run"]
    for have, words in ((2**30, False), (2**10, True)):
        monkeypatch.setattr("meshwright.base.host.physical_memory", lambda have=have: have)
        assert main(["train", *flags]) == (2 if words else 0)
        assert (
            "it does not fit this device (0.0 GiB), where the run" in capsys.readouterr().out
        ) is words
    monkeypatch.setattr(device, "ask_nvidia_smi", lambda *words: "24064\n24064\n")
    assert (
        main(["train", "--preset=gpt3-175b", "--mock-data", "--vocab-size=50257", "--dry-run"]) == 2
    )
    assert "does not fit this device (23.5 GiB)" in capsys.readouterr().out


def test_dry_run_refuses_the_vocabulary_that_training_refuses(tmp_path, capsys):
    from meshwright.data.files.writer import Writer

    with Writer(tmp_path / "x", "uint16") as writer:
        writer.add(list(range(200)))
        writer.end_document()
    flags = [f for f in SMALL_FLAGS if f not in ("--mock-data", "--vocab-size=64")]
    flags += [
        "--data-path",
        str(tmp_path / "x"),
        "--tokenizer-type=NullTokenizer",
        "--vocab-size=63",
    ]
    for more in (["--dry-run"], []):
        assert main(["train", *flags, *more]) == 65
        assert (
            "x.bin has id 64 in document 0, but the tokenizer's ids are 0 ... 63"
            in capsys.readouterr().err
        )


@pytest.mark.parametrize("what", ["--dry-run", "--print-config"])
def test_rank_0_alone_prints(monkeypatch, capsys, what):
    for name, value in (
        ("WORLD_SIZE", "2"),
        ("MASTER_ADDR", "localhost"),
        ("MASTER_PORT", "29999"),
    ):
        monkeypatch.setenv(name, value)
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        assert main(["train", *TINY_FLAGS, what]) == 0
        assert bool(capsys.readouterr().out) == (rank == "0")


def test_incomplete_settings_are_printed_and_then_refused(capsys):
    assert main(["train", "--preset", "gpt2-345m", "--print-config"]) == 2
    shown = capsys.readouterr()
    assert (
        "num_layers = 24  # preset gpt2-345m" in shown.out and "--data-path is needed" in shown.err
    )
    assert main(["train", "--preset", "gpt2-345m", "--print-config", "--nonsense"]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and "--nonsense" in shown.err and "--data-path is needed" in shown.err


CPU = (
    "[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory: you "
)
CPU_TRIED = "tried to allocate 4398046511104 bytes"
GPU_TRIED = (
    "Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 4.00 GiB of which 1.00 GiB is free"
)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            RuntimeError(f"{CPU}{CPU_TRIED}. Error code 12 (Cannot allocate memory)"),
            f"out of memory: {CPU_TRIED}: ",
        ),
        (
            torch.OutOfMemoryError(
                f"CUDA out of memory. {GPU_TRIED}. Including non-PyTorch memory"
            ),
            f"{GPU_TRIED}: ",
        ),
        (MemoryError(), "out of memory: a smaller "),
        (
            RuntimeError("can't start new thread"),
            "out of memory: can't start new thread: a smaller ",
        ),
    ],
)
def test_running_out_of_memory_is_explained(monkeypatch, capsys, error, message):
    def fail(*args):
        raise error

    monkeypatch.setattr(meshwright.training.loop, "train_step", fail)
    assert start() == 2
    shown = capsys.readouterr().err
    assert message in shown and "Including" not in shown and "Error code" not in shown
    assert (
        "smaller --micro-batch-size (now 4) or --seq-length (now 16), or --recompute-granularity full needs"
        in shown
    )
    monkeypatch.setattr(meshwright.training.loop, "train_step", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        start()


@pytest.mark.parametrize(
    "error", [MemoryError(), torch.OutOfMemoryError(f"CUDA out of memory. {GPU_TRIED}")]
)
def test_memory_that_is_not_the_trainings_has_other_advice(monkeypatch, capsys, error):
    """A smaller micro-batch would not help a file that is read."""

    def fail(*args):
        raise error

    monkeypatch.setattr(meshwright.training.setup, "open_log", fail)
    assert start() == 2
    shown = capsys.readouterr().err
    assert "out of memory on this machine: " in shown and "--micro-batch-size" not in shown
    damaged = UserError("the file is damaged")
    damaged.__context__ = MemoryError()
    assert out_of_memory(damaged, "less") is None


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (
            errno.ENOSPC,
            "standard output: No space left on device; the run continues; its log is in its folder only",
        ),
        (errno.EPIPE, "the reader of the log is gone; the run continues"),
    ],
)
def test_a_full_disk_or_no_reader_of_the_log_ends_no_run(monkeypatch, capsys, number, words):
    class Full(io.StringIO):
        def write(self, text):
            raise OSError(number, os.strerror(number))

    opened = io.StringIO()
    null = SimpleNamespace(
        open=lambda *a: 0, devnull="", O_WRONLY=0, dup2=lambda *a: setattr(sys, "stdout", opened)
    )
    monkeypatch.setattr(console, "os", null)
    monkeypatch.setattr(sys, "stdout", Full())
    console.say("one")
    console.say("two")
    assert capsys.readouterr().err == f"{words}\n"
    assert opened.getvalue() == "two\n"


def test_letters_that_the_encoding_does_not_have(monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    console.say("größe")
    assert out.buffer.getvalue() == b"gr\\xf6\\xdfe\n"


def test_a_wrong_world_size_is_refused_before_the_batch_is_divided(monkeypatch):
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="--world-size 3, but started as 2"):
        meshwright.cli.train.main([*SMALL_FLAGS, "--global-batch-size=4", "--world-size", "3"])


def test_a_load_that_holds_nothing_is_refused(tmp_path, capsys):
    """Issue 13, line 3; the same folder as --save starts anew."""
    for load in ("nope", "empty"):
        (tmp_path / "empty").mkdir(exist_ok=True)
        status, _ = train(tmp_path, "--load", tmp_path / load, save="new")
        out, err = capsys.readouterr()
        assert (
            status == 65
            and f"--load {tmp_path / load}" in err
            and "leave --load out" in err
            and not out
        )
        assert start("--load", tmp_path / load, "--dry-run") == 65
    assert not (tmp_path / "new").exists()
    config = parse_settings(
        TrainConfig, [*SMALL_FLAGS, "--load", str(tmp_path / "nope")], "meshwright train"
    ).config
    with pytest.raises(UserError, match="no such folder"):  # from Python
        meshwright.train(config)
    assert train(tmp_path, "--load", f"{tmp_path}/./new", save="new")[0] == 0


def test_steps_at_rate_0_are_announced(tmp_path, capsys, finished):
    """Before the first step and in a dry run, also for the rest of a resumed run."""
    finished(tmp_path / "run")
    assert "WARNING" not in capsys.readouterr().err
    more = ["--load", str(tmp_path / "run"), "--train-iters", "8", "--lr-decay-iters", "6"]
    assert train(tmp_path, *more, "--dry-run")[0] == 0
    assert "WARNING: all 2 steps would run at learning rate 0" in capsys.readouterr().out
    status, steps = train(tmp_path, *more)
    assert "WARNING: all 2 steps would run at learning rate 0" in capsys.readouterr().err
    assert status == 0 and [row["lr"] for row in steps[6:]] == [0, 0]
    more = [
        "--load",
        str(tmp_path / "run"),
        "--train-iters",
        "12",
        "--override-opt_param-scheduler",
    ]
    status, steps = train(tmp_path, *more)
    assert (
        status == 0
        and min(row["lr"] for row in steps[8:]) > 0
        and "WARNING" not in capsys.readouterr().err
    )
    assert start("--lr-warmup-iters", "9", "--lr-decay-iters", "20", "--dry-run") == 0
    assert "WARNING: the run ends within its warm-up" in capsys.readouterr().out


@pytest.mark.flag("save_overwrite")
def test_the_curves_of_another_run_are_not_hidden(tmp_path, capsys):
    """Issue 13, line 4."""
    plain, other = str(tmp_path / "plain"), str(tmp_path / "other")
    again = ["train", *SMALL_FLAGS, "--run-dir", plain]
    assert main(again) == 0
    before = {path.name: path.read_bytes() for path in Path(plain).glob("[!.]*") if path.is_file()}
    for argv in (
        again,
        [*again, "--dry-run"],
        [*again, "--save", other, "--load", other],
        [*SMALL_FLAGS],
    ):
        argv = argv if argv[0] == "train" else ["train", *argv, "--save", plain]
        capsys.readouterr()
        assert main(argv) == 73
        assert "another folder, or --save-overwrite" in capsys.readouterr().err
    assert before == {
        path.name: path.read_bytes() for path in Path(plain).glob("[!.]*") if path.is_file()
    }
    assert main([*again, "--save-overwrite", "--train-iters", "4"]) == 0
    assert (
        len(read_rows(tmp_path / "plain")) == 4
        and len(read_rows(tmp_path / "plain" / "replaced-1")) == 6
    )
    assert (tmp_path / "plain" / "replaced-1" / "config.toml").read_bytes() == before["config.toml"]


def test_a_run_goes_on_beside_its_checkpoints(tmp_path):
    """With --save elsewhere, the run folder belongs to the run that saved there."""
    run = [
        "train",
        *SMALL_FLAGS,
        "--run-dir",
        str(tmp_path / "run"),
        "--save",
        str(tmp_path / "save"),
    ]
    assert main([*run, "--exit-interval", "2"]) == 0
    assert main([*run, "--load", str(tmp_path / "save")]) == 0
    assert len(read_rows(tmp_path / "run")) == 6 and len(read_rows(tmp_path / "run", "start")) == 2
    branch = [*run[:-1], str(tmp_path / "new"), "--load", str(tmp_path / "save" / "iter_0000002")]
    assert main([*branch, "--finetune"]) == 73
    assert main(branch) == 0 and len(read_rows(tmp_path / "run", "start")) == 3


def test_the_same_wrong_folder_is_reported_alike(tmp_path, capsys):
    """generate, evaluate, inspect, convert and report: the same words, the same status."""
    (tmp_path / "file").write_text("text")
    (tmp_path / "empty").mkdir()
    for name, words in (
        ("none", "there is no folder"),
        ("file", "is a file"),
        ("empty", "holds no"),
    ):
        folder, said = str(tmp_path / name), set()
        for command in (
            "generate --prompt a",
            f"evaluate --input {tmp_path}/file",
            "inspect",
            "report",
        ):
            first, *more = command.split()
            assert main([first, folder, *more]) == 65
            said.add(
                capsys.readouterr()
                .err.partition("error: ")[2]
                .split(";")[0]
                .split(",")[0]
                .split(" no ")[0]
            )
        assert main(["convert", folder, str(tmp_path / "new"), "--to", "huggingface"]) == 65
        assert len(said) == 1 and words in capsys.readouterr().err


def test_a_folder_that_holds_a_run_or_a_tokenizer_is_recognised(tmp_path, capsys):
    """quickstart's folder has the run in it; the same words from every command."""
    for name in ("tour/run/config.toml", "vocabulary/tokenizer.json"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    words = {
        "tour": f"; did you mean {tmp_path}/tour/run?",
        "vocabulary": "; it is a tokenizer, not a model",
    }
    for folder, hint in words.items():
        commands = [
            "generate --prompt a",
            "chat",
            "inspect",
            "report",
            f"train {' '.join(SMALL_FLAGS)} --load",
        ]
        for command in commands:
            first, *more = command.split()
            argv = (
                [first, *more, str(tmp_path / folder)]
                if first == "train"
                else [first, str(tmp_path / folder), *more]
            )
            assert main(argv) == 65
            assert hint in capsys.readouterr().err, command


@pytest.mark.fault("F7")
def test_an_error_of_the_disk_names_its_file(tmp_path, capsys, monkeypatch):
    """Issue 13, line 7: metrics.jsonl, config.toml and the page."""
    real = os.write
    full = OSError(errno.ENOSPC, "No space left on device")

    def write(fd, data):
        if b'"event"' in bytes(data):
            raise full
        return real(fd, data)

    monkeypatch.setattr(os, "write", write)
    assert start("--run-dir", tmp_path / "a") == 74
    said = f"{tmp_path / 'a' / 'metrics.jsonl'}: No space left on device; free space there, or choose another folder"
    assert said in capsys.readouterr().err
    with pytest.raises(OSError, match="page.html"), replacing(tmp_path / "page.html"):
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(FileNotFoundError) as caught, replacing(tmp_path / "none" / "page.html"):
        pass
    assert caught.value.filename == str(tmp_path / "none" / "page.html")


def test_the_name_of_a_token_file_stands_for_the_pair(tmp_path):
    assert [TokenFiles(f"a/b{end}").prefix for end in ("", ".bin", ".idx", ".txt")] == [
        "a/b",
        "a/b",
        "a/b",
        "a/b.txt",
    ]
    write_counting(tmp_path / "a.bin", [9])  # a prefix that ends so is kept
    assert TokenFiles(str(tmp_path / "a.bin")).prefix == str(tmp_path / "a.bin")
    data = parse_settings(
        TrainConfig,
        [*SMALL_FLAGS, "--data-path", "0.5", "b.bin", "0.5", "c.idx"],
        "meshwright train",
    ).config.data
    assert data.data_path == ["0.5", "b", "0.5", "c"]


@pytest.mark.fault("F26")
@pytest.mark.parametrize("ending", [".idx", ".bin"])
def test_a_token_file_cut_short_under_a_run(tmp_path, capsys, monkeypatch, ending):
    """The file is named; without the check the process is killed by SIGBUS, or reads zeros."""
    write_counting(tmp_path / "data", [40] * 20)
    step = meshwright.training.loop.Trainer.step

    def cut_and_step(self):
        if self.state.progress.iteration == 3:
            os.truncate(tmp_path / f"data{ending}", 100)
        return step(self)

    monkeypatch.setattr(meshwright.training.loop.Trainer, "step", cut_and_step)
    flags = [
        f for f in SMALL_FLAGS if f != "--mock-data"
    ] + "--vocab-size 800 --save-interval 2".split()
    assert (
        main(
            [
                "train",
                *flags,
                "--data-path",
                str(tmp_path / "data"),
                "--save",
                str(tmp_path / "run"),
            ]
        )
        == 74
    )
    assert (
        f"data{ending} was cut short while it was in use: 100 bytes are left"
        in capsys.readouterr().err
    )
    assert (tmp_path / "run/iter_0000002").is_dir()
