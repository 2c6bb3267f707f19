"""A training step on a CPU beside nanoGPT's and llm.c's own, in turns, a process each.

usage: python benchmarks/cpu_peers.py NANOGPT LLMC [--sizes 10M 124M] [--turns 8] [--quiet]

NANOGPT and LLMC are checkouts of github.com/karpathy/nanoGPT, whose model.py is imported, and of
github.com/karpathy/llm.c, whose train_gpt2.c is compiled with the flags of its Makefile. All have
GPT-2's layers with biases, no dropout, random tokens, the shapes of loop.py and a thread a core:

* ours: the step of loop.py in float32, and in bfloat16, which `quickstart` takes where it pays;
* nanoGPT: its model, optimizer and clipping in float32, its train.py's only format on a CPU, as it
  is and compiled; and within bfloat16 autocast, which a user would have to add;
* llm.c: its forward and backward pass and update in float32, which has no clipping;
* products: the matrix products of a step alone (loop.py), which no step can beat.
"""

import importlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import PIPE, Popen, run
from typing import Any

import numpy as np
import torch
from common import describe_machine, new_parser, print_head, print_row
from loop import ON_CPU, PlainTraining, Shape, our_loop, products_of

from meshwright.base import console, device

NANOGPT = ("nanoGPT fp32", "nanoGPT fp32, compiled", "nanoGPT bf16 autocast")
PROGRAMS = ("ours fp32", "ours bf16", *NANOGPT, "llm.c fp32", "products fp32", "products bf16")
FLAGS = "-Ofast -Wno-unused-result -Wno-ignored-pragmas -Wno-unknown-attributes -march=native -fopenmp -DOMP".split()
DRIVER = """
#define TESTING
#include "train_gpt2.c"
int main(int argc, char** argv) {
    int B = atoi(argv[2]), T = atoi(argv[3]), tokens[B * T + 1]; char line[8]; GPT2 model;
    gpt2_build_from_checkpoint(&model, argv[1]);
    for (int step = 1; fgets(line, sizeof(line), stdin); step++) {
        for (int i = 0; i <= B * T; i++) { tokens[i] = rand() % model.config.vocab_size; }
        gpt2_forward(&model, tokens, tokens + 1, B, T); gpt2_zero_grad(&model); gpt2_backward(&model);
        gpt2_update(&model, 1e-4f, 0.9f, 0.999f, 1e-8f, 0.0f, step);
        printf("loss %f\\n", model.mean_loss); fflush(stdout);
    }
}
"""


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("nanogpt", type=Path, help="folder with nanoGPT's model.py")
    parser.add_argument("llmc", type=Path, help="folder with llm.c's train_gpt2.c and llmc/")
    parser.add_argument(
        "--sizes", nargs="+", choices=ON_CPU, default=list(ON_CPU), help="default: all"
    )
    parser.add_argument(
        "--turns", type=int, default=8, help="steps of each program, in turns (default: 8)"
    )
    parser.add_argument(
        "--quiet", action="store_true", help="repeat steps beside which other programs computed"
    )
    parser.add_argument(
        "--serve", choices=PROGRAMS, help="used within: take a step for each line of standard input"
    )
    given = parser.parse_args()
    console.set_stream(None)
    os.environ["GOMP_SPINCOUNT"] = "1000"  # else other work slows steps severalfold
    if given.serve:
        step = step_of(given.serve, ON_CPU[given.sizes[0]], given.nanogpt)
        for _ in sys.stdin:
            print("loss", step(), flush=True)
        return
    compiler = run(["cc", "--version"], stdout=PIPE, text=True, check=True).stdout.splitlines()[0]
    print(f"{describe_machine('torch')}; {compiler}; {given.turns} turns", flush=True)
    for size in given.sizes:
        with tempfile.TemporaryDirectory() as folder:
            compare(size, Path(folder), given)


