"""Run original scripts of other systems, one by one, in the folders of compat/.

    python benchmarks/originals.py REPOSITORIES [--only WORD ...] [--logs FOLDER]

REPOSITORIES is a folder with a git directory OWNER+NAME/repo for each repository of
originals.toml. A script's text is read from there, at the commit of the table, into a fresh copy
of its folder of compat/, and removed with that again. Only values change: sizes, batches,
iterations, numbers of ranks, names of machines, and paths, by the regular expressions of the
table. The flags and their order are compared with the original's.

`nvidia-smi`, `ds_ssh`, `srun`, `docker`, `wget`, `pip` and the like are stand-ins: a cluster and a
network are not at hand. A script works if it ends with status 0 and its output, or a log that it
writes, has the line that the table expects: by default that of the last iteration.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

from common import describe_machine, new_parser, print_head, print_row

from meshwright.data.tokenizers import train_bpe

ROOT = Path(__file__).resolve().parents[1]
LAST_ITERATION = r"iteration +(\d+)/ +\1 .*lm loss: [0-9.]+E"
NOT_THE_TRAINING = ("--num_gpus",)  # what a launcher without GPUs has to be told
SIZES = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --max-position-embeddings 64".split()
)
STAND_INS = {
    "nvidia-smi": 'for i in $(seq "$RANKS"); do echo "GPU $i"; done',
    # two lines of its own, as those that scripts subtract
    "ds_ssh": 'echo; echo "hostfile"; "$@"',
    # this machine is reached, and no other
    "ssh": """
while [ "${1#-}" != "$1" ]; do case $1 in -o | -p) shift;; esac; shift; done
[ "$1" = localhost ] || exit 255
shift
exec bash -c "$*\"""",
    "sbatch": 'bash "${!#}"',
    "scontrol": "echo localhost",
    "git": "",
    "docker": 'echo docker "$@"',
    "nsys": 'shift 5; exec "$@"',  # profile --stats true --output FILE
    "pip": "",
    "wget": 'for word; do case $word in http*) cp "$DATA/${word##*/}" . || exit 8;; esac; done',
    # the words after its own flags, once for each rank
    "srun": """
while [ "${1#-}" != "$1" ]; do case $1 in --container*) shift;; esac; shift; done
for rank in $(seq 0 $((RANKS - 1))); do
    SLURM_PROCID=$rank SLURM_LOCALID=$rank SLURM_NTASKS=$RANKS SLURM_NNODES=1 SLURM_NODEID=0 \\
        SLURM_JOB_ID=1 SLURM_JOB_NODELIST=localhost SLURM_STEP_NODELIST=localhost \\
        SLURM_STEP_NUM_TASKS=$RANKS SLURM_STEP_TASKS_PER_NODE=$RANKS "$@" &
    started="$started $!"
done
for process in $started; do wait "$process" || status=$?; done
exit ${status:-0}""",
}


@dataclasses.dataclass(frozen=True)
class Original:
    """A script of another system, and how it is run."""

    repository: str
    commit: str
    path: str  # in its repository
    folder: str  # of compat/
    to: str = ""  # its path in that folder, if another one
    place: str = "."  # where it is run
    command: str = ""  # if another one than `bash SCRIPT`
    ranks: int = 1
    files: tuple[str, ...] = ()  # beside it, [REPOSITORY@COMMIT:]PATH[ > PATH THERE]
    cuts: tuple[tuple[str, str], ...] = ()
    expect: str = LAST_ITERATION
    minutes: int = 5
    fault: str = ""  # upstream's own
    lacks: str = ""  # what a machine without a network lacks, after the line that is expected

    @property
    def there(self) -> str:
        return self.to or self.path


def main() -> int:
    parser = new_parser(__doc__)
    parser.add_argument("repositories", type=Path, help="folder of git directories OWNER+NAME/repo")
    parser.add_argument("--only", nargs="*", default=[], help="scripts whose name has a word")
    parser.add_argument("--logs", type=Path, help="folder for what each script prints and logs")
    given = parser.parse_args()
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
    originals = [
        one
        for one in read_table(table)
        if not given.only or any(word in f"{one.repository} {one.path}" for word in given.only)
    ]
    print(describe_machine("torch"), end="\n\n")
    print_head("repository", "commit", "script", "compat/", "status", "line", "s")
    counts: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as name:
        data = make_data(Path(name))
        common = tuple(map(tuple, table["cuts"]))
        for number, original in enumerate(originals, 1):
            start = time.monotonic()
            folder = copy_folder(Path(name) / f"copy-{number}", original, data)
            write_originals(folder, given.repositories, original, common, data)
            status, output = run(folder, original, data)
            word, line = assess(original, status, output)
            counts[word] = counts.get(word, 0) + 1
            if given.logs:
                given.logs.mkdir(parents=True, exist_ok=True)
                log = f"{original.repository}/{original.commit}/{original.path}".replace("/", "+")
                (given.logs / f"{log}.txt").write_text(output)
            seconds = time.monotonic() - start
            print_row(
                original.repository,
                original.commit,
                f"`{original.path}`",
                original.folder,
                word,
                line.replace("|", "\\|"),
                f"{seconds:.0f}",
            )
            shutil.rmtree(folder)
    print(f"\n{len(originals)} scripts: " + ", ".join(f"{n} {w}" for w, n in counts.items()))
    return 1 if "fails" in counts else 0


