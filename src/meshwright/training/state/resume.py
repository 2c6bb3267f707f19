"""Resume from a checkpoint: take over its state, compare its settings, refuse contradictions."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from meshwright.base.console import remark
from meshwright.base.errors import (
    BAD_DATA,
    LOCKED,
    bad_data,
    first_line,
    too_old,
    what_it_holds,
)
from meshwright.base.runs.history import read_settings
from meshwright.base.runs.rows import METRICS, find_last_step, holds_steps
from meshwright.base.storage import addresses
from meshwright.checkpoint import loading, steps
from meshwright.checkpoint.disks import OnOtherMachine
from meshwright.checkpoint.formats import all_formats
from meshwright.checkpoint.loading import OpenOptions
from meshwright.checkpoint.manifests import DamagedCheckpoint, find_manifest, read_manifest
from meshwright.checkpoint.saved_model import model_settings, recorded_settings
from meshwright.checkpoint.sources import Source
from meshwright.config import flags
from meshwright.config.check_model import contradictions
from meshwright.config.check_steps import kept_by
from meshwright.config.data_paths import path_sets, path_settings, prefixes
from meshwright.config.fields import spelling, with_settings
from meshwright.config.problem import SettingsError, listed, with_value
from meshwright.config.schema import ARCHITECTURE, STATED, Checkpoint, TrainConfig, flags_with
from meshwright.data.files.indexed import Indexed, content_sample, fingerprint
from meshwright.data.history import BlendHistory, continue_history, first_eight
from meshwright.data.sets import find_parts, needed_sets
from meshwright.optim.rule_table import AVERAGE, STATE
from meshwright.optim.schedule import build_schedule, resume_schedule, warn_of_idle_steps
from meshwright.training.state.saver import is_continued

STEPS_SHOWN = 8  # of those that --load holds


def describe_recovery(config: TrainConfig, loaded: loading.LoadedStep, seconds: float) -> str:
    """Return what was found in --load, passed over and verified, and what is done again."""
    c = config.checkpoint
    assert c.load
    root, named_step = steps.split_path(c.load)
    parts = []

    # Found.
    saved = [named_step] if named_step is not None else steps.list_steps(root)
    if saved:
        numbers = ", ".join(f"{step:,}" for step in saved[:STEPS_SHOWN])
        if len(saved) > STEPS_SHOWN:
            numbers += f" and {len(saved) - STEPS_SHOWN} more"
        plural = "s" if len(saved) > 1 else ""
        parts.append(f"found step{plural} {numbers} in {root}")

    # Passed over: damaged steps, and those that a killed run has left unfinished.
    for note, step, why in loaded.passed_over:
        if step is None:
            parts.append(note.removeprefix("WARNING: "))
        else:
            parts.append(f"{step}: skipped, damaged ({why})")
    if named_step is None:
        for name in steps.listing(root):
            if name.endswith(".tmp"):
                parts.append(f"{name} was never finished")

    # Verified. Another program's checkpoint has no manifest.
    folder = steps.step_folder(root, loaded.step)
    if find_manifest(folder).exists():
        files = read_manifest(folder).values()
        size = sum(f.size for f in files)
        amount = f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"
        how = "verified in full" if c.verify == "full" else "verified"
        parts.append(f"{loaded.step:,}: {how} ({len(files)} files, {amount}, {seconds:.1f} s)")

    # Done again.
    resuming = f"resuming at step {loaded.step:,}"
    last = find_last_step(Path(c.run_dir or c.save or "")) if is_continued(c) else None
    if last is not None and last[0] > loaded.step:
        number, how_it_ended = last
        redone = f"redoing {number - loaded.step:,} steps since"
        resuming += f", {redone}: the attempt before {how_it_ended}"
    return "; ".join([*parts, resuming])


# Before anything is built


def open_options(config: TrainConfig) -> OpenOptions:
    c = config.checkpoint
    heads, optimizer = config.model.num_attention_heads, not (c.finetune or c.no_load_optim)
    return OpenOptions(c.verify, c.trust_pickle, heads, optimizer, c.weights)


def lacking_sizes(config: TrainConfig) -> list[str]:
    """Return the sizes that a network needs and no flag gives."""
    needed = ("num_layers", "hidden_size", "num_attention_heads")
    return [f"{{{name}}}" for name in needed if not getattr(config.model, name)]


def refuse_missing(config: TrainConfig) -> None:
    """Refuse a --load without a checkpoint, unless it is --save: then the run starts anew."""
    c = config.checkpoint
    lacking = lacking_sizes(config)
    # not use_checkpoint_args: as in Megatron, the settings given count until there is a checkpoint
    switches = ("finetune", "exit_on_missing_checkpoint", "no_load_optim")
    on = [name for name in switches if getattr(c, name)]
    if config.training.skip_train:
        on.append("skip_train")
    if on:
        then = f", but {{{on[0]}=True}} needs one; give a folder that holds a checkpoint"
    elif lacking:
        then = f", and without one {', '.join(lacking)} must be given"
    elif not is_continued(c):
        same = f", or give {with_value('load', c.save)} as in {{save}}" if c.save else ""
        then = f"; to start anew, leave {{load}} out{same}"
    else:
        # The same command begins the run and, after an end of any kind, continues it.
        return
    problem = "no checkpoint found" if Path(c.load or "").exists() else "there is no such folder"
    then = what_it_holds(Path(c.load or "")) or then
    raise SettingsError(f"{{load={c.load}}}: {problem}{then}", BAD_DATA, everywhere=True)


def require_clear_start(config: TrainConfig, source: Source) -> None:
    """Refuse a --load that may be meant to begin a run anew: no step is left, or other data.

    A finished run that is started again is left alone, so that a script may be repeated.
    """
    c, state = config.checkpoint, source.state
    if config.training.skip_train:
        return
    require_chosen_batch(config, source.config.get("global_batch_size"))
    require_counted_tokens(config, state)
    step, consumed = state.get("iteration", 0), state.get("consumed_train_samples", 0)
    root = steps.split_path(c.load or "")[0]
    is_other = not c.save or root.resolve() != Path(c.save).resolve()
    has_more = step > config.steps if config.samples is None else consumed > config.samples
    why, continuing = [], []
    if config.is_over(step, consumed) and (is_other or has_more):
        name = config.lengths[0]
        unit = "steps" if name == "train_iters" else name.removeprefix("train_")
        length = getattr(config.training, name)
        done = f"{step:,} steps ({consumed:,} samples) are done"
        why.append(
            f"{{{name}}} ({length:,} {unit}) counts from the beginning, and {done}, so none is left"
        )
        continuing.append(f"raise {{{name}}}")
    if is_other and (gone := data_left_out(config, state)):
        why.append(f"the data are others: {', '.join(first_eight(gone))} is not among them")
        continuing.append("add {blend_change_at=now}")
    if not why:
        return
    continuing.append("add {override_opt_param_scheduler=True} if the schedule changes")
    lines = [
        f"is this to continue the run in {root} from step {step}, or to begin anew from its weights?",
        *why,
        "to begin anew, add {finetune=True}, with a {save} of its own",
        f"to continue, {', '.join(continuing)}",
    ]
    raise SettingsError("\n  ".join(lines))


def require_chosen_batch(config: TrainConfig, before: int | None) -> None:
    """Refuse a batch other than the checkpoint's that nobody chose, or that miscounts tokens."""
    now, t = config.global_batch, config.training
    if not before or before == now:
        return
    # The tokens of samples that grow are counted by steps of one size.
    counting = "train_tokens" if t.train_tokens else "lr_decay_tokens"
    if t.seq_length_schedule is not None and (t.train_tokens or config.decays_by_tokens):
        raise SettingsError(
            f"the checkpoint's global batch was {before}, and {{{counting}}} with {{seq_length_schedule}} "
            f"counts tokens by steps of one size, not of {now} samples; add {{global_batch_size={before}}}, or give "
            "lengths in steps or samples instead of tokens"
        )
    if t.global_batch_size is not None:
        return
    ranks = " on one data-parallel rank"
    if config.dp > 1:
        ranks = f" x {config.dp} data-parallel ranks"
    micro = kept_by(before, config)
    if micro is None:
        keep = f"take a number of data-parallel ranks that divides {before} to keep the batch and the losses"
    else:
        flags = f"{{global_batch_size={before}}}"
        if micro != config.micro_batch:
            flags += f" {{micro_batch_size={micro}}}"
        keep = f"add {flags} to continue with the same batch, which keeps the losses"
    raise SettingsError(
        f"the checkpoint's global batch was {before}, and without {{global_batch_size}} it would be {now} now "
        f"({{micro_batch_size={config.micro_batch}}}{ranks}); "
        f"{keep}, or add {{global_batch_size={now}}} to change it"
    )


