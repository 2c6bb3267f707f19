"""The commands of OneFlow-GPT, on a CPU."""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_oneflow_checkpoints import weights as weights
from test_oneflow_checkpoints import write_oneflow_gpt
from test_two_machines import machines as machines

import fakes
import warm
from blocks import block, covers
from documents import (
    ROOT,
    ROUNDING,
    as_one_process,
    assert_same,
    environment,
    run,
    shell,
    smaller,
    steps,
    with_values,
    words,
)
from meshwright.__main__ import main
from meshwright.base.errors import UserError
from meshwright.config import flags
from meshwright.config.schema import TrainConfig
from meshwright.runtime.launch import launcher
from meshwright.runtime.ranks.world import World

pytestmark = [pytest.mark.whole, pytest.mark.timeout(180)]

SYSTEM = ROOT / "compat/oneflow-gpt"
# Runs what a container would, with this machine's files.
ENGINE = """
case $1 in run|exec) for word; do file=$word; done; exec bash "$file";; esac
"""
NO_TRAINING = '[ "$2" != oneflow_gpt.training ] || exit 0\n'
TINY = "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --micro-batch-size 1 --train-iters 1 --vocab-size 9"
SMALL = {
    "NUM_LAYERS": 2,
    "HIDDEN_SIZE": 32,
    "NUM_ATTENTION_HEADS": 4,
    "SEQ_LENGTH": 32,
    "TRAIN_ITERS": 4,
}
SMALL |= {"LOG_INTERVAL": 2, "SAVE_INTERVAL": 3, "INIT_LOSS_SCALE": 1}


def link(folder: Path) -> Path:
    """Make a folder that is the system's own, which runs may write to."""
    folder.mkdir(parents=True)
    for path in SYSTEM.iterdir():
        (folder / path.name).symlink_to(path)
    return folder


@pytest.fixture(scope="module")
def gpt(place: Path) -> Path:
    """That folder with the data that the document's preprocessing makes, and a vocabulary."""
    folder = link(place / "OneFlow-Benchmark/LanguageModeling/GPT")
    for path in place.glob("gpt*"):
        (folder / path.name).symlink_to(path)
    return folder


def sizes(**more: object) -> str:
    """Return the lines of a shell that make the examples small."""
    lines = [f"export ONEFLOW_GPT_{name}={value}\n" for name, value in (SMALL | more).items()]
    return "".join(["export MESHWRIGHT_TENSORBOARD=false\n", *lines])


