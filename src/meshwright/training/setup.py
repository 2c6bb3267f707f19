"""Make the parts of a run on one rank: its state, its feed and its log, in Megatron's order."""

from __future__ import annotations

import platform
import time
from pathlib import Path

import torch

from meshwright.base import device as devices
from meshwright.base import host
from meshwright.base.console import remark, say, say_time, show
from meshwright.base.errors import HANG, UserError
from meshwright.base.version import our_version
from meshwright.checkpoint import publish
from meshwright.checkpoint.saved_model import GPT_NETWORK
from meshwright.checkpoint.sources import Source
from meshwright.config.command import explain_out_of_memory
from meshwright.config.data_paths import path_sets, path_settings
from meshwright.config.problem import SettingsError
from meshwright.config.schema import TrainConfig
from meshwright.data.datasets import Datasets, check_datasets, continue_datasets, make_document_ends
from meshwright.data.feed import Feed
from meshwright.data.files.indexed import Indexed
from meshwright.data.loader import DocumentEnds, LoaderSpec
from meshwright.data.samples import OrderedSamples
from meshwright.data.tokenizers import Null, Tokenizer
from meshwright.model import counts
from meshwright.model.gpt import initialise
from meshwright.parallel.store import DRAWING_THREADS
from meshwright.runtime.ranks.team import Team
from meshwright.runtime.ranks.watchdog import Watchdog
from meshwright.training.before import memory
from meshwright.training.before.resolve import TrainingRun
from meshwright.training.forecast import find_forecast
from meshwright.training.health.stop import StopConditions
from meshwright.training.hooks.eval_tasks import Scores, ScoresBeside
from meshwright.training.hooks.samples import SampleWriter
from meshwright.training.log.lines import RunSizes
from meshwright.training.log.metrics import Metrics, peak_flops
from meshwright.training.log.screen import Beginning, LineScreen
from meshwright.training.log.timers import Startup, Timers
from meshwright.training.loop import Trainer
from meshwright.training.network import Spec, build_network
from meshwright.training.sizes import smaller_sizes
from meshwright.training.state import folder as run_folder
from meshwright.training.state.state import State

COUNTED_TOKENS = 1 << 14  # of each pair of token files, to estimate the bytes of a token


def build_trainer(
    resolved: TrainingRun,
    spec: Spec,
    team: Team,
    startup: Startup,
    watchdog: Watchdog | None,
    screen: LineScreen | None,
    users: publish.Users,
) -> Trainer:
    """Make all parts of a run, and print Megatron's lines about them.

    `users` says which ranks share the folder of --save.
    """
    g, tokenizer = resolved.config.logging, resolved.vocabulary.tokenizer

    # The network, and its weights, which are loaded or drawn.
    with startup.time("model-and-optimizer-setup"):
        state = build_state(spec, team, startup, resolved.caller.start, users)
    say_time("after model, optimizer, and learning rate scheduler are built")

    # The data, after the weights, because a checkpoint tells where to continue in them.
    with (
        startup.time("train/valid/test-data-iterators-setup"),
        startup.phase("data", "opening the data"),
    ):
        feed = open_feed(state, tokenizer, resolved.caller.datasets)
        samples = (
            SampleWriter(state.recorded, state.net, state.vocab, tokenizer)
            if g.sample_interval
            else None
        )
        scores = open_scores(state, tokenizer)
    say_time("after dataloaders are built")
    say("done with setup ...")
    startup.print_times(
        g, team, "model-and-optimizer-setup", "train/valid/test-data-iterators-setup"
    )

    # The log, and what ends the run.
    timers = Timers(int(g.timing_log_level), g.timing_log_option, spec.device, team)
    metrics = open_log(state, resolved, timers, startup, screen)
    stop = StopConditions(state.config.training, startup.began, state.config.checkpoint.save)
    if watchdog is not None:
        watchdog.record = lambda text: metrics.record_failure(
            state.progress.iteration, UserError(text, HANG)
        )
    return Trainer(state, feed, metrics, timers, stop, watchdog, samples, scores)


