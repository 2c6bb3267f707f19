"""Time a decoded token with parts of its kernels replaced, and the stages of one on the device.

    python benchmarks/records/2026-11-28-speed/variants.py 345M [1.3B]

A variant replaces text of kernels/triton/decode.py and loads the result in its place. For the
stages, each program writes the device's clock (in ns, of a coarse tick) when it starts, when it no
longer waits for the row, and when it ends.
"""

from __future__ import annotations

import importlib.util
import statistics
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "benchmarks"))

import gpu_decode  # noqa: E402
from common import attempt, describe_machine  # noqa: E402
from meshwright.generation.engine import LanguageModel  # noqa: E402

from meshwright.generation.decoder import Decoder  # noqa: E402
from meshwright.generation.requests import Request  # noqa: E402

NAME = "meshwright.kernels.triton.decode"
SOURCE = (ROOT / "src/meshwright/kernels/triton/decode.py").read_text()
TILES = "w * inner <= 16384 and columns // w >= 2 * processors"
Replacements = list[tuple[str, str]]
VARIANTS: dict[str, Replacements] = {
    "as it is": [],
    "each kernel after the one before": [("devices.is_hopper_or_later(", "bool(0) and (")],
    "without attention (wrong)": [("        _attend[b, groups", "        0 and _attend[b, groups")],
    "without norms (wrong)": [("= layer.norm or (", "= (")],
    "attention in parts of 64 places": [
        ("max(64, min(16384 // width, power_of_2(longest)))", "64")
    ],
    "64 weights a thread": [("(1 + gated) // 4096", "(1 + gated) // 2048")],
    "three programs a multiprocessor": [(TILES, TILES.replace(">= 2", ">= 3"))],
    "again": [],
}
# Where programs write the clock.
SLOTS = """
SLOTS = []
CLOCKS = torch.zeros(1 << 22, dtype=torch.int64, device="cuda")


def slot(name, programs):
    at = 3 * sum(count for _, count in SLOTS)
    SLOTS.append((name, programs))
    return CLOCKS[at:]


"""
NOW = "tl.extra.cuda.globaltimer()"


def write(program: str) -> str:
    """Return the lines that end a kernel."""
    return (
        f"    mine = clocks + 3 * ({program})\n"
        f"    tl.store(mine, begun)\n    tl.store(mine + 1, arrived)\n    tl.store(mine + 2, {NOW})\n"
    )


END_LINEAR = "    tl.store(out + n, acc.to(out.dtype.element_ty), mask=is_column)\n"
END_ATTEND = "        tl.store(o, (acc / total[:, None]).to(out.dtype.element_ty), mask=inside)\n"
CLOCKED: Replacements = [
    ("def _decode_linear(\n", "def _decode_linear(\n    clocks,\n"),
    ("    n = tl.program_id(0)", f"    begun = {NOW}\n    n = tl.program_id(0)"),
    ("    y = tl.load(x + k", f"    arrived = {NOW}\n    y = tl.load(x + k"),
    (END_LINEAR, END_LINEAR + write("tl.program_id(0)")),
    ("tile.columns),)](*", "tile.columns),)](slot(f'{n} x {k}', cdiv(n, tile.columns)), *"),
    ("def _attend(\n", "def _attend(\n    clocks,\n"),
    ("    row, group, part", f"    begun = {NOW}\n    row, group, part"),
    ("    head = qkv", f"    arrived = {NOW}\n    head = qkv"),
    (END_ATTEND, END_ATTEND + write("(row * GROUPS + group) * tl.num_programs(2) + part")),
    (
        "_attend[b, groups, parts](",
        "_attend[b, groups, parts](slot('attention', b * groups * parts), ",
    ),
    ("@triton.jit\ndef _embed_tokens", SLOTS + "@triton.jit\ndef _embed_tokens"),
]


def install(replacements: Replacements) -> ModuleType:
    """Let the decoder use the kernels with these replacements."""
    text = SOURCE
    for old, new in replacements:
        assert old in text, old
        text = text.replace(old, new)
    path = Path(tempfile.mkdtemp()) / "decode.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(NAME, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[NAME] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def captured(model: LanguageModel) -> Any:
    """Return the replay of a step after a prompt of 128 tokens."""
    decoder = Decoder(model, 1, graphs="on")
    decoder.submit(Request(gpu_decode.prompts(1, gpu_decode.PROMPT)[0], gpu_decode.GREEDY))
    for _ in range(8):
        decoder.step()
    torch.cuda.synchronize()
    assert decoder.steps is not None
    return list(decoder.steps.runs.values())[-1]


def measure(name: str, model: LanguageModel) -> None:
    install(VARIANTS[name])
    replay, times = captured(model), list[float]()
    for _ in range(7):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(60):
            replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 60 * 1e3)
    print(f"  {name:36s} {min(times):7.1f} us, median {statistics.median(times):.1f}", flush=True)


def stages(model: LanguageModel) -> None:
    """Print when a stage's first and last programs start, go on and end; medians of the layers."""
    module = install(CLOCKED)
    replay = captured(model)
    for _ in range(3):
        replay()
    torch.cuda.synchronize()
    last = 5 * len(model.model.h) + 1  # launches of the captured step
    at, before = 3 * sum(count for _, count in module.SLOTS[:-last]), None
    rows: dict[str, list[list[float]]] = {}
    for name, count in module.SLOTS[-last:]:
        clocks = module.CLOCKS[at : at + 3 * count].view(-1, 3).cpu()
        at += 3 * count
        if before is not None:
            found = [
                float(f(clocks[:, i]) - before) for i in range(3) for f in (torch.amin, torch.amax)
            ]
            rows.setdefault(name, []).append(found)
        before = clocks[:, 2].amax()
    print("  ns after the end of the stage before: first and last program start, go on, end")
    for name, values in rows.items():
        print(
            f"  {name:14s}",
            *(f"{statistics.median(v[i] for v in values):8.0f}" for i in range(6)),
            flush=True,
        )


def main() -> None:
    print(describe_machine("torch", "triton"))
    for size in sys.argv[1:]:
        model = gpu_decode.named(size)
        print(size)
        for name in VARIANTS:
            attempt(name, measure, name, model)
        attempt("stages", stages, model)


if __name__ == "__main__":
    main()
