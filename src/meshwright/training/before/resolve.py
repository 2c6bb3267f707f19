"""Decide what a run is before torch is imported: its settings, its files and its vocabulary.

`resolve` raises UserError with all that is wrong in the settings. `meshwright train`, its
--dry-run and the Python API make a run of what it returns.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.base import console
from meshwright.base.console import say
from meshwright.base.errors import BAD_DATA, UserError
from meshwright.base.hints import near_path
from meshwright.base.runs.rows import holds_steps
from meshwright.base.storage import copies
from meshwright.base.storage.addresses import shown
from meshwright.base.version import our_version
from meshwright.checkpoint import formats, mirror, owner, steps
from meshwright.config import check_model, checks, data_paths, dialects, flags, notices
from meshwright.config.check_steps import batch_problems, schedule_problems
from meshwright.config.fields import spelling, with_settings
from meshwright.config.grammar import blend
from meshwright.config.problem import (
    GivenAs,
    Problem,
    SettingsError,
    Wording,
    plain,
    require,
    stated,
    with_value,
)
from meshwright.config.schema import TokenizerFlags, TrainConfig
from meshwright.data import tokenizers
from meshwright.data.sets import count_epochs
from meshwright.data.tokenizers import Tokenizer
from meshwright.model import counts
from meshwright.runtime.ranks.team import Team
from meshwright.runtime.ranks.world import World, require_world_size
from meshwright.training.before.packages import require_packages
from meshwright.training.state.resume import (
    checkpoint_architecture,
    guard_existing,
    guard_run_folder,
    open_start,
    saved_settings,
    taken_over,
)
from meshwright.training.state.saver import check_export

if TYPE_CHECKING:
    from meshwright.checkpoint.sources import Source
    from meshwright.data.datasets import Datasets
    from meshwright.training.micro_step import Loss
    from meshwright.training.network import Model


@dataclass(frozen=True)
class Vocabulary:
    """The ids of a run: its tokenizer, if it has one, and their number without and with padding."""

    tokenizer: Tokenizer | None
    size: int
    padded: int
    kind: str = ""  # as the log names it
    folder: Path | None = None  # the folder of a tokenizer that no flag names

    def print_lines(self) -> None:
        if self.tokenizer is None:
            say(f"> no tokenizer: the vocabulary's size is given, {self.size}")
        else:
            say(f"> building {self.kind} tokenizer ...")
        if self.tokenizer is not None and self.folder:
            console.notice(
                f"tokenizer: {self.tokenizer.name} with {self.size:,} ids, found in {self.folder}"
            )
        say(tokenizers.padding_line(self.size, self.padded))

    def identity(self) -> dict[str, Any]:
        """Return what must be equal on all ranks, whose files may differ between machines."""
        name, files = None, dict[str, str]()
        if self.tokenizer is not None:
            name, files = self.tokenizer.name, tokenizers.file_hashes(self.tokenizer)
        sizes = {"vocabulary size": self.size, "padded vocabulary size": self.padded}
        hashes = {f"SHA-256 of the tokenizer's {file}": sha256 for file, sha256 in files.items()}
        return {"tokenizer": name, **sizes, **hashes}


NO_VOCABULARY = Vocabulary(None, 0, 0)


@dataclass(frozen=True)
class Caller:
    """A model, loss or data of the caller's own, and how it wants to be stopped.

    `model`, `loss` and `datasets` replace ours: docs/extending.md shows all three. With
    `handle_signals` a first SIGTERM or Ctrl-C, or a signal of --exit-signal, finishes the step and
    saves, unless the settings say --no-exit-signal-handler; without it the caller has the signals.
    """

    model: Model | None = None
    loss: Loss | None = None
    datasets: Datasets | None = None
    handle_signals: bool = False
    start: Source | None = None  # another program's checkpoint of --load, which was opened before


@dataclass(frozen=True)
class TrainingRun:
    """A run as it was decided, on one rank; nothing of it changes later."""

    config: TrainConfig
    vocabulary: Vocabulary
    caller: Caller = Caller()
    # What must be equal on all ranks, if there are several.
    identity: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)  # as Megatron's log names them
    problem: UserError | None = None  # of this rank's files; raised when all ranks have met
    world: World = World()
    command: list[str] = field(default_factory=list)
    # Settings that were given under older names, as Megatron's files have them.
    switches: dict[str, bool] = field(default_factory=dict)
    ignored: Mapping[str, Any] = field(default_factory=dict)  # given flags without effect

    @property
    def folder(self) -> Path | None:
        return run_folder_of(self.config)


def complete_settings(parsed: flags.Parsed[TrainConfig]) -> TrainConfig:
    """Take the architecture from --load where no flag is given, and note where it is from."""
    return complete_from_start(parsed)[0]


def complete_from_start(
    parsed: flags.Parsed[TrainConfig], ranks: int = 1
) -> tuple[TrainConfig, Source | None]:
    """Complete the settings; also return another program's checkpoint that was opened for this.

    The run loads it without opening it again. One of ours is opened anew, to verify its files.
    """
    load = parsed.config.checkpoint.load
    source = open_start(parsed.config, ranks) if load else None
    if source is None:
        return parsed.config, None
    config = checkpoint_architecture(parsed.config, set(flags.given_settings(parsed)), source)

    # Errors and --print-config say that these settings come from the checkpoint.
    before, now = flags.to_dict(parsed.config), flags.to_dict(config)
    inherited = {name: now[name] for name in now if now[name] != before[name]}
    parsed.sources.update(dict.fromkeys(inherited, f"checkpoint {load}"))
    require_fit(config, inherited)
    parsed.notices.extend(notices.without_effect(config, parsed.words))

    # Opening another program's files may take long, as its pickles are read in a child process.
    is_reusable = source.kind != steps.NATIVE and config.checkpoint.weights == "plain"
    return config, source if is_reusable else None


def note_export(parsed: flags.Parsed[TrainConfig], config: TrainConfig) -> None:
    """Say before a training by a recipe if its model cannot be exported."""
    if parsed.recipe:
        from meshwright.checkpoint import exports
        from meshwright.checkpoint.huggingface.writer import export_notices

        positions = config.model.max_position_embeddings or config.data.seq_length
        parsed.notices.extend(export_notices(exports.without_idle_window(config.model, positions)))


def require_start_folder(parsed: flags.Parsed[TrainConfig]) -> None:
    """Refuse token files of a config.toml that count from another folder, where the run began."""
    c = parsed.config
    run = Path(c.checkpoint.run_dir or c.checkpoint.save or "")
    for name in ("data_path", "train_data_path"):
        # Only a run's own config.toml has paths that count from somewhere else.
        source, prefixes = parsed.sources[name], list[str]()
        folder = Path(source).resolve().parent
        with suppress(ValueError):  # not a blend, which is reported as such
            prefixes = blend(getattr(c.data, name))[1] if Path(source).name == "config.toml" else []
        for prefix in prefixes:
            if Path(prefix).is_absolute() or Path(f"{prefix}.idx").exists():
                continue
            # The run was started where both the data and the run's folder are found.
            starts = (
                f for f in folder.parents if Path(f, f"{prefix}.idx").exists() and f / run == folder
            )
            start = next(starts, None)
            raise UserError(
                f"data {prefix}: missing here; relative paths in {source} count from the folder where the run was "
                f"started; run it there{f': cd {start}' if start else ''}",
                BAD_DATA,
            )


def require_run_in_place(parsed: flags.Parsed[TrainConfig]) -> None:
    """Refuse the config.toml of a run that is not in the folder which that file names.

    The run was moved or copied, or the path counts from another folder. It would not be continued:
    a new one would begin, or that which was copied would go on.
    """
    c = parsed.config.checkpoint
    source, save = Path(parsed.sources["save"]), c.save
    folder = source.parent.resolve()
    # With --run-dir the file lies there, beside no checkpoints.
    if not save or c.run_dir or source.name != "config.toml" or Path(save).resolve() == folder:
        return
    if not (holds_steps(folder) or steps.list_checkpoints(str(folder))):
        return

    here = str(source.parent)
    advice = f"add {with_value('save', here)} {with_value('load', here)}"
    start = next((f for f in folder.parents if f / save == folder), None)
    if start and not Path(save).is_absolute():
        advice += f", or start it where its relative paths begin: cd {start}"
    raise SettingsError(
        f"{source} has {with_value('save', save)}, but its run is in {here} and would not be continued; {advice}"
    )


def require_fit(config: TrainConfig, inherited: Mapping[str, Any]) -> None:
    """Refuse flags that do not fit inherited settings, and say which come from the checkpoint."""
    load = str(config.checkpoint.load)
    words = Wording(given={name: GivenAs(spelling(name), " ", f" of {load}") for name in inherited})
    wrong = [
        problem
        for problem in check_model.architecture_problems(config.model, config.data)
        if not inherited.keys().isdisjoint(problem.about)
    ]
    if "max_position_embeddings" in inherited:  # nobody gave it, so the error says whose it is
        made = f"the model of {plain(load)} was made for {config.model.max_position_embeddings} positions"
        text = f"{made}, and {stated(config.data, 'seq_length')} is more: lower {{seq_length}}, or train a new model"
        about = ("max_position_embeddings", "seq_length")
        wrong = [Problem(about, text) if problem.about == about else problem for problem in wrong]
    require(wrong, words)


def resolve(
    config: TrainConfig,
    world: World,
    command: list[str] | None = None,
    ignored: Mapping[str, Any] | None = None,
    caller: Caller = Caller(),  # noqa: B008
) -> TrainingRun:
    """Decide a run on this rank; its settings have been checked.

    `ignored` are given flags without effect, which the log shows. A single process raises an error
    of its files at once; several ranks all raise it when they have met.
    """
    config = with_settings(config, world_size=world.size)
    require_folders(config)
    config, vocabulary, problem = look_at_files(config, world)
    arguments = dialects.shown_arguments(
        config, ignored or {}, config.parallel.distributed_backend or ""
    )
    identity = identity_of(config, vocabulary) if world.size > 1 and problem is None else {}
    switches = flags.switches_in_effect(config, ignored or {})
    return TrainingRun(
        config,
        vocabulary,
        caller,
        identity,
        arguments,
        problem,
        world,
        command or [],
        switches,
        ignored or {},
    )


def complete_from_others(resolved: TrainingRun, team: Team) -> TrainingRun:
    """Take the architecture from other machines' checkpoint where --load has none here.

    Machines may have disks of their own. On one that is new to the run --load is empty, and one
    whose step is damaged cannot say either.
    """
    config, load = resolved.config, resolved.config.checkpoint.load
    if team.size == 1 or not load:
        return resolved
    has_steps = bool(steps.list_steps(steps.split_path(load)[0]))
    has_own = has_steps and open_start(config, team.size) is not None
    settings = flags.to_dict(config)
    stated = {name: settings[name] for name in taken_over()} if has_own else {}
    theirs = team.merge(stated, first_of)
    if has_own or not theirs:
        return resolved
    config = with_settings(config, **flags.from_saved(TrainConfig, theirs, load))
    r = resolved
    return resolve(config, r.world, r.command, r.ignored, r.caller)


def first_of(stated: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what the first rank with a checkpoint states."""
    return next((settings for settings in stated if settings), {})


