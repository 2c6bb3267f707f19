"""The documents' commands of several ranks, word for word: only sizes, paths, addresses and ports
are made smaller.

Each must train to its end, with the losses that one process has for the same model and batches.
Where a document's launcher is not installed here, or the same one has been started before, ranks
are started by the variables that it sets.
"""

from __future__ import annotations

import contextlib
import json
import math
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from documents import CONFIG_003, SEED_001, SEED_003, SEED_004, end, environment, fill, shell, smaller, words
from meshwright.__main__ import main
from ranks import run_programs
from test_documents import MEGATRON_345M, PREPROCESS

pytestmark = [pytest.mark.whole, pytest.mark.timeout(180)]

ROUNDING = 1e-2  # fp16
SCRIPT = "pretrain_gpt.py"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = fill(tmp_path_factory.mktemp("documents"))
    shell(folder, PREPROCESS["OneFlow-GPT"])
    (folder / "data").mkdir()
    for ending in ("bin", "idx"):
        made = folder / f"gpt_sample_dataset_text_document.{ending}"
        for other in ("data/meg-gpt2_text_document", "data/my-gpt_text_sentence", "my-gpt2_text_document"):
            (folder / f"{other}.{ending}").symlink_to(made)
    for name in ("gpt2-vocab.json", "gpt2-merges.txt"):
        (folder / "data" / name).symlink_to(folder / name)
    return folder


Step = tuple[float, float, bool]  # loss, gradient norm, skipped


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("", 0))
        return int(s.getsockname()[1])


def steps(folder: Path) -> list[Step]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(float(r["loss"]), float(r["grad_norm"]), r["skipped"]) for r in rows if r["event"] == "step"]


def with_values(flags: list[str], **values: object) -> list[str]:
    """These flags, with other values where they are there."""
    known = {"--" + name.replace("_", "-"): str(value) for name, value in values.items()}
    return [known.get(before, word) for before, word in zip(["", *flags], flags, strict=False)]


def as_one_process(place: Path, flags: list[str], monkeypatch: pytest.MonkeyPatch) -> list[Step]:
    """The steps of the same command without ranks."""
    monkeypatch.chdir(place)
    folder = f"single-{len(list(place.iterdir()))}"
    one = dict.fromkeys(("tensor_model_parallel_size", "pipeline_model_parallel_size", "num_gpus_per_node"), 1)
    assert main(["train", *with_values(flags, save=folder, load=folder, tensorboard_dir=folder, **one)]) == 0
    return steps(place / folder)


def assert_same(ours: list[Step], single: list[Step], within: float) -> None:
    assert len(ours) == len(single) > 0 and not all(skipped for _, _, skipped in ours)
    for (loss, norm, skipped), (loss_1, norm_1, skipped_1) in zip(ours, single, strict=True):
        assert math.isfinite(loss) and loss == pytest.approx(loss_1, rel=within) and skipped == skipped_1
        assert skipped or norm == pytest.approx(norm_1, rel=within)


