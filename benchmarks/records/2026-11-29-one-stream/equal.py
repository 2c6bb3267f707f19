"""Preprocess a zoo of inputs by two trees, and compare token files, counts, messages and statuses.

    python equal.py OLD/src NEW/src FOLDER

Each tree reads the same files in one process of its own, which calls the command for each case.
"""

from __future__ import annotations

import bz2
import contextlib
import gzip
import hashlib
import io
import json
import lzma
import os
import random
import re
import sqlite3
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

CHINESE = "第一回　宴桃园豪杰三结义\n话说天下大势，分久必合，合久必分。\n周末七国分争，并入于秦。\n"


def words(count: int, seed: int) -> str:
    chance = random.Random(seed)
    return " ".join(
        chance.choice(("alpha", "béta", "中文", "delta", "x" * 9)) for _ in range(count)
    )


def texts(count: int = 40) -> list[str]:
    return [f"{n} {words(n % 23, n)}\nsecond line\n" for n in range(count)]


def json_lines(documents: list[str]) -> bytes:
    return b"".join(
        json.dumps({"id": n, "text": text}).encode() + b"\n" for n, text in enumerate(documents)
    )


def table(documents: list[str], sign: str = ",") -> bytes:
    rows = (f'{n}{sign}"{text}"{sign}5' for n, text in enumerate(documents))
    return ("\r\n".join([sign.join(("id", "text", "stars")), *rows]) + "\r\n").encode()


def page(text: str, charset: str = "utf-8") -> bytes:
    return (
        f"<html><head><meta charset={charset}></head><body><p>{text}<br>é</body></html>\n".encode(
            charset
        )
    )


def dump(documents: list[str]) -> bytes:
    article = "<page><title>T{}</title><ns>0</ns><revision><text>''{}''</text></revision></page>\n"
    return (
        "<mediawiki>\n"
        + "".join(article.format(n, t) for n, t in enumerate(documents))
        + "</mediawiki>\n"
    ).encode()


def forms() -> dict[str, bytes]:
    """Return files of each kind, intact and damaged, by name."""
    documents = texts()
    plain = "<|endoftext|>\n".join(documents).encode()
    mixed = b"<|endoftext|>\n".join([plain[:300], page("one"), b"last\n"])
    found = {
        "lines.jsonl": json_lines(documents),
        "large.jsonl": json_lines(texts(9000)),
        "bom.jsonl": b"\xef\xbb\xbf" + json_lines(documents),
        "blank.jsonl": json_lines(documents).replace(b"\n", b"\n\n\r\n"),
        "array.json": json.dumps([{"text": "a"}, {"text": "b"}], indent=1).encode(),
        "bad.jsonl": json_lines(documents[:5])
        + b'{"text": 3}\n{"no": 1}\nnot json\n[1]\n{"text": "\xe9"}\n{"text": "\\ud800"}\n'
        + b'{"text": NaN, "x": 1}\n{"text": "laxer", "x": NaN}\n'
        + json_lines(documents[5:]),
        "chat.jsonl": json.dumps({"messages": [{"role": "user", "content": "x"}]}).encode() + b"\n",
        "plain.txt": plain,
        "large.txt": "<|endoftext|>\n".join(texts(9000)).encode(),
        "one.txt": words(500, 1).encode(),
        "crlf.txt": plain.replace(b"\n", b"\r\n"),
        "bom.txt": b"\xef\xbb\xbf" + plain,
        "utf16.txt": plain.decode().encode("utf-16"),
        "utf32.jsonl": json_lines(documents).decode().encode("utf-32"),
        "chinese.txt": (CHINESE * 30).encode("gb18030"),
        "chinese-bad.txt": (CHINESE * 30).encode("gb18030")
        + b"\x81\n"
        + (CHINESE * 30).encode("gb18030"),
        "chinese.jsonl": '{"text": "天下"}\n'.encode("gb18030") * 5,
        "chinese.csv": f"id,text\n1,{CHINESE.split()[0]}\n".encode("gb18030"),
        "latin.txt": b"caf\xe9\n" * 50 + plain,
        "late.txt": plain * 3 + b"\xe9 bad\nmore\n",
        "binary.txt": b"\x89PNG\r\n\x1a\n\0\0\0",
        "page.html": page("hello <script>x</script> &amp;"),
        "page-gbk.html": page("朱", "gbk").replace("é".encode("gbk", "ignore"), b""),
        "page-bad.html": b"<p>o\xe9<p>two\xc3\xa9",
        "mixed.txt": mixed,
        "empty.txt": b"",
        "blank.txt": b" \n \n",
        "table.csv": table(documents),
        "table.tsv": table(documents, "\t"),
        "semicolon.csv": table(documents, ";"),
        "large.csv": table(texts(9000)),
        "bad.csv": b'id,text,stars\n1,a,5\n2,b\n3,c,d,e\n4,\xe9,5\n5,"open,5\n6,f,5\n',
        "half.csv": b"text,n\none\ntwo,5\nafter,6\n",
        "other.csv": b"id,note\n1,2\n",
        "dump.xml": dump(documents),
        "dump-cut.xml": dump(documents)[:-90],
        "dump-bad.xml": dump(documents).replace("中".encode(), b"\xe4\xb8", 1),
        "paper.pdf": b"%PDF-1.7\n1 0 obj\n" + b"text " * 50,
        "odd.json": b'{\n "a": 1\n}',
        "keyless.json": b'{"a": 1}\n',
        "odd.css": b"p {}",
        "looks.txt": b'{"text": "l1"}\n{"text": "l2"}\n',
        "svg.xml": b"<svg/>",
    }
    return found


