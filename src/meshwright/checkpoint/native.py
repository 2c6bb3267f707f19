"""Our own checkpoint: tensors of any layout in, the same tensors of any other layout out.

What is saved is `{name: (global shape, boxes, tensor)}`: the tensor is contiguous and holds one or more boxes of the
global one, each box's elements in row order, one box after the other. A whole parameter is one box; a slice of a flat
buffer is at most three. Loading takes the same structure and fills its tensors, by intersecting boxes, reading only
what is wanted, chunk by chunk.

On many ranks all call `save` and `load` together, each with what it holds or wants. The boxes saved must cover every
tensor exactly once: of copies one rank gives the boxes, and the others none.

A step folder holds a `rank_00000.safetensors` of each rank that has elements, `index.json` (per tensor: global shape,
dtype, boxes with file and byte range), `state.json` (counters and schedules) and `config.json`. The safetensors files
are written by hand, a header and raw bytes, because the library gives no way to hash while it writes, and serialising
to memory would double it; any safetensors reader reads them. We read by the index alone: it is hashed, and a hostile
header is never parsed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from meshwright.checkpoint import manifests, publish
from meshwright.checkpoint.boxes import Box, Shape, check_cover, inside, minus, not_empty, plus, position, strides
from meshwright.checkpoint.manifests import Damaged, Manifest, encode_manifest, sha256
from meshwright.checkpoint.publish import Produce, Write
from meshwright.checkpoint.sources import Known, Named, Source, check_state
from meshwright.checkpoint.steps import NATIVE
from meshwright.errors import BAD_DATA, IO, UserError
from meshwright.launch.team import ALONE, Team

if TYPE_CHECKING:
    import torch

# safetensors' names, torch's, and bytes of an element
DTYPES = [
    ("F64", "float64", 8),
    ("I64", "int64", 8),
    ("F32", "float32", 4),
    ("I32", "int32", 4),
    ("F16", "float16", 2),
    ("BF16", "bfloat16", 2),
    ("I16", "int16", 2),
    ("I8", "int8", 1),
    ("U8", "uint8", 1),
    ("BOOL", "bool", 1),
]
TORCH = {name: theirs for name, theirs, _ in DTYPES}
NAMES = {theirs: name for name, theirs, _ in DTYPES}
SIZES = {name: size for name, _, size in DTYPES}
INDEX, STATE, CONFIG = "index.json", "state.json", "config.json"
INDEX_LIMIT = 32 << 20  # bytes: some 250,000 boxes
PART = 16 << 20  # most bytes of a tensor in flight


class Entry(NamedTuple):
    """A tensor of ours and which boxes of the global tensor it holds."""

    shape: Shape
    boxes: Sequence[tuple[Shape, Shape]]
    tensor: torch.Tensor


def full_entry(tensor: torch.Tensor) -> Entry:
    """The entry of a tensor that one process holds entirely."""
    shape = tuple(tensor.shape)
    return Entry(shape, [((0,) * len(shape), shape)], tensor)


def bytes_of(named: Named, team: Team = ALONE) -> int:
    """What a checkpoint of these takes on all ranks, for publish.check_writable()."""
    return sum(team.gather(sum(tensor.numel() * tensor.element_size() for _, _, tensor in named.values())))


# Saving


class Run(NamedTuple):
    """One box in a safetensors file: consecutive elements of a flat tensor."""

    key: str
    dtype: str
    box: Box
    flat: torch.Tensor


def save(
    root: str | Path,
    step: int,
    named: Named,
    state: Mapping[str, Any],
    config: Mapping[str, Any] | None = None,
    *,
    team: Team = ALONE,
    run: Path | None = None,
) -> None:
    """Write one step, which must not be there yet.

    Rank 0 holds publish.lock(root); its state and its config are what counts. `state` must be JSON without NaN.
    """
    files, size = files_of(named, state, config or {}, team=team)
    publish.write_step(root, step, files, bytes_needed=size, team=team, run=run)


def files_of(
    named: Named,
    state: Mapping[str, Any],
    config: Mapping[str, Any],
    fetch: Callable[[Run], torch.Tensor] = lambda run: run.flat,
    team: Team = ALONE,
) -> tuple[dict[str, Produce], int]:
    """This rank's files of a step, and about how many bytes those of all ranks have.

    `fetch`: gives a run's elements when their bytes are due, where `named` has only shapes (torch's "meta").
    """
    file = f"rank_{team.rank:05d}.safetensors"
    head, runs = b"", list[Run]()
    texts: dict[str, bytes] = {}

    def describe() -> dict[str, Any]:
        nonlocal head, runs
        texts.update({STATE: as_json(state), CONFIG: as_json(config)})
        head, runs = lay_out(named)
        return index_of(named, runs, file, len(head))

    def tensors(write: Write) -> None:
        write(head)
        for run in runs:
            for part in parts_of(fetch(run)):
                write(part)

    index = merged(team.run_on_all(describe))
    check_cover(index)
    texts[INDEX] = json.dumps({"tensors": index}, sort_keys=True, separators=(",", ":")).encode()
    if len(texts[INDEX]) > INDEX_LIMIT:
        raise UserError(f"{INDEX} would have {len(texts[INDEX]):,} bytes, more than the {INDEX_LIMIT:,} we read", IO)
    files: dict[str, Produce] = {}
    if team.is_lead:
        files |= {name: lambda write, text=text: write(text) for name, text in texts.items()}  # type: ignore[misc]
    if runs:
        files[file] = tensors
    size = sum(box["end"] - box["begin"] for tensor in index.values() for box in tensor["boxes"])
    return files, size + len(head) + sum(map(len, texts.values()))


def lines_of_save(root: str | Path, step: int) -> tuple[str, str]:
    """What Megatron's log says before and after, and people's scripts look for."""
    return (
        f"saving checkpoint at iteration {step:7d} to {root}",
        f"  successfully saved checkpoint at iteration {step:7d} to {root}",
    )


def merged(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What all ranks say of their tensors, put together."""
    tensors: dict[str, Any] = {}
    for rank, part in enumerate(parts):
        for name, mine in part.items():
            known = tensors.setdefault(name, {**mine, "boxes": []})
            if (tuple(mine["shape"]), mine["dtype"]) != (tuple(known["shape"]), known["dtype"]):
                raise ValueError(
                    f"{name}: {mine['shape']} {mine['dtype']} on rank {rank}, {known['shape']} {known['dtype']} before it"
                )
            known["boxes"] += mine["boxes"]
    return tensors