def build_state(
    spec: Spec,
    team: Team,
    startup: Startup,
    opened: Source | None = None,
    users: publish.Users = (),
) -> State:
    """Build the network, load or draw its weights, and resolve `--micro-batch-size auto`."""
    with (
        startup.phase("model", "building the model"),
        explain_out_of_memory(smaller_sizes(spec.config)),
    ):
        state = build_empty_state(spec, team, users)
    load_or_initialise(state, startup, opened)
    if spec.config.training.micro_batch_size == "auto":
        with startup.phase("micro-batch", "trying micro-batches"):
            fit_micro_batch(state)
    return state


def build_empty_state(spec: Spec, team: Team, users: publish.Users) -> State:
    """Return the state of a run whose weights are neither loaded nor drawn."""
    config, layout, device = spec.config, spec.layout, spec.device
    say("building GPT model ...")
    if spec.model is None:
        stage = layout.at("pp")
        team.run_on_all(lambda: memory.require_memory(config, spec.padded, stage, device, team))

    def report_parameters(number: int) -> None:
        for tp, pp, count in team.merge([[layout.at("tp"), layout.at("pp"), number]], unite):
            say(
                f" > number of parameters on (tensor, pipeline) model parallel rank ({tp}, {pp}): {count}"
            )

    net = build_network(spec, report_parameters)
    say(f" > running the {net.execution}")
    if device.type != "cpu" or config.training.cuda_graphs == "on":
        without = net.without_graphs
        # The third step whose samples have their last length.
        first = config.sample_lengths_end + 3
        say(f" > CUDA graphs: {f'off, because {without}' if without else f'on, from step {first}'}")
    if config.training.compile == "on" and not net.is_compiled:
        remark(" > note: --compile on has no effect on layers with the reference attention")
    state = State(spec, net, team, users)
    say(f"> learning rate decay style: {state.schedule.style}")
    return state


def unite(lists: list[list[list[int]]]) -> list[list[int]]:
    """Return the distinct rows of some lists, sorted."""
    return sorted(list(row) for row in {tuple(row) for rows in lists for row in rows})


def load_or_initialise(state: State, startup: Startup, opened: Source | None) -> None:
    """Load the weights, or draw them if no checkpoint is asked for or found."""
    config, store = state.config, state.net.store
    is_loaded = bool(config.checkpoint.load)
    with startup.phase("weights", "loading the weights" if is_loaded else "drawing the weights"):
        if is_loaded:
            with startup.time("load-checkpoint"):
                state.load(opened)
            startup.print_times(config.logging, state.team, "load-checkpoint")
        if not state.has_loaded:
            # Full tensors are drawn, and each rank keeps its part, so no layout changes a value.
            draw, threads = initialise, min(DRAWING_THREADS, host.cores())
            # A custom model's own function may draw all tensors from one generator, in their order.
            if own := getattr(state.net.parts[0], "initialise", None):
                draw, threads = own, 1
            store.initialise(
                lambda masters: draw(masters, config.model, state.vocab, config.training.seed),
                threads,
            )
        store.publish_weights()


def fit_micro_batch(state: State) -> None:
    """Find the size for `--micro-batch-size auto`, log it and note it in the state."""
    vocab = state.vocab, state.padded
    size, reason = memory.fit_micro_batch(
        state.net, state.config, vocab, state.micro_batch_before, state.team
    )
    remark(f" > --micro-batch-size auto: {size} ({reason})")
    state.found["micro_batch_size"] = size


