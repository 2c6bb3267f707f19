"""Check settings against files, devices and the checkpoint before a run; write nothing.

`meshwright train --dry-run` ends here.
"""

from __future__ import annotations

import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright import console, tokenizers
from meshwright.checkpoint import steps
from meshwright.console import say
from meshwright.data.files.indexed import Indexed, check_vocabulary
from meshwright.errors import BAD_DATA, DONE, USAGE, UserError
from meshwright.model import counts
from meshwright.ranks.compare import require_equal
from meshwright.ranks.team import Team
from meshwright.settings import checks, flags
from meshwright.settings.data_paths import prefixes
from meshwright.settings.hints import near_path
from meshwright.settings.schema import Parallel, TokenizerFlags, TrainConfig
from meshwright.tokenizers import Tokenizer
from meshwright.training.before.sizes import describe_layout, describe_memory, describe_place, parameters_of_ranks
from meshwright.training.state.resume import (
    check_loading,
    fresh_schedule,
    guard_existing,
    guard_run_folder,
    saved_settings,
)
from meshwright.training.state.saver import check_export
from meshwright.version import our_version

if TYPE_CHECKING:
    import torch


def require_files(config: TrainConfig) -> None:
    """Require the token files before anything slow begins."""
    for prefix in prefixes(config.data):
        missing = [f"{prefix}{end}" for end in (".bin", ".idx") if not Path(f"{prefix}{end}").exists()]
        if missing:
            advice = "; create the pair with `meshwright preprocess` and pass their common path without the extension"
            hint = near_path(str(prefix), ".idx") or advice
            raise UserError(f"data {prefix}: missing {' and '.join(missing)}{hint}", BAD_DATA)


def pick_backend(p: Parallel, device: torch.device, prints: bool = False) -> str:
    """Return the backend of torch.distributed: gloo on CPUs, the device's default elsewhere."""
    import torch.distributed as dist

    wanted = p.distributed_backend
    if device.type == "cpu":
        if prints and wanted not in (None, "gloo"):
            print(f"note: --distributed-backend {wanted} has no effect: on a CPU the ranks use gloo", file=sys.stderr)
        return "gloo"
    return wanted or str(dist.get_default_backend_for_device(device))


def require_equal_settings(team: Team, config: TrainConfig) -> None:
    """Refuse ranks with different settings, versions or data before anything is computed."""
    if team.size == 1:
        return
    import numpy
    import torch

    ours = saved_settings(config)
    del ours["local_rank"], ours["run_dir"]  # rank 0 alone writes there
    del ours["deepspeed_config"]  # its values are among the settings
    files = zip(prefixes(config.data), ours.pop("data_fingerprint"), strict=True)
    ours |= {f"--data-path {prefix} (its files)": fingerprint for prefix, fingerprint in files}
    ours |= {"meshwright": our_version(), "torch": torch.__version__, "numpy": numpy.__version__}
    require_equal(team, ours | {"python": platform.python_version()})


def vocabulary(config: TrainConfig, folder: Path | None) -> tuple[Tokenizer | None, int, int]:
    """Return the tokenizer, if the flags name one, and the true and padded vocabulary sizes."""
    t, m = config.tokenizer, config.model
    kind, loaded, data = t.tokenizer_type, loaded_folder(config), tokenizers.find_of_data(prefixes(config.data))
    is_loaded = loaded is not None and steps.find_step(loaded)[0] is not None
    # Beside data that know their tokenizer, files that a killed or replaced run left mean nothing.
    kept = tokenizers.find_saved(loaded if is_loaded else None) if data else tokenizers.find_saved(folder, loaded)
    tokenizer: Tokenizer | None
    if is_bare(config, data):
        say(f"> no tokenizer: the vocabulary's size is given, {t.vocab_size}")
        tokenizer, vocab = None, t.vocab_size
    else:
        tokenizer = tokenizers.resolve_for_data(t, data, kept)
        if tokenizer is None and loaded and is_loaded:
            raise tokenizers.missing_error(loaded)
        tokenizer = tokenizer or tokenizers.build_tokenizer(t)  # which raises, naming the missing flags
        vocab, found = tokenizer.size, None if tokenizers.is_named(t) else kept or data
        say(f"> building {t.tokenizer or (tokenizer.name if found else kind)} tokenizer ...")
        if found:
            console.notice(f"tokenizer: {tokenizer.name} with {vocab:,} ids, found in {found}")
    assert vocab
    tp = config.parallel.tensor_model_parallel_size
    padded = tokenizers.padded_size(vocab, m.make_vocab_size_divisible_by, tp, m.pad_vocab_size_to)
    say(tokenizers.padding_line(vocab, padded))
    return tokenizer, vocab, padded


def is_bare(config: TrainConfig, data: Path | None) -> bool:
    """Return whether the vocabulary is a size alone, without a tokenizer."""
    t = config.tokenizer
    if t.vocab_size is None or tokenizers.is_named(t) or t.tokenizer_type == "ByteTokenizer":
        return False
    if not config.data.mock_data and t.tokenizer_type != "GPT2BPETokenizer":
        return False
    # A size from a checkpoint may count padding, so a smaller tokenizer is none of its own.
    return data is None or tokenizers.build_tokenizer(TokenizerFlags(), data).size < t.vocab_size


