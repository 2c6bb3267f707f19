"""Native checkpoint format: save tensors from one layout and load them into any other.

All ranks save and load together; each passes the `TensorBoxes` that it holds or wants. The saved
boxes must cover every tensor exactly once, so if several ranks hold copies, only one passes them.

A step folder holds one `rank_00000.safetensors` for each rank that has elements, `index.json` (per
tensor: global shape, dtype, boxes with file and byte range), `state.json` (counters and schedules)
and `config.json`. The safetensors files are written by hand, because the library cannot hash while
it writes. Loading relies on the index alone, which is hashed, so a hostile safetensors header is
never parsed.

Index and manifest grow with the number of ranks, so rank 0 alone makes and reads them. It deals to
each rank the boxes that the rank asks for and the hashes of what it will read.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from meshwright.checkpoint import manifests, publish
from meshwright.checkpoint.boxes import (
    Box,
    Shape,
    check_cover,
    inside,
    intersection,
    minus,
    not_empty,
    position,
    split_boxes,
    strides,
)
from meshwright.checkpoint.manifests import DamagedCheckpoint, File, FilePart
from meshwright.checkpoint.publish import Produce, Write
from meshwright.checkpoint.run_state import check_saved_state
from meshwright.checkpoint.sources import Source, TensorBoxes, TensorInfo
from meshwright.checkpoint.steps import NATIVE
from meshwright.errors import IO, UserError, bad_data
from meshwright.ranks.team import ALONE, Team

if TYPE_CHECKING:
    import torch

# torch's names of types under those of safetensors, the reverse, and the bytes of an element.
_DTYPES = "F64 float64 I64 int64 F32 float32 I32 int32 F16 float16 BF16 bfloat16 I16 int16 I8 int8 U8 uint8 BOOL bool"
TORCH = dict(zip(_DTYPES.split()[::2], _DTYPES.split()[1::2], strict=True))
NAMES = {theirs: name for name, theirs in TORCH.items()}
SIZES = dict(zip(TORCH, (8, 8, 4, 4, 2, 2, 2, 1, 1, 1), strict=True))
# Settings that older releases did not have, at the values that networks had without them.
UNRECORDED = {"rope_scaling": "none", "use_parallel_residual": False}
UNRECORDED |= {"layernorm_bias": True, "final_logit_softcapping": 0.0}
UNRECORDED |= {"window_size": None, "window_attn_skip_freq": None}
INDEX, STATE, CONFIG = "index.json", "state.json", "config.json"
INDEX_LIMIT = 128 << 20  # bytes: about 1,200,000 boxes
PART = 16 << 20  # the largest copy of a part of a tensor, in bytes


class BoxedTensor(NamedTuple):
    """A local tensor and the boxes of the global tensor that it holds."""

    shape: Shape
    boxes: Sequence[tuple[Shape, Shape]]
    tensor: torch.Tensor


def undivided(tensor: torch.Tensor) -> BoxedTensor:
    """Return the entry of a tensor that one process holds completely."""
    shape = tuple(tensor.shape)
    return BoxedTensor(shape, [((0,) * len(shape), shape)], tensor)


def bytes_of(named: TensorBoxes, team: Team = ALONE) -> int:
    """Return the size of a checkpoint of these tensors on all ranks."""
    return team.total(sum(tensor.numel() * tensor.element_size() for _, _, tensor in named.values()))


# Saving


class BoxToWrite(NamedTuple):
    """A box in a safetensors file: consecutive elements of a flat tensor."""

    key: str
    dtype: str
    box: Box
    flat: torch.Tensor


def save_step(
    root: str | Path,
    step: int,
    named: TensorBoxes,
    state: Mapping[str, Any],
    config: Mapping[str, Any] | None = None,
    *,
    team: Team = ALONE,
    run: Path | None = None,
    users: publish.Users = (),
) -> None:
    """Write one step, which must not exist yet, with rank 0's state (JSON without NaN) and config.

    Rank 0 must hold `owner.lock_folder(root)`.
    """
    files, size = step_files(named, state, config or {}, team=team)
    publish.write_step(root, step, files, bytes_needed=size, team=team, run=run, users=users)


def step_files(
    named: TensorBoxes,
    state: Mapping[str, Any],
    config: Mapping[str, Any],
    fetch: Callable[[BoxToWrite], torch.Tensor] = lambda extent: extent.flat,
    team: Team = ALONE,
) -> tuple[dict[str, Produce], int]:
    """Return this rank's files of a step, and roughly the size of all ranks' files in bytes.

    `fetch` returns an extent's elements; pass it when `named` holds only shapes (meta tensors).
    """
    head, extents = b"", list[BoxToWrite]()
    texts: dict[str, bytes] = {}

    def describe() -> RankIndex:
        nonlocal head, extents
        head, extents = lay_out(named)
        return index_of(named, extents, len(head))

    def tensors(write: Write) -> None:
        write(head)
        for extent in extents:
            for part in byte_views(fetch(extent)):
                write(part)

    def describe_all() -> int:
        index = merge_indexes(parts)
        check_cover(index)
        text = json.dumps({"tensors": index}, sort_keys=True, separators=(",", ":")).encode()
        if len(text) > INDEX_LIMIT:
            raise UserError(f"{INDEX} would have {len(text):,} bytes, more than the {INDEX_LIMIT:,} we read", IO)
        texts.update({STATE: as_json(state), CONFIG: as_json(config), INDEX: text})
        return sum(box["end"] - box["begin"] for tensor in index.values() for box in tensor["boxes"])

    parts = team.collect(describe)
    size = team.run_on_lead(describe_all)
    files: dict[str, Produce] = {name: lambda write, text=text: write(text) for name, text in texts.items()}  # type: ignore[misc]
    if extents:
        files[rank_file(team.rank)] = tensors
    return files, size + len(head) + sum(map(len, texts.values()))


def save_messages(root: str | Path, step: int) -> tuple[str, str]:
    """Return the lines of Megatron's log before and after a save, which scripts look for.

    An empty line is between them in the log of 2023.
    """
    where = f"checkpoint at iteration {step:7d} to {root}"
    return f"saving {where}\n", f"  successfully saved {where}"


def rank_file(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


# One rank's tensors by name: (shape, type, boxes as (first byte in its file, offset, size)).
RankIndex = dict[str, tuple[Shape, str, list[tuple[int, Shape, Shape]]]]


def merge_indexes(parts: Sequence[RankIndex]) -> dict[str, Any]:
    """Merge the index entries of all ranks."""
    tensors: dict[str, Any] = {}
    for rank, part in enumerate(parts):
        file = rank_file(rank)
        for name, (shape, dtype, boxes) in part.items():
            merged = tensors.setdefault(name, {"shape": list(shape), "dtype": dtype, "boxes": []})
            if (earlier := (merged["shape"], merged["dtype"])) != (list(shape), dtype):
                raise ValueError(
                    f"{name}: {list(shape)} {dtype} on rank {rank}, {earlier[0]} {earlier[1]} on an earlier rank"
                )
            merged["boxes"] += [
                {"file": file, "begin": at, "end": at + math.prod(n) * SIZES[dtype], "offset": offset, "size": n}
                for at, offset, n in boxes
            ]
    return tensors


def lay_out(named: TensorBoxes) -> tuple[bytes, list[BoxToWrite]]:
    """Return a safetensors header and the extents after it, widest types first to align them."""
    extents = []
    for name, (shape, boxes, tensor) in named.items():
        for box, flat in split_boxes(boxes, flatten(name, shape, boxes, tensor)):
            if box.size == tuple(shape):
                extents.append(BoxToWrite(name, dtype_name(tensor), box, flat))
            elif flat.numel():  # a rank's slice of a flat buffer may be empty
                extents.append(BoxToWrite(name + ranges(box), dtype_name(tensor), box, flat))
    extents.sort(key=lambda extent: (-SIZES[extent.dtype], extent.key))
    return safetensors_header((extent.key, extent.dtype, extent.box.size) for extent in extents), extents


def safetensors_header(tensors: Iterable[tuple[str, str, Shape]]) -> bytes:
    """Return a header for tensors (name, type, shape) that follow it in this order without gaps."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape in tensors:
        begin, end = end, end + math.prod(shape) * SIZES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (begin, end)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def ranges(box: Box) -> str:
    return "[" + ",".join(f"{o}:{o + n}" for o, n in zip(box.offset, box.size, strict=True)) + "]"