def require_counted_tokens(config: TrainConfig, state: Mapping[str, Any]) -> None:
    """Refuse a length in tokens that is counted by samples where earlier ones had other lengths."""
    t, o = config.training, config.optimizer
    lengths = [("train", t.train_tokens, "consumed_train")]
    # With a schedule of lengths the decay follows the tokens that were read.
    if not config.decays_by_tokens and not o.use_checkpoint_opt_param_scheduler:
        lengths.append(("lr_decay", o.lr_decay_tokens, "schedule"))
    for name, given, counter in lengths:
        samples, read = state.get(f"{counter}_samples", 0), state.get(f"{counter}_tokens")
        counted = round(config.tokens_of(samples))
        if not isinstance(given, int) or read in (None, counted):
            continue
        # What is left is read in the steps that follow, whose number decides their lengths: an
        # earlier batch may have been another one, so that the samples do not tell it.
        done = state.get("iteration", 0) * config.global_batch if name == "train" else samples
        then = round(config.tokens_of(done)) + max(given - read, 0)
        end = max(samples + int(config.in_samples(None, tokens=then)) - done, 1)
        raise SettingsError(
            f"{{{name}_tokens={given}}} would count the checkpoint's {samples:,} samples as {counted:,} tokens, but they "
            f"had other lengths and gave {read:,}; give {{{name}_samples={end}}} instead, which is at as many tokens"
        )


