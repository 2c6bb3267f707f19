"""The tested versions of torch: every place that states them says the same."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib

import pytest
import torch

from documents import ROOT
from meshwright.apps.doctor import facts as doctor
from meshwright.base.device import find_device
from meshwright.base.errors import UNAVAILABLE, UserError

FIRST, LAST = ("{}.{}".format(*version) for version in doctor.TESTED)
NEWEST = re.search(r"^torch==(.*)$", (ROOT / "constraints.txt").read_text(), re.M)[1]  # type: ignore[index]
OF_MAKE = (
    "MAKEFLAGS",
    "MAKEOVERRIDES",
    "MAKELEVEL",
    "MFLAGS",
    "PYTHON",
    "TORCH",
    "TORCH_INDEX",
    "VENV",
)
# Pages that state the range, and how many times; docs/known-issues.md is about older versions.
PAGES = {
    "README.md": 1,
    "README.zh.md": 1,
    "docs/data.md": 1,
    **{f"docs/{folder}from-{name}.md": 1 for folder in ("", "zh/") for name in ("ascend", "libai")},
    **{f"docs/{folder}from-deepspeed.md": 2 for folder in ("", "zh/")},
}


def test_this_torch_is_in_the_range() -> None:
    assert doctor._torch(torch.__version__, "CPU only").level == "ok"


def test_an_older_torch_is_refused_with_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.2.0a0+81ea7a4")
    with pytest.raises(
        UserError, match=r"2\.2\.0a0\S* is too old: .*; pip install -U 'torch>="
    ) as e:
        find_device("cpu")
    assert e.value.status == UNAVAILABLE


def test_the_installation_takes_the_range() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert [line for line in project["dependencies"] if line.startswith("torch")] == [doctor.RANGE]
    assert doctor.RANGE.startswith(f"torch>={FIRST},<")
    assert NEWEST.startswith(f"{LAST}.")


@pytest.mark.parametrize("page", PAGES)
def test_a_page_states_the_range(page: str) -> None:
    stated = re.findall(
        r"torch (2\.\d+)\s(?:to|至|到)\s(2\.\d+)", (ROOT / page).read_text(encoding="utf-8")
    )
    assert stated == [(FIRST, LAST)] * PAGES[page]


def test_no_other_page_states_a_range() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "compat").rglob("*.md")]
    stating = {
        str(page.relative_to(ROOT))
        for page in pages
        if re.search(r"torch (2\.\d+)\s(?:to|至|到)\s(2\.\d+)", page.read_text(encoding="utf-8"))
    }
    assert stating - {"CHANGELOG.md", "docs/known-issues.md"} == set(PAGES)


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ([], f"--no-index --no-deps '{doctor.RANGE}'"),  # a wheel at hand, such as a build for CPUs
        ([], f"torch=={NEWEST}"),
        (["TORCH=2.11.0"], "torch==2.11.0"),
        (["TORCH_INDEX=file:///wheels"], f"--index-url file:///wheels torch=={NEWEST}"),
    ],
)
def test_make_takes_the_range(given: list[str], taken: str) -> None:
    # `make test TORCH=2.11.0` hands its own words on to the makes below it.
    env = {name: value for name, value in os.environ.items() if name not in OF_MAKE}
    # The default Python may be 3.10, for which there is no newer torch.
    words = ["make", "-n", "VENV=none", "MINOR=11", "install", *given]
    make = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    assert taken in make.stdout and ("--no-index" in make.stdout) == (given == [])
    assert "installing into none, which takes one to three minutes" in make.stdout
