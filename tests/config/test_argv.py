"""The reader of command lines: what is a flag, what a value, and what stands without a flag."""

from __future__ import annotations

import pytest

from meshwright.config.argv import Option, Positional, Syntax, read_argv

OPTIONS = {
    "--lr": Option("lr"),
    "--learning-rate": Option("lr"),
    "--top_p": Option("top_p"),
    "--top-p": Option("top_p"),
    "--save-to": Option("save_to"),
    "--paths": Option("paths", "*"),
    "--keys": Option("keys", "+"),
    "--pair": Option("pair", 2),
    "--fp16": Option("fp16", 0, True),
    "--no-fp16": Option("fp16", 0, False),
}
ONE, TWO = Positional("first", "FIRST", False, True), Positional("second", "SECOND", False, False)
MANY = Positional("paths", "PATH", True, False)


def syntax(*positionals: Positional, names_follow: bool = False) -> Syntax:
    required = {one.target: one.word for one in positionals if one.is_required}
    return Syntax(OPTIONS, positionals, required, names_follow, None, "see --help")


@pytest.mark.parametrize(
    ("argv", "values"),
    [
        (["--lr", "1", "--lr=2"], {"lr": "2"}),
        (["--lr=a=b", "--save_to=x_y"], {"lr": "a=b", "save_to": "x_y"}),
        (["--lr=", "--save-to", ""], {"lr": "", "save_to": ""}),
        # A negative number and what has blanks are values; what is joined by = is one anyway.
        (["--lr", "-1", "--save-to", "- a b"], {"lr": "-1", "save_to": "- a b"}),
        (
            ["--lr", "-.5e-3", "--save-to=-x", "--top_p", "-"],
            {"lr": "-.5e-3", "save_to": "-x", "top_p": "-"},
        ),
        (
            ["--paths", "a", "-2", "--fp16", "--keys", "c"],
            {"paths": ["a", "-2"], "fp16": True, "keys": ["c"]},
        ),
        (
            ["--paths", "--pair", "a", "b", "--no_fp16"],
            {"paths": [], "pair": ["a", "b"], "fp16": False},
        ),
        (["--paths", "a", "--paths", "b"], {"paths": ["b"]}),
        (["--top_p", "1", "--top-p", "2"], {"top_p": "2"}),
    ],
)
def test_flags_and_their_values(argv: list[str], values: dict[str, object]) -> None:
    typed = read_argv(argv, syntax())
    assert typed.values == values
    assert not (typed.problems or typed.unknown or typed.words)


def test_words_without_a_flag() -> None:
    both = syntax(ONE, TWO)
    for argv in (["a", "b", "--lr", "1"], ["a", "--lr", "1", "b"], ["--lr", "1", "a", "b"]):
        assert read_argv(argv, both).values == {"first": "a", "second": "b", "lr": "1"}
    assert read_argv(["a", "b", "c"], both).words == ["c"]
    assert read_argv(["a", "--paths", "c", "--fp16", "b"], syntax(MANY)).values["paths"] == [
        "a",
        "b",
        "c",
    ]
    assert read_argv(["--fp16"], both).missing(both) == {"first": "FIRST"}


def test_a_command_line_within_another() -> None:
    """Its flags are not read, even those that both have."""
    rest = syntax(Positional("command", "COMMAND", True, False), names_follow=True)
    for dashes in ([], ["--"]):
        typed = read_argv(["--lr", "1", *dashes, "train", "--lr", "2", "--fp16=1", "--", "x"], rest)
        assert typed.values == {"lr": "1", "command": ["train", "--lr", "2", "--fp16=1", "--", "x"]}
        assert not typed.problems
