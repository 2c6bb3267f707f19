"""Unconditional samples in a file, as Megatron-DeepSpeed's script writes them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

from meshwright.tokenizers import Tokenizer

# Prompts and the number of the first -> each prompt's new tokens, and whether its text ended.
Complete = Callable[[list[list[int]], int], list[tuple[list[int], bool]]]


def write_samples(path: str, count: int, tokenizer: Tokenizer, complete: Complete, batch: int) -> None:
    """Write `count` JSON lines {"text", "length", "finished"}, a micro-batch at a time.

    `length` counts the tokens before the end-of-document one; `finished` is whether that came.
    """
    seconds = []
    with open(path, "w", encoding="utf-8") as out:
        for first in range(0, count, batch):
            start = time.perf_counter()
            for ids, finished in complete([[tokenizer.eod]] * min(batch, count - first), first):
                line = {"text": tokenizer.decode(ids), "length": len(ids), "finished": finished}
                out.write(json.dumps(line, ensure_ascii=False) + "\n")
            out.flush()
            seconds.append(time.perf_counter() - start)
            print(f"Avg s/batch: {sum(seconds) / len(seconds):.3f}", flush=True)
    print(f"wrote {count} samples to {path}")
