"""The device that a process takes, what it answers, and that only one file knows the kinds of
accelerator.
"""

import ast
import errno
import os
import platform
import re
import subprocess
import sys
import threading
import types
from pathlib import Path

import numpy as np
import pytest
import torch

import warm
from helpers import TINY_FLAGS
from meshwright.__main__ import main
from meshwright.base import device as devices
from meshwright.base import host
from meshwright.base.errors import USAGE, UserError
from meshwright.data.loader import Loader, LoaderSpec

SOURCE = Path(__file__).parents[2] / "src" / "meshwright"
CPU = torch.device("cpu")


KINDS = ("cuda", "torch_npu", "torch.xpu")
OTHERS = {
    "model_parallel_cuda_manual_seed",  # megatron-core's, which `meshwright bench` compares with
    "share_cuda_visible_devices",  # Ray's
}


def find_kinds(path):
    """Yield where code names a kind of accelerator: in a name or in a string without a space."""
    text = path.read_text()
    if not any(kind in text.lower() for kind in KINDS):
        return
    tree = ast.parse(text)
    prose = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
    for node in ast.walk(tree):
        words = [getattr(node, name, None) for name in ("id", "attr", "arg", "name", "module")]
        if (
            isinstance(node, ast.Constant)
            and id(node) not in prose
            and " " not in str(node.value).strip()
        ):
            words.append(node.value)
        for word in words:
            if (
                isinstance(word, str)
                and "graph" not in word.lower()
                and word not in OTHERS
                and any(kind in word.lower() for kind in KINDS)
            ):
                yield f"{path.relative_to(SOURCE)}:{node.lineno}: {word}"


def test_one_file_names_the_kinds_of_accelerator():
    """Others hold what CUDA alone has: graphs (whose name and flag are allowed everywhere), waits
    of streams, and kernels that start before the ones before them end. Old pickles name its module.
    """
    others = (
        "runtime/cuda_graphs.py",
        "parallel/barrier.py",
        "kernels/triton/decode.py",
        "checkpoint/pickle/child.py",
    )
    those = [SOURCE / name for name in ("base/device.py", *others)]
    found = [x for path in SOURCE.rglob("*.py") if path not in those for x in find_kinds(path)]
    assert not found, "\n".join(found)
    assert len(list(find_kinds(SOURCE / "base/device.py"))) > 5  # the search itself works


@pytest.fixture
def machine(monkeypatch):
    """Return a function that lets torch see `count` devices of a kind.

    It returns the devices that were made current, with their threads.
    """
    used = []

    def arrange(kind, count):
        there = torch.device(kind) if kind else None
        monkeypatch.setattr(
            torch.accelerator, "current_accelerator", lambda check_available=False: there
        )
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: there is not None)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
        monkeypatch.setattr(
            torch.accelerator, "set_device_index", lambda d: used.append((d, threading.get_ident()))
        )
        return used

    return arrange


def test_without_an_accelerator(machine):
    machine(None, 0)
    assert (
        devices.open_device("auto")
        == devices.open_device("cpu", 3)
        == devices.open_device("cpu:0")
        == CPU
    )
    assert devices.count_accelerators() == 0
    for wanted, words in (
        ("cuda", "device cuda: torch sees no GPU (nvidia-smi shows"),
        ("cuda:1", "device cuda:1: torch sees no GPU (nvidia-smi shows"),
        ("xpu", "device xpu: torch sees no such device (xpu-smi discovery shows"),
        ("npu", "device npu: torch_npu is not installed; with Ascend's driver and CANN in place"),
        ("bogus", "device bogus: torch sees no such device"),
    ):
        with pytest.raises(UserError) as error:
            devices.open_device(wanted)
        assert str(error.value).startswith(words)


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_each_process_takes_its_own(machine, kind):
    used = machine(kind, 4)
    assert (
        devices.open_device("auto", 3)
        == devices.open_device(kind, 3)
        == devices.open_device(f"{kind}:3")
        == torch.device(kind, 3)
    )
    with pytest.raises(
        UserError, match=f"device {kind}:3 names one device, but this is process 1 of several"
    ):
        devices.open_device(f"{kind}:3", 1)
    assert [d for d, _ in used] == [torch.device(kind, 3)] * 3
    assert devices.open_device(kind) == torch.device(kind, 0)
    assert (
        devices.open_device("cpu", 3) == CPU
        and len(used) == 4
        and devices.count_accelerators() == 4
    )