def check_settings(config: TrainConfig, world: World, has_datasets: bool) -> TrainConfig:
    """Check settings that no command line has checked, and return them in full.

    If the caller has data sets of its own, the settings' data are left out.
    """
    require_world_size(world, config.parallel.world_size)
    config = with_settings(config, world_size=world.size)
    config = apply_deepspeed_file(config, prints=world.rank == 0)
    if has_datasets:
        config = replace(config, data=data_paths.without(config.data))
        config = with_settings(config, multiple_validation_sets=False, validation_set_names=[])
    require(checks.problems(config, needs_data=not has_datasets))
    return config


def resolve_length(config: TrainConfig, prints: bool = True) -> TrainConfig:
    """Count the samples of --train-epochs, and check the schedule that they make."""
    if (epochs := config.training.train_epochs) is None:
        return config
    config = count_epochs(config)
    require(batch_problems(config) + schedule_problems(config, has_length=True))
    if prints:
        console.notice(
            f"--train-epochs {epochs:g} of this data: --train-samples {config.training.train_samples}"
        )
    return config


def identity_of(config: TrainConfig, vocabulary: Vocabulary) -> dict[str, Any]:
    """Return what must be equal on all ranks: settings, files, and versions but torch's."""
    # Written with addresses of objects, not the folders of their local copies, which may differ.
    own: dict[str, Any] = json.loads(shown(json.dumps(saved_settings(config))))

    # These may differ: the rank's numbers, its machine's folder, and the one that rank 0 writes.
    del own["rank"], own["local_rank"], own["local_dir"], own["run_dir"]
    del own["deepspeed_config"]  # its values are among the settings

    # These must not: the contents of the data, each pair of files under its own name.
    for name, what in (("data_fingerprint", "files"), ("data_contents", "tokens")):
        hashes = zip(data_paths.prefixes(config.data), own.pop(name), strict=True)
        own |= {f"--data-path {shown(str(prefix))} (its {what})": value for prefix, value in hashes}
    for prefix in data_paths.prefixes(config.data):
        if (copy := copies.sparse_copy(f"{prefix}.bin")) is not None:
            own[f"--data-path {shown(str(prefix))} (its objects)"] = copy.objects
    return (
        own
        | {"meshwright": our_version(), "python": platform.python_version()}
        | vocabulary.identity()
    )


