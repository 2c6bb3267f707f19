"""Follow one batch from disk through CUDA graphs to the update, and count what is to be read.

Traced are all functions of ours that the third step of a real run calls, which captures its pieces
and replays them. The run is on a CPU: graphs_on_cpu.py stands in for the capture, and each hot spot
takes torch's way. What a GPU runs in their place is counted from the files' names:
runtime/cuda_graphs.py for the capture, and kernels/triton/NAME.py beside each kernels/NAME.py that
the step enters.

The walk leaves out what the loop does beside the batch (ASIDE), and questions to the layout, the
device and the settings, and signs for the watchdog (LOOKED_UP), each with all that it calls. The
whole step leaves out nothing.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from types import CodeType, FrameType

import numpy as np
import pytest

import meshwright
from graphs_on_cpu import Recorder, stand_in
from helpers import TINY_FLAGS
from meshwright.__main__ import main
from meshwright.data.files.writer import Writer
from meshwright.training.loop import Trainer

pytestmark = pytest.mark.skipif(
    sys.version_info < (3, 11), reason="code objects of Python 3.10 have no qualified name"
)
SOURCE = Path(meshwright.__file__).parent
MOST_FILES, MOST_LINES, MOST_FILES_OF_A_STEP = 33, 1289, 50
LOOKED_UP = ("parallel/layout", "base/device", "config/", "runtime/ranks/heartbeat")
ASIDE = {
    "State.is_done",
    "Trainer.reason_to_stop",
    "Trainer.skip_iterations",
    "Trainer.run_hooks_between_steps",
    "Trainer.step_settings",
    "InFlight.add",
    "Trainer.settle",
    "Timers.time",
    "profiler.<locals>.before_step",
    "Replicas.due",
    "Replicas.run",
    "Store.note_time",
}
CAPTURE = SOURCE / "runtime/cuda_graphs.py"  # what the stand-in stands for


def file_of(code: CodeType) -> str:
    path = Path(code.co_filename)
    return str(path.relative_to(SOURCE)) if path.is_relative_to(SOURCE) else ""


def is_on_the_walk(frame: FrameType | None) -> bool:
    """Whether neither this function nor one that led to it is left out."""
    while frame is not None and frame.f_code is not Trainer.train.__code__:
        code = frame.f_code
        if code.co_qualname in ASIDE or file_of(code).startswith(LOOKED_UP):
            return False
        frame = frame.f_back
    return True


def walk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, dict[str, int]]]:
    """Return file -> function -> lines of what the third step calls: on the walk, and in all."""
    with Writer(folder / "data", np.uint16) as writer:
        for n in range(40):
            writer.add(np.arange(n, n + 30) % 61)
            writer.end_document()
    on_the_walk: set[CodeType] = {Trainer.train.__code__}
    in_all: set[CodeType] = {Trainer.train.__code__}
    begins = iter(range(9))

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and file_of(frame.f_code):
            in_all.add(frame.f_code)
            if is_on_the_walk(frame):
                on_the_walk.add(frame.f_code)

    def reason_to_stop(self: Trainer) -> None:
        """Trace the third round of the loop, which begins with this call."""
        is_third = next(begins) == 2
        sys.setprofile(note if is_third else None)
        if is_third:
            real_reason(self)

    real_reason = Trainer.reason_to_stop
    monkeypatch.setattr(Trainer, "reason_to_stop", reason_to_stop)
    stand_in(monkeypatch)
    given = [f for f in TINY_FLAGS if f != "--mock-data"] + ["--data-path", str(folder / "data")]
    try:
        assert main(["train", *given, "--train-iters=4", "--eval-iters=0", "--num-layers=1"]) == 0
    finally:
        sys.setprofile(None)
    return [by_file(on_the_walk), by_file(in_all)]


def by_file(seen: set[CodeType]) -> dict[str, dict[str, int]]:
    files: dict[str, dict[str, int]] = {}
    for code in seen:
        outer = code.co_qualname.partition(".<locals>")[0]
        is_inside = code.co_qualname != outer and any(outer == other.co_qualname for other in seen)
        if not is_inside and not code.co_name.startswith("<"):
            lines = [line.strip() for line in inspect.getsourcelines(code)[0]]
            # Comments and blank lines make a function longer to scroll, and shorter to read.
            read = [line for line in lines if line and not line.startswith("#")]
            files.setdefault(file_of(code), {})[code.co_qualname] = len(read)
    return files


def on_a_gpu(files: set[str]) -> list[str]:
    """Return the files of a walk, with those that take the place of others on a GPU."""
    kernels = {f"kernels/triton/{Path(name).name}" for name in files if name.startswith("kernels/")}
    assert CAPTURE.is_file()
    there = {name for name in kernels if (SOURCE / name).is_file()}
    return sorted(files | there | {str(CAPTURE.relative_to(SOURCE))})


def test_one_batch_is_followed_through_cuda_graphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files, step = walk(tmp_path, monkeypatch)
    assert Recorder.made[0].calls[:3] == ["prepare", "capture 0", "capture 1"]
    lines = sum(sum(functions.values()) for functions in files.values())
    walked, in_all = on_a_gpu(set(files)), on_a_gpu(set(step))
    with capsys.disabled():
        print(f"\nthe whole step: {len(in_all)} files: {', '.join(in_all)}")
        print(
            f"one batch: {len(walked)} files, {lines} lines and those of {CAPTURE.name} and Triton's"
        )
        for name, functions in sorted(files.items()):
            print(f"  {name}: {', '.join(f'{f} ({n})' for f, n in sorted(functions.items()))}")
    assert {
        "training/loop.py",
        "data/feed.py",
        "data/loader.py",
        "training/step.py",
        "training/graphs.py",
        "training/micro_step.py",
        "parallel/parallel_model.py",
        "model/gpt.py",
        "kernels/linear.py",
        "parallel/flat.py",
        "parallel/store.py",
    } <= files.keys()
    assert len(walked) <= MOST_FILES, walked
    assert lines <= MOST_LINES
    assert len(in_all) <= MOST_FILES_OF_A_STEP, in_all
