"""Compare the memory that a plan measures with that of whole steps, for settings drawn at random.

    python benchmarks/plan_drawn.py [--seed 28] [--cases 240] [--only 17,151] [--more "--bf16"]

Needs no device: both run the program's own steps on torch's meta device, the plan with few layers.
Each case is a line: number, error of the peak, counted bytes, pipeline rank and flags.
"""

from __future__ import annotations

import random
import statistics
import sys
from pathlib import Path

from common import describe_machine, new_parser

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "apps" / "plan"))
from drawn import draw
from plans import PADDED, Gpu, config_of
from whole_steps import account_steps

from meshwright.apps.plan import memory
from meshwright.apps.plan.measure.account import Account


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--seed", type=int, default=28)
    parser.add_argument("--cases", type=int, default=240)
    parser.add_argument(
        "--only", type=lambda text: set(map(int, text.split(","))), help="numbers of cases to run"
    )
    parser.add_argument(
        "--more", type=str.split, default=[], help="flags that all cases have, whatever is drawn"
    )
    given = parser.parse_args()
    rng, errors = random.Random(given.seed), list[float]()
    print(describe_machine("torch"))
    for number in range(1, given.cases + 1):
        words, rank = draw(rng, given.more)
        if given.only and number not in given.only:
            continue
        config = config_of(*words)
        account = Account()
        account_steps(config, PADDED, rank, account)
        peak = account.peak
        predicted = memory.memory_of_rank(config, PADDED, rank, Gpu()).allocated - sum(
            memory.WORKSPACES
        )
        errors.append(predicted / peak - 1)
        print(f"{number} {errors[-1]:+.3%} {peak:,} rank {rank} {' '.join(words)}", flush=True)
    sizes = sorted(map(abs, errors))
    beyond = sum(size > 0.005 for size in sizes)
    print(
        f"{len(sizes)} cases: median {statistics.median(sizes):.4%}, 95 of 100 within"
        f" {sizes[int(0.95 * len(sizes))]:.3%}, largest {sizes[-1]:.2%}; {beyond} beyond 0.5 %"
    )


if __name__ == "__main__":
    main()
