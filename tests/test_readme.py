"""The commands of the README and of pages that it leads to, word for word; only sizes differ."""

from __future__ import annotations

import io
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from documents import ROOT, SMALLER, fill, shell, smaller
from meshwright.__main__ import main
from meshwright.base import errors

pytestmark = [pytest.mark.whole, pytest.mark.timeout(180)]


STEPS = "docs/step-by-step.md"
MORE = (STEPS, ""), ("docs/runs.md", ""), ("docs/from-megatron.md", "At the root")  # page, section


def documented(name: str, section: str = "") -> list[str]:
    """Return the commands in the bash blocks of a page or section, each as one line."""
    text = (ROOT / name).read_text(encoding="utf-8")
    if section:
        text = text.split(f"\n## {section}\n")[1].split("\n## ")[0]
    blocks = re.findall(r"```bash\n(.*?)```", text, re.S)
    return [
        line
        for block in blocks
        for line in re.sub(r" *\\\n *", " ", block).splitlines()
        if line.strip()
    ]


def test_both_languages_have_the_same_commands() -> None:
    assert (
        documented(STEPS) == documented("docs/zh/step-by-step.md") and len(documented(STEPS)) >= 10
    )
    assert documented("docs/runs.md") == documented("docs/zh/runs.md") != []
    assert documented(*MORE[2]) == documented("docs/zh/from-megatron.md", "在仓库根目录") != []


@pytest.mark.parametrize("page", ["README.md", "README.zh.md"])
def test_a_readme_is_short(page: str) -> None:
    assert len((ROOT / page).read_text(encoding="utf-8").splitlines()) <= 90


@pytest.mark.parametrize("page", [STEPS, "docs/zh/step-by-step.md"])
def test_the_steps_say_how_to_go_on(page: str) -> None:
    """Check for a text to evaluate, other data, a second start, CPUs and extras."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for words in (
        "`mv my-texts/PAGE.md held-out.txt`",
        "`--load my-model --finetune --save my-model-2`",
        "`--load tuned`",
        "`meshwright launch --nproc-per-node 2`",
        "`pip install '.[serve]'`",
    ):
        assert words in text, words
    assert "--top_p" not in text and "'meshwright[serve]'" not in text


@pytest.mark.parametrize("page", ["docs/runs.md", "docs/zh/runs.md"])
def test_every_exit_status_is_listed(page: str) -> None:
    rows = re.findall(r"^\| ([\d、, ]+) \|", (ROOT / page).read_text(encoding="utf-8"), re.M)
    listed = {int(status) for row in rows for status in re.findall(r"\d+", row)}
    assert listed == {
        errors.DONE,
        *errors.MEANINGS,
        errors.SIGINT,
        errors.SIGTERM,
        *(128 + n for n in errors.WARNINGS),
    }


@pytest.mark.pictures
def test_readme_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run the commands in order, and the README's Python."""
    place = fill(tmp_path)
    home = place / "readme"
    home.mkdir()
    monkeypatch.chdir(home)
    monkeypatch.setattr("meshwright.training.state.folder.LivePage.draw", lambda page: None)
    for name in ("pretrain_gpt.py", "tools", "src", "gpt2-vocab.json", "gpt2-merges.txt"):
        (home / name).symlink_to(place / name)
    (home / "corpus.jsonl").symlink_to(place / "oscar-1GB.jsonl")
    (home / "my-texts").mkdir()
    for n in range(30):
        (home / "my-texts" / f"{n}.md").write_text(
            f"Document {n}. The quick brown fox jumps over {n * n} dogs.\n" * 9
        )
    (home / "my-texts" / "0.md").rename(home / "held-out.txt")
    for line in [line for page in MORE for line in documented(*page)]:
        # without a network
        line = line.replace("--tokenizer gpt2 ", "--tokenizer gpt2-vocab.json ")
        line = line.replace("--nproc-per-node 4", "--nproc-per-node 2")
        words = shlex.split(line)
        if "--preset" in words:  # later flags win over the preset's
            chosen = {k: v for k, v in SMALLER.items() if k != "save-interval" or "--save" in words}
            line += " " + " ".join(f"--{k} {v}" for k, v in chosen.items())
            line += " --micro-batch-size 2 --global-batch-size 4"
        if words[:2] == ["meshwright", "launch"] or words[0] != "meshwright":
            out = shell(home, smaller(line))
        else:  # in this process, which has imported torch already
            monkeypatch.setattr("sys.stdin", io.StringIO("The quick\nstop\n"))
            assert main(shlex.split(smaller(line))[1:]) == 0, line
            out = capsys.readouterr().out
        if "generate" in words or "chat" in words:  # a dialogue prints its answer alone
            assert "The" in out or ("chat" in words and out.strip())
    assert (home / "gpt2-345m" / "report.html").exists() and (
        home / "output" / "iter_0000006"
    ).is_dir()
    assert (home / "plain" / "compare.html").exists()
    exec(
        re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S)[
            0
        ],
        {},
    )
    assert float(capsys.readouterr().out.split()[-1]) > 0  # bits per byte


def test_make_targets_exist() -> None:
    """`make demo` and `make test` themselves run in `make test-long`, in a fresh clone."""
    for target, what in (("demo", "meshwright demo"), ("test", "pytest")):
        done = subprocess.run(
            ["make", "-n", "-C", ROOT, target], capture_output=True, text=True, check=True
        )
        assert what in done.stdout
