"""meshwright COMMAND: each command is a module of `commands/`, imported only when it is called."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import sys

from meshwright.errors import DONE, IO, SIGINT, USAGE, UserError
from meshwright.launch.world import die_with_parent

# The module of each command is commands/NAME.py, with _ for -.
COMMANDS = {
    "demo": "from text to a trained model that writes, on this machine, in three to five minutes",
    "preprocess": "convert text to .bin/.idx files of tokens",
    "data": "verify, inspect, merge and fetch token files; index and preview the samples of a training",
    "train-tokenizer": "learn a BPE vocabulary from text",
    "train": "pre-train a GPT",
    "launch": "start a command or a script as several ranks, on one machine or many",
    "evaluate": "measure perplexity and bits per byte of a model on text files",
    "generate": "write samples, continue prompts, or hold a dialogue",
    "inspect": "show what a checkpoint folder holds, and whether it is complete",
    "convert": "convert a checkpoint of any supported program to native, torch or huggingface",
    "report": "make a page with pictures of a run, or compare two; --losses prints exact numbers",
}
# Commands and flags that only print; the result of `data verify` is its exit status too.
READ_ONLY = {"", "-h", "--help", "help", "--version", "inspect", "report", "evaluate", "data inspect", "data plan"}
PRINTS = {"-h", "--help", "--print-config", "--dry-run"}


def main(argv: list[str] | None = None) -> int:
    """Run one command and return the exit status."""
    die_with_parent()
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the parent process
            setattr(sys, name, open(os.devnull, "w"))
    if isinstance(sys.stdout, io.TextIOWrapper):  # a folder's name may be bytes that are not text
        sys.stdout.reconfigure(errors="backslashreplace")
    argv = sys.argv[1:] if argv is None else argv
    name = argv[0] if argv else ""
    try:
        status = _run(name, argv[1:])
        if sys.stdout:
            sys.stdout.flush()
        return status
    except UserError as e:
        if str(e):  # empty if another rank prints it
            _print_error(f"meshwright {name}: error: {e}")
        return e.status
    except KeyboardInterrupt:
        _print_error("interrupted")
        return SIGINT
    except BrokenPipeError:  # the reader of our output, such as head, is gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        only_prints = {name, " ".join(argv[:2])} & READ_ONLY or set(argv) & PRINTS
        return DONE if only_prints else IO
    except OSError as e:
        _print_error(f"meshwright {name}: error: {f'{e.filename}: {e.strerror}' if e.filename else e}")
        return IO


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
    # Idle threads sleep soon: spinning, GNU OpenMP's default, halves the speed of a busy machine.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    return importlib.import_module(f"meshwright.commands.{name.replace('-', '_')}").main(argv) or DONE


def _print_error(line: str) -> None:
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def usage() -> str:
    commands = [f"  {name:<16} {text}" for name, text in COMMANDS.items()]
    last = "`meshwright COMMAND --help` lists a command's flags."
    return "\n".join(["usage: meshwright COMMAND [flags]", "", *commands, "", last])


if __name__ == "__main__":
    sys.exit(main())
