"""meshwright COMMAND: find the command in the registry, import its module and call it."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import pkgutil
import sys
from collections.abc import Mapping
from pathlib import Path

from meshwright.base import registry
from meshwright.base.console import fit
from meshwright.base.errors import (
    BAD_DATA,
    DONE,
    IO,
    SIGINT,
    UNAVAILABLE,
    USAGE,
    UnfitFile,
    UserError,
)
from meshwright.base.host import MORE_MEMORY, describe_lack
from meshwright.base.storage.addresses import shown
from meshwright.runtime.ranks.orphans import die_with_launcher

# Our commands, with their lines in the list.
COMMANDS = {
    "quickstart": "make a model of your own text, in ten minutes",
    "demo": "train a small model on this machine, in some minutes",
    "preprocess": "convert text to .bin/.idx files of tokens",
    "data": "verify, index and merge token files; drop duplicate text",
    "train-tokenizer": "learn a BPE vocabulary from text",
    "presets": "list known models, or print one as flags",
    "plan": "predict memory, time and the best layout of a run",
    "train": "pre-train a GPT",
    "sweep": "search flags of train: many runs, a table and a picture",
    "coordinates": "check that settings carry over to larger models",
    "verify-layout": "show that a layout computes what one process computes",
    "launch": "start a command as several ranks, on one machine or many",
    "evaluate": "measure a model's perplexity and bits per byte on text",
    "generate": "continue prompts of the command line or of a file",
    "chat": "talk to a model in the terminal",
    "serve": "answer requests for text, OpenAI's way, and show a page",
    "inspect": "show what a checkpoint holds, and whether it is complete",
    "collect": "bring the parts of a run together from several machines",
    "convert": "convert a checkpoint from or to another program's format",
    "report": "make a page with pictures of a run, or compare several",
    "watch": "show runs in a browser while they go on",
    "bench": "measure the speed of training on this machine",
    "doctor": "check this machine: what works, and what would be faster",
    "completion": "print the completion script of bash, zsh or fish",
    "help": "explain a command, a group of flags or one flag",
}
# The headings of the list, in the order of the work; a command without one is listed last.
GROUPS = {
    "Start": "quickstart demo",
    "Text": "train-tokenizer preprocess data",
    "Train": "presets plan train launch sweep coordinates verify-layout",
    "Look": "watch report evaluate",
    "Use": "generate chat serve",
    "Files": "inspect convert collect",
    "Help": "help completion doctor bench",
}
# Commands that share a line, so that the list fits a terminal.
SHARED = {
    "inspect, convert": "show what a checkpoint holds; change its format",
    "doctor, bench": "check this machine; measure the speed of training",
    "help, completion": "explain commands and flags; complete them in a shell",
}
# Commands and flags that only print. Their reader may leave early, which is no failure. `data
# verify` is missing, because its exit status is a result too.
READ_ONLY = {"", "-h", "--help", "help", "--version", "-V", "doctor", "completion", "presets"}
READ_ONLY |= {"inspect", "report", "watch", "evaluate", "bench", "data inspect", "data plan"}
PRINTS = {"-h", "--help", "--help-all", "--print-config", "--dry-run"}

# Advice that follows a common error of the operating system.
ADVICE = {errno.ENOSPC: "; free space there, or choose another folder"}
ADVICE |= {
    errno.EDQUOT: ADVICE[errno.ENOSPC],
    errno.EROFS: "; choose a folder that can be written to",
    errno.ENAMETOOLONG: "; choose a shorter name",
}
ADVICE |= dict.fromkeys(
    (errno.EACCES, errno.EPERM), "; choose another folder, or change its permissions"
)

# The import names of the packages that every installation has.
PACKAGES = set(
    "torch numpy safetensors tokenizers tiktoken orjson rich yaml matplotlib jinja2".split()
)


def main(argv: list[str] | None = None, spellings: Mapping[str, str] | None = None) -> int:
    """Run one command and return the exit status.

    `spellings` are another program's names of our settings, by field, which errors use.
    """
    die_with_launcher()
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by the parent process
            setattr(sys, name, open(os.devnull, mode))
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
        _name_as_typed(e, argv, spellings or {})
        if str(e):  # empty if another rank prints it
            _print_error(f"meshwright {name}: error: {e}")
        return e.status
    except KeyboardInterrupt:
        _print_error("interrupted")
        return SIGINT
    # A clone runs without being installed, but not without the packages.
    except ModuleNotFoundError as e:
        if e.name not in PACKAGES:
            raise
        clone = Path(__file__).parents[2]
        what = clone if (clone / "pyproject.toml").exists() else "--force-reinstall meshwright"
        _print_error(
            f"meshwright {name}: error: {sys.executable} has no package {e.name}; pip install {what}"
        )
        return UNAVAILABLE
    except BrokenPipeError:  # the reader of our output, such as head, is gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        writes = any(
            word.startswith(("--genfile", "--sample-input-file", "--output")) for word in argv
        )
        only_prints = {name, " ".join(argv[:2])} & READ_ONLY or {
            word.partition("=")[0] for word in argv
        } & PRINTS
        return DONE if only_prints or (name in ("generate", "chat") and not writes) else IO
    except Exception as e:
        if (lack := describe_lack(e)) is not None:
            _print_error(
                f"meshwright {name}: error: out of memory on this machine: {lack}; {MORE_MEMORY}"
            )
            return USAGE
        if not isinstance(e, OSError):
            raise
        place = f"{e.filename}: {e.strerror}" if e.filename else e
        _print_error(f"meshwright {name}: error: {place}{ADVICE.get(e.errno or 0, '')}")
        return BAD_DATA if isinstance(e, UnfitFile) else IO


def _run(name: str, argv: list[str]) -> int:
    if name == "help" and argv:  # help COMMAND [VERB] [TOPIC]
        if argv[0] not in (*commands(), "-h", "--help", "--help-all", "--version", "-V"):
            _help_of_flag(argv[0])
        known = 2 if argv[0] == "data" and len(argv) > 1 else 1  # words of the command
        return _run(argv[0], [*argv[1:known], "--help", *argv[known:]])
    if name in ("", "-h", "--help", "--help-all", "help"):
        print(usage())
        return DONE if name else USAGE
    if name in ("--version", "-V"):
        print(version(with_torch=name == "-V"))
        return DONE
    if (command := registry.find("commands", name)) is None:
        from meshwright.base.hints import did_you_mean, our_word

        ours = our_word("commands", name, commands())
        near = f"; here it is `meshwright {ours}`" if ours else did_you_mean(name, commands(), 0.7)
        hint = near or "; `meshwright help` lists the commands"
        print(f"meshwright: no command {name!r}{hint}", file=sys.stderr)
        return USAGE
    # Raise the limit of open files: a blend of hundreds of token files has thousands of maps.
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (min(hard, 1 << 20) if hard > 0 else 1 << 20, hard)
        )
    # Let idle threads sleep soon. GNU OpenMP's default, spinning, halves a busy machine's speed.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    return command(argv) or DONE


def _help_of_flag(topic: str) -> None:
    """Explain a flag or a group of `train` and raise SystemExit as --help does, if there is one."""
    with contextlib.suppress(UserError):
        try:
            _run("train", ["--help", topic])
        except SystemExit:
            print(f"\n{topic} is no command; this is `meshwright help train {topic}`")
            raise


def _name_as_typed(error: UserError, argv: list[str], spellings: Mapping[str, str]) -> None:
    """Have an error about settings name them as they were typed."""
    from meshwright.config.fields import typed_flags
    from meshwright.config.pages import PAGES
    from meshwright.config.problem import GivenAs, SettingsError, Wording

    if not isinstance(error, SettingsError):
        return
    command = next((name for name in (" ".join(argv[:2]), *argv[:1]) if name in PAGES), None)
    if error.words is None:
        typed = typed_flags(pkgutil.resolve_name(PAGES[command].config), argv) if command else {}
        error.words = Wording(given={name: GivenAs(flag) for name, flag in typed.items()})
    error.words.given.update({name: GivenAs(key) for name, key in spellings.items()})


def _print_error(line: str) -> None:
    with contextlib.suppress(OSError):
        print(fit(shown(line), sys.stderr), file=sys.stderr, flush=True)


def commands() -> dict[str, str]:
    """Return what each command of this installation does; other packages' come last."""
    places = registry.entries("commands")
    ours = {name: about for name, about in COMMANDS.items() if name in places or name == "help"}
    return ours | {
        name: _about(name, place) for name, place in places.items() if name not in COMMANDS
    }