def test_triton_may_fuse_products_and_sums(machine, monkeypatch):
    """Triton 3.9 warns if nothing says whether it may."""
    name, value = devices.FUSED_MULTIPLY_ADD
    monkeypatch.delenv(name, raising=False)
    machine("cuda", 1)
    devices.open_device("auto")
    assert os.environ[name] == value
    monkeypatch.setenv(name, "0")
    devices.open_device("auto")
    assert os.environ[name] == "0"


def test_too_many_processes_and_another_kind(machine):
    machine("cuda", 2)
    with pytest.raises(
        UserError,
        match=r"process 2 .* wants cuda:2, but torch sees 2 .* CUDA_VISIBLE_DEVICES hides some",
    ):
        devices.open_device("auto", 2)
    with pytest.raises(
        UserError, match=r"process 0 .* wants cuda:7, but torch sees 2 .*--nproc-per-node 2"
    ):
        devices.open_device("cuda:7")
    with pytest.raises(UserError, match=r"device xpu: torch sees cuda devices"):
        devices.open_device("xpu")
    machine("mtia", 1)  # a kind without an entry in the tables
    assert devices.open_device("auto") == torch.device("mtia", 0)
    with pytest.raises(UserError, match=r"start at most 1 here \(--nproc-per-node 1\)$"):
        devices.open_device("mtia", 1)


def test_a_dry_run_says_that_this_machine_cannot_run_it(machine, monkeypatch, capsys):
    """Its last lines, with status 0: the run may be meant for another machine."""

    def last_lines(*flags):
        assert main(["train", *TINY_FLAGS, "--global-batch-size=16", "--dry-run", *flags]) == 0
        return capsys.readouterr().out.splitlines()[-3:]

    machine(None, 0)
    plan, missing, _ = last_lines("--device=cuda")
    assert (
        missing.startswith("this machine cannot run it: device cuda: torch sees no GPU")
        and "CPU" not in plan
    )
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(devices, "ask_nvidia_smi", lambda *words: "0\n1\n")
    few = "this machine cannot run it: it has 2 devices for 8 ranks; start some on other machines, or take fewer"
    assert last_lines("--device=auto", "--world-size=8")[1] == few
    assert "cannot run" not in "".join(last_lines("--device=auto", "--world-size=2"))
    used = machine("cuda", 2)
    assert last_lines("--device=cuda", "--world-size=8")[1] == few and not used
    assert "wants cuda:7, but torch sees 2" in last_lines("--device=cuda:7")[1]
    launched = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "8",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "first",
    }
    # two ranks on each of four machines
    for name, value in (launched | {"MASTER_PORT": "29500"}).items():
        monkeypatch.setenv(name, value)
    assert "cannot run" not in "".join(last_lines("--device=auto"))


def test_apples_gpu_is_not_used(machine):
    machine("mps", 1)
    assert (
        devices.open_device("auto") == CPU
        and devices.count_accelerators() == 0
        and devices.list_accelerators() == []
    )
    assert devices.unfit_accelerator() == "Apple's GPU"
    with pytest.raises(UserError, match="device mps: .* give cpu"):
        devices.open_device("mps")
    machine(None, 0)
    assert devices.unfit_accelerator() is None