def require_folders(config: TrainConfig) -> None:
    """Require a format that can be written, and that no file is where a folder is to be."""
    c = config.checkpoint
    if c.ckpt_format != "native":
        formats.require_written(c.ckpt_format)
    folders = {
        "run_dir": c.run_dir,
        "save": c.save,
        "tensorboard_dir": config.logging.tensorboard_dir,
    }
    for name, root in folders.items():
        if not root:
            continue
        path = Path(root)
        found = next((one for one in (path, *path.parents) if one.exists()), path)
        if found.exists() and not found.is_dir():
            where = "" if found == path else f": {found}"
            raise SettingsError(
                f"{with_value(name, root)}{where} is a file, not a folder; give another path"
            )


def bring_files(config: TrainConfig) -> None:
    """Fetch what the run needs from object storage, and require all token files."""
    c = config.checkpoint
    for path in filter(None, (c.load, c.save, c.run_dir)):
        mirror.fetch(path)
    for prefix in data_paths.prefixes(config.data):
        copies.prepare_tokens(prefix)
        missing = [
            f"{prefix}{end}" for end in (".bin", ".idx") if not Path(f"{prefix}{end}").exists()
        ]
        if missing:
            advice = "; create the pair with `meshwright preprocess` and pass their common path without the extension"
            if Path(prefix).is_file():
                advice = f"; make token files of it: meshwright preprocess --input {prefix} --output-prefix PREFIX"
            hint = near_path(str(prefix), ".idx") or advice
            raise UserError(f"data {prefix}: missing {' and '.join(missing)}{hint}", BAD_DATA)


