"""Predicted beside measured: a run that is as planned, and one that is not."""

from __future__ import annotations

from meshwright.apps.plan.compare import HELD, STEPS, compare, plan_of_run
from meshwright.config import flags
from meshwright.config.schema import TrainConfig


def test_the_term_that_is_off_is_named_after_ten_steps() -> None:
    words = "--preset gpt2-345m --bf16 --mock-data --micro-batch-size 8".split()
    config = flags.parse_settings(TrainConfig, words, "meshwright train").config
    plan = plan_of_run(config, 50_257, "NVIDIA H200")
    assert plan is not None and plan_of_run(config, 50_257, "GeForce 256") is None
    assert plan.child is not None
    plan.child.join()  # measures the plan beside the first steps
    assert plan.memory is not None
    memory, step = plan.memory, plan.prediction.time.seconds
    held = sum(memory.kinds.get(kind, 0) for kind in HELD)
    stats = {"allocated_bytes.all.current": held, "allocated_bytes.all.peak": memory.allocated}
    stats["reserved_bytes.all.peak"] = memory.reserved
    assert [plan.note(step) for _ in range(STEPS)] == [False] * (STEPS - 1) + [True]
    lines = plan.compare(stats)
    assert len(lines) == 2 and "(+0.0 %)" in lines[0]
    assert not any(";" in line.partition("reserved")[2] for line in lines)
    assert plan.compare({}) == [
        "plan: could not be compared with the first steps: KeyError: 'allocated_bytes.all.current'"
    ]
    # Gradients that other ranks map are none of torch's tensors.
    assert plan.compare({key: size - (2 << 30) for key, size in stats.items()}, mapped=2 << 30) == lines
    more = stats | {"allocated_bytes.all.peak": memory.allocated + (9 << 30)}
    more["reserved_bytes.all.peak"] = memory.reserved + (9 << 30)
    slow, off = compare(plan.prediction, memory, [1.0] * 3 + [1.2 * step] * 7, more)
    assert "(+20.0 %); the largest part predicted is products" in slow
    assert off.endswith("; activations and other tensors of a step take +9.00 GiB")