def step_of(program: str, shape: Shape, nanogpt: Path) -> Callable[[], Any]:
    """Return a function that takes a step of a program that runs in Python."""
    bf16 = "bf16" in program
    if program.startswith("ours"):
        return our_loop(shape, "--bf16" if bf16 else "")
    if program.startswith("products"):
        device.open_device("cpu")  # which keeps freed memory, as in our step
        return products_of(shape, torch.bfloat16 if bf16 else torch.float32)
    sys.path.insert(0, str(nanogpt))
    nano: Any = importlib.import_module("model")
    sizes = {
        "n_layer": shape.layers,
        "n_head": shape.heads,
        "n_embd": shape.hidden,
        "block_size": shape.seq,
    }
    sizes["vocab_size"] = 50304 if shape.vocab == 50257 else shape.vocab  # as its train.py
    # whose batches and order of a step are those of nanoGPT's train.py
    training: Any = PlainTraining(shape)
    training.model = net = nano.GPT(nano.GPTConfig(**sizes, dropout=0.0, bias=True))
    training.adamw = net.configure_optimizers(0.1, 6e-4, (0.9, 0.95), "cpu")
    forward = torch.compile(net) if "compiled" in program else net

    def loss(tokens: torch.Tensor, labels: torch.Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            return forward(tokens, labels)[1]

    return lambda: training.step(loss)


def build_llmc(source: Path, shape: Shape, folder: Path) -> list[str]:
    """Compile llm.c, write random weights in its format, and return the command."""
    program, weights = str(folder / "driver"), folder / "weights.bin"
    run(
        ["cc", *FLAGS, f"-I{source}", "-xc", "-", "-o", program, "-lm"],
        input=DRIVER,
        text=True,
        check=True,
    )
    n, c, vocab = shape.layers, shape.hidden, -(-shape.vocab // 128) * 128
    # of a layer, from ln1w to fcprojb
    block = [c, c, 3 * c * c, 3 * c, c * c, c, c, c, 4 * c * c, 4 * c, 4 * c * c, c]
    header = [20240326, 3, shape.seq, shape.vocab, n, shape.heads, c, vocab] + [0] * 248
    with weights.open("wb") as file:
        file.write(np.array(header, np.int32).tobytes())
        for i, count in enumerate([vocab * c, shape.seq * c, *(n * k for k in block), c, c]):
            gain = np.float32(i in (2, 8, 14))  # of norms
            file.write(
                (gain + np.random.default_rng(i).standard_normal(count, np.float32) / 50).tobytes()
            )
    return [program, str(weights), str(shape.batch), str(shape.seq)]


def take_step(process: Popen[str], quiet: bool = False) -> float:
    """Return the milliseconds of a step; if quiet, of one beside which little else ran."""
    assert process.stdin and process.stdout
    while True:
        start, others = time.perf_counter(), work_of_others(process.pid)
        print(file=process.stdin, flush=True)
        next(line for line in process.stdout if line.startswith("loss "))
        seconds = time.perf_counter() - start
        if not quiet or work_of_others(process.pid) - others < 0.03 + 0.05 * seconds:
            return 1e3 * seconds
        time.sleep(3)


def work_of_others(process: int) -> float:
    """Return the processors' seconds that all processes but one have used."""
    total = Path("/proc/stat").read_text().split()[1:4]
    own = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (sum(map(int, total)) - sum(map(int, own))) / os.sysconf("SC_CLK_TCK")


def compare(size: str, folder: Path, given: Any) -> None:
    """Print a table of all programs at a size."""
    shape, processes = ON_CPU[size], {}
    for name in PROGRAMS:
        python = [
            sys.executable,
            __file__,
            str(given.nanogpt),
            str(given.llmc),
            "--sizes",
            size,
            "--serve",
            name,
        ]
        command = build_llmc(given.llmc, shape, folder) if name.startswith("llm.c") else python
        processes[name] = Popen(command, stdin=PIPE, stdout=PIPE, text=True)
        for _ in range(3):
            take_step(processes[name])  # compiles, allocates
    ms: dict[str, list[float]] = {name: [] for name in processes}
    for turn in range(given.turns):
        for name, process in (list(processes.items()) * 2)[turn % len(processes) :][
            : len(processes)
        ]:
            take_step(process)  # wakes it
            ms[name].append(take_step(process, given.quiet))
    for process in processes.values():
        process.communicate()
    print(f"\n{size}: {shape.batch} x {shape.seq} tokens")
    print_head(
        "",
        "ms",
        "quartiles",
        "",
        "least",
        "share of the limit",
        "ours fp32 is times as fast",
        "ours bf16",
    )
    for name, times in ms.items():
        low, middle, high = statistics.quantiles(times, n=4)
        over = [
            ms["products bf16" if "bf16" in name else "products fp32"],
            ms["ours fp32"],
            ms["ours bf16"],
        ]
        limit, fp32, bf16 = (
            statistics.median(a / b for a, b in zip(times, other, strict=True)) for other in over
        )
        whole = [f"{x:.0f}" for x in (middle, low, high, min(times))]
        print_row(name, *whole, f"{1 / limit:.0%}", f"{fp32:.2f}", f"{bf16:.2f}")


if __name__ == "__main__":
    main()