def lay_out(named: Named) -> tuple[bytes, list[Run]]:
    """The safetensors header and what follows it: widest types first, so that every element is aligned."""
    runs = []
    for name, (shape, boxes, tensor) in named.items():
        flat = flat_of(name, shape, boxes, tensor)
        start = 0
        for box in (Box(tuple(offset), tuple(size)) for offset, size in boxes):
            key = name if box.size == tuple(shape) else name + ranges(box)
            count = math.prod(box.size)
            if not count and box.size != tuple(shape):
                continue  # a rank whose slice of a flat buffer is empty
            runs.append(Run(key, dtype_name(tensor), box, flat[start : start + count]))
            start += count
    runs.sort(key=lambda run: (-SIZES[run.dtype], run.key))
    return safetensors_header((run.key, run.dtype, run.box.size) for run in runs), runs


def safetensors_header(tensors: Iterable[tuple[str, str, Shape]]) -> bytes:
    """Name, type and shape of what follows it, in this order and without gaps."""
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


def index_of(named: Named, runs: list[Run], file: str, begin: int) -> dict[str, Any]:
    """Where each box lies, in bytes of its file."""
    tensors: dict[str, Any] = {
        name: {"shape": tuple(shape), "dtype": dtype_name(tensor), "boxes": []}
        for name, (shape, _, tensor) in named.items()
    }
    for run in runs:
        end = begin + run.flat.numel() * SIZES[run.dtype]
        box = {"file": file, "begin": begin, "end": end, "offset": run.box.offset, "size": run.box.size}
        tensors[run.key.partition("[")[0]]["boxes"].append(box)
        begin = end
    return tensors


