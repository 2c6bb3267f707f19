"""Every command of five documents, typed as it is written, on machines with disks of their own.

usage: python benchmarks/documents.py DOCUMENTS VOCABULARY [--logs DIR] [--only 000/7 ...]

DOCUMENTS has five texts, 000*.txt to 004*.txt, which are no part of this project: a guide to
Megatron-DeepSpeed, Ascend's GPT-2_for_PyTorch, a guide to Megatron-LM, the benchmark of
Megatron-DeepSpeed and LiBai, and OneFlow-GPT's README. VOCABULARY has gpt2-vocab.json and
gpt2-merges.txt. Needs root, and Linux with `ip` and `unshare`.

The fenced blocks are cut out of the texts, and bash gets each in its order and stops at the first
line that fails. A machine is a network namespace with an address that the document names, a host
name, a clone of this repository's last commit, a Python environment without Meshwright, and a
folder /workspace with all of it, which no other machine sees. documents.toml lists what is changed
in the texts, so that two cores can do it, and what is typed besides; both are printed after the
results. STAND_INS below are the programs that would need a network, an editor or a daemon.
"""

from __future__ import annotations

import argparse
import bz2
import json
import lzma
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import describe_machine, new_parser, print_head, print_row

from meshwright.base.python310 import tomllib

ROOT = Path(__file__).resolve().parents[1]
TABLES: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
TIME_LIMIT = 1500.0  # seconds of a block: the cores are shared by up to 32 ranks
DISK = Path("/workspace")
TYPED = "-------- typed"  # in a log, between the commands and what they printed

# Programs that are first in PATH. Those that do not do the work say so.
SAY = '#!/bin/bash\nsay() { echo "stand-in: ${0##*/} $*" >&2; }\n'
EDITOR = """say "$@"
for word; do
    [[ $word != +* ]] || continue
    if [ -e "$word" ]; then echo "$word: there"; else echo "$word: not there, nothing to edit"; fi
done
"""
# Installs folders of ours, and nothing from an index.
PIP = """for word; do case $word in . | ./ | requirements.txt) folder=here ;; esac; done
if [ -n "$folder" ] && [ -e setup.py -o -e requirements.txt ]; then
    exec /workspace/env/bin/python -m pip "$@"
fi
say "$@"
"""
PYTHON = """[ "$1 $2" != "-m pip" ] || exec pip "${@:3}"
exec /workspace/env/bin/python "$@"
"""
STAND_INS = {
    "pip": PIP,
    "pip3": PIP,
    "python": PYTHON,
    "python3": PYTHON,
    "torchrun": 'exec /workspace/env/bin/python -m torch.distributed.run "$@"\n',
    # wget and git deliver what downloads/ has under the last part of the address, or nothing.
    "wget": """say "$@"
to=.
while [ $# -gt 0 ]; do
    case $1 in -O) to=$2; shift ;; http*) name=${1##*/} ;; esac
    shift
done
cp "/workspace/downloads/$name" "$to" 2> /dev/null || : > "$name"
""",
    "git": """say "$@"
[ "$1" = clone ] || exit 0
name=${!#}; name=${name##*/}; name=${name%.git}
[ ! -e "$name" ] || exit 128
cp -RP "/workspace/downloads/$name" . 2> /dev/null || mkdir "$name"
""",
    # A container's script is run on the machine.
    "docker": """say "$@"
case $1 in run) [ ! -f "${!#}" ] || exec bash "${!#}" ;; esac
""",
    # The other machine's disk takes the place of this one's.
    "ssh": """say "$@"
exec unshare --mount bash -c 'mount --bind "$DISKS/$1" /workspace && cd && eval "$2"' ssh "$@"
""",
    "vi": EDITOR,
    "vim": EDITOR,
    "tree": '[ "$1" != -h ] || shift\nfind "$@" | sort\n',
}
# What git delivers -> the folder of ours that has its commands.
REPOSITORIES = {
    "Megatron-DeepSpeed": "megatron-deepspeed",
    "libai": "libai",
    "OneFlow-Benchmark/LanguageModeling/GPT": "oneflow-gpt",
    "ModelZoo-PyTorch/PyTorch/built-in/nlp/GPT-2_for_PyTorch": "ascend-gpt2",
}
LOADED = r"successfully loaded checkpoint from \S+ at iteration \d+"


