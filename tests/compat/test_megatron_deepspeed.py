"""The commands of Megatron-DeepSpeed, on a CPU."""

from __future__ import annotations

import json
import lzma
import re
import runpy
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed_files
import pytest
from machines import machines

from blocks import block, covers
from documents import (
    ROOT,
    ROUNDING,
    SCRIPT,
    as_one_process,
    assert_same,
    by_deepspeed,
    free_port,
    run,
    shell,
    smaller,
    steps,
    with_values,
    words,
)
from fakes import put_first
from meshwright.compat.flags import deepspeed_json

__all__ = ["machines"]  # a fixture
TREE = ROOT / "compat/megatron-deepspeed"
pytestmark = [pytest.mark.whole, pytest.mark.timeout(180)]


def seed_000(name: str = "pretrain-one-node", **more: object) -> str:
    """Return a script of the document with GPUS_PER_NODE of one replica."""
    script = block(f"megatron-deepspeed/{name}").replace("GPUS_PER_NODE=8", "GPUS_PER_NODE=4")
    script = script.replace("PORT=6000", f"PORT={free_port()}").replace(
        "checkpoints/gpt2", f"checkpoints/{name}"
    )
    return smaller(
        script,
        num_layers=4,
        micro_batch_size=2,
        global_batch_size=4,
        train_iters=18,
        eval_interval=9,
    )


def flags_of(place: Path, script: str) -> list[str]:
    given = words(place, script, "python")
    return given[given.index(SCRIPT) + 1 :]


@pytest.mark.skipif(
    shutil.which("xz") is None, reason="the document's commands unpack by xz, which is not here"
)
@covers(
    "megatron-deepspeed/downloads-and-container",
    "megatron-deepspeed/installation",
    "megatron-deepspeed/preprocess",
    "megatron-deepspeed/move-the-data",
)
def test_from_the_downloads_to_the_data(place: Path, tmp_path: Path) -> None:
    """The document in its order, with an archive and vocabularies that are smaller."""
    served, home = tmp_path / "served", tmp_path / "home"
    for folder in (served, home):
        folder.mkdir()
    (served / "oscar-1GB.jsonl.xz").write_bytes(
        lzma.compress((place / "oscar-1GB.jsonl").read_bytes())
    )
    for name in ("gpt2-vocab.json", "gpt2-merges.txt"):
        shutil.copy(place / name, served)
    (served / "Megatron-DeepSpeed").mkdir()
    for path in TREE.iterdir():
        (served / "Megatron-DeepSpeed" / path.name).symlink_to(path)
    first = put_first(tmp_path / "bin", served, docker="")
    shell(home, first + block("megatron-deepspeed/downloads-and-container"))
    names = ["gpt2-merges.txt", "gpt2-vocab.json", "oscar-1GB.jsonl"]
    assert sorted(path.name for path in (home / "datasets").iterdir()) == names
    assert (home / "datasets/oscar-1GB.jsonl").read_bytes() == (
        place / "oscar-1GB.jsonl"
    ).read_bytes()
    shell(home, first + block("megatron-deepspeed/installation"))
    assert [
        line
        for line in (tmp_path / "bin/calls").read_text().splitlines()
        if not line.startswith(("wget", "git"))
    ] == [
        "docker pull nvcr.io/nvidia/pytorch:23.12-py3",
        re.search(r"^docker run .*", block("megatron-deepspeed/downloads-and-container"), re.M)[0],  # type: ignore[index]
        "docker exec -it megatron-deepspeed bash",
        "pip config set global.index-url INDEX",
        "python -m pip install --upgrade pip",
        "pip install -r requirements.txt",
        "pip install nvitop",
        "pip install .",
        "pip install mpi4py",
    ]
    inside = home / "Megatron-DeepSpeed"
    for name in names:  # the document leaves this step out
        shutil.copy(home / "datasets" / name, inside)
    assert "Processed 60 documents" in shell(inside, block("megatron-deepspeed/preprocess"))
    shell(inside, block("megatron-deepspeed/move-the-data"))
    held = {path.name for path in (inside / "data").iterdir()}
    assert {
        "meg-gpt2_text_document.bin",
        "meg-gpt2_text_document.idx",
        "gpt2-vocab.json",
        "gpt2-merges.txt",
    } <= held
    assert not list(inside.glob("meg-gpt2*"))


