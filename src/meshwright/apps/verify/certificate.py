"""The outcome of a comparison for people and files: table, certificate, error."""

from __future__ import annotations

import dataclasses
import json
import math
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from meshwright.apps.pages.runs import CERTIFICATE
from meshwright.apps.verify.baseline import make_baseline
from meshwright.apps.verify.compare import Comparison, Quantity, compare_with_one_process
from meshwright.base import device as devices
from meshwright.base.errors import UNEQUAL, UserError
from meshwright.base.files import replacing
from meshwright.base.records import json_ready
from meshwright.base.version import our_version
from meshwright.config import flags
from meshwright.config.schema import TrainConfig
from meshwright.runtime.ranks.connect import pick_backend
from meshwright.training.sizes import describe_layout
from meshwright.training.small_run import RankSetup

Show = Callable[[Comparison, str], None]  # takes the summary too, one line


def verify_layout(config: TrainConfig, setup: RankSetup, command: list[str], show: Show) -> None:
    """Compare --verify-layout steps, write the certificate and show it; raise if they differ."""
    began = time.perf_counter()
    root = config.checkpoint.run_dir or config.checkpoint.save
    folder = Path(root) if root else None
    steps = config.training.verify_layout
    comparison = compare_with_one_process(config, setup.team, steps, folder, setup)
    values = certificate(config, comparison, setup, command)
    values["seconds"] = round(time.perf_counter() - began, 3)
    if folder is not None:
        setup.team.run_on_rank_0(lambda: write_certificate(folder / CERTIFICATE, values))
    outcome = "layout verified" if comparison.is_equal else "the layout differs"
    show(comparison, f"{outcome}: {values['summary']}")
    if not comparison.is_equal:
        raise UserError(describe_difference(comparison, folder), UNEQUAL, everywhere=True)