@dataclass
class Block:
    """A fenced block of a document, by the document's number and its own."""

    name: str
    language: str
    text: str

    @property
    def known(self) -> dict[str, Any]:
        """What documents.toml says of it."""
        known: dict[str, Any] = TABLES["block"].get(self.name, {})
        return known

    @property
    def machines(self) -> int:
        return int(self.known.get("machines", 1))

    @property
    def kind(self) -> str:
        """Return "commands", or what the block has in their place."""
        lines = [line.strip() for line in self.text.splitlines() if line.strip()]
        if self.language not in ("", "bash", "sh"):
            return f"a listing in {self.language}"
        if all(line.startswith("{") and line.endswith("}") for line in lines):
            return "data"
        if all(re.fullmatch(r"\w+=\S+", line) for line in lines):
            return "names and addresses"
        if all(re.match("[│├└]", line) for line in lines):
            return "a listing of a folder"
        return "commands"

    @property
    def commands(self) -> str:
        """Return what is typed: of a log its first line, of a dialogue what follows the prompts."""
        if "--- arguments ---" in self.text:
            return self.text.splitlines()[0] + "\n"
        prompts = re.findall(r"^> (.*)", self.text, re.M)
        return "\n".join(prompts) + "\n" if prompts else self.text

    @property
    def first(self) -> str:
        """Return the first line that is no comment."""
        lines = [line.strip() for line in self.commands.splitlines() if line.strip()]
        return next((line for line in lines if not line.startswith("#")), lines[0])

    @property
    def changed(self) -> str:
        """Return the commands after the changes of documents.toml."""
        text = self.commands
        for entry in TABLES["change"]:
            if re.fullmatch(entry["blocks"], self.name):
                text = re.sub(entry["pattern"], entry["replacement"], text, flags=re.M)
        return text


def cut_blocks(path: Path) -> Iterator[Block]:
    """Yield what stands between lines of three backticks, and a line that begins and ends so."""
    document, number = path.name[:3], 0
    lines = iter(path.read_text(encoding="utf-8").splitlines())
    for line in lines:
        one_line = re.fullmatch(r"\s*```([^`]+)```\s*", line)
        begins = re.fullmatch(r"\s*```(\w*)\s*", line)
        if not one_line and not begins:
            continue
        number += 1
        if one_line:
            yield Block(f"{document}/{number}", "", one_line[1] + "\n")
        elif begins:
            inside = []
            for line in lines:
                if line.strip() == "```":
                    break
                inside.append(line)
            text = textwrap.dedent("\n".join(inside)).strip("\n") + "\n"
            yield Block(f"{document}/{number}", begins[1], text)


