"""The benchmarks of Megatron-DeepSpeed and LiBai, on a CPU."""

from __future__ import annotations

import contextlib
import lzma
import os
import re
import shlex
import shutil
import time
from pathlib import Path

import pytest

import fakes
from blocks import block, covers
from documents import (
    ROOT,
    ROUNDING,
    as_one_process,
    assert_same,
    by_deepspeed,
    shell,
    started,
    steps,
)
from helpers import free_port
from meshwright.config.flags import parse_settings
from meshwright.config.schema import TrainConfig

pytestmark = [pytest.mark.whole, pytest.mark.timeout(180)]

SYSTEM = ROOT / "compat/megatron-deepspeed"
SCRIPTS = ("args_deepspeed_gpt.sh", "args_distributed_gpt.sh")
# The parameters after the document's ten, and flags: sizes for a CPU.
SMALL = (
    "4 01b1d32 6 2 checkpoints/003 gpt2-vocab.json gpt2-merges.txt my-gpt2_text_document --hidden-size 32 \
    --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --eval-iters 1 --lr-warmup-fraction 0.1 \
    --lr-decay-iters 40 --no-tensorboard"
)
NOTHING = "python3() { :; }\nexport -f python3\n"


def lines(place: Path, ranks: int, **numbers: str) -> list[str]:
    """Return the document's two lines with fewer ranks a node, smaller batches and sizes."""
    for name in SCRIPTS:
        shutil.copy(SYSTEM / name, place)
    text = (
        block("benchmarks/run-deepspeed")
        .replace('"10.10.0.8"', "127.0.0.1")
        .replace("2 8 ", f"2 {ranks} ")
    )
    for old, new in {"32 512": "2 8", "32 1024": "2 16", **numbers}.items():
        text = text.replace(old, new)
    return [f"{line} {SMALL}" for line in text.splitlines()]


def flags_of(place: Path, line: str, environment: str = "") -> list[str]:
    """Return the flags of training that a line of the document leads to, which runs nothing."""
    given = shlex.split(shell(place, NOTHING + environment + line).splitlines()[0])
    assert given[:5] == ["Run", "cmd", "python3", "-m", "meshwright"]
    return given[given.index("train") + 1 :]


def test_both_nodes_are_given_the_same_flags(place: Path) -> None:
    """Training has fp16, recomputation and, by the JSON file, ZeRO 1 and a loss scale."""
    first, second = (flags_of(place, line) for line in lines(place, 4, **{"32 1024": "2 8"}))
    assert first == [word.replace("ds_config_1.json", "ds_config.json") for word in second]
    assert {"--fp16", "--checkpoint-activations"} < set(first)
    with contextlib.chdir(place):
        config = parse_settings(TrainConfig, [*first, "--world-size=8"], "train").config
    assert (config.parallel.zero_stage, config.precision.initial_loss_scale) == (1, 4096)


@pytest.mark.long  # eight ranks
def test_seed_003(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TP2 x PP4 on two nodes, ZeRO 1 and fp16 by the JSON file, everything recomputed."""
    first, second = (flags_of(place, line) for line in lines(place, 4, **{"32 1024": "2 8"}))
    ends, logs = by_deepspeed(place, [first, second], 4)
    assert ends == [0] * 8, "\n".join(logs)
    assert "loss scale: 4096.0" in logs[0]
    assert_same(
        steps(place / "checkpoints/003"), as_one_process(place, first, monkeypatch), ROUNDING
    )


@pytest.mark.long
@covers("benchmarks/run-deepspeed")
def test_both_lines_of_the_document_end_in_the_refusal(place: Path) -> None:
    """Its second machine has twice the batch: refused by name, not trained or hung on.

    The machines, of one rank here, share the folder; the script ends with the ranks' status.
    """
    scripts = lines(place, 1, **{"2 4 true": "2 1 true"})
    port = f"export MASTER_PORT={free_port()}\n"
    with started(place, *(port + script for script in scripts)) as processes:
        assert [process.wait(timeout=100) for process in processes] == [2, 2], (
            place / "log-0"
        ).read_text()
    for n, batch in enumerate((8, 16)):
        name = rf"Megatron-Deepspeed_gpt2_nl4_nah16_hs1024_FP16_actrue_mp2_pp1_mb2_gb{batch}_2n1g_\d+_\w+\.log"
        (log,) = (
            path
            for path in (place / "test_logs/01b1d32/2n1g").iterdir()
            if re.fullmatch(name, path.name)
        )
        assert "global_batch_size: 8 on rank 0, 16 on rank 1" in log.read_text()
        assert log.read_text() == (place / f"log-{n}").read_text()


def test_one_benchmark_after_the_other(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second replaces what the first saved; without DeepSpeed, in fp32, without saving too."""
    from meshwright.__main__ import main

    lines(place, 1)
    monkeypatch.chdir(place)
    one = f"args_distributed_gpt.sh 1 1 0 localhost 1 1 false false 2 4 {SMALL}".replace(
        "003", "in-a-row"
    )
    flags = flags_of(place, f"bash {one}")
    assert not {"--fp16", "--deepspeed", "--checkpoint-activations"} & set(flags)
    for _ in range(2):
        assert main(["train", *flags]) == 0
    assert [path.name for path in (place / "checkpoints/in-a-row").glob("iter_*")] == [
        "iter_0000006"
    ]
    folder = place / "checkpoints/in-a-row"
    assert [path.name for path in folder.glob("replaced-*")] == ["replaced-1"]
    # Of benchmarks the last that was moved aside stays, and every other training does.
    for n, (age, text) in enumerate([(9, None), (8, "train_iters = 9"), (0, None)], 2):
        (folder / f"replaced-{n}").mkdir()
        config = folder / f"replaced-{n}/config.toml"
        config.write_text(text or (folder / "config.toml").read_text())
        os.utime(config.parent, (time.time() + 99 - age,) * 2)
    assert shell(place, f"{NOTHING}bash {one}").count("removed checkpoints/in-a-row/replaced-") == 2
    assert sorted(path.name for path in folder.glob("replaced-*")) == ["replaced-3", "replaced-4"]
    flags = flags_of(place, f"bash {one}", "export SAVE=false\n")
    assert "--save" not in flags and "checkpoints/in-a-row" not in flags


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("x", "NNODES is 'x'; give a whole number from 1"),
        ("2 08", "GPUS_PER_NODE is '08'"),
        ("2 8 -1", "NODE_RANK is '-1'; give a whole number from 0"),
        ("1 1 0 localhost 1 1 yes", "USE_FP16 is 'yes'; give true or false"),
        ("1 1 0 localhost 1 1 true true 4 8 24 a/b", "RUN_COMMIT is 'a/b'"),
        (" ".join("1" * 6) + " true true" + " 1" * 11, "19 parameters"),
    ],
)
def test_parameters_are_checked(place: Path, given: str, words: str) -> None:
    lines(place, 1)
    assert words in shell(place, f"bash {SCRIPTS[1]} {given}", status=2)


