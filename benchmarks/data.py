"""Text to token files: speed and memory of `meshwright preprocess`, beside other programs' pools.

usage: python benchmarks/data.py make CORPUS.jsonl MEGABYTES FOLDER_OR_JSONL ...
           a corpus of the text files in folders
       python benchmarks/data.py peers OUT CORPUS.jsonl VOCAB MERGES
           all in turns, in one run
       python benchmarks/data.py growth OUT CORPUS.jsonl VOCAB MERGES [MEGABYTES ...]
           time and memory by size
       python benchmarks/data.py pipe OUT CORPUS.jsonl VOCAB MERGES [GIGABYTES] [MEMORY_MIB]
           from a pipe, within a limit

Each measurement is a process of its own, from its start to its end; memory is what all its
processes have for themselves, sampled in a run of its own (looking slows it down), and the largest
of any one. A megabyte is 10^6 bytes of the JSON lines. The pools do as Megatron's tool does: a
multiprocessing pool, whose workers parse and encode, and a parent who appends to the same files.
They take the fastest of three chunk sizes, which are tried on a tenth of the corpus. All outputs
are compared, byte for byte.
"""

import hashlib
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

ENDINGS = (".py", ".md", ".rst", ".txt", ".html", ".js", ".pyi", ".h", ".c", ".rs")


def make(path: Path, megabytes: int, sources: list[str]) -> None:
    seen: set[bytes] = set()
    size = 0
    with open(path, "wb") as out:
        for source in sources:
            if source.endswith(".jsonl"):
                lines = iter(open(source, "rb"))
            else:
                lines = (as_line(p) for p in sorted(Path(source).rglob("*")) if p.suffix in ENDINGS)
            for line in lines:
                key = hashlib.sha256(line).digest()[:8]
                if line and key not in seen and size < megabytes * 1e6:
                    seen.add(key)
                    size += out.write(line)
    print(f"{path}: {len(seen):,} documents, {size:,} bytes")


def as_line(path: Path) -> bytes:
    try:
        if path.is_symlink() or not path.is_file() or not 0 < path.stat().st_size < 2_000_000:
            return b""
        return json.dumps({"text": path.read_text("utf-8")}, ensure_ascii=False).encode() + b"\n"
    except (OSError, UnicodeError):
        return b""


# A peer: what a worker does with a line.


def start_peer(kind: str, vocab: str, merges: str) -> None:
    global encode
    if kind == "tokenizers":
        from tokenizers import Tokenizer, models, pre_tokenizers

        library = Tokenizer(models.BPE.from_file(vocab, merges))
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        encode = lambda text: library.encode(text).ids  # noqa: E731
    else:
        from meshwright.config.schema import TokenizerFlags as Settings
        from meshwright.data import tokenizers

        encode = tokenizers.build_tokenizer(
            Settings(vocab_file=vocab, merge_file=merges)
        ).encode  # tiktoken with GPT-2's ranks


def peer_line(line: bytes) -> tuple[list[int], int]:
    ids = encode(json.loads(line)["text"])
    if ids:
        ids.append(50256)
    return ids, len(line)


def peer(
    kind: str, workers: int, corpus: str, prefix: str, vocab: str, merges: str, chunk: int
) -> None:
    import multiprocessing

    import numpy as np

    from meshwright.data.files.writer import Writer

    with (
        Writer(prefix, np.uint16) as writer,
        multiprocessing.Pool(workers, start_peer, (kind, vocab, merges)) as pool,
        open(corpus, "rb") as file,
    ):
        for ids, _ in pool.imap(peer_line, file, chunk):
            if ids:
                writer.add(ids)
            writer.end_document()


# Measuring.


class Memory:
    """The memory of a process and its descendants, from the kernel's proportional set sizes."""

    def __init__(self, pid: int, watch: bool) -> None:
        self.pid, self.total, self.one, self.done = pid, 0, 0, not watch
        self.thread = threading.Thread(target=self.watch, daemon=True)
        self.thread.start()

    def watch(self) -> None:
        while not self.done:
            sizes = [pss(pid) for pid in family(self.pid)]
            self.total, self.one = max(self.total, sum(sizes)), max(self.one, *sizes, 0)
            time.sleep(0.2)


