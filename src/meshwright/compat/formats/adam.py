"""Adam's state by number, as torch's optimizers save it and most programs keep it.

A number says nothing about its parameter. A reader rebuilds the order in which the program went
through its parameters, group after group; each shape must then agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from meshwright.base.errors import UserError, bad_data
from meshwright.checkpoint.boxes import Shape
from meshwright.checkpoint.claims import claimed_steps

MOMENTS = ("exp_avg", "exp_avg_sq")
WITHOUT = "add --no-load-optim (of convert: --no-optimizer) to load only the weights"
# Where programs keep float32 masters, in lists per group, beside torch's own state.
MASTERS = (
    "fp32_from_fp16_params",
    "fp32_from_fp16",
    "shard_fp32_from_float16_groups",
    "fp32_groups",
)


def unreadable_state(path: Path, why: str) -> UserError:
    return bad_data(f"{path}: the optimizer's state cannot be read, {why}; {WITHOUT}")


def torch_state(path: Path, tree: Any) -> dict[str, Any]:
    """Return torch's own state_dict, which may lie within the program's."""
    for key in ("optimizer", "optimizer_state_dict"):
        if isinstance(tree, dict) and isinstance(tree.get(key), dict):
            tree = tree[key]
    if not isinstance(tree, dict) or not isinstance(tree.get("param_groups"), list):
        raise unreadable_state(path, "it is not laid out as torch's")
    return tree


def step_counts(path: Path, tree: Any) -> Iterator[int]:
    # Apex counts in the groups, torch for each parameter.
    state_dict = torch_state(path, tree)
    for entry in (*state_dict["param_groups"], *state_dict.get("state", {}).values()):
        if isinstance(entry, dict) and "step" in entry:
            yield claimed_steps(entry["step"], "a step of Adam")


def numbered_state(path: Path, tree: Any) -> tuple[list[dict[str, Any]], list[Any]]:
    """Return the state of each parameter, group after group, and the masters if there are any."""
    state_dict = torch_state(path, tree)
    state = state_dict.get("state")
    keys = []
    for group in state_dict["param_groups"]:
        keys += group.get("params", ())
    if not isinstance(state, dict) or not all(isinstance(state.get(key), dict) for key in keys):
        raise unreadable_state(path, "parameters have no state")
    states = [state[key] for key in keys]
    # Programs keep the masters under different names, group by group.
    by_group: list[Any] = next((tree[kind] for kind in MASTERS if kind in tree), [])
    masters = [master for group in by_group for master in group]
    return states, masters


def match_numbered(
    path: Path, tree: Any, weights: Sequence[tuple[str, torch.Tensor]], needs_masters: bool = False
) -> list[dict[str, torch.Tensor]]:
    """Return the moments of each weight, and under "" its master.

    `weights` are (our name, tensor), group after group, in the program's order. Where not every
    weight has a master, those of more than half precision are their own; without masters all are,
    unless `needs_masters`.
    """
    states, masters = numbered_state(path, tree)
    if len(states) != len(weights):
        raise unreadable_state(
            path, f"it is of {len(states)} parameters, the model has {len(weights)}"
        )
    # Masters come in the order of the weights that have one.
    is_own = not masters and not needs_masters
    has_each = len(masters) == len(weights)
    waiting = masters[::-1]
    out = []
    for (name, weight), state in zip(weights, states, strict=True):
        shape = tuple(weight.shape)
        values = {kind: require_tensor(path, state.get(kind), shape, name) for kind in MOMENTS}
        if is_own or (weight.element_size() > 2 and not has_each):
            values[""] = weight
        else:
            values[""] = require_tensor(path, waiting.pop() if waiting else None, shape, name)
        out.append(values)
    if waiting:
        raise unreadable_state(path, f"{len(waiting)} master weights belong to no parameter")
    return out


def require_tensor(path: Path, value: Any, shape: Shape, name: str) -> torch.Tensor:
    """Return the value if it is a tensor of this shape."""
    actual: Shape | str = "nothing"
    if isinstance(value, torch.Tensor):
        actual = tuple(value.shape)
        if actual == shape:
            return value.detach()
    raise unreadable_state(path, f"at the place of {name} {shape} it has {actual}")
