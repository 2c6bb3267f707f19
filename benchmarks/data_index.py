"""Building and opening indices beside megatron-core's own data set package, each in a process of
its own.

usage: python benchmarks/data_index.py FOLDER [--samples 1e6 1e7 1e8] [--blend 2 10] [--open 1e8]
[--huge] [--rounds 1]

A corpus of two documents a sample at --seq-length 2048 is made for each size: an index, and a .bin
of holes (no token is read here). "whole build": from opened files to the three arrays on the disk,
ready to be read. Peers: megatron-core (importable, `pip install --no-deps megatron-core`),
Meshwright on numpy alone, Meshwright with numba. Imports are not in the times; the seconds that
numba's import and the loading of its compiled loops take stand beside them.

--huge: 1e9 samples over 1e7 documents, ours alone. --open: a data set of so many documents. FOLDER
needs 60 bytes for each document, which are removed at the end.

Memory is the highest that this process saw in /proc of the other one, every 20 ms: anonymous, and
resident in all (with pages of files, which the system takes back when it needs them), less what
was resident before the build began.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

SEQ = 2048
SOURCE = Path(__file__).parents[1] / "src"


def corpus(prefix: Path, documents: int, mean: int) -> None:
    """Token files of lengths drawn around `mean`, block by block."""
    from meshwright.data.files.indexed import HEADER, MAGIC

    rng, block = np.random.default_rng(1), 1 << 22
    with open(f"{prefix}.idx", "wb") as idx:
        idx.write(HEADER.pack(MAGIC, 1, 8, documents, documents + 1))
        position, begin = 0, HEADER.size
        for first in range(0, documents, block):
            n = min(block, documents - first)
            sizes = rng.integers(mean // 2, mean + mean // 2 + 1, n).astype("<i4")
            ends = position + 2 * np.cumsum(sizes, dtype="<i8")
            idx.seek(begin + 4 * first)
            idx.write(sizes)
            idx.seek(begin + 4 * documents + 8 * first)
            idx.write(ends - 2 * sizes)
            idx.seek(begin + 12 * documents + 8 * first)
            idx.write(np.arange(first, first + n, dtype="<i8"))
            position = int(ends[-1])
        idx.write(np.array([documents], "<i8"))
    with open(f"{prefix}.bin", "wb") as tokens:
        tokens.truncate(position)


# These run in a process of their own. Each returns its figures, and prints "begin" and "end"
# around what counts.


def ours(prefix: Path, cache: Path, samples: int, fast: bool) -> dict[str, Any]:
    from meshwright.base import console
    from meshwright.data import samples as module
    from meshwright.data.files.indexed import Indexed
    from meshwright.data.loader import Samples

    console.set_stream(None)
    start = time.perf_counter()
    module.LARGE = 0 if fast else sys.maxsize
    if fast:
        little = np.array([5, 3, 9] * 9, np.int32)
        # loads what numba has compiled
        module.build_indices(little, range(27), int(little.sum()), 20, 4, 1, 0.8)
    loaded, indexed = time.perf_counter() - start, Indexed(prefix)
    with counted() as spent:
        made = Samples(indexed, range(len(indexed)), samples, SEQ, 1234, cache_dir=cache)
    return {
        **spent,
        "load": loaded,
        "samples": len(made),
        "sum": digest(made.doc_idx, made.sample_idx, made.shuffle_idx),
    }


def megatron(prefix: Path, cache: Path, samples: int) -> dict[str, Any]:
    from megatron.core.datasets import gpt_dataset
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.datasets.utils import Split

    class Words:
        unique_identifiers: dict[str, str] = {}
        pad = eod = 0
        vocab_size = 50257

    settings = gpt_dataset.GPTDatasetConfig(
        random_seed=1234,
        sequence_length=SEQ,
        path_to_cache=str(cache),
        tokenizer=Words(),
        split="1",
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
    indexed = IndexedDataset(str(prefix), mmap=True)
    from megatron.core.datasets import helpers  # noqa: F401  compiled, loaded before the clock runs

    with counted() as spent:
        documents = np.arange(len(indexed), dtype=np.int32)
        made = gpt_dataset.GPTDataset(
            indexed, str(prefix), documents, samples, Split.train, settings
        )
    return {
        **spent,
        "load": 0.0,
        "samples": len(made),
        "sum": digest(made.document_index, made.sample_index, made.shuffle_index),
    }


def blend(sources: int, samples: int, peer: str) -> dict[str, Any]:
    shares = np.random.default_rng(3).random(sources)
    shares /= shares.sum()
    if peer == "megatron-core":
        from megatron.core.datasets import helpers

        with counted() as spent:
            which, number = np.zeros(samples, np.int16), np.zeros(samples, np.int64)
            helpers.build_blending_indices(which, number, shares, sources, samples, False)
    else:
        from meshwright.data import blend as module
        from meshwright.data import samples as settings

        settings.LARGE = 0 if peer == "fast" else sys.maxsize
        module.order(shares, 10)
        with counted() as spent:
            which, number = module.order(shares, samples)
    return {**spent, "load": 0.0, "samples": samples, "sum": digest(which, number)}


def opened(prefix: Path) -> dict[str, Any]:
    from meshwright.data.files.indexed import Indexed

    before = status(os.getpid())
    with counted() as spent:
        indexed = Indexed(prefix)
    after = status(os.getpid())  # too soon over to be watched
    used = {
        "anonymous": after["RssAnon"] - before["RssAnon"],
        "resident": after["VmRSS"] - before["VmRSS"],
    }
    used["all"] = after["VmRSS"]
    return {
        **spent,
        "load": 0.0,
        "samples": len(indexed),
        "sum": "",
        **{name: n / 1e6 for name, n in used.items()},
    }


class counted:
    """Seconds of clock and processor, reported to the process that watches the memory."""

    def __enter__(self) -> dict[str, float]:
        print("begin", flush=True)
        sys.stdin.readline()  # it has read what is resident before
        self.spent: dict[str, float] = {}
        self.wall, self.cpu = time.perf_counter(), time.process_time()
        return self.spent

    def __exit__(self, *_: object) -> None:
        self.spent |= {
            "wall": time.perf_counter() - self.wall,
            "cpu": time.process_time() - self.cpu,
        }
        print("end", flush=True)


def digest(*arrays: Any) -> str:
    """Return sums that depend on every element, quickly computed."""
    out = []
    for x in arrays:
        flat, total = x.reshape(-1), 0
        for k in range(0, len(flat), 1 << 22):
            part = flat[k : k + (1 << 22)].astype(np.uint64)
            total += int(
                (part * (np.arange(k, k + len(part), dtype=np.uint64) | np.uint64(1))).sum(
                    dtype=np.uint64
                )
            )
        out.append(f"{total % 2**64:x}")
    return "-".join(out)


# The process that starts and watches them.


def run(arguments: list[str]) -> dict[str, Any]:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-W", "ignore", __file__, *arguments]
    child = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    )
    assert child.stdout and child.stdin
    while (line := child.stdout.readline()) != "begin\n":
        if not line:
            return {"error": f"exit status {child.wait()}"}
    before = status(child.pid)
    peak = before
    child.stdin.write("\n")
    child.stdin.flush()
    while not select.select([child.stdout], [], [], 0.02)[0]:  # until it reports the end, or ends
        now = status(child.pid)
        peak = {name: max(value, now.get(name, 0)) for name, value in peak.items()}
    text = child.communicate()[0]
    if child.returncode:
        return {"error": f"exit status {child.returncode}"}
    figures: dict[str, Any] = json.loads(text.splitlines()[-1])
    used = {name: (peak[name] - before[name]) / 1e6 for name in peak}
    return {
        "anonymous": used["RssAnon"],
        "resident": used["VmRSS"],
        "all": peak["VmRSS"] / 1e6,
        **figures,
    }


def status(pid: int) -> dict[str, int]:
    """Thousands of bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    pairs = [line.split(":", 1) for line in lines if line.startswith(("RssAnon", "VmRSS"))]
    return {name: int(value.split()[0]) * 1024 // 1000 for name, value in pairs}


def row(what: str, figures: dict[str, Any]) -> None:
    if "error" in figures:
        line = f"| {what} | {figures['error']} |"
    else:
        line = (
            f"| {what} | {figures['wall']:.3f} | {figures['cpu']:.3f} | {figures['anonymous']:.3f} | "
            f"{figures['resident']:.3f} | {figures['all']:.3f} | {figures['load']:.2f} | {figures['sum'][:40]} |"
        )
    print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--samples", nargs="*", type=float, default=[1e6, 1e7, 1e8])
    parser.add_argument("--peers", nargs="*", default=["megatron-core", "numpy", "fast"])
    parser.add_argument("--blend", nargs="*", type=int, default=[2, 10])
    parser.add_argument("--open", type=float, nargs="*", default=[1e8])
    parser.add_argument("--huge", action="store_true")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        what, peer, prefix, samples, sources = json.loads(args.child)
        cache = args.folder / "cache"
        if what == "open":
            figures = opened(Path(prefix))
        elif what == "blend":
            figures = blend(sources, samples, peer)
        elif peer == "megatron-core":
            figures = megatron(Path(prefix), cache, samples)
        else:
            figures = ours(Path(prefix), cache, samples, peer == "fast")
        print(json.dumps(figures))
        return
    folder: Path = args.folder
    folder.mkdir(parents=True)
    sys.path.insert(0, str(SOURCE))
    from common import describe_machine, print_head

    print(f"{describe_machine('numpy')}\n")
    columns = (
        "what",
        "s",
        "CPU s",
        "anonymous GB",
        "resident GB",
        "all of the process GB",
        "import s",
        "sums of the arrays",
    )
    print_head(*columns)

    def child(*values: Any) -> dict[str, Any]:
        shutil.rmtree(folder / "cache", ignore_errors=True)
        return run([str(folder), "--child", json.dumps(values)])

    try:
        for size in map(int, args.samples):
            corpus(folder / "x", 2 * size, SEQ // 2)
            for _ in range(args.rounds):
                for peer in args.peers:
                    figures = child("build", peer, str(folder / "x"), size - size // 100, 0)
                    row(f"{size:.0e} samples, whole build, {peer}", figures)
            for sources in args.blend:
                for _ in range(args.rounds):
                    for peer in args.peers:
                        row(
                            f"{size:.0e} samples, blend of {sources}, {peer}",
                            child("blend", peer, "", size, sources),
                        )
        for documents in map(int, args.open):
            corpus(folder / "x", documents, SEQ // 2)
            row(f"opening {documents:.0e} documents", child("open", "", str(folder / "x"), 0, 0))
        if args.huge:
            corpus(folder / "x", 10**7, 100 * SEQ)
            for peer in [peer for peer in args.peers if peer != "megatron-core"]:
                figures = child("build", peer, str(folder / "x"), 10**9 - 10**7, 0)
                row(f"1e+09 samples over 1e+07 documents, whole build, {peer}", figures)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
