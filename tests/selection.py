"""Tests that run less often than their neighbours, so that `make check` and `make test` stay fast.

`slow_tests.txt` lists the tests that took more than 0.1 s at the last measurement, and the files
that have no other: `make check` leaves them to `make test`, and does not import these files.
THINNED tests have many similar cases: `make test` runs every n-th of them and `make test-long` the
others. To measure anew:

    python -m pytest -n 2 -m "not long" --durations=0 > log; python tests/selection.py log
"""

from __future__ import annotations

import re
import sys
from collections import Counter, defaultdict
from pathlib import Path

SLOW = Path(__file__).with_name("slow_tests.txt")
SLOW_NAMES = frozenset(SLOW.read_text().split())
LIMIT = 0.1  # seconds, of the slowest case

THINNED = {
    "test_fp8_fused.py::test_gradient_of_heads": 3,
    "test_kill.py::test_kills_during_the_recovery": 2,
    "test_publish.py::test_killed_at_every_point": 2,
    "test_environment.py::test_a_run_does_not_depend_on_the_environment": 5,
    "test_flag_effects.py::test_changes_the_losses": 7,
    "test_flag_effects.py::test_changes_the_losses_of_another_run": 5,
    "test_fit.py::test_the_largest_divisor_below_the_line": 3,
    "test_zero.py::test_a_non_finite_number_changes_nothing": 4,
    "test_native_ranks.py::test_a_rank_is_killed_while_others_wait": 3,
    "test_exact.py::test_stopped_again_and_again_it_is_the_same_run": 4,
    "test_model.py::test_blocks_share_two_graphs": 3,
    "test_optimizers.py::test_non_finite_gradients_change_nothing": 11,
    "test_flat_adamw.py::test_the_store_equals_torchs": 3,
    "test_decode.py::test_attend": 2,
    "test_text.py::test_a_small_file_that_unpacks_to_much": 3,
    # Steps without a common factor with the lengths of the lists: every value of each list is left.
    "test_decoder.py::test_cache_and_batch_change_nothing": 7,
    "test_norm.py::test_triton": 4,
    "test_optimizers.py::test_sgd_equals_torchs": 3,
    "test_optimizers.py::test_a_cautious_decay_follows_its_formula": 4,
    "test_average.py::test_it_is_the_plain_recurrence": 3,
    "test_muon.py::test_products_of_which_one_half_is_computed": 4,
    "test_decode.py::test_pick": 5,
    "test_adamw.py::test_steps_equal_torchs": 5,
    "test_symmetric.py::test_a_matrix_times_its_transpose": 5,
    "test_symmetric.py::test_a_polynomial": 3,
    "test_symmetric.py::test_the_lower_half_is_taken": 3,
    "test_fp8.py::test_every_tile_gives_the_same_bytes": 3,
}

# Kernels that a GPU runs in no time, and Triton's interpreter does not: thinned without a GPU.
INTERPRETED = {
    "test_heads.py::test_kernels": 3,
    "test_qk_norm.py::test_kernels": 3,
    "test_fp8_fused.py::test_gradient_of_an_activation": 3,
    "test_fp8_fused.py::test_gradient_of_heads": 7,
    "test_norm.py::test_triton": 7,
    "test_norm.py::test_triton_shapes": 3,
    "test_column_sums.py::test_shapes": 5,
    "test_decode.py::test_linear": 4,
    "test_decode.py::test_attend": 3,
    "test_activation.py::test_kernels": 4,
    "test_activation.py::test_large_numbers_and_nan": 3,
    "test_fp8.py::test_cast_is_torchs_in_both_layouts": 3,
    "test_fp8.py::test_every_tile_gives_the_same_bytes": 5,
    "test_embedding.py::test_rows_are_added_to_their_tokens": 2,
    "test_dropout.py::test_sites_in_one_kernel": 2,
    "test_muon_passes.py::test_advance": 4,
    "test_muon_passes.py::test_subtract": 4,
    "test_symmetric.py::test_a_matrix_times_its_transpose": 7,
    "test_symmetric.py::test_a_polynomial": 4,
    "test_symmetric.py::test_the_lower_half_is_taken": 4,
}


def is_slow(path: Path) -> bool:
    """Return whether a file has no test for `make check`."""
    return path.name in SLOW_NAMES


def mark(names: list[str], is_interpreted: bool) -> list[str]:
    """Return "", "whole" or "long" for each test, given as file.py::function without its case."""
    thinned = THINNED | (INTERPRETED if is_interpreted else {})
    seen: Counter[str] = Counter()
    out = []
    for name in names:
        seen[name] += 1
        is_left_out = name in thinned and (seen[name] - 1) % thinned[name] != 0
        out.append(
            "long"
            if is_left_out
            else "whole"
            if SLOW_NAMES & {name, name.partition("::")[0]}
            else ""
        )
    return out


def measure(log: Path) -> None:
    slowest: defaultdict[str, float] = defaultdict(float)
    for line in log.read_text().splitlines():
        if found := re.match(r"([\d.]+)s (?:call|setup) +\S*?([^/\s]+\.py::\w+)", line):
            slowest[found[2]] = max(slowest[found[2]], float(found[1]))
    slow = {name for name, seconds in slowest.items() if seconds > LIMIT}
    out = []
    for path in sorted(SLOW.parent.rglob("test_*.py"), key=lambda path: path.name):
        source = path.read_text()
        names = [f"{path.name}::{name}" for name in re.findall(r"^ *def (test_\w+)", source, re.M)]
        if path.name == "test_imports.py":  # the rules of the structure are always checked
            continue
        if slow.issuperset(names) or re.search(
            r"^pytestmark = .*\bmark\.(whole|long)\b", source, re.M
        ):
            names = [path.name]
        out += [name for name in sorted(names) if name in slow or "::" not in name]
    SLOW.write_text("".join(f"{name}\n" for name in out))


if __name__ == "__main__":
    measure(Path(sys.argv[1]))