def family(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [pid, *(x for child in children for x in family(int(child)))]


def pss(pid: int) -> int:
    """Without what is mapped from files, whose pages the kernel takes back at will."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    found = {
        line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines[1:] if line.endswith("kB")
    }
    return found.get("Pss", 0) - found.get("Pss_File", 0)


def measure(
    command: list[str], log: Path, watch: bool = False, stdin: object = None, **more: object
) -> dict:
    begun, cpu = time.perf_counter(), os.times()
    with open(log, "a") as out:
        out.write("$ " + " ".join(command) + "\n")
        out.flush()
        process = subprocess.Popen(command, stdout=out, stderr=out, stdin=stdin, **more)  # type: ignore[call-overload]
        memory = Memory(process.pid, watch)
        status = process.wait()
        memory.done = True
    seconds, after = time.perf_counter() - begun, os.times()
    spent = after.children_user + after.children_system - cpu.children_user - cpu.children_system
    return {
        "seconds": seconds,
        "cpu": spent,
        "status": status,
        "memory": memory.total,
        "one": memory.one,
    }


def ours(corpus: str, prefix: Path, vocab: str, merges: str, workers: int) -> list[str]:
    words = ["preprocess", "--input", corpus, "--output-prefix", str(prefix), "--vocab-file", vocab]
    words += [
        "--merge-file",
        merges,
        "--append-eod",
        "--workers",
        str(workers),
        "--log-interval",
        "100000",
    ]
    return [sys.executable, "-m", "meshwright", *words]


def digest(prefix: Path) -> str:
    found = hashlib.sha256()
    for ending in ("bin", "idx"):
        found.update(Path(f"{prefix}_text_document.{ending}").read_bytes())
    return found.hexdigest()[:16]


def record(out: Path, text: str) -> None:
    print(text, flush=True)
    with open(out / "table.txt", "a") as file:
        file.write(text + "\n")


def hardware(out: Path) -> None:
    from common import describe_machine

    record(out, describe_machine("tokenizers", "tiktoken", "gigatoken", "orjson", "numpy"))


def peers(out: Path, corpus: str, vocab: str, merges: str) -> None:
    hardware(out)
    size, log = os.path.getsize(corpus) / 1e6, out / "log.txt"
    part = tenth(corpus, out / "part.jsonl")
    me = [sys.executable, os.path.abspath(__file__), "peer"]
    rows: dict[str, list[dict]] = {}
    for kind in ("tokenizers", "tiktoken"):
        for workers in (1, 2):
            rows.setdefault(f"ours, {workers} workers", []).append(
                measure(ours(corpus, out / f"ours{workers}", vocab, merges, workers), log)
            )

        def pool(text: str, chunk: int, kind: str = kind) -> dict:
            return measure(
                [
                    *me,
                    kind,
                    "2",
                    text,
                    str(out / f"{kind}_text_document"),
                    vocab,
                    merges,
                    str(chunk),
                ],
                log,
            )

        tried = {chunk: pool(str(part), chunk)["seconds"] for chunk in (1, 25, 100)}
        best = min(tried, key=lambda chunk: tried[chunk])
        rows[f"pool of 2 {kind} workers"] = [pool(corpus, best)]
        record(
            out,
            f"pool of {kind}: chunks of {best} ({', '.join(f'{c}: {s:.2f} s' for c, s in tried.items())})",
        )
    for workers in (1, 2):
        rows[f"ours, {workers} workers"].append(
            measure(ours(corpus, out / f"ours{workers}", vocab, merges, workers), log)
        )
    bare = (
        "import sys; sys.modules['gigatoken.gigatoken_rs'] = None; from meshwright.__main__ import "
        "main; sys.exit(main())"
    )
    without = [sys.executable, "-c", bare, *ours(corpus, out / "ours", vocab, merges, 2)[3:]]
    rows["ours, 2 workers, without `fast`"] = [measure(without, log)]
    assert digest(out / "ours") == digest(out / "ours2")
    for workers in (1, 2):
        rows[f"ours, {workers} workers"].append(
            measure(ours(corpus, out / f"ours{workers}", vocab, merges, workers), log, True)
        )
    made = {name: digest(out / name) for name in ("ours1", "ours2", "tokenizers", "tiktoken")}
    assert len(set(made.values())) == 1, made
    record(out, f"all four wrote the same bytes, SHA-256 {made['ours1']}...; {size:.0f} MB of text")
    record(
        out,
        f"{'':34} {'MB/s, best':>10} {'median':>8} {'s':>8} {'CPU s':>8} {'MiB in all':>10} {'of one':>8}",
    )
    speeds = {}
    for name, mine in rows.items():
        assert all(row["status"] == 0 for row in mine), name
        best_row = min(mine, key=lambda row: row["seconds"])
        fast = [row for row in mine if not row["memory"]] or mine
        speeds[name] = size / best_row["seconds"]
        middle = size / statistics.median(row["seconds"] for row in fast)
        memory, one = (max(row[k] for row in mine) / 2**20 for k in ("memory", "one"))
        record(
            out,
            f"{name:34} {speeds[name]:10.1f} {middle:8.1f} {best_row['seconds']:8.2f} {best_row['cpu']:8.2f} "
            f"{memory:10.0f} {one:8.0f}",
        )
    for kind in ("tokenizers", "tiktoken"):
        ratio = speeds["ours, 2 workers"] / speeds[f"pool of 2 {kind} workers"]
        record(out, f"ours / the pool of {kind}: {ratio:.1f}")
    (out / "rows.json").write_text(json.dumps(rows, indent=1))
    clean(out)


def tenth(corpus: str, path: Path) -> Path:
    limit = os.path.getsize(corpus) // 10
    with open(corpus, "rb") as file, open(path, "wb") as small:
        for line in file:
            if small.tell() > limit:
                break
            small.write(line)
    return path


def growth(out: Path, corpus: str, vocab: str, merges: str, sizes: list[int]) -> None:
    hardware(out)
    content = Path(corpus).read_bytes()
    for megabytes in sizes:
        path, written = out / "grown.jsonl", 0
        with open(path, "wb") as file:
            while written < megabytes * 1e6:
                part = content[: int(megabytes * 1e6 - written)]
                written += file.write(part[: part.rfind(b"\n") + 1] or part)
                if len(part) < len(content):
                    break
        row, watched = (
            measure(ours(str(path), out / "grown", vocab, merges, 2), out / "log.txt", watch)
            for watch in (False, True)
        )
        assert row["status"] == watched["status"] == 0
        speed, memory, one = (
            written / 1e6 / row["seconds"],
            watched["memory"] / 2**20,
            watched["one"] / 2**20,
        )
        record(
            out,
            f"{written / 1e6:8.0f} MB: {row['seconds']:7.2f} s, {speed:6.1f} MB/s, {row['cpu']:7.2f} CPU s, "
            f"{memory:5.0f} MiB in all, {one:.0f} of one",
        )
        path.unlink()
    clean(out)


def pipe(out: Path, corpus: str, vocab: str, merges: str, gigabytes: float, limit: int) -> None:
    """Each process may have so much memory of its own in all divided by three: a parent and two
    workers.
    """
    import resource

    hardware(out)
    content = Path(corpus).read_bytes()
    each = limit * 2**20 // 3

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (each, each))

    read, write = os.pipe()
    total = [0]

    def feed() -> None:
        with open(write, "wb") as end:
            while total[0] < gigabytes * 1e9:
                total[0] += end.write(content)

    threading.Thread(target=feed, daemon=True).start()
    row = measure(
        ours("-", out / "pipe", vocab, merges, 2),
        out / "log.txt",
        True,
        stdin=read,
        preexec_fn=limited,
    )
    speed, memory = total[0] / 1e6 / row["seconds"], row["memory"] / 2**20
    record(
        out,
        f"{total[0] / 1e9:.2f} GB from a pipe, at most {each / 2**20:.0f} MiB for each of three processes: status "
        f"{row['status']}, {row['seconds']:.1f} s, {speed:.1f} MB/s, {memory:.0f} MiB in all",
    )
    clean(out)


def clean(out: Path) -> None:
    for path in (*out.glob("*.bin"), *out.glob("*.idx"), *out.glob("*.jsonl")):
        path.unlink()


def main(argv: list[str]) -> None:
    if not argv or argv[0] not in ("make", "peers", "growth", "pipe", "peer"):
        sys.exit(__doc__)
    verb, *rest = argv
    if verb == "make":
        return make(Path(rest[0]), int(rest[1]), rest[2:])
    if verb == "peer":
        return peer(rest[0], int(rest[1]), *rest[2:6], int(rest[6]))  # type: ignore[misc]
    out = Path(rest[0])
    out.mkdir(parents=True, exist_ok=True)
    if verb == "peers":
        peers(out, *rest[1:4])
    elif verb == "growth":
        growth(out, *rest[1:4], [int(x) for x in rest[4:]] or [20, 200, 2000])
    else:
        pipe(
            out,
            *rest[1:4],
            float(rest[4]) if len(rest) > 4 else 10,
            int(rest[5]) if len(rest) > 5 else 1024,
        )


if __name__ == "__main__":
    main(sys.argv[1:])