def test_the_links_of_the_page(tmp_path: Path) -> None:
    """With its links the document's `mv` finds the files."""
    (tmp_path / "datasets").mkdir()
    (tmp_path / "datasets/gpt2-vocab.json").touch()
    (tmp_path / "meshwright/compat/megatron-deepspeed").mkdir(parents=True)
    page = (ROOT / "docs/from-deepspeed.md").read_text()
    links = re.findall(r"^ +ln -s .*", page.replace("/workspace", str(tmp_path)), re.M)
    work = "cd Megatron-DeepSpeed; touch meg-gpt2_text_document.bin"
    shell(tmp_path, "\n".join(["set -e", *links, work, block("megatron-deepspeed/move-the-data")]))
    moved = (tmp_path / "meshwright/compat/megatron-deepspeed/data").iterdir()
    assert {path.name for path in moved} == {"gpt2-vocab.json", "meg-gpt2_text_document.bin"}


@pytest.mark.parametrize(
    ("there", "installed"),
    [("", True), ("bin/deepspeed", True), ("from deepspeed.launcher.runner import main", False)],
    ids=["nothing", "ours", "deepspeed"],
)
def test_its_requirements_are_the_clone_and_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: str, installed: bool
) -> None:
    """pip reads a path of a requirements file from where it is started: in that folder."""
    assert (TREE / "requirements.txt").read_text().split() == ["."]
    if there:
        text = (TREE / there).read_text() if there.startswith("bin/") else there
        (tmp_path / "deepspeed").write_text(text)
    given: dict[str, Any] = {}
    monkeypatch.setattr("setuptools.setup", given.update)
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path / "none"))
    monkeypatch.setenv("PATH", str(tmp_path))
    runpy.run_path(str(TREE / "setup.py"))
    assert given["install_requires"] == [f"meshwright @ {ROOT.as_uri()}"]
    assert given["scripts"] == (["bin/deepspeed"] if installed else [])


