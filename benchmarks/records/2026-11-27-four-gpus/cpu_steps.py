"""Time steps of the recipes of small.jsonl on a CPU, and draw their losses over time.

    python cpu_steps.py OUT       with benchmarks/ and src/ on PYTHONPATH

Losses are those of small.jsonl, trained on a GPU; a step's time is the median of 10 here, in
bfloat16, of the configurations in turns. OUT gets times.txt and over-time.svg.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from argparse import Namespace
from pathlib import Path

import learning
from meshwright.runs.rows import read_rows

HERE = Path(__file__).parent
BITS = 28_013_474 / 100.0e6 / 0.6931  # bits a byte of a nat a token
RUNS = {
    "1M": (
        "documents@10e6",
        "tuned,lr=4.8e-3,global-batch-size=16,lr-warmup-fraction=0.1@10e6",
        "recipe@4e6",
        "recipe@8e6",
    ),
    "3M": (
        "documents@15e6",
        "tuned,lr=4.8e-3,global-batch-size=16,lr-warmup-fraction=0.1@15e6",
        "recipe@6e6",
        "recipe@12e6",
    ),
    "10M": (
        "documents@20e6",
        "tuned,lr=1.2e-3,global-batch-size=16,lr-warmup-fraction=0.1@20e6",
        "recipe@8e6",
        "recipe@16e6",
    ),
}
STEPS, TURNS = 5, 2


def milliseconds(run: learning.Run) -> list[float]:
    """Train a few steps on random tokens; return their times but for the first two."""
    given = Namespace(
        most=32, points=1, held_out=1e5, data="", tokenizer="", flags="--bf16 --device cpu"
    )
    command = learning.command_of(run, given)
    for flag in ("--data-path", "--tokenizer", "--eval-iters", "--eval-interval", "--log-interval"):
        place = command.index(flag)
        del command[place : place + 2]
    with tempfile.TemporaryDirectory() as folder:
        more = f"--mock-data --vocab-size 8192 --eval-iters 0 --exit-interval {STEPS + 2} --run-dir {folder}/run"
        subprocess.run([*command, *more.split()], check=True, stdout=subprocess.DEVNULL)
        return [row["ms"] for row in read_rows(Path(folder, "run")) if row["event"] == "step"][2:]


def main(out: Path) -> None:
    from matplotlib.figure import Figure

    out.mkdir(parents=True, exist_ok=True)
    runs = {
        (size, word): learning.parse_run(word, 0, size, 1)
        for size, words in RUNS.items()
        for word in words
    }
    times: dict[tuple[str, str], list[float]] = {key: [] for key in runs}
    for _ in range(TURNS):
        for key, run in runs.items():
            times[key] += milliseconds(run)
    rows = [json.loads(line) for line in (HERE / "small.jsonl").read_text().splitlines()]
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    lines = [
        "size  run, steps of the whole run, median ms, minutes of a run, bits per byte at its end (three seeds)"
    ]
    for axes, size in zip(figure.subplots(1, 3), RUNS, strict=True):
        for n, word in enumerate(RUNS[size]):
            run = runs[size, word]
            found = [
                row
                for row in rows
                if (row["size"], row["run"], row["tokens"]) == (size, run.name, run.tokens)
            ]
            ms = statistics.median(times[size, word])
            ends = [BITS * row["loss"] for row in found]
            lines.append(
                f"{size:4}  {word}, {found[0]['steps']}, {ms:.0f}, {found[0]['steps'] * ms / 60e3:.1f}, "
                f"{statistics.mean(ends):.3f} ({min(ends):.3f} to {max(ends):.3f})"
            )
            for row in found:
                minutes, bits = zip(
                    *((step * ms / 60e3, BITS * loss) for step, loss in row["curve"]), strict=True
                )
                label = (
                    word.partition(",")[0]
                    .replace("@", ", ")
                    .replace("e6", "M tokens")
                    .replace("tuned", "AdamW")
                )
                axes.plot(
                    minutes, bits, color=f"C{n}", lw=1, label=label if row is found[0] else None
                )
        axes.set(title=size, xlabel="minutes of two cores", xscale="log")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    figure.axes[0].set_ylabel("bits per byte, held out")
    figure.savefig(out / "over-time.svg")
    (out / "times.txt").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
