"""The commands of Megatron-LM, on a CPU."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from foreign import assert_reads, read_tensors
from megatron_files import Form, plain, write

from blocks import block, covers
from documents import (
    ROOT,
    SMALLER,
    environment,
    shell,
    smaller,
    steps,
    words,
)
from fakes import put_first
from helpers import train_on_texts
from meshwright.compat.flags.argument_dump import dumped_arguments
from meshwright.compat.flags.megatron_flags import OLD_SWITCHES
from meshwright.compat.formats.megatron import reader as megatron
from meshwright.config import flags
from meshwright.config.schema import TrainConfig

pytestmark = [pytest.mark.whole, pytest.mark.timeout(180)]

COMPAT = ROOT / "compat/megatron-lm"
# Only the last step is saved, as there; the loss scale of fp16 falls during the first twelve steps.
SMALL = {"save_interval": 10000, "train_iters": 18, "eval_interval": 9}


def pretrain_345m(place: Path) -> str:
    """Return the document's script, smaller, with its /workspace in `place`."""
    script = block("megatron-lm/pretrain-345m").replace("=/workspace/", f"={place}/workspace/")
    return smaller(script, **SMALL)


def variables(workspace: Path) -> dict[str, str]:
    """Return the paths of the scripts of examples/."""
    return {
        "CHECKPOINT_PATH": f"{workspace}/model/megatron-models/345m",
        "VOCAB_FILE": f"{workspace}/model/gpt2-vocab/gpt2-vocab.json",
        "MERGE_FILE": f"{workspace}/model/gpt2-vocab/gpt2-merges.txt",
        "DATA_PATH": f"{workspace}/data/my-gpt2_text_document",
    }


def script(name: str, *argv: object) -> int | str | None:
    """Run a Python script of the folder in this process; return its status."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr(sys, "argv", [name, *map(str, argv)])
        patch.setattr(sys, "path", [*sys.path])
        runpy.run_path(str(COMPAT / name), run_name="__main__")
    return ended.value.code


def tree(folder: Path, depth: str = "") -> list[str]:
    """Return what `tree -h` prints, without sizes and its last line."""
    lines = [] if depth else [folder.name]
    entries = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    for path in entries:
        is_last = path == entries[-1]
        lines.append(f"{depth}{'└' if is_last else '├'}── []  {path.name}")
        if path.is_dir():
            lines += tree(path, depth + ("    " if is_last else "│   "))
    return lines


def listed(folder: Path) -> str:
    """Return the document's two commands on a folder of checkpoints, and what they print."""
    below = [path for path in folder.rglob("[!.]*")]
    count = f"{sum(path.is_dir() for path in below)} directories, {sum(path.is_file() for path in below)} files"
    tracker = f"{folder.name}/latest_checkpointed_iteration.txt"
    lines = [f"> tree -h {folder.name}", *tree(folder), count, f"> cat {tracker}"]
    return "\n".join([*lines, (folder.parent / tracker).read_text().strip()])


def without_sizes(text: str) -> str:
    """Return the text of a block with the last iteration of the test's run."""
    text = re.sub(r"\[ *[\d.]+[KMG]?\]", "[]", text).replace("0005000", "0000018")
    lines = [line.rstrip() for line in re.sub("^5000$", "18", text, flags=re.M).splitlines()]
    return "\n".join(line for line in lines if line)


# The log


