"""The commands of the documents people follow today, run word for word; only sizes are made
smaller.

Those of several ranks are in test_documents_ranks.py.
"""

from __future__ import annotations

import io
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from documents import ROOT, SMALLER, fill, shell, smaller
from meshwright.__main__ import main

pytestmark = [pytest.mark.whole, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fill(tmp_path_factory.mktemp("documents"))


PREPROCESS = {
    "Megatron-DeepSpeed": """python3 tools/preprocess_data.py \\
    --input oscar-1GB.jsonl \\
    --output-prefix meg-gpt2 \\
    --vocab gpt2-vocab.json \\
    --dataset-impl mmap \\
    --tokenizer-type GPT2BPETokenizer \\
    --merge-file gpt2-merges.txt \\
    --append-eod \\
    --workers 8""",
    "benchmarks": """python tools/preprocess_data.py \\
    --input oscar-1GB.jsonl \\
    --output-prefix my-gpt2 \\
    --vocab gpt2-vocab.json \\
    --dataset-impl mmap \\
    --tokenizer-type GPT2BPETokenizer \\
    --merge-file gpt2-merges.txt \\
    --append-eod \\
    --workers 8""",
    "OneFlow-GPT": """python3 tools/preprocess_data.py \\
       --input my-corpus.json \\
       --output-prefix gpt_sample_dataset \\
       --vocab gpt2-vocab.json \\
       --dataset-impl mmap \\
       --tokenizer-type GPT2BPETokenizer \\
       --merge-file gpt2-merges.txt \\
       --append-eod""",
}


@pytest.mark.parametrize("name", PREPROCESS)
def test_preprocess_commands(place: Path, name: str) -> None:
    out = shell(place, PREPROCESS[name])
    prefix = re.search(r"--output-prefix (\S+)", PREPROCESS[name])[1]  # type: ignore[index]
    assert "Processed 60 documents" in out
    assert (place / f"{prefix}_text_document.bin").stat().st_size > 0
    assert (place / f"{prefix}_text_document.idx").stat().st_size == 34 + 60 * 12 + 61 * 8


MEGATRON_345M = """
export CUDA_DEVICE_MAX_CONNECTIONS=1

CHECKPOINT_PATH=model/megatron-models/345m
VOCAB_FILE=gpt2-vocab.json
MERGE_FILE=gpt2-merges.txt
DATA_PATH=my-gpt2_text_document
MODEL_PATH=model/megatron-models/output

GPT_ARGS="
    --num-layers 24 \\
    --hidden-size 1024 \\
    --num-attention-heads 16 \\
    --seq-length 1024 \\
    --max-position-embeddings 1024 \\
    --micro-batch-size 1 \\
    --global-batch-size 2 \\
    --lr 0.00015 \\
    --train-iters 5000 \\
    --lr-decay-iters 320000 \\
    --lr-decay-style cosine \\
    --min-lr 1.0e-5 \\
    --weight-decay 1e-2 \\
    --lr-warmup-fraction .01 \\
    --clip-grad 1.0 \\
    --fp16
"

DATA_ARGS="
    --data-path $DATA_PATH \\
    --vocab-file $VOCAB_FILE \\
    --merge-file $MERGE_FILE \\
    --data-impl mmap \\
    --split 700,200,100
"

OUTPUT_ARGS="
    --log-interval 100 \\
    --save-interval 10000 \\
    --eval-interval 1000 \\
    --eval-iters 10
"

torchrun pretrain_gpt.py \\
    $GPT_ARGS \\
    $DATA_ARGS \\
    $OUTPUT_ARGS \\
    --save $CHECKPOINT_PATH \\
    --load $CHECKPOINT_PATH
"""


def test_megatron_345m_under_torchrun(place: Path) -> None:
    """From an empty folder, then once more from its own checkpoint, with the document's log lines
    in its order.
    """
    shell(place, PREPROCESS["benchmarks"])
    first = shell(place, smaller(MEGATRON_345M))
    assert "WARNING: could not find the metadata file" in first
    assert re.search(r" iteration +6/ +6 \| consumed samples: +12 \|.*loss scale: \d+\.0 \|", first)
    again = "\n" + shell(place, smaller(MEGATRON_345M))
    order = [
        "using world size: 1, data-parallel-size: 1, tensor-model-parallel size: 1, pipeline-model-parallel size: 1",
        "using torch.float16 for parameters ...",
        "------------------------ arguments ------------------------",
        "-------------------- end of arguments ---------------------",
        "setting number of micro-batches to constant 2",
        "> building GPT2BPETokenizer tokenizer ...",
        " > padded vocab (size: 320) with 64 dummy tokens (new size: 384)",
        "> initializing torch distributed ...",
        "> initialized tensor model parallel with size 1",
        "> initialized pipeline model parallel with size 1",
        "> setting random seeds to 1234 ...",
        "time to initialize megatron (seconds):",
        "[after megatron is initialized] datetime:",
        "building GPT model ...",
        " > number of parameters on (tensor, pipeline) model parallel rank (0, 0):",
        "> learning rate decay style: cosine",
        " loading checkpoint from model/megatron-models/345m at iteration 6",
        " checkpoint version 3.0",
        " > using checkpoint value 0.00015 for learning rate",
        " > using checkpoint value 1e-05 for minimum learning rate",
        " > using checkpoint value 0.8 for warmup iterations",
        " > using checkpoint value 80 for total number of iterations",
        " > using checkpoint value cosine for learning rate decay style",
        " > using checkpoint value 0.01 for start weight decay",
        " > using checkpoint value 0.01 for end weight decay",
        " > using checkpoint value 12 for total number of weight decay iterations",
        " > using checkpoint value constant for weight decay incr style",
        "  successfully loaded checkpoint from model/megatron-models/345m at iteration 6",
        "    load-checkpoint ................................: (",
        "[after model, optimizer, and learning rate scheduler are built] datetime:",
        "> building train, validation, and test datasets ...",
        " > datasets target sizes (minimum size):",
        "    train:      12",
        "    validation: 6",
        "    test:       2",
        "> building train, validation, and test datasets for GPT ...",
        "Single data path provided for train, valid & test",
        "data_prefix: ['my-gpt2_text_document']",
        " > building dataset index ...",
        "    reading sizes...",
        "    reading pointers...",
        "    reading document index...",
        "    creating numpy buffer of mmap...",
        "    creating memory view of numpy buffer...",
        " > finished creating indexed dataset in",
        "    number of documents: 60",
        " > dataset split:",
        "    train:",
        "     document indices in [0, 42) total of 42 documents",
        "    validation:",
        "     document indices in [42, 54) total of 12 documents",
        "    test:",
        "     document indices in [54, 60) total of 6 documents",
        " > loading doc-idx mapping from",
        " > loading sample-idx mapping from",
        " > loading shuffle-idx mapping from",
        "    total number of samples:",
        "    total number of epochs: 1",
        "> finished creating GPT datasets ...",
        "[after dataloaders are built] datetime:",
        "done with setup ...",
        "(min, max) time across ranks (ms):",
        "    model-and-optimizer-setup ......................: (",
        "    train/valid/test-data-iterators-setup ..........: (",
        "training ...",
        "[before the start of training step] datetime:",
        "[after training is done] datetime:",
        " validation loss at the end of training for val data | lm loss value:",
        "saving checkpoint at iteration       6 to model/megatron-models/345m",
        "  successfully saved checkpoint at iteration       6 to model/megatron-models/345m",
        " validation loss at the end of training for test data | lm loss value:",
    ]
    at = 0
    for line in order:
        found = again.find("\n" + line, at)
        assert found >= 0, f"{line!r} is missing after:\n{again[max(0, at - 200) : at + 600]}"
        at = found + 1
    assert " iteration        " not in again  # no step was left


def documented(name: str) -> list[str]:
    """Return the commands of a README's bash blocks, each as one line."""
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / name).read_text(encoding="utf-8"), re.S)
    return [line for block in blocks for line in re.sub(r" *\\\n *", " ", block).splitlines() if line.strip()]