def archive(files: dict[str, bytes], mode: str = "w") -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return out.getvalue()


def write_zoo(folder: Path) -> None:
    """Write all files, also packed, in archives and in a folder."""
    import pyarrow
    import pyarrow.parquet
    import zstandard

    folder.mkdir(parents=True)
    made = forms()
    packers: dict[str, Callable[[bytes], bytes]] = {
        "gz": lambda content: gzip.compress(content, mtime=0),
        "xz": lzma.compress,
        "bz2": bz2.compress,
        "zst": zstandard.ZstdCompressor().compress,
    }
    for name, content in list(made.items()):
        made[f"{name}.gz"] = packers["gz"](content)
        if name in ("lines.jsonl", "plain.txt", "table.csv", "dump.xml", "mixed.txt"):
            made |= {f"{name}.{ending}": pack(content) for ending, pack in packers.items()}
            made[f"unnamed-{name.replace('.', '-')}"] = packers["gz"](content)
            made[f"cut-{name}.gz"] = packers["gz"](content)[: -len(packers["gz"](content)) // 3]
    small = {name: content for name, content in forms().items() if len(content) < 100_000}
    made["all.tar"] = archive(small)
    made["all.tgz"] = archive(small, "w:gz")
    plain = {name: content for name, content in small.items() if not name.endswith(("csv", "tsv"))}
    made["plain.tar"], made["plain.tgz"] = archive(plain), archive(plain, "w:gz")
    made["wide.tar"] = archive({"a.txt": forms()["large.txt"], "b.jsonl": forms()["large.jsonl"]})
    made["cut.tar"] = archive(small)[:30_000]
    made["large.tar"] = archive(
        {
            "a.txt": forms()["large.txt"],
            "b.jsonl": forms()["large.jsonl"],
            "c.csv": forms()["large.csv"],
        }
    )
    inner = archive({"x.txt": b"x", "y.jsonl": json_lines(["y"])})
    made["nested.tar"] = archive(
        {
            "a.tar": inner,
            "b.txt.gz": packers["gz"](b"packed"),
            "c.txt.gz": packers["gz"](b"c" * 999)[:-9],
            "d.txt": b"d",
        }
    )
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as pack:
        for name, content in small.items():
            pack.writestr(zipfile.ZipInfo(name), content)
    made["all.zip"] = packed.getvalue()
    made["all.zip.gz"] = packers["gz"](packed.getvalue())
    for name, content in made.items():
        (folder / name).write_bytes(content)
    for number, (name, content) in enumerate(forms().items()):
        path = folder / "folder" / f"part{number % 3}" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    texts_of_rows = [text if n % 17 else None for n, text in enumerate(texts(3000))]
    pyarrow.parquet.write_table(
        pyarrow.table({"id": range(3000), "text": texts_of_rows}),
        folder / "rows.parquet",
        row_group_size=700,
    )
    good = pyarrow.table({"text": texts(500)})
    with pyarrow.ipc.new_file(str(folder / "rows.arrow"), good.schema) as out:
        out.write_table(good, max_chunksize=64)
    bad = pyarrow.array([b"a", b"caf\xe9", b"b"], pyarrow.binary()).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"text": bad}), folder / "bad.parquet")
    with sqlite3.connect(folder / "rows.db") as database:
        database.execute("CREATE TABLE posts (id INTEGER, text TEXT)")
        database.executemany("INSERT INTO posts VALUES (?, ?)", enumerate([*texts(300), None]))
    database.close()


