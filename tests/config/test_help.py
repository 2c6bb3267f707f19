"""Help that fits two screens, and everything else on demand."""

from __future__ import annotations

import os
import pkgutil
import pty
import re
import select
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.__main__ import COMMANDS, GROUPS, main, usage
from meshwright.base.errors import UserError
from meshwright.cli.data import verbs
from meshwright.compat.flags.megatron_flags import NO_EFFECT
from meshwright.config import fields, help
from meshwright.config.fields import spelling
from meshwright.config.pages import PAGES
from meshwright.config.schema import TrainConfig

ROOT = Path(__file__).parents[2]
PAGED = [name for name in COMMANDS if name not in ("data", "help")] + [
    f"data {verb}" for verb in verbs()
]
TRAIN = help.Command(TrainConfig, "meshwright train")


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    try:
        assert main(list(argv)) == 0
    except SystemExit as end:
        assert end.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", PAGED)
def test_the_help_of_a_command_fits_two_screens(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = run(capsys, *name.split(), "--help").splitlines()
    assert lines[0].startswith(f"usage: meshwright {name}")
    assert len(lines) <= 48 and max(map(len, lines)) <= 80
    assert run(capsys, "help", *name.split()).splitlines() == lines
    everything = run(capsys, *name.split(), "--help-all").splitlines()
    assert max(map(len, everything)) <= 80


PLANNED = {"include", "exclude"}  # of preprocess, shown as soon as it has them


@pytest.mark.parametrize("name", PAGED)
def test_pages_name_what_their_commands_have(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[help.Command] = []
    monkeypatch.setattr(help, "show_help", lambda command, topic: seen.append(command))
    with pytest.raises(SystemExit):
        main([*name.split(), "--help"])
    page = PAGES[name]
    assert (pkgutil.resolve_name(page.config), page.positional) == (
        seen[0].config,
        seen[0].positional,
    )
    known = {entry.name for entry in help.entries(seen[0])}
    assert {field for fields in page.common.values() for field in fields.split()} <= known | PLANNED


def test_every_flag_is_found_in_all_ways(capsys: pytest.CaptureFixture[str]) -> None:
    everything = run(capsys, "train", "--help-all")
    listed = {
        group: "\n".join(help.help_lines(TRAIN, group))
        for group in fields.config_groups(TrainConfig)
    }
    for entry in help.entries(TRAIN):
        if entry.field:
            page = help.explain_flag(TRAIN, entry)
            assert entry.flag in page[0] and f"MESHWRIGHT_{entry.name.upper()}" in " ".join(page)
            assert entry.flag in listed[entry.group] and entry.flag in everything
    assert "--DDP-impl" not in everything and "[not yet]" in everything


def test_one_flag_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (
        ["train", "--help", "lr"],
        ["train", "--help=--LR"],
        ["help", "train", "learning_rate"],
    ):
        out = run(capsys, *words)
        for part in (
            "peak learning rate",
            "number, above 0",
            "--learning-rate",
            "MESHWRIGHT_LR",
            "schedules.md",
        ):
            assert part in out
    assert "train --help optimizer" in out and "in [optimizer] of --config" in out
    assert "--position-embedding-type rope" in run(capsys, "train", "--help", "--rotary-base")
    assert "cosine" in run(capsys, "train", "--help", "lr-decay-style", "--num-layers", "2")
    assert "gpt2-345m" in run(capsys, "train", "--help", "preset")
    assert "text cut in 5% parts" in "\n".join(
        help.explain_flag(TRAIN, help.HelpEntry("a", "b", "--a", "", "text cut in 5% parts"))
    )


def test_groups_and_searches(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "train", "--help", "Optimizer")
    assert "--adam-beta1" in out and "--num-layers" not in out and "--help --optimizer" in out
    assert run(capsys, "help", "train", "optimizer") == out
    assert "--hidden-dropout" in run(capsys, "train", "--help", "dropout")
    assert "--prefixes" in run(capsys, "help", "data", "verify", "prefixes")
    for topic, hint in (
        ("optimzer", "did you mean optimizer?"),
        ("num-lyers", "--num-layers?"),
        ("xyzzy", "groups are"),
    ):
        with pytest.raises(UserError, match=re.escape(hint)):
            help.help_lines(TRAIN, topic)
    name, (_, why) = next(iter(NO_EFFECT.items()))
    assert why in help.help_lines(TRAIN, name)[0]
    assert "--micro-batch-size" in help.help_lines(TRAIN, "batch-size")[0]
    assert help.help_lines(TRAIN, "--use-distributed-optimizer") == [
        "--use-distributed-optimizer is --zero-stage 1."
    ]


def test_where_docs_explain() -> None:
    """Each page that a flag names speaks of it."""
    for cls in fields.every_config():
        for name, (_, f, _) in fields.config_fields(cls).items():
            words = {spelling(name), "--no-" + spelling(name)[2:], *f.metadata["aliases"]}
            for page in f.metadata["docs"].split():
                text = (ROOT / "docs" / f"{page}.md").read_text()
                assert any(re.search(rf"{re.escape(w)}\b", text) for w in words), (
                    f"docs/{page}.md lacks {name}"
                )


def test_launch_leaves_what_follows_to_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        help.requested_topic("--nproc-per-node 2 train --help".split(), names_follow=True) is None
    )
    assert help.requested_topic("--nproc-per-node 2 --help".split(), names_follow=True) == ""
    assert run(capsys, "launch", "--nproc-per-node", "2", "train", "--help").startswith(
        "usage: meshwright train"
    )


def test_the_list_of_commands(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "--help")
    lines = out.splitlines()
    assert max(map(len, lines)) <= 80 and len(lines) <= 23  # of 24 rows, one for the next prompt
    for name in COMMANDS:
        assert len(re.findall(rf"^.{{6}} (\w+, )?{name}[ ,]", out, re.M)) == 1
        assert name in " ".join(GROUPS.values()).split()
    assert main(["trian"]) == 2 and "did you mean train?" in capsys.readouterr().err
    assert main([]) == 2 and capsys.readouterr().out == out == usage() + "\n"


def test_versions(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import meshwright
    from meshwright.base import version as versions

    version = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.M)[1]  # type: ignore[index]
    assert (
        run(capsys, "--version") == f"meshwright {version}\n" and meshwright.__version__ == version
    )
    assert re.fullmatch(rf"meshwright {version}, torch 2\.\S+, Python 3\.\S+\n", run(capsys, "-V"))
    monkeypatch.setattr(versions, "PROJECT", tmp_path / "pyproject.toml")
    assert versions.our_version() == versions.installed_version("meshwright") or "uninstalled"
    # a project that vendors us
    (tmp_path / "pyproject.toml").write_text('name = "another"\nversion = "9.9"\n')
    assert versions.our_version() != "9.9"


def test_help_inside_help(capsys: pytest.CaptureFixture[str]) -> None:
    everything = run(capsys, "train", "--help-all")
    assert (
        run(capsys, "help", "train", "--help-all")
        == run(capsys, "train", "-h", "--help-all")
        == everything
    )
    assert run(capsys, "help", "train", "--help") == run(capsys, "train", "--help")
    assert run(capsys, "data", "help", "verify") == run(capsys, "data", "verify", "--help")
    assert (
        run(capsys, "data", "--help-all")
        == run(capsys, "data", "--help")
        == run(capsys, "data", "help")
    )


def test_one_rank_prints_the_help(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    assert main(["train", "--help", "lr"]) == 0 and capsys.readouterr().out == ""


def test_a_reader_that_is_gone() -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write) as pipe:
        argv = [sys.executable, "-m", "meshwright", "train", "--help-all"]
        done = subprocess.run(argv, stdout=pipe, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (0, b"")


def on_terminal(argv: list[str], **more: str) -> str:
    """Run a command on a terminal of 80 x 24 and return what it shows."""
    lead, follow = pty.openpty()
    import fcntl
    import struct
    import termios

    fcntl.ioctl(follow, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in ("NO_COLOR", "PAGER", "LESS")
    }
    env |= {"TERM": "xterm", **more}
    words = [sys.executable, "-m", "meshwright", *argv]
    with subprocess.Popen(words, stdin=follow, stdout=follow, stderr=follow, env=env) as child:
        os.close(follow)
        out = b""
        while select.select([lead], [], [], 30)[0]:
            try:
                out += os.read(lead, 1 << 16)
            except OSError:
                break
            if not out:
                break
        assert child.wait() == 0
    os.close(lead)
    return out.decode()


def test_bold_headings_and_the_pager_on_terminals_only(tmp_path: Path) -> None:
    shown = on_terminal(["train", "--help-all"], PAGER="no-such-pager")
    assert "\033[1m" in shown and "--lr-wsd-decay-style" in shown
    assert "\033[" not in on_terminal(["train", "--help"], NO_COLOR="1")
    interrupted = f"kill -INT $PPID; sleep 0.2; cat > {tmp_path}/paged"  # Ctrl-C is for the pager
    assert on_terminal(["train", "--help", "optimizer"], PAGER=interrupted) == ""
    assert "--weight-decay" in (tmp_path / "paged").read_text()
