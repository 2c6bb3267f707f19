"""The meeting of many ranks: how many requests each sends to the store, and who says what."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Any

import pytest

from meshwright.base.errors import HANG, UserError
from meshwright.runtime.ranks import connect
from meshwright.runtime.ranks.compare import format_ranks


class CountingStore:
    """A store of this process that counts the requests of each of its threads, and their keys."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.lock = threading.Lock()
        self.requests, self.keys = Counter[int](), Counter[int]()

    def count(self, keys: int = 1) -> None:
        self.requests[threading.get_ident()] += 1
        self.keys[threading.get_ident()] += keys

    def set(self, key: str, value: str) -> None:
        with self.lock:
            self.count()
            self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        with self.lock:
            self.count()
            return self.values[key]

    def check(self, keys: list[str]) -> bool:
        with self.lock:
            self.count(len(keys))
            return all(key in self.values for key in keys)

    def add(self, key: str, number: int) -> int:
        with self.lock:
            self.count()
            self.values[key] = b"%d" % (int(self.values.get(key, 0)) + number)
            return int(self.values[key])

    def compare_set(self, key: str, before: str, after: str) -> bytes:
        with self.lock:
            self.count()
            if self.values.get(key, b"").decode() == before:
                self.values[key] = after.encode()
            return self.values[key]


def meet(store: CountingStore, size: int, absent: set[int], seconds: float) -> list[Any]:
    """Let the ranks of a run meet, each in a thread; return the error of each, or None."""
    ends: list[Any] = [None] * size
    until = time.monotonic() + seconds

    def come(rank: int) -> None:
        try:
            connect.meet_all(store, rank, size, until)  # type: ignore[arg-type]
        except UserError as error:
            ends[rank] = error

    threads = [threading.Thread(target=come, args=(rank,)) for rank in set(range(size)) - absent]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ends


@pytest.mark.parametrize("size", [8, 64])
def test_a_meeting_costs_each_rank_a_few_requests(size: int) -> None:
    store = CountingStore()
    assert meet(store, size, set(), 20) == [None] * size
    assert max(store.requests.values()) < 20 and sum(store.keys.values()) < 12 * size


def test_one_rank_lists_who_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """If each of them did, 4,095 ranks would ask for 4,096 keys at once."""
    size, store = 64, CountingStore()
    errors = meet(store, size, {17, 40}, 0.3)
    assert errors[17] is None and {
        str(error) for n, error in enumerate(errors) if n not in (17, 40)
    } == {
        "62 of 64 ranks came within 0 s; missing: rank 17, 40. Start it, or see in its log why it ended"
    }
    # one line a machine
    assert all(error.status == HANG and error.everywhere for error in errors if error)
    few = [keys for keys in store.keys.values() if keys < size / 2]
    assert len(few) >= size - 3 and sum(store.keys.values()) < 20 * size


def test_another_rank_lists_if_the_first_one_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connect, "LISTING_SECONDS", 0.1)
    store = CountingStore()
    store.add("lists 1", 1)  # of a rank that ended
    errors = meet(store, 4, {0}, 0.1)
    assert str(errors[3]).startswith("3 of 4 ranks came within 0 s; missing: rank 0.")
    assert not errors[3].everywhere  # the first rank of the machine is not there to say it


def test_few_questions_find_few_missing_keys() -> None:
    store = CountingStore()
    for n in set(range(4096)) - {5, 4000}:
        store.values[f"arrived/{n}"] = b"1"
    assert connect.find_missing(store, "arrived", 0, 4096) == [5, 4000]  # type: ignore[arg-type]
    assert sum(store.requests.values()) <= 2 * 2 * 12


def test_a_line_does_not_name_thousands_of_ranks() -> None:
    assert format_ranks([0, 1, 2, 5]) == "0-2, 5"
    assert format_ranks([*range(0, 4096, 2)]).endswith("44, 46 and 2,024 more")