def test_a_process_that_sees_only_its_own_device(machine, monkeypatch):
    """srun shows devices so; ranks that share one are refused when they meet."""
    machine("cuda", 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert devices.open_device("auto", 3) == torch.device("cuda", 0)


FAKE_NPU = """
import types, torch
torch.utils.rename_privateuse1_backend("npu")
stats = {"allocated_bytes": {"all": {"peak": 7}}}
torch._register_device_module("npu", types.SimpleNamespace(
    is_available=lambda: True, device_count=lambda: 2, get_device_name=lambda d: f"Ascend {d.index}",
    memory_stats_as_nested_dict=lambda d: stats, memory_stats=lambda d: {"allocated_bytes.all.peak": 7},
    get_device_properties=lambda d: types.SimpleNamespace(total_memory=64), mem_get_info=lambda d: (5, 64),
    memory_reserved=lambda d: 3, empty_cache=lambda: done.append("empty"), manual_seed=lambda n: done.append(n),
    reset_peak_memory_stats=lambda d: done.append("reset")))
a, done = torch.accelerator, []
a.current_accelerator = lambda check_available=False: torch.device("npu")
a.set_device_index = a.synchronize = lambda d: done.append(str(d))
"""
USE_NPU = """
import torch
from torch.profiler import ProfilerActivity
from meshwright.base import device as devices
from meshwright.base.errors import USAGE, UserError
npu = devices.open_device("npu", 1)
import torch_npu
assert npu == devices.open_device("auto", 1) == devices.open_device("npu:1") == torch.device("npu", 1)
assert devices.count_accelerators() == 2
assert torch_npu.done == ["npu:1"] * 3 and devices.is_accelerator(npu) and not devices.has_kernels(npu)
del torch_npu.done[:]
devices.synchronize(npu); devices.seed_generator(npu, 5); devices.reset_memory(npu); devices.set_current(npu)
assert torch_npu.done == ["npu:1", 5, "empty", "reset", "npu:1"]
assert (devices.device_name(npu), devices.total_memory(npu), devices.free_memory(npu)) == ("Ascend 1", 64, 8)
assert devices.peak_memory(npu) == 7 and devices.memory_stats(npu) == {"allocated_bytes.all.peak": 7}
assert devices.profiler_activities(npu) == [ProfilerActivity.CPU, ProfilerActivity.PrivateUse1]
try:
    devices.open_device("npu", 2)
except UserError as e:
    assert "npu:2, but torch sees 2 of them" in str(e) and "ASCEND_RT_VISIBLE_DEVICES" in str(e), e
else:
    raise AssertionError
"""


def with_torch_npu(folder, package, program):
    (folder / "torch_npu.py").write_text(package)
    (folder / "program.py").write_text(program)
    path = os.pathsep.join([str(folder), str(SOURCE.parent)])
    done = subprocess.run(
        [warm.programs() / "python", folder / "program.py"],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stderr


@pytest.mark.whole
def test_ascend_through_torch_npu(tmp_path):
    """With a package of that name torch knows a kind "npu"; its module answers every question."""
    assert with_torch_npu(tmp_path, FAKE_NPU, USE_NPU) == (0, "")


@pytest.mark.parametrize(
    "error",
    ["ImportError('libascend_hal.so: no such file')", "RuntimeError('two accelerators\\nmore')"],
)
def test_a_torch_npu_that_does_not_load(monkeypatch, tmp_path, error):
    (tmp_path / "torch_npu.py").write_text(f"raise {error}")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        UserError,
        match=r"^device npu: torch_npu does not load: (libascend_hal.so: no such file|two acc\w+)$",
    ):
        devices.open_device("npu")
    assert "torch_npu" not in sys.modules


def test_a_cpu_answers_every_question():
    assert re.fullmatch(rf"cpu, {torch.get_num_threads()} threads?", devices.device_name(CPU))
    assert devices.peak_memory(CPU) is None and devices.memory_stats(CPU) == {}
    assert devices.profiler_activities(CPU) == [torch.profiler.ProfilerActivity.CPU]
    assert not devices.is_accelerator(CPU) and not devices.has_kernels(CPU)
    devices.synchronize(CPU)
    devices.synchronize(None)
    devices.set_current(CPU)
    devices.set_current(None)
    devices.seed_generator(CPU, 5)
    drawn = torch.rand(3)
    assert torch.equal(drawn, torch.rand(3, generator=torch.Generator().manual_seed(5)))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_products_have_their_memory_before_activations_do():
    device, dtype = torch.device("cuda"), torch.bfloat16
    torch._C._cuda_clearCublasWorkspaces()
    devices.reserve_workspaces(device, dtype)
    before = torch.cuda.memory_allocated()
    x = torch.ones(512, 512, dtype=dtype, device=device, requires_grad=True)
    (x @ x).sum().backward()
    del x
    assert torch.cuda.memory_allocated() == before


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_a_cpu_keeps_freed_memory():
    """The system clears at most half of the pages of tensors that come and go.

    Otherwise it clears all of them. Where the heap begins is drawn for each process, and a block
    may not fit where one was freed, so the best of three counts.
    """
    code = (
        "import resource, torch; from meshwright.base import device\n"
        "def fill(): return [torch.ones(2**20 * n) for n in (4, 4, 4, 4, 40)]\n"
        "def cleared(): return resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "device.open_device('cpu'); fill(); before = cleared()\n"
        "for _ in range(5): fill()\n"
        "print((cleared() - before) * resource.getpagesize() / (5 * 4 * 2**20 * 56))"
    )

    def share() -> float:
        words = [sys.executable, "-c", code]
        return float(subprocess.run(words, capture_output=True, text=True, check=True).stdout)

    assert any(share() < 0.5 for _ in range(3))


@pytest.mark.parametrize("files", host.CGROUP_FILES, ids=["version 2", "version 1"])
def test_container_memory_excludes_cached_files(tmp_path, monkeypatch, files):
    """Data in memory-mapped files fills the page cache.

    Neither the micro-batch nor background saves may suffer.
    """
    monkeypatch.setattr(host, "CGROUP", tmp_path)
    physical = devices.total_memory(CPU)
    assert host.container_memory() == (None, 0) and 2**20 < devices.free_memory(CPU) <= physical
    limit, used, stat = (tmp_path / name for name in files)
    limit.parent.mkdir(exist_ok=True)
    stat.write_text("anon 5\ninactive_file 300\nactive_file 200\n")
    used.write_text("1500\n")
    limit.write_text("4000\n")
    assert (
        devices.total_memory(CPU) == 4000
        and devices.free_memory(CPU) == host.free_host_memory() == 3000
    )
    limit.write_text(f"{physical * 2}\n")
    assert devices.total_memory(CPU) == physical and devices.free_memory(CPU) <= physical
    limit.write_text("max\n")
    assert host.container_memory()[0] is None and devices.total_memory(CPU) == physical


def test_free_memory_without_proc_is_half_of_all(monkeypatch):
    def refuse(*args):
        raise FileNotFoundError

    monkeypatch.setattr("builtins.open", refuse)
    monkeypatch.setattr(host, "container_memory", lambda: (None, 0))
    assert devices.free_memory(CPU) == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def test_kernels_and_profiles_by_kind():
    assert devices.has_kernels(torch.device("cuda", 1)) and not devices.has_kernels(
        torch.device("xpu")
    )
    kinds = torch.profiler.ProfilerActivity
    assert devices.profiler_activities(torch.device("cuda")) == [kinds.CPU, kinds.CUDA]
    assert devices.profiler_activities(torch.device("xpu")) == [kinds.CPU, kinds.XPU]


def test_out_of_memory_in_every_wording():
    assert devices.is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert devices.is_out_of_memory(
        RuntimeError("NPU out of memory. Tried to allocate 52.00 MiB (NPU 0; 60.96 GiB")
    )
    assert not devices.is_out_of_memory(RuntimeError("a defect"))


def test_the_reading_thread_works_on_the_same_device(machine, monkeypatch):
    """A new thread starts on device 0, where copies and pinned memory would go."""

    class Numbers:
        def __len__(self):
            return 100

        def __getitem__(self, k):
            return np.arange(9)

        def locate(self, k, column):
            return "here"

    used = machine("cuda", 4)
    monkeypatch.setattr("meshwright.data.loader.Batch.pin", lambda batch: batch)
    batches = iter(
        Loader(
            Numbers(),
            LoaderSpec(2, lambda consumed: 2, 9, workers=2, device=torch.device("cuda", 3)),
        )
    )
    next(batches)
    batches.close()
    (device, thread), *others = used
    assert device == torch.device("cuda", 3) and thread != threading.get_ident() and not others
    next(iter(Loader(Numbers(), LoaderSpec(2, lambda consumed: 2, 9, workers=2, device=CPU))))
    assert len(used) == 1


@pytest.mark.whole
def test_the_log_shows_an_accelerators_memory(monkeypatch, capsys):
    names = ("allocated_bytes.all.current", "allocated_bytes.all.peak")
    names += ("reserved_bytes.all.current", "reserved_bytes.all.peak")
    counts = dict(zip(names, (1, 3, 4, 5), strict=True))
    monkeypatch.setattr(devices, "peak_memory", lambda device: 3 << 30)
    monkeypatch.setattr(
        devices, "memory_stats", lambda device: {name: n << 20 for name, n in counts.items()}
    )
    assert (
        main(["train", *TINY_FLAGS, "--log-interval=1", "--train-iters=2", "--eval-iters=0"]) == 0
    )
    out = capsys.readouterr().out
    assert out.count("| memory (GiB): 3.00 |") == 2
    line = "(after 1 iterations) memory (MB) | allocated: 1.0 | max allocated: 3.0 | reserved: 4.0 | max reserved: 5.0\n"
    assert out.count("[Rank 0]") == out.count(f"[Rank 0] {line}") == 1


# The memory of the host


@pytest.mark.parametrize(
    "error, words",
    [
        (MemoryError(), ""),
        (RuntimeError("can't start new thread"), "can't start new thread"),
        (RuntimeError("std::bad_alloc"), "std::bad_alloc"),
        (RuntimeError("Resource temporarily unavailable"), "Resource temporarily unavailable"),
        (
            ImportError("libtorch_cpu.so: failed to map segment from shared object"),
            "libtorch_cpu.so: failed to map",
        ),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "[Errno 12] Cannot allocate memory"),
        (ValueError("a program's mistake"), None),
        (ImportError("cannot import name 'x'"), None),
        (OSError(errno.ENOSPC, "No space left on device"), None),
    ],
)
@pytest.mark.fault("F19")
def test_the_host_refuses_memory(
    error: Exception,
    words: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Any command ends with one sentence and status 2, also if a later error hides the first."""
    monkeypatch.setattr(host, "address_limit", lambda: 1_000_000_000)
    monkeypatch.setattr(host, "peak_address_space", lambda: 500_000_000)
    limit = "the limit on address space is 1,000,000,000 bytes (ulimit -v)"
    later = ImportError("cannot import name 'y'")
    later.__context__ = error
    for met in (error, later):
        found = host.describe_lack(met)
        assert (
            found is None
            if words is None
            else found is not None and found.startswith(words) and limit in found
        )
    if isinstance(error, ImportError):  # part of a module is missing, and memory is used up
        monkeypatch.setattr(host, "peak_address_space", lambda: 950_000_000)
        assert limit in (host.describe_lack(error) or "")

    def fail(argv: list[str]) -> int:
        raise later

    monkeypatch.setattr("meshwright.cli.presets.main", fail)
    if words is not None:
        assert main(["presets"]) == USAGE
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and "out of memory on this machine: " in err and limit in err


def test_a_limit_below_what_torch_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host.resource, "getrlimit", lambda which: (700_000_000, -1))
    with pytest.raises(
        UserError, match=r"700,000,000 bytes of address space .* torch needs 800,000,000"
    ) as caught:
        devices.open_device("cpu")
    assert caught.value.status == USAGE


@pytest.mark.long
@pytest.mark.parametrize(
    "kilobytes", [300_000, 700_000, 800_000, 850_000, 900_000, 1_000_000, 1_200_000]
)
@pytest.mark.parametrize("words", ["train", "launch --nproc-per-node 2 train"])
@pytest.mark.fault("F19")
def test_limits_on_address_space(kilobytes: int, words: str) -> None:
    """Under every limit a run trains or ends with status 2, and never hangs.

    Measured on a machine with 2 cores, torch 2.13 for CPUs: from 300 MB to 750 MB one sentence,
    status 2, in 1 s; up to 1,300 MB status 2 after 4 to 30 s or, for one rank, 0 or OpenBLAS's own
    sentence with its status 1; from 1,500 MB to 4,000 MB status 0 for one and two ranks.
    """
    script = (
        f"ulimit -v {kilobytes}; exec {sys.executable} -m meshwright {words} {' '.join(TINY_FLAGS)}"
    )
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, timeout=100, env=environ
    )
    is_blas = "OpenBLAS error" in done.stderr
    assert done.returncode in (0, USAGE) or is_blas, done.stderr
    assert "Traceback" not in done.stderr
    if kilobytes < 780_000:
        assert done.returncode == USAGE and done.stderr.count("\n") == 1
    assert done.returncode == 0 or is_blas or "address space" in done.stderr


# The time on the device


def test_marks_of_an_accelerator_are_its_own_events(monkeypatch):
    class Event:
        passed = iter([10.0, 2055.0])

        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = next(self.passed)

        def elapsed_time(self, later):
            return later.at - self.at

    monkeypatch.setattr(devices, "is_accelerator", lambda device: device.type == "cuda")
    monkeypatch.setattr(devices, "_module", lambda device: types.SimpleNamespace(Event=Event))
    first, last = (devices.mark(torch.device("cuda")) for _ in range(2))
    assert devices.seconds_between(first, last) == 2.045
    first, last = (devices.mark(CPU) for _ in range(2))
    assert 0 <= devices.seconds_between(first, last) < 60
