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

from meshwright import device as devices
from meshwright.errors import UNEQUAL, UserError
from meshwright.files import replacing
from meshwright.report.page import CERTIFICATE
from meshwright.settings import flags
from meshwright.settings.schema import TrainConfig
from meshwright.training.before.preflight import pick_backend
from meshwright.training.before.sizes import describe_layout
from meshwright.verify.compare import EXACT, GRADIENTS, Comparison, compare
from meshwright.verify.small_run import Place
from meshwright.verify.twin import make_twin
from meshwright.version import our_version

Show = Callable[[Comparison, str], None]  # takes the summary too, one line


def verify(config: TrainConfig, place: Place, command: list[str], show: Show) -> None:
    """Compare --verify-layout steps, write the certificate and show it; raise if they differ."""
    began, root = time.perf_counter(), config.checkpoint.run_dir or config.checkpoint.save
    folder = Path(root) if root else None
    made = compare(config, place.team, config.training.verify_layout, folder, place)
    values = certificate(config, made, place, command) | {"seconds": round(time.perf_counter() - began, 3)}
    if folder is not None:
        place.team.run_on_lead(lambda: write(folder / CERTIFICATE, values))
    show(made, f"{'layout verified' if made.is_equal else 'the layout differs'}: {values['summary']}")
    if not made.is_equal:
        raise UserError(describe_difference(made, folder), UNEQUAL, everywhere=True)


def write(path: Path, values: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        file.write(json.dumps(values, indent=1, allow_nan=False).encode() + b"\n")


def certificate(config: TrainConfig, made: Comparison, place: Place, command: list[str]) -> dict[str, Any]:
    """Return the values of the file, all as JSON has them."""
    p, defaults, device = config.parallel, flags.to_dict(TrainConfig()), place.device
    given = {name: value for name, value in flags.to_dict(config).items() if value != defaults[name]}
    versions = {"meshwright": our_version(), "torch": torch.__version__, "python": platform.python_version()}
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
    values = {
        "verdict": "equal" if made.is_equal else "different",
        "summary": summarize(made),
        "time": round(time.time(), 3),
        "command": command,
        "versions": versions,
        "device": devices.device_name(device),
        "backend": pick_backend(p, device) if config.world > 1 else None,
        "layout": layout,
        "settings": given,
        "steps": made.steps,
        "reduced": make_twin(config, device.type != "cpu").sizes,
        "compared": [dataclasses.asdict(one) | {"is_equal": one.is_equal} for one in made.compared],
        "gradients": made.gradients,
        "differences": [dataclasses.asdict(one) for one in made.differences],
        "not_compared": made.not_compared,
    }
    finite: dict[str, Any] = _finite(values)
    return finite


def _finite(value: Any) -> Any:
    """Write numbers that JSON does not have as words."""
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def summarize(made: Comparison) -> str:
    """Return the outcome in a line, as the log and the page of a run show it."""
    beside = f"in {made.steps} step{'s' * (made.steps > 1)} beside one process"
    if made.differences:
        first = made.differences[0]
        return f"{first.what}, {first.name}, first at {first.where}, by {size(first.largest)}, {beside}"
    farthest = max(made.compared, key=lambda one: one.largest)
    most = f"differ by at most {size(farthest.largest)} ({farthest.what}, {farthest.worst})"
    return f"{len(made.gradients)} parameters, their gradients and their state, {beside}, {most}"


def size(x: float) -> str:
    return "0" if x == 0 else "not comparable" if math.isinf(x) else f"{x:.1e}"


def describe_difference(made: Comparison, folder: Path | None) -> str:
    """Return the error: what differs first, where, and what to do."""
    first, kinds = made.differences[0], list(dict.fromkeys(one.what for one in made.differences))
    by = "" if math.isinf(first.largest) else f" by {size(first.largest)}, more than {size(first.tolerance)}"
    then = f"; then {', '.join(kinds[1:])}" if kinds[1:] else ""
    kept = f"; all differences are in {folder / CERTIFICATE}" if folder else ""
    return (
        f"this layout does not compute what one process computes: {first.what} differ first, {first.name}{by} "
        f"({first.where}){then}{kept}; do not train with it, and report it with these flags"
    )


def table(config: TrainConfig, made: Comparison, place: Place) -> list[str]:
    """Return what was compared, for people."""
    twin, p = made.config, config.parallel
    m, backend = twin.model, pick_backend(p, place.device)
    more = [f"ZeRO {p.zero_stage}"] * bool(p.zero_stage) + ["sequence parallel"] * bool(p.sequence_parallel)
    more += [f"{config.chunks} stages on each pipeline rank"] * (config.chunks > 1)
    small = (
        f"{m.num_layers} layers of width {m.hidden_size}, {m.num_attention_heads} heads, {twin.data.seq_length} tokens"
    )
    lines = [
        f"layout    {', '.join([describe_layout(config), *more])}; {backend} on {devices.device_name(place.device)}",
        f"compared  with one process: {small}, float64, {made.steps} steps of {twin.global_batch} samples",
        "",
        f"{'':24}{'number':>7}  {'largest difference':>18}  {'allowed':>8}",
    ]
    for one in made.compared:
        verdict = "equal" if one.is_equal else f"DIFFERENT, most in {one.worst}"
        shown = "0, bit for bit" if one.what in EXACT and not one.largest else size(one.largest)
        allowed = "0" if one.what in EXACT else f"{one.tolerance:.0e}"
        lines.append(f"{one.what:24}{one.count:7}  {shown:>18}  {allowed:>8}  {verdict}")
    worst = max(made.gradients, key=lambda name: made.gradients[name])
    lines += ["", f"worst tensor: {worst}, whose {GRADIENTS} differ by {size(made.gradients[worst])}"]
    return lines + ["not compared:", *(f"  - {one}" for one in made.not_compared)]
