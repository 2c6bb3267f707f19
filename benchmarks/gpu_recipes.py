"""Two recipes at equal tokens on one GPU: GPT-2's network with AdamW, a newer one with Muon.

The newer network has QK-norm, RoPE and squared ReLU.

Each recipe is run with several learning rates on two sizes of model; all other settings are equal.
A run that is finished in OUT is not repeated. Prints the last validation losses, and
draws the validation curves of the best rate of each (recipes.svg).
"""

import subprocess
import sys
from pathlib import Path

from common import new_parser

from meshwright.base.runs.rows import read_new_rows

TOKENS, BATCH, SEQ = 12_000_000, 64, 512
STEPS = TOKENS // (BATCH * SEQ)
SIZES = {
    "small": "--num-layers 6 --hidden-size 384 --num-attention-heads 6",
    "124M": "--num-layers 12 --hidden-size 768 --num-attention-heads 12",
}
RECIPES = {
    "AdamW, GPT-2": "--optimizer adamw",
    "Muon, QK-norm, RoPE, squared ReLU": "--optimizer muon --qk-layernorm --squared-relu "
    "--position-embedding-type rope",
}
RATES = {
    "AdamW, GPT-2": {
        "small": ("2.5e-4", "5e-4", "1e-3", "2e-3"),
        "124M": ("1.5e-4", "3e-4", "6e-4", "1.2e-3"),
    },
    "Muon, QK-norm, RoPE, squared ReLU": {
        "small": ("1e-3", "2e-3", "4e-3"),
        "124M": ("6e-4", "1.2e-3", "2.4e-3"),
    },
}


def main(out: Path, data: str, vocab: str, merges: str) -> None:
    common = (
        f"--seq-length {SEQ} --micro-batch-size {BATCH} --global-batch-size {BATCH} --train-iters "
        f"{STEPS} --bf16 --seed 1 "
        f"--lr-decay-style cosine --lr-warmup-fraction 0.05 --weight-decay 0.1 --adam-beta2 0.95 --hidden-dropout 0 "
        f"--attention-dropout 0 --split 95,5,0 --eval-interval {STEPS // 12} --eval-iters 6 --log-interval 50"
    )
    best: dict[tuple[str, str], tuple[float, str, list[tuple[int, float]]]] = {}
    table = open(out / "recipes.txt", "w")
    for size, architecture in SIZES.items():
        for n, (recipe, options) in enumerate(RECIPES.items()):
            for rate in RATES[recipe][size]:
                folder = out / f"{size}-{'adamw' if n == 0 else 'muon'}-{rate}"
                command = [
                    *(
                        sys.executable,
                        "-m",
                        "meshwright",
                        "train",
                        *common.split(),
                        *architecture.split(),
                    ),
                    *(
                        *options.split(),
                        "--lr",
                        rate,
                        "--min-lr",
                        str(float(rate) / 10),
                        "--run-dir",
                        str(folder),
                    ),
                    *("--data-path", data, "--vocab-file", vocab, "--merge-file", merges),
                ]
                folder.mkdir(parents=True, exist_ok=True)
                if not any(row["event"] == "end" for row in read_new_rows(folder)[0]):
                    with open(folder / "log.txt", "w") as log:
                        subprocess.run(command, stdout=log, stderr=log, check=True)
                rows, _ = read_new_rows(folder)
                curve = [(r["iteration"], r["loss"]) for r in rows if r["event"] == "validation"]
                ms = sorted(r["ms"] for r in rows if r["event"] == "step")[STEPS // 2]
                line = f"{size:6} {recipe:36} lr {rate:7} validation {curve[-2][1]:.4f}  {ms:6.1f} ms a step"
                print(line, flush=True)
                print(line, file=table, flush=True)
                if (size, recipe) not in best or curve[-2][1] < best[size, recipe][0]:
                    best[size, recipe] = (curve[-2][1], rate, curve[:-1])
    draw(out / "recipes.svg", best)


def draw(path: Path, best: dict) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for ax, size in zip(axes, SIZES, strict=True):
        for recipe, style in zip(RECIPES, ("-", "--"), strict=True):
            _, rate, curve = best[size, recipe]
            x, y = zip(*curve, strict=True)
            ax.plot(
                [i * BATCH * SEQ / 1e6 for i in x],
                y,
                style,
                marker="o",
                ms=3,
                label=f"{recipe} (lr {rate})",
            )
        ax.set(title=f"{size} model", xlabel="million tokens", ylim=(None, 7))
        ax.grid(alpha=0.3)
        ax.legend(fontsize=8)
    axes[0].set_ylabel("validation loss")
    figure.savefig(path)


if __name__ == "__main__":
    parser = new_parser(__doc__)
    parser.add_argument("out", type=Path)
    for name in ("data", "vocab", "merges"):
        parser.add_argument(name)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    main(given.out, given.data, given.vocab, given.merges)