def open_feed(state: State, tokenizer: Tokenizer | None, datasets: Datasets | None) -> Feed:
    """Open the data sets that the flags name, unless `datasets` are given; return their feed."""
    p, team = state.progress, state.team
    document_ends = make_document_ends(state.config.data, tokenizer)
    # Rank 0 builds the index of a new order of samples, and the others find it in the cache.
    opened = team.run_rank_0_first(lambda: open_files(state)) if datasets is None else datasets

    # Require what the run will read, from the sample where it continues.
    at = (p.iteration, p.consumed_train_samples) if state.will_train else None
    is_own = datasets is not None
    team.run_on_all(lambda: check_datasets(state.config, opened, is_own, at))

    # The order of samples depends on the epochs, which a checkpoint therefore keeps.
    train = opened.get("train")
    state.set_epochs(train.list_epochs() if isinstance(train, OrderedSamples) else [])
    return Feed(opened, loader_spec(state, document_ends))


def open_files(state: State) -> Datasets:
    """Open the data sets that the flags name.

    The training set's blends are those that the checkpoint records and any added since. A finished
    run refuses other blends too, as it would if it went on.
    """
    past, consumed = state.blends, state.progress.consumed_train_samples
    # Without training, sets are opened from their first sample, whatever was trained on.
    if state.config.training.skip_train:
        past, consumed = None, 0
    opened, blends = continue_datasets(state.config, state.vocab, past, consumed)
    if state.will_train:
        state.blends = blends
    last = (
        state.blends.blends[-1].begin if state.blends and not state.config.data.blend_stages else 0
    )
    state.found["blend_change_at"] = str(last) if last else None
    return opened