class Machine:
    """A network namespace with a host name, and a folder that it alone has as /workspace."""

    # In mounts of its own: $1 its folder, $2 its name, $3 where to type
    ENTER = """
        set -e
        mount --bind "$1" /workspace
        mount --bind "$1/hosts" /etc/hosts
        mount -t tmpfs tmpfs /dev/shm
        hostname "$2"
        cd "$3"
        exec bash -e /workspace/typed.sh
    """

    def __init__(self, folder: Path, number: int, address: str) -> None:
        self.folder, self.number, self.address = folder, number, address
        self.name = f"machine-{number}"
        self.namespace = f"documents-{os.getpid()}-{number}"

    def start(self, where: str, log: Path, said: str) -> subprocess.Popen[bytes]:
        """Have bash read typed.sh in a folder, with a text as its standard input."""
        environment = {
            "PATH": "/workspace/bin:/workspace/env/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": "/workspace/home",
            "TMPDIR": "/workspace/tmp",
            "DISKS": str(self.folder.parent),
            "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1",
            "PIP_NO_INDEX": "1",
            "PIP_NO_BUILD_ISOLATION": "0",  # pip's way of saying: without isolation
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "PIP_ROOT_USER_ACTION": "ignore",
        }
        (self.folder / "said").write_text(said)
        words = ["ip", "netns", "exec", self.namespace, "unshare", "--mount", "--uts", "bash", "-c"]
        words += [self.ENTER, "enter", str(self.folder), self.name, where]
        with (self.folder / "said").open() as stdin, log.open("a") as out:
            return subprocess.Popen(
                words, stdin=stdin, stdout=out, stderr=out, env=environment, start_new_session=True
            )

    def furnish(self, vocabulary: Path) -> None:
        """Make its disk: a clone, an environment, stand-ins, and what they deliver."""
        for name in ("bin", "home", "tmp", "code", "downloads", "model/megatron-models"):
            (self.folder / name).mkdir(parents=True)
        (self.folder / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {self.name}\n")
        for name, text in STAND_INS.items():
            (self.folder / "bin" / name).write_text(SAY + text)
            (self.folder / "bin" / name).chmod(0o755)
        clone = ["git", "clone", "--quiet", "--depth", "1", ROOT.as_uri(), "meshwright"]
        subprocess.run(clone, cwd=self.folder, check=True)
        python = [sys.executable, "-m", "venv", "--without-pip", "env"]
        subprocess.run(python, cwd=self.folder, check=True)
        libraries = [path for path in sys.path if path.endswith("site-packages")]
        (site,) = (self.folder / "env/lib").glob("python*/site-packages")
        (site / "libraries.pth").write_text("\n".join(libraries) + "\n")
        downloads = self.folder / "downloads"
        for name, ours in REPOSITORIES.items():
            (downloads / name).parent.mkdir(parents=True, exist_ok=True)
            (downloads / name).symlink_to(DISK / "meshwright/compat" / ours)
        (self.folder / "code/Megatron-LM").symlink_to(DISK / "meshwright/compat/megatron-lm")
        for name in ("gpt2-vocab.json", "gpt2-merges.txt"):
            shutil.copy(vocabulary / name, downloads)
        write_texts(downloads)


def write_texts(folder: Path) -> None:
    """Write a corpus of 2,000 documents and a dump of 200 pages, in place of gigabytes."""
    text = "Document {0}. The quick brown fox jumps over the lazy dog {0} times; 你好。 "
    texts = [text.format(n) * 4 for n in range(2000)]
    rows = "".join(json.dumps({"text": text, "id": str(n)}) + "\n" for n, text in enumerate(texts))
    (folder / "my-corpus.json").write_text(rows)
    (folder / "oscar-1GB.jsonl.xz").write_bytes(lzma.compress(rows.encode()))
    pages = "".join(
        f"<page><title>Page {n}</title><ns>0</ns><id>{n}</id>"
        f"<revision><text>{text}</text></revision></page>\n"
        for n, text in enumerate(texts[:200], 1)
    )
    dump = f'<mediawiki xml:lang="en">\n{pages}</mediawiki>\n'.encode()
    (folder / "enwiki-latest-pages-articles.xml.bz2").write_bytes(bz2.compress(dump))


def ip(command: str) -> None:
    subprocess.run(["ip", *command.split()], check=True)


@contextmanager
def network(machines: Sequence[Machine]) -> Iterator[None]:
    """Join the machines by a switch, which is a namespace too."""
    switch = f"documents-{os.getpid()}-switch"
    try:
        ip(f"netns add {switch}")
        ip(f"-n {switch} link add bridge type bridge")
        ip(f"-n {switch} link set bridge up")
        for machine in machines:
            name, port = machine.namespace, f"port{machine.number}"
            ip(f"netns add {name}")
            ip(f"link add eth0 netns {name} type veth peer name {port} netns {switch}")
            ip(f"-n {switch} link set {port} master bridge up")
            ip(f"-n {name} addr add {machine.address}/24 dev eth0")
            ip(f"-n {name} link set lo up")
            ip(f"-n {name} link set eth0 up")
        yield
    finally:
        for name in (*(machine.namespace for machine in machines), switch):
            subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL)


@dataclass
class Outcome:
    """What came of typing a block on some machines."""

    statuses: list[int]
    outputs: list[str]
    seconds: float
    notes: list[str] = field(default_factory=list)