def data_left_out(config: TrainConfig, state: Mapping[str, Any]) -> list[str]:
    """Return the data that the checkpoint's training read and this one does not.

    --blend-change-at says that the change is meant.
    """
    past, d = BlendHistory.from_state(state.get("blends")), config.data
    if past is None or d.mock_data or d.blend_change_at is not None:
        return []
    ours: list[str] = []
    for paths in path_sets(d):
        if paths.split == "train":
            ours += [source.prefix for source in paths.sources]
    # Files that were moved are known by their contents, and changed ones by their names: whether
    # they may have changed is checked elsewhere.
    known = {fingerprint(prefix) for prefix in ours} | set(map(addresses.shown, ours))
    left_out: dict[str, str] = {}
    for name, _ in past.blends[-1].shares:
        content, prefix = name.partition("#")[0], past.sources[name].prefix
        left_out[content] = prefix
    return [
        prefix
        for content, prefix in left_out.items()
        if content not in known and prefix not in known
    ]


def require_moments(config: TrainConfig, source: Source) -> None:
    """Refuse a checkpoint without the moments of --optimizer, as loading would."""
    chosen = config.optimizer.optimizer
    wanted = set(STATE.get(chosen, STATE["adamw"]).values())
    found = {name.partition("/")[2] for name in source.tensors} - {"", AVERAGE}
    # Muon leaves some parameters to AdamW, so its checkpoints have moments of both.
    fits = found >= wanted if chosen == "muon" else found == wanted
    if not config.checkpoint.no_load_optim and not fits:
        raise SettingsError(
            f"{source.folder} has no state of {{optimizer={chosen}}}: it was saved with "
            "{no_save_optim=True} or another {optimizer}; add {no_load_optim=True} or {finetune=True}",
            BAD_DATA,
        )


def is_kept(c: Checkpoint, step: int) -> bool:
    """Return whether --save holds the loaded step, under the name it would be saved with."""
    folder = steps.step_folder(c.save or "", step)
    return is_continued(c) and (find_manifest(folder).exists() or steps.is_foreign(folder))