@pytest.mark.long  # builds two wheels
@pytest.mark.parametrize("there", [False, True], ids=["nothing", "deepspeed"])
def test_installation_from_the_clone_alone(tmp_path: Path, there: bool) -> None:
    """Without an index: `deepspeed` is ours, and needs no clone any more, or stays as it was."""
    clone = tmp_path / "a clone"
    for name in ("src", "compat/megatron-deepspeed"):
        ignored = shutil.ignore_patterns("*.egg-info", "build")
        shutil.copytree(ROOT / name, clone / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    command = tmp_path / "there/bin/deepspeed"
    if there:
        command.parent.mkdir(parents=True)
        command.write_text("#!/bin/sh\necho their own\n")
        command.chmod(0o755)
    script = f"export PIP_NO_INDEX=1 PIP_NO_BUILD_ISOLATION=0 PIP_PREFIX='{tmp_path}/there'\n"
    script += f"export PATH='{tmp_path}/there/bin':$PATH\n"
    script += "(cd 'a clone/compat/megatron-deepspeed' && pip install -r requirements.txt)\n"
    script += (
        "rm -r 'a clone'\nexport PYTHONPATH=$(echo there/lib/*/site-packages)\ndeepspeed --help\n"
    )
    out = shell(tmp_path, script)
    assert "Successfully installed megatron-deepspeed-by-meshwright" in out
    assert out.endswith("their own\n") if there else "--hostfile HOSTFILE" in out


@pytest.mark.long  # real launchers, whose ranks import torch one by one
@covers("megatron-deepspeed/pretrain-one-node")
def test_seed_000_on_one_node_and_its_samples(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TP2 x PP2 under torch.distributed.launch."""
    script = seed_000()
    (log,) = run(place, script)
    assert (
        "data-parallel-size: 1, tensor-model-parallel size: 2, pipeline-model-parallel size: 2"
        in log
    )
    assert log.count("--distributed-backend nccl has no effect") == 1
    single = as_one_process(place, flags_of(place, script), monkeypatch)
    assert_same(steps(place / "checkpoints/pretrain-one-node"), single, ROUNDING)


@pytest.mark.long  # real launchers, whose ranks import torch one by one
@covers("megatron-deepspeed/pretrain-two-nodes")
def test_seed_000_on_two_nodes(
    place: Path, monkeypatch: pytest.MonkeyPatch, machines: tuple[str, str]
) -> None:
    """TP2 x PP4 on eight ranks of two launchers, which get their numbers; the second node is
    silent.
    """
    script = seed_000("pretrain-two-nodes")
    (place / "pretrain_gpt2.sh").write_text(script)
    commands = (
        f"ip netns exec {name} bash pretrain_gpt2.sh {number}"
        for number, name in enumerate(machines)
    )
    first, second = run(place, *commands)
    assert "tensor-model-parallel size: 2, pipeline-model-parallel size: 4" in first
    assert " iteration " not in second
    flags = flags_of(place, script)
    ours = steps(place / flags[flags.index("--save") + 1])
    assert_same(ours, as_one_process(place, flags, monkeypatch), ROUNDING)


@pytest.fixture(scope="module")
def trained(place: Path) -> tuple[list[str], list[str]]:
    """Train with the document's flags on its eight ranks of one node, so with two replicas, and
    without the rounding of fp16; return the flags and the logs.
    """
    script = seed_000("pretrain-one-node-many-gpus").replace("--fp16", "--params-dtype float64")
    flags = with_values(flags_of(place, script), train_iters=3)
    ends, logs = by_deepspeed(place, [flags], 8)
    assert ends == [0] * 8, "\n".join(logs)
    return flags, logs


@covers("megatron-deepspeed/pretrain-one-node-many-gpus")
def test_seed_000_exactly(
    place: Path, trained: tuple[list[str], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags, logs = trained
    assert "data-parallel-size: 2" in logs[0]
    folder = place / "checkpoints/pretrain-one-node-many-gpus"
    assert_same(steps(folder), as_one_process(place, flags, monkeypatch), 1e-9)


@covers(
    "megatron-deepspeed/generate",
    "megatron-deepspeed/run-generate",
    "megatron-deepspeed/show-samples",
)
def test_samples_from_the_checkpoint_of_eight_ranks(
    place: Path, trained: tuple[list[str], list[str]]
) -> None:
    """One rank writes samples from the checkpoint of TP2 x PP2, which nobody converted."""
    script = smaller(block("megatron-deepspeed/generate"), num_layers=4)
    (place / "generate_text.sh").write_text(
        script.replace("gpt2\n", "pretrain-one-node-many-gpus\n")
    )
    shell(place, block("megatron-deepspeed/run-generate"))
    samples = shell(place, block("megatron-deepspeed/show-samples")).splitlines()
    assert len(samples) == 2 and all(
        {"text", "length", "finished"} <= set(json.loads(line)) for line in samples
    )


# As the launcher of DeepSpeed: a process for each GPU, which have its variables and one input.
DEEPSPEED = """
export WORLD_SIZE=2 LOCAL_SIZE=2 CROSS_RANK=0 CROSS_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500
script=$1
shift
exec 3<&0
RANK=1 LOCAL_RANK=1 python -u "$script" --local_rank=1 "$@" <&3 &
RANK=0 LOCAL_RANK=0 python -u "$script" --local_rank=0 "$@" && wait $!
"""


@covers("megatron-deepspeed/interactive", "megatron-deepspeed/run-interactive")
def test_a_dialogue_through_the_deepspeed_launcher(
    place: Path, tmp_path: Path, trained: tuple[list[str], list[str]]
) -> None:
    """The first rank of two answers; empty input is asked for again, and `stop` ends it."""
    first = put_first(tmp_path / "bin", tmp_path, deepspeed=DEEPSPEED)
    script = smaller(block("megatron-deepspeed/interactive"), num_layers=4, out_seq_length=4)
    script = script.replace("/workspace/Megatron-DeepSpeed", shlex.quote(str(place)))
    (place / "interactive_text.sh").write_text(
        script.replace("gpt2_345m", "pretrain-one-node-many-gpus")
    )
    (tmp_path / "said").write_text("The quick brown\n\nDocument 7\nstop\n")
    command = f"{block('megatron-deepspeed/run-interactive').strip()} < {shlex.quote(str(tmp_path / 'said'))}"
    out = shell(place, first + command)
    assert (
        out.count("Context prompt (stop to exit) >>> ") == 4
        and "Prompt should not be empty!" in out
    )
    assert (
        "Context: The quick brown" in out
        and "Context: Document 7" in out
        and out.count("Megatron-LM:") >= 2
    )
    assert "generation runs on rank 0; this rank has nothing to do" in out


@pytest.mark.parametrize("page", ["docs/from-deepspeed.md", "docs/zh/from-deepspeed.md"])
def test_the_page_names_each_key_that_counts(page: str) -> None:
    text = (ROOT / page).read_text()
    keys = [*deepspeed_json.MAPPED, *deepspeed_json.OURS, *deepspeed_json.REFUSED]
    assert not [key for key in keys if f"`{key}`" not in text]


def given_to(program: str, tmp_path: Path, command: str, status: int = 0) -> list[str]:
    """Return the words that a script of ours gives to a program, which does nothing."""
    shutil.rmtree(tmp_path / "bin", ignore_errors=True)
    first = put_first(tmp_path / "bin", tmp_path, **{program: ""})
    shell(TREE, first + command, status)
    calls = tmp_path / "bin/calls"
    return calls.read_text().split() if calls.exists() else []


def pairs(flags: list[str]) -> dict[str, str]:
    """Return flags with their values, "" for none."""
    return {
        a: "" if b.startswith("--") else b
        for a, b in zip(flags, [*flags[1:], "--"], strict=True)
        if a[0] == "-"
    }


def test_its_scripts_say_what_the_document_says(place: Path, tmp_path: Path) -> None:
    """They leave out what the checkpoint and the data say, and what has no effect."""
    kept_beside_the_data = {"--vocab-file", "--merge-file", "--data-impl", "--distributed-backend"}
    document = pairs(words(place, block("megatron-deepspeed/pretrain-two-nodes"), "python")[2:])
    ours = "MASTER_ADDR=192.168.0.1 NNODES=2 PP=4 bash pretrain_gpt2.sh 1 --log-interval 5"
    want = {k.replace("_", "-"): v for k, v in document.items() if k not in kept_beside_the_data}
    assert pairs(given_to("python", tmp_path, ours)[4:]) == want | {
        "--node-rank": "1",
        "--log-interval": "5",
    }
    assert given_to("python", tmp_path, "bash pretrain_gpt2.sh --log-interval", 2) == []
    for name, program in (("generate", "python"), ("interactive", "deepspeed")):
        document = pairs(words(place, block(f"megatron-deepspeed/{name}"), program)) | {
            "--load": "checkpoints/gpt2"
        }
        assert (
            pairs(given_to("python", tmp_path, f"sh ./{name}_text.sh")[2:]).items()
            <= document.items()
        )


CONVERT = TREE / "tools/convert_checkpoint"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Run a script in this process and return its status."""

    def run_script(name: str, *argv: object) -> int:
        monkeypatch.setattr(sys, "argv", [str(TREE / "tools" / name), *map(str, argv)])
        monkeypatch.syspath_prepend(CONVERT)
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(sys.argv[0], run_name="__main__")
        return int(ended.value.code or 0)

    return run_script


def test_tools_for_checkpoints(
    script: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A DeepSpeed folder of TP2 x PP3 goes to Megatron's tree, one rank and Hugging Face."""
    (tmp_path / "ds").mkdir()
    step = deepspeed_files.write(tmp_path / "ds", deepspeed_files.model(), tp=2, pp=3)
    (tmp_path / "ds/latest").write_text(step.name)
    into = ("--input_folder", tmp_path / "ds", "--output_folder")
    assert (
        script(
            "convert_checkpoint/deepspeed_to_megatron.py", *into, tmp_path / "meg", "--target_tp", 2
        )
        == 0
    )
    ranks = sorted(path.name for path in (tmp_path / "meg/iter_0000030").iterdir() if path.is_dir())
    assert ranks == ["mp_rank_00", "mp_rank_01"]
    sizes = ("--tensor-model-parallel-size", 2, "--target-pipeline-model-parallel-size", 3)
    assert (
        script(
            "merge_mp_partitions.py",
            "--load",
            tmp_path / "meg",
            "--save",
            tmp_path / "joined",
            *sizes,
        )
        == 0
    )
    assert "the sizes given have no effect" in capsys.readouterr().err
    ranks = sorted(
        path.name for path in (tmp_path / "joined/iter_0000030").iterdir() if path.is_dir()
    )
    assert ranks == ["mp_rank_00_000", "mp_rank_00_001", "mp_rank_00_002"]
    assert (
        script(
            "convert_checkpoint/deepspeed_to_megatron.py", *into, tmp_path / "rel", "--for_release"
        )
        == 0
    )
    size = [sum(f.stat().st_size for f in (tmp_path / n).rglob("*.pt")) for n in ("meg", "rel")]
    assert size[0] > 2 * size[1]
    assert script("convert_checkpoint/deepspeed_to_transformers.py", *into, tmp_path / "hf") == 0
    assert (tmp_path / "hf/config.json").exists()
    capsys.readouterr()
    for name, *argv in (
        ("inspect_checkpoint.py", step / "mp_rank_00_model_states.pt"),
        ("inspect_checkpoint.py", tmp_path / "meg/iter_0000030/mp_rank_00/model_optim_rng.pt"),
        ("inspect_deepspeed_checkpoint.py", "--folder", tmp_path / "ds", "--target_tp", 1),
    ):
        assert script(f"convert_checkpoint/{name}", *argv) == 0
        assert "h.2.mlp.proj.weight" in capsys.readouterr().out
    for name, argv, message in (
        (
            "deepspeed_to_transformers.py",
            (*into, "x", "--target_tp", 2),
            "--target_tp 2 --target_pp 1: a folder for",
        ),
        (
            "deepspeed_to_deepspeed.py",
            (*into, "x", "--target_pp", 4),
            "--pipeline-model-parallel-size 4 continues",
        ),
        (
            "ds_to_universal.py",
            (*into, "x"),
            "ds_to_universal.py: error: a universal checkpoint is not written",
        ),
        ("inspect_checkpoint.py", ("nowhere",), "there is no file nowhere"),
        ("inspect_checkpoint.py", (), "a file of a checkpoint is needed"),
        ("deepspeed_to_megatron.py", (), "the following arguments are required: --input_folder"),
    ):
        assert script(f"convert_checkpoint/{name}", *argv) == 2
        err = capsys.readouterr().err
        assert message in err and "Traceback" not in err
    assert (
        script(
            "convert_checkpoint/deepspeed_to_megatron.py",
            "--input_folder",
            "no",
            "--output_folder",
            "x",
        )
        == 65
    )


def test_the_harness() -> None:
    """Its flags become those of `meshwright evaluate`; --eval_fp32 wins over --fp16.

    bigscience's run_evalharness.sh gives sizes of -1, which are left to the checkpoint.
    """
    script = runpy.run_path(str(TREE / "tasks/eval_harness/evaluate.py"))
    argv = "--load run --task_list piqa,boolq --results_path out.json --fp16 --adaptive_seq_len --bootstrap_iters 2"
    words = script["command"](f"{argv} --micro_bs_multiplier 4".split())
    assert (
        words == "evaluate --harness piqa,boolq --results-path out.json --load run --fp16".split()
    )
    assert "--fp16" not in script["command"]([*argv.split(), "--eval_fp32"])
    sizes = "--num-layers -1 --hidden-size -1 --num-attention-heads -1 --max-position-embeddings -1"
    argv = f"--load run --micro-batch-size 64 --task_list piqa --seq-length 2048 {sizes}"
    words = script["command"]([*argv.split(), "--seq-length", "-1", "--inference", "--deepspeed"])
    assert words[5:] == "--load run --micro-batch-size 64 --seq-length 2048".split() + [
        "--inference",
        "--deepspeed",
    ]