def look_at_files(
    config: TrainConfig, world: World
) -> tuple[TrainConfig, Vocabulary, UserError | None]:
    """Return settings and vocabulary, and of one of several ranks what is wrong with its files."""
    try:
        bring_files(config)
        config = resolve_length(config, prints=world.rank == 0)
        if world.rank == 0:
            require_free_folders(config)
            require_packages(config.logging)
        return config, find_vocabulary(config, run_folder_of(config)), None
    except UserError as error:
        if world.size == 1:
            raise
        return config, NO_VOCABULARY, error


def require_free_folders(config: TrainConfig) -> None:
    """Refuse to overwrite another run, and an export that could not be written at the end."""
    for name in ("save", "run_dir"):
        if folder := getattr(config.checkpoint, name):
            owner.require_unlocked(folder, f"change {{{name}}}")
    if config.checkpoint.save:
        guard_existing(config)
    guard_run_folder(config)
    check_export(config)


def apply_deepspeed_file(config: TrainConfig, prints: bool) -> TrainConfig:
    """Apply the file of --deepspeed_config to the settings that have their defaults."""
    defaults = flags.to_dict(TrainConfig())
    given = {name for name, value in flags.to_dict(config).items() if value != defaults[name]}
    config, notes, problems = dialects.fill_from_file(config, given)
    require(problems)
    for note in notes if prints else ():
        console.notice(f"note: {note}")
    return config