@contextlib.contextmanager
def started(place: Path, *scripts: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Side by side; what is left of them at the end is killed."""
    processes = []
    with contextlib.ExitStack() as held:
        for n, script in enumerate(scripts):
            log = held.enter_context((place / f"log-{n}").open("w"))
            processes.append(
                subprocess.Popen(
                    ["bash", "-c", script, "script.sh", str(n)],
                    cwd=place,
                    text=True,
                    stdout=log,
                    stderr=log,
                    env=environment(),
                    start_new_session=True,
                )
            )
        try:
            yield processes
        finally:
            end(processes)


def run(place: Path, *scripts: str) -> list[str]:
    """All to their ends, which must be good; $1 is a script's number."""
    with started(place, *scripts) as processes:
        ends = [process.wait() for process in processes]
    logs = [(place / f"log-{n}").read_text() for n in range(len(scripts))]
    assert ends == [0] * len(scripts), "\n".join(log[-3000:] for log in logs)
    return logs


def by_deepspeed(place: Path, nodes: list[list[str]], each: int) -> tuple[list[int], list[str]]:
    """As the deepspeed launcher starts `each` ranks on each node with that node's flags."""
    port = str(free_port())
    environ, argv = [], []
    for node, flags in enumerate(nodes):
        for local in range(each):
            environ.append(
                {
                    "RANK": str(node * each + local),
                    "LOCAL_RANK": str(local),
                    "WORLD_SIZE": str(len(nodes) * each),
                    "LOCAL_SIZE": str(each),
                    "CROSS_RANK": str(node),
                    "CROSS_SIZE": str(len(nodes)),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": port,
                }
            )
            argv.append([f"--local_rank={local}", *flags])
    return run_programs(place / SCRIPT, argv, environ, place)


SEED_000 = """
GPUS_PER_NODE=8
# Change for multinode config
MASTER_ADDR=localhost
MASTER_PORT=6000
NNODES=1
NODE_RANK=0
WORLD_SIZE=$(($GPUS_PER_NODE*$NNODES))

DATA_PATH=data/meg-gpt2_text_document
CHECKPOINT_PATH=checkpoints/gpt2

DISTRIBUTED_ARGS="--nproc_per_node $GPUS_PER_NODE --nnodes $NNODES --node_rank $NODE_RANK --master_addr $MASTER_ADDR --master_port $MASTER_PORT"

python -m torch.distributed.launch $DISTRIBUTED_ARGS \\
       pretrain_gpt.py \\
       --tensor-model-parallel-size 2 \\
       --pipeline-model-parallel-size 2 \\
       --num-layers 24 \\
       --hidden-size 1024 \\
       --num-attention-heads 16 \\
       --micro-batch-size 8 \\
       --global-batch-size 16 \\
       --seq-length 1024 \\
       --max-position-embeddings 1024 \\
       --train-iters 5000 \\
       --lr-decay-iters 320000 \\
       --save $CHECKPOINT_PATH \\
       --load $CHECKPOINT_PATH \\
       --data-path $DATA_PATH \\
       --vocab-file data/gpt2-vocab.json \\
       --merge-file data/gpt2-merges.txt \\
       --data-impl mmap \\
       --split 949,50,1 \\
       --distributed-backend nccl \\
       --lr 0.00015 \\
       --lr-decay-style cosine \\
       --min-lr 1.0e-5 \\
       --weight-decay 1e-2 \\
       --clip-grad 1.0 \\
       --lr-warmup-fraction .01 \\
       --checkpoint-activations \\
       --log-interval 10 \\
       --save-interval 500 \\
       --eval-interval 100 \\
       --eval-iters 10 \\
       --fp16
"""  # noqa: E501


def seed_000(two_nodes: bool) -> str:
    """The document's script with GPUS_PER_NODE of one replica."""
    script = SEED_000.replace("GPUS_PER_NODE=8", "GPUS_PER_NODE=4").replace("PORT=6000", f"PORT={free_port()}")
    if two_nodes:
        script = script.replace("NNODES=1", "NNODES=2").replace("NODE_RANK=0", "NODE_RANK=$1")
        script = script.replace("MASTER_ADDR=localhost", "MASTER_ADDR=127.0.0.1")
        script = script.replace("pipeline-model-parallel-size 2", "pipeline-model-parallel-size 4")
        script = script.replace("checkpoints/gpt2", "checkpoints/two-nodes")
    return smaller(script, num_layers=4, micro_batch_size=2, global_batch_size=4, train_iters=18, eval_interval=9)


def flags_of(place: Path, script: str) -> list[str]:
    given = words(place, script, "python")
    return given[given.index(SCRIPT) + 1 :]


GENERATE_000 = """
CHECKPOINT_PATH=checkpoints/gpt2
VOCAB_FILE=data/gpt2-vocab.json
MERGE_FILE=data/gpt2-merges.txt

python tools/generate_samples_gpt.py \\
       --tensor-model-parallel-size 1 \\
       --num-layers 24 \\
       --hidden-size 1024 \\
       --load $CHECKPOINT_PATH \\
       --num-attention-heads 16 \\
       --max-position-embeddings 1024 \\
       --tokenizer-type GPT2BPETokenizer \\
       --fp16 \\
       --micro-batch-size 2 \\
       --seq-length 1024 \\
       --out-seq-length 1024 \\
       --temperature 1.0 \\
       --vocab-file $VOCAB_FILE \\
       --merge-file $MERGE_FILE \\
       --genfile unconditional_samples.json \\
       --num-samples 2 \\
       --top_p 0.9 \\
       --recompute
"""


@pytest.mark.long  # real launchers, whose ranks import torch one by one
def test_seed_000_on_one_node_and_its_samples(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TP2 x PP2 under torch.distributed.launch; TP1 writes samples from the checkpoint, which
    nobody converted.
    """
    script = seed_000(two_nodes=False)
    (log,) = run(place, script)
    assert "data-parallel-size: 1, tensor-model-parallel size: 2, pipeline-model-parallel size: 2" in log
    assert log.count("--distributed-backend nccl has no effect") == 1
    single = as_one_process(place, flags_of(place, script), monkeypatch)
    assert_same(steps(place / "checkpoints/gpt2"), single, ROUNDING)

    shell(place, smaller(GENERATE_000, num_layers=4))
    samples = (place / "unconditional_samples.json").read_text().splitlines()
    assert len(samples) == 2 and all("text" in json.loads(line) for line in samples)


@pytest.mark.long  # real launchers, whose ranks import torch one by one
def test_seed_000_on_two_nodes(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TP2 x PP4 on eight ranks of two launchers, which are told their numbers; the second node is
    silent.
    """
    script = seed_000(two_nodes=True)
    logs = run(place, script, script)
    assert "tensor-model-parallel size: 2, pipeline-model-parallel size: 4" in logs[0] and " iteration " not in logs[1]
    single = as_one_process(place, flags_of(place, script), monkeypatch)
    assert_same(steps(place / "checkpoints/two-nodes"), single, ROUNDING)


def test_seed_000_exactly(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its eight ranks of one node, so with two replicas, and without the rounding of fp16."""
    flags = flags_of(place, seed_000(two_nodes=False).replace("--fp16", "--params-dtype float64"))
    flags = with_values(flags, train_iters=6, save="checkpoints/exact", load="checkpoints/exact")
    ends, logs = by_deepspeed(place, [flags], 8)
    assert ends == [0] * 8, "\n".join(logs)
    assert "data-parallel-size: 2" in logs[0]
    assert_same(steps(place / "checkpoints/exact"), as_one_process(place, flags, monkeypatch), 1e-9)


# args_deepspeed_gpt.sh 2 8 RANK ADDR 2 4 true true 32 512 writes this file and passes these flags.


def seed_003(place: Path, micro: int, batch: int) -> list[str]:
    file = place / f"ds_config-{batch}.json"
    file.write_text(CONFIG_003.replace("$MICRO", str(micro)).replace("$GLOBAL", str(batch)))
    text = SEED_003.format(micro=micro, batch=batch).replace("./ds_config.json", file.name)
    text = smaller(text, num_layers=4).replace("checkpoints/gpt2", "checkpoints/003")
    return [*text.split(), "--fp16", "--checkpoint-activations"]


def test_seed_003(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TP2 x PP4 on two nodes, ZeRO 1 and fp16 by the JSON file, everything recomputed."""
    flags = seed_003(place, 2, 8)
    ends, logs = by_deepspeed(place, [flags, flags], 4)
    assert ends == [0] * 8, "\n".join(logs)
    assert "loss scale: 4096.0" in logs[0]
    assert_same(steps(place / "checkpoints/003"), as_one_process(place, flags, monkeypatch), ROUNDING)


def test_seed_003_with_its_two_batch_sizes(place: Path) -> None:
    """The document starts its second node with twice the batch: refused on all ranks, by name, not
    trained or hung on.
    """
    ends, logs = by_deepspeed(place, [seed_003(place, 2, 8), seed_003(place, 2, 16)], 4)
    assert ends == [2] * 8
    told = "global_batch_size: 8 on ranks 0-3, 16 on ranks 4-7"
    assert [told in log for log in logs] == [True, False, False, False] * 2  # on each node once


@pytest.mark.parametrize(
    ("name", "tp", "pp", "heads", "micro", "batch", "scale"),
    [
        ("345m", 1, 2, 16, 1, 2, 0),
        ("1.3b", 2, 2, 16, 2, 4, 0),
        ("2.7b", 2, 2, 32, 2, 4, 0),
        ("3.7b", 2, 2, 32, 1, 2, 0),
        ("345m-without-mp", 1, 1, 16, 2, 8, 65536),
    ],
)
def test_seed_001(
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    tp: int,
    pp: int,
    heads: int,
    micro: int,
    batch: int,
    scale: int,
) -> None:
    """Its five sizes on half its devices: their heads and parallel sizes, micro-batches a step,
    recomputing, loss scales.
    """
    file = {
        "train_batch_size": batch,
        "train_micro_batch_size_per_gpu": micro,
        "steps_per_print": 1,
        "zero_optimization": {"stage": 0},
        "gradient_clipping": 1.0,
        "prescale_gradients": True,
        "fp16": {
            "enabled": True,
            "loss_scale": scale,
            "loss_scale_window": 500,
            "hysteresis": 2,
            "min_loss_scale": 1,
            "initial_scale_power": 12,
        },
        "wall_clock_breakdown": False,
    }
    (place / "ds_config.json").write_text(json.dumps(file))
    text = SEED_001.format(tp=tp, pp=pp, layers=4, hidden=64, heads=heads, seq=32, micro=micro, batch=batch)
    text = smaller(text, num_attention_heads=heads, hidden_size=64, num_layers=4, log_interval=1)
    if scale:
        text = text.replace("--deepspeed-activation-checkpointing", "")
    flags = [f"--preset=ascend-{name}", *text.replace("ckpts/ckpts_tmp", f"ckpts/{name}").split()]
    ends, logs = by_deepspeed(place, [flags], 4)
    assert ends == [0] * 4, "\n".join(logs)
    assert f"tensor-model-parallel size: {tp}, pipeline-model-parallel size: {pp}" in logs[0]
    assert f"loss scale: {scale or 4096}.0" in logs[0]
    assert_same(steps(place / "ckpts" / name), as_one_process(place, flags, monkeypatch), ROUNDING)


def test_seed_002_on_two_ranks(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its torchrun command, given two GPUs: both samples of a batch at once."""
    ranks = f"torchrun --nproc_per_node 2 --master_port {free_port()} "
    script = smaller(MEGATRON_345M, train_iters=18, eval_interval=9).replace("torchrun ", ranks)
    (log,) = run(place, script)
    assert "using world size: 2, data-parallel-size: 2" in log
    given = words(place, script, "torchrun")
    single = as_one_process(place, given[given.index(SCRIPT) + 1 :], monkeypatch)
    assert_same(steps(place / "model/megatron-models/345m"), single, ROUNDING)


@pytest.mark.long  # real launchers, whose ranks import torch one by one
def test_seed_004_starts_its_own_ranks(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data and tensor parallelism on one node, as examples/pretrain_1n8d_2x4x1_16_1536x16.sh, by
    OneFlow's flags alone.
    """
    sizes = {"tensor_model_parallel_size": 2, "num_gpus_per_node": 4, "micro_batch_size": 2, "global_batch_size": 8}
    flags = with_values(smaller(SEED_004, train_iters=18, vocab_size=320).split() + ["--eval-iters", "1"], **sizes)
    (log,) = run(place, f"python {SCRIPT} {' '.join(flags)}")
    assert "data-parallel-size: 2, tensor-model-parallel size: 2" in log
    assert_same(steps(place / "checkpoint"), as_one_process(place, flags, monkeypatch), ROUNDING)
