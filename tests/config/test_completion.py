"""Completion scripts, run by bash, and by zsh and fish where they are installed."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from meshwright.__main__ import COMMANDS, main
from meshwright.config import completion, help
from meshwright.config.schema import TrainConfig

DRIVER = """
source {script}
line={line}
COMP_WORDS=()
for word in $line; do # bash gives "=" as a word of its own
    if [[ $word == *=* ]]; then COMP_WORDS+=("${{word%%=*}}" "=" "${{word#*=}}"); else COMP_WORDS+=("$word"); fi
done
[[ $line == *" " ]] && COMP_WORDS+=("")
COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
_meshwright
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("completion")
    for shell in ("bash", "zsh", "fish"):
        (folder / shell).write_text(completion.completion_script(shell))
    (folder / "corpus.bin").touch()
    (folder / "corpus.idx").touch()
    (folder / "a folder").mkdir()
    return folder


def bash(scripts: Path, line: str) -> list[str]:
    program = DRIVER.format(script=scripts / "bash", line=shlex.quote(line))
    done = subprocess.run(
        ["bash", "-c", program], cwd=scripts, capture_output=True, text=True, env={"PATH": "/bin"}
    )
    assert not done.stderr, done.stderr
    return done.stdout.split("\n")[:-1]


@pytest.mark.parametrize(
    "line, want",
    [
        ("meshwright tra", {"train", "train-tokenizer"}),
        (
            "meshwright train --lr-wa",
            {f"--lr-warmup-{x}" for x in "fraction init iters samples tokens".split()},
        ),
        ("meshwright train --lr-decay-style c", {"cosine", "constant"}),
        ("meshwright train --lr-decay-style=c", {"cosine", "constant"}),
        ("meshwright train --preset gpt2-345", {"gpt2-345m"}),
        ("meshwright presets gpt3-17", {"gpt3-175b"}),
        ("meshwright train --save ", {"a folder"}),
        ("meshwright train --lr ", {""}),
        ("meshwright train --data-path 0.5 co", {"corpus"}),
        ("meshwright train --bf16 --zero-s", {"--zero-stage"}),
        ("meshwright train --help-", {"--help-all"}),
        ("meshwright generate ", {"a folder"}),
        ("meshwright data ver", {"verify"}),
        ("meshwright data verify ", {"a folder", "bash", "corpus", "fish", "zsh"}),
        ("meshwright data merge --merge ", {"serial", "distributed"}),
        ("meshwright launch --nproc-per-node 2 tr", {"train"}),
        ("meshwright launch --nproc-per-node 2 train --zero-s", {"--zero-stage"}),
        ("meshwright help eval", {"evaluate"}),
        ("meshwright completion ", {"bash", "zsh", "fish"}),
    ],
)
def test_bash(scripts: Path, line: str, want: set[str]) -> None:
    assert set(bash(scripts, line)) == want


def test_bash_completes_every_command_and_flag_but_those_of_old_command_lines(
    scripts: Path,
) -> None:
    assert set(COMMANDS) <= set(bash(scripts, "meshwright "))
    flags = set(bash(scripts, "meshwright train --"))
    known = {e.flag for e in help.entries(help.Command(TrainConfig, "meshwright train"))}
    hidden = known - flags
    assert {"--local-rank", "--num-experts"} <= hidden
    assert len(hidden) < 15 and "--DDP-impl" not in flags and "--no-tensorboard" in flags


def test_fish(scripts: Path) -> None:
    if not shutil.which("fish"):
        assert (scripts / "fish").read_text().count("complete -c meshwright") > 500
        return
    for line, want in (
        ("meshwright trai", {"train", "train-tokenizer"}),
        ("meshwright train --lr-decay-style c", {"cosine", "constant"}),
        ("meshwright data merge --out", {"--output-prefix"}),
        ("meshwright data ver", {"verify"}),
    ):
        program = f"source {scripts}/fish; complete -C {shlex.quote(line)}"
        done = subprocess.run(
            ["fish", "--no-config", "-c", program], capture_output=True, text=True, check=True
        )
        assert {
            word.split("\t")[0] for word in done.stdout.splitlines()
        } == want and not done.stderr


def test_zsh(scripts: Path) -> None:
    text = (scripts / "zsh").read_text()
    assert (
        text.startswith("#compdef meshwright\n")
        and len(re.findall(r"^        '.*'\)$", text, re.M)) > 15
    )
    assert "'--lr-decay-style[learning rate schedule]:NAME:(linear cosine" in text
    if shutil.which("zsh"):
        subprocess.run(["zsh", "-f", "-n", str(scripts / "zsh")], check=True)
        program = (
            f"autoload -U compinit; compinit -u -D; source {scripts}/zsh; print $_comps[meshwright]"
        )
        done = subprocess.run(["zsh", "-f", "-c", program], capture_output=True, text=True)
        assert done.stdout == "_meshwright\n", done.stderr


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    assert capsys.readouterr().out == completion.completion_script("bash") + "\n"