def guard_existing(config: TrainConfig) -> None:
    """Refuse a --save with checkpoints of another run, unless --save-overwrite moves them."""
    c = config.checkpoint
    assert c.save
    existing, continues = steps.list_checkpoints(c.save), is_continued(c)
    if continues and not c.finetune:
        if c.save_overwrite:
            raise SettingsError(
                "{save_overwrite=True} starts anew and {load} continues the same folder; give only one of them"
            )
        return
    if not existing or c.save_overwrite:
        return
    save = with_value("save", c.save)
    if continues:
        folder = f"{save} holds the one that is loaded: give another folder"
        raise SettingsError(f"{{finetune=True}} starts a new run, but {folder}", LOCKED)
    ours = steps.list_steps(c.save)
    newest = steps.step_folder(c.save, ours[0]).name if ours else existing[-1]
    then = f"continue from {c.load}" if c.load else "start anew"
    load = with_value("load", c.save)
    how = f"give {load} and no {{finetune=True}}" if c.finetune else f"add {load}"
    raise SettingsError(
        f"{save} already holds {newest}: {how} to continue it, or {{save_overwrite=True}} to "
        f"move it aside and {then}",
        LOCKED,
    )


def note_kept_model(c: Checkpoint) -> None:
    """Log that another program's model in --save stays there."""
    if not c.save or steps.list_checkpoints(c.save):
        return
    kind = steps.kind_of_folder(Path(c.save))
    theirs = all_formats().get(kind or "")
    # Checkpoints that are numbered, as Megatron's, count with our own.
    if theirs and not theirs.is_numbered:
        remark(
            f" > note: the {kind} model in {c.save} is kept; from the first save on, commands given this "
            "folder use the run's checkpoints"
        )


def note_texts(c: Checkpoint) -> None:
    """Warn that a new run's folder holds texts, with which `preprocess` would read its files."""
    for flag, folder in (("--save", c.save), ("--run-dir", c.run_dir)):
        if not folder or steps.kind_of_folder(Path(folder)) or steps.list_checkpoints(folder):
            continue
        names = sorted(path.name for path in Path(folder).glob("[!.]*") if path.is_file())
        if not names or {"config.toml", METRICS} & {*names}:
            continue
        from meshwright.data.text.folders import is_known, suffix_of

        beside_runs = (".json", ".md", ".sh")  # settings, notes and launchers
        texts = []
        for name in names:
            suffix = suffix_of(name)
            if name in ("log.txt", "merges.txt", "vocab.txt") or suffix in beside_runs:
                continue
            if is_known(suffix):
                texts.append(name)
        if texts:
            some = ", ".join(texts[:3])
            if len(texts) > 3:
                some += ", ..."
            then = "`preprocess` on this folder would also read the run's files; give the run a folder of its own"
            remark(f" > note: {flag} {folder} holds texts ({some}): {then}")


def guard_run_folder(config: TrainConfig) -> None:
    """Refuse to hide the curves of another run in the folder, unless --save-overwrite moves them.

    A run goes on there if it continues from, or saves to, the folder that the earlier one saved to.
    """
    c = config.checkpoint
    if not (c.run_dir or c.save) or c.save_overwrite or config.training.skip_train:
        return
    folder = Path(c.run_dir or c.save or "")
    if not holds_steps(folder):
        return
    if is_continued(c) and not c.finetune and folder.resolve() == Path(c.save or "").resolve():
        return
    before = read_settings(folder).get("checkpoint", {}).get("save")
    if before:
        # A new run from loaded weights does not go on with their curves.
        continued = [c.save] if c.finetune else [c.save, c.load]
        ours = [steps.split_path(path)[0].resolve() for path in continued if path]
        if Path(addresses.localize(str(before), c.local_dir)).resolve() in ours:
            return
    given = with_value("run_dir" if c.run_dir else "save", folder)
    more = ""
    if before:
        more = (
            f", or {with_value('load', before)} {with_value('save', before)} to continue that run"
        )
    raise SettingsError(
        f"{given} already holds the curves of another run: give another folder, or {{save_overwrite=True}} to move "
        f"its files aside{more}",
        LOCKED,
    )