def loaded_folder(config: TrainConfig) -> Path | None:
    """Return the folder of --load, without the step that it may name."""
    return steps.split_path(config.checkpoint.load)[0] if config.checkpoint.load else None


def build_vocabulary_on_all(config: TrainConfig, folder: Path | None, team: Team) -> tuple[Tokenizer | None, int, int]:
    """Call `vocabulary` on every rank and require equal results: files may differ between nodes."""
    made: list[tuple[Tokenizer | None, int, int]] = []

    def build() -> dict[str, Any]:
        made.append(vocabulary(config, folder))
        tokenizer, vocab, padded = made[0]
        files = tokenizers.file_hashes(tokenizer) if tokenizer else {}
        named = {f"SHA-256 of the tokenizer's {name}": sha256 for name, sha256 in files.items()}
        kind = tokenizer.name if tokenizer else None
        return {"tokenizer": kind, "vocabulary size": vocab, "padded vocabulary size": padded, **named}

    require_equal(team, team.run_on_all(build)[team.rank])
    return made[0]


def dry_run(config: TrainConfig) -> int:
    """Check settings, files and sizes without torch and without writing; print what would run."""
    if problems := checks.problems(config, needs_data=False):
        raise UserError(flags.listed(problems), USAGE)
    later = checks.problems(config)
    if config.checkpoint.save:
        guard_existing(config)
    guard_run_folder(config)
    check_export(config)
    d = config.data
    require_files(config)
    files = [Indexed(prefix) for prefix in prefixes(d)]
    for indexed in files:
        print(f"data {indexed.prefix}: {len(indexed):,} documents")
    if d.mock_data:
        print("data: random ids (--mock-data)")
    v, where = config.tokenizer, config.checkpoint.run_dir or config.checkpoint.save
    folder = Path(where) if where else None
    kept = tokenizers.find_of_data(prefixes(d)) or tokenizers.find_saved(folder, loaded_folder(config))
    if v.tokenizer_type == "GPT2BPETokenizer" and not (tokenizers.is_named(v) or v.vocab_size or kept):
        vocab = 50257
        later.append("--tokenizer is needed (counted here as GPT-2's 50,257 ids)")
    else:
        console.set_stream(None)
        tokenizer, vocab, _ = vocabulary(config, folder)
        if tokenizer is not None:
            print(f"tokenizer: {tokenizer.name}, {vocab:,} ids")
        for indexed in files:
            check_vocabulary(indexed, vocab)
    print_sizes(config, vocab)
    if files and (tokens := sum(len(indexed.tokens) for indexed in files)) < config.global_batch * (d.seq_length or 0):
        print(f"warning: one step reads more than the {tokens:,} tokens of the data; give a smaller batch or more text")
    if lines := check_loading(config) if config.checkpoint.load else fresh_schedule(config):
        print("\n".join(lines))
    for p in later:
        print(f"required before the run can start: {p}")
    print("dry run: nothing was built or written")
    return DONE


def print_sizes(config: TrainConfig, vocab: int) -> None:
    """Print the parameters, the work and the memory of the run."""
    m, seq, tp = config.model, config.data.seq_length, config.parallel.tensor_model_parallel_size
    assert seq
    padded = tokenizers.padded_size(vocab, m.make_vocab_size_divisible_by, tp, m.pad_vocab_size_to)
    positions = m.max_position_embeddings or seq
    n = counts.parameters(m, padded, positions)
    tokens = config.global_batch * seq
    flops = counts.flops_per_token(m, padded, seq, config.training.recompute_granularity) * tokens
    print(f"parameters: {n:,} (vocabulary {vocab:,} padded to {padded:,})")
    number = config.micro_batches(config.global_batch)
    micro = f"{number} micro-batch{'es' * (number != 1)}"
    if config.training.micro_batch_size == "auto":
        micro = "the micro-batch is found at the start"
    print(f"one step: {tokens:,} tokens, {_large(flops, 'FLOP')}, {micro}")
    total = (config.samples or config.steps * config.global_batch) * seq
    print(f"the run: {config.steps:,} steps, {total:,} tokens")
    if config.world > 1:
        each = parameters_of_ranks(config, padded, positions)
        layers, largest = " ".join(map(str, config.stages)), ", the largest" * (len(each) > 1)
        place = f"{max(each):,} parameters{describe_place(each)}{largest}"
        print(f"{describe_layout(config)}; layers of each stage: {layers}; {place}")
    print(f"memory of weights, gradients and optimizer: {describe_memory(config, padded)}, activations apart")


def _large(x: float, unit: str) -> str:
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9)):
        if x >= size:
            return f"{x / size:,.1f} {prefix}{unit}"
    return f"{x / 1e6:,.1f} M{unit}"