# Flags that some of the inputs are also read with.
FLAGS = ((), ("--on-error", "skip"), ("--on-error", "replace"))
MORE = {
    "chinese": (
        ("--encoding", "gb18030"),
        ("--encoding", "gb18030", "--on-error", "replace"),
        ("--encoding", "big5"),
    ),
    "lines": (
        ("--json-keys", "text", "id"),
        ("--json-keys", "body"),
        ("--workers", "2"),
        ("--split-sentences",),
    ),
    "plain": (
        ("--document-separator", ""),
        ("--workers", "2"),
        ("--document-length", "50"),
        ("--append-eod",),
    ),
    "large": (("--workers", "2"),),
    "mixed": (("--document-separator", ""),),
    "folder": (
        ("--include", "*.txt"),
        ("--exclude", "*.html", "part1", "--on-error", "skip"),
        ("--encoding", "gb18030", "--on-error", "replace"),
        ("--workers", "2", "--on-error", "skip"),
    ),
    "wide": (("--workers", "2"),),
    "all": (
        ("--exclude", "*.csv", "--on-error", "skip"),
        ("--encoding", "gb18030", "--on-error", "skip"),
    ),
    "rows": (("--json-keys", "id", "text"), ("--workers", "2", "--on-error", "skip")),
}


def cases(zoo: Path) -> Iterator[tuple[str, list[str], bytes | None]]:
    """Yield a name, the flags, and the standard input."""
    for path in sorted(zoo.iterdir()):
        kind = re.split(r"[-.]", path.name)[0]
        for flags in (*FLAGS, *MORE.get(kind, ())):
            yield f"{path.name} {' '.join(flags)}", ["--input", str(path), *flags], None
        if path.is_file() and path.stat().st_size < 300_000:
            yield f"- < {path.name}", ["--input", "-", "--on-error", "skip"], path.read_bytes()
    yield (
        "several",
        [
            "--input",
            *(
                str(zoo / name)
                for name in ("plain.txt", "lines.jsonl.gz", "table.csv", "page.html")
            ),
            "--on-error",
            "skip",
        ],
        None,
    )
    yield "pattern", ["--input", f"{zoo}/*.jsonl*", "--on-error", "skip"], None
    yield "nothing", ["--input", str(zoo / "gone.txt")], None
    for name in ("folder", "all.tar", "bad.jsonl", "latin.txt", "plain.txt"):
        yield f"dry {name}", ["--input", str(zoo / name), "--dry-run", "--on-error", "skip"], None
        yield f"strict dry {name}", ["--input", str(zoo / name), "--dry-run"], None


def run(zoo: Path, out: Path) -> dict[str, object]:
    """Return for each case the status, what was printed, and the hashes of the token files."""
    from meshwright.__main__ import main

    found: dict[str, object] = {}
    for number, (name, flags, given) in enumerate(cases(zoo)):
        target = out / str(number)
        argv = ["preprocess", *flags, "--tokenizer", "byte", "--output-prefix", str(target / "x")]
        argv += [] if "--workers" in argv else ["--workers", "1"]
        stdin, sys.stdin = sys.stdin, io.TextIOWrapper(io.BytesIO(given or b""))
        printed, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
            try:
                status: object = main(argv)
            except BaseException as error:
                status = repr(error)
        sys.stdin = stdin
        text = f"{printed.getvalue()}\n{errors.getvalue()}".replace(str(out), "OUT")
        text = re.sub(r"\(\d+\.\d+ docs/s, \d+\.\d+ MB/s\)|Time to startup: .*|OUT/\d+", "", text)
        files = {
            path.name: hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(target.glob("*"))
            if path.suffix in (".bin", ".idx")
        }
        found[name] = {"status": status, "printed": text.splitlines(), "files": files}
    return found


if __name__ == "__main__":
    if sys.argv[1] == "run":
        found = run(Path(sys.argv[2]), Path(sys.argv[3]))
        Path(sys.argv[4]).write_text(json.dumps(found))
        sys.exit()
    folder = Path(sys.argv[3]).absolute()
    write_zoo(folder / "zoo")
    made = []
    for name, source in zip(("old", "new"), sys.argv[1:3], strict=True):
        environment = os.environ | {
            "PYTHONPATH": os.path.abspath(source),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        result = folder / f"{name}.json"
        subprocess.run(
            [sys.executable, __file__, "run", str(folder / "zoo"), str(folder / name), str(result)],
            env=environment,
            check=True,
        )
        made.append(json.loads(result.read_text()))
    old, new = made
    tokens = [name for name in old if old[name]["files"] != new[name]["files"]]
    rest = [name for name in old if old[name] != new[name] and name not in tokens]
    print(
        f"{len(old)} cases, {sum(bool(case['files']) for case in old.values())} of them write tokens"
    )
    print(
        f"{len(tokens)} with other tokens: {tokens}\n{len(rest)} with another status or other words: {rest}"
    )
    for name in [*tokens, *rest]:
        for side, case in (("old", old[name]), ("new", new[name])):
            other = (new if side == "old" else old)[name]["printed"]
            print(
                f"  {name!r} {side} {case['status']}:",
                *(line for line in case["printed"] if line not in other),
                sep="\n      ",
            )
    sys.exit(bool(tokens))
