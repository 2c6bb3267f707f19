"""Damaged and hostile data.

Every bad line is counted, no good one is lost, and no damaged file reaches a training step.

`make faults` prints the figures.
"""

import gzip
import json
import random
import zlib
from pathlib import Path

import numpy as np
import pytest
from corpora import line, preprocess_inputs, texts_in, write_pair
from test_preprocess import BAD

from helpers import error_of
from meshwright.data.files.indexed import HEADER, Indexed, check_vocabulary
from meshwright.data.files.verify import check_pair
from meshwright.data.text import limits, preprocess


def hostile(seed, lines=2000):
    """Return the content, the good texts in order, and the numbers of bad lines of each kind."""
    rng = random.Random(seed)
    good, bad = ["after a byte order mark"], {}
    out = [b"\xef\xbb\xbf" + line(good[0])]
    for n in range(lines):
        what = rng.random()
        if what < 0.1:
            out.append(rng.choice(list(BAD)))
            bad.setdefault(BAD[out[-1]][0], []).append(len(out))
        elif what < 0.2:
            out.append(rng.choice([b"", b" ", b"\r", b"\t \r"]))
        else:
            form = rng.choice(
                ["document {} é", "{} \u2028 \x00 \U0001f642", "{}" + "z" * rng.randrange(300)]
            )
            good.append(form.format(n))
            record = json.dumps({"n": n, "text": good[-1]}, ensure_ascii=rng.random() < 0.5)
            out.append(record.encode() + b"\r" * rng.randrange(2))
    good += ["x" * 1_000_000, "no line feed behind it"]
    out += map(line, good[-2:])
    return b"\n".join(out), good, bad


def run(folder, given, **settings):
    _, stderr = preprocess_inputs(folder / "out", given, on_error="skip", **settings)
    lines = [line for line in stderr.splitlines() if not line.startswith(("note: ", "warning: "))]
    return texts_in(folder / "out_text_document"), lines[-1]


@pytest.mark.flag("preprocess.on_error")
@pytest.mark.fault("F22")
@pytest.mark.promise("Text is data")
def test_bad_lines(tmp_path, monkeypatch, figures):
    """F22: a file read in pieces by two workers, and a stream cut short at 5 places."""
    monkeypatch.setattr(limits, "PIECE", 50_000)
    monkeypatch.setattr(preprocess, "MIB", 1)
    content, good, bad = hostile(1)
    (tmp_path / "in.jsonl").write_bytes(content)
    kept, report = run(tmp_path, tmp_path / "in.jsonl", workers=2)
    assert kept == good
    count = sum(map(len, bad.values()))
    assert report.startswith(f"left out {count} bad lines: ") and bad.keys() == {
        kind for kind, _ in BAD.values()
    }
    for kind, numbers in bad.items():
        assert f"{len(numbers)} {kind}, first {tmp_path / 'in.jsonl'}:{numbers[0]}" in report
    packed = gzip.compress(content, 1)
    rng, lost = random.Random(2), 0
    for _ in range(5):
        cut = rng.randrange(20, len(packed))
        (tmp_path / "cut.gz").write_bytes(packed[:cut])
        kept, report = run(tmp_path, tmp_path / "cut.gz", workers=1)
        assert kept == good[: len(kept)] and "1 input cut short" in report
        whole = zlib.decompressobj(31).decompress(packed[:cut])  # what can be unpacked at all
        complete = whole[: whole.rfind(b"\n") + 1].removeprefix(b"\xef\xbb\xbf").split(b"\n")
        lost += sum(map(is_good, complete)) - len(kept)
    assert lost <= 0
    figures(good_lines_kept=f"{len(good)}/{len(good)}", bad_lines=count, streams_cut=5)


def is_good(content):
    try:
        return json.loads(content.decode())["text"].encode() is not None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False


@pytest.mark.fault("F24")
@pytest.mark.promise(
    "Token files are checked before the first step",
    "Sizes, pointers and types that contradict one another are refused",
)
def test_damaged_files_are_refused(tmp_path, figures):
    """F24: damage is refused before training reads anything, and `data verify` reports it."""
    rng = np.random.RandomState(0)
    prefix = tmp_path / "data"
    write_pair(prefix, ([rng.randint(0, 50257, rng.randint(1, 40))] for _ in range(3000)))
    idx, bin_ = (prefix.with_suffix(end) for end in (".idx", ".bin"))
    whole, tokens = idx.read_bytes(), bin_.read_bytes()
    magic, version, code, n, m = HEADER.unpack(whole[: HEADER.size])
    inflated = HEADER.pack(magic, version, code, n + 1, m) + whole[HEADER.size :]
    cases = {
        ".idx cut": (whole[: len(whole) // 2], tokens),
        "sequences inflated": (inflated, tokens),
        ".bin cut": (whole, tokens[:-1]),
    }
    for at in (0, n // 2, n - 1):  # a size, a pointer, a border
        for what, offset, width in (
            ("size", HEADER.size + 4 * at, 4),
            ("pointer", HEADER.size + 4 * n + 8 * at, 8),
            ("border", HEADER.size + 12 * n + 8 * (at + 1), 8),
        ):
            value = int.from_bytes(whole[offset : offset + width], "little") + 7
            changed = whole[:offset] + value.to_bytes(width, "little") + whole[offset + width :]
            cases[f"{what} {at} changed"] = (changed, tokens)
    other = write_pair(tmp_path / "other", ([[1] * (1 + k % 5)] for k in range(3000)))
    cases["the .idx of other data"] = (Path(f"{other}.idx").read_bytes(), tokens)
    wrong = bytearray(tokens)
    wrong[0:2] = (60000).to_bytes(2, "little")
    cases["id 60000"] = (whole, bytes(wrong))
    for name, (index, content) in cases.items():
        idx.write_bytes(index)
        bin_.write_bytes(content)
        assert "data." in error_of(lambda: check_vocabulary(Indexed(prefix), 50257)), name
        assert check_pair(str(prefix), 50257, None, False, lambda count: None).problems, name
    figures(token_files_refused=f"{len(cases)}/{len(cases)}")