def read_table(table: dict[str, object]) -> list[Original]:
    originals = []
    for group in table["group"]:  # type: ignore[attr-defined]
        shared = {name: value for name, value in group.items() if name != "script"}
        for script in group["script"]:
            one = shared | script
            one["cuts"] = tuple(map(tuple, [*script.get("cuts", ()), *shared.get("cuts", ())]))
            one["files"] = tuple([*shared.get("files", ()), *script.get("files", ())])
            originals.append(Original(**one))
    return originals


def make_data(folder: Path) -> Path:
    """Make a corpus of the documentation, vocabularies, token files, and a small checkpoint."""
    import sentencepiece
    from tokenizers import ByteLevelBPETokenizer

    data = folder / "data"
    data.mkdir()
    texts = [
        text
        for path in sorted((ROOT / "docs").glob("*.md"))
        for text in path.read_text().split("\n\n")
        if len(text) > 40
    ]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (data / "corpus.json").write_text(lines)
    examples = [json.dumps({"text": " ".join(text.split()[:12])}) + "\n" for text in texts[:16]]
    for name in ("lambada_test.jsonl", "lambada_test.json"):
        (data / name).write_text("".join(examples))
    train_bpe(texts, 512, data / "words")
    for name in ("vocab.json", "merges.txt"):
        (data / f"words/{name}").rename(data / f"gpt2-{name}")
    vocabulary = [str(data / "gpt2-vocab.json"), str(data / "gpt2-merges.txt")]
    ByteLevelBPETokenizer(*vocabulary).save(str(data / "words/tokenizer.json"))
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_prefix=str(data / "tokenizer"),
        vocab_size=400,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    files = [f"--vocab-file={vocabulary[0]}", f"--merge-file={vocabulary[1]}"]
    tokens = data / "my-gpt2_text_document"
    meshwright("preprocess", f"--input={data}/corpus.json", f"--output-prefix={data}/my-gpt2",
               "--append-eod", *files)  # fmt: skip
    meshwright("preprocess", f"--input={data}/corpus.json", f"--output-prefix={data}/my-llama",
               "--append-eod", "--tokenizer-type=GPTSentencePieceTokenizer",
               f"--tokenizer-model={data}/tokenizer.model")  # fmt: skip
    meshwright("train", *SIZES, *files, f"--data-path={tokens}", "--seq-length=64",
               "--micro-batch-size=4", "--train-iters=4", "--lr=1e-3", "--eval-iters=0",
               "--no-tensorboard", f"--save={data}/gpt2_345m")  # fmt: skip
    (data / "indexed_datasets").mkdir()
    for name in (
        "BookCorpusDataset_text_document",
        "gpt_sample_dataset_text_document",
        "indexed_datasets/megatron",
        "loss_compara_content_sentence",
        "meg-gpt2_text_document",
        "my-gpt_text_sentence",
        "pile_text_document",
    ):
        for ending in (".bin", ".idx"):
            shutil.copy(f"{tokens}{ending}", data / f"{name}{ending}")
    return data


