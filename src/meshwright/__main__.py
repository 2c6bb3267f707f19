"""meshwright <command>: each command lives in the file or folder of its name and is imported only when called."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import sys

from meshwright.errors import DONE, IO, SIGINT, USAGE, UserError
from meshwright.launch.rendezvous import die_with_parent

COMMANDS = {
    "demo": ("meshwright.commands.demo", "text to a trained, talking model on this machine, in three to five minutes"),
    "preprocess": ("meshwright.commands.preprocess", "text to .bin/.idx"),
    "data": (
        "meshwright.commands.data",
        "verify, inspect, merge, fetch token files; index and plan a training's samples",
    ),
    "train-tokenizer": ("meshwright.commands.train_tokenizer", "learn a BPE vocabulary from text"),
    "train": ("meshwright.commands.train", "pre-train a GPT"),
    "launch": ("meshwright.commands.launch", "start a command or a script as several ranks, on one machine or many"),
    "evaluate": ("meshwright.commands.evaluate", "perplexity and bits per byte of a run on text files"),
    "generate": ("meshwright.commands.generate", "samples, continuations, or a dialogue"),
    "inspect": ("meshwright.commands.inspect", "what a checkpoint folder holds, and whether it is whole"),
    "convert": (
        "meshwright.commands.convert",
        "a checkpoint of any program as another one's: native, torch, huggingface",
    ),
    "report": (
        "meshwright.commands.report",
        "one page with pictures for a run, or the comparison of two; --losses prints exact numbers",
    ),
}


def main(argv: list[str] | None = None) -> int:
    """Run one command; return the exit status."""
    die_with_parent()
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by who started us
            setattr(sys, name, open(os.devnull, "w"))
    if isinstance(sys.stdout, io.TextIOWrapper):  # a folder's name may be bytes that are no text
        sys.stdout.reconfigure(errors="backslashreplace")
    argv = sys.argv[1:] if argv is None else argv
    name = argv[0] if argv else ""
    try:
        status = _run(name, argv[1:])
        if sys.stdout:
            sys.stdout.flush()
        return status
    except UserError as e:
        if str(e):  # another rank tells it
            _tell(f"meshwright {name}: error: {e}")
        return e.status
    except KeyboardInterrupt:
        _tell("interrupted")
        return SIGINT
    except BrokenPipeError:  # the reader of our output, such as head, is gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        prints = {name, " ".join(argv[:2])} & READ_ONLY or set(argv) & PRINTS
        return DONE if prints else IO  # what only prints has done its work
    except OSError as e:
        _tell(f"meshwright {name}: error: {f'{e.filename}: {e.strerror}' if e.filename else e}")
        return IO


# Commands and flags whose whole result is what they print; that of `data verify` is its exit status, too.
READ_ONLY = {"", "-h", "--help", "help", "--version", "inspect", "report", "evaluate", "data inspect", "data plan"}
PRINTS = {"-h", "--help", "--print-config", "--dry-run"}


def _run(name: str, argv: list[str]) -> int:
    if name in ("", "-h", "--help", "help"):
        print(usage())
        return DONE if name else USAGE
    if name == "--version":
        from importlib.metadata import version

        print(f"meshwright {version('meshwright')}")
        return DONE
    if name not in COMMANDS:
        from meshwright.settings.grammar import did_you_mean

        print(f"meshwright: no command {name!r}{did_you_mean(name, COMMANDS)}\n{usage()}", file=sys.stderr)
        return USAGE
    with contextlib.suppress(ImportError, ValueError, OSError):  # a blend of hundreds of files has thousands of maps
        import resource

        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 1 << 20) if hard > 0 else 1 << 20, hard))
    # Threads that wait soon sleep: on a busy machine those that spin, GNU OpenMP's default, halve the speed or worse.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    return importlib.import_module(COMMANDS[name][0]).main(argv) or DONE


def _tell(line: str) -> None:
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def usage() -> str:
    lines = [f"  {name:<16} {what}" for name, (_, what) in COMMANDS.items()]
    return "\n".join(
        ["usage: meshwright COMMAND [flags]", "", *lines, "", "`meshwright COMMAND --help` lists a command's flags."]
    )


if __name__ == "__main__":
    sys.exit(main())
