"""The model that a checkpoint holds: its settings, vocabulary size, positions and tokenizer.

Every command asks here, so that all agree about every folder, whichever program wrote it. Nothing
here imports torch or reads a tensor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.base.errors import BAD_DATA, bad_data
from meshwright.checkpoint.sources import Source
from meshwright.config import check_model, flags
from meshwright.config.problem import Problem, SettingsError, plain
from meshwright.config.schema import ARCHITECTURE, Model, TrainConfig
from meshwright.data import tokenizers

GPT_NETWORK = "GPT of Block"  # as a state names the network of model/gpt.py


@dataclass(frozen=True)
class SavedModel:
    """The model in one step of a checkpoint; None where neither it nor the flags say."""

    source: Source
    model: Model  # completed from the caller's flags where the checkpoint is silent
    vocab_size: int | None  # without rows of padding
    positions: int | None  # the longest sequence
    seq_length: int | None  # of the sequences that it was trained on
    tokenizer_folder: Path | None  # what `tokenizers.resolve_tokenizer` reads

    @property
    def root(self) -> Path:
        """The folder of the run, or of the step if it belongs to none."""
        return self.source.root or self.source.folder

    @property
    def rows(self) -> int:
        """Rows of the embedding table, which may include padding."""
        return self.source.tensors["wte.weight"].shape[0]

    def require_positions(self) -> int:
        if self.positions is None:
            cure = "give {max_position_embeddings} or {seq_length}"
            folder = plain(self.source.folder)
            raise SettingsError(
                f"{folder} does not say how long its sequences are; {cure}", BAD_DATA
            )
        return self.positions

    def contradictions(self, given: Mapping[str, Any]) -> list[Problem]:
        """List the architecture flags in `given` that differ from the checkpoint."""
        named = {name: given[name] for name in ARCHITECTURE if name in given}
        return check_model.contradictions(
            dataclasses.replace(self.model, **named), self.model, named
        )


def describe_model(source: Source, given: Mapping[str, Any] | None = None) -> SavedModel:
    """Describe the model of a step; the flags in `given` only fill in what it does not say."""
    given = given or {}
    network = source.state.get("network", GPT_NETWORK)
    if network != GPT_NETWORK:
        raise bad_data(
            f"{source.folder} holds a {network}, which only the program that made it builds"
        )
    # What the checkpoint says comes first; flags stand in where it is silent.
    recorded = recorded_settings(source)
    flags_only = {
        name: given[name] for name in ARCHITECTURE if name in given and name not in recorded
    }

    # The longest sequence: a table of positions says it, or whatever length is known.
    seq_length = _positive(recorded.get("seq_length"))
    lengths = (
        recorded.get("max_position_embeddings"),
        flags_only.get("max_position_embeddings"),
        given.get("seq_length"),
        seq_length,
    )
    positions = next(filter(None, map(_positive, lengths)), None)

    # A run with --run-dir keeps its tokenizer there.
    folders = [source.root or source.folder]
    run_dir = recorded.get("run_dir")
    if isinstance(run_dir, str) and run_dir:
        folders.append(Path(run_dir))
    return SavedModel(
        source,
        model_settings(recorded | flags_only, source.folder),
        source.vocab,
        positions,
        seq_length,
        tokenizers.find_saved(*folders),
    )


def recorded_settings(source: Source) -> dict[str, Any]:
    """Return the settings that a step records, with the positions that its state counts."""
    recorded = flags.current_names(source.config)
    if positions := source.state.get("positions"):
        recorded["max_position_embeddings"] = positions
    return recorded


def model_settings(recorded: Mapping[str, Any], where: object, default: Model = Model()) -> Model:  # noqa: B008
    """Return the model among recorded settings; what they do not name is as in `default`."""
    names = {f.name for f in dataclasses.fields(Model)}
    current = flags.current_names(recorded)
    mine = {name: value for name, value in current.items() if name in names}
    values = flags.from_saved(TrainConfig, mine, str(where))
    model = dataclasses.replace(default, **values)
    if problems := check_model.window_problems(model):
        raise SettingsError(f"{plain(where)}: {problems[0].text}", BAD_DATA)
    return model


def _positive(value: Any) -> int | None:
    """Return a length from a file that anyone may have written, or None if it is no length."""
    try:
        return max(int(value), 0) or None
    except (TypeError, ValueError, OverflowError):
        return None