class Session:
    """The machines of a document, and the reader who types its blocks."""

    def __init__(self, document: str, blocks: Sequence[Block], work: Path, logs: Path) -> None:
        self.blocks, self.logs = blocks, logs
        self.home = TABLES["document"][document]["folder"]
        net, _, host = TABLES["document"][document]["address"].rpartition(".")
        self.machines = [
            Machine(work / document / f"machine-{n}", n, f"{net}.{int(host) + n}")
            for n in range(max(block.machines for block in blocks))
        ]

    def repeat(self, block: Block) -> Outcome:
        """Type a block as it is, then without its contradiction, then again, as its entry says."""
        known, text = block.known, block.changed
        outcome = self.enter(block, text, known.get("before", ""))
        if "refused" in known:
            refused = outcome
            said = [re.search(known["refused"], output) for output in refused.outputs]
            if 0 in refused.statuses or not all(said):
                refused.statuses = [status or 1 for status in refused.statuses]
                return refused
            wrong, right = known["mended"]
            text = re.sub(wrong, right, text)
            outcome = self.enter(block, text, tag="-mended")
            outcome.seconds += refused.seconds
            outcome.notes.append(f"as typed refused on all machines ({known['refused']})")
        if "again" in known and not any(outcome.statuses):
            again = self.enter(block, text, tag="-again")
            loaded = re.search(LOADED, again.outputs[0])
            outcome.seconds += again.seconds
            outcome.statuses += again.statuses if loaded else [1]
            outcome.notes.append(f"typed again: {loaded[0] if loaded else 'no checkpoint'}")
        return outcome

    def enter(self, block: Block, text: str, before: str = "", tag: str = "") -> Outcome:
        """Type a text on the block's machines at once, and wait for all of them."""
        where = block.known.get("folder", self.home)
        began, processes, logs = time.monotonic(), [], []
        for machine, part in zip(self.machines, deal(text, block.machines), strict=False):
            script = before.lstrip() + self.save_or_type(block, part, machine)
            (machine.folder / "typed.sh").write_text(script)
            log = self.logs / f"{block.name.replace('/', '-')}{tag}-{machine.name}.log"
            log.write_text(f"{script}{TYPED} in {where} of {machine.name}\n")
            processes.append(machine.start(where, log, block.known.get("input", "").lstrip()))
            logs.append(log)
        try:
            statuses = [wait(process, began + TIME_LIMIT) for process in processes]
        finally:
            end(processes)
        seconds = time.monotonic() - began
        for log in logs:
            log.write_text(without_places(log.read_text(errors="replace")))
        return Outcome(statuses, [log.read_text().partition(TYPED)[2] for log in logs], seconds)

    def save_or_type(self, block: Block, text: str, machine: Machine) -> str:
        """Return the lines to type: a script is saved in the editor's file, and started with the
        machine's number unless the next block does it.
        """
        if not text.startswith("#!"):
            return text
        number = self.blocks.index(block)
        opened = [re.fullmatch(r"vim (\S+)", earlier.first) for earlier in self.blocks[:number]]
        name = block.known.get("file") or [match[1] for match in opened if match][-1]
        (machine.folder / "saved.sh").write_text(text)
        save = f"cp /workspace/saved.sh {name}\n"
        following = "".join(after.first for after in self.blocks[number + 1 :][:1])
        starts_it = re.search(rf"sh (\./)?{re.escape(name)}", following)
        return save if starts_it else f"{save}bash {name} {machine.number}\n"


def deal(text: str, machines: int) -> list[str]:
    """Return what each machine gets: the line with its number, or the whole text."""
    lines = text.splitlines(keepends=True)
    numbered = len(lines) == machines and all(f" {n} " in line for n, line in enumerate(lines))
    return lines if numbered and machines > 1 else [text] * machines


