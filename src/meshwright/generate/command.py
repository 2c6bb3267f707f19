"""`meshwright generate` and the documents' tools/generate_samples_gpt.py: samples, continuations, a dialogue."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright import flags
from meshwright.config import GenerateConfig, Sampling
from meshwright.errors import BAD_DATA, DONE, UserError

if TYPE_CHECKING:
    import torch

    from meshwright.tokenizers import Tokenizer

Batched = Callable[[list[list[int]], int], Iterator[list[int | None]]]  # prompts, number of the first -> new tokens


def main(argv: list[str]) -> int:
    parsed = flags.parse(
        GenerateConfig, argv, "meshwright generate", positional="load", about="Write text with a model."
    )
    if parsed.print_config:
        print(flags.to_toml(parsed.config, parsed.sources))
        return DONE
    if os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")) != "0":
        print("generation runs on rank 0; this rank has nothing to do", file=sys.stderr)
        return DONE
    c, s = parsed.config, parsed.config.sampling
    lines = read_prompts(Path(s.sample_input_file)) if s.sample_input_file else []
    if parsed.dry_run:
        print("the flags are right; nothing was loaded and nothing written")
        return DONE
    flags.tell(parsed)

    # torch only now: a mistake in the flags is told at once
    from meshwright.generate import chat, engine, sampling
    from meshwright.precision import dtype
    from meshwright.train import pick_device

    def say(line: str) -> None:  # stdout is for text
        print(line, file=sys.stderr if s.prompt is not None else sys.stdout, flush=True)

    assert c.checkpoint.load
    device = pick_device(c)
    run = engine.load(
        c.checkpoint.load, parsed.given, c.tokenizer, dtype(c.precision), device, c.checkpoint.verify, say
    )
    longest = min(c.data.seq_length or run.positions, run.positions)
    eod = run.tokenizer.eod

    def continue_(prompts: list[list[int]], first: int) -> Iterator[list[int | None]]:
        streams = [sampling.generator(c.training.seed, first + row) for row in range(len(prompts))]

        def choose(row: int, logits: torch.Tensor) -> int:
            return sampling.choose(logits, s, streams[row])

        return engine.decode(run.model, prompts, s.out_seq_length, longest, eod, choose, use_cache=not s.recompute)

    def one(prompt: list[int], number: int) -> Iterator[int]:
        """The new tokens of one prompt, the end-of-document token left out."""
        return (i for (i,) in continue_([prompt or [eod]], number) if i is not None and i != eod)

    if s.num_samples:
        unconditional(s, run.tokenizer, continue_, c.training.micro_batch_size or 1)
    elif s.sample_input_file:
        prompts = [run.tokenizer.encode(line) for line in lines]
        long = [n for n, ids in enumerate(prompts, 1) if len(ids) >= longest]
        if long:
            raise UserError(
                f"{s.sample_input_file}: lines {long} have {longest} tokens or more, which leaves no room", BAD_DATA
            )
        with open(s.sample_output_file or s.sample_input_file + ".out", "w", encoding="utf-8") as out:
            for n, (line, ids) in enumerate(zip(lines, prompts, strict=True)):
                text = run.tokenizer.decode(list(one(ids, n)))
                out.write(f"\nContext:{line}\n\nMegatron-LM:{text}\n")
        print(f"wrote {len(lines)} continuations to {s.sample_output_file or s.sample_input_file + '.out'}")
    elif s.prompt is not None:
        ids = run.tokenizer.encode(s.prompt)
        if len(ids) >= longest:
            raise UserError(
                f"--prompt has {len(ids)} tokens, the model reads {longest}: nothing could follow", BAD_DATA
            )
        print(s.prompt, end="")
        for text in chat.pieces(run.tokenizer, one(ids, 0)):
            print(text, end="", flush=True)
        print()
    else:
        chat.talk(run.tokenizer, one, longest)
    return DONE


def unconditional(s: Sampling, tokenizer: Tokenizer, continue_: Batched, batch: int) -> None:
    """Exactly --num-samples JSON lines {"text", "length", "finished"}, a micro-batch at a time.

    `length` counts the generated tokens before the end-of-document one, `finished` says that it came.
    """
    assert s.genfile
    took = []
    with open(s.genfile, "w", encoding="utf-8") as out:
        for first in range(0, s.num_samples, batch):
            start = time.perf_counter()
            rows = min(batch, s.num_samples - first)
            texts: list[list[int]] = [[] for _ in range(rows)]
            for new in continue_([[tokenizer.eod]] * rows, first):
                for row, token in enumerate(new):
                    if token is not None:
                        texts[row].append(token)
            for ids in texts:
                finished = bool(ids) and ids[-1] == tokenizer.eod
                ids = ids[:-1] if finished else ids
                line = {"text": tokenizer.decode(ids), "length": len(ids), "finished": finished}
                out.write(json.dumps(line, ensure_ascii=False) + "\n")
            took.append(time.perf_counter() - start)
            print(f"Avg s/batch: {sum(took) / len(took):.3f}", flush=True)
    print(f"wrote {s.num_samples} samples to {s.genfile}")


def read_prompts(path: Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"--sample-input-file {path}: no such file", BAD_DATA) from None
    except UnicodeDecodeError as e:
        raise UserError(f"--sample-input-file {path}: byte {e.start} is not UTF-8", BAD_DATA) from None
    lines = text.splitlines()
    if not lines:
        raise UserError(f"--sample-input-file {path} is empty: one prompt a line", BAD_DATA)
    return lines
