"""What holds for all scripts in compat/."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import runpy
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

from documents import ROOT, environment

COMPAT = ROOT / "compat"
SCRIPTS = sorted(p.relative_to(COMPAT) for p in COMPAT.rglob("*.sh") if not p.is_symlink())
PASS_IT_ON = (
    "megatron-lm/examples",
    "megatron-deepspeed/generate_text.sh",
    "megatron-deepspeed/interactive_text.sh",
)
INNER = (
    "ascend-gpt2/test/train_8p.sh",
    "ascend-gpt2/test/env_npu.sh",
    "oneflow-gpt/tools/prepare_distribute.sh",
)


@pytest.mark.parametrize(
    "script", [s for s in SCRIPTS if not str(s).startswith((*PASS_IT_ON, *INNER))], ids=str
)
def test_help_starts_nothing(script: Path, tmp_path: Path) -> None:
    bare = environment() | {"PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        ["bash", COMPAT / script, "--help"], cwd=tmp_path, env=bare, capture_output=True, text=True
    )
    assert done.returncode == 0 and not done.stderr and ".sh" in done.stdout
    assert not list(tmp_path.iterdir())


def test_shellcheck_finds_nothing() -> None:
    checker = shutil.which("shellcheck", path=environment()["PATH"])
    if checker is None:
        pytest.skip("shellcheck is not installed (the extra `test`)")
    found = subprocess.run(
        [checker, "-S", "warning", *SCRIPTS], cwd=COMPAT, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stdout


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The stand-in for DeepSpeed's launcher, without the machine's hostfile, and without ranks."""
    loader = importlib.machinery.SourceFileLoader(
        "stand_in", str(COMPAT / "megatron-deepspeed/bin/deepspeed")
    )
    spec = importlib.util.spec_from_loader("stand_in", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    loader.exec_module(module)
    monkeypatch.setattr(module, "HOSTFILE", str(tmp_path / "none"))
    monkeypatch.setattr(module, "main", " ".join)
    monkeypatch.setattr("os.environ", os.environ.copy())
    (tmp_path / "hosts").write_text("# all\nworker-0 slots=4\n\nworker-1 slots=4  # second\n")
    monkeypatch.chdir(tmp_path)
    return module


SCRIPT = "pretrain_gpt.py --deepspeed --num-layers 2 -i x"


@pytest.mark.parametrize(
    ("flags", "launched", "devices"),
    [
        ("", "auto --master-port 29500 --nnodes 1 --node-rank 0", None),
        ("--num_gpus 4 --master_port 6001", "4 --master-port 6001 --nnodes 1 --node-rank 0", None),
        ("-i localhost:0,2", "2 --master-port 29500 --nnodes 1 --node-rank 0", "0,2"),
        (
            "--num_nodes 2 --node_rank 1 --master_addr a",
            "auto --master-port 29500 --nnodes 2 --node-rank 1 --master-addr a",
            None,
        ),
        ("-H hosts -i worker-1", "4 --master-port 29500 --nnodes 1 --node-rank 0", "0,1,2,3"),
        ("-H hosts --include worker-1:3", "1 --master-port 29500 --nnodes 1 --node-rank 0", "3"),
        (
            "-H hosts --num_nodes 1 --num_gpus 2",
            "2 --master-port 29500 --nnodes 1 --node-rank 0",
            None,
        ),
        (
            "-H hosts --no_ssh --node_rank 1 -e worker-0:0@worker-1:3",
            "3 --master-port 29500 --nnodes 2 --node-rank 1 --master-addr worker-0",
            "0,1,2",
        ),
    ],
)
def test_a_stand_in_for_deepspeeds_launcher(
    stand_in: ModuleType, flags: str, launched: str, devices: str | None
) -> None:
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    assert (
        stand_in.start([*flags.split(), *SCRIPT.split()])
        == f"launch --nproc-per-node {launched} {SCRIPT}"
    )
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == (devices or before)


def test_it_generates_in_one_process(stand_in: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []
    monkeypatch.setattr("os.execv", lambda _, argv: ran.append(argv[1:]))
    stand_in.start(["tools/generate_samples_gpt.py", "--num-samples", "0"])
    assert ran == [["tools/generate_samples_gpt.py", "--num-samples", "0"]]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            "-i worker-0",
            "worker-0 is not in a hostfile; name it in --hostfile FILE, as `worker-0 slots=8`",
        ),
        ("-H hosts -i worker-7", "worker-7 is not in the hostfile, which has worker-0, worker-1"),
        ("-H hosts -i worker-0:9", "worker-0 has no device 9"),
        ("-H hosts -i worker-0:a", "`worker-0:a` is not HOST or HOST:0,1,...; join several by @"),
        (
            "-H hosts -i worker-0@worker-1:0,2",
            "the same number of devices, not worker-0 4, worker-1 2",
        ),
        ("-H hosts -e worker-0@worker-1", "leaves no device; exclude less"),
        ("-H hosts --num_nodes 3", "the hostfile has 2 machines"),
        ("-H hosts --no_ssh", "--no_ssh needs --node_rank, the number of this machine from 0 to 1"),
        ("-H missing", "--hostfile missing: No such file or directory; write lines `HOST slots=N`"),
        ("-H bad", "line 1: `worker-0` is not HOST slots=N"),
        ("-H binary", "binary is not UTF-8 text; write lines `HOST slots=N` into it"),
        ("-H twice", "line 2: `a slots=1` names a a second time"),
        ("-i a -e b", "--include and --exclude contradict each other"),
        (
            "-i localhost --num_gpus 2",
            "--include and --exclude contradict --num_nodes and --num_gpus",
        ),
        ("--num_nodes 2", "only this machine is known; name them in --hostfile FILE"),
        (
            "--launcher slurm",
            "--launcher slurm is refused: it starts ranks itself: give it `python SCRIPT ...`",
        ),
        ("--num_gpus two", "--num_gpus two is not a whole number"),
        (
            "--elastic_training",
            "--elastic_training is refused; use `meshwright launch --min-ranks N`",
        ),
    ],
)
def test_what_it_refuses(
    stand_in: ModuleType, flags: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("bad").write_text("worker-0\n")
    Path("binary").write_bytes(b"\xff\xfeworker-0 slots=4")
    Path("twice").write_text("a slots=1\na slots=1\n")
    assert stand_in.start([*flags.split(), *SCRIPT.split()]) == 2
    assert words in capsys.readouterr().err


def test_it_starts_the_machines_of_a_hostfile_through_ssh(
    stand_in: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each gets its number, devices, folder and NCCL's variables; a failure ends all."""
    started: list[list[str]] = []

    class Machine:
        def __init__(self, command: list[str], **_: object) -> None:
            started.append(command)
            self.returncode = self.poll() if "worker-1" in command else None
            self.wait = self.terminate = lambda: setattr(self, "returncode", 143)

        def poll(self) -> int | None:
            return 70 if len(started) == 2 else None

    monkeypatch.setattr("subprocess.Popen", Machine)
    monkeypatch.setattr("shutil.which", lambda _: "/usr/bin/ssh")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    Path(".deepspeed_env").write_bytes(b"PLACE=caf\xe9\n")
    flags = "-H hosts -i worker-0:1@worker-1:2 --ssh_port 2222 --launcher pdsh"
    assert stand_in.start([*flags.split(), *SCRIPT.split()]) == 70
    assert [command[:7] for command in started] == [
        ["ssh", "-tt", "-o", "BatchMode=yes", "-p", "2222", f"worker-{n}"] for n in range(2)
    ]
    for node, (device, command) in enumerate(zip("12", started, strict=True)):
        line = command[-1]
        assert line.startswith(f"cd {tmp_path} && env ") and "NCCL_DEBUG=INFO" in line
        assert "PLACE=caf\udce9" in line
        assert f"CUDA_VISIBLE_DEVICES={device} " in line and f"PYTHONPATH={tmp_path}:" in line
        assert (
            f"--nproc-per-node 1 --master-port 29500 --nnodes 2 --node-rank {node} --master-addr worker-0"
            in line
        )
        assert line.endswith(SCRIPT)


@pytest.mark.parametrize(
    "page", ["README.md", "bin/deepspeed", "pretrain_gpt2.sh", "args_deepspeed_gpt.sh"]
)
def test_the_line_that_puts_it_first_in_path_is_said(page: str) -> None:
    assert 'export PATH="$PWD/bin:$PATH"' in (COMPAT / "megatron-deepspeed" / page).read_text()


STARTS_ANEW = (
    "megatron-deepspeed/pretrain_gpt.py",
    "megatron-deepspeed/pretrain_gpt2.py",
    "ascend-gpt2/pretrain_gpt.py",
)


def test_pretraining_of_deepspeed_starts_anew_over_an_earlier_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """--save without --load moves the checkpoints of the run before aside; --load continues it."""
    ran: list[list[str]] = []
    monkeypatch.setattr("meshwright.__main__.main", ran.append)
    for given, more in (
        ("--save a", " --save-overwrite"),
        ("--save=a", " --save-overwrite"),
        ("--save a --load a", ""),
        ("--save a --save-overwrite", ""),
        ("--train-iters 2", ""),
    ):
        for name in STARTS_ANEW:
            monkeypatch.setattr("sys.argv", [name, *given.split()])
            with pytest.raises(SystemExit):
                runpy.run_path(str(COMPAT / name), run_name="__main__")
            assert ran.pop() == ["train", *f"{given}{more}".split()]
