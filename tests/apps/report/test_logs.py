"""Logs of benchmarks become a table and a picture, whatever system wrote them and however cut."""

import csv
import io
import json
import runpy

import pytest

from documents import ROOT
from meshwright.__main__ import main
from meshwright.apps.report import logs
from meshwright.apps.report.logs import LogLine, after_warm_up, read_log, row_of

NAME = "nl24_nah16_hs1024_FP16_actrue_mp2_pp4_mb32_gb512_2n8g"
SMI = """timestamp, name, driver_version, memory.total [MiB], memory.free [MiB], memory.used [MiB]
2026/11/22 15:00:00.123, NVIDIA H200, 580.159, 143771 MiB, 110000 MiB, 33771 MiB
2026/11/22 15:00:00.124, NVIDIA H200, 580.159, 143771 MiB, 109000 MiB, 34771 MiB
"""
# What Megatron-DeepSpeed writes, without and with its own additions.
DEEPSPEED = """  num_layers ...................................... 24
 iteration      100/     220 | consumed samples:        51200 | elapsed time per iteration (ms): 2000.0 | learning \
rate: 1.500E-04 | global batch size:   512 | lm loss: 7.900000E+00 | loss scale: 4096.0 | grad norm: 1.0 | \
number of skipped iterations:   0 | number of nan iterations:   0 | samples per second: 256.000 | TFLOPs: 40.00 |
 iteration      200/     220 | consumed samples:       102400 | elapsed time per iteration (ms): 1000.0 | learning \
rate: 1.500E-04 | global batch size:   512 | lm loss: 6.500000E+00 | samples per second: 512.000 | TFLOPs: 80.00 |
 validation loss at the end of training for val data | lm loss value: 6.4E+00 | lm loss PPL: 6.018450E+02 | 
 validation loss at the end of training for test data | lm loss value: 1.0E+00 | lm loss PPL: 2.000000E+00 | 
"""
MEGATRON_LM = """ [2024-05-01 10:00:00] iteration     10/      30 | consumed samples:          320 | elapsed time per \
iteration (ms): 500.0 | throughput per GPU (TFLOP/s/GPU): 100.0 | learning rate: 1.0E-04 | global batch size:    32 | \
lm loss: 9.0E+00 |
 [2024-05-01 10:00:05] iteration       20/      30 | consumed samples:          640 | elapsed time per iteration (ms): \
250.0 | throughput per GPU (TFLOP/s/GPU): 200.0 | learning rate: 1.0E-04 | global batch size:    32 | lm loss: 8.0E+00 |
[Rank 0] (after 20 iterations) memory (MB) | allocated: 1.5 | max allocated: 900.0 | reserved: 1 | max reserved: 1234.0
"""
LIBAI = """\x1b[32m[04/01 10:00:00 lb.utils.events]: \x1b[0m eta: 0:01:23  iteration: 99/220  consumed_samples: 51200  \
total_loss: 7.9  time: 1.20 s/iter  data_time: 0.01 s/iter total_throughput: 426.7 samples/s lr: 1.5e-04
 eta: 0:00:23  iteration: 199/220  consumed_samples: 102400  total_loss: nan  time: 1.00 s/iter  data_time: 0.01 \
s/iter total_throughput: 512.00 samples/s lr: 1.5e-04
"""
TABLE = """| step     | micro_batches   | samples         | throughput | latency    | loss       |
| -------- | --------------- | --------------- | ---------- | ---------- | ---------- |
| 100      | 200             | 800             | 12.34567   | 0.64800    | 7.12345    |
utilization.gpu [%], memory.used [MiB]
97 %, 31234 MiB
| 200      | 400             | 1600            | 13.50000   | 0.60000    | 6.50000    |
"""
NORMAL = "step=100,micro_batches=200,samples=800,throughput=12.5,latency=0.64,loss=7.12345,\n"
ENGINE = """[2026-11-22 15:00:00,000] [INFO] [logging.py:69:log_dist] [Rank 0] step=10, skipped=0, lr=[0.1], mom=[0.9]
steps: 10 loss: 8.1234 iter time (s): 0.500 samples/sec: 32.000
steps: 20 loss: 7.5 iter time (s): 0.250 samples/sec: 64.000
"""


