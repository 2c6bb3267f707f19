"""The fuzz of storage: nothing is damaged in silence, and seeded defects are found."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("obstore")

from fuzz import storage as fuzz
from meshwright.checkpoint import mirror, upload
from s3 import Bucket


@pytest.fixture(scope="module")
def bucket() -> Iterator[Bucket]:
    with fuzz.prepared() as served:
        yield served


@pytest.mark.parametrize("cases", [4, pytest.param(50, marks=pytest.mark.long)])
def test_no_damage_is_silent(bucket: Bucket, cases: int) -> None:
    worlds = [fuzz.run_case(bucket, 1, number) for number in range(cases)]
    for how in ("ended well", "refused", "killed"):
        assert sum(world.outcomes[how] for world in worlds)


def believe(uploader: Any, path: Path, file: object, sent: dict[str, Any]) -> bool:
    return f"{path.parent.name}/{path.name}" in sent


@pytest.mark.parametrize(
    ("place", "name", "defect"),
    [
        (upload.Uploader, "is_sent", believe),
        (mirror, "is_of_use", lambda folder, published: False),
    ],
)
def test_a_seeded_defect_is_found(
    bucket: Bucket,
    monkeypatch: pytest.MonkeyPatch,
    place: Any,
    name: str,
    defect: Callable[..., Any],
) -> None:
    monkeypatch.setattr(place, name, defect)
    with pytest.raises(fuzz.Silent):
        for number in range(100):
            fuzz.run_case(bucket, 0, number)
