"""Require the packages that a run's flags need, before it begins."""

from __future__ import annotations

import importlib.util
import sys

from meshwright.base.errors import UNAVAILABLE
from meshwright.config.problem import SettingsError
from meshwright.config.schema import Logging

# The setting that needs a package, the package, and what installs it.
PACKAGES = (
    ("tensorboard_dir", "tensorboard", "log"),
    ("wandb_project", "wandb", "wandb"),
    ("trackio_project", "trackio", "trackio"),
)


def require_packages(logging: Logging) -> None:
    """Refuse a tracker whose package is not installed."""
    for setting, package, extra in PACKAGES:
        known = (
            sys.modules[package] if package in sys.modules else importlib.util.find_spec(package)
        )
        if getattr(logging, setting) and known is None:
            hint = f"install it with pip install 'meshwright[{extra}]'"
            raise SettingsError(f"{{{setting}}} needs {package}: {hint}", UNAVAILABLE)
