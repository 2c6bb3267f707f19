"""`meshwright convert SRC DST --to native|torch|huggingface`.

What the source does not say about its network, the usual flags do: `--num-attention-heads 16
--true-vocab-size 50257` for the 345M release of 2019.
"""

from __future__ import annotations

import dataclasses
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from meshwright.base.console import notice, say
from meshwright.base.errors import DONE
from meshwright.base.hints import find_address, refuse_address
from meshwright.config import command, fields, flags
from meshwright.config.checks import averages_problems
from meshwright.config.fields import flag
from meshwright.config.problem import Problem, plain
from meshwright.config.schema import Checkpoint, Data, GenerateConfig, Model, TokenizerFlags

ABOUT = "Convert a checkpoint of any program: convert SRC DST --to native|torch|huggingface."


@dataclass(frozen=True)
class ConversionFlags:
    """What to convert, and to what."""

    paths: list[str] = flag(
        [],
        "SRC DST: a checkpoint or a folder of them, and the folder to write",
        value="PATH",
        word="SRC DST",
        remote=True,
    )
    to: Literal["native", "torch", "huggingface"] | None = flag(
        None, "our format, Megatron-LM's tree of torch files, or a folder for transformers"
    )
    target_tensor_parallel_size: int = flag(1, "tensor-parallel ranks, for --to torch", bound=">0")
    target_pipeline_parallel_size: int = flag(1, "pipeline stages, for --to torch", bound=">0")
    dtype: Literal["float32", "float16", "bfloat16"] | None = flag(
        None, "type of the weights (none: unchanged)"
    )
    no_optimizer: bool = flag(False, "leave optimizer state out, and the average of --ema")


@dataclass(frozen=True)
class ConvertConfig:
    """Settings of `meshwright convert`."""

    conversion: ConversionFlags = ConversionFlags()
    model: Model = Model()
    tokenizer: TokenizerFlags = TokenizerFlags()
    data: Data = Data()
    checkpoint: Checkpoint = Checkpoint()

    USES: ClassVar[frozenset[str]] = frozenset(
        {
            f.name
            for group in (ConversionFlags, Model, TokenizerFlags)
            for f in dataclasses.fields(group)
        }
        | {"seq_length", "verify", "trust_pickle", "weights", "average_last"}
    )

    def problems(self) -> list[Problem]:
        is_complete = len(self.conversion.paths) == 2 and self.conversion.to
        form = "meshwright convert SRC DST --to native|torch|huggingface"
        if not is_complete:
            return [
                Problem(("to", "paths"), f"{{to}} and two folders are needed: {form}", "missing")
            ]
        address = find_address(self.conversion.paths[1])
        out = averages_problems(self.checkpoint)
        return (
            [Problem(("paths",), f"DST {plain(refuse_address(address))}"), *out] if address else out
        )


def main(argv: list[str]) -> int:
    parsed = command.settings(ConvertConfig, argv, "convert", ABOUT, "paths")
    if parsed is None:
        return DONE
    c = parsed.config.conversion
    assert c.to
    from meshwright.checkpoint.convert import ConversionTarget, prepare_conversion

    ranks = (c.target_tensor_parallel_size, c.target_pipeline_parallel_size)
    target = ConversionTarget(Path(c.paths[1]), c.to, c.dtype, not c.no_optimizer, *ranks)
    # The flags describe the network where the source does not.
    known = fields.config_fields(GenerateConfig)
    given = {name: value for name, value in flags.given_settings(parsed).items() if name in known}
    # This opens the source and checks that all fits; nothing is written before `run`.
    job = prepare_conversion(c.paths[0], target, given)
    source = job.source
    folder = target.folder
    if parsed.dry_run:
        print(
            f"{source.folder} ({source.kind}) would become {folder} ({target.to}); nothing was written"
        )
        return DONE
    done = job.run()
    say(
        f"{source.folder} ({source.kind}) -> {folder} ({target.to}): {done.tensors:,} tensors, {done.bytes:,} bytes in "
        f"{done.seconds:.1f} s, {done.bytes / max(done.seconds, 1e-9) / 1e6:,.1f} MB/s"
    )
    if target.to == "huggingface":
        # Show what a user most likely does with the folder next.
        load = f"AutoModelForCausalLM.from_pretrained({str(folder)!r})"
        notice(f"next: {load} with transformers, or meshwright chat {shlex.quote(str(folder))}")
    return DONE
