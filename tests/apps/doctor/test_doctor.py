"""What `meshwright doctor` finds on this machine, and on machines with known problems."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from meshwright import __main__ as program
from meshwright.__main__ import main
from meshwright.apps.doctor import facts as doctor
from meshwright.apps.doctor.facts import Fact
from meshwright.base import device as devices
from meshwright.base import host


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_rate", lambda work, wait: (work(), wait(), 10.0)[2])


def found(facts: list[Fact]) -> dict[str, Fact]:
    return {f.name: f for f in facts}


def test_this_machine(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "Training can start here" in out
    assert all(len(line) <= 80 or " pip install " in line for line in out.splitlines())
    for word in (torch.__version__, "GFLOP/s", "GiB free", "MB/s", "Python", "Extras", "Verdict"):
        assert word in out
    assert main(["doctor", "--json"]) == 0
    read = json.loads(capsys.readouterr().out)
    assert read["can_train"] and {f["section"] for f in read["facts"]} == {
        "Program",
        "Compute",
        "Extras",
        "Disk",
    }
    assert not list(tmp_path.iterdir())


def test_a_torch_that_does_not_load(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["doctor"]) == 69
    out = capsys.readouterr().out
    assert "Training cannot start here" in out and "! torch" in out


def test_a_missing_package_is_fatal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "NEEDED", ["numpy", "no_such_package"])
    facts = list(doctor._program())
    assert doctor.is_fatal(facts) and "no_such_package" in doctor.conclude(facts)[1]
    monkeypatch.setattr(doctor, "NEEDED", ["numpy"])
    monkeypatch.setattr(
        "importlib.metadata.requires", lambda name: ["numpy>=2", "no_such_package>=1"]
    )
    facts = list(doctor._program())
    assert not doctor.is_fatal(facts) and found(facts)["packages"].level == "problem"


def test_every_declared_package_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new package of pyproject.toml is needed, or `doctor` says what it brings."""
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lines = project["dependencies"] + [
        f'{line}; extra == "{name}"' for name in extras for line in extras[name]
    ]
    monkeypatch.setattr("importlib.metadata.requires", lambda name: lines)
    declared = doctor.declared_packages()
    assert {name for name, extra in declared.items() if extra} <= set(doctor.BRINGS)
    assert (
        declared["jinja2"] == ""
        and declared["starlette"] == "serve"
        and declared["lm-eval"] == "eval"
    )
    monkeypatch.setattr(doctor, "_is_installed", lambda package: False)
    listed = " ".join(fact.text for fact in doctor._program() if fact.name == "packages")
    for name in declared:
        assert name in doctor.BRINGS or name == "torch" or name in listed, name
    base = {name for name, extra in declared.items() if not extra and name not in doctor.BRINGS}
    assert {doctor.IMPORT_NAMES.get(name, name) for name in base} == program.PACKAGES


def test_versions_outside_the_tested_ones() -> None:
    assert [
        doctor._torch(v, "CPU only").level for v in ("2.10.0", "2.11.0+cpu", "2.15.1", "2.16.0")
    ] == [*("problem", "ok", "ok", "problem")]


