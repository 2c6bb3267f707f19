"""Where a run was: what a checkpoint keeps beside tensors and settings.

Our own runs save more than this (training/state/resume.py); a reader of another program's
checkpoint fills a `RunState` with what its files say.
"""

from __future__ import annotations

import dataclasses
import json
import typing
from dataclasses import dataclass
from typing import Any

from meshwright.base.errors import bad_data
from meshwright.checkpoint.claims import STEPS
from meshwright.optim.schedule import Schedule


@dataclass
class LossScaleState:
    """The state of optim.loss_scale.LossScale; the default is that of a run without one."""

    dynamic: bool = False
    scale: float = 1.0
    growth_tracker: int = 0
    hysteresis_tracker: int = 2
    in_a_row: int = 0


@dataclass
class RunState:
    """Counters, schedule and loss scale of another program's run; None is what it does not say."""

    iteration: int
    consumed_train_samples: int
    schedule_samples: int  # of successful steps only, if the program counts them apart
    optimizer_steps: int
    schedule: Schedule | None = None  # None: the flags give it
    loss_scale: LossScaleState | None = None  # None: only the counters are known
    positions: int | None = None
    padded_vocab_size: int | None = None

    def as_saved(self) -> dict[str, Any]:
        """Return the state as one of our runs saves it."""
        names = ("iteration", "consumed_train_samples", "schedule_samples", "optimizer_steps")
        state: dict[str, Any] = {name: getattr(self, name) for name in names}
        # With the loss scale the whole state is known; what only our runs have is not set.
        if self.loss_scale is not None:
            state |= {
                "best_iteration": None,
                "best_loss": None,
                "epochs": None,
                "blends": None,
                "nonfinite_in_a_row": 0,
                "skips": [],
                "loss_scale": dataclasses.asdict(self.loss_scale),
                "positions": self.positions,
                "padded_vocab_size": self.padded_vocab_size,
            }
        if self.schedule is not None:
            state["schedule"] = dataclasses.asdict(self.schedule)
        return state


COUNTERS = (
    "iteration",
    "consumed_train_samples",
    "schedule_samples",
    "consumed_train_tokens",
    "schedule_tokens",
    "optimizer_steps",
    "nonfinite_in_a_row",
    "rollbacks",
    "ema_steps",
)


def check_json(value: Any, where: object) -> None:
    """Refuse what cannot be a run's settings or state, since anyone may have made the file."""
    try:
        if not isinstance(value, dict):
            raise TypeError(f"{value!r:.100} is no dictionary")
        json.dumps(value, allow_nan=False, sort_keys=True)
    except (RecursionError, TypeError, ValueError) as error:
        raise bad_data(f"{where}: not what a run saves: {error!r:.300}") from error


def check_saved_state(state: Any, where: object) -> None:
    """Refuse a state that is not as a run saves it, with the types that a run needs."""
    check_json(state, where)
    # By its exact type, since a boolean is an int.
    wrong = []
    for name in COUNTERS:
        count = state.get(name, 0)
        if type(count) is not int or not 0 <= count <= STEPS:
            wrong.append(name)
    losses = state.get("losses", [])
    if not isinstance(losses, list) or any(type(x) not in (int, float) for x in losses):
        wrong.append("losses")
    scale = state.get("loss_scale", dataclasses.asdict(LossScaleState()))
    required = ("dynamic", "scale", "growth_tracker", "hysteresis_tracker")
    if not isinstance(scale, dict) or any(
        type(scale.get(name)) not in (bool, int, float) for name in required
    ):
        wrong.append("loss_scale")
    if "schedule" in state and (fault := schedule_fault(state["schedule"])):
        wrong.append(f"schedule ({fault})")
    if wrong:
        raise bad_data(f"{where}: not what a run saves: {', '.join(wrong)}")


def schedule_fault(saved: Any) -> str:
    """Return why a saved schedule cannot be followed, or nothing."""
    if not isinstance(saved, dict):
        return "no dictionary"
    kinds = typing.get_type_hints(Schedule)
    for name, value in saved.items():
        if name not in kinds or type(value) not in ((str,) if kinds[name] is str else (int, float)):
            return f"{name} {value!r:.100}"
    # Numbers of the right types may still divide by zero or overflow.
    try:
        schedule = Schedule(**saved)
        for samples in (0, schedule.decay, schedule.wd_samples):
            schedule.lr(samples)
            schedule.wd(samples)
    except (ArithmeticError, TypeError, ValueError) as error:
        return str(error)
    return ""
