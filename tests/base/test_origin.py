"""The state of files: what counts as a change."""

import os

import pytest

from meshwright.base import origin


@pytest.mark.parametrize("small", [1 << 24, 0])
def test_every_change_counts(tmp_path, monkeypatch, small):
    """Also one that keeps the size, and in a long file the time too."""
    monkeypatch.setattr(origin, "SMALL", small)
    long, short = tmp_path / "long", tmp_path / "short"
    long.write_bytes(bytes(3 << 20))
    short.write_bytes(b"abc")
    before, time = origin.digest_of([long, short]), long.stat().st_mtime_ns
    assert origin.digest_of([str(long), str(short)]) == before
    assert origin.digest_of([short, long]) != before != origin.digest_of([short])
    short.write_bytes(b"abd")
    os.utime(short, ns=(time, time + 1))
    assert origin.digest_of([long, short]) != before
    short.write_bytes(b"abc")
    os.utime(short, (1, 1))
    # In all, few bytes are known by their content, many by their time.
    assert (origin.digest_of([long, short]) == before) == bool(small)
    both = origin.digest_of([long, short])
    for place in (0, 3 << 19, (3 << 20) - 1):
        content = bytearray(3 << 20)
        content[place] = 1
        long.write_bytes(content)
        os.utime(long, ns=(time, time))
        assert (origin.digest_of([long, short]) != both) or (not small and place == 3 << 19)


def test_a_pipe_is_new_each_time(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in ("-", tmp_path / "pipe"):
        assert origin.digest_of([path]) != origin.digest_of([path])
