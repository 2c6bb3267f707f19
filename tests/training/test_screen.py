"""The short screen of a terminal, Megatron's log elsewhere, and the file of the log."""

import errno
import fcntl
import math
import multiprocessing
import os
import pty
import re
import struct
import sys
import termios

import pytest

import meshwright.training.run
from helpers import SMALL_FLAGS
from meshwright.__main__ import main
from meshwright.base import console
from meshwright.base.errors import UserError
from meshwright.config.schema import Logging
from meshwright.runtime.ranks.team import Team
from meshwright.training.log import lines, screen
from meshwright.training.log.timers import Startup


def _train_on(terminal, argv, environment):
    """The body of a process whose output is a terminal."""
    slave = os.open(terminal, os.O_RDWR)
    for fd in (1, 2):
        os.dup2(slave, fd)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    meshwright.training.run.write_report = lambda folder: None
    os.environ.pop("COLUMNS", None)
    os.environ.update({"TERM": "xterm-256color", **environment})
    os._exit(main(["train", *argv]))


def on_terminal(columns, *argv, **environment):
    """Train in a process on a terminal of so many columns; return its status and what it shows."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    arguments = (os.ttyname(slave), [*SMALL_FLAGS, *argv], environment)
    process = multiprocessing.get_context("forkserver").Process(target=_train_on, args=arguments)
    process.start()
    shown = b""
    while process.is_alive() or not shown:
        os.set_blocking(master, False)
        try:
            shown += os.read(master, 1 << 16)
        except BlockingIOError:
            process.join(0.02)
    process.join(60)
    with_rest = shown + (os.read(master, 1 << 20) if _has_more(master) else b"")
    os.close(slave)
    os.close(master)
    return process.exitcode, with_rest.decode()


def _has_more(fd):
    return bool(struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, b"\0\0\0\0"))[0])


def finished_lines(shown):
    """Return the lines that are on the terminal at the end, without their colours."""
    rows, y, x = [""], 0, 0
    for escape, text in re.findall(r"(\x1b\[[\d;?]*[A-Za-z]|\r|\n)|([^\x1b\r\n]+)", shown):
        if text:
            rows[y] = rows[y][:x].ljust(x) + text + rows[y][x + len(text) :]
            x += len(text)
        elif escape == "\r":
            x = 0
        elif escape == "\n":
            y += 1
            rows += [""] * (y == len(rows))
        elif escape.endswith("A"):
            y -= int(escape[2:-1])
        elif escape == "\x1b[2K":
            rows[y] = ""
    return [row.rstrip() for row in rows]


@pytest.mark.parametrize("columns", [200, 40])
def test_on_a_terminal_the_screen_is_short(tmp_path, columns):
    save = tmp_path / ("a-long-name-of-a-folder-" * 3)
    status, shown = on_terminal(columns, f"--save={save}", f"--load={save}")
    rows = finished_lines(shown)
    assert status == 0, shown
    # The path in a command stays whole, so that it can be copied.
    assert max(len(row) for row in rows if str(save) not in row) <= min(columns, 80)
    head = next(i for i, row in enumerate(rows) if row.split()[:2] == ["step", "loss"])
    title = next(i for i, row in enumerate(rows) if row.startswith("Meshwright "))
    assert head - title <= 12
    table = [row.split() for row in rows[head + 1 : rows.index("", head)]]
    assert [row[0] for row in table if row[0] != "saved"] == list("1233456666")
    assert sum("validation" in row for row in rows[head : rows.index("", head)]) == 3
    assert "  saved step 6" in rows and not any(
        "iteration" in row or "arguments" in row for row in rows
    )
    assert "\x1b[1m" in shown
    end = rows[rows.index("next:") :]
    assert any("inspect" in row for row in end) and any("report" in row for row in end)


def test_without_colours(tmp_path):
    status, shown = on_terminal(80, f"--run-dir={tmp_path}", "--no-progress", NO_COLOR="1")
    assert status == 0 and "\x1b" not in shown and "the model was not kept" in shown


def test_the_z_loss_has_a_column(tmp_path):
    _, shown = on_terminal(
        80, f"--run-dir={tmp_path}", "--no-progress", "--z-loss-coef=0.1", NO_COLOR="1"
    )
    rows = [line.split() for line in shown.splitlines()]
    head = next(i for i, row in enumerate(rows) if row[:4] == ["step", "loss", "z", "loss"])
    assert float(rows[head + 1][2]) == pytest.approx(0.1 * float(rows[head + 1][1]) ** 2, rel=0.02)


@pytest.mark.flag("log_format")
def test_megatrons_log_on_a_terminal(tmp_path):
    status, shown = on_terminal(
        80, f"--run-dir={tmp_path}", "--log-format=megatron", "--no-progress"
    )
    assert status == 0 and shown.replace("\r\n", "\n") == (tmp_path / "log.txt").read_text()


def test_oneflows_table_in_the_log(run, tmp_path):
    """Rows in place of the lines of steps, with one head; the rest and log.txt are Megatron's.

    OneFlow's name of --log-format is another name of ours.
    """
    flags = ["--metric-print-format=table", "--log-interval=2", "--save-interval=4"]
    shown = run(*flags, f"--save={tmp_path / 'checkpoints'}")
    rows = [line for line in shown.out.splitlines() if line.startswith("| ")]
    assert rows[:2] == [
        "| step     | micro_batches   | samples         | throughput | latency    | loss       |",
        "| -------- | --------------- | --------------- | ---------- | ---------- | ---------- |",
    ]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[2:]]
    assert [row[:3] for row in cells] == [["2", "2", "8"], ["4", "4", "16"], ["6", "6", "24"]]
    assert all(len(row) == len(rows[0]) for row in rows)
    means = [sum(shown.losses[n : n + 2]) / 2 for n in (0, 2, 4)]
    assert [row[5] for row in cells] == [f"{mean:.5f}" for mean in means]
    # samples of a step
    assert all(float(row[3]) * float(row[4]) == pytest.approx(4, rel=1e-2) for row in cells)
    lines = shown.out.splitlines()
    assert "Training..." in lines and "training ..." not in lines and "arguments ----" in shown.out
    for line in (
        " validation loss at iteration 3 |",
        "successfully saved checkpoint at iteration       4",
    ):
        assert line in shown.out
    log = (tmp_path / "run0" / "log.txt").read_text()
    assert (
        log.count(" iteration        ") == 3
        and "| step" not in log
        and " iteration        2/" not in shown.out
    )


def test_oneflows_normal_form(run):
    shown = run("--log-format=normal", "--log-interval=3")
    figures = r"throughput=\d+\.\d{5},latency=\d+\.\d{5},loss=\d\.\d{5},"
    lines = [line for line in shown.out.splitlines() if line.startswith("step=")]
    for line, counts in zip(
        lines, ("step=3,micro_batches=3,samples=12,", "step=6,micro_batches=6,"), strict=True
    ):
        assert line.startswith(counts) and re.search(figures + "$", line)


def test_libais_line(run):
    shown = run("--log-format=libai", "--log-interval=3")
    lines = [line for line in shown.out.splitlines() if line.startswith(" eta: 0:00:")]
    found = [
        re.search(r"  iteration: (\S+)  consumed_samples: (\d+)  total_loss: (\S+)  time: ", x)
        for x in lines
    ]
    means = [f"{sum(shown.losses[n : n + 3]) / 3:.4g}" for n in (0, 3)]
    assert [x.groups() for x in found] == [("2/6", "12", means[0]), ("5/6", "24", means[1])]
    assert all(re.search(r" lr: \d\.\d\de[-+]\d\d  $", line) for line in lines)
    words = lines[1].split(" ")  # an extractor of LiBai's users counts them
    at = words.index("time:")
    # samples of a step
    assert float(words[at + 1]) * float(words[at + 8]) == pytest.approx(4, rel=2e-2)
    assert 0 <= float(words[at + 5]) <= float(words[at + 1]) and words[at + 9] == "samples/s"


def test_the_log_is_kept_beside_what_is_printed(run, tmp_path):
    first = run(f"--save={tmp_path / 'run0'}")
    log = tmp_path / "run0" / "log.txt"
    assert first.out == log.read_text() and " iteration        6/       6 |" in first.out
    # A refused attempt leaves the log as it is, and the next one is added.
    again = run(f"--save={tmp_path / 'run0'}", f"--run-dir={tmp_path / 'run0'}")
    assert again.status == 73 and log.read_text() == first.out
    flags = [f"--{name}={tmp_path / 'run0'}" for name in ("save", "load", "run-dir")]
    more = run(*flags, "--train-iters=7", "--override-opt_param-scheduler")
    assert more.status == 0 and log.read_text() == first.out + more.out
    assert "log.txt" not in {p.name for p in (tmp_path / "run1").glob("*")}


def test_the_short_form_in_a_pipe_keeps_the_same_log(run, tmp_path):
    short = run("--log-format=short", "--skip-train-iteration-range", "2-3")
    log = (tmp_path / "run0" / "log.txt").read_text()
    assert "Skipped iterations 2 to 3" in log and "lm loss:" in log and "arguments" in log
    assert "  Skipped iterations 2 to 3 due to" in short.out
    assert "lm loss:" not in short.out and "\x1b" not in short.out
    # The path of a folder in a command is never cut.
    assert all(len(line) <= 80 or str(tmp_path) in line for line in short.out.splitlines())
    assert "log.txt" in short.out and "report.html" in short.out
    assert console._screen is None and console._log is None


@pytest.mark.parametrize("why", ["folder", "disk"])
def test_a_log_that_cannot_be_written_ends_no_run(run, tmp_path, monkeypatch, why):
    if why == "folder":
        (tmp_path / "run0" / "log.txt").mkdir(parents=True)
    else:
        write = os.write
        (tmp_path / "run0").mkdir()
        (tmp_path / "run0" / "log.txt").touch()

        def full(fd, data):
            if os.path.samestat(os.fstat(fd), os.stat(tmp_path / "run0" / "log.txt")):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(fd, data)

        monkeypatch.setattr(console.os, "write", full)
    got = run()
    reason = os.strerror(errno.EISDIR if why == "folder" else errno.ENOSPC)
    assert (
        got.status == 0
        and got.err == f"{tmp_path}/run0/log.txt: {reason}; the run continues without this file\n"
    )


def test_steps_that_were_skipped_and_a_validation_worse_than_the_best():
    values = {
        "loss": math.nan,
        "grad_norm": 1.0,
        "loss_scale": 4096.0,
        "batch": 8,
        "skipped": True,
        "data_ms": 10.0,
    }
    table = screen.LineScreen(has_status=False)
    run = lines.RunSizes(100, None, 16, 8, 1, 1e9 / 128, 2e9)
    step = lines.Interval(run, 50, 400, 0.1, [values] * 50, 50.0, None)
    head, row, note = table.step(step).splitlines()
    assert head.split() == "step loss gradient rate tokens/s MFU elapsed left".split()
    assert row.split()[:7] == "50 nan 1.000 1.00e-01 128 50.0% 0:00".split() and row.endswith(
        "0:50"
    )
    assert note == "  50 of these 50 steps were skipped: not finite, loss scale 4096"
    shown = [
        table.validation(lines.Check(i, "validation", loss))
        for i, loss in ((1, 3.0), (2, 2.5), (3, 2.75))
    ]
    assert ["the lowest so far" in line for line in shown] == [False, True, False]
    assert table.results() == [
        ("validation", "2.7500, perplexity 15.64; the lowest was 2.5000 at step 2")
    ]
    at_end = [
        lines.Check(4, "validation", loss, is_end) for loss, is_end in ((2.0, False), (2.25, True))
    ]
    shown = [table.validation(check) for check in at_end]
    assert (
        "the lowest so far" in shown[0]
        and "validation at the end, on other batches, perplexity 9.49" in shown[1]
    )
    assert table.results() == [("validation", "2.2500, perplexity 9.49; 2.0000 on other batches")]


def test_a_finished_run_that_is_started_again_claims_no_lowest_loss():
    table = screen.LineScreen(has_status=False)
    table.best = (4, 2.25)
    shown = table.validation(lines.Check(5, "validation", 2.0, True))
    assert "the lowest so far" not in shown and "validation at the end, on other batches" in shown


def test_the_end_of_a_run_that_stops_between_two_lines(run):
    stopped = run("--log-format=short", "--log-interval=4", "--exit-interval=5")
    assert "  stopped     after step 5 of 6 in 0:0" in stopped.out
    mean = sum(stopped.losses[-4:]) / 4
    assert f"  loss        {mean:.4f} in training, mean of the last 4 steps" in stopped.out


def test_the_line_of_the_set_up_says_what_is_being_done():
    class Status:
        texts = []

        def update(self, text):
            self.texts.append(text)

    table = screen.LineScreen(has_status=False)
    table.status = Status()
    console.set_stream("stdout", table)
    try:
        console.say("building GPT model ...")
        startup = Startup()
        with startup.time("train/valid/test-data-iterators-setup"):
            pass
        startup.print_times(
            Logging(timing_log_option="all"), Team(), "train/valid/test-data-iterators-setup"
        )
        console.say_time("after dataloaders are built")
        console.say_arguments({"adam_beta1": 0.9})
        console.say(" > building dataset index ...")
    finally:
        console.set_stream("stdout")
    assert Status.texts == ["building GPT model", "building dataset index"]


def test_long_texts():
    assert (
        screen.shorten("/a/very/long/path/of/a/run", 11) == "/a/ve…a/run"
        and screen.shorten("abc", 3) == "abc"
    )
    assert screen.broken(["meshwright", "train", "--config", "a b"], 14) == [
        "meshwright train \\",
        "  --config \\",
        "  'a b'",
    ]
    assert [screen.clock(s) for s in (0.4, 59.6, 3599, 3600, 86400 * 3 + 7200)] == [
        "0:00",
        "1:00",
        "59:59",
        "1:00:00",
        "3 d 2 h",
    ]


def test_a_first_start_warns_of_nothing(monkeypatch, capsys):
    """Megatron's line about a folder without a checkpoint is for its log: here nothing is wrong."""

    class Recording(console.Warnings):
        lines = []

        def follow(self, line):
            self.lines.append(line)

    for shown in (Recording(), console.Warnings()):
        console.set_stream("stdout", shown)
        console.remark(
            "WARNING: could not find the metadata file", on_screen="run holds no checkpoint yet"
        )
        console.remark("another remark")
        console.set_stream("stdout")
        assert capsys.readouterr().out == "run holds no checkpoint yet\nanother remark\n"
    assert Recording.lines == ["another remark"]


def test_an_early_error_leaves_no_screen_behind(monkeypatch):
    class Screen:
        closed = False

        def follow(self, line): ...

        def close(self):
            self.closed = True

    def differ(team, identity, problem):
        raise UserError("the ranks' settings differ")

    shown = Screen()
    monkeypatch.setattr(screen, "open_screen", lambda logging: shown)
    monkeypatch.setattr(meshwright.training.run, "require_equal_ranks", differ)
    assert main(["train", *SMALL_FLAGS]) == 2 and shown.closed and console._screen is None
