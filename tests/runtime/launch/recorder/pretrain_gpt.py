"""Train as `meshwright train` does, and write down which samples this rank read in which step.

SAMPLES names the folder; each process appends to a file of its own there.
"""

from __future__ import annotations

import json
import os
import sys
import time
import zlib
from pathlib import Path
from typing import Any

from meshwright.__main__ import main
from meshwright.training.loop import Trainer


def record(folder: Path) -> None:
    inner, path = Trainer.next_batch, folder / f"{os.getpid()}.jsonl"

    def next_batch(self: Trainer) -> list[Any]:
        batches = inner(self)
        pairs = (
            (int(n), row) for b in batches for n, row in zip(b.sample_ids, b.tokens, strict=True)
        )
        row = {"step": self.progress.iteration + 1, "time": time.time(), "ranks": self.config.world}
        row["attempt"] = [os.environ.get(name) for name in ("TORCHELASTIC_RUN_ID", "MASTER_PORT")]
        row["samples"] = [(n, zlib.crc32(tokens.numpy())) for n, tokens in pairs]
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        return batches

    Trainer.next_batch = next_batch  # type: ignore[method-assign]


if __name__ == "__main__":
    record(Path(os.environ["SAMPLES"]))
    sys.exit(main(["train", *sys.argv[1:]]))
