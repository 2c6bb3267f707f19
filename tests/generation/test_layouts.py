"""Evaluation and generation on several ranks: the numbers and the text of one process."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import torch

from helpers import train_on_texts
from meshwright.__main__ import main
from meshwright.apps.evaluate.command import EvaluateConfig
from meshwright.apps.evaluate.perplexity import score_texts
from meshwright.config import flags
from meshwright.config.schema import GenerateConfig, Sampling, TokenizerFlags
from meshwright.generation import beam, decoder, language_model, ranks
from meshwright.generation.requests import Request
from on_ranks import make_team, run_ranks

LENGTH = 32
TEXTS = ["the cat sat on the mat. ", "a dog ran. " * 9, "ein Bär.", "x"]
SHAPES = {
    "gpt2": "",
    "llama": "--num-query-groups=2 --position-embedding-type=rope --swiglu --untie-embeddings-and-output-weights "
    "--normalization=RMSNorm --disable-bias-linear",
    "alibi": "--position-embedding-type=alibi --final-logit-softcapping=4",
    "window": "--position-embedding-type=rope --window-size=5,0 --window-attn-skip-freq=2",
}
LAYOUTS = {
    2: [
        "--tensor-model-parallel-size=2",
        "--pipeline-model-parallel-size=2",
        "--context-parallel-size=2",
    ],
    4: [
        "--tensor-model-parallel-size=2 --pipeline-model-parallel-size=2",
        "--tensor-model-parallel-size=2",
        "--pipeline-model-parallel-size=2 --context-parallel-size=2",
        "--pipeline-model-parallel-size=4",
        "--pipeline-model-parallel-size=2 --pipeline-layout=1,3",
    ],
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A function that returns a small trained model of bytes, by the name of its shape."""
    made = {}

    def make(shape):
        if shape not in made:
            sizes = f"--seq-length={LENGTH} --max-position-embeddings={LENGTH} --num-layers=4 --hidden-size=32"
            line = f"{sizes} --num-attention-heads=4 --micro-batch-size=16 --train-iters=30 {SHAPES[shape]}"
            line += " --lr=1e-2 --lr-warmup-iters=5 --hidden-dropout=0 --attention-dropout=0"
            folder, vocabulary = tmp_path_factory.mktemp(shape), ["--tokenizer-type=ByteTokenizer"]
            made[shape] = train_on_texts(folder, TEXTS * 20, vocabulary, line.split())
        return made[shape]

    return make


def on_ranks(load, lines, out, cls, work):
    """Load the model in each of these layouts and let rank 0 write what `work` returns."""
    team = make_team()
    results = []
    for line in lines:
        words = ["--load", str(load), "--device=cpu", f"--world-size={team.size}", *line.split()]
        parsed = flags.parse_settings(cls, words, "test", check=False)
        given = flags.given_settings(parsed)
        ranks.serve_ranks(
            parsed.config, given, lambda m: results.append(work(m)), torch.device("cpu"), team
        )
    if team.is_rank_0:
        Path(out).write_text(json.dumps(results))


def run_layouts(load, world, lines, tmp_path, cls, work):
    out = tmp_path / "results"
    run_ranks(on_ranks, world, load, lines, out, cls, work)
    return json.loads(out.read_text())


# Evaluation


