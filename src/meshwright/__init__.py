"""Pre-train GPT models: text in, a trained and usable language model out.

    import meshwright

    m = meshwright.load("run")           # any checkpoint folder, ours or another program's
    print(m.generate("Once upon a time"))

Names are imported when they are first used, so `import meshwright` imports neither torch nor numpy.
docs/python.md documents them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshwright.api import TrainResult as TrainResult
    from meshwright.api import evaluate as evaluate
    from meshwright.api import generate as generate
    from meshwright.api import load as load
    from meshwright.api import train as train
    from meshwright.apps.evaluate.perplexity import Score as Score
    from meshwright.base.errors import UserError as UserError
    from meshwright.checkpoint.convert import convert as convert
    from meshwright.config.schema import TrainConfig as TrainConfig
    from meshwright.generation.language_model import LanguageModel as LanguageModel

_HOMES = {
    "TrainConfig": "config.schema",
    "UserError": "base.errors",
    "LanguageModel": "generation.language_model",
    "Score": "apps.evaluate.perplexity",
    "convert": "checkpoint.convert",
} | dict.fromkeys(("TrainResult", "evaluate", "generate", "load", "train"), "api")

__all__ = sorted([*_HOMES, "__version__"])


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from meshwright.base.version import our_version

        return our_version()
    if name not in _HOMES:
        raise AttributeError(f"module 'meshwright' has no attribute {name!r}")
    from importlib import import_module

    try:
        return getattr(import_module(f"meshwright.{_HOMES[name]}"), name)
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("meshwright.apps"):
            raise
        raise AttributeError(
            f"meshwright.{name} is of apps/, which this installation lacks in part"
        ) from None


def __dir__() -> list[str]:
    return __all__