def differences(config: TrainConfig, saved: dict[str, Any]) -> list[str]:
    """Describe what differs from the checkpoint's; refuse another architecture, or changed data."""
    # Settings that another program's checkpoint does not record are taken from the flags.
    model = model_settings(saved, "the checkpoint", config.model)
    tunable = flags_with(TrainConfig, "resume", "tune") if config.checkpoint.finetune else ()
    fixed = [n for n in ARCHITECTURE if n != "max_position_embeddings" and n not in tunable]
    contradicted = contradictions(config.model, model, fixed)
    if contradicted:
        head = "these settings contradict the checkpoint; leave them out, or give another folder:"
        raise SettingsError(listed(contradicted, head), BAD_DATA)
    ours, noted = saved_settings(config), flags_with(TrainConfig, "resume", "note")
    changed = [n for n in ours if n in (*noted, *tunable) and n in saved and saved[n] != ours[n]]
    # A new run has data and a recipe of its own: only changes of the network are worth a line each.
    own = [n for n in changed if n not in tunable] if config.checkpoint.finetune else []
    out = [
        f" > note: {name} is {_shown(ours[name])}, the checkpoint was trained with {_shown(saved[name])}"
        for name in changed
        if name not in own
    ]
    if own:
        out.append(
            f" > note: with --finetune, these settings are not the checkpoint's: {', '.join(own)}"
        )
    needed = [
        *(n for n in STATED if n not in ("embedding_dropout", "z_loss_coef")),
        "layernorm_epsilon",
        *["rotary_base"] * (config.model.position == "rope"),
    ]
    if unstated := [name for name in needed if name not in saved]:
        values = ", ".join(f"{spelling(name)} {getattr(config.model, name):g}" for name in unstated)
        out.append(f" > note: the checkpoint does not state all settings; used are {values}")
    equal_sets = saved.get("data_sets", ours["data_sets"]) == ours["data_sets"]
    if not equal_sets and all(saved.get(n) == ours[n] for n in path_settings(config.data)):
        out.append(
            " > note: the contents of the files that list the data have changed since the checkpoint"
        )
    return out + accept_changed_files(config, changed_files(saved, ours))


def accept_changed_files(config: TrainConfig, changed: list[str]) -> list[str]:
    """Return a note about token files that have changed; refuse them unless that is wanted."""
    if not changed:
        return []
    what = f"the training data have changed since the checkpoint: {'; '.join(first_eight(changed))}"
    if config.data.data_changed == "ok" or config.checkpoint.finetune:
        return [f" > note: {what}"]
    raise SettingsError(
        f"{what}. Give the files that it was trained on; or {{data_changed=ok}} to continue with these; "
        "or {finetune=True}, with a {save} of its own, to begin anew from its weights",
        BAD_DATA,
    )


