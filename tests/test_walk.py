"""Can one batch be followed from disk to the optimizer update? Walk it, and count what a reader has to open.

One real step runs under a profiler hook that notes every function of ours that is called, from the read of the
memory-mapped file to the update of the weights. The network itself (model/ and kernels/) is one call on the way,
`model(tokens)`, and is counted apart: who wants to know GPT reads model/gpt.py.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from types import CodeType, FrameType

import numpy as np
import pytest
import torch

from helpers import TINY
from meshwright.data.format.indexed import Indexed
from meshwright.data.format.writer import Writer
from meshwright.data.loader import Batch, Loader, LoaderSpec, Samples
from meshwright.model.gpt import GPT
from meshwright.model.loss import token_losses
from meshwright.parallel.zero import ParameterStore, StoreSpec
from meshwright.settings import schema as config
from meshwright.training import network, step

SOURCE = Path(network.__file__).parent
MOST_FILES, MOST_LINES = 3, 350


def walk(prefix: Path) -> dict[str, dict[str, int]]:
    """file -> function -> lines, for every function of ours that one step calls."""
    with Writer(prefix, np.uint16) as writer:
        for n in range(20):
            writer.add(np.arange(n, n + 30) % 61)
            writer.end_document()
    data = Samples(Indexed(prefix), range(20), 8, 16, seed=1)
    with torch.device("meta"):
        model = GPT(TINY, 61, 64, 16)
    params = ParameterStore(model, StoreSpec(config.Optimizer(), torch.float32, torch.device("cpu"), 61))
    batches = iter(Loader(data, LoaderSpec(2, lambda consumed: 4, 61)))
    seen: set[CodeType] = set()

    def losses(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        return token_losses(logits, batch.labels, 61)

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(SOURCE)):
            seen.add(frame.f_code)

    sys.setprofile(note)
    try:
        net = network.Network([model], params, losses, torch.device("cpu"))
        step.train_step(net, next(batches), 1, 1e-3, 0.01, 1.0, "global")
    finally:
        sys.setprofile(None)
    assert params.steps == 1
    files: dict[str, dict[str, int]] = {}
    for code in seen:
        if not code.co_name.startswith("<"):  # comprehensions lie inside functions that are counted
            name = str(Path(code.co_filename).relative_to(SOURCE))
            files.setdefault(name, {})[code.co_qualname] = len(inspect.getsourcelines(code)[0])
    return files


def test_one_batch_is_followed_through_three_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = walk(tmp_path / "data")
    # Settings are read on the way, not followed.
    apart = ("model/", "kernels/", "config", "device", "parallel/layout")
    road = {name: f for name, f in files.items() if not name.startswith(apart)}
    the_model = {name: f for name, f in files.items() if name.startswith(("model/", "kernels/"))}
    for title, part in (("the road", road), ("the network", the_model)):
        total = sum(sum(f.values()) for f in part.values())
        print(f"{title}: {len(part)} files, {total} lines")
        for name, functions in sorted(part.items()):
            print(f"  {name}: {', '.join(f'{f} ({n})' for f, n in sorted(functions.items()))}")
    assert "data/loader.py" in road and "parallel/zero.py" in road and "network.py" in road
    assert len(road) <= MOST_FILES, sorted(road)
    assert sum(sum(f.values()) for f in road.values()) <= MOST_LINES