def _about(name: str, place: str) -> str:
    """Return the first line of a module's docstring."""
    module = registry.resolve("commands", name, place.partition(":")[0])
    return (module.__doc__ or "").strip().partition("\n")[0].rstrip(".")


def usage() -> str:
    """Return the commands in the order of the work, a line each, for 80 columns and 24 rows."""
    known = commands()
    listed = {
        heading: [n for n in names.split() if n in known] for heading, names in GROUPS.items()
    }
    listed["More"] = [name for name in known if name not in " ".join(GROUPS.values()).split()]
    lines = ["usage: meshwright COMMAND [flags]; flags and examples: meshwright help COMMAND"]
    for heading, names in listed.items():
        shared = {k: v for k, v in SHARED.items() if {*k.split(", ")} <= {*names}}
        merged = ", ".join(shared).split(", ")
        rows = {name: known[name] for name in names if name not in merged} | shared
        lines += [
            f"{heading * (n == 0):<6} {name:<16} {text}"
            for n, (name, text) in enumerate(rows.items())
        ]
    return "\n".join(lines)


def version(with_torch: bool = False) -> str:
    from meshwright.base.version import installed_version, our_version

    more = (
        f", torch {installed_version('torch')}, Python {sys.version.split()[0]}"
        if with_torch
        else ""
    )
    return f"meshwright {our_version()}{more}"


if __name__ == "__main__":
    sys.exit(main())