# Arguments whose value is another one here, and why.
OTHER_VALUES = {
    "accumulate_allreduce_grads_in_fp32": "gradients are always accumulated in float32",
    "apply_query_key_layer_scaling": "scores are float32, so there is nothing to scale",
    "attention_softmax_in_fp32": "the softmax is always float32",
    "data_sharding": "samples are read in one order for any number of ranks",
    "distributed_backend": "this test runs on a CPU",
    "exit_signal_handler": "SIGTERM and SIGINT always save",
    "use_cpu_initialization": "weights are drawn on the CPU, for any layout",
}
# Lines of the document that are not ours to print.
ONLY_THERE = {
    r"CUDA_VISIBLE_DEVICES=3 sh examples/pretrain_gpt\.sh ": "the command",
    r"> compiling dataset index builder \.\.\.": "nothing is compiled",
    r"make: .*": "nothing is compiled",
    r">>> done with dataset index builder\. .*": "nothing is compiled",
    r"> compiling and loading fused kernels \.\.\.": "nothing is compiled",
    r"Detected CUDA files, patching ldflags": "nothing is compiled",
    r"Emitting ninja build file .*": "nothing is compiled",
    r"Building extension module .*": "nothing is compiled",
    r"Allowing ninja to set a default number of workers\.\.\. .*": "nothing is compiled",
    r"ninja: no work to do\.": "nothing is compiled",
    r"Loading extension module .*": "nothing is compiled",
    r">>> done with compiling and loading fused kernels\. .*": "nothing is compiled",
    r".*UserWarning: torch\.distributed\._all_gather_base is .*": "a warning of its torch",
    r"  warnings\.warn\(": "a warning of its torch",
}
# Lines of ours that the document lacks, beside arguments that it lacks.
ONLY_HERE = {
    r" > running the plain PyTorch block on cpu with .*": "the kernels in use",
    r" > ready to train after .*": "the seconds of the start",
    r" > nothing is left to train: step \d+ of \d+ is done": "why no step follows",
    r" > found step \d+ in .*: verified .*": "what the run goes on from",
    r" > goodput .*": "where its time went",
}


def compared(log: str, left_out: dict[str, str]) -> list[str]:
    """Return the lines of a log without numbers and hashes; each pattern must leave out one."""
    out, used = [], set()
    for line in log.splitlines():
        pattern = next((pattern for pattern in left_out if re.fullmatch(pattern, line)), None)
        used.add(pattern)
        argument = re.match(r"  (\w+) \.+ ", line)
        if argument and argument[1] in OTHER_VALUES:
            line = f"{argument[0]} another value"
        if pattern is None:
            line = re.sub(r"\b[0-9a-f]{32}_", "HASH_", line)
            out.append(re.sub(r" *(?<!\w)-?\d+(\.\d+)?([eE][+-]?\d+)?", " N", line))
    assert used >= set(left_out), set(left_out) - used
    return out


def own_arguments(log: str) -> dict[str, str]:
    """Return patterns of the lines for settings that the document's release lacks."""
    theirs = set(re.findall(r"^  (\w+) \.+ ", block("megatron-lm/run-and-log"), re.M))
    printed = set(re.findall(r"^  (\w+) \.+ ", log, re.M))
    older = {*OLD_SWITCHES, "deepspeed", "partition_activations", "universal_checkpoint"}
    ours = older | set(flags.to_dict(TrainConfig()))
    assert len(theirs) == 225 and theirs <= printed and printed - theirs <= ours
    return {rf"  {name} \.+ .*": "a setting of ours" for name in printed - theirs}


@pytest.fixture(scope="module")
def workspace(place: Path) -> Path:
    """Return the document's /workspace before its first step."""
    root = place / "workspace"
    for names, folder in (("my-gpt2_text_document.*", "data"), ("gpt2-*", "model/gpt2-vocab")):
        (root / folder).mkdir(parents=True)
        for path in place.glob(names):
            (root / folder / path.name).symlink_to(path.resolve())
    form = Form(
        ffn=128, vocab=320, padded=384, positions=32, version=None, words="2019", args=False
    )
    models = root / "model/megatron-models"
    write(models / "megatron/release", form, plain(form))
    (models / "megatron/latest_checkpointed_iteration.txt").write_text("release\n")
    return root