class Gpu:
    """A fake accelerator, as `device` answers for it."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        count: int,
        driver: str | None,
        build: str = "CUDA 13.0",
    ):
        there = [torch.device("cuda", n) for n in range(count)]
        answers = {
            "torch_build": lambda: build,
            "list_accelerators": lambda: there,
            "nvidia_driver": lambda: driver,
            "why_no_device": lambda: "The NVIDIA driver on your system is too old",
            "device_name": lambda d: "NVIDIA H200",
            "total_memory": lambda d: 139 << 30,
            "computes_bf16": lambda d: d.index == 0,
        }
        for name, answer in answers.items():
            monkeypatch.setattr(devices, name, answer)
        monkeypatch.setattr(doctor, "_speeds", lambda where: iter(()))


def test_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    Gpu(monkeypatch, 2, "580.1")
    monkeypatch.setattr("shutil.which", lambda name: None)
    facts = list(doctor._compute())
    rows = found(facts)
    assert (
        rows["cuda:0"].text == "NVIDIA H200, 139 GiB, bf16" and "use --fp16" in rows["cuda:1"].text
    )
    assert rows["driver"].text == "580.1" and rows["Triton"].level == "problem"
    assert doctor.conclude(facts)[0] == "Training can start here, on NVIDIA H200."
    assert "Triton" in doctor.conclude(facts)[1]


@pytest.mark.parametrize(
    "build, driver, level, words",
    [
        ("CUDA 13.0", "450.1", "problem", "driver on your system is too old; the driver is 450.1"),
        ("CUDA 13.0", None, "note", "torch is built for CUDA 13.0 but sees no GPU"),
        ("CPU only", "580.1", "problem", "this torch is for CPUs"),
    ],
)
def test_no_gpu_where_one_was_expected(
    monkeypatch: pytest.MonkeyPatch, build: str, driver: str | None, level: str, words: str
) -> None:
    Gpu(monkeypatch, 0, driver, build)
    row = found(list(doctor._compute()))["GPU"]
    assert row.level == level and words in row.text


def test_an_accelerator_that_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    Gpu(monkeypatch, 0, None, "CPU only")
    monkeypatch.setattr(devices, "unfit_accelerator", lambda: "Apple's GPU")
    row = found(list(doctor._compute()))["GPU"]
    assert row.level == "note" and row.text.startswith("Apple's GPU is not used")


def test_limits_of_a_container(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(host, "CGROUP", tmp_path)
    monkeypatch.setattr(host, "cores", lambda: 16)
    (tmp_path / "cpu.max").write_text("200000 100000\n")
    row = found(list(doctor._host()))["CPU"]
    assert row.level == "problem" and "may use 2" in row.text and "OMP_NUM_THREADS=2" in row.text
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert found(list(doctor._host()))["CPU"].level == "ok"
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert doctor._threads(1).level == "note" and doctor._threads(99).level == "problem"
    monkeypatch.setattr(host, "free_host_memory", lambda: 100 << 20)
    assert found(list(doctor._host()))["memory"].level == "problem"


def test_extras_and_the_line_to_type(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "installed_version", lambda package: None)
    rows = found(list(doctor._packages()))
    assert (
        rows["pyarrow"].values["install"]
        == f"{sys.executable} -m pip install -e '{doctor.PROJECT.parent}[data]'"
    )
    assert rows["transformers"].values["install"] == f"{sys.executable} -m pip install transformers"
    monkeypatch.setattr(doctor, "PROJECT", tmp_path / "none")
    monkeypatch.setattr(
        "importlib.metadata.requires", lambda name: ["torch>=2", 'wandb>=0.19; extra == "wandb"']
    )
    assert (
        found(list(doctor._packages()))["wandb"].values["install"]
        == f"{sys.executable} -m pip install 'meshwright[wandb]'"
    )
    verdict = doctor.conclude(list(doctor._packages()))
    at = verdict.index("  # wandb logs to Weights & Biases")  # no comment is broken into a command
    assert verdict[at + 1] == f"  {sys.executable} -m pip install 'meshwright[wandb]'"


def test_file_systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text("a / overlay rw 0 0\nb /data nfs4 rw 0 0\nc /data/my\\040disk ext4 rw 0 0\n")
    assert [
        doctor.file_system(Path(p), mounts)
        for p in ("/home", "/data/x", "/data/my disk/y", "/database")
    ] == [*("overlay", "nfs4", "ext4", "overlay")]
    assert doctor.file_system(tmp_path, tmp_path / "none") == ""
    assert doctor._write_speed(tmp_path / "none").level == "problem"
    monkeypatch.setattr(doctor, "file_system", lambda folder: "nfs4")
    assert "--data-cache-path" in found(list(doctor._storage()))["this folder"].text
