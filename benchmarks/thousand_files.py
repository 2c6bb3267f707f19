"""The files of a run of thousands of ranks: what each rank reads and writes, and how long it takes.

usage: python benchmarks/thousand_files.py FOLDER [--ranks 64 512 4096] [--samples 1e8 1e9 1e10]
[--most 1e8] [--sets 1000] [--to RECORD]
       python benchmarks/thousand_files.py --draw RECORD   # docs/scaling-files.svg

Checkpoints: GPT-3 175B with ZeRO 1, saved by TP 8 x PP 16 x DP N / 128 (of 64 ranks: PP 8) and
resumed by TP 4 x PP 8. Every rank's boxes are those of the real parameter store, on the meta
device; the tensors' files are holes of the real size, and the save and the load of rank 0, and of
some other ranks, are the real ones. Between them stands a team that hands over recorded messages
and counts their bytes: messages are not timed. Seconds are those of the processor, in all threads.
Bytes and opens are counted at the system's calls.

Data: a blend of --sets data sets, of tokens that are holes, which hold so many samples in all.
"build" is rank 0's first start; "open" is what every other rank then does, in eight processes at
once. Up to --most samples in all are built; of more, one data set of that size is, and the order of
the blend for a million samples, and multiplied.

FOLDER needs 30 bytes for each of --most samples, and is emptied at the end. Figures are appended
to RECORD/costs-files.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import numpy as np
import torch
from common import describe_machine, print_head
from data_index import SEQ, corpus, status

from meshwright.base import console
from meshwright.checkpoint import loading, manifests, native, publish, steps
from meshwright.checkpoint.manifests import CHUNK, File
from meshwright.config.schema import Data, Model, Optimizer, TrainConfig, Training
from meshwright.data import datasets
from meshwright.data.blend import walk_side_by_side
from meshwright.data.samples import LARGE, compiled_loops
from meshwright.model.gpt import GPT
from meshwright.optim import rules
from meshwright.parallel import shard
from meshwright.parallel.flat import FlatStore
from meshwright.parallel.layout import Layout
from meshwright.parallel.parallel_model import stages
from meshwright.parallel.store import Named, StoreSpec, UpdateRange
from meshwright.runtime.ranks.team import BRANCHES, Team

GPT3 = Model(num_layers=96, hidden_size=12288, num_attention_heads=96)
VOCABULARY, PADDED, POSITIONS = 50257, 51200, 2048
META = torch.device("meta")


# The boxes of every rank


class BoxStore(FlatStore):
    """The parameter store without its memory: what each rank holds, on the meta device."""

    def _allocate(self, mapper: object) -> None:
        self.master = torch.empty(self.size // self.shard_count, device=META)

    def _take_over(self, model: torch.nn.Module) -> None:
        pass

    def _make_update_ranges(self) -> None:
        self.update_ranges = []
        for _, kind, r in self._ranges():
            master = torch.nn.Parameter(self.master[r.begin : r.end])
            state = {name: torch.empty_like(master) for name in rules.STATE[kind.param_group.rule]}
            self.update_ranges.append(
                UpdateRange(True, r.begin, master, state, kind.param_group.rule, r.target)
            )


def stores(layout: Layout, model: Model) -> Iterator[tuple[int, BoxStore]]:
    """Yield every rank with its store; those of one stage differ in their places alone."""
    assert model.num_layers
    each, tied, same = (
        [model.num_layers // layout.pp] * layout.pp,
        layout.pp > 1,
        layout.world // layout.pp,
    )
    for stage in range(layout.pp):
        first = replace(layout, rank=stage * same)
        with torch.device(META):
            parts = stages(lambda: GPT(model, VOCABULARY, PADDED, POSITIONS), each, first)
            for part in parts:
                shard_shapes(part, layout.tp)
        spec = StoreSpec(
            Optimizer(), torch.bfloat16, META, VOCABULARY, layout=first, zero=1, tied=tied
        )
        store = BoxStore(list(parts), replace(spec, sequence_parallel=True))
        for rank in range(first.rank, first.rank + same):
            store.layout = replace(layout, rank=rank)
            store.sharding = shard.Sharding(store.layout, VOCABULARY, True, tied, ("replicas",))
            store.shard_index = store.layout.at("shard", "cp") if store.is_sharded else 0
            store._make_update_ranges()
            yield rank, store


def shard_shapes(part: torch.nn.Module, tp: int) -> None:
    for name, p in list(part.named_parameters()):
        if (cut := shard.rule(name).cut) is not None:
            shape = list(p.shape)
            shape[cut] //= tp
            owner, _, leaf = name.rpartition(".")
            setattr(part.get_submodule(owner), leaf, torch.nn.Parameter(torch.empty(shape)))


def layout_of(tp: int, pp: int, world: int) -> Layout:
    dp = world // (tp * pp)
    groups: Any = {"shard": object()} if dp > 1 else {}  # that there is one; nothing is sent
    return Layout(pp=pp, shard=dp, tp=tp, groups=groups)


# A team without processes


@dataclass(frozen=True)
class Script(Team):
    """Rank 0 of a team whose other ranks' messages are known, or another rank that replays its."""

    known: list[list[str]] = field(default_factory=list)  # for each `collect`, the others' values
    broadcasts: list[str] = field(default_factory=list)
    dealt: list[list[str]] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)  # bytes that this rank sends and receives
    done: list[int] = field(default_factory=lambda: [0, 0])  # broadcasts and deals replayed
    # seconds that rank 0 merges in its groups of the tree
    spent: list[float] = field(default_factory=list)
    # seconds of all groups, of which most are others'
    merging: list[float] = field(default_factory=list)

    def count(self, name: str, size: int) -> None:
        self.sizes[name] = self.sizes.get(name, 0) + size

    def run_on_all(self, act: Callable[[], Any]) -> Any:
        return act()

    def total(self, number: int) -> int:
        return number

    def run_on_rank_0(self, act: Callable[[], Any]) -> Any:
        if self.is_rank_0:
            self.broadcasts.append(json.dumps(act()))
            self.count("broadcast", len(self.broadcasts[-1]))
            return json.loads(self.broadcasts[-1])
        text = self.broadcasts[self.done[0]]
        self.done[0] += 1
        self.count("received", len(text))
        return json.loads(text)

    def collect_merged(self, act: Callable[[], Any], combine: Callable[[list[Any]], Any]) -> Any:
        """Merge the others' values as the tree does: in groups of BRANCHES, level by level."""
        own = json.dumps(act())
        self.count("sent", len(own))
        if not self.is_rank_0:
            return combine([])
        texts, seconds, begun_all = [own, *self.known.pop(0)], 0.0, time.process_time()
        while len(texts) > 1:
            heads = []
            for k in range(0, len(texts), BRANCHES):
                begun = time.process_time()
                heads.append(json.dumps(combine(list(map(json.loads, texts[k : k + BRANCHES])))))
                if not k:  # rank 0's own groups; the others' are merged elsewhere at the same time
                    seconds += time.process_time() - begun
                    self.count("gathered", sum(map(len, texts[1:BRANCHES])))
            texts = heads
        self.spent.append(seconds)
        self.merging.append(time.process_time() - begun_all)
        merged = json.loads(texts[0])
        return type(combine([]))(*merged) if isinstance(combine([]), tuple) else merged

    def deal(self, act: Callable[[], list[Any]]) -> Any:
        if self.is_rank_0:
            self.dealt.append([json.dumps(value) for value in act()])
            self.count("dealt", sum(map(len, self.dealt[-1])))
            return json.loads(self.dealt[-1][0])
        text = self.dealt[self.done[1]][self.rank]
        self.done[1] += 1
        self.count("received", len(text))
        return json.loads(text)


