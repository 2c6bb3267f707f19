"""The model that these tests share, and the program as a function."""

import io
import sys

import pytest
from three_sentences import learn

from meshwright.__main__ import main


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """A model of bytes that knows the three sentences by heart."""
    return learn(tmp_path_factory.mktemp("learn"), 150, "--tokenizer-type=ByteTokenizer")


@pytest.fixture
def program(run, capsys, monkeypatch):
    """A function of a command, the text that is typed and flags.

    It returns the status, standard output and standard error.
    """

    def call(command, *argv, load=run, typed=None):
        if typed is not None:
            monkeypatch.setattr(
                sys, "stdin", io.TextIOWrapper(io.BytesIO(typed.encode("utf-8", "surrogateescape")))
            )
        capsys.readouterr()
        status = main([command, str(load), "--device=cpu", *map(str, argv)])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call