def index_of(named: TensorBoxes, extents: list[BoxToWrite], begin: int) -> RankIndex:
    """Return shape, type and boxes of each tensor, a box with its place in this rank's file."""
    tensors: RankIndex = {name: (tuple(shape), dtype_name(tensor), []) for name, (shape, _, tensor) in named.items()}
    for extent in extents:
        tensors[extent.key.partition("[")[0]][2].append((begin, extent.box.offset, extent.box.size))
        begin += extent.flat.numel() * SIZES[extent.dtype]
    return tensors


def wanted_of(named: TensorBoxes) -> RankIndex:
    """Return shape, type and boxes of each tensor that a rank wants, without places in a file."""
    return {
        name: (tuple(shape), dtype_name(tensor), [(0, tuple(offset), tuple(size)) for offset, size in boxes])
        for name, (shape, boxes, tensor) in named.items()
    }


def flatten(name: str, shape: Shape, boxes: Sequence[tuple[Shape, Shape]], tensor: torch.Tensor) -> torch.Tensor:
    """Flatten a tensor, after checking that it has the elements that its boxes describe."""
    described = sum(math.prod(size) for _, size in boxes)
    if described != tensor.numel() or not all(inside(Box(tuple(o), tuple(n)), shape) for o, n in boxes) or "[" in name:
        raise ValueError(f"{name} {tuple(shape)}: boxes {boxes} do not describe a tensor of {tensor.numel()} elements")
    return tensor.detach().view(-1)