@covers(
    "megatron-lm/release-folder",
    "megatron-lm/pretrain-345m",
    "megatron-lm/run-and-log",
    "megatron-lm/saved-folder",
)
def test_the_document(place: Path, workspace: Path) -> None:
    """A release, finetuned by the document's script, stopped, resumed and finished; at last the
    script of examples/, whose log is the document's line for line.
    """
    models = workspace / "model/megatron-models"
    assert listed(models / "megatron") == without_sizes(block("megatron-lm/release-folder"))
    shutil.copytree(models / "megatron", models / "345m")

    typed = pretrain_345m(place)
    first = shell(COMPAT, typed.replace("--log-interval", "--exit-interval 2 --log-interval"))
    expected = [
        f" loading release checkpoint from {models}/345m",
        " checkpoint version 0",
        " succesfully fixed query-key-values ordering for checkpoint version 0",
        f"  successfully loaded checkpoint from {models}/345m at iteration 0",
    ]
    assert [line for line in first.splitlines() if line in expected] == expected
    assert re.search(
        r"^ iteration        2/      18 \| consumed samples:            4 \|", first, re.M
    )

    given = words(place, typed, "torchrun")
    assert script(*given) == 0
    rows = steps(models / "345m-output")
    assert len(rows) == 18 and not rows[-1][2]  # the last step was not skipped
    shutil.rmtree(models / "345m/iter_0000002")

    command, _ = block("megatron-lm/run-and-log").split("\n", 1)
    sizes = SMALLER | {name.replace("_", "-"): value for name, value in SMALL.items()}
    del sizes["lr-warmup-iters"]
    again = subprocess.run(
        ["sh", "-c", " ".join([command, *(f"--{name} {value}" for name, value in sizes.items())])],
        cwd=COMPAT,
        capture_output=True,
        text=True,
        env=environment() | variables(workspace),
    )
    assert again.returncode == 0, again.stderr
    ours = again.stdout.replace(str(workspace), "/workspace")
    # waits of a slow machine
    ours = re.sub(r"^ > (?!building dataset index)[a-z ,]+ \.\.\.\n", "", ours, flags=re.M)
    theirs = compared(block("megatron-lm/run-and-log"), ONLY_THERE)
    assert compared(ours, ONLY_HERE | own_arguments(ours)) == theirs
    assert listed(models / "345m") == without_sizes(block("megatron-lm/saved-folder"))


def test_values_of_arguments(tmp_path: Path) -> None:
    """The document's flags give its block of arguments, numbers included."""
    argv = words(tmp_path, block("megatron-lm/pretrain-345m"), "torchrun")[1:]
    parsed = flags.parse_settings(TrainConfig, argv, "train")
    ours = {
        name: str(value)
        for name, value in dumped_arguments(parsed.config, parsed.ignored, "nccl").items()
    }
    theirs = dict(re.findall(r"^  (\w+) \.+ (.*)$", block("megatron-lm/run-and-log"), re.M))
    other = {name for name, value in theirs.items() if ours[name] != value}
    assert len(theirs) == 225 and other == set(OTHER_VALUES) - {"distributed_backend"}


# The other scripts


def test_names_of_the_tree() -> None:
    """Scripts that are the root's are links to them, none is broken; a document names two."""
    assert (COMPAT / "tools/openwebtext/merge_data.py").is_file()
    assert "Nothing is to be edited" in (COMPAT / "megatron/tokenizer/file_utils.py").read_text()
    assert not [path for path in COMPAT.rglob("*") if path.is_symlink() and not path.exists()]
    for name in ("preprocess_data.py", "merge_datasets.py", "generate_samples_gpt.py"):
        assert (COMPAT / "tools" / name).resolve() == ROOT / "tools" / name
    assert script("pretrain_gpt2.py", "--batch-size", "4") == 2
    assert (COMPAT / (COMPAT / "requirements.txt").read_text().strip()).resolve() == ROOT


