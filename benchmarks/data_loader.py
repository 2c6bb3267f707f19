"""Share of a step's time that is spent waiting for its batches, at steps of 1, 10 and 100 ms,
through the real Loader.

usage: python benchmarks/data_loader.py FOLDER [--steps-ms 1 10 100] [--lengths 1024 2048]
[--num-workers 2] [--seconds 6]

A corpus of 200 MB in documents of 600 tokens is made in FOLDER and removed at the end. A step is
64 samples in micro-batches of 8. It either sleeps, as a process does whose GPU works, or keeps one
thread of torch busy with products of matrices, which takes the interpreter from the thread that
reads ahead. "wait" is the time within next(), the median and the largest of all steps but the
first three; "share" is the sum of it divided by that of all time.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from common import VOCAB, describe_machine, new_parser, print_head, print_row

from meshwright.base import console
from meshwright.data.files.indexed import Indexed
from meshwright.data.files.writer import Writer
from meshwright.data.loader import Loader, LoaderSpec, Samples


def corpus(prefix: Path) -> Indexed:
    rng = np.random.default_rng(1)
    with Writer(prefix, np.uint16) as writer:
        while writer.tokens < 100_000_000:
            sizes = rng.integers(50, 1151, 1000, dtype=np.int32)
            tokens = rng.integers(0, VOCAB, int(sizes.sum()), dtype=np.uint16)
            writer.append(tokens, sizes, np.arange(writer.sequences + 1, writer.sequences + 1001))
    return Indexed(prefix)


def asleep(seconds: float) -> None:
    time.sleep(seconds)


def busy(seconds: float) -> None:
    """Products of about 0.3 ms each, as a model's layers are."""
    x, end = busy_matrix, time.perf_counter() + seconds
    while time.perf_counter() < end:
        torch.mm(x, x)


busy_matrix = torch.full((256, 256), 1e-3)


def measure(
    data: Samples, workers: int, work: Callable[[float], None], step: float, seconds: float
) -> list[str]:
    loader = Loader(data, LoaderSpec(8, lambda _: 64, VOCAB, workers, at_end="wrap"))
    waits: list[float] = []
    batches = iter(loader)
    begin = 0.0
    for n in range(3 + max(30, int(seconds / step))):
        if n == 3:
            begin = time.perf_counter()
        start = time.perf_counter()
        one = next(batches)
        waits.append(time.perf_counter() - start)
        assert len(one) == 8
        work(step)
        if n > 3 and time.perf_counter() - begin > 4 * seconds:
            break
    spent = time.perf_counter() - begin
    batches.close()
    waits = waits[3:]
    median, most = f"{1e3 * float(np.median(waits)):.3f}", f"{1e3 * max(waits):.2f}"
    return [
        median,
        most,
        f"{sum(waits) / spent:.2%}",
        str(len(waits)),
        f"{1e3 * spent / len(waits):.2f}",
    ]


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps-ms", nargs="*", type=float, default=[1, 10, 100])
    parser.add_argument("--lengths", nargs="*", type=int, default=[1024, 2048])
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=6.0)
    args = parser.parse_args()
    args.folder.mkdir(parents=True)
    console.set_stream(None)
    torch.set_num_threads(1)
    print(f"{describe_machine('torch', 'numpy')}; --num-workers {args.num_workers}\n")
    print_head(
        "sequence",
        "step",
        "wait, median ms",
        "wait, most ms",
        "share of the time",
        "steps",
        "ms a step",
    )
    try:
        indexed = corpus(args.folder / "x")
        for length in args.lengths:
            data = Samples(indexed, range(len(indexed)), len(indexed) * 400 // length, length, 1)
            start = time.perf_counter()
            loader = Loader(data, LoaderSpec(8, lambda _: 64, VOCAB))
            for k in range(20):
                loader.read_step(64 * k, 64)
            alone = (time.perf_counter() - start) / 20
            print_row(length, "reading alone, no step", f"{1e3 * alone:.3f}", "", "", 20, "")
            for work in (asleep, busy):
                for step in args.steps_ms:
                    figures = measure(data, args.num_workers, work, step / 1e3, args.seconds)
                    print_row(length, f"{step:g} ms {work.__name__}", *figures)
    finally:
        shutil.rmtree(args.folder)


if __name__ == "__main__":
    main()
