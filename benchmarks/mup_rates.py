"""The best learning rate at several widths, with and without µP, on one device.

Byte-level models of one depth are trained on TEXT with all rates at all widths, once with
--mup-base-hidden-size (the smallest width) and once without: one `meshwright sweep` in OUT, which
a second start of this program takes up. Prints the best rate of each width and draws the final
losses over the rate (mup_rates.svg).

On one H100 with 16 cores, about two minutes:

    python benchmarks/mup_rates.py OUT TEXT --jobs 14 --device cuda
"""

import math
import subprocess
import sys
from pathlib import Path

from common import describe_machine, new_parser, print_head, print_row

from meshwright.apps.tune import results, sweep

HEAD = 32
BASE = "mup_base_hidden_size"


def main(given) -> int:
    given.out.mkdir(parents=True, exist_ok=True)
    prefix = given.out / "text"
    program = [sys.executable, "-m", "meshwright"]
    if not Path(f"{prefix}_text_document.idx").exists():
        words = [
            "--input",
            given.text,
            "--output-prefix",
            prefix,
            "--append-eod",
            "--tokenizer",
            "byte",
        ]
        subprocess.run([*program, "preprocess", *map(str, words)], check=True)
    # long runs first
    sizes = ",".join(f"{w}:{w // HEAD}" for w in sorted(given.widths, reverse=True))
    grid = [
        f"hidden-size:num-attention-heads={sizes}",
        f"mup-base-hidden-size=none,{min(given.widths)}",
    ]
    grid.append(f"lr={','.join(given.rates)}")
    train = (
        f"--num-layers {given.layers} --seq-length {given.seq_length} --micro-batch-size {given.batch} --bf16 "
        f"--train-iters {given.steps} --lr-warmup-fraction 0.1 --lr-decay-style cosine --weight-decay 0.1 "
        f"--adam-beta2 0.95 --hidden-dropout 0 --attention-dropout 0 --split 95,5,0 --eval-interval {given.steps} "
        f"--eval-iters 20 --log-interval 50 --seed 1 --no-tensorboard --optimizer {given.optimizer} "
        f"--device {given.device} --tokenizer byte --data-path {prefix}_text_document "
        # which would take longer than these runs
        "--compile off --fused-kernels off --cuda-graphs off"
    )
    folder = given.out / "runs"
    command = [
        *program,
        "sweep",
        str(folder),
        "--grid",
        *grid,
        "--jobs",
        str(given.jobs),
        "--no-checkpoints",
    ]
    status = subprocess.run([*command, "--", *train.split()]).returncode
    losses = read_losses(folder)
    print(f"\n{describe_machine('torch')}; {given.optimizer}, {given.steps} steps")
    print_head(
        "width",
        *(
            f"{kind}: {what}"
            for kind in ("without µP", "with µP")
            for what in ("best rate", "loss")
        ),
    )
    for width in sorted(given.widths):
        cells = []
        for base in ("none", str(min(given.widths))):
            loss, rate = min(
                (loss, rate) for (w, b, rate), loss in losses.items() if (w, b) == (width, base)
            )
            cells += [f"{rate:g}", f"{loss:.4f}"]
        print_row(width, *cells)
    draw(given.out / "mup_rates.svg", losses, given)
    return status


def read_losses(folder: Path) -> dict[tuple[int, str, float], float]:
    """Return the loss by width, base and rate; that of a run that diverged is infinite."""
    points = results.swept_points(list(sweep.read_runs_of_sweep(folder).values()))
    return {
        (int(o.point["hidden_size"]), o.point[BASE], float(o.point["lr"])): o.loss
        if o.state == "done"
        else math.inf
        for o in points
    }


def draw(path: Path, losses: dict[tuple[int, str, float], float], given) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, base, title in zip(
        panels, ("none", str(min(given.widths))), ("without µP", "with µP"), strict=True
    ):
        for n, width in enumerate(sorted(given.widths)):
            points = sorted(
                (rate, loss) for (w, b, rate), loss in losses.items() if (w, b) == (width, base)
            )
            x, y = zip(*((rate, loss) for rate, loss in points if math.isfinite(loss)), strict=True)
            best = min(points, key=lambda point: point[1])
            axes.semilogx(x, y, ".-", color=f"C{n}", label=f"width {width}")
            axes.plot(*best, "o", color=f"C{n}", ms=8, mfc="none")
        axes.set(title=title, xlabel="learning rate")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    lowest = min(losses.values())
    panels[0].set_ylim(lowest - 0.05, lowest + 1.2)
    panels[0].set_ylabel("validation loss")
    figure.savefig(path)


if __name__ == "__main__":
    parser = new_parser(__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("text", help="what `meshwright preprocess --input` reads")
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128, 256, 512])
    parser.add_argument(
        "--rates", nargs="+", default="5e-4 1e-3 2e-3 4e-3 8e-3 1.6e-2 3.2e-2".split()
    )
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--device", default="auto")
    for name, default in (("layers", 4), ("steps", 300), ("batch", 32), ("seq-length", 128)):
        parser.add_argument(f"--{name}", type=int, default=default)
    raise SystemExit(main(parser.parse_args()))
