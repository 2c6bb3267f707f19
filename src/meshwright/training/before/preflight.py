"""Check settings against files, devices and the checkpoint before a run; write nothing.

`meshwright train --dry-run` ends here.
"""

from __future__ import annotations

from typing import Any

from meshwright.base import device as devices
from meshwright.base.console import set_stream, show
from meshwright.base.errors import DONE, USAGE, UserError
from meshwright.checkpoint.sources import Source
from meshwright.config import checks
from meshwright.config.data_paths import prefixes
from meshwright.config.problem import Problem, require
from meshwright.config.schema import TrainConfig
from meshwright.data import tokenizers
from meshwright.data.files.indexed import Indexed, check_vocabulary
from meshwright.model import counts
from meshwright.runtime.ranks.compare import require_equal
from meshwright.runtime.ranks.team import Team
from meshwright.runtime.ranks.world import World
from meshwright.training.before.packages import require_packages
from meshwright.training.before.resolve import (
    bring_files,
    find_vocabulary,
    loaded_folder,
    padded_for,
    require_folders,
    require_free_folders,
    resolve_length,
    run_folder_of,
)
from meshwright.training.forecast import find_forecast
from meshwright.training.parameters import parameters_of_ranks
from meshwright.training.sizes import (
    describe_lack,
    describe_layout,
    describe_memory,
    describe_place,
    ranks_of_machine,
)
from meshwright.training.state.resume import (
    check_loading,
    fresh_schedule,
    note_kept_model,
    note_texts,
)


def require_equal_ranks(
    team: Team, identity: dict[str, Any], problem: UserError | None = None
) -> None:
    """Raise what any rank found wrong; refuse ranks with other settings, versions or files."""
    if team.size == 1:
        return
    import numpy
    import torch

    def identify() -> dict[str, Any]:
        if problem is not None:
            raise problem
        return identity | {"torch": torch.__version__, "numpy": numpy.__version__}

    require_equal(team, team.run_on_all(identify))


def dry_run(config: TrainConfig, world: World, start: Source | None) -> int:
    """Check settings, files and sizes, and print what would run; for a CPU, without torch.

    `start` is another program's checkpoint of --load, if it was opened before. Nothing is written
    but local copies of what is in object storage. The status is USAGE if the run is for this
    machine, not for another --world-size, and does not fit its memory.
    """
    set_stream("stdout")

    # Settings: a wrong one ends the dry run; those that a run still needs are listed at the end.
    require(checks.problems(config, needs_data=False))
    require_folders(config)
    bring_files(config)
    config = resolve_length(config)
    later = checks.problems(config)

    # Folders and packages.
    require_free_folders(config)
    require_packages(config.logging)
    note_kept_model(config.checkpoint)
    note_texts(config.checkpoint)

    # Data and vocabulary. Without a tokenizer, sizes are counted with GPT-2's vocabulary.
    d, t = config.data, config.tokenizer
    files = [Indexed(prefix) for prefix in prefixes(d)]
    for indexed in files:
        show(f"data {indexed.prefix}: {len(indexed):,} documents")
    if d.mock_data:
        show("data: random ids (--mock-data)")
    folder = run_folder_of(config)
    saved = tokenizers.find_of_data(prefixes(d)) or tokenizers.find_saved(
        folder, loaded_folder(config)
    )
    if t.tokenizer_type == "GPT2BPETokenizer" and not (
        tokenizers.is_named(t) or t.vocab_size or saved
    ):
        size = 50257
        needed = "{tokenizer} is needed (counted here as GPT-2's 50,257 ids)"
        later.append(Problem(("tokenizer",), needed, "missing"))
    else:
        vocabulary = find_vocabulary(config, folder)
        size = vocabulary.size
        if vocabulary.tokenizer is not None:
            show(f"tokenizer: {vocabulary.tokenizer.name}, {size:,} ids")
        for indexed in files:
            check_vocabulary(indexed, size)

    # Sizes, and the checkpoint that the run continues from.
    ranks_here = world.local_size if world.size > 1 else ranks_of_machine(config)
    lack = print_sizes(config, size, ranks_here)
    tokens = sum(len(indexed.tokens) for indexed in files)
    if files and tokens < config.global_batch * (d.seq_length or 0):
        show(
            f"warning: one step reads more than the {tokens:,} tokens of the data; give a smaller batch or more text"
        )
    lines = check_loading(config, start) if config.checkpoint.load else fresh_schedule(config)
    if lines:
        show("\n".join(lines))
    if config.parallel.rank is not None:
        from meshwright.training.before.one_rank import describe_rank

        show("\n".join(describe_rank(config, size, padded_for(config, size))))

    # Settings that are still missing, and whether the run will fit this machine.
    for problem in later:
        show(f"required before the run can start: {problem}")
    forecast = None if lack else find_forecast()
    verdict = None if forecast is None else forecast.verdict(config, size, ranks_here)
    if verdict is not None:
        show(verdict[1])
    if missing := devices.missing_here(config.parallel.device, ranks_here):
        show(f"this machine cannot run it: {missing}")
    show("dry run: nothing was built or written")

    # The status is about this machine alone.
    does_fit = not lack and (verdict is None or verdict[0])
    # With --world-size, even 1, a run is for other machines unless several ranks were started.
    planned = config.parallel.world_size
    is_for_here = planned is None or planned == world.size > 1
    return USAGE if is_for_here and not does_fit else DONE


def print_sizes(config: TrainConfig, vocab: int, ranks_here: int) -> str:
    """Print the run's parameters, work and memory; return why it cannot fit, "" if it may."""
    m, seq, padded = config.model, config.data.seq_length, padded_for(config, vocab)
    assert seq
    n = counts.parameters(m, padded, m.max_position_embeddings or seq)
    show(f"parameters: {n:,} (vocabulary {vocab:,} padded to {padded:,})")

    # Work
    tokens = config.global_batch * seq
    flops = counts.flops_per_token(m, padded, seq, config.training.recompute_granularity) * tokens
    number = config.micro_batches(config.global_batch)
    micro = f"{number} micro-batch{'es' * (number != 1)}"
    if config.training.micro_batch_size == "auto":
        micro = "the micro-batch is found at the start"
    show(f"one step: {tokens:,} tokens, {_large(flops)}, {micro}")
    if len(config.sample_lengths) > 1:
        lengths = config.sample_lengths
        show(
            f"samples grow from {lengths[0]:,} to {lengths[-1]:,} tokens in {len(lengths):,} lengths; "
            f"the last begins after {config.sample_lengths_end:,} steps"
        )
    total = round(config.tokens_of(config.samples or config.steps * config.global_batch))
    show(f"the run: {config.steps:,} steps, {total:,} tokens")

    # Layout and memory
    if config.world > 1:
        each = parameters_of_ranks(config, padded)
        layers = " ".join(map(str, config.stages))
        place = f"{max(each):,} parameters{describe_place(each)}"
        if len(each) > 1:
            place += ", the largest"
        show(f"{describe_layout(config)}; layers of each stage: {layers}; {place}")
    show(
        f"memory of weights, gradients and optimizer: {describe_memory(config, padded)}, activations apart"
    )
    if lack := describe_lack(config, padded, ranks_here):
        show(lack)
    return lack


def _large(x: float) -> str:
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9)):
        if x >= size:
            return f"{x / size:,.1f} {prefix}FLOP"
    return f"{x / 1e6:,.1f} MFLOP"