def meshwright(*words: str) -> None:
    command = [sys.executable, "-m", "meshwright", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def copy_folder(folder: Path, original: Original, data: Path) -> Path:
    """Copy a folder of compat/, with the data where scripts look for them, and the stand-ins."""
    shutil.copytree(ROOT / "compat" / original.folder, folder)
    place = folder / original.place
    place.mkdir(parents=True, exist_ok=True)
    for name in ("data", "dataset", "data_test/gpt_data", "libai_dataset"):
        shutil.copytree(data, folder / name)
    for path in filter(Path.is_file, data.iterdir()):
        for target in {folder, place}:
            shutil.copy(path, target)
    for name in ("checkpoints/gpt2_345m", "dataset/checkpoints/gpt2_345m"):
        shutil.copytree(data / "gpt2_345m", folder / name)
    stand_ins = folder / "stand-ins"
    stand_ins.mkdir()
    for name, text in STAND_INS.items():
        (stand_ins / name).write_text(f"#!/bin/bash\n{text}\n")
        (stand_ins / name).chmod(0o755)
    for name in ("python", "python3"):
        (stand_ins / name).write_text(
            f'#!/bin/bash\n[ "$1 $2" != "-m pip" ] || exit 0\nexec {sys.executable} "$@"\n'
        )
        (stand_ins / name).chmod(0o755)
    return folder


def write_originals(
    folder: Path,
    repositories: Path,
    original: Original,
    common: tuple[tuple[str, str], ...],
    data: Path,
) -> None:
    """Write the script, with its values cut, and the files that it needs beside it."""
    words = [f"{original.path} > {original.there}", *original.files]
    for word in words:
        found, _, there = word.partition(" > ")
        place, _, path = found.rpartition(":")
        other, _, commit = place.partition("@")
        git_dir = git_directory(repositories, other or original.repository)
        object_name = f"{commit or original.commit}:{path}"
        shown = ["git", f"--git-dir={git_dir}", "show", object_name]
        text = subprocess.run(shown, check=True, capture_output=True).stdout.decode()
        cut = text
        for pattern, value in (*original.cuts, *common):
            cut = re.sub(pattern, value.replace("{data}", str(data)), cut, flags=re.MULTILINE)
        if (before := flags_of(text)) != (after := flags_of(cut)):
            sys.exit(f"{path}: the cuts change its flags from {before} to {after}")
        target = folder / (there or path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        target.write_text(cut)


def git_directory(repositories: Path, name: str) -> Path:
    return repositories / name.replace("/", "+") / "repo"


def flags_of(text: str) -> list[str]:
    return [flag for flag in re.findall(r"--[a-zA-Z][\w-]*", text) if flag not in NOT_THE_TRAINING]


def run(folder: Path, original: Original, data: Path) -> tuple[int | str, str]:
    """Return the script's status, and what it prints and logs."""
    place = folder / original.place
    command = original.command or f"bash {os.path.relpath(folder / original.there, place)}"
    path = [folder / "stand-ins", folder / "bin", Path(sys.executable).parent]
    environment = {
        "PATH": ":".join([*map(str, path), os.environ["PATH"]]),
        "HOME": str(folder),
        "DATA": str(data),
        "RANKS": str(original.ranks),
        "OMP_NUM_THREADS": "1",
        "LANG": "C.UTF-8",
        "HOSTNAME": "localhost",
    }
    wait_for_port(29500)
    begin = time.time()
    with (folder / "output.txt").open("w") as output:
        process = subprocess.Popen(
            ["bash", "-c", command],
            cwd=place,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status: int | str = process.wait(timeout=60 * original.minutes)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            status = f"none after {original.minutes} minutes"
    texts = [f"$ {command}\n{(folder / 'output.txt').read_text(errors='replace')}"]
    for log in sorted({*folder.rglob("*.log"), *folder.rglob("*.log_*")}):
        if log.stat().st_mtime >= begin:
            texts.append(f"== {log.relative_to(folder)}\n{log.read_text(errors='replace')}")
    text = "\n".join(texts).replace(str(folder), "COPY").replace(str(data), "DATA")
    return status, f"{text}\nstatus {status}\n"


def wait_for_port(port: int) -> None:
    """Wait up to two minutes until nobody else's run has the port that launchers begin with."""
    for _ in range(120):
        with socket.socket() as tried, contextlib.suppress(OSError):
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind(("", port))
            return
        time.sleep(1)


def assess(original: Original, status: int | str, output: str) -> tuple[str, str]:
    """Return works, partly, upstream (its own fault) or fails, and one line that says why."""
    found = re.search(original.expect, output)
    if status == 0 and found and not original.lacks:
        line = output[output.rfind("\n", 0, found.end() - 1) + 1 :].split("\n")[0]
        return "works", " ".join(line.split())[:160]
    if found and original.lacks:
        return "partly", original.lacks
    if original.fault:
        return "upstream", original.fault
    lines = output.splitlines()
    is_error = re.compile(r"(?i)error|no such|invalid").search
    at = next((i for i, line in enumerate(lines) if is_error(line)), len(lines) - 2)
    is_list = lines[at].rstrip().endswith(":")  # whose first item is in the next line
    reason = " ".join(" ".join(lines[at : at + 1 + is_list]).split())
    return "fails", f"status {status}: {reason[:300]}"


if __name__ == "__main__":
    sys.exit(main())