def test_both_readmes_have_the_same_commands() -> None:
    assert documented("README.md") == documented("README.zh.md") and len(documented("README.md")) >= 10


@pytest.mark.pictures
def test_readme_commands(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Run the README's commands except `make` in order, and its Python."""
    home = place / "readme"
    home.mkdir()
    monkeypatch.chdir(home)
    for name in ("pretrain_gpt.py", "tools", "src", "gpt2-vocab.json", "gpt2-merges.txt"):
        (home / name).symlink_to(place / name)
    (home / "corpus.jsonl").symlink_to(place / "oscar-1GB.jsonl")
    (home / "my-texts").mkdir()
    for n in range(30):
        (home / "my-texts" / f"{n}.md").write_text(f"Document {n}. The quick brown fox jumps over {n * n} dogs.\n" * 9)
    (home / "held-out.txt").write_text("The quick brown fox. " * 20)
    for line in documented("README.md"):
        line = line.replace("--tokenizer gpt2 ", "--tokenizer gpt2-vocab.json ")  # without a network
        words = shlex.split(line)
        if words[0] == "make":
            continue
        if "--preset" in words:  # later flags win over the preset's
            chosen = {k: v for k, v in SMALLER.items() if k != "save-interval" or "--save" in words}
            line += " " + " ".join(f"--{k} {v}" for k, v in chosen.items())
            line += " --micro-batch-size 2 --global-batch-size 4"
        if words[:2] == ["meshwright", "launch"] or words[0] != "meshwright":
            out = shell(home, smaller(line))
        else:  # in this process, which has imported torch already
            monkeypatch.setattr("sys.stdin", io.StringIO("The quick\nstop\n"))
            assert main(shlex.split(smaller(line))[1:]) == 0, line
            out = capsys.readouterr().out
        if "generate" in words:
            assert "The" in out
    assert (home / "gpt2-345m" / "report.html").exists() and (home / "output" / "iter_0000006").is_dir()
    assert (home / "plain" / "compare.html").exists()
    exec(re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S)[0], {})
    assert float(capsys.readouterr().out.split()[-1]) > 0  # bits per byte


def test_make_targets_exist() -> None:
    """`make demo` and `make test` themselves run in `make test-long`, in a fresh clone."""
    for target, what in (("demo", "meshwright demo"), ("test", "pytest")):
        done = subprocess.run(["make", "-n", "-C", ROOT, target], capture_output=True, text=True, check=True)
        assert what in done.stdout