def byte_views(flat: torch.Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a flat tensor: views of CPU memory, or bounded copies from a GPU."""
    import torch

    count = PART // flat.element_size()
    for i in range(0, flat.numel(), count):
        yield flat[i : i + count].cpu().view(torch.uint8).numpy().data


def dtype_name(tensor: torch.Tensor) -> str:
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in NAMES:
        raise ValueError(f"a checkpoint does not hold tensors of {tensor.dtype}")
    return NAMES[name]


def as_json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True, indent=1, allow_nan=False).encode()


# Loading


class StoredBox(NamedTuple):
    """A box in a file, from the index."""

    file: str
    begin: int
    box: Box
    dtype: str

    def byte_range(self, low: Shape, high: Shape) -> tuple[int, int]:
        """Return the bytes from the first to the last element between `low` and `high`."""
        first, last = position(self.box, low), position(self.box, tuple(h - 1 for h in high))
        return self.begin + first * SIZES[self.dtype], self.begin + (last + 1) * SIZES[self.dtype]


class BoxCopy(NamedTuple):
    """What to read of a stored box, and where its elements go."""

    stored: StoredBox
    target: torch.Tensor  # the elements of the wanted box
    wanted: Box
    low: Shape
    high: Shape

    @property
    def byte_range(self) -> tuple[int, int]:
        return self.stored.byte_range(self.low, self.high)


StoredBoxes = Mapping[str, Sequence[StoredBox]]


@dataclass
class NativeSource(Source):
    """A step of ours; on a rank but the lead, the parts of manifest and index that it needs."""

    manifest: Mapping[str, File | FilePart] = field(default_factory=dict)
    last: manifests.Chunks = field(default_factory=dict)

    @functools.cached_property
    def index(self) -> tuple[dict[str, TensorInfo], StoredBoxes]:
        return read_index(self.folder, self.manifest)

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self.index[0]

    @property
    def identity(self) -> str:
        return manifests.read_seal(self.folder)

    def fill(self, want: TensorBoxes) -> None:
        for theirs, ours in read_pieces(self.folder, self.manifest, self.index[1], want, self.last):
            ours.copy_(theirs)

    def parts(self, name: str) -> list[tuple[str, Box]]:
        return [(stored.file, stored.box) for stored in self.index[1][name]]

    def of_vocabulary(self, size: int) -> NativeSource:
        if size != self.vocab:
            raise bad_data(f"{self.folder} was made with a vocabulary of {self.vocab:,} ids, not {size:,}")
        return self

    def share(self, wanted: Sequence[RankIndex], team: Team) -> None:
        """Keep what this rank needs to read the boxes it wants; rank 0 knows what all want."""
        if team.size == 1:
            return
        boxes, files = team.deal(lambda: deal_boxes(self.index[1], self.manifest, wanted))

        def stored(name: str) -> list[StoredBox]:
            dtype, rows = NAMES[self.tensors[name].dtype], boxes.get(name, [])
            return [
                StoredBox(file, begin, Box(tuple(offset), tuple(size)), dtype) for file, begin, offset, size in rows
            ]

        self.manifest = {name: FilePart(size, dict(digests)) for name, (size, digests) in files.items()}
        self.index = self.index[0], {name: stored(name) for name in self.tensors}


def open_native(folder: Path, step: int, verify: str = "read", team: Team = ALONE) -> NativeSource:
    """Open a step: rank 0 reads it, and the others learn its settings, state and tensors.

    With verify="full" every byte is hashed now, each rank a share; with "none" neither the files
    are looked at nor the index, until it is needed.
    """
    opened: list[NativeSource] = []

    def act() -> list[Any]:
        manifest = manifests.read_manifest(folder) if verify == "none" else manifests.verify_step(folder)
        state, config = (manifests.read_json(folder, manifest, name) for name in (STATE, CONFIG))
        for name, value in ((STATE, state), (CONFIG, config)):
            if not isinstance(value, dict):
                raise DamagedCheckpoint(f"{folder / name}: not a JSON object")
        check_saved_state(state, folder / STATE)
        opened.append(NativeSource(NATIVE, folder, step, config=config, state=state, manifest=manifest))
        return [config, state, list(opened[0].tensors.items()) if verify != "none" else []]

    config, state, infos = team.run_on_lead(act)
    source = opened[0] if opened else NativeSource(NATIVE, folder, step, config=config, state=state)
    if not opened:
        source.index = {name: TensorInfo(tuple(shape), dtype) for name, (shape, dtype) in infos}, {}
    if verify == "full":
        manifests.verify_together(folder, team)
    source.vocab = source.state.get("true_vocab_size")
    source.config = UNRECORDED | source.config
    if "iteration" not in source.state:  # weights alone, converted from another program's
        source.state = {}
    return source


def deal_boxes(stored: StoredBoxes, manifest: Mapping[str, File | FilePart], wanted: Sequence[RankIndex]) -> list[Any]:
    """Return for each rank the stored boxes that meet the ones it wants, and their files' digests.

    Tensor by tensor, the boxes that all ranks want are compared with all that are stored at once.
    """
    boxes: list[dict[str, dict[int, Any]]] = [{} for _ in wanted]
    chunks: list[dict[str, set[int]]] = [{} for _ in wanted]
    by_name: dict[str, list[tuple[int, Shape, Shape]]] = {}
    for rank, index in enumerate(wanted):
        for name, (_, _, rows) in index.items():
            by_name.setdefault(name, []).extend((rank, offset, size) for _, offset, size in rows)
    for name, rows in by_name.items():
        of_name = stored[name]
        for row, number, begin, end in meetings(of_name, [(offset, size) for _, offset, size in rows]):
            rank, box = rows[row][0], of_name[number]
            boxes[rank].setdefault(name, {})[number] = (box.file, box.begin, *box.box)
            touched = range(begin // manifests.CHUNK, (end - 1) // manifests.CHUNK + 1)
            chunks[rank].setdefault(box.file, set()).update(touched)
    return [
        [
            {name: list(rows.values()) for name, rows in own.items()},
            {
                name: [manifest[name].size, [(n, manifest[name].digest(n)) for n in sorted(ns)]]
                for name, ns in read.items()
            },
        ]
        for own, read in zip(boxes, chunks, strict=True)
    ]


def meetings(stored: Sequence[StoredBox], wanted: Sequence[tuple[Shape, Shape]]) -> Iterator[tuple[int, int, int, int]]:
    """Yield for each wanted and stored box that share elements their numbers and the bytes shared.

    The bytes are those from the first to the last shared element in the stored box's file.
    """
    if not stored or not wanted:
        return
    d = len(wanted[0][0])
    low, size = (np.array([box[k] for box in wanted], np.int64).reshape(len(wanted), d) for k in range(2))
    stored_low, stored_size = (
        np.array([box.box[k] for box in stored], np.int64).reshape(len(stored), d) for k in range(2)
    )
    high, stored_high = low + size, stored_low + stored_size
    first, last = np.maximum(low[:, None], stored_low), np.minimum(high[:, None], stored_high)
    rows, numbers = (first < last).all(axis=2).nonzero()
    inner = np.ones_like(stored_size)  # elements from one place of a dimension to the next
    inner[:, :-1] = stored_size[:, :0:-1].cumprod(axis=1)[:, ::-1]
    begins, itemsize = np.array([box.begin for box in stored], np.int64), SIZES[stored[0].dtype]
    shift, steps = stored_low[numbers], inner[numbers]
    at, end = ((point - shift) * steps for point in (first[rows, numbers], last[rows, numbers] - 1))
    begin, end = begins[numbers] + at.sum(axis=1) * itemsize, begins[numbers] + (end.sum(axis=1) + 1) * itemsize
    yield from zip(rows.tolist(), numbers.tolist(), begin.tolist(), end.tolist(), strict=True)


Pair = tuple["torch.Tensor", "torch.Tensor"]


def read_pieces(
    folder: Path,
    manifest: Mapping[str, File | FilePart],
    stored: StoredBoxes,
    want: TensorBoxes,
    last: manifests.Chunks,
) -> Iterator[Pair]:
    """Yield the wanted elements in pieces: those of the file, and their place in our tensor."""
    by_file: dict[str, list[BoxCopy]] = {}
    for name, (shape, boxes, tensor) in want.items():
        for copy in plan_copies(folder, name, stored[name], flatten(name, shape, boxes, tensor), boxes):
            by_file.setdefault(copy.stored.file, []).append(copy)
    for file, copies in sorted(by_file.items()):
        yield from read_file(folder / file, manifest[file], copies, last)


def read_file(path: Path, file: File | FilePart, copies: list[BoxCopy], last: manifests.Chunks) -> Iterator[Pair]:
    """Yield the pieces of one file from its beginning to its end."""
    import torch

    copies = sorted(copies, key=lambda copy: copy.byte_range)
    chunks: set[int] = set()
    for begin, end in (copy.byte_range for copy in copies):
        chunks.update(range(begin // manifests.CHUNK, (end - 1) // manifests.CHUNK + 1))
    with manifests.VerifiedReader(path, file, sorted(chunks), last) as reader:
        for copy in copies:
            dtype = getattr(torch, TORCH[copy.stored.dtype])
            for low, high in pieces(copy):
                begin, end = copy.stored.byte_range(low, high)
                data = torch.frombuffer(reader.read(begin, end), dtype=dtype)
                size = minus(high, low)
                theirs = data.as_strided(size, strides(copy.stored.box.size), 0)
                to = position(copy.wanted, low) + copy.target.storage_offset()
                yield theirs, copy.target.as_strided(size, strides(copy.wanted.size), to)


def pieces(copy: BoxCopy) -> Iterator[tuple[Shape, Shape]]:
    """Cut the box of a copy at the ends of chunks, so that no piece is joined from two."""
    waiting = [(copy.low, copy.high)]
    while waiting:
        low, high = waiting.pop()
        begin, end = copy.stored.byte_range(low, high)
        border = (begin // manifests.CHUNK + 1) * manifests.CHUNK
        d = next((d for d in range(len(low)) if high[d] - low[d] > 1), None)
        if end <= border or d is None:
            yield low, high
            continue
        row = strides(copy.stored.box.size)[d] * SIZES[copy.stored.dtype]
        # A row that crosses the border is later cut along the next dimension.
        before = (border - begin) // row
        middle = low[d] + min(max(before, 1), high[d] - low[d] - 1)
        waiting.append((low[:d] + (middle,) + low[d + 1 :], high))
        waiting.append((low, high[:d] + (middle,) + high[d + 1 :]))


def plan_copies(
    folder: Path, name: str, stored: Sequence[StoredBox], target: torch.Tensor, boxes: Sequence[tuple[Shape, Shape]]
) -> list[BoxCopy]:
    """Plan which part of which stored box fills which part of the wanted boxes."""
    copies: list[BoxCopy] = []
    for wanted, flat in split_boxes(boxes, target):
        parts = []
        for part in stored:
            low, high = intersection(wanted, part.box)
            if not_empty(low, high):
                parts.append(BoxCopy(part, flat, wanted, low, high))
        covered = sum(math.prod(minus(copy.high, copy.low)) for copy in parts)
        if covered != flat.numel():
            where = f"{folder / INDEX}: {name} from {wanted.offset}, size {wanted.size}"
            raise DamagedCheckpoint(f"{where}, has {flat.numel():,} elements, but the stored boxes give {covered:,}")
        copies += parts
    return copies


def read_index(folder: Path, manifest: Mapping[str, File | FilePart]) -> tuple[dict[str, TensorInfo], StoredBoxes]:
    """Read the index and check every box against its tensor and its file."""
    path = folder / INDEX
    index = manifests.read_json(folder, manifest, INDEX, INDEX_LIMIT)
    infos, boxes = {}, dict[str, list[StoredBox]]()
    try:
        for name, tensor in index["tensors"].items():
            shape, dtype = parse_sizes(tensor["shape"]), tensor["dtype"]
            infos[name], boxes[name] = TensorInfo(shape, TORCH[dtype]), []
            for raw in tensor["boxes"]:
                begin, end = parse_sizes([raw["begin"], raw["end"]])
                box = Box(parse_sizes(raw["offset"]), parse_sizes(raw["size"]))
                fits = end - begin == math.prod(box.size) * SIZES[dtype] and end <= manifest[raw["file"]].size
                if not fits or not inside(box, shape):
                    raise DamagedCheckpoint(f"{path}: a box of {name[:100]!r} lies outside its tensor or its file")
                boxes[name].append(StoredBox(raw["file"], begin, box, dtype))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        why = f"{type(error).__name__} {str(error)[:200]}"
        raise DamagedCheckpoint(f"{path}: not an index that we wrote: {why}") from error
    return infos, boxes


def parse_sizes(values: Any) -> Shape:
    """Return a short list of sizes or offsets as a tuple."""
    if len(values) > 16 or not all(type(v) is int and 0 <= v < 1 << 60 for v in values):
        raise ValueError(f"{str(values)[:100]} is not a shape")
    return tuple(values)