def wait(process: subprocess.Popen[bytes], until: float) -> int:
    """Return the status of a process, 124 if it has not ended in time."""
    try:
        return process.wait(max(1.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        return 124


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End those that still run, with all that they have started."""
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def without_places(log: str) -> str:
    """Return a log without folders of this machine and the address of a package index."""
    for path in sorted((path for path in sys.path if path), key=len, reverse=True):
        log = log.replace(path, "LIBRARIES")
    return re.sub(r"(index-url) \S+", r"\1 INDEX", log)


def judge(block: Block, outcome: Outcome) -> tuple[str, str]:
    """Return the status of a block, and a line of its output."""
    lines = [line.strip() for line in outcome.outputs[0].splitlines()[1:]]
    said = [line for line in lines if line and not line.startswith("stand-in: ")]
    shown = [line for line in said if re.search(block.known.get("shown", ""), line)]
    if any(outcome.statuses) or ("shown" in block.known and not shown):
        return f"FAILS, status {outcome.statuses}", said[-1] if said else ""
    status = ["works"]
    used = sorted(set(re.findall(r"^stand-in: (\w+)", "".join(outcome.outputs), re.M)))
    if used:
        status.append(f"stand-ins: {', '.join(used)}")
    if "before" in block.known:
        status.append(f"lines before it: {block.known['why']}")
    return "; ".join([*status, *outcome.notes]), shown[-1] if shown else ""


def repeat_document(
    document: str, work: Path, logs: Path, given: argparse.Namespace
) -> tuple[int, int, int]:
    """Print a row for each block; return how many work, have commands, and have none."""
    (path,) = given.documents.glob(f"{document}*.txt")
    blocks = list(cut_blocks(path))
    chosen = [block for block in blocks if {block.name, document} & set(given.only)]
    if not chosen:
        return 0, 0, 0
    session = Session(document, blocks, work, logs)
    for machine in session.machines:
        if not machine.folder.exists():
            machine.furnish(given.vocabulary)
    worked = apart = 0
    with network(session.machines):
        for block in chosen:
            row = [*block.name.split("/"), cell(block.first, 60)]
            if block.kind != "commands":
                apart += 1
                print_row(*row, "", block.kind, "", "")
                continue
            outcome = session.repeat(block)
            status, line = judge(block, outcome)
            worked += status.startswith("works")
            print_row(*row, block.machines, status, cell(line, 90), round(outcome.seconds))
    return worked, len(chosen) - apart, apart


def cell(text: str, width: int) -> str:
    """Return a text as code for a cell of a Markdown table."""
    text = re.sub(r"\s+", " ", text.strip()).replace("|", "¦").replace("`", "'")
    text = text if len(text) <= width else text[: width - 1] + "…"
    return f"`{text}`" if text else ""


def print_tables() -> None:
    print("\nChanged in the texts:\n")
    print_head("blocks", "pattern", "replacement", "why")
    for entry in TABLES["change"]:
        code = (cell(entry[name], 90) for name in ("blocks", "pattern", "replacement"))
        print_row(*code, entry["why"])
    print("\nTyped before a block:\n")
    print_head("block", "lines", "why")
    for name, known in TABLES["block"].items():
        if "before" in known:
            print_row(name, cell(known["before"], 90), known["why"])


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("documents", type=Path, help="folder with 000*.txt to 004*.txt")
    parser.add_argument("vocabulary", type=Path, help="folder with GPT-2's vocabulary and merges")
    parser.add_argument("--logs", type=Path, help="keep what each machine printed in this folder")
    parser.add_argument(
        "--only", nargs="+", default=[*TABLES["document"]], help="documents (000), blocks (000/7)"
    )
    parser.add_argument("--work", type=Path, help="keep the disks here, and use those there are")
    given = parser.parse_args()
    show = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(show, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    print(f"{describe_machine('torch')}; commit {commit}")
    with tempfile.TemporaryDirectory(prefix="documents-") as temporary:
        work = (given.work or Path(temporary, "work")).resolve()
        logs = (given.logs or Path(temporary, "logs")).resolve()
        logs.mkdir(parents=True, exist_ok=True)
        made = not DISK.exists()
        DISK.mkdir(exist_ok=True)
        try:
            print_head("document", "block", "first line", "machines", "status", "output", "s")
            counts = [repeat_document(name, work, logs, given) for name in TABLES["document"]]
        finally:
            if made:
                DISK.rmdir()
    worked, typed, apart = map(sum, zip(*counts, strict=True))
    print(f"\n{worked} of {typed} blocks of commands work; {apart} blocks have none.")
    print_tables()


if __name__ == "__main__":
    main()