class Counted:
    """Count what this process asks of the file system below a folder, and the seconds."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.lock = str(folder), threading.Lock()
        self.opens = self.stats = self.listings = self.bytes = 0
        self.seconds = 0.0

    def __enter__(self) -> Counted:
        self.originals = {
            name: getattr(os, name) for name in ("stat", "lstat", "listdir", "preadv")
        }
        counters = {"stat": "stats", "lstat": "stats", "listdir": "listings"}

        def wrap(name: str) -> Callable[..., Any]:
            def call(path: Any, *args: Any, **more: Any) -> Any:
                if str(path).startswith(self.folder):
                    with self.lock:
                        setattr(self, counters[name], getattr(self, counters[name]) + 1)
                return self.originals[name](path, *args, **more)

            return call

        def preadv(*args: Any) -> int:
            count: int = self.originals["preadv"](*args)
            with self.lock:
                self.bytes += count
            return count

        for name in counters:
            setattr(os, name, wrap(name))
        os.preadv = preadv
        WATCHED.append(self)
        self.began = time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.process_time() - self.began
        WATCHED.remove(self)
        for name, original in self.originals.items():
            setattr(os, name, original)


WATCHED: list[Counted] = []


def see(event: str, args: tuple[Any, ...]) -> None:
    if event == "open":
        for counted in WATCHED:
            if str(args[0]).startswith(counted.folder):
                counted.opens += 1


sys.addaudithook(see)


# Checkpoints


@dataclass
class Ranks:
    """What the ranks of a layout send when they save and when they load."""

    layout: Layout
    described: list[str] = field(default_factory=list)
    wanted: list[str] = field(default_factory=list)
    files: list[tuple[str, int]] = field(default_factory=list)  # names and sizes
    seconds: list[float] = field(default_factory=list)  # to describe what is saved
    first: dict[str, Any] = field(default_factory=dict)  # what rank 0 saves
    named: dict[int, Any] = field(default_factory=dict)  # what some ranks load


def describe_ranks(layout: Layout, model: Model, saves: bool) -> Ranks:
    out = Ranks(layout)
    sampled = {0, 1, layout.world // 2 + 1, layout.world - 1}
    for rank, store in stores(layout, model):
        named = store.named_state()
        out.wanted.append(json.dumps(native.describe_wanted(named, rank)))
        if rank in sampled:
            out.named[rank] = dict(named)
        if not saves:
            continue
        boxes = store.named_state(to_save=True)
        begun = time.process_time()
        head, extents = native.lay_out(boxes)
        described = native.describe_tensors(boxes, native.boxes_of(extents, len(head)), rank)
        out.described.append(json.dumps(described))
        out.seconds.append(time.process_time() - begun)
        size = len(head) + sum(e.flat.numel() * native.SIZES[e.dtype] for e in extents)
        out.files.append((native.rank_file(rank), size))
        out.first = out.first or boxes
    return out


def save(root: Path, ranks: Ranks) -> dict[str, Any]:
    """Save a step as rank 0 does it, with the other ranks' messages, and holes as tensors."""
    layout, described, files, seconds = ranks.layout, ranks.described, ranks.files, ranks.seconds
    team = Script(0, layout.world, known=[described[1:]])
    with Counted(root) as plan:
        produced, _ = native.step_files(ranks.first, {"iteration": 1}, {}, team=team)
    del produced[native.rank_file(0)]  # a hole, as the others'
    zeros: dict[int, str] = {}

    def digests(size: int) -> str:
        tail = size % CHUNK
        for n in {CHUNK, tail} - {0, *zeros}:
            zeros[n] = manifests.sha256([bytes(n)])
        return zeros[CHUNK] * (size // CHUNK) + (zeros[tail] if tail else "")

    parts = [json.dumps({name: File(size, digests(size))}) for name, size in files]

    class Writers(Script):
        def collect(self, act: Callable[[], Any]) -> list[Any]:
            own = act()  # after which the others have written too
            for name, size in files:
                with open(root / "iter_0000001.tmp" / name, "wb") as file:
                    file.truncate(size)
            self.known.append([json.dumps([json.loads(part)]) for part in parts])
            begun = time.process_time()
            others = self.collect_merged(
                lambda: [own], lambda lists: [x for values in lists for x in values]
            )
            started.append(time.process_time() - self.spent[-1])
            self.merging.append(time.process_time() - begun)
            return others

    started: list[float] = []
    team = Writers(0, layout.world, sizes=team.sizes, spent=team.spent, merging=team.merging)
    publish.write_step(root, 1, produced, team=team)
    folder = root / "iter_0000001"
    return {
        "index bytes": (folder / native.INDEX).stat().st_size,
        "manifest bytes": (folder / manifests.MANIFEST).stat().st_size,
        "boxes": (folder / native.INDEX).read_text().count('"begin"'),
        "rank: describe CPU s": statistics.median(seconds),
        "rank: sent bytes": statistics.mean(map(len, described)) + statistics.mean(map(len, parts)),
        "rank: received bytes": max(map(len, team.broadcasts), default=0),
        "lead: gathered bytes": team.sizes["gathered"],
        "lead: plan CPU s": plan.seconds - team.merging[0] + team.spent[0],
        "lead: publish CPU s": time.process_time() - started[0],
    }


def resume(root: Path, described: Ranks, read: bool) -> dict[str, Any]:
    """Load the step as rank 0 and as some other ranks of this layout do."""
    layout, wanted, ranks = described.layout, described.wanted, described.named
    lead = Script(0, layout.world, known=[wanted[1:]])

    def load(team: Team, named: Named) -> Counted:
        filled = native.NativeSource.fill
        if not read:  # the plan alone
            native.NativeSource.fill = plan_only  # type: ignore[method-assign]
        try:
            tensors = {
                n: (s, b, torch.empty(x.shape) if read else x) for n, (s, b, x) in named.items()
            }
            with Counted(root) as counted:
                loading.load_checkpoint(root, tensors, team=team)
        finally:
            native.NativeSource.fill = filled  # type: ignore[method-assign]
        return counted

    first = load(lead, ranks.pop(0))
    each, shares = [], []
    for rank, named in ranks.items():
        script = Script(rank, layout.world, broadcasts=lead.broadcasts, dealt=lead.dealt)
        each.append((load(script, named), script.sizes))
        shares.append(4 * sum(x.numel() for _, _, x in named.values()))
    return {
        "lead: gathered bytes": lead.sizes["gathered"],
        "lead: dealt bytes": lead.sizes["dealt"],
        "lead: CPU s": first.seconds - lead.merging[0] + lead.spent[0],
        "lead: stats": first.stats,
        "rank: sent bytes": max(sizes["sent"] for _, sizes in each),
        "rank: received bytes": max(sizes["received"] for _, sizes in each),
        "rank: CPU s": max(counted.seconds for counted, _ in each),
        "rank: opens": max(counted.opens for counted, _ in each),
        "rank: stats": max(counted.stats for counted, _ in each),
        "rank: listings": max(counted.listings for counted, _ in each),
        "rank: share bytes": max(shares),
        "rank: read bytes": max(counted.bytes for counted, _ in each) if read else None,
    }


def look(root: Path) -> dict[str, Any]:
    """Do what every rank does with --load before the ranks have met: settings and tokenizer."""
    with Counted(root) as counted:
        loading.open_checkpoint(root, loading.OpenOptions("none"))
        steps.find_step(root, sizes=False)
    manifest = (root / "iter_0000001" / manifests.MANIFEST).stat().st_size
    return {
        "rank: opens": counted.opens,
        "rank: stats": counted.stats,
        "rank: listings": counted.listings,
        "rank: read bytes": 2 * manifest + counted.bytes,
        "rank: CPU s": counted.seconds,
    }


def plan_only(source: native.NativeSource, want: Named) -> None:
    for name, (shape, boxes, tensor) in want.items():
        flat = native.flatten(name, shape, boxes, tensor)
        native.plan_copies(source.folder, name, source.index[1][name], flat, boxes)


def verify(root: Path, ranks: int) -> dict[str, Any]:
    """Verify a step in full: rank 0 deals the shares, and one rank hashes its own."""
    folder, lead = root / "iter_0000001", Script(0, ranks)
    hashed = manifests.hash_chunks
    manifests.hash_chunks = lambda folder, share: None
    with Counted(root) as dealt:
        manifests.verify_together(folder, lead)
    manifests.hash_chunks = hashed
    one = Script(ranks // 2, ranks, broadcasts=lead.broadcasts, dealt=lead.dealt)
    share = json.loads(lead.dealt[0][one.rank])
    short = [(name, size, first, digests[: 64 * 32]) for name, size, first, digests in share]
    with Counted(root) as counted:
        manifests.hash_chunks(folder, short)
    whole = sum(len(digests) for *_, digests in share) / sum(len(digests) for *_, digests in short)
    return {
        "lead: CPU s": dealt.seconds,
        "rank: received bytes": len(lead.dealt[0][one.rank]),
        "rank: opens": counted.opens,
        "rank: share bytes": int(counted.bytes * whole),
        "rank: CPU s": counted.seconds * whole,
    }


def checkpoints(root: Path, world: int, model: Model = GPT3) -> dict[str, dict[str, Any]]:
    pp = 16 if world >= 128 else 8
    before, after = layout_of(8, pp, world), layout_of(4, 8, world)
    ranks = describe_ranks(before, model, True)
    out = {"save": save(root, ranks)}
    out["look at --load before the ranks have met"] = look(root)
    read = world >= 2048  # of fewer ranks, each has too much to read here
    out["resume, same layout"] = resume(root, ranks, read)
    out["resume, another layout"] = resume(root, describe_ranks(after, model, False), read)
    out["verify in full"] = verify(root, world)
    shutil.rmtree(root)
    return out


# Data


def write_sets(folder: Path, sets: int, samples: int) -> list[str]:
    """Write pairs of token files, each of a document a sample; no two have the same lengths."""
    folder.mkdir(parents=True, exist_ok=True)
    for n in range(sets):
        corpus(folder / f"set{n}", max(2, samples // sets + 1 + n), SEQ + 1)
    return [str(folder / f"set{n}") for n in range(sets)]


def config_of(prefixes: list[str], samples: int, cache: Path) -> TrainConfig:
    weighted = (
        [word for prefix in prefixes for word in ("1", prefix)] if len(prefixes) > 1 else prefixes
    )
    data = Data(data_path=weighted, seq_length=SEQ, split="1,0,0", data_cache_path=str(cache))
    training = Training(
        micro_batch_size=1, global_batch_size=1, train_samples=samples, eval_iters=0
    )
    return TrainConfig(data=data, training=training)


def open_sets(folder: str, sets: int, samples: int) -> None:
    """Open the data as a rank does, in a process of its own; print what that took."""
    console.set_stream(None)
    config = config_of([f"{folder}/set{n}" for n in range(sets)], samples, Path(folder, "cache"))
    numbers = [samples * k // 64 for k in range(64)]
    before = status(os.getpid())
    with Counted(Path(folder)) as counted:
        train = datasets.build_datasets(config, VOCABULARY)["train"]
    assert train is not None
    begun = time.process_time()
    for k in numbers:
        train[k]
    read, after = time.process_time() - begun, status(os.getpid())
    print(
        json.dumps(
            {
                "CPU s": counted.seconds,
                "anonymous MB": (after["RssAnon"] - before["RssAnon"]) / 1e3,
                "resident MB": (after["VmRSS"] - before["VmRSS"]) / 1e3,
                "open files": len(os.listdir("/proc/self/fd")),
                "opens": counted.opens,
                "a sample ms": read * 1e3 / len(numbers),
            }
        )
    )


def data(folder: Path, sets: int, samples: int, most: int) -> dict[str, Any]:
    built = samples if samples <= most else most
    write_sets(folder, sets, built)
    command = [sys.executable, __file__, str(folder), "--open", str(sets), str(built)]
    first = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    many = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(8)]
    each = [json.loads(child.communicate()[0]) for child in many]
    cache = sum(path.stat().st_size for path in (folder / "cache").iterdir())
    shutil.rmtree(folder)
    out = {
        "built samples": built,
        "build CPU s": first["CPU s"],
        "build anonymous MB": first["anonymous MB"],
        "cache bytes": cache,
        **{f"rank of 8: {name}": max(one[name] for one in each) for name in first},
    }
    if samples > built:
        out |= rates(folder, sets, samples)
    return out


def rates(folder: Path, sets: int, samples: int) -> dict[str, Any]:
    """Build one of the data sets at its full size, and a stretch of the blend's order; multiply."""
    write_sets(folder, 1, samples // sets)
    config = config_of([str(folder / "set0")], samples // sets, folder / "cache")
    begun = time.process_time()
    datasets.build_datasets(config, VOCABULARY)
    one = time.process_time() - begun
    size = sum(path.stat().st_size for path in (folder / "cache").iterdir())
    shutil.rmtree(folder)
    stretch, loops = 1_000_000, compiled_loops(LARGE)
    which, number = np.empty(stretch, np.int16), np.empty(stretch, np.int64)
    shares = np.full(sets, 1 / sets)
    begun = time.process_time()
    if loops is None:
        walk_side_by_side(shares, which, number)
    else:
        # loads what is compiled
        loops.blend_samples(shares, np.zeros(sets), which[:10], number[:10])
        begun = time.process_time()
        loops.blend_samples(shares, np.zeros(sets), which, number)
    blend = (time.process_time() - begun) * samples / stretch
    return {
        "one data set CPU s": one,
        "all data sets CPU s, calculated": one * sets,
        "blend CPU s, calculated": blend,
        "cache bytes, calculated": size * sets + 10 * samples,
    }


def show(table: dict[str, dict[str, Any]]) -> None:
    """Print a table with a column for each size, and its rows as JSON for the page."""
    sizes = list(table)
    print_head("", *sizes)
    for row in dict.fromkeys(row for column in table.values() for row in column):
        cells = [table[size].get(row) for size in sizes]
        print(f"| {row} | {' | '.join('' if cell is None else f'{cell:,.4g}' for cell in cells)} |")
    print(flush=True)


# Lines of the picture: part, row and label.
PANELS = {
    "bytes of a rank": [
        ("save", "rank: sent bytes", "sent to save"),
        ("resume, another layout", "rank: sent bytes", "sent to resume"),
        ("resume, another layout", "rank: received bytes", "received to resume"),
        ("verify in full", "rank: received bytes", "received to verify in full"),
        ("before", "rank: received bytes", "before: received to save"),
    ],
    "bytes at rank 0": [
        ("save", "index bytes", "index"),
        ("save", "manifest bytes", "manifest"),
        ("resume, another layout", "lead: dealt bytes", "dealt to resume"),
    ],
}


def draw(record: Path) -> None:
    from matplotlib.figure import Figure

    from meshwright.apps.pages import plot

    rows = [json.loads(line) for line in (record / "costs-files.jsonl").read_text().splitlines()]
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    figure.patch.set_visible(False)
    colours = (plot.LINE, plot.POINT, plot.INK, "#4f9d69", plot.BAD)
    for axes, (title, lines) in zip(figure.subplots(1, 2), PANELS.items(), strict=True):
        plot.style(axes, "ranks")
        for (what, value, label), colour in zip(lines, colours, strict=False):
            points = sorted((row["ranks"], row[value]) for row in rows if row["what"] == what)
            axes.plot(*zip(*points, strict=True), color=colour, marker=".", lw=1.4, label=label)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_title(title, color=plot.INK, fontsize=10)
        axes.legend(fontsize=7, frameon=False, labelcolor=plot.INK)
    path = Path(__file__).parents[1] / "docs" / "scaling-files.svg"
    path.write_text(plot.svg_of(figure, "what the files of N ranks cost"))


def append(record: Path | None, rows: list[dict[str, Any]]) -> None:
    if record is not None:
        with (record / "costs-files.jsonl").open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--ranks", type=int, nargs="*", default=[64, 512, 4096])
    parser.add_argument("--samples", type=float, nargs="*", default=[1e8, 1e9, 1e10])
    parser.add_argument("--sets", type=int, default=1000)
    parser.add_argument("--most", type=float, default=1e8)
    parser.add_argument("--to", type=Path)
    parser.add_argument("--draw", type=Path)
    parser.add_argument("--open", type=int, nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.open:
        open_sets(str(args.folder), *args.open)
        return
    if args.draw:
        draw(args.draw)
        return
    console.set_stream(None)
    print(f"{describe_machine('numpy')}\n", flush=True)
    measured = {n: checkpoints(args.folder / f"ranks{n}", n) for n in args.ranks}
    for part in next(iter(measured.values()), {}):
        print(part)
        show({f"{n:,} ranks": rows[part] for n, rows in measured.items()})
        append(args.to, [{"what": part, "ranks": n} | rows[part] for n, rows in measured.items()])
    if args.samples:
        print(f"{args.sets:,} data sets")
        of_size = {
            n: data(args.folder / "data", args.sets, int(n), int(args.most)) for n in args.samples
        }
        show({f"{n:.0e} samples": rows for n, rows in of_size.items()})
        append(
            args.to,
            [
                {"what": "data", "samples": n, "sets": args.sets} | rows
                for n, rows in of_size.items()
            ],
        )
    shutil.rmtree(args.folder, ignore_errors=True)


if __name__ == "__main__":
    main()
