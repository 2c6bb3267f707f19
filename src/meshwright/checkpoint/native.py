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
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from meshwright.base import registry
from meshwright.base.errors import IO, UNAVAILABLE, UserError, too_old
from meshwright.checkpoint import manifests, publish
from meshwright.checkpoint.boxes import (
    Box,
    Shape,
    check_cover,
    inside,
    intersection,
    minus,
    position,
    split_boxes,
    strides,
)
from meshwright.checkpoint.manifests import DamagedCheckpoint, File, FilePart
from meshwright.checkpoint.publish import Produce, Write
from meshwright.checkpoint.run_state import check_saved_state
from meshwright.checkpoint.sources import Source, TensorBoxes, TensorInfo
from meshwright.checkpoint.steps import NATIVE
from meshwright.config.schema import ABSENT
from meshwright.runtime.ranks.team import ALONE, Team

if TYPE_CHECKING:
    import torch

    from meshwright.checkpoint.machines import RunMachines

# Types under safetensors' names: torch's name, and the bytes of an element.
_DTYPES = {
    "F64": ("float64", 8),
    "I64": ("int64", 8),
    "F32": ("float32", 4),
    "I32": ("int32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}
TORCH = {name: theirs for name, (theirs, _) in _DTYPES.items()}
NAMES = {theirs: name for name, theirs in TORCH.items()}
SIZES = {name: size for name, (_, size) in _DTYPES.items()}
INDEX = "index.json"
STATE = "state.json"
CONFIG = "config.json"
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


def bytes_of(named: TensorBoxes, team: Team = ALONE, folders: Sequence[int] = ()) -> int:
    """Return the size of a checkpoint of these tensors on all ranks.

    If each rank has its number in `folders`, return the size of the largest of these folders.
    """
    own = sum(tensor.numel() * tensor.element_size() for _, _, tensor in named.values())
    if not folders:
        return team.total(own)
    sizes = team.merge({str(folders[team.rank]): own}, add_up)
    return max(sizes.values())


def add_up(tables: list[dict[str, int]]) -> dict[str, int]:
    """Return the sums of the values under each key."""
    sums: Counter[str] = Counter()
    for table in tables:
        sums.update(table)
    return dict(sums)


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
    folders: publish.Folders = publish.ONE_FOLDER,
) -> None:
    """Write one step, which must not exist yet, with rank 0's state (JSON without NaN) and config.

    Rank 0 must hold `owner.lock_folder(root)`.
    """
    files, size = step_files(named, state, config or {}, team=team)
    if publish.are_on_own_disks(root, folders.users):
        files |= small_files(files, team, folders.users)
    publish.write_step(root, step, files, bytes_needed=size, team=team, run=run, folders=folders)


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
    # The ranks make the layout together, so that all of them fail if one cannot save a tensor.
    head = b""
    extents: list[BoxToWrite] = []
    texts: dict[str, bytes] = {}

    def describe() -> Described:
        nonlocal head, extents
        head, extents = lay_out(named)
        return describe_tensors(named, boxes_of(extents, len(head)), team.rank)

    def tensors(write: Write) -> None:
        write(head)
        for extent in extents:
            for part in byte_views(fetch(extent)):
                write(part)

    def describe_all() -> int:
        # Without this check, a gap or an overlap would show only when somebody loads the step.
        index = make_index(described)
        check_cover(index)
        text = json.dumps({"tensors": index}, sort_keys=True, separators=(",", ":")).encode()
        if len(text) > INDEX_LIMIT:
            raise UserError(
                f"{INDEX} would have {len(text):,} bytes, more than the {INDEX_LIMIT:,} we read", IO
            )
        texts.update({STATE: as_json(state), CONFIG: as_json(config), INDEX: text})
        return sum(
            box["end"] - box["begin"] for tensor in index.values() for box in tensor["boxes"]
        )

    # Rank 0 makes the index of all; only rank 0 has `texts` then.
    described = team.collect_merged(describe, merge_described)
    size = team.run_on_rank_0(describe_all)
    files: dict[str, Produce] = {
        name: lambda write, text=text: write(text)  # type: ignore[misc]
        for name, text in texts.items()
    }
    if extents:
        files[rank_file(team.rank)] = tensors
    return files, size + len(head) + sum(map(len, texts.values()))


def small_files(
    files: Mapping[str, Produce], team: Team, users: publish.Users
) -> dict[str, Produce]:
    """Return rank 0's small files on the first rank of each machine: each describes the step."""

    def read() -> list[dict[str, str]]:
        texts = {}
        for name in (STATE, CONFIG, INDEX):
            parts: list[bytes] = []
            files[name](parts.append)  # type: ignore[arg-type]
            texts[name] = b"".join(parts).decode()
        return [texts if first == rank else {} for rank, first in enumerate(users)]

    texts = team.deal(read)
    return {name: lambda write, text=text: write(text.encode()) for name, text in texts.items()}  # type: ignore[misc]


def save_messages(root: str | Path, step: int) -> tuple[str, str]:
    """Return the lines of Megatron's log before and after a save, which scripts look for.

    An empty line is between them in the log of 2023.
    """
    where = f"checkpoint at iteration {step:7d} to {root}"
    return f"saving {where}\n", f"  successfully saved {where}"


def rank_file(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


# Boxes of one or several tensors: their names and, of each box, its place in a file, offset, size.
Rows = list[tuple[list[str], list[tuple[int, Shape, Shape]]]]


class Described(NamedTuple):
    """What some ranks hold or want. Most have the tensors of many others, which are sent once."""

    # by tensor: each different [shape, type, first rank that has it so]
    kinds: dict[str, list[Any]]
    boxes: list[Rows]  # by rank


def describe_tensors(named: TensorBoxes, boxes: Rows, rank: int) -> Described:
    """Describe one rank's tensors; their boxes are those to save, or none where none is held."""
    kinds = {
        name: [[list(shape), dtype_name(tensor), rank]]
        for name, (shape, _, tensor) in named.items()
    }
    return Described(kinds, [boxes])


def merge_described(parts: Sequence[Sequence[Any]]) -> Described:
    """Merge what neighbouring ranks hold or want."""
    kinds: dict[str, Any] = {}
    for part, _ in parts:
        for name, added in part.items():
            known = kinds.setdefault(name, list(added))
            # Without the rank, which is that of the first one that has it so.
            seen = [kind[:2] for kind in known]
            known += [kind for kind in added if kind[:2] not in seen]
    return Described(kinds, [rows for _, boxes in parts for rows in boxes])


def kinds_of(described: Described) -> dict[str, tuple[Shape, str]]:
    """Return shape and type of each tensor, which all ranks must agree upon."""
    agreed: dict[str, tuple[Shape, str]] = {}
    for name, kinds in described.kinds.items():
        shape, dtype, _ = kinds[0]
        if len(kinds) > 1:
            other, other_dtype, rank = kinds[1]
            raise ValueError(
                f"{name}: {list(other)} {other_dtype} on rank {rank}, {list(shape)} {dtype} on an earlier rank"
            )
        agreed[name] = (tuple(shape), dtype)
    return agreed


def make_index(described: Described) -> dict[str, Any]:
    """Return the index of what all ranks hold."""
    kinds = kinds_of(described)
    tensors: dict[str, Any] = {
        n: {"shape": shape, "dtype": dtype, "boxes": []} for n, (shape, dtype) in kinds.items()
    }
    for rank, rows in enumerate(described.boxes):
        file = rank_file(rank)
        for [name], boxes in rows:
            itemsize = SIZES[kinds[name][1]]
            tensors[name]["boxes"] += [
                {
                    "file": file,
                    "begin": at,
                    "end": at + math.prod(size) * itemsize,
                    "offset": offset,
                    "size": size,
                }
                for at, offset, size in boxes
            ]
    return tensors


def lay_out(named: TensorBoxes) -> tuple[bytes, list[BoxToWrite]]:
    """Return a safetensors header and the extents after it, widest types first to align them."""
    extents = []
    for name, (shape, boxes, tensor) in named.items():
        whole = flatten(name, shape, boxes, tensor)
        dtype = dtype_name(tensor)
        for box, flat in split_boxes(boxes, whole):
            # A part has its ranges in its key, so that the keys of a file differ.
            if box.size == tuple(shape):
                extents.append(BoxToWrite(name, dtype, box, flat))
            elif flat.numel():  # a rank's slice of a flat buffer may be empty
                extents.append(BoxToWrite(name + ranges(box), dtype, box, flat))
    extents.sort(key=lambda extent: (-SIZES[extent.dtype], extent.key))
    named_sizes = ((extent.key, extent.dtype, extent.box.size) for extent in extents)
    return safetensors_header(named_sizes), extents


def safetensors_header(tensors: Iterable[tuple[str, str, Shape]]) -> bytes:
    """Return a header for tensors (name, type, shape) that follow it in this order without gaps."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, dtype, shape in tensors:
        end = begin + math.prod(shape) * SIZES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (begin, end)}
        begin = end
    text = json.dumps(header).encode()
    # Blanks, so that what follows is aligned.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def ranges(box: Box) -> str:
    return "[" + ",".join(f"{o}:{o + n}" for o, n in zip(box.offset, box.size, strict=True)) + "]"


def boxes_of(extents: list[BoxToWrite], begin: int) -> Rows:
    """Return the boxes of a file whose first extent begins there."""
    boxes: dict[str, list[tuple[int, Shape, Shape]]] = {}
    for extent in extents:
        name = extent.key.partition("[")[0]
        boxes.setdefault(name, []).append((begin, extent.box.offset, extent.box.size))
        begin += extent.flat.numel() * SIZES[extent.dtype]
    return [([name], rows) for name, rows in boxes.items()]


def describe_wanted(named: TensorBoxes, rank: int) -> Described:
    """Describe what a rank wants; a parameter and its moments have the same boxes."""
    names: dict[tuple[tuple[Shape, Shape], ...], list[str]] = {}
    for name, (_, boxes, _) in named.items():
        if boxes:
            key = tuple((tuple(offset), tuple(size)) for offset, size in boxes)
            names.setdefault(key, []).append(name)
    # Wanted boxes have no place in a file, so 0 stands for it.
    rows = []
    for boxes, own in names.items():
        rows.append((own, [(0, offset, size) for offset, size in boxes]))
    return describe_tensors(named, rows, rank)


def flatten(
    name: str, shape: Shape, boxes: Sequence[tuple[Shape, Shape]], tensor: torch.Tensor
) -> torch.Tensor:
    """Flatten a tensor, after checking that it has the elements that its boxes describe."""
    described = sum(math.prod(size) for _, size in boxes)
    fits = all(inside(Box(tuple(offset), tuple(size)), shape) for offset, size in boxes)
    # A bracket begins the ranges of a part (lay_out).
    if described != tensor.numel() or not fits or "[" in name:
        raise ValueError(
            f"{name} {tuple(shape)}: boxes {boxes} do not describe a tensor of {tensor.numel()} elements"
        )
    return tensor.detach().view(-1)


def byte_views(flat: torch.Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a flat tensor: views of CPU memory, or bounded copies from a GPU."""
    import torch

    # A slice of CPU memory is a view, so the bound on its size costs nothing there.
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
        # The box's elements are in row order, so these bytes hold everything between the two.
        itemsize = SIZES[self.dtype]
        first = position(self.box, low)
        last = position(self.box, tuple(end - 1 for end in high))
        begin = self.begin + first * itemsize
        end = self.begin + (last + 1) * itemsize
        return begin, end


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


class StoredTensor(Sequence[StoredBox]):
    """The stored boxes of a tensor, as arrays: a large checkpoint has hundreds of thousands."""

    def __init__(self, dtype: str, files: list[str], begins: Ints, low: Ints, size: Ints) -> None:
        self.dtype = dtype
        self.files = files
        self.begins = begins
        self.low = low
        self.size = size

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, k: Any) -> Any:
        box = Box(tuple(self.low[k].tolist()), tuple(self.size[k].tolist()))
        return StoredBox(self.files[k], int(self.begins[k]), box, self.dtype)


Ints = npt.NDArray[np.int64]
StoredBoxes = Mapping[str, StoredTensor]


@dataclass
class NativeSource(Source):
    """A step of ours; every rank but 0 has only the parts of manifest and index that it needs."""

    manifest: Mapping[str, File | FilePart] = field(default_factory=dict)
    last: manifests.Chunks = field(default_factory=dict)
    machines: RunMachines | None = None  # if its files are on the disks of several

    @functools.cached_property
    def index(self) -> tuple[dict[str, TensorInfo], StoredBoxes]:
        return read_index(self.folder, self.manifest, self.machines)

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self.index[0]

    @property
    def identity(self) -> str:
        return manifests.read_seal(self.folder)

    def fill(self, want: TensorBoxes) -> None:
        from meshwright.kernels import moments

        pieces = read_pieces(
            self.folder, self.manifest, self.index[1], want, self.last, self.machines
        )
        for theirs, ours in pieces:
            moments.assign(ours, theirs)

    def parts(self, name: str) -> list[tuple[str, Box]]:
        return [(stored.file, stored.box) for stored in self.index[1][name]]

    def share(self, wanted: Described, team: Team) -> None:
        """Keep what this rank needs to read the boxes it wants; rank 0 knows what all want."""
        if team.size == 1:
            return
        boxes, files = team.deal(lambda: deal_boxes(self.index[1], self.manifest, wanted.boxes))
        if self.machines is not None:
            self.machines.deal_holders(self.folder, files, team)
        self.manifest = {
            name: FilePart(size, dict(digests)) for name, (size, digests) in files.items()
        }
        kinds = {name: (len(info.shape), NAMES[info.dtype]) for name, info in self.tensors.items()}
        self.index = (
            self.index[0],
            {n: parse_boxes(*kind, boxes.get(n, [])) for n, kind in kinds.items()},
        )


def open_native(
    folder: Path,
    step: int,
    verify: str = "read",
    team: Team = ALONE,
    machines: RunMachines | None = None,
) -> NativeSource:
    """Open a step: rank 0 reads it, and the others learn its settings, state and tensors.

    With verify="full" every byte is hashed now, each rank a share; with "none" neither the files
    are looked at nor the index, until it is needed. `machines` have its files, if it is divided.
    """
    opened: list[NativeSource] = []

    def act() -> list[Any]:
        if machines is not None:  # they have compared the sizes of their files with it
            manifest = machines.manifest_of(folder)
        elif verify == "none":
            manifest = manifests.read_manifest(folder)
        else:
            manifest = manifests.verify_step(folder)
        # It was saved with --ckpt-format, by an installation with more formats.
        if INDEX not in manifest:
            raise UserError(
                f"{folder} has another format than ours: {registry.LACKING}", UNAVAILABLE
            )

        # What it says is checked before anything is made of it.
        state, config = (
            manifests.read_json(folder, manifest, name, machines=machines)
            for name in (STATE, CONFIG)
        )
        for name, value in ((STATE, state), (CONFIG, config)):
            if not isinstance(value, dict):
                raise DamagedCheckpoint(f"{folder / name}: not a JSON object")
        check_saved_state(state, folder / STATE)
        # Only a run says what its data are, and since 0.15 it says the base of its widths too;
        # 0.17 adds that where it converts an older step.
        if "data_fingerprint" in config and "mup_base_hidden_size" not in config:
            raise too_old(folder)
        opened.append(
            NativeSource(
                NATIVE,
                folder,
                step,
                config=config,
                state=state,
                manifest=manifest,
                machines=machines,
            )
        )
        return [config, state, list(opened[0].tensors.items()) if verify != "none" else []]

    config, state, infos = team.run_on_rank_0(act)
    if opened:
        source = opened[0]
    else:
        source = NativeSource(NATIVE, folder, step, config=config, state=state, machines=machines)
        source.index = {name: TensorInfo(tuple(shape), dtype) for name, (shape, dtype) in infos}, {}
    if verify == "full":
        manifests.verify_together(folder, team, machines)
    source.vocab = source.state.get("true_vocab_size")
    # Neither another program nor a release without it records an option.
    source.config = ABSENT | source.config
    if "iteration" not in source.state:  # weights alone, converted from another program's
        source.state = {}
    return source


def deal_boxes(
    stored: StoredBoxes,
    manifest: Mapping[str, File | FilePart],
    wanted: Sequence[Rows],
) -> list[Any]:
    """Return for each rank the stored boxes that meet the ones it wants, and their files' digests.

    Tensor by tensor, the boxes that all ranks want are compared with all that are stored at once.
    """
    boxes: list[dict[str, dict[int, Any]]] = [{} for _ in wanted]
    chunks: list[dict[str, set[int]]] = [{} for _ in wanted]

    # The boxes that all ranks want of a tensor, each with its rank.
    by_name: dict[str, tuple[list[int], list[tuple[Shape, Shape]]]] = {}
    for rank, rows in enumerate(wanted):
        for names, own in rows:
            for name in names:
                ranks, all_wanted = by_name.setdefault(name, ([], []))
                ranks += [rank] * len(own)
                all_wanted += [(offset, size) for _, offset, size in own]

    # For each stored box that one of them meets: the box itself, and the chunks of what both share.
    for name, (ranks, all_wanted) in by_name.items():
        tensor = stored[name]
        found = (column.tolist() for column in meetings(tensor, all_wanted))
        for row, number, begin, end in zip(*found, strict=True):
            rank = ranks[row]
            file = tensor.files[number]
            own_boxes = boxes[rank].setdefault(name, {})
            if number not in own_boxes:
                box = tensor[number]
                own_boxes[number] = (file, box.begin, *box.box)
            touched = range(begin // manifests.CHUNK, (end - 1) // manifests.CHUNK + 1)
            chunks[rank].setdefault(file, set()).update(touched)

    def part_of(name: str, numbers: set[int]) -> list[Any]:
        return [manifest[name].size, [(n, manifest[name].digest(n)) for n in sorted(numbers)]]

    return [
        [
            {name: list(rows.values()) for name, rows in own.items()},
            {name: part_of(name, ns) for name, ns in read.items()},
        ]
        for own, read in zip(boxes, chunks, strict=True)
    ]


def meetings(
    stored: StoredTensor, wanted: Sequence[tuple[Shape, Shape]]
) -> tuple[Ints, Ints, Ints, Ints]:
    """Return for each wanted and stored box that share elements their numbers and the bytes shared.

    The bytes are those from the first to the last shared element in the stored box's file. Boxes
    are compared only where they may meet along the first dimension.
    """
    count = len(wanted)
    d = stored.low.shape[1]
    low = np.array([offset for offset, _ in wanted], np.int64).reshape(count, d)
    size = np.array([size for _, size in wanted], np.int64).reshape(count, d)
    rows, numbers = candidates(stored, low, size)

    # Of these pairs, those that share elements in all dimensions.
    begin = np.maximum(np.maximum(low, 0)[rows], stored.low[numbers])
    end = np.minimum((low + size)[rows], (stored.low + stored.size)[numbers])
    meet = (begin < end).all(axis=1)
    rows = rows[meet]
    numbers = numbers[meet]
    begin = begin[meet]
    end = end[meet]

    # Where the first and the last of the shared elements are in the stored box's file.
    inner = np.ones_like(stored.size)  # elements from one place of a dimension to the next
    for k in range(d - 1, 0, -1):
        inner[:, k - 1] = inner[:, k] * stored.size[:, k]
    itemsize = SIZES[stored.dtype]

    def byte_of(point: Ints) -> Ints:
        within = point - stored.low[numbers]
        elements = (within * inner[numbers]).sum(axis=1)
        at: Ints = stored.begins[numbers] + elements * itemsize
        return at

    return rows, numbers, byte_of(begin), byte_of(end - 1) + itemsize


def candidates(stored: StoredTensor, low: Ints, size: Ints) -> tuple[Ints, Ints]:
    """Return pairs of numbers of wanted and stored boxes that may meet along the first dimension.

    All that do are among them. A checkpoint of a large cluster has too many boxes to try all pairs.
    """
    count, d = low.shape
    if not (d and count and len(stored)):
        rows, numbers = np.indices((count, len(stored))).reshape(2, -1)
        return rows, numbers

    # Stored boxes in the order in which they begin. A wanted box may meet those that begin before
    # it ends, and not so early that even the longest of them would end before it begins.
    stored_low = stored.low[:, 0]
    order = stored_low.argsort(kind="stable")
    sorted_low = stored_low[order]
    begin = low[:, 0]
    longest = stored.size[:, 0].max()
    first = sorted_low.searchsorted(begin - longest, "right")
    end = sorted_low.searchsorted(begin + size[:, 0])
    counts = end - first

    # For wanted box i, the places first[i], first[i] + 1, ... in that order, counts[i] of them.
    rows = np.repeat(np.arange(count), counts)
    before = counts.cumsum() - counts  # pairs of the boxes before this one
    places = np.arange(len(rows)) + np.repeat(first - before, counts)
    return rows, order[places]


Pair = tuple["torch.Tensor", "torch.Tensor"]


def read_pieces(
    folder: Path,
    manifest: Mapping[str, File | FilePart],
    stored: StoredBoxes,
    want: TensorBoxes,
    last: manifests.Chunks,
    machines: RunMachines | None,
) -> Iterator[Pair]:
    """Yield the wanted elements in pieces: those of the file, and their place in our tensor."""
    by_file: dict[str, list[BoxCopy]] = {}
    for name, (shape, boxes, tensor) in want.items():
        flat = flatten(name, shape, boxes, tensor)
        for copy in plan_copies(folder, name, stored[name], flat, boxes):
            by_file.setdefault(copy.stored.file, []).append(copy)
    # Each file is opened once, and all ranks go through the files in one order.
    for file, copies in sorted(by_file.items()):
        yield from read_file(folder / file, manifest[file], copies, last, machines)


def read_file(
    path: Path,
    file: File | FilePart,
    copies: list[BoxCopy],
    last: manifests.Chunks,
    machines: RunMachines | None = None,
) -> Iterator[Pair]:
    """Yield the pieces of one file from its beginning to its end."""
    import torch

    copies = sorted(copies, key=lambda copy: copy.byte_range)
    # A chunk is what one hash covers: it is read as a whole, whatever is wanted of it.
    chunks: set[int] = set()
    for copy in copies:
        begin, end = copy.byte_range
        chunks.update(range(begin // manifests.CHUNK, (end - 1) // manifests.CHUNK + 1))
    with manifests.VerifiedReader(path, file, sorted(chunks), last, machines) as reader:
        for copy in copies:
            dtype = getattr(torch, TORCH[copy.stored.dtype])
            for low, high in pieces(copy):
                begin, end = copy.stored.byte_range(low, high)
                data = torch.frombuffer(reader.read(begin, end), dtype=dtype)
                # Both become views with the strides of their boxes, so that torch copies rows.
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
        lengths = minus(high, low)
        d = next((d for d, length in enumerate(lengths) if length > 1), None)
        # One element is not cut, wherever it lies.
        if end <= border or d is None:
            yield low, high
            continue
        # Along the first dimension that can be cut, with as many rows before the border as fit. A
        # row that crosses it is later cut along the next dimension.
        row = strides(copy.stored.box.size)[d] * SIZES[copy.stored.dtype]
        fitting = (border - begin) // row
        middle = low[d] + min(max(fitting, 1), lengths[d] - 1)
        second_low = (*low[:d], middle, *low[d + 1 :])
        first_high = (*high[:d], middle, *high[d + 1 :])
        # The first half is taken from the list first: bytes are read in their order.
        waiting.append((second_low, high))
        waiting.append((low, first_high))


def plan_copies(
    folder: Path,
    name: str,
    stored: StoredTensor,
    target: torch.Tensor,
    boxes: Sequence[tuple[Shape, Shape]],
) -> list[BoxCopy]:
    """Plan which part of which stored box fills which part of the wanted boxes."""
    copies: list[BoxCopy] = []
    # Find for each wanted box the stored boxes that meet it.
    cut = list(split_boxes(boxes, target))
    parts: list[list[BoxCopy]] = [[] for _ in cut]
    rows, numbers, *_ = meetings(stored, boxes)
    for row, number in zip(rows.tolist(), numbers.tolist(), strict=True):
        (wanted, flat), part = cut[row], stored[number]
        parts[row].append(BoxCopy(part, flat, wanted, *intersection(wanted, part.box)))
    # Stored boxes do not overlap, so their shares add up.
    for (wanted, flat), own in zip(cut, parts, strict=True):
        covered = sum(math.prod(minus(copy.high, copy.low)) for copy in own)
        if covered != flat.numel():
            where = f"{folder / INDEX}: {name} from {wanted.offset}, size {wanted.size}"
            raise DamagedCheckpoint(
                f"{where}, has {flat.numel():,} elements, but the stored boxes give {covered:,}"
            )
        copies += own
    return copies


def read_index(
    folder: Path, manifest: Mapping[str, File | FilePart], machines: RunMachines | None = None
) -> tuple[dict[str, TensorInfo], StoredBoxes]:
    """Read the index and check every box against its tensor and its file."""
    path = folder / INDEX
    index = manifests.read_json(folder, manifest, INDEX, INDEX_LIMIT, machines)
    infos: dict[str, TensorInfo] = {}
    boxes: dict[str, StoredTensor] = {}
    try:
        for name, tensor in index["tensors"].items():
            [shape] = parse_sizes([tensor["shape"]], len(tensor["shape"])).tolist()
            dtype = tensor["dtype"]
            raw = tensor["boxes"]
            if math.prod(shape) >= 1 << 60:
                raise ValueError(f"{str(shape)[:100]} is not a shape")
            # A large cluster's step has 100,000 boxes, which are checked faster as arrays.
            rows = [(box["file"], box["begin"], box["offset"], box["size"]) for box in raw]
            infos[name] = TensorInfo(tuple(shape), TORCH[dtype])
            own = parse_boxes(len(shape), dtype, rows)

            # A box lies within its tensor and within its file, and has as many bytes as elements.
            ends = parse_sizes([[box["end"]] for box in raw], 1)[:, 0]
            limits = np.array([manifest[file].size for file in own.files], np.int64)
            bytes_needed = own.size.prod(axis=1) * SIZES[dtype]
            fits = (own.low + own.size <= np.array(shape, np.int64)).all(axis=1)
            fits &= (ends - own.begins == bytes_needed) & (ends <= limits)
            if not fits.all():
                raise DamagedCheckpoint(
                    f"{path}: a box of {name[:100]!r} lies outside its tensor or its file"
                )
            boxes[name] = own
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        why = f"{type(error).__name__} {str(error)[:200]}"
        raise DamagedCheckpoint(f"{path}: not an index that we wrote: {why}") from error
    return infos, boxes


def parse_boxes(dimensions: int, dtype: str, rows: Sequence[Any]) -> StoredTensor:
    """Return the boxes of (file, first byte, offset, size) of a tensor."""
    files: list[str] = []
    begins = []
    offsets = []
    sizes = []
    for file, begin, offset, size in rows:
        files.append(file)
        begins.append([begin])
        offsets.append(offset)
        sizes.append(size)
    return StoredTensor(
        dtype,
        files,
        parse_sizes(begins, 1)[:, 0],
        parse_sizes(offsets, dimensions),
        parse_sizes(sizes, dimensions),
    )


def parse_sizes(values: Sequence[Sequence[int]], length: int) -> Ints:
    """Return lists of so many sizes or offsets as an array."""
    # numpy would make an array of floats from empty lists, and lose its form.
    form = len(values), length
    array = np.array(values) if math.prod(form) else np.empty(form, np.int64)
    # Lists of other things, or of unequal lengths, become arrays of another type or shape.
    is_of_ints = array.dtype == np.int64 and array.shape == form
    is_in_range = True
    if array.size:
        is_in_range = 0 <= array.min() <= array.max() < 1 << 60
    if length > 16 or not is_of_ints or not is_in_range:
        raise ValueError(f"{str(values)[:100]} is not a shape")
    return array