def test_the_status_is_the_trainings(place: Path) -> None:
    lines(place, 1)
    assert "Run cmd" in shell(
        place, f"python3() {{ return 70; }}; export -f python3; bash {SCRIPTS[0]}", status=70
    )


def test_the_grid_of_the_result_tables(place: Path) -> None:
    """The loop of the documentation starts one benchmark a line, and goes on after a failure."""
    page = (ROOT / "docs/result-tables.md").read_text(encoding="utf-8")
    (loop,) = re.findall(r"```bash\n(cd compat/megatron-deepspeed\n.*?)```", page, re.S)
    place = place / "grid"
    place.mkdir()
    lines(place, 1)
    fails_once = """python3() { case "$*" in *"parallel-size 8"*) return 2;; esac; cat; }; export -f python3\n"""
    out = shell(
        place,
        fails_once
        + loop.replace("cd compat/megatron-deepspeed", "NODE_RANK=0 MASTER_ADDR=10.10.0.8"),
    )
    assert out.count("Run cmd") == 7 and out.count("not run to its end: 8 1 true 32 512") == 1
    names = "".join(log.name for log in (place / "test_logs/01b1d32/2n8g").iterdir())
    assert names.count("mp2_pp4_mb32_gb512_2n8g") == 1 and "acfalse_mp1_pp1_mb4_gb64" in names


@pytest.mark.skipif(
    shutil.which("xz") is None, reason="the document's commands unpack by xz, which is not here"
)
@covers("benchmarks/installation", "benchmarks/data")
def test_installation_and_data(place: Path, tmp_path: Path) -> None:
    """Downloads are stood in for; what they leave is enough for the benchmark's first step."""
    files = tmp_path / "files"
    files.mkdir()
    (files / "oscar-1GB.jsonl.xz").write_bytes(
        lzma.compress((place / "oscar-1GB.jsonl").read_bytes())
    )
    for name in ("gpt2-vocab.json", "gpt2-merges.txt"):
        shutil.copy(place / name, files)
    system = files / "Megatron-DeepSpeed"
    system.mkdir()
    for path in SYSTEM.iterdir():
        if path.name in SCRIPTS:
            shutil.copy(path, system)
        else:
            (system / path.name).symlink_to(path)
    first = fakes.put_first(tmp_path / "bin", files)
    out = shell(
        tmp_path, f"set -e\n{first}{block('benchmarks/installation')}{block('benchmarks/data')}"
    )
    assert "Processed 60 documents" in out
    calls = (tmp_path / "bin/calls").read_text()
    assert (
        calls.count("git clone") == 3
        and calls.count("pip install") == 3
        and calls.count("wget ") == 3
    )
    there = tmp_path / "Megatron-DeepSpeed"
    flags = flags_of(there, block("benchmarks/run-deepspeed").splitlines()[0])
    for name in ("vocab_file", "merge_file"):
        assert (there / flags[flags.index("--" + name.replace("_", "-")) + 1]).is_file()
    assert (there / f"{flags[flags.index('--data-path') + 1]}.idx").is_file()
