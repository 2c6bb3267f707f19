"""meshwright <command>: each command lives in the file or folder of its name and is imported only when called."""

from __future__ import annotations

import importlib
import os
import sys

from meshwright.errors import IO, SIGINT, USAGE, UserError

COMMANDS = {
    "demo": ("meshwright.demo", "text to a trained, talking model on this machine, in three minutes"),
    "preprocess": ("meshwright.data.preprocess", "JSON lines to .bin/.idx"),
    "train-tokenizer": ("meshwright.data.train_tokenizer", "learn a BPE vocabulary from text"),
    "train": ("meshwright.train", "pre-train a GPT"),
    "evaluate": ("meshwright.evaluate", "perplexity and bits per byte of a run on text files"),
    "generate": ("meshwright.generate.command", "samples, continuations, or a dialogue"),
    "inspect": ("meshwright.checkpoint.inspect", "what a checkpoint folder holds, and whether it is whole"),
    "report": ("meshwright.report", "one page with pictures for a run; --losses prints exact numbers"),
}


def main(argv: list[str] | None = None) -> int:
    """Run one command; return the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if argv else USAGE
    if argv[0] == "--version":
        from importlib.metadata import version

        print(f"meshwright {version('meshwright')}")
        return 0
    if argv[0] not in COMMANDS:
        import difflib

        near = difflib.get_close_matches(argv[0], COMMANDS, 1)
        print(f"meshwright: no command {argv[0]!r}" + (f"; did you mean {near[0]}?" if near else ""), file=sys.stderr)
        print(usage(), file=sys.stderr)
        return USAGE
    # Threads that wait soon sleep: on a busy machine those that spin, GNU OpenMP's default, halve the speed or worse.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    try:
        status: int | None = importlib.import_module(COMMANDS[argv[0]][0]).main(argv[1:])
        sys.stdout.flush()
        return status or 0
    except UserError as e:
        print(f"meshwright {argv[0]}: error: {e}", file=sys.stderr)
        return e.status
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return SIGINT
    except BrokenPipeError:  # the reader of our output, such as head, is gone: that is its right
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as e:
        print(f"meshwright {argv[0]}: error: {e}", file=sys.stderr)
        return IO


def usage() -> str:
    lines = [f"  {name:<16} {what}" for name, (_, what) in COMMANDS.items()]
    return "\n".join(
        ["usage: meshwright COMMAND [flags]", "", *lines, "", "`meshwright COMMAND --help` lists a command's flags."]
    )


if __name__ == "__main__":
    sys.exit(main())