def test_checkpoint_util(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Cut a checkpoint for 2 x 2 ranks with its optimizer; make a release one of a vocabulary."""
    form = Form(state="masters")
    write(tmp_path / "a/iter_0000007", form, *(plain(form, seed) for seed in (1, 2, 3)))
    (tmp_path / "a/latest_checkpointed_iteration.txt").write_text("7")
    both = [
        "--model-type",
        "GPT",
        "--loader",
        "megatron",
        "--saver",
        "megatron",
        "--max-queue-size",
        50,
    ]
    cut = [
        "--target-tensor-parallel-size",
        2,
        "--target-pipeline-parallel-size",
        2,
        "--no-checking",
    ]
    util = "tools/checkpoint_util.py"
    assert (
        script(util, *both, "--load-dir", tmp_path / "a", "--save-dir", tmp_path / "b", *cut) == 0
    )
    before = megatron.open_megatron(tmp_path / "a/iter_0000007").of_vocabulary(form.vocab)
    cut_step = tmp_path / "b/iter_0000007"
    assert_reads(megatron.open_megatron(cut_step), read_tensors(before))
    ranks = sorted(path.name for path in cut_step.glob("mp_*"))
    assert ranks == [f"mp_rank_0{t}_00{p}" for t in (0, 1) for p in (0, 1)]

    release = Form(version=None, words="2019", args=False)
    write(tmp_path / "r/release", release, plain(release))
    (tmp_path / "r/latest_checkpointed_iteration.txt").write_text("release")
    vocab = tmp_path / "vocab.json"
    vocab.write_text(json.dumps({str(n): n for n in range(61)}))
    given = [
        *both,
        "--load-dir",
        tmp_path / "r",
        "--save-dir",
        tmp_path / "d",
        "--vocab-file",
        tmp_path / "vocab.json",
    ]
    assert (
        script("tools/checkpoint/util.py", *given) == 65
        and "--num-attention-heads" in capsys.readouterr().err
    )
    assert script(util, *given, "--num-attention-heads", 4) == 0
    assert megatron.open_megatron(tmp_path / "d/iter_0000001").vocab == 61

    assert script(util, *both, "--load-dir", tmp_path / "none", "--save-dir", tmp_path / "e") == 65
    assert script(util, "--model-type", "BERT") == 2 and "choose from" in capsys.readouterr().err


def test_evaluation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """tasks/main.py with Megatron-LM's own arguments, on a model of another layout's checkpoint."""
    texts = ["one fox jumps over two dogs and three cats"] * 20
    flags = "--num-layers=1 --hidden-size=16 --num-attention-heads=2 --seq-length=16 --micro-batch-size=2 --lr=1e-2"
    more = "--max-position-embeddings=16 --train-iters=2"
    run = train_on_texts(
        tmp_path, texts, ["--tokenizer-type=ByteTokenizer"], [*flags.split(), *more.split()]
    )
    (tmp_path / "wiki.test.tokens").write_text(" one fox , over two dogs . \n" * 3)
    (tmp_path / "lambada_test.jsonl").write_text('{"text": "one fox jumps over two dogs"}\n')
    model = "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16"
    common = f"--batch-size 8 --checkpoint-activations --log-interval 10 --no-load-optim --no-load-rng {model}"
    for task, file, load in (
        ("WIKITEXT103", "wiki.test.tokens", "--load"),
        (
            "LAMBADA --strict-lambada",
            "lambada_test.jsonl",
            "--keep-last --epochs 0 --pretrained-checkpoint",
        ),
    ):
        words = f"--task {task} --valid-data {tmp_path / file} {load} {run} {common} --device cpu"
        assert script("tasks/main.py", *words.split()) == 0
        shown = capsys.readouterr().out
        assert f" validation results on {task.split()[0]} | " in shown and shown.endswith(
            "done :-)\n"
        )
    assert script("tasks/main.py", "--task", "RACE", "--load", run) == 2
    assert "--task: 'RACE' is none of LAMBADA, WIKITEXT103" in capsys.readouterr().err


def launched(workspace: Path, name: str, *argv: str, **env: str) -> tuple[list[str], TrainConfig]:
    """Return what a script of examples/ gives the launcher, and the settings for the training."""
    fake = workspace / "bin/python3"
    fake.parent.mkdir(exist_ok=True)
    fake.write_text("#!/bin/sh\nprintf '%s\\0' \"$@\"\n")
    fake.chmod(0o755)
    before = {
        name: value for name, value in environment().items() if name != "CUDA_VISIBLE_DEVICES"
    }
    path = {"PATH": f"{fake.parent}:{before['PATH']}"}
    done = subprocess.run(
        ["sh", f"examples/{name}", *argv],
        cwd=COMPAT,
        capture_output=True,
        text=True,
        env=before | path | env,
    )
    assert done.returncode == 0, done.stderr
    given = done.stdout.split("\0")[:-1]
    at = next(n for n, word in enumerate(given) if word.endswith("pretrain_gpt.py"))
    assert (COMPAT / given[at]).resolve() == COMPAT / "pretrain_gpt.py"
    nodes = int(given[given.index("--nnodes") + 1]) if "--nnodes" in given else 1
    world = nodes * int(given[given.index("--nproc_per_node") + 1])
    return given[:at], flags.parse_settings(
        TrainConfig, [*given[at + 1 :], f"--world-size={world}"], "train"
    ).config


def test_scripts_of_examples(workspace: Path) -> None:
    paths = variables(workspace)
    for devices, count in (("3", 1), ("0,1", 2), ("", 1)):
        _, config = launched(workspace, "pretrain_gpt.sh", **paths, CUDA_VISIBLE_DEVICES=devices)
        assert config.world == count
    _, config = launched(workspace, "pretrain_gpt.sh", "--train-iters", "7")
    assert (
        config.training.train_iters == 7
        and config.checkpoint.load == "/workspace/model/megatron-models/345m"
    )

    first, config = launched(
        workspace, "pretrain_gpt_distributed.sh", **paths, NNODES="2", NODE_RANK="1"
    )
    assert first[first.index("--node_rank") + 1] == "1"
    assert (config.world, config.micro_batch, config.global_batch, config.steps) == (
        16,
        8,
        64,
        500000,
    )
    _, config = launched(workspace, "pretrain_gpt_distributed_with_mp.sh", **paths)
    p = config.parallel
    assert (p.tensor_model_parallel_size, p.pipeline_model_parallel_size, p.sequence_parallel) == (
        2,
        2,
        True,
    )
    assert (config.dp, config.micro_batch, config.global_batch) == (2, 4, 16)

    missing = subprocess.run(
        ["sh", "examples/pretrain_gpt_distributed.sh"],
        cwd=COMPAT,
        capture_output=True,
        text=True,
        env=environment(),
    )
    assert missing.returncode and "set CHECKPOINT_PATH to the folder" in missing.stderr


def test_the_shorter_way_of_the_page(tmp_path: Path) -> None:
    """The page's command has the settings of the script, but for files and their names."""
    page = (ROOT / "docs/from-megatron.md").read_text()
    found = re.search(r"^meshwright train (.*?)\nmeshwright generate", page, re.S | re.M)
    assert found
    shorter = shlex.split(found[1].replace("\\\n", " "))
    given = words(tmp_path, block("megatron-lm/pretrain-345m"), "torchrun")[1:]
    one, other = (
        flags.to_dict(flags.parse_settings(TrainConfig, argv, "train").config)
        for argv in (shorter, given)
    )
    files = {"data_path", "vocab_file", "merge_file", "save", "load"}
    assert {name for name in one if one[name] != other[name]} == files


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_way_of_the_page(place: Path, tmp_path: Path) -> None:
    """The page's commands from text to a sample, in a clone, with its small model."""
    clone, files = tmp_path / "clone", tmp_path / "files"
    shutil.copytree(COMPAT, clone / "compat/megatron-lm", symlinks=True)
    for name in ("src", "tools", "pretrain_gpt.py"):
        (clone / name).symlink_to(ROOT / name)
    files.mkdir()
    for name in ("gpt2-vocab.json", "gpt2-merges.txt"):
        shutil.copy(place / name, files)
    shutil.copy(place / "oscar-1GB.jsonl", clone / "compat/megatron-lm/corpus.jsonl")
    page = (ROOT / "docs/from-megatron.md").read_text()
    way, small, *_ = re.findall(r"^```bash\n(.*?)^```", page, re.S | re.M)
    way = re.sub(r"^git clone.*\n", "", way).replace(
        "CUDA_VISIBLE_DEVICES=0 sh examples/pretrain_gpt.sh\n", small
    )
    out = shell(
        clone / "compat/megatron-lm", "set -e\n" + put_first(tmp_path / "fakes", files) + way
    )
    samples = [json.loads(line)["text"] for line in out.splitlines() if line.startswith('{"text"')]
    assert len(samples) == 3 and all("Document" in text or "lazy dog" in text for text in samples)
    assert (tmp_path / "fakes/calls").read_text().count("wget") == 2
    assert re.search(r"^ iteration +200/ +200 \|", out, re.M)