def train(monkeypatch: pytest.MonkeyPatch, folder: Path, argv: list[str]) -> int:
    """Call `python3 -m oneflow_gpt.training` in this process."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(SYSTEM))
    monkeypatch.setattr(sys, "argv", ["training.py", *argv])
    return int(runpy.run_module("oneflow_gpt.training")["train"]())


def planned(argv: list[str]) -> dict[str, Any]:
    """Return the settings that the program resolves."""
    argv = ["--config", str(SYSTEM / "oneflow_gpt/defaults.toml"), *argv, "--dry-run"]
    config = flags.parse_settings(TrainConfig, argv, "", check=False).config
    more = {
        "dp": config.dp,
        "batch": config.global_batch,
        "micro_batches": config.micro_batches(config.global_batch),
    }
    return flags.to_dict(config) | more


def table(out: str) -> list[list[str]]:
    rows = [line.strip("|").split("|") for line in out.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row] for row in rows]


@covers("oneflow-gpt/pretrain-345m")
def test_pretrain_345m(gpt: Path) -> None:
    """The script with smaller sizes, from an empty folder."""
    out = shell(gpt, sizes() + block("oneflow-gpt/pretrain-345m"))
    head, rule, *rows = table(out)
    assert head == "step micro_batches samples throughput latency loss".split() and set(
        "".join(rule)
    ) == {"-"}
    assert [row[:3] for row in rows] == [["2", "2", "16"], ["4", "4", "32"]]
    lines = out.splitlines()
    assert (
        " > padded vocab (size: 320) with 64 dummy tokens (new size: 384)" in lines
        and "Training..." in lines
    )
    assert "validation loss" not in out and "arguments ---" in out
    assert sorted(path.name for path in (gpt / "checkpoint").glob("iter_*")) == [
        "iter_0000003",
        "iter_0000004",
    ]


@covers("oneflow-gpt/training")
def test_training(
    gpt: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The document's flags, from a missing folder, and once more from its own checkpoint."""
    given = words(gpt, smaller(block("oneflow-gpt/training"), vocab_size=320), "python3")
    assert given[:2] == ["-m", "oneflow_gpt.training"]
    argv = with_values(given[2:], save="trained", load="trained") + ["--initial-loss-scale", "1"]
    assert train(monkeypatch, gpt, argv) == 0
    first = capfd.readouterr()
    assert "could not find the metadata file" in first.out
    assert [row[:3] for row in table(first.out)[2:]] == [
        ["2", "4", "16"],
        ["4", "8", "32"],
        ["6", "12", "48"],
    ]
    assert (
        train(monkeypatch, gpt, [*argv, "--train-iters", "8", "--metric-print-format", "normal"])
        == 0
    )
    again = capfd.readouterr().out
    assert "successfully loaded checkpoint from trained at iteration 6" in again
    assert "step=8,micro_batches=16,samples=64,throughput=" in again and not table(again)


def test_without_the_packages(gpt: Path) -> None:
    """A Python without packages, as before the install line: what to do, and no traceback."""
    refused = shell(gpt, f"python3 -S -m oneflow_gpt.training {TINY} --mock-data", 69)
    assert re.search(r"has no package \w+; pip install", refused) and "Traceback" not in refused