def write_certificate(path: Path, values: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(values, indent=1, allow_nan=False)
    with replacing(path) as file:
        file.write(f"{text}\n".encode())


def certificate(
    config: TrainConfig, comparison: Comparison, setup: RankSetup, command: list[str]
) -> dict[str, Any]:
    """Return the values of the file, all as JSON has them."""
    p = config.parallel
    device = setup.device
    settings = flags.to_dict(config)
    defaults = flags.to_dict(TrainConfig())
    # The settings that a reader would have to give to compare again.
    given = {name: value for name, value in settings.items() if value != defaults[name]}
    versions = {
        "meshwright": our_version(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    layout = {
        "ranks": config.world,
        "data": config.dp,
        "copies": p.num_distributed_optimizer_instances,
        "tensor": p.tensor_model_parallel_size,
        "sequence_parallel": p.sequence_parallel and p.tensor_model_parallel_size > 1,
        "pipeline": p.pipeline_model_parallel_size,
        "pipeline_schedule": p.pipeline_schedule,
        "stages_of_a_rank": config.chunks,
        "context": p.context_parallel_size,
        "zero_stage": p.zero_stage,
    }
    compared = []
    for one in comparison.compared:
        compared.append(dataclasses.asdict(one) | {"is_equal": one.is_equal})
    values = {
        "verdict": "equal" if comparison.is_equal else "different",
        "summary": summarize(comparison),
        "time": round(time.time(), 3),
        "command": command,
        "versions": versions,
        "device": devices.device_name(device),
        "backend": pick_backend(p, device) if config.world > 1 else None,
        "layout": layout,
        "settings": given,
        "steps": comparison.steps,
        "reduced": make_baseline(config, device.type != "cpu").sizes,
        "compared": compared,
        "gradients": comparison.gradients,
        "differences": [dataclasses.asdict(one) for one in comparison.differences],
        "not_compared": comparison.not_compared,
    }
    # JSON has no infinity, which stands for what cannot be compared.
    finite: dict[str, Any] = json_ready(values)
    return finite


def summarize(comparison: Comparison) -> str:
    """Return the outcome in a line, as the log and the page of a run show it."""
    steps = f"{comparison.steps} step{'s' * (comparison.steps > 1)}"
    beside = f"in {steps} beside one process"
    if comparison.differences:
        first = comparison.differences[0]
        by = f"by {size(first.largest)} in {first.precision}"
        return f"{first.what}, {first.name}, first at {first.where}, {by}, {beside}"

    # The largest difference in float64, and that of the weights in the run's own precision.
    exact = [one for one in comparison.compared if one.precision == "float64"]
    farthest = max(exact, key=lambda one: one.largest)
    most = f"differ by at most {size(farthest.largest)} ({farthest.what}, {farthest.worst})"
    for one in comparison.compared:
        if one.precision != "float64" and one.what == Quantity.WEIGHTS:
            most += f"; in {one.precision} its {one.what} by {size(one.largest)}"
    count = len(comparison.gradients)
    return f"{count} parameters, their gradients and their state, {beside}, {most}"


def size(x: float) -> str:
    if math.isinf(x):
        return "not comparable"
    return f"{x:.1e}" if x else "0"


def describe_difference(comparison: Comparison, folder: Path | None) -> str:
    """Return the error: what differs first, where, and what to do."""
    first = comparison.differences[0]
    by = f" in {first.precision}"
    if not math.isinf(first.largest):
        by = f" by {size(first.largest)}, more than {size(first.tolerance)}{by}"
    # Each quantity once: what differs later mostly follows from the first.
    _, *later = dict.fromkeys(one.what for one in comparison.differences)
    then = f"; then {', '.join(later)}" if later else ""
    kept = f"; all differences are in {folder / CERTIFICATE}" if folder else ""
    return (
        f"this layout does not compute what one process computes: {first.what} differ first, {first.name}{by} "
        f"({first.where}){then}{kept}; do not train with it, and report it with these flags"
    )


def comparison_table(config: TrainConfig, comparison: Comparison, setup: RankSetup) -> list[str]:
    """Return what was compared, for people."""
    baseline = comparison.config
    p = config.parallel
    m = baseline.model
    backend = pick_backend(p, setup.device)
    layout = [describe_layout(config)]
    if p.zero_stage:
        layout.append(f"ZeRO {p.zero_stage}")
    if p.sequence_parallel:
        layout.append("sequence parallel")
    if config.chunks > 1:
        layout.append(f"{config.chunks} stages on each pipeline rank")
    small = f"{m.num_layers} layers of width {m.hidden_size}, {m.num_attention_heads} heads"
    small += f", {baseline.data.seq_length} tokens"
    lines = [
        f"layout    {', '.join(layout)}; {backend} on {devices.device_name(setup.device)}",
        f"compared  with one process: {small}, float64, {comparison.steps} steps of {baseline.global_batch} samples",
        "",
        f"{'':24}{'number':>7}  {'largest difference':>18}  {'allowed':>8}",
    ]

    # The rows of float64 come first.
    precision = baseline.precision.dtype
    for one in comparison.compared:
        if one.precision != precision:
            precision = one.precision
            lines += ["", f"in {precision}, one process updated by the gradients of the layout:"]
        verdict = "equal" if one.is_equal else f"DIFFERENT, most in {one.worst}"
        largest = size(one.largest)
        if one.what.is_exact and not one.largest:
            largest = "0, bit for bit"
        allowed = f"{one.tolerance:.0e}" if one.tolerance else "0"
        lines.append(f"{one.what:24}{one.count:7}  {largest:>18}  {allowed:>8}  {verdict}")

    gradients = comparison.gradients
    worst = max(gradients, key=lambda name: gradients[name])
    lines.append("")
    lines.append(
        f"worst tensor: {worst}, whose {Quantity.GRADIENTS} differ by {size(gradients[worst])}"
    )
    return [*lines, "not compared:", *(f"  - {one}" for one in comparison.not_compared)]
