"""Examine a machine: program, devices, packages, disks; and say what follows for training."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import re
import shlex
import shutil
import sys
import tempfile
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from meshwright.base import device as devices
from meshwright.base import host
from meshwright.base.errors import first_line
from meshwright.base.version import (
    PROJECT,
    RANGE,
    TESTED,
    installed_version,
    numbers_of,
    our_version,
)
from meshwright.config.schema import Parallel
from meshwright.runtime.ranks.connect import join_ranks, pick_backend
from meshwright.runtime.ranks.links import Link, measure_links, slow_links, typical_link
from meshwright.runtime.ranks.world import World

GIB = 1 << 30
MIB = 1 << 20
NEEDED = ("numpy", "safetensors", "rich")  # beside torch; no run starts without them
# Packages that come with an extra, or only on common machines, and what each is good for.
BRINGS = {
    "gigatoken": "encodes text about 30 times as fast",
    "numba": "builds the sample indices of large data faster",
    "sentencepiece": "reads tokenizer.model of Llama and others",
    "zstandard": "reads .zst files",
    "pyarrow": "reads Parquet and Arrow tables",
    "nltk": "splits sentences by its models (--sentence-splitter punkt)",
    "starlette": "answers requests (serve) and shows runs (watch)",
    "uvicorn": "serves both",
    "tensorboard": "shows curves while a run goes on",
    "wandb": "logs to Weights & Biases",
    "trackio": "logs to Trackio",
    "lm-eval": "measures known tests (evaluate --harness)",
    "datasets": "reads data sets of the Hugging Face Hub (--input hf://org/name)",
    "obstore": "reads and writes s3:// and gs:// addresses",
    "ray": "starts ranks in a Ray cluster (launch --engine ray)",
    "transformers": "loads exported models",
}
NOT_OF_USERS = ("test", "peers", "engines")  # extras for work on Meshwright itself
IMPORT_NAMES = {"PyYAML": "yaml", "lm-eval": "lm_eval"}
NETWORK = re.compile(r"nfs|cifs|smb|lustre|gpfs|beegfs|ceph|glusterfs|9p|afs|fuse\.|virtiofs")
PIP = re.compile(r"(\S*python\S* -m )?pip install [^;]+")
NAMES = 14  # columns of the names in the table
RATE_SECONDS = 0.4  # in which products are counted


@dataclass(frozen=True)
class Fact:
    """One line of the table; `level` says whether it hinders."""

    section: str
    name: str
    text: str
    level: str = "ok"  # or note, problem, fatal
    values: dict[str, Any] = field(default_factory=dict)  # for --json


def examine() -> list[Fact]:
    """Return all facts, in the order of the table."""
    facts: list[Fact] = []
    for part in (_program, _compute, _packages, _storage):
        facts += part()
    return facts


def is_fatal(facts: list[Fact]) -> bool:
    return any(f.level == "fatal" for f in facts)


def conclude(facts: list[Fact]) -> list[str]:
    """Return the verdict: whether training can start, what to mend, what would be faster."""
    fatal = [f"  {f.name}: {f.text}" for f in facts if f.level == "fatal"]
    if fatal:
        return ["Training cannot start here:", *fatal]
    # The first device in the table is the one that a run takes.
    where = "the CPU"
    for f in facts:
        if "device" in f.values:
            where = f.text.split(",")[0]
            break
    out = [f"Training can start here, on {where}."]
    if bad := [f.name for f in facts if f.level == "problem"]:
        out.append(f"Worth mending, see the lines marked with !: {', '.join(bad)}.")

    # Missing packages by the command of pip that brings them; one may bring several.
    missing: dict[str, list[str]] = {}
    for f in facts:
        if "install" in f.values:
            missing.setdefault(f.values["install"], []).append(f"{f.name} {BRINGS[f.name]}")
    if missing:
        out.append("More with:")
    for command, what in missing.items():
        out += [f"  # {'; '.join(what)}", f"  {command}"]
    return out


def fact_table(facts: list[Fact], verdict: list[str]) -> list[str]:
    """Return the lines for people, within 80 columns but for commands, which are one line each."""
    lines: list[str] = []
    section = ""
    for f in facts:
        if f.section != section:
            section = f.section
            lines += ["", section]
        mark = "!" if f.level in ("problem", "fatal") else " "
        first, *rest = wrap(f.text, 80 - NAMES - 2) or [""]
        lines.append(f"{mark} {f.name:<{NAMES}}{first}")
        lines += [" " * (NAMES + 2) + text for text in rest]
    lines += ["", "Verdict"]
    for text in verdict:
        # A line that is broken keeps its indentation.
        bare = text.lstrip()
        indentation = " " * (len(text) - len(bare) + 2)
        lines += [indentation + line for line in wrap(bare, 80 - len(indentation))]
    return lines[1:]


def wrap(text: str, width: int) -> list[str]:
    """Break a text between words, but not within a command of pip, which readers copy."""
    joined = PIP.sub(lambda command: command[0].replace(" ", "\0"), text)
    lines = textwrap.wrap(joined, width, break_long_words=False, break_on_hyphens=False)
    return [line.replace("\0", " ") for line in lines]


def as_dict(facts: list[Fact], verdict: list[str]) -> dict[str, Any]:
    return {
        "can_train": not is_fatal(facts),
        "verdict": verdict,
        "facts": [asdict(f) for f in facts],
    }


# The program


def _program() -> Iterator[Fact]:
    is_clone = PROJECT.is_file()
    version = our_version()
    folder = Path(__file__).parents[2]
    how = "a clone" if is_clone else "installed"
    text = f"{version}, {how} in {folder}"
    yield Fact("Program", "meshwright", text, values={"version": version})

    # Python, which is older only where someone has forced the installation.
    python = platform.python_version()
    old = sys.version_info < (3, 10)
    text = f"{python}, {sys.executable}" + ("; 3.10 or later is needed" if old else "")
    yield Fact("Program", "Python", text, "fatal" if old else "ok", {"version": python})
    text = f"{platform.system()} {platform.release()}, {platform.machine()}"
    yield Fact("Program", "platform", text)

    # Packages of the base installation: nothing starts without some; others serve some commands.
    base = [name for name, extra in declared_packages().items() if not extra]
    others = sorted(set(base).difference(NEEDED, BRINGS, ["torch"]))
    how = "pip install ." if is_clone else "pip install --force-reinstall meshwright"
    for names, why, level in (
        (NEEDED, "", "fatal"),
        (others, ", which some commands import", "problem"),
    ):
        missing = ", ".join(name for name in names if not _is_installed(name))
        if missing:
            text = f"missing: {missing}{why}; {how}"
            yield Fact("Program", "packages", text, level)


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(IMPORT_NAMES.get(package, package)) is not None


def declared_packages() -> dict[str, str]:
    """Return package -> extra that installs it, empty for the base installation."""
    from importlib.metadata import PackageNotFoundError, requires

    requirements: list[str] = []
    with contextlib.suppress(PackageNotFoundError):
        requirements = requires("meshwright") or []
    out: dict[str, str] = {}
    for line in requirements:
        name = re.match(r"[\w-]+", line)
        if "python_version" in line:  # what later versions of Python have themselves
            continue
        extra = re.search(r"extra == ['\"](\w+)['\"]", line)
        if name and name[0] != "meshwright" and (extra is None or extra[1] not in NOT_OF_USERS):
            out.setdefault(name[0], extra[1] if extra else "")
    return out


# Devices


def _compute() -> Iterator[Fact]:
    yield from _host()
    try:
        import torch

        kind = devices.torch_build()
        found = devices.list_accelerators()
    except Exception as error:  # not installed, or a library of it does not load
        reason = first_line(error)
        yield Fact("Compute", "torch", f"does not load: {reason}; pip install {RANGE!r}", "fatal")
        return
    yield _torch(torch.__version__, kind)
    yield _threads(torch.get_num_threads())
    for device in found:
        yield _accelerator(device)

    # Driver and torch must fit each other.
    driver = devices.nvidia_driver()
    if found:
        if driver:
            yield Fact("Compute", "driver", driver, values={"driver": driver})
    elif kind != "CPU only":
        reason = devices.why_no_device()
        text = f"torch is built for {kind} but sees no GPU: {reason}"
        if driver is not None and "driver" in reason:
            text += f"; the driver is {driver}, a newer one helps, or a torch for an older {kind.split()[0]}"
        yield Fact("Compute", "GPU", text, "problem" if driver else "note")
    elif driver:
        text = f"driver {driver} is there, but this torch is for CPUs; install one for it"
        yield Fact("Compute", "GPU", text, "problem")
    if unfit := devices.unfit_accelerator():
        text = f"{unfit} is not used: Meshwright computes on the CPU here"
        yield Fact("Compute", "GPU", text, "note")
    if found and devices.has_kernels(found[0]):
        yield from _compilers()
    yield from _speeds([*found[:1], torch.device("cpu")])


def _host() -> Iterator[Fact]:
    # Cores, of which a container may have fewer, or a share of their time.
    cores = host.cores()
    all_cores = os.cpu_count() or 1
    quota = host.cpu_quota()
    limits = []
    if cores < all_cores:
        limits.append(f"of {all_cores}")
    if quota is not None and quota < cores:
        limits.append(f"the container may use {quota:g}")
    text = f"{cores} core{'s' * (cores != 1)}"
    if limits:
        text += f" ({', '.join(limits)})"
    level = "ok"
    if quota is not None and quota < cores / 2:
        level = "problem"
        text += f"; set OMP_NUM_THREADS={max(1, int(quota))}"
    yield Fact("Compute", "CPU", text, level, {"cores": cores, "quota": quota})

    # Memory, of which a container may have less.
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = host.container_memory()[0]
    total = min(physical, limit or physical)
    free = host.free_host_memory()
    text = f"{total / GIB:.1f} GiB"
    if total < physical:
        text += " for this container"
    text += f", {free / GIB:.1f} GiB free"
    level = "ok"
    if free < GIB:
        level = "problem"
        text += "; a small model needs about 1 GiB"
    yield Fact("Compute", "memory", text, level, {"total": total, "free": free})


def _torch(version: str, kind: str) -> Fact:
    numbers = numbers_of(version)
    text = f"{version}, for CPUs"
    if kind != "CPU only":
        text = f"{version}, built for {kind}"
    level = "ok"
    if not TESTED[0] <= numbers <= TESTED[1]:
        level = "problem"
        first, last = ("{}.{}".format(*v) for v in TESTED)
        text += f"; Meshwright is tested with {first} to {last}"
    return Fact("Compute", "torch", text, level, {"version": version, "build": kind})


def _threads(threads: int) -> Fact:
    said = os.environ.get("OMP_NUM_THREADS")
    cores = host.cores()
    text = f"{threads} of torch" + (f" (OMP_NUM_THREADS={said})" if said else "")
    level = "ok"
    if threads > cores:
        level = "problem"
        text += f", more than {cores} cores; unset OMP_NUM_THREADS"
    elif said and threads < cores / 2:
        level = "note"
        text += f", fewer than {cores} cores; unset it for one process"
    return Fact("Compute", "threads", text, level)


def _accelerator(device: Any) -> Fact:
    memory = devices.total_memory(device)
    bf16 = devices.computes_bf16(device)
    text = f"{devices.device_name(device)}, {memory / GIB:.0f} GiB" + (
        ", bf16" if bf16 else "; no bf16, use --fp16"
    )
    return Fact(
        "Compute", str(device), text, values={"device": str(device), "memory": memory, "bf16": bf16}
    )


def _compilers() -> Iterator[Fact]:
    if importlib.util.find_spec("triton") is None:
        text = "missing: fused kernels and torch.compile do not run; pip install triton"
        yield Fact("Compute", "Triton", text, "problem")
        return
    # Triton compiles its launchers with the first of these that is there.
    compiler = next(
        (c for c in (os.environ.get("CC"), "gcc", "clang", "cc") if c and shutil.which(c)), None
    )
    if compiler is None:
        text = f"{installed_version('triton')}, but no C compiler, which it needs at run time; install gcc"
        yield Fact("Compute", "Triton", text, "problem")
    else:
        yield Fact("Compute", "Triton", f"{installed_version('triton')}, C compiler {compiler}")


def _speeds(where: list[Any]) -> Iterator[Fact]:
    """Multiply matrices for half a second on each device."""
    import torch

    for device in where:
        is_cpu = device.type == "cpu"
        size, dtype = (1024, torch.float32) if is_cpu else (8192, torch.bfloat16)
        name = f"{str(dtype).removeprefix('torch.')} products on {device}"
        try:
            a = torch.ones(size, size, dtype=dtype, device=device)
            speed = 2 * size**3 * _rate(lambda a=a: a @ a, lambda d=device: devices.synchronize(d))  # type: ignore[misc]
        except Exception as error:
            reason = first_line(error)
            yield Fact(
                "Compute", "speed", f"{name} fail: {reason}", "fatal" if is_cpu else "problem"
            )
            continue
        shown = f"{speed / 1e12:,.0f} TFLOP/s" if speed > 1e13 else f"{speed / 1e9:,.0f} GFLOP/s"
        yield Fact("Compute", "speed", f"{shown} measured, {name}", values={"flops": round(speed)})


def _rate(work: Callable[[], Any], wait: Callable[[], Any]) -> float:
    """Return how often a second `work` ends."""
    work()
    wait()
    begin = time.perf_counter()
    count = 0
    while time.perf_counter() - begin < RATE_SECONDS:
        work()
        count += 1
        wait()
    return count / (time.perf_counter() - begin)


# Links between ranks


def examine_links(world: World) -> list[Fact]:
    """Measure the links between the ranks of a launcher, all of which call this."""
    if world.size == 1:
        return []
    import torch.distributed as dist

    device = devices.open_device("auto", world.local_rank)
    team = join_ranks(world, pick_backend(Parallel(), device, prints=False), device=device)
    try:
        hosts = team.gather(platform.node())
        links = measure_links(team, device)
    finally:
        dist.destroy_process_group()
    return list(describe_links(links, hosts, device.type))


def describe_links(links: list[Link], hosts: list[str], kind: str) -> Iterator[Fact]:
    """Yield a line for each rank with its links to later ones, and one for those that are slow."""
    several = len(set(hosts)) > 1
    yield Fact(
        "Links",
        "measured",
        f"messages between two ranks on {kind}: time of one number, speed of many",
    )
    for rank in sorted({link.a for link in links}):
        own = [link for link in links if link.a == rank]
        name = f"rank {rank}" + (f" {hosts[rank]}" if several else "")
        values = {"links": [asdict(link) for link in own], "host": hosts[rank]}
        yield Fact(
            "Links",
            name[: NAMES - 1],
            "; ".join(f"to {link.b}: {link}" for link in own),
            values=values,
        )
    slow = slow_links(links)
    if slow:
        shown = [
            f"{link.a} ({hosts[link.a]}) and {link.b} ({hosts[link.b]}): {link}"
            for link in slow[:3]
        ]
        more = f"; and {len(slow) - 3} more" if len(slow) > 3 else ""
        # A rank that many slow links share is likelier the cause than each of the links.
        counts = Counter(rank for link in slow for rank in (link.a, link.b))
        rank, count = counts.most_common(1)[0]
        common = f"; rank {rank} is in {count} of {len(slow)} slow links" if count > 1 else ""
        text = f"between ranks {'; '.join(shown)}{more}; most links: {typical_link(links)}{common}"
        yield Fact("Links", "slow", text, "problem", {"slow": [[link.a, link.b] for link in slow]})


# Packages


def _packages() -> Iterator[Fact]:
    extras = declared_packages()
    for package, brings in BRINGS.items():
        version = installed_version(package)
        if version:
            yield Fact("Extras", package, version, values={"version": version})
            continue
        # A package of an extra comes with it, in a version that is new enough.
        wanted = [package]
        if extra := extras.get(package):
            is_clone = PROJECT.is_file()
            wanted = ["-e", f"{PROJECT.parent}[{extra}]"] if is_clone else [f"meshwright[{extra}]"]
        line = shlex.join([sys.executable, "-m", "pip", "install", *wanted])
        yield Fact("Extras", package, f"not installed; {brings}", "note", {"install": line})


# Disks and limits


def _storage() -> Iterator[Fact]:
    folders = {"this folder": Path.cwd()}
    try:
        folders["temporary"] = Path(tempfile.gettempdir())
    except OSError:  # it tries to write in each
        yield Fact(
            "Disk",
            "temporary",
            "no folder for temporary files can be written to; set TMPDIR",
            "problem",
        )
    for name, folder in folders.items():
        kind = file_system(folder)
        free = shutil.disk_usage(folder).free
        text = f"{free / GIB:,.1f} GiB free" + (f", {kind}" if kind else "")
        if kind == "overlay":
            text += " (a container's own disk: it goes with the container)"
        elif NETWORK.match(kind):
            text += " (on a network: put --data-cache-path on a local disk)"
        level = "ok"
        if free < 2 * GIB:
            level = "problem"
            if name == "this folder":
                text += "; checkpoints need three times the model's size"
        yield Fact("Disk", name, text, level, {"free": free, "file_system": kind})
    yield _write_speed(Path.cwd())
    with contextlib.suppress(ImportError, ValueError):
        import resource

        # The hard limit, up to which a run raises its own.
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        text = f"up to {hard:,}"
        level = "ok"
        if hard == resource.RLIM_INFINITY:
            text = "no limit"
        elif hard < 4096:
            level = "problem"
            text += "; blends of many files need more, see `ulimit -Hn`"
        yield Fact("Disk", "open files", text, level, {"limit": hard})
    with contextlib.suppress(OSError):
        size = shutil.disk_usage("/dev/shm").total
        text = f"{size / GIB:.1f} GiB"
        level = "ok"
        if size < 256 * MIB:  # a container's default is 64
            level = "note"
            text += "; several GPUs exchange data there: start the container with --shm-size=1g"
        yield Fact("Disk", "/dev/shm", text, level, {"size": size})


def _write_speed(folder: Path) -> Fact:
    block = os.urandom(MIB)
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".meshwright-doctor-") as file:
            begin = time.perf_counter()
            for _ in range(32):
                file.write(block)
            file.flush()
            # Until it is on the disk, as a checkpoint is before it counts.
            os.fsync(file.fileno())
            speed = 32 * MIB / (time.perf_counter() - begin)
    except OSError as error:
        return Fact(
            "Disk",
            "writing",
            f"{folder}: {error.strerror}; runs need a folder to save to",
            "problem",
        )
    return Fact(
        "Disk",
        "writing",
        f"{speed / 1e6:,.0f} MB/s measured in this folder",
        values={"speed": round(speed)},
    )


def file_system(folder: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """Return the type of the file system that holds a folder; empty if unknown."""
    best, kind = "", ""
    with contextlib.suppress(OSError):
        for line in mounts.read_text(encoding="utf-8", errors="replace").splitlines():
            _, place, found, *_ = line.split()
            place = place.replace("\\040", " ")
            # The longest path is the innermost mount; of two at one place the later one hides the
            # other.
            if len(place) >= len(best) and (folder / "x").is_relative_to(place):
                best = place
                kind = found
    return kind