@pytest.mark.parametrize(
    ("text", "want"),
    [
        (DEEPSPEED + SMI, ("megatron", 512.0, 34771.0, "nvidia-smi", 80.0, 6.5, 601.845, 200, 1)),
        (MEGATRON_LM, ("megatron", 128.0, 1234.0, "reserved", 200.0, 8.0, None, 20, 1)),
        (LIBAI, ("libai", 512.0, None, "", None, "nan", None, 199, 1)),
        (TABLE, ("oneflow", 13.5, 31234.0, "nvidia-smi", None, 6.5, None, 200, 1)),
        (NORMAL, ("oneflow", 12.5, None, "", None, 7.12345, None, 100, 1)),
        (ENGINE, ("deepspeed", 64.0, None, "", None, 7.5, None, 20, 1)),
        (ENGINE + DEEPSPEED, ("megatron", 512.0, None, "", 80.0, 6.5, 601.845, 200, 1)),
    ],
)
def test_systems(tmp_path, capsys, text, want):
    (tmp_path / f"x_{NAME}_20261122.log").write_text(text)
    assert main(["report", "--logs", "--table", "json", str(tmp_path)]) == 0
    (row,) = json.loads(capsys.readouterr().out)["runs"]
    names = "form samples_per_second memory_mib memory_from tflops loss ppl iteration lines".split()
    assert tuple(row[n] for n in names) == want
    assert row["config"] == "nl24_fp16_2x2x4_ac_mb32_gb512_2n8g"