def changed_files(saved: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    """Describe the token files that differ from the checkpoint's of the same path or lengths.

    Files that were moved are recognised by their lengths.
    """
    before = files_by_path(saved)
    out = []
    for prefix, (lengths, content) in files_by_path(ours).items():
        at_path, _ = before.get(prefix, (lengths, content))
        # Several files may have the same lengths, as those of one text in two vocabularies.
        of_lengths = {}
        for path, (known, sample) in before.items():
            if known == lengths:
                of_lengths[sample] = path
        if at_path != lengths:
            out.append(f"{prefix}.idx has other documents than before")
        elif of_lengths and content not in of_lengths:
            path = next(iter(of_lengths.values()))
            out.append(f"{prefix}.bin has as many tokens as {path}.bin had, but not the same ones")
    return out


def files_by_path(settings: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Return each pair of token files in a checkpoint's settings, with its lengths and contents."""
    # Another program states neither; before 0.13 there were no contents.
    lengths = settings.get("data_fingerprint", [])
    if lengths and "data_contents" not in settings:
        raise too_old("the checkpoint")
    try:
        contents = settings.get("data_contents", [])
        paths = dict.fromkeys(
            source[0] for _, sources in settings.get("data_sets", []) for source in sources
        )
        return dict(zip(paths, zip(lengths, contents, strict=True), strict=False))
    except (IndexError, TypeError, ValueError) as error:
        raise bad_data(
            f"the checkpoint does not state its data as a run does: {first_line(error)}"
        ) from None


def _shown(value: Any) -> Any:
    shown = "not set" if value in (None, []) else value
    return f"{str(shown)[:500]} ..." if len(str(shown)) > 500 else shown


def saved_settings(config: TrainConfig) -> dict[str, Any]:
    """Return the settings to save with a checkpoint, and what identifies the data."""
    data_sets = []
    # The sets in full: a file that lists them would not tell by its name what was read.
    for paths in path_sets(config.data) if not config.data.mock_data else ():
        sources = [[s.prefix, s.weight, s.begin, s.end] for s in paths.sources]
        data_sets.append([paths.key, sources])
    files = prefixes(config.data)
    settings = flags.to_dict(config) | {
        "world_size": None,  # a run may continue on any number of ranks
        "global_batch_size": config.global_batch,  # also where it follows from the number of ranks
        "data_fingerprint": [fingerprint(prefix) for prefix in files],
        "data_contents": [content_sample(prefix) for prefix in files],
        "data_sets": data_sets,
    }
    shown: dict[str, Any] = addresses.shown_in(settings)
    return shown


def open_start(config: TrainConfig, ranks: int) -> Source | None:
    """Open what --load means, to look at its settings; refuse a path without a checkpoint.

    One of several ranks goes on, if it can: another machine may have the checkpoint, or what this
    one lacks of it. Steps that are passed over are reported when it is loaded.
    """
    assert config.checkpoint.load
    options = open_options(config)._replace(verify="none")
    is_needed = ranks == 1 or lacking_sizes(config)
    try:
        source = loading.open_checkpoint(config.checkpoint.load, options, report=lambda line: None)
    except (DamagedCheckpoint, OnOtherMachine):
        if is_needed:
            raise
        return None
    if source is None and is_needed:
        refuse_missing(config)
    return source


def taken_over() -> list[str]:
    """Return the settings that a run takes from the checkpoint of --load."""
    return sorted({*ARCHITECTURE, *STATED, "seq_length", "vocab_size"})


def checkpoint_architecture(
    config: TrainConfig, given: Collection[str], source: Source
) -> TrainConfig:
    """Take the architecture, and what else a checkpoint states, where no flag is given."""
    saved = recorded_settings(source)
    # GPT-2 is trained on sequences as long as its table of positions.
    if "seq_length" not in saved and model_settings(saved, source.folder).position == "learned":
        saved["seq_length"] = saved.get("max_position_embeddings")
    wanted = {name: saved[name] for name in taken_over() if name in saved and name not in given}
    return with_settings(config, **flags.from_saved(TrainConfig, wanted, str(source.folder)))


def fresh_schedule(config: TrainConfig) -> list[str]:
    """Return the warnings about the schedule of a run that starts at step 0."""
    return [
        f"WARNING: {line}"
        for line in warn_of_idle_steps(build_schedule(config), config, config.steps)
    ]


def check_loading(config: TrainConfig, opened: Source | None) -> list[str]:
    """Return the lines that a run would print about its checkpoint before it reads a tensor.

    `opened` is another program's checkpoint that this process has opened before.
    """
    assert config.checkpoint.load
    source = loading.open_checkpoint(config.checkpoint.load, open_options(config), opened=opened)
    if source is None:
        return [
            f"no checkpoint in {config.checkpoint.load}: the run would start anew",
            *fresh_schedule(config),
        ]
    state = source.state
    verb = "continue from" if state and not config.checkpoint.finetune else "take the weights of"
    lines = [
        *source.notes,
        f"it would {verb} step {source.step} in {source.root}",
        *differences(config, source.config),
    ]
    if not state or config.checkpoint.finetune:
        lines += fresh_schedule(config)
    else:
        require_clear_start(config, source)
        require_moments(config, source)
        schedule = build_schedule(config)
        if "schedule" in state:
            schedule, _ = resume_schedule(schedule, state["schedule"], config)
        done = [
            state.get(n, 0) for n in ("iteration", "consumed_train_samples", "schedule_samples")
        ]
        done.append(state.get("schedule_tokens"))
        lines += [
            f"WARNING: {w}" for w in warn_of_idle_steps(schedule, config, config.steps, *done)
        ]
        past = BlendHistory.from_state(state.get("blends"))
        sets = {} if config.data.mock_data else {w.key: w for w in needed_sets(config)}
        if past is not None and "train" in sets:
            parts, consumed = (
                find_parts(config, sets["train"], Indexed),
                state["consumed_train_samples"],
            )
            lines += continue_history(past, parts, sets["train"].samples, consumed, config).lines()
    return lines
