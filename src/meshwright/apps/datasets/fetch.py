"""`meshwright data fetch`: downloads that continue after a cut, checked if the SHA-256 is known.

Hand-written on urllib: huggingface_hub's http_get resumes a download too, but it does not ask
whether the server still has the same version of the file, and refuses files above 50 GB.
"""

from __future__ import annotations

import glob
import hashlib
import http.client
import os
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass, replace
from http import HTTPStatus
from pathlib import Path

from meshwright.base.console import notice
from meshwright.base.errors import IO, UNAVAILABLE, UserError, bad_data
from meshwright.base.files import lock, make_folder, own_file
from meshwright.base.files import sha256 as sha256_of
from meshwright.base.progress import progress_bar
from meshwright.base.version import our_version
from meshwright.config.problem import SettingsError

BLOCK_BYTES = 1 << 20
TRIES = 5  # in a row without a single new byte
WAIT = 1.0  # seconds before the second try; doubled each time
TIMEOUT = 60.0  # seconds without an answer


@dataclass(frozen=True)
class KnownFile:
    """A file that a document names. Without a hash its contents cannot be verified."""

    url: str
    what: str
    size: int | None = None
    sha256: str | None = None


_AMAZON = "https://s3.amazonaws.com/models.huggingface.co/bert"
_ONEFLOW = (
    "https://oneflow-public.oss-cn-beijing.aliyuncs.com/GPT/data/gpt_sample_dataset_text_document"
)
KNOWN = {
    "gpt2-vocab.json": KnownFile(
        f"{_AMAZON}/gpt2-vocab.json",
        "GPT-2's vocabulary, for --vocab-file",
        1042301,
        "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    ),
    "gpt2-merges.txt": KnownFile(
        f"{_AMAZON}/gpt2-merges.txt",
        "GPT-2's merges, for --merge-file",
        456318,
        "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    ),
    "oscar-1GB.jsonl.xz": KnownFile(
        "https://huggingface.co/bigscience/misc-test-data/resolve/main/stas/oscar-1GB.jsonl.xz",
        "79,000 documents of OSCAR, for preprocess --input",
    ),
    "gpt_sample_dataset_text_document.bin": KnownFile(
        f"{_ONEFLOW}.bin", "OneFlow's sample, preprocessed: the tokens"
    ),
    "gpt_sample_dataset_text_document.idx": KnownFile(
        f"{_ONEFLOW}.idx", "OneFlow's sample, preprocessed: the index"
    ),
}
# Names that stand for several files.
FILE_SETS = {
    "gpt2": ["gpt2-vocab.json", "gpt2-merges.txt"],
    "oscar": ["oscar-1GB.jsonl.xz"],
    "oneflow-sample": [
        "gpt_sample_dataset_text_document.bin",
        "gpt_sample_dataset_text_document.idx",
    ],
}


class Cut(Exception):
    """The connection ended early or gave an error that may pass."""


def fetch_files(names: list[str], output: Path, sha256: str | None, dry_run: bool) -> None:
    if not names:
        print(
            "\n".join(
                [
                    "meshwright data fetch NAME ... fetches",
                    *describe_known(),
                    "and any http(s) address.",
                ]
            )
        )
    for name, known in resolve_names(names, sha256).items():
        print(
            f"would fetch {known.url} to {output / name}"
            if dry_run
            else fetch_file(name, known, output),
            flush=True,
        )


def describe_known() -> list[str]:
    out = []
    for name, known in KNOWN.items():
        size = f"{known.size:,} bytes, SHA-256 known" if known.size else "SHA-256 not known"
        out += [f"  {name:<38} {known.what} ({size})", f"  {'':<38} {known.url}"]
    return out + [f"  {word:<38} {' and '.join(names)}" for word, names in FILE_SETS.items()]


def resolve_names(names: list[str], sha256: str | None) -> dict[str, KnownFile]:
    """Return what to fetch under each file name, for names of the table and for addresses."""
    if sha256 and not re.fullmatch("[0-9a-fA-F]{64}", sha256):
        raise SettingsError(f"{{sha256={sha256}}} is not 64 hexadecimal digits")
    out = {}
    for name in (file for word in names for file in FILE_SETS.get(word, [word])):
        if known := KNOWN.get(name):
            out[name] = replace(known, sha256=known.sha256 or sha256)
            if sha256 and known.sha256 not in (None, sha256.lower()):
                raise SettingsError(
                    f"{{sha256={sha256}}}, but {name} has {known.sha256}; leave it out"
                )
            continue
        if not is_address(name):
            known_names = ", ".join([*FILE_SETS, *KNOWN])
            raise UserError(
                f"{name!r} is neither an http(s) address nor one of {known_names}; `meshwright data fetch` lists them"
            )
        base = urllib.parse.unquote(urllib.parse.urlsplit(name).path).rpartition("/")[2]
        if base in ("", ".", "..") or "\0" in base:
            raise UserError(f"{name} has no file name at its end")
        out[base] = KnownFile(name, "", None, sha256)
    return out


def is_address(name: str) -> bool:
    try:
        parts = urllib.parse.urlsplit(name)
        (parts.hostname or "").encode("idna")
        has_host = bool(parts.hostname) and parts.port != 0
    except ValueError:  # UnicodeError is one
        return False
    return parts.scheme in ("http", "https") and has_host and name.isprintable() and " " not in name


def fetch_file(name: str, wanted: KnownFile, folder: Path) -> str:
    """Fetch one file into the folder unless it is there; return a line about it."""
    path = folder / name
    make_folder(folder, "--output")
    try:
        with lock(folder / f"{name}.lock"):  # a second process waits, and finds the file
            return check_present(path, wanted) if path.exists() else fetch_missing(path, wanted)
    except OSError as error:
        raise UserError(
            f"{error.filename or path} cannot be written: {error.strerror or error}", IO
        ) from None


def check_present(path: Path, wanted: KnownFile) -> str:
    digest = sha256_of(path)
    if wanted.sha256 and digest != wanted.sha256.lower():
        raise bad_data(
            f"{path} is there already, but its SHA-256 is {digest}, not {wanted.sha256}; move it away and fetch again"
        )
    return f"{path}: there already, {'SHA-256 verified' if wanted.sha256 else f'not verified (SHA-256 {digest})'}"


def fetch_missing(path: Path, wanted: KnownFile) -> str:
    for begun in find_parts(path, wanted.url):
        notice(f"{begun} has {begun.stat().st_size:,} bytes; continuing from there")
    part = download(wanted.url, path)
    digest, size = sha256_of(part), part.stat().st_size
    is_wrong = wanted.sha256 is not None and digest != wanted.sha256.lower()
    if not is_wrong:
        os.replace(part, path)
    for left in path.parent.glob(f"{glob.escape(path.name)}.*.part"):
        left.unlink()
    if is_wrong:
        wanted_size = f" ({wanted.size:,} bytes)" if wanted.size else ""
        raise bad_data(
            f"{wanted.url} gave {size:,} bytes with the SHA-256 {digest}, but {wanted.sha256}{wanted_size} is "
            "expected; they were removed; another program or page may have answered, so open the address in a browser"
        )
    checked = (
        "SHA-256 verified"
        if wanted.sha256
        else f"not verified: its SHA-256 is not known; this one has {digest}"
    )
    return f"{path}: {size:,} bytes, {checked}"


def find_parts(path: Path, url: str) -> list[Path]:
    return list(path.parent.glob(f"{glob.escape(path.name)}.{short_hash(url)}-*.part"))


def short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def download(url: str, path: Path) -> Path:
    """Receive the complete file, trying again as long as there is progress; return its part."""
    tries, got = 0, 0
    while True:
        try:
            return receive_file(url, path)
        except Cut as cut:
            reason = str(cut)
        parts, before = find_parts(path, url), got
        got = parts[0].stat().st_size if parts else 0
        tries = 0 if got > before else tries + 1
        if tries == TRIES:
            break
        notice(f"{url}: {reason}; {got:,} bytes are here, trying again")
        time.sleep(WAIT * 2**tries / 2)
    rest = (
        f"; {got:,} bytes are kept in {parts[0]}, and the same command continues from there"
        if parts
        else ""
    )
    raise UserError(
        f"{url} cannot be fetched: {reason}{rest}. On a machine without a network: download that address elsewhere and "
        f"put the file at {path}",
        UNAVAILABLE,
    )


def receive_file(url: str, path: Path) -> Path:
    """Use one connection, from where the part ends; return the complete part.

    Raise Cut for a failure that may pass. The name of a part has hashes of the address and of the
    file's version, so that bytes of two files are never mixed.
    """
    begun = next(iter(find_parts(path, url)), None)
    # From the last byte that is here: a complete part gets an answer, too, with its version.
    have = max(begun.stat().st_size - 1, 0) if begun else 0
    headers = {"User-Agent": f"meshwright/{our_version()}", "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, headers=headers), timeout=TIMEOUT
        ) as answer:
            tag = answer.headers.get("ETag", "")
            version = (
                tag if tag and not tag.startswith("W/") else answer.headers.get("Last-Modified", "")
            )
            part = path.with_name(f"{path.name}.{short_hash(url)}-{short_hash(version)}.part")
            is_partial = answer.status == HTTPStatus.PARTIAL_CONTENT
            if begun and (begun != part or (have and not is_partial)):
                notice(
                    f"{url} starts from the beginning: the server does not continue, or the file has changed"
                )
                begun.unlink()
                if is_partial:
                    raise Cut("the file has changed")
                have = 0
            save_answer(answer, part, have)
            return part
    except urllib.error.HTTPError as error:
        if error.code == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE and begun:
            begun.unlink()
            raise Cut(f"it does not have the {have + 1:,} bytes fetched before") from None
        reason = f"the server answers {error.code} {error.reason}"
        if error.code in (408, 425, 429) or error.code >= 500:
            raise Cut(reason) from None
        raise UserError(
            f"{url}: {reason}; the file may have moved: download it by hand and put it at {path}",
            UNAVAILABLE,
        ) from None
    except (
        urllib.error.URLError,
        http.client.HTTPException,
        TimeoutError,
        ConnectionError,
    ) as error:
        cause = getattr(error, "reason", None) or error
        raise Cut(f"{getattr(cause, 'strerror', None) or cause or type(error).__name__}") from None


def save_answer(answer: http.client.HTTPResponse, part: Path, have: int) -> None:
    """Write the answer to the part, from byte `have` on."""
    length = answer.headers.get("Content-Length", "")
    total = have + int(length) if length.isdigit() else None
    make_folder(part.parent, "--output", (total or have) - have)
    with (
        open(part, "r+b" if have else "wb", opener=own_file) as file,
        progress_bar(part.name, total) as advance,
    ):
        file.seek(have)
        advance(have)
        while block := answer.read1(BLOCK_BYTES):
            file.write(block)
            advance(len(block))
        got = file.tell()
        file.flush()
        os.fsync(file.fileno())
    if total is not None and got < total:
        raise Cut(f"the connection ended after {got:,} of {total:,} bytes")