def test_our_own_log(run, tmp_path, capsys):
    """Its arguments name what ran, not the names of its folders."""
    run("--log-interval", 1, "--checkpoint-activations")
    folder = tmp_path / "run0"
    assert main(["report", "--logs", str(folder), "--table", "json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["runs"]
    assert row["config"] == "nl2_fp32_1x1x1_ac_mb2_gb4_1g"
    assert (
        row["samples_per_second"] > 0
        and row["loss"] > 0
        and row["ppl"] > 1
        and row["tflops"] is not None
    )


@pytest.mark.parametrize("form", ["table", "libai", "deepspeed"])
def test_our_other_forms(run, tmp_path, form):
    flags = (
        ["--steps-per-print", 1, "--log-interval", 100]
        if form == "deepspeed"
        else ["--log-format", form]
    )
    got = run(*flags, "--num-layers", 1, "--eval-iters", 0, "--train-iters", 3)
    lines = got.out.splitlines()
    (tmp_path / "a.log").write_text(
        "\n".join(x for x in lines if not x.startswith(" iteration ")) + "\n"
    )
    row = row_of(read_log(tmp_path / "a.log", "a"))
    assert row.form == {"table": "oneflow", "normal": "oneflow"}.get(form, form)
    assert row.iteration == 3 - (form == "libai") and row.lines == 2 and row.samples_per_second > 0
    assert row.loss == pytest.approx(got.losses[-1], rel=1e-3)


def test_warm_up():
    """The first line after each start and the first tenth do not count, unless all are such."""
    lines = [LogLine(i) for i in (10, 20, 30, 200, 210, 30, 40, 220)]
    assert [x.iteration for x in after_warm_up(lines)] == [30, 200, 210, 40, 220]
    assert after_warm_up(lines[:1]) == lines[:1]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty"),
        (b"\n \n", "empty"),
        (bytes(range(256)) * 400, "not a text"),
        (
            b"Run cmd python3\nTraceback (most recent call last):\nOSError: no " + b"x" * 200,
            "OSError: no xxx",
        ),
        (DEEPSPEED[:300].encode(), "its last line: iteration      100/"),
    ],
)
def test_logs_without_steps_are_named(tmp_path, capsys, data, reason):
    (tmp_path / "bad.log").write_bytes(data)
    (tmp_path / "good.log").write_text(ENGINE)
    assert main(["report", "--logs", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert out.count("\n") == 2 and err.startswith(f"{tmp_path / 'bad.log'}: ") and reason in err
    assert err.count("\n") == 1 and len(err) < 300
    (tmp_path / "good.log").unlink()
    assert main(["report", "--logs", str(tmp_path)]) == 65
    assert "no log with a line of a step in" in capsys.readouterr().err


def test_odd_logs(tmp_path):
    """A last line that is cut, progress bars, a head of CSV without its rows, wrong numbers."""
    cut = DEEPSPEED.splitlines(keepends=True)[:3]
    file = tmp_path / "a.log"
    file.write_text("".join(cut)[:-56])
    assert file.read_text().endswith("lm loss: 6.500")
    row = row_of(read_log(file, "a"))
    assert (row.samples_per_second, row.loss, row.config) == (256.0, 7.9, "a")
    file.write_bytes(
        b"  5%|#  |\r 10%|## |\r" + ENGINE.encode() + b"memory.used [MiB]\nused 12 MiB\n"
    )
    row = row_of(read_log(file, "a"))
    assert row.iteration == 20 and row.memory_mib is None
    file.write_text(
        " iteration 1/ 2 | elapsed time per iteration (ms): 0.0 | global batch size: 1..2 |\n"
        + NORMAL
    )
    assert row_of(read_log(file, "a")).form == "oneflow"


def test_digits_that_are_no_numbers(tmp_path, capsys):
    """A superscript is a digit that int() does not read, in a row of a table or in a name."""
    table = "| \N{SUPERSCRIPT TWO} | 1 | 1 | 1 | 1 | 1 |\n" + DEEPSPEED
    path = tmp_path / "\N{SUPERSCRIPT TWO}.log"
    path.write_text(table, encoding="utf-8")
    assert main(["report", "--logs", str(path)]) == 0
    assert "\N{SUPERSCRIPT TWO}" in capsys.readouterr().out


def test_logs_of_other_machines(tmp_path, capsys):
    """They have only nvidia-smi's rows, which belong to the run of their name and order."""
    for date, text in {
        "20261122_100": ENGINE + SMI,
        "20261122_101": SMI.replace("34771 MiB", "50000 MiB"),
        "20261122_200": ENGINE + SMI,
        "20261122_201": SMI.replace("34771 MiB", "30000 MiB"),
    }.items():
        (tmp_path / f"x_{NAME}_{date}.log").write_text(text)
    assert main(["report", "--logs", str(tmp_path), "--table", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["memory_mib"] for row in found["runs"]] == [50000.0, 34771.0] and not found[
        "without_steps"
    ]
    (tmp_path / f"x_{NAME}_20261122_201.log").unlink()
    assert main(["report", "--logs", str(tmp_path), "--table", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["memory_mib"] for row in found["runs"]] == [34771.0, 34771.0] and len(
        found["without_steps"]
    ) == 1


def test_forms_of_the_table(tmp_path, capsys):
    for micro in (4, 32, 8):
        (tmp_path / f"x_{NAME.replace('mb32', f'mb{micro}')}").mkdir()
        (tmp_path / f"x_{NAME.replace('mb32', f'mb{micro}')}/output.log").write_text(LIBAI)
    (tmp_path / f"x_{NAME}/log.txt").write_text(LIBAI)  # the same run
    for name in ("notes.md", "merges.txt"):
        (tmp_path / name).write_text(ENGINE)
    configs = [f"nl24_fp16_2x2x4_ac_mb{n}_gb512_2n8g" for n in (4, 8, 32)]
    shown = {}
    for form in (*logs.TABLES, "json"):
        assert main(["report", "--logs", str(tmp_path), "--table", form]) == 0
        shown[form] = capsys.readouterr().out
    assert [line.split()[0] for line in shown["text"].splitlines()] == ["config", *configs]
    assert [row["config"] for row in csv.DictReader(io.StringIO(shown["csv"]))] == configs
    assert [line.split(" | ")[0] for line in shown["markdown"].splitlines()[2:]] == [
        f"| {c}" for c in configs
    ]
    assert [row["config"] for row in json.loads(shown["json"])["runs"]] == configs


@pytest.mark.parametrize("ending", ["svg", "png"])
def test_picture(tmp_path, capsys, monkeypatch, ending):
    monkeypatch.setattr(logs, "MOST_BARS", 2)
    for n, text in enumerate((DEEPSPEED + SMI, LIBAI, TABLE)):
        (tmp_path / f"{n}_{NAME}_$x$_{n}.log").write_text(text)
    target = tmp_path / f"table.{ending}"
    assert main(["report", "--logs", str(tmp_path), "--output", str(target)]) == 0
    assert "the first 2 of 3 logs" in capsys.readouterr().err
    data = target.read_bytes()
    assert (
        data.startswith(b"\x89PNG")
        if ending == "png"
        else b"samples per second" in data and b"34,771" in data
    )


def test_the_script(tmp_path, monkeypatch, capsys):
    """tools/extract_logs.py is the same command, by the link that a system's tools have too."""
    (tmp_path / "a.log").write_text(NORMAL)
    monkeypatch.setattr("sys.argv", ["extract_logs.py", str(tmp_path)])
    for folder in ("tools", "compat/megatron-deepspeed/tools"):
        with pytest.raises(SystemExit) as stopped:
            runpy.run_path(str(ROOT / folder / "extract_logs.py"), run_name="__main__")
        assert stopped.value.code == 0 and "12.50" in capsys.readouterr().out