def test_its_own_defaults(gpt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr(
        "meshwright.__main__.main", lambda argv: seen.update(planned(argv[1:])) or 0
    )
    required = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --micro-batch-size 3 --train-iters 20"
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    bare = f"{required} --num-accumulation-steps 2".split()
    assert train(monkeypatch, gpt, [*bare, "--dataset", "elsewhere"]) == 0
    expected = dict(
        lr=1e-3, seed=12345, log_interval=100, split="969, 30, 1", vocab_size=50257, seq_length=1024
    )
    expected |= dict(
        make_vocab_size_divisible_by=128,
        log_format="table",
        eval_iters=0,
        min_lr=0.0,
        adam_eps=1e-8,
    )
    expected |= dict(
        initial_loss_scale=2.0**32,
        loss_scale_window=1000,
        bias_gelu_fusion=False,
        nvidia_smi_at=[10],
    )
    expected |= dict(
        micro_batches=2,
        lr_decay_style="linear",
        clip_grad=1.0,
        weight_decay=0.01,
        hidden_dropout=0.1,
    )
    assert {name: seen[name] for name in expected} == expected
    # Token files that know their vocabulary need no size; what is given wins.
    dataset = "--dataset=gpt_sample_dataset_text_document"
    assert train(monkeypatch, gpt, [*bare, dataset, "--seed=7", "--nvidia-smi-at=3"]) == 0
    by_global = [*bare[:6], *"--global-batch-size 6 --num-gpus-per-node 2 --train-iters 9".split()]
    assert seen["vocab_size"] is None and seen["seed"] == 7 and seen["nvidia_smi_at"] == [3]
    assert train(monkeypatch, gpt, by_global) == 0 and (seen["dp"], seen["micro_batches"]) == (2, 1)


def test_a_snapshot_of_oneflow_is_gone_on_with(
    gpt: Path,
    weights: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The largest number in the folder; later steps go beside it, and are what is loaded next."""
    for number in (20, 500):
        write_oneflow_gpt(gpt / f"snapshots/iter{number}_snapshot", weights)
    argv = "--num-layers 2 --hidden-size 24 --num-attention-heads 3 --seq-length 12 --vocab-size 50 --mock-data"
    argv += " --micro-batch-size 2 --train-iters 2 --load snapshots --save snapshots --save-init"
    assert train(monkeypatch, gpt, argv.split()) == 0
    assert (
        "successfully loaded checkpoint from snapshots at iteration 500" in capfd.readouterr().out
    )
    assert {"iter_0000000", "iter_0000002"} <= {path.name for path in (gpt / "snapshots").iterdir()}
    assert (
        train(
            monkeypatch,
            gpt,
            [*argv.split(), "--train-iters", "3", "--override-opt_param-scheduler"],
        )
        == 0
    )
    assert "successfully loaded checkpoint from snapshots at iteration 2" in capfd.readouterr().out


def test_an_interrupted_training_says_so(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("meshwright.__main__.main", lambda argv: 130)
    assert train(monkeypatch, ROOT, []) == 130 and capfd.readouterr().out == "interrupted\n"
    monkeypatch.setenv("RANK", "1")
    assert train(monkeypatch, ROOT, []) == 130 and capfd.readouterr().out == ""


def test_tools_beside_the_training(
    gpt: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Megatron's weights are converted and loaded, losses compared, and LAMBADA's texts scored."""
    argv = flags_of(gpt, "bash examples/pretrain_117M.sh", **SMALL)
    megatron = [*argv, "--ckpt-format", "torch"]
    assert train(monkeypatch, gpt, with_values(megatron, save="megatron", load="megatron")) == 0
    tool(
        monkeypatch,
        "convert_py_model_to_of",
        "--py_model_dir",
        "megatron/iter_0000004/mp_rank_00/model_optim_rng.pt",
    )
    argv = with_values(argv, save="both", load="convert_pt_to_of_gpt_release")
    assert train(monkeypatch, gpt, [*argv, "--finetune"]) == 0
    assert (
        "successfully loaded checkpoint from convert_pt_to_of_gpt_release" in capfd.readouterr().out
    )
    tool(monkeypatch, "compare_loss", "megatron", "both", "--json")
    assert json.loads(capfd.readouterr().out)
    (gpt / "lambada_test.jsonl").write_text(
        '{"text": "The quick brown fox jumps over the lazy dog"}\n'
    )
    script = "bash examples/lambada_cloze_accuracy.sh"
    given = given_to_python(gpt, script, CHECKPOINT_PATH="both", VALID_DATA="lambada_test.jsonl")
    assert given[:2] == ["-m", "meshwright"] and main([*given[2:], "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["values"]["examples"] == 1
    # The command of OneFlow's own lambada_cloze_accuracy.sh, but for sizes and the vocabulary.
    monkeypatch.chdir(gpt)
    words = (
        "tasks/main.py --task LAMBADA --valid-data lambada_test.jsonl --strict-lambada --load both"
    )
    words += " --dataset lambada_test.jsonl --fp16 --hidden-dropout 0.0"
    words += " --attention-dropout 0.0 --checkpoint-activations --multihead-attention-fusion"
    words += " --make-vocab-size-divisible-by=128 --log-interval=10 --metric-print-format=table"
    words += " --micro-batch-size=8 --num-gpus-per-node=1 --num-nodes=1 --node-ips=10.11.0.2"
    monkeypatch.setattr(sys, "argv", words.split())
    with pytest.raises(SystemExit) as end:
        runpy.run_path("tasks/main.py", run_name="__main__")
    assert end.value.code == 0 and "validation results on LAMBADA" in capfd.readouterr().out
    assert "set CHECKPOINT_PATH" in shell(gpt, script, status=2)
    assert "not needed: clone this repository" in shell(
        gpt, "bash tools/prepare_distribute.sh -n all", status=2
    )


def tool(monkeypatch: pytest.MonkeyPatch, name: str, *argv: str) -> None:
    monkeypatch.setattr(sys, "argv", [name, *argv])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(SYSTEM / f"tools/{name}.py"), run_name="__main__")
    assert end.value.code == 0


def test_the_small_model_of_the_page(
    gpt: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its two commands, with fewer steps; every variable that the page names has an effect."""
    page = (ROOT / "docs/from-oneflow.md").read_text()
    training, sample = re.findall(
        r"^(python3 -m oneflow_gpt.*?[^\\]$|meshwright generate small [^\n]*)", page, re.S | re.M
    )
    assert (
        train(
            monkeypatch,
            gpt,
            [*shlex.split(training.replace("\\\n", ""))[3:], "--train-iters", "31"],
        )
        == 0
    )
    capfd.readouterr()
    assert main(shlex.split(sample)[1:]) == 0 and capfd.readouterr().out.startswith(
        "The quick brown fox"
    )
    named = re.search("begin with `ONEFLOW_GPT_`: (.*?) \\(also", page, re.S)
    script = (SYSTEM / "examples/pretrain.sh").read_text()
    assert named and set(re.findall("ONEFLOW_GPT_([A-Z_]+)", script)) == set(
        re.findall("[A-Z_]{3,}", named[1])
    )


@covers("oneflow-gpt/container", "oneflow-gpt/image")
def test_container(gpt: Path, tmp_path: Path) -> None:
    """The image is loaded, and an engine that runs the mounted script comes to the training."""
    files = tmp_path / "files"
    files.mkdir()
    (files / "oneflow-manylinux2014-cuda11.2-0.1.tar.gz").touch()
    python = NO_TRAINING + fakes.PYTHON.replace("PROGRAM", warm.python())
    first = fakes.put_first(tmp_path / "bin", files, docker=ENGINE, python3=python)
    first += f"export HOME={tmp_path} MESHWRIGHT_TENSORBOARD=false\n"
    script = smaller(block("oneflow-gpt/container"), vocab_size=320, initial_loss_scale=1)
    script = script.replace("--load checkpoint", "--load contained").replace(
        "--save checkpoint", "--save contained"
    )
    out = shell(gpt, f"set -e\n{first}{block('oneflow-gpt/image')}{script}")
    load, _, started, _, install, training = (tmp_path / "bin/calls").read_text().splitlines()[1:7]
    assert load == "docker load -i oneflow-manylinux2014-cuda11.2-0.1.tar.gz"
    assert started.startswith("docker run --rm --gpus all --network host --shm-size=8g")
    assert (
        "--privileged" not in started and " -it " not in started and " python:3.12 bash " in started
    )
    assert install == f"python3 -m pip install --quiet -e {gpt}" and training.startswith(
        "python3 -m oneflow_gpt"
    )
    for told in (
        "--py 3.7: Meshwright needs Python 3.10",
        "glibc 2.17",
        "cp37m-manylinux2014_x86_64.whl is not",
    ):
        assert told in out
    (gpt / "oneflow-manylinux2014-cuda11.2-0.1.tar.gz").unlink()


def launch(folder: Path, *argv: str, **environ: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, str(SYSTEM / "tools/launch_container.py"), *argv]
    return subprocess.run(
        words, cwd=folder, capture_output=True, text=True, env=environment() | environ
    )


@pytest.mark.parametrize("engine", ["docker", "podman", "apptainer"])
def test_container_paths_and_commands_keep_their_words(tmp_path: Path, engine: str) -> None:
    """Folders with spaces and quotes, a command with quotes, its status, and a proxy."""
    here = tmp_path / 'it\'s a "folder" $HOME'
    link(here / "of mine")
    fakes.put_first(
        tmp_path / "bin", tmp_path, **{engine: 'printf "%s\\n" "$@" > "$FAKES/words"' + ENGINE}
    )
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    environ = {"PATH": path, "FAKES": str(tmp_path / "bin"), "HOME": str(tmp_path)}
    cmd = "printf '<%s>' \"$PWD\" 'a  b' \"c'd\"; exit 7"
    given = [
        "--src",
        "of mine",
        "--engine",
        engine,
        "--cmd",
        cmd,
        "--proxy",
        "http://p:1",
        "--privileged",
    ]
    done = launch(here, *given, **environ)
    assert done.returncode == 7, done.stderr
    assert done.stdout.endswith(f"<{here}><a  b><c'd>") and done.stdout.startswith(
        "tempfile name: "
    )
    passed = (tmp_path / "bin/words").read_text().splitlines()
    assert f"{here}:{here}" in passed and f"{here / 'of mine'}:{here / 'of mine'}" in passed
    assert {
        f"{n}=http://p:1" for n in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")
    } <= set(passed)
    gpus = {"docker": "--gpus", "podman": "nvidia.com/gpu=all", "apptainer": "--nv"}
    assert gpus[engine] in passed and ("--privileged" in passed) == (engine != "apptainer")
    assert ("docker://python:3.12" in passed) == (engine == "apptainer")
    # A dry run prints both, and starts nothing.
    (tmp_path / "bin/words").unlink()
    dry = launch(here, *given, "--dry-run", **environ)
    assert dry.returncode == 0 and cmd in dry.stdout and not (tmp_path / "bin/words").exists()
    expected = [word.replace(passed[-1], "SCRIPT") for word in passed]
    assert shlex.split(dry.stdout.splitlines()[-1]) == [engine, *expected]


@pytest.mark.parametrize(
    ("given", "status", "told"),
    [
        (
            ["--cmd", "true"],
            69,
            "docker is not installed; install one of docker, podman, apptainer",
        ),
        (["--src", "."], 2, "has no setup.py"),
        (["--py", "three"], 2, "--py three is not a version such as 3.12"),
        (["--wheel", "meshwright-1.whl"], 2, "--wheel meshwright-1.whl does not exist"),
        (["--extra-mount", "nothing"], 2, "--extra-mount nothing is not a folder"),
        (["--priv"], 2, "unrecognized arguments: --priv"),
    ],
)
def test_container_mistakes(tmp_path: Path, given: list[str], status: int, told: str) -> None:
    done = launch(tmp_path, *given, PATH=str(tmp_path), HOME=str(tmp_path))
    assert done.returncode == status and told in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "var-cache").exists()


@covers("oneflow-gpt/corpus", "oneflow-gpt/preprocess")
def test_corpus(gpt: Path, tmp_path: Path) -> None:
    """The document's two lines, as they are, by the tool of this folder."""
    (tmp_path / "my-corpus.json").write_text(block("oneflow-gpt/corpus"))
    for name in ("gpt2-vocab.json", "gpt2-merges.txt"):
        shutil.copy(gpt / name, tmp_path)
    (tmp_path / "tools").symlink_to(SYSTEM / "tools")
    assert "Processed 2 documents" in shell(tmp_path, block("oneflow-gpt/preprocess"))


@covers("oneflow-gpt/installation")
def test_installation(tmp_path: Path) -> None:
    link(tmp_path / "OneFlow-Benchmark/LanguageModeling/GPT")
    wheel = "oneflow-0.3.5%2Bcu112.git.75f11b825-cp37-cp37m-manylinux2014_x86_64.whl"
    (tmp_path / wheel).touch()
    shell(
        tmp_path,
        "set -e\n"
        + fakes.put_first(tmp_path / "bin", tmp_path)
        + block("oneflow-gpt/installation"),
    )
    calls = (tmp_path / "bin/calls").read_text().splitlines()
    assert calls[-1] == "python3 -m pip install -e ." and len(calls) == 3


@pytest.mark.long  # builds two wheels
@covers("oneflow-gpt/installation")
def test_installation_from_the_clone_alone(tmp_path: Path) -> None:
    """pip refuses OneFlow's wheel, and installs this folder and the clone without an index."""
    clone = tmp_path / "a clone"
    for name in ("src", "compat/oneflow-gpt"):
        shutil.copytree(
            ROOT / name, clone / name, symlinks=True, ignore=shutil.ignore_patterns("*.egg-info")
        )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    (tmp_path / "OneFlow-Benchmark/LanguageModeling").mkdir(parents=True)
    (tmp_path / "OneFlow-Benchmark/LanguageModeling/GPT").symlink_to(clone / "compat/oneflow-gpt")
    variables = f"export PIP_NO_INDEX=1 PIP_NO_BUILD_ISOLATION=0 PIP_PREFIX='{tmp_path}/there'\nwget() {{ :; }}\n"
    out = shell(tmp_path, variables + block("oneflow-gpt/installation"))
    assert "cp37m-manylinux2014_x86_64.whl is not a supported wheel" in out
    assert re.search("Successfully installed meshwright-[0-9.]+ oneflow-gpt-", out), out
    assert list(tmp_path.glob("there/lib/*/site-packages/meshwright/training/run.py"))


def given_to_python(folder: Path, script: str, **variables: object) -> list[str]:
    """Return the arguments of the Python that a script starts; it does not run."""
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "bin/python3").write_text('#!/bin/sh\nprintf "%s\\0" "$@"\n')
    (folder / "bin/python3").chmod(0o755)
    lines = "".join(f"export {name}={value}\n" for name, value in variables.items())
    return shell(folder, f"exec 2>/dev/null\nexport PATH=$PWD/bin:$PATH\n{lines}{script}").split(
        "\0"
    )[:-1]


def flags_of(folder: Path, script: str, **variables: object) -> list[str]:
    """Return the flags that a script of the examples gives the program."""
    given = given_to_python(
        folder, script, **{f"ONEFLOW_GPT_{name}": value for name, value in variables.items()}
    )
    assert given[:2] == ["-m", "oneflow_gpt.training"]
    return given[2:]


@covers("oneflow-gpt/one-node-eight-devices")
def test_the_sizes_of_the_examples(gpt: Path) -> None:
    """Layers, width, heads, length, batches and layout are those in the scripts' names."""
    expected = {
        "pretrain.sh": (16, 1536, 16, 2048, 8, 32, 4, 1),
        "pretrain_117M.sh": (12, 768, 12, 1024, 8, 8, 1, 1),
        "pretrain_345M.sh": (24, 1024, 16, 1024, 8, 8, 1, 1),
        "pretrain_1n8d_2x4x1_16_1536x16.sh": (16, 1536, 16, 2048, 8, 16, 2, 4),
        "distribute_pretrain_2n4d.sh": (16, 1536, 16, 2048, 8, 16, 2, 4),
    }
    names = "num_layers hidden_size num_attention_heads seq_length micro_batch_size batch dp"
    for script, sizes in expected.items():
        seen = planned(flags_of(gpt, f"bash examples/{script}", NODE_IPS="10.0.0.1,10.0.0.2"))
        assert (
            tuple(seen[name] for name in [*names.split(), "tensor_model_parallel_size"]) == sizes
        ), script
    (block_flags,) = [flags_of(gpt, block("oneflow-gpt/one-node-eight-devices"))]
    assert planned(block_flags)["num_gpus_per_node"] == 8


@covers("oneflow-gpt/four-nodes")
def test_the_plan_of_four_nodes(gpt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the four machines starts eight of 32 ranks, and finds its own number."""
    ips = [f"10.11.0.{n}" for n in (2, 3, 4, 5)]
    argv = flags_of(gpt, block("oneflow-gpt/four-nodes"), NODE_IPS=",".join(ips))
    seen = planned(argv)
    expected = {
        "num_layers": 24,
        "hidden_size": 2304,
        "num_attention_heads": 24,
        "seq_length": 2048,
        "dp": 2,
    }
    expected |= {
        "tensor_model_parallel_size": 4,
        "pipeline_model_parallel_size": 4,
        "batch": 512,
        "micro_batches": 32,
    }
    assert {name: seen[name] for name in expected} == expected
    parallel = flags.parse_settings(TrainConfig, argv, "").config.parallel
    given = flags.parse_settings(
        launcher.LaunchConfig, launcher.launch_flags_of(parallel, World()) or [], ""
    ).config
    for number, ip in enumerate(ips):
        monkeypatch.setattr(launcher, "_is_own", lambda address, ip=ip: address == ip)
        plan = launcher.make_plan(given)
        assert (plan.processes, plan.nodes, plan.node, plan.address) == (8, 4, number, ips[0])


@covers("oneflow-gpt/four-nodes")
def test_the_examples_have_addresses(gpt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the document's scripts, of which each takes as many as it has machines."""
    for script, ips in (
        (block("oneflow-gpt/four-nodes"), "10.11.0.2,10.11.0.3,10.11.0.4,10.11.0.5"),
        ("bash examples/distribute_pretrain_2n4d.sh", "10.11.0.2,10.11.0.3"),
    ):
        parallel = flags.parse_settings(TrainConfig, flags_of(gpt, script), "").config.parallel
        given = launcher.launch_flags_of(parallel, World()) or []
        assert given[given.index("--node-ips") + 1] == ips
    monkeypatch.setattr(launcher, "_is_own", lambda address: False)
    with pytest.raises(
        UserError, match=r"none of --node-ips 10.11.0.2,10.11.0.3 is .* give the machines' own, or"
    ):
        launcher.make_plan(flags.parse_settings(launcher.LaunchConfig, given, "").config)


# One machine, in the words of the published pretrain.sh
PUBLISHED = """export PYTHONPATH=$PWD
cmd="python3 -m oneflow_gpt.training --num-gpus-per-node ${ONEFLOW_GPT_NUM_GPUS_PER_NODE:-4} --num-nodes 1"
cmd+=" --node-ips ${ONEFLOW_GPT_NODE_IPS:-"10.11.0.2,10.11.0.3,10.11.0.4,10.11.0.5"} --fp16"
${cmd} --num-layers 1 --hidden-size 8 --num-attention-heads 1 --micro-batch-size 1 --train-iters 1 \\
    --seq-length 8 --mock-data --vocab-size 9 --learning-rate 0.1
"""


def test_addresses_that_one_machine_does_not_need(gpt: Path) -> None:
    argv = flags_of(gpt, PUBLISHED)
    parallel = flags.parse_settings(TrainConfig, argv, "").config.parallel
    assert launcher.launch_flags_of(parallel, World()) == ["--nproc-per-node", "4", "--nnodes", "1"]


@pytest.mark.long  # eight ranks, which import torch one by one
@covers("oneflow-gpt/one-node-eight-devices")
def test_one_node_eight_devices(gpt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script itself on eight ranks, against one process: two replicas of four tensor ranks."""
    more = {
        "MICRO_BATCH_SIZE": 1,
        "GLOBAL_BATCH_SIZE": 4,
        "SAVE_PATH": "eight",
        "LOAD_PATH": "eight",
    }
    (log,) = run(gpt, sizes(**more) + block("oneflow-gpt/one-node-eight-devices"))
    assert "data-parallel-size: 2, tensor-model-parallel size: 4" in log and len(table(log)) == 4
    argv = flags_of(gpt, block("oneflow-gpt/one-node-eight-devices"), **SMALL, **more)
    defaults = ["--config", str(SYSTEM / "oneflow_gpt/defaults.toml")]
    assert_same(
        steps(gpt / "eight"), as_one_process(gpt, [*defaults, *argv], monkeypatch), ROUNDING
    )