def find_vocabulary(config: TrainConfig, folder: Path | None) -> Vocabulary:
    """Return the tokenizer, if the flags or the files name one, and the sizes of its vocabulary."""
    t, loaded = config.tokenizer, loaded_folder(config)
    beside_data = tokenizers.find_of_data(data_paths.prefixes(config.data))

    def sized(
        tokenizer: Tokenizer | None, size: int, folder_found: Path | None = None
    ) -> Vocabulary:
        named = t.tokenizer or (tokenizer.name if tokenizer and folder_found else t.tokenizer_type)
        return Vocabulary(tokenizer, size, padded_for(config, size), str(named), folder_found)

    if is_size_alone(config, beside_data):
        assert t.vocab_size
        return sized(None, t.vocab_size)
    is_loaded = loaded is not None and steps.find_step(loaded, sizes=False)[0] is not None
    # Beside data that know their tokenizer, files that a killed or replaced run left mean nothing.
    saved = tokenizers.find_saved(
        *([loaded if is_loaded else None] if beside_data else [folder, loaded])
    )
    tokenizer = tokenizers.resolve_for_data(t, beside_data, saved)
    if tokenizer is None and loaded and is_loaded:
        raise tokenizers.missing_error(loaded)
    tokenizer = tokenizer or tokenizers.build_tokenizer(t)  # which raises, naming the missing flags
    return sized(
        tokenizer, tokenizer.size, None if tokenizers.is_named(t) else saved or beside_data
    )


def padded_for(config: TrainConfig, vocab: int) -> int:
    """Return the size of a vocabulary with its padding in this run."""
    m, tp = config.model, config.parallel.tensor_model_parallel_size
    return counts.padded_size(vocab, m.make_vocab_size_divisible_by, tp, m.pad_vocab_size_to)


def is_size_alone(config: TrainConfig, beside_data: Path | None) -> bool:
    """Return whether the vocabulary is a size alone, without a tokenizer."""
    t = config.tokenizer
    if t.vocab_size is None or tokenizers.is_named(t) or t.tokenizer_type == "ByteTokenizer":
        return False
    if not config.data.mock_data and t.tokenizer_type != "GPT2BPETokenizer":
        return False
    # A size from a checkpoint may count padding, so a smaller tokenizer is none of its own.
    return (
        beside_data is None
        or tokenizers.build_tokenizer(TokenizerFlags(), beside_data).size < t.vocab_size
    )


def run_folder_of(config: TrainConfig) -> Path | None:
    """Return the folder of a run's log and settings."""
    root = config.checkpoint.run_dir or config.checkpoint.save
    return Path(root) if root else None


def loaded_folder(config: TrainConfig) -> Path | None:
    """Return the folder of --load, without the step that it may name."""
    return steps.split_path(config.checkpoint.load)[0] if config.checkpoint.load else None