def flat_of(name: str, shape: Shape, boxes: Sequence[tuple[Shape, Shape]], tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as one row of elements, after checking that it is what its boxes say."""
    held = sum(math.prod(size) for _, size in boxes)
    if held != tensor.numel() or not all(inside(Box(tuple(o), tuple(n)), shape) for o, n in boxes) or "[" in name:
        raise ValueError(f"{name} {tuple(shape)}: boxes {boxes} do not describe a tensor of {tensor.numel()} elements")
    return tensor.detach().view(-1)


def parts_of(flat: torch.Tensor) -> Iterator[memoryview]:
    """The bytes of a flat tensor: of a CPU one its own memory, of a GPU one copies of bounded size."""
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


class Stored(NamedTuple):
    """One box as the index has it."""

    file: str
    begin: int
    box: Box


class Tensor(NamedTuple):
    shape: Shape
    dtype: str
    boxes: list[Stored]


class Copy(NamedTuple):
    """A box to be read, and where its elements go."""

    dtype: str
    stored: Stored
    target: torch.Tensor  # flat
    start: int  # of the wanted box in the target
    wanted: Box
    low: Shape
    high: Shape

    @property
    def bytes(self) -> tuple[int, int]:
        """The range of the file that encloses it."""
        return enclosing(self.stored, self.dtype, self.low, self.high)


@dataclass
class Native(Source):
    manifest: Manifest = field(default_factory=dict)
    stored: dict[str, Tensor] = field(default_factory=dict)
    last: manifests.Chunks = field(default_factory=dict)

    @property
    def tensors(self) -> Mapping[str, Known]:
        return {name: Known(tensor.shape, TORCH[tensor.dtype]) for name, tensor in self.stored.items()}

    @property
    def identity(self) -> str:
        return sha256([encode_manifest(self.manifest)])

    def fill(self, want: Named) -> None:
        for theirs, ours in read(self.folder, self.manifest, self.stored, want, self.last):
            ours.copy_(theirs)

    def parts(self, name: str) -> list[tuple[str, Box]]:
        return [(one.file, one.box) for one in self.stored[name].boxes]

    def of_vocabulary(self, size: int) -> Native:
        if size != self.vocab:
            raise UserError(f"{self.folder} was made with a vocabulary of {self.vocab:,} ids, not {size:,}", BAD_DATA)
        return self


def open_step(folder: Path, step: int, verify: str = "read", team: Team = ALONE) -> Native:
    """`verify`: "read" hashes the chunks that will be read, "full" every byte now, each rank a share of them."""
    manifest = manifests.verify(folder, verify == "full", team)
    state, config = (manifests.read_json(folder, manifest, name) for name in (STATE, CONFIG))
    for name, value in ((STATE, state), (CONFIG, config)):
        if not isinstance(value, dict):
            raise Damaged(f"{folder / name}: not a JSON object")
    check_state(state, folder / STATE)
    stored, vocab = read_index(folder, manifest), state.get("true_vocab_size")
    if "iteration" not in state:  # weights alone, as `convert` makes them of another program's
        state = {}
    return Native(NATIVE, folder, step, config=config, state=state, vocab=vocab, manifest=manifest, stored=stored)


Pair = tuple["torch.Tensor", "torch.Tensor"]


def read(
    folder: Path, manifest: Manifest, stored: Mapping[str, Tensor], want: Named, last: manifests.Chunks
) -> Iterator[Pair]:
    """What is wanted, piece by piece: the elements in the file, and their place in our tensor."""
    by_file: dict[str, list[Copy]] = {}
    for name, (shape, boxes, tensor) in want.items():
        for copy in plan(folder, name, stored[name], flat_of(name, shape, boxes, tensor), boxes):
            by_file.setdefault(copy.stored.file, []).append(copy)
    for file, copies in sorted(by_file.items()):
        yield from read_file(folder / file, manifest[file], copies, last)


def read_file(path: Path, file: manifests.File, copies: list[Copy], last: manifests.Chunks) -> Iterator[Pair]:
    """The pieces of one file, from its beginning to its end."""
    import torch

    copies = sorted(copies, key=lambda copy: copy.bytes)
    chunks: set[int] = set()
    for begin, end in (copy.bytes for copy in copies):
        chunks.update(range(begin // manifests.CHUNK, (end - 1) // manifests.CHUNK + 1))
    with manifests.Reader(path, file, sorted(chunks), last) as reader:
        for copy in copies:
            dtype = getattr(torch, TORCH[copy.dtype])
            for low, high in pieces(copy):
                begin, end = enclosing(copy.stored, copy.dtype, low, high)
                data = torch.frombuffer(reader.read(begin, end), dtype=dtype)
                size = minus(high, low)
                theirs = data.as_strided(size, strides(copy.stored.box.size), 0)
                to = copy.start + position(copy.wanted, low) + copy.target.storage_offset()
                yield theirs, copy.target.as_strided(size, strides(copy.wanted.size), to)


def pieces(copy: Copy) -> Iterator[tuple[Shape, Shape]]:
    """The box of a copy cut where the file's chunks end, so that what is read of one chunk need not be joined to another."""
    waiting = [(copy.low, copy.high)]
    while waiting:
        low, high = waiting.pop()
        begin, end = enclosing(copy.stored, copy.dtype, low, high)
        border = (begin // manifests.CHUNK + 1) * manifests.CHUNK
        d = next((d for d in range(len(low)) if high[d] - low[d] > 1), None)
        if end <= border or d is None:
            yield low, high
            continue
        row = strides(copy.stored.box.size)[d] * SIZES[copy.dtype]
        # Rows of which not all lie before the border are cut along the next dimension, all but the first of them later.
        before = (border - begin) // row
        middle = low[d] + min(max(before, 1), high[d] - low[d] - 1)
        waiting.append((low[:d] + (middle,) + low[d + 1 :], high))
        waiting.append((low, high[:d] + (middle,) + high[d + 1 :]))


def plan(
    folder: Path, name: str, stored: Tensor, target: torch.Tensor, boxes: Sequence[tuple[Shape, Shape]]
) -> list[Copy]:
    """Which part of which stored box fills which part of the wanted ones: the stored ones do not overlap, by check_cover."""
    copies: list[Copy] = []
    start = 0
    for wanted in (Box(tuple(offset), tuple(size)) for offset, size in boxes):
        mine = []
        for piece in stored.boxes:
            low = tuple(map(max, wanted.offset, piece.box.offset))
            high = tuple(map(min, plus(wanted.offset, wanted.size), plus(piece.box.offset, piece.box.size)))
            if not_empty(low, high):
                mine.append(Copy(stored.dtype, piece, target, start, wanted, low, high))
        found = sum(math.prod(minus(copy.high, copy.low)) for copy in mine)
        if found != math.prod(wanted.size):
            raise Damaged(
                f"{folder / INDEX}: {name} from {wanted.offset}, size {wanted.size}, has {math.prod(wanted.size):,} "
                f"elements, the stored boxes give {found:,}"
            )
        copies += mine
        start += math.prod(wanted.size)
    return copies


def read_index(folder: Path, manifest: Manifest) -> dict[str, Tensor]:
    """The index, with every box checked against its tensor and its file."""
    path = folder / INDEX
    index = manifests.read_json(folder, manifest, INDEX, INDEX_LIMIT)
    tensors = {}
    try:
        for name, tensor in index["tensors"].items():
            shape, dtype = numbers(tensor["shape"]), tensor["dtype"]
            tensors[name] = Tensor(shape, dtype, [])
            for raw in tensor["boxes"]:
                begin, end = numbers([raw["begin"], raw["end"]])
                box = Box(numbers(raw["offset"]), numbers(raw["size"]))
                fits = end - begin == math.prod(box.size) * SIZES[dtype] and end <= manifest[raw["file"]].size
                if not fits or not inside(box, shape):
                    raise Damaged(f"{path}: a box of {name[:100]!r} lies outside its tensor or its file")
                tensors[name].boxes.append(Stored(raw["file"], begin, box))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise Damaged(f"{path}: not an index that we wrote: {type(error).__name__} {str(error)[:200]}") from error
    return tensors


def numbers(values: Any) -> Shape:
    """A short list of sizes or offsets, as a tuple."""
    if len(values) > 16 or not all(type(v) is int and 0 <= v < 1 << 60 for v in values):
        raise ValueError(f"{str(values)[:100]} is not a shape")
    return tuple(values)


def enclosing(stored: Stored, dtype: str, low: Shape, high: Shape) -> tuple[int, int]:
    """Bytes of the file from the first to the last element of low … high."""
    first = position(stored.box, low)
    last = position(stored.box, tuple(h - 1 for h in high))
    return stored.begin + first * SIZES[dtype], stored.begin + (last + 1) * SIZES[dtype]