def loader_spec(state: State, document_ends: DocumentEnds | None) -> LoaderSpec:
    """Return the part of each global batch that this rank reads."""
    config, layout, length = state.recorded, state.net.layout, state.config.data.seq_length
    assert length
    part = layout.at("cp")
    grows = config.training.seq_length_schedule is not None
    return LoaderSpec(
        config.micro_batch,
        config.batch,
        state.vocab,
        workers=config.data.num_workers,
        document_ends=document_ends,
        rank=layout.at("replicas", "shard"),
        ranks=layout.dp,
        columns=(lambda n: slice(part * n // layout.cp, (part + 1) * n // layout.cp))
        if layout.cp > 1
        else None,
        length=length + 1,
        length_at=lambda step: config.sample_length(step) + 1 if grows else None,
        packed=config.data.packing != "stream",
        device=state.net.device,
    )


def open_scores(state: State, tokenizer: Tokenizer | None) -> Scores | None:
    """Return the tasks of --eval-tasks, or None without it."""
    g = state.config.logging
    if not g.eval_tasks:
        return None
    c = state.config.checkpoint
    is_in_save = c.save is not None and c.run_dir in (None, c.save)
    if (
        g.eval_tasks_device
        and is_in_save
        and publish.are_on_own_disks(c.save or "", state.saver.users)
    ):
        raise SettingsError(
            "{eval_tasks_device} reads a snapshot that all ranks write, and machines have disks of their own "
            f"in {c.save}; give a {{run_dir}} that they share, or leave {{eval_tasks_device}} out",
            everywhere=True,
        )
    parts = state.recorded, state.net, state.vocab, tokenizer, state.team
    return ScoresBeside(*parts, state.save_weights) if g.eval_tasks_device else Scores(*parts)


def open_log(
    state: State,
    resolved: TrainingRun,
    timers: Timers,
    startup: Startup,
    screen: LineScreen | None = None,
) -> Metrics:
    """Write the settings and the vocabulary, and open the log with its first row.

    Before this, the run has only written locks, probes and caches.
    """
    c, team, folder, vocabulary = state.recorded, state.team, resolved.folder, resolved.vocabulary

    # The folder, after the check: a run that it refuses leaves the folder's records as they were.
    state.check(vocabulary.tokenizer)
    # Each machine with a disk of its own keeps the settings beside its part of the steps.
    kept = folder if team.is_rank_0 else Path(c.checkpoint.save or "")

    def prepare() -> None:
        if state.saver.keeps_folder:
            run_folder.prepare(
                kept, c, vocabulary.tokenizer, state.will_train, with_run_dir=team.is_rank_0
            )

    team.run_on_all(prepare)

    # The sizes, which the screen's header shows and every line of the log is computed from.
    run, device = sizes_of_run(state), devices.device_name(state.net.device)
    # The ranks' parts of a checkpoint hold each parameter once, so their sum counts each once.
    own = state.net.store.named_state(False, to_save=True)
    parameters = team.total(sum(x.numel() for _, _, x in own.values()))
    tokens = c.global_batch * c.sample_lengths[-1]
    if screen is not None:
        loaded = c.checkpoint.load if state.has_loaded else None
        show(
            screen.begin(
                Beginning(c, folder, vocabulary, parameters, run, device, loaded, state.best)
            )
        )

    # The plan, where it is installed: a warning on a slow machine, and a comparison on a fast one.
    forecast = find_forecast() if state.will_train else None
    on_cpu = state.net.device.type == "cpu"
    if (
        forecast is not None
        and on_cpu
        and (long := forecast.describe_long_step(run.flops_per_token * tokens))
    ):
        remark(f"WARNING: {long}")
    metrics = Metrics(folder if team.is_rank_0 else None, c, run, timers, team, screen)
    metrics.is_first_of_machine = resolved.world.local_rank == 0
    # The plan knows our own network alone.
    if forecast is not None and team.is_rank_0 and not on_cpu and state.net.name == GPT_NETWORK:
        metrics.comparison = forecast.compare_steps(c, vocabulary.size, device)

    # The first row of this attempt in metrics.jsonl.
    row = {
        "command": resolved.command,
        "version": our_version(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": device,
        "host": platform.node(),
        "parameters": parameters,
        "block": state.net.execution,
        "dtype": c.precision.dtype,
        "startup": startup.seconds,
        "ready": round(time.perf_counter() - startup.began, 3),
        "tokens_per_step": tokens,
        "bytes_per_token": bytes_per_token(c, vocabulary.tokenizer) if team.is_rank_0 else None,
        "train_iters": c.steps,
    }
    # A "start" replaces earlier rows from this iteration on, an "evaluate" none.
    metrics.row("evaluate" if c.training.skip_train else "start", run.iteration, **row)
    return metrics


def bytes_per_token(config: TrainConfig, tokenizer: Tokenizer | None) -> float | None:
    """Return about how many bytes of the training text a token stands for; None if unknown.

    Losses of different vocabularies can be compared per byte.
    """
    if (
        tokenizer is None
        or isinstance(tokenizer, Null)
        or config.data.mock_data
        or not path_settings(config.data)
    ):
        return None
    # Read the beginnings of up to eight files of the training set.
    sources = [
        s for paths in path_sets(config.data) if paths.split == "train" for s in paths.sources
    ]
    count = size = 0
    for source in sources[:8]:
        indexed = Indexed(source.prefix)
        indexed.need([(0, COUNTED_TOKENS)])
        tokens = indexed.tokens[:COUNTED_TOKENS]
        # Ids that the vocabulary lacks are left out here; the loader refuses them.
        tokens = tokens[(tokens >= 0) & (tokens < tokenizer.size) & (tokens != tokenizer.eod)]
        count, size = count + len(tokens), size + len(tokenizer.decode_bytes(tokens.tolist()))
    return round(size / count, 4) if count else None


def sizes_of_run(state: State) -> RunSizes:
    """Return the size of a run whose state is loaded."""
    c = state.recorded
    length = c.sample_lengths[-1]
    return RunSizes(
        steps=state.total_steps(),
        samples=c.samples,
        sequence=length,
        micro_batch=c.micro_batch * c.dp,
        devices=state.team.size,
        flops_per_token=counts.flops_per_token(
            c.model, state.padded, length, c.training.recompute_granularity
        ),
        shorter={
            n: counts.flops_per_token(c.model, state.padded, n, c.training.recompute_granularity)
            for n in c.sample_lengths
            if n != length
        },
        peak=peak_flops(state.net.device),
        iteration=state.progress.iteration,
        consumed=state.progress.consumed_train_samples,
    )