def figures(m):
    s = score_texts(m.scorer, m.tokenizer, TEXTS, m.seq_length, LENGTH // 2, 2)
    return dataclasses.asdict(s)


def alone(load, dtype=torch.float64):
    return language_model.load_model(str(load), {}, TokenizerFlags(), dtype, torch.device("cpu"))


CASES = [(shape, world) for shape in SHAPES for world in LAYOUTS]
CASES = [pytest.param(*case, marks=[pytest.mark.long] * (case != ("gpt2", 2))) for case in CASES]


@pytest.mark.parametrize(("shape", "world"), CASES)
def test_evaluation_in_any_layout(runs, shape, world, tmp_path):
    """All layouts give the loss of one process, in either precision."""
    load, lines = runs(shape), LAYOUTS[world]
    wanted = {dtype: figures(alone(load, dtype)) for dtype in (torch.float64, torch.float32)}
    lines = [f"{line} --params-dtype=float64" for line in lines] + lines[:1]
    for line, got in zip(
        lines, run_layouts(load, world, lines, tmp_path, EvaluateConfig, figures), strict=True
    ):
        want, near = (
            (wanted[torch.float64], 1e-9) if "float64" in line else (wanted[torch.float32], 1e-5)
        )
        near_want = {
            name: pytest.approx(want[name], rel=near) for name in ("total_loss", "by_position")
        }
        assert got == want | near_want, line


# Generation

GREEDY, SAMPLED = Sampling(greedy=True, out_seq_length=12), Sampling(top_p=0.95, out_seq_length=12)
PROMPTS = [[*b"the c"], [*b"a"], [*b"ein B"], [*b"dog ran. a dog ran"]]


def completions(m):
    """Complete more requests than there are slots, in every way to read a prompt and to choose."""
    requests = [
        Request(p, s, 7, i, logprobs=1) for s in (GREEDY, SAMPLED) for i, p in enumerate(PROMPTS)
    ]
    requests += [
        Request(PROMPTS[0], GREEDY, echo=True, logprobs=2),
        Request(PROMPTS[3], GREEDY, stop=("the",)),
    ]
    requests += [Request(PROMPTS[0], dataclasses.replace(GREEDY, recompute=True))]
    requests += [Request(PROMPTS[1], dataclasses.replace(SAMPLED, repetition_penalty=1.5))]
    found = beam.search_beams(m, Request(PROMPTS[0], GREEDY), beam.BeamOptions(3))
    names = "tokens finish text prompt_tokens logprobs prompt_logprobs".split()
    return [
        {name: getattr(text, name) for name in names}
        for text in [*decoder.complete(m, requests, 3), *found]
    ]


def assert_equal_texts(got, want):
    assert [one["tokens"] for one in got] == [one["tokens"] for one in want]
    for a, b in zip(got, want, strict=True):
        assert (a["finish"], a["text"], a["prompt_tokens"]) == (
            b["finish"],
            b["text"],
            b["prompt_tokens"],
        )
        for name in ("logprobs", "prompt_logprobs"):
            for x, y in zip(a[name], b[name], strict=True):
                assert x is y is None or x == pytest.approx(y, abs=1e-4)


@pytest.mark.parametrize(("shape", "world"), CASES)
def test_generation_in_any_layout(runs, shape, world, tmp_path):
    """All layouts write the texts of one process, in float32."""
    load = runs(shape)
    lines = [
        line
        for line in LAYOUTS[world]
        if "context" not in line and line and (world == 2 or "pipeline" in line)
    ]
    want = completions(alone(load, torch.float32))
    assert len({tuple(one["tokens"]) for one in want}) > 4
    for got in run_layouts(load, world, lines, tmp_path, GenerateConfig, completions):
        assert_equal_texts(got, want)


@pytest.mark.parametrize("shape", ["gpt2", pytest.param("llama", marks=pytest.mark.long)])
def test_equals_transformers(runs, shape, tmp_path):
    """Greedy text is that of transformers' `generate` on the exported folder."""
    transformers = pytest.importorskip("transformers")
    folder, load = tmp_path / "exported", runs(shape)
    assert main(["convert", str(load), str(folder), "--to", "huggingface"]) == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    want = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        how = {"attention_mask": torch.ones_like(ids), "pad_token_id": 0, "eos_token_id": 256}
        out = theirs.generate(ids, do_sample=False, max_new_tokens=12, **how)[
            0, len(prompt) :
        ].tolist()
        want.append(out[: out.index(256)] if 256 in out else out)
    assert greedy(alone(load, torch.float32)) == want


def greedy(m):
    return [done.tokens for done in decoder.complete(m, [Request(p, GREEDY) for p in PROMPTS], 4)]


# Processes

TP2, PP2 = LAYOUTS[2][:2]
LAUNCH = [sys.executable, "-m", "meshwright", "launch", "--nproc-per-node=2", "--"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "meshwright"]


def begin(*words):
    """Start a command with pipes, in a session of its own so that a signal reaches it alone."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return subprocess.Popen(
        words, **pipes, text=True, start_new_session=True, env=kept | {"OMP_NUM_THREADS": "1"}
    )


@pytest.mark.long
@pytest.mark.parametrize(
    ("start", "layout"),
    [
        (LAUNCH, TP2),
        (TORCHRUN, PP2),
        ([sys.executable, "-m", "meshwright"], f"{TP2} --num-gpus-per-node=2"),
    ],
)
def test_a_dialogue_on_several_ranks(runs, start, layout):
    """Rank 0 reads and answers, started by either launcher or by OneFlow's flag."""
    load = runs("gpt2")
    answers = greedy(alone(load, torch.float32))
    first, _, third, _ = (
        bytes([*prompt, *new[:9]]).decode() for prompt, new in zip(PROMPTS, answers, strict=True)
    )
    words = [
        "generate",
        str(load),
        "--device=cpu",
        "--greedy",
        "--max-new-tokens=9",
        *layout.split(),
    ]
    out, err = begin(*start, *words).communicate("the c\nein B\nstop\n", timeout=100)
    assert out == f"{first[len('the c') :]}\n{third[len('ein B') :]}\n", err
    assert err.count("successfully loaded") == 1


@pytest.mark.long
def test_an_error_ends_all_ranks(runs):
    """Rank 0's error is printed once, and is the status of the launch."""
    words = ["generate", str(runs("gpt2")), "--device=cpu", "--prompt", "x" * LENGTH, PP2]
    process = begin(*LAUNCH, *words)
    _, err = process.communicate(timeout=100)
    assert (
        process.returncode == 2
        and err.count(f"--prompt has {LENGTH} tokens") == 1
        and "Traceback" not in err
    )


@pytest.mark.long
@pytest.mark.parametrize("way", ["idle", "busy", "rank"])
def test_an_interrupt_ends_all_ranks_at_once(runs, way):
    """Ctrl-C ends a dialogue that waits, and one that writes; so does the end of another rank."""
    process = begin(*LAUNCH, "generate", str(runs("gpt2")), "--device=cpu", TP2)
    seen = ""
    while "successfully loaded" not in seen:
        seen += os.read(process.stderr.fileno(), 4096).decode()
    if way == "busy":
        process.stdin.write("the c\n" * 10_000)
        process.stdin.flush()
        time.sleep(0.5)
    if way == "rank":
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(children[1]), signal.SIGKILL)
    else:
        process.send_signal(signal.SIGINT)
    began = time.monotonic()
    process.communicate(timeout=60)
    assert process.returncode == (137 if way == "rank" else 130) and time.monotonic() - began < 20


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_server_on_several_ranks(runs, number):
    """It answers as one process does; a signal ends it in order, and the other rank with it."""
    pytest.importorskip("uvicorn")
    process = begin(*LAUNCH, "serve", str(runs("gpt2")), "--device=cpu", "--port=0", PP2)
    address = (
        next(line for line in process.stdout if line.startswith("serving "))
        .split(" on ")[1]
        .split()[0]
    )
    body = {"model": "run", "prompt": "a", "max_tokens": 9, "temperature": 1, "seed": 5}
    request = urllib.request.Request(f"{address}/v1/completions", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=30) as answer:
        text = json.load(answer)["choices"][0]["text"]
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (128 + number, "stopped\n") and "rror" not in err
    assert text == alone(runs("gpt2"), torch.float32).generate("a", max_new_tokens=9, seed=5)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("layout", [TP2, PP2])
def test_on_two_gpus(runs, layout, tmp_path, capsys):
    """Texts and figures are those of the CPU."""
    load = runs("llama")
    (tmp_path / "text.txt").write_text(TEXTS[1])
    (tmp_path / "prompts").write_text("the c\na\n")
    more = ["--sample-input-file", str(tmp_path / "prompts"), "--greedy", "--max-new-tokens=12"]
    score = ["--input", str(tmp_path / "text.txt"), "--json"]
    assert main(["generate", str(load), "--device=cpu", *more]) == 0
    want = (tmp_path / "prompts.out").read_text()
    process = begin(*LAUNCH, "generate", str(load), "--device=cuda", layout, *more)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0 and (tmp_path / "prompts.out").read_text() == want, err
    capsys.readouterr()
    assert main(["evaluate", str(load), "--device=cpu", *score]) == 0
    loss = json.loads(capsys.readouterr().out)["loss"]
    for line in (layout, ""):
        process = begin(*LAUNCH, "evaluate", str(load), "--device=cuda", *line.split(), *score)
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        assert json.loads(out)["loss"] == pytest.approx(loss, rel=1e-5)
