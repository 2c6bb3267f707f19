"""Read and write the numbers of binary files: token indexes, zips, safetensors and protobuf.

Each reader returns a tree of numbers and the bytes between them; its writer puts them together
again, whatever the numbers are.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

Tree = dict[str, Any]


class Layout:
    """A file as named numbers of a struct at a place, over bytes that stay as they are."""

    __slots__ = ("fields",)  # so that the numbers in it are not taken for the file's

    def __init__(self, fields: dict[str, tuple[str, int]]) -> None:
        self.fields = fields

    def read(self, content: bytes) -> Tree:
        numbers = {
            name: struct.unpack_from(code, content, at)[0]
            for name, (code, at) in self.fields.items()
        }
        return numbers | {"content": content, "layout": self}

    def write(self, tree: Tree) -> bytes:
        out = bytearray(tree["content"])
        for name, (code, at) in self.fields.items():
            struct.pack_into(code, out, at, tree[name])
        return bytes(out)


def save_layout(tree: Tree, path: Path) -> None:
    path.write_bytes(tree["layout"].write(tree))


INDEX = Layout(
    {
        "version": ("<Q", 9),
        "code": ("<B", 17),
        "sequences": ("<Q", 18),
        "documents": ("<Q", 26),
        "size": ("<i", 34),
    }
    | {
        "size 1": ("<i", 38),
        "pointer": ("<q", 42),
        "pointer 1": ("<q", 50),
        "border": ("<q", 58),
        "end": ("<q", 74),
    }
)  # of two documents with one sequence each


def read_index(path: Path) -> Tree:
    return INDEX.read(path.read_bytes())


def read_directory(path: Path) -> Tree:
    """Return the numbers of a zip's first file, of its entry in the directory, and of its end."""
    content = path.read_bytes()
    end = content.rindex(b"PK\x05\x06")
    entry = struct.unpack_from("<I", content, end + 16)[0]
    fields = {f"local {name}": (code, at) for name, (code, at) in LOCAL.items()}
    fields |= {f"entry {name}": (code, entry + at) for name, (code, at) in ENTRY.items()}
    return Layout(
        fields | {f"end {name}": (code, end + at) for name, (code, at) in END.items()}
    ).read(content)


LOCAL = {
    "flags": ("<H", 6),
    "method": ("<H", 8),
    "packed": ("<I", 18),
    "size": ("<I", 22),
    "name": ("<H", 26),
}
LOCAL |= {"extra": ("<H", 28)}
ENTRY = {
    "flags": ("<H", 8),
    "method": ("<H", 10),
    "packed": ("<I", 20),
    "size": ("<I", 24),
    "name": ("<H", 28),
}
ENTRY |= {"extra": ("<H", 30), "comment": ("<H", 32), "disk": ("<H", 34), "offset": ("<I", 42)}
END = {
    "disk": ("<H", 4),
    "here": ("<H", 8),
    "files": ("<H", 10),
    "size": ("<I", 12),
    "offset": ("<I", 16),
}
END |= {"comment": ("<H", 20)}


def read_safetensors(path: Path) -> Tree:
    content = path.read_bytes()
    stop = 8 + struct.unpack_from("<Q", content)[0]
    return {"more bytes": 0, "header": json.loads(content[8:stop]), "data": content[stop:]}


def save_safetensors(tree: Tree, path: Path) -> None:
    """Write the header, which claims so many more bytes than it has."""
    header = json.dumps(tree["header"]).encode()
    path.write_bytes(struct.pack("<Q", len(header) + tree["more bytes"]) + header + tree["data"])


def read_protobuf(path: Path) -> Tree:
    return {"fields": parse_fields(path.read_bytes())}


def parse_fields(content: bytes, depth: int = 0) -> list[Tree]:
    """Return the fields of a message: number and kind, with a value, or a length and the bytes."""
    fields, at = [], 0
    while at < len(content):
        tag, at = parse_number(content, at)
        field: Tree = {"number": tag >> 3, "kind": tag & 7}
        if field["kind"] == 2:
            length, at = parse_number(content, at)
            inside = content[at : at + length]
            field |= {"longer by": 0, "inside": parse_fields(inside, 1) if not depth else inside}
            at += length
        elif field["kind"] == 0:
            field["value"], at = parse_number(content, at)
        else:
            width = {1: 8, 5: 4}[field["kind"]]
            field["inside"], at = content[at : at + width], at + width
        fields.append(field)
    return fields


def parse_number(content: bytes, at: int) -> tuple[int, int]:
    value, shift = 0, 0
    while True:
        value |= (content[at] & 127) << shift
        shift, at = shift + 7, at + 1
        if content[at - 1] < 128:
            return value, at


def encode_number(value: int) -> bytes:
    if not 0 <= value < 1 << 64:
        raise ValueError(f"{value} does not fit a protobuf")
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def encode_fields(fields: list[Tree]) -> bytes:
    out = b""
    for field in fields:
        out += encode_number(field["number"] << 3 | field["kind"])
        inside = field.get("inside", b"")
        inside = inside if isinstance(inside, bytes) else encode_fields(inside)
        if "value" in field:
            out += encode_number(field["value"])
        elif "longer by" in field:
            out += encode_number(len(inside) + field["longer by"])
        out += inside
    return out


def save_protobuf(tree: Tree, path: Path) -> None:
    path.write_bytes(encode_fields(tree["fields"]))
