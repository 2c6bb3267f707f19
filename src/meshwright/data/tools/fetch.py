"""`meshwright data fetch`: the downloads that the documents name, resumed where they were cut and checked where it is known.

Hand-written on urllib, because a download that goes on where it stopped is forty lines and no base dependency has one.
"""

from __future__ import annotations

import http.client
import json
import os
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

from meshwright.console import notice
from meshwright.data.index_cache import alone
from meshwright.errors import BAD_DATA, IO, UNAVAILABLE, UserError
from meshwright.files import checksums, make_folder
from meshwright.progress import progress_bar
from meshwright.settings.command import our_version

BLOCK = 1 << 20
TRIES = 5  # in a row without a single new byte
WAIT = 1.0  # seconds before the second try; doubled each time
TIMEOUT = 60.0  # seconds without an answer


@dataclass(frozen=True)
class Known:
    """A file that a document names. Without a hash it is not known for sure what it must be."""

    url: str
    what: str
    size: int | None = None
    sha256: str | None = None


_AMAZON = "https://s3.amazonaws.com/models.huggingface.co/bert"
_ONEFLOW = "https://oneflow-public.oss-cn-beijing.aliyuncs.com/GPT/data/gpt_sample_dataset_text_document"
KNOWN = {
    "gpt2-vocab.json": Known(
        f"{_AMAZON}/gpt2-vocab.json",
        "GPT-2's vocabulary, for --vocab-file",
        1042301,
        "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    ),
    "gpt2-merges.txt": Known(
        f"{_AMAZON}/gpt2-merges.txt",
        "GPT-2's merges, for --merge-file",
        456318,
        "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    ),
    "oscar-1GB.jsonl.xz": Known(
        "https://huggingface.co/bigscience/misc-test-data/resolve/main/stas/oscar-1GB.jsonl.xz",
        "79,000 documents of OSCAR, for preprocess --input",
    ),
    "gpt_sample_dataset_text_document.bin": Known(f"{_ONEFLOW}.bin", "OneFlow's sample, preprocessed: the tokens"),
    "gpt_sample_dataset_text_document.idx": Known(f"{_ONEFLOW}.idx", "OneFlow's sample, preprocessed: the index"),
}
# A word for several.
TOGETHER = {
    "gpt2": ["gpt2-vocab.json", "gpt2-merges.txt"],
    "oscar": ["oscar-1GB.jsonl.xz"],
    "oneflow-sample": ["gpt_sample_dataset_text_document.bin", "gpt_sample_dataset_text_document.idx"],
}


class Cut(Exception):
    """The connection ended early or gave an error that may pass."""


def table() -> list[str]:
    out = []
    for name, known in KNOWN.items():
        size = f"{known.size:,} bytes, SHA-256 known" if known.size else "SHA-256 not known"
        out += [f"  {name:<38} {known.what} ({size})", f"  {'':<38} {known.url}"]
    out += [f"  {word:<38} {' and '.join(names)}" for word, names in TOGETHER.items()]
    return out


def wanted(names: list[str], sha256: str | None) -> dict[str, Known]:
    """File name -> what is to be fetched, for names of the table and for addresses."""
    out = {}
    for name in (n for given in names for n in TOGETHER.get(given, [given])):
        if name in KNOWN:
            known = KNOWN[name]
            out[name] = Known(known.url, known.what, known.size, known.sha256 or sha256)
            if sha256 and known.sha256 not in (None, sha256.lower()):
                raise UserError(f"--sha256 {sha256}, but {name} has {known.sha256}: leave the flag out")
            continue
        try:
            parts = urllib.parse.urlsplit(name)
            usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
            usable = usable and name.isprintable() and " " not in name and bool((parts.hostname or "").encode("idna"))
        except ValueError:  # UnicodeError is one
            usable = False
        if not usable:
            raise UserError(
                f"{name!r} is neither an http(s) address nor one of {', '.join([*TOGETHER, *KNOWN])}: `meshwright data fetch` "
                "lists them"
            )
        base = urllib.parse.unquote(parts.path).rpartition("/")[2]
        if base in ("", ".", "..") or "\0" in base:
            raise UserError(f"{name} has no file name at its end")
        out[base] = Known(name, "", None, sha256)
    if sha256 and (len(sha256) != 64 or not set(sha256.lower()) <= set("0123456789abcdef")):
        raise UserError(f"--sha256 {sha256} is not 64 hexadecimal digits")
    return out


def fetch(name: str, known: Known, folder: Path) -> str:
    """One file into the folder; what is to be told about it."""
    path, part = folder / name, folder / f"{name}.part"
    make_folder(folder, "--output")
    try:
        with alone(folder / f"{name}.lock"):  # a second process waits, and finds the file
            return check_there(path, known) if path.exists() else fetch_now(known, path, part)
    except OSError as error:
        raise UserError(f"{error.filename or path} cannot be written: {error.strerror or error}", IO) from None


def fetch_now(known: Known, path: Path, part: Path) -> str:
    begun = part.stat().st_size if part.exists() else 0
    if begun:
        notice(f"{part} has {begun:,} bytes: going on from there")
    download(known.url, part, path)
    digest = sha256_of(part)
    if known.sha256 and digest != known.sha256.lower():
        size = part.stat().st_size
        clear(part)
        raise UserError(
            f"{known.url} gave {size:,} bytes with the SHA-256 {digest}, expected is {known.sha256}"
            f"{f' ({known.size:,} bytes)' if known.size else ''}: it was thrown away; another program or page may have "
            "answered, so look at the address in a browser",
            BAD_DATA,
        )
    os.replace(part, path)
    clear(part)
    checked = (
        "SHA-256 verified"
        if known.sha256
        else f"not verified: no SHA-256 of it is known for sure; this one has {digest}"
    )
    return f"{path}: {path.stat().st_size:,} bytes, {checked}"


def check_there(path: Path, known: Known) -> str:
    digest = sha256_of(path)
    if known.sha256 and digest != known.sha256.lower():
        raise UserError(
            f"{path} is there already, but its SHA-256 is {digest} and not {known.sha256}: move it away and fetch again",
            BAD_DATA,
        )
    return f"{path}: there already, {'SHA-256 verified' if known.sha256 else f'not verified (SHA-256 {digest})'}"


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return checksums(file, True, lambda start, block: None)[1]


def download(url: str, part: Path, path: Path) -> None:
    """All of it into `part`, going on where it was cut, as long as there is progress."""
    tries, told = 0, ""
    while tries < TRIES:
        before = part.stat().st_size if part.exists() else 0
        try:
            receive(url, part)
            return
        except Cut as cut:
            told = str(cut)
        got = part.stat().st_size if part.exists() else 0
        tries = 0 if got > before else tries + 1
        if tries < TRIES:
            notice(f"{url}: {told}; {got:,} bytes are here, trying again")
            time.sleep(WAIT * 2**tries / 2)
    kept = (
        f"; {part.stat().st_size:,} bytes are kept in {part}, and the same command goes on from there"
        if part.exists()
        else ""
    )
    raise UserError(
        f"{url} cannot be fetched: {told}{kept}. On a machine without a network: download that address elsewhere and put the "
        f"file at {path}",
        UNAVAILABLE,
    )


def receive(url: str, part: Path) -> None:
    """One connection's worth. Raises Cut for what may pass."""
    origin = part.with_name(part.name + ".from")  # whose bytes the part holds, so that two versions are never mixed
    have, validator = 0, None
    if part.exists():
        source = read_origin(origin)
        have, validator = (part.stat().st_size, source.get("validator")) if source.get("url") == url else (0, None)
    headers = {"User-Agent": f"meshwright/{our_version()}", "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
        if validator:
            headers["If-Range"] = validator
    try:
        with _opener().open(urllib.request.Request(url, headers=headers), timeout=TIMEOUT) as answer:
            if have and (answer.status != HTTPStatus.PARTIAL_CONTENT or _first(answer) != have):
                notice(
                    f"{url} starts from the beginning: it does not go on from byte {have:,}, or the file is another now"
                )
                have = 0
            length = answer.headers.get("Content-Length")
            total = have + int(length) if length and length.isdigit() else None
            tag = answer.headers.get("ETag", "")
            validator = tag if tag and not tag.startswith("W/") else answer.headers.get("Last-Modified")
            origin.write_text(json.dumps({"url": url, "validator": validator}))
            make_folder(part.parent, "--output", (total or have) - have)
            save(answer, part, have, total)
    except urllib.error.HTTPError as error:
        if error.code == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE and have:
            if error.headers.get("Content-Range", "").strip() == f"bytes */{have}":
                return  # it was complete
            part.unlink()
            raise Cut(f"it has not the {have:,} bytes that were fetched before: from the beginning") from None
        said = f"the server answers {error.code} {error.reason}"
        if error.code in (408, 425, 429) or error.code >= 500:
            raise Cut(said) from None
        raise UserError(
            f"{url}: {said}: the file may have moved; download it by hand and put it at {part.with_suffix('')}",
            UNAVAILABLE,
        ) from None
    except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
        reason = getattr(error, "reason", None) or error
        raise Cut(f"{getattr(reason, 'strerror', None) or reason or type(error).__name__}") from None


def save(answer: http.client.HTTPResponse, part: Path, have: int, total: int | None) -> None:
    with part.open("r+b" if have else "wb") as file, progress_bar(part.stem, total) as advance:
        file.seek(have)
        file.truncate()
        advance(have)
        got = have
        while block := _read(answer):
            file.write(block)
            got += len(block)
            advance(len(block))
        file.flush()
        os.fsync(file.fileno())
    if total is not None and got < total:
        raise Cut(f"the connection ended after {got:,} of {total:,} bytes")


def _read(answer: http.client.HTTPResponse) -> bytes:
    try:
        return answer.read1(BLOCK)
    except http.client.IncompleteRead as error:
        return error.partial


def _first(answer: http.client.HTTPResponse) -> int:
    """The first byte of a partial answer."""
    said = answer.headers.get("Content-Range", "").removeprefix("bytes ").partition("-")[0].strip()
    return int(said) if said.isdigit() else -1


def read_origin(path: Path) -> dict[str, str | None]:
    try:
        found = json.loads(path.read_bytes())
        return found if isinstance(found, dict) else {}
    except (OSError, ValueError):
        return {}


def clear(part: Path) -> None:
    part.unlink(missing_ok=True)
    part.with_name(part.name + ".from").unlink(missing_ok=True)


def _opener() -> urllib.request.OpenerDirector:
    """http and https alone: urllib's usual one would follow a redirect to ftp, too."""
    opener = urllib.request.OpenerDirector()
    kinds: list[Callable[[], urllib.request.BaseHandler]] = [
        urllib.request.ProxyHandler,
        urllib.request.HTTPHandler,
        urllib.request.HTTPSHandler,
        urllib.request.UnknownHandler,
        urllib.request.HTTPDefaultErrorHandler,
        urllib.request.HTTPRedirectHandler,
        urllib.request.HTTPErrorProcessor,
    ]
    for kind in kinds:
        opener.add_handler(kind())
    return opener


def main(names: list[str], output: Path, sha256: str | None, dry_run: bool) -> None:
    if not names:
        print("\n".join(["meshwright data fetch NAME ... fetches", *table(), "and any http(s) address."]))
    for name, known in wanted(names, sha256).items():
        print(f"would fetch {known.url} to {output / name}" if dry_run else fetch(name, known, output), flush=True)
