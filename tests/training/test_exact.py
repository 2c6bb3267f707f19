"""Every precision computes the same curve, and a run that stops and resumes is the same run.

The run has everything that could move a sample or a random number: a growing batch, a blend with
one part read twice, skipped iterations, dropout, and ends of documents that mask losses, restart
positions and divide the attention.
"""

from __future__ import annotations

import dataclasses
import json
import re

import numpy as np
import pytest
import safetensors.numpy

import meshwright.checkpoint.loading
import meshwright.optim.loss_scale
import meshwright.training.state.state
from helpers import printed_losses, read_losses, read_rows
from meshwright.__main__ import main
from meshwright.checkpoint.publish import step_folder
from meshwright.config import flags
from meshwright.config import schema as config
from meshwright.data.datasets import build_datasets
from meshwright.data.files.writer import Writer

pytestmark = pytest.mark.whole  # seconds, not moments

WORDS, SEQ = 60, 16  # ids 0 ... 59; NullTokenizer's end of document is 60
SIZES = {"small": 107, "large": 400}  # documents
STEPS = 36
# A later --train-samples ends the run after this step, in 42 + 9 x 8 samples.
SHORT_STEPS = 22
SKIPS = ["--skip-train-iteration-range", "16-18", "29-31"]
NO_VALIDATION = ["--eval-iters=0", "--split=100,0,0"]
MODEL = ["--num-layers=1", "--hidden-size=32", "--num-attention-heads=4", f"--seq-length={SEQ}"]
QUIET = "--device=cpu --num-workers=0 --log-interval=1000 --no-tensorboard".split()
NULL = ["--tokenizer-type=NullTokenizer", f"--vocab-size={WORDS}"]
# The batch is 2 for 7 steps, then 4, then 6, and 8 from step 14 on, after 42 samples; step 36
# ends after 42 + 23 x 8.
LENGTH = ["--micro-batch-size=2", "--global-batch-size=8"]
LENGTH += "--train-samples=226 --lr=1e-2 --lr-warmup-samples=10 --lr-decay-samples=226".split()
MARKS = ["--eod-mask-loss", "--reset-position-ids", "--reset-attention-mask"]
SHORT = ["--train-samples=114", "--lr-decay-samples=114"]
RAMP = "--rampup-batch-size 2 2 40".split()
RUN = [*RAMP, *MARKS, *SKIPS]
FORMATS = {
    "float64": ["--params-dtype=float64"],
    "float32": [],
    "bf16": ["--bf16"],
    "fp16": ["--fp16"],
}
# fp16 begins with a scale that overflows several times in a row, and doubles after 4 clean steps.
OVERFLOWING = ["--initial-loss-scale=4194304", "--loss-scale-window=4", "--hysteresis=2"]


@pytest.fixture(scope="module")
def blend(tmp_path_factory):
    """Two data sets of documents with a random first id, then ids of one kind."""
    folder, rng = tmp_path_factory.mktemp("exact"), np.random.RandomState(0)
    for n, (name, documents) in enumerate(SIZES.items()):
        with Writer(folder / name, np.uint16) as writer:
            for _ in range(documents):
                body = rng.randint(4 * n, 4 * n + 4, rng.randint(3, 12))
                writer.add([rng.randint(WORDS), *body, WORDS])
                writer.end_document()
    files = ["0.5", str(folder / "small"), "0.5", str(folder / "large")]
    return ["--data-path", *files, "--last-epoch-cutoff=1"]


def arguments(folder, *more):
    """A later flag wins over an earlier one."""
    return [*MODEL, *QUIET, *NULL, *LENGTH, *more, "--save", str(folder), "--load", str(folder)]


def train(folder, *more):
    assert main(["train", *arguments(folder, *more)]) == 0


def losses(folder):
    """Return the printed losses of each step, with its loss scale."""
    steps = zip(printed_losses(folder), read_rows(folder), strict=True)
    return [f"{line} {row['loss_scale']}" for line, row in steps]


def saved(folder, step):
    """The bits of every tensor, and the counters."""
    where = step_folder(folder, step)
    tensors = safetensors.numpy.load_file(where / "rank_00000.safetensors")
    bits = {name: (t.dtype, t.shape, t.tobytes()) for name, t in tensors.items()}
    return bits, json.loads((where / "state.json").read_text())


# One curve in four formats


def curve(folder, *more):
    train(folder, *more, *NO_VALIDATION)
    return np.array(read_losses(folder))


@pytest.fixture(scope="module")
def exact(blend, tmp_path_factory):
    """The losses in float64, whose own rounding is 2^-29 of float32's."""
    return curve(tmp_path_factory.mktemp("exact") / "float64", *blend, *RUN, *FORMATS["float64"])


# The largest relative distance of a loss from the float64 run, in units of the format's rounding,
# half the distance from 1 to the next number. About 30 roundings lie between a token and its loss;
# independent ones make sqrt(30) = 5.5 units, and the mean of the smallest step's 28 unmasked tokens
# has a fifth of that, 1.1. The gradients that moved the weights add as much again, the float32 sum
# of up to 128 losses 1 to 2 (in float32 only). So 4 in total. Found: 2.0 in float32, 0.2 in bf16,
# 0.3 in fp16. Without the loss mask it is 93 in bf16, 5 million in float32.
ROUNDINGS = 4
ROUNDING = {"float32": 2.0**-24, "bf16": 2.0**-8, "fp16": 2.0**-11}


def distance(losses, exact, kind):
    return float(np.abs(losses / exact - 1).max() / ROUNDING[kind])


@pytest.mark.parametrize("kind", ROUNDING)
def test_every_precision_computes_the_same_curve(blend, exact, tmp_path, kind):
    got = curve(tmp_path, *blend, *RUN, *FORMATS[kind], "--initial-loss-scale=1024")
    far = distance(got, exact, kind)
    print(f"{kind}: {far:.2f} roundings")
    assert len(exact) == STEPS - 6 and exact[-1] < exact[0] / 2
    assert 0 < far < ROUNDINGS


@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        *((kind, ["--no-eod-mask-loss"]) for kind in ROUNDING),
        ("bf16", ["--no-reset-attention-mask"]),
        ("fp16", ["--no-reset-position-ids"]),
        ("fp16", ["--hidden-dropout=0"]),
        ("fp16", ["--attention-dropout=0"]),
        ("bf16", "--rampup-batch-size 2 6 40".split()),
    ],
)
@pytest.mark.fault("F3")
def test_a_curve_of_something_else_is_outside_the_bound(blend, exact, tmp_path, kind, flags):
    got = curve(tmp_path, *blend, *RUN, *FORMATS[kind], "--initial-loss-scale=1024", *flags)
    count = min(len(got), len(exact))
    far = distance(got[:count], exact[:count], kind)
    print(f"{kind} {flags}: {far:.2f} roundings")
    assert far > 1.5 * ROUNDINGS


# Stopping and resuming

STOPS = {
    2: "inside the ramp, at its first batch",
    12: "inside the ramp, at its third",
    15: "right before a skipped range",
    18: "right after it",
    20: "the first epoch of the small part",
    27: "the second epoch of the small part",
    28: "right before the second skipped range",
    31: "right after it",
}  # and with fp16 right after each step that an overflow skipped


def stop_and_go(folder, stops, *more):
    for stop in stops:
        train(folder, *more, f"--exit-interval={stop}")
        assert read_rows(folder, "end")[-1]["reason"] == f"--exit-interval {stop}"
        assert step_folder(folder, stop).is_dir()
    train(folder, *more)


def require_equal(whole, parts, steps=STEPS):
    """Losses, validations, tensors and counters, to the last bit."""
    for a, b in zip(losses(whole), losses(parts), strict=True):
        assert a == b
    rows = [
        [(r["iteration"], r["name"], r["loss"]) for r in read_rows(f, "validation")]
        for f in (whole, parts)
    ]
    assert rows[0] == rows[1]
    (tensors, counters), (others, other_counters) = saved(whole, steps), saved(parts, steps)
    assert tensors.keys() == others.keys() and [n for n in tensors if tensors[n] != others[n]] == []
    assert counters == other_counters


@pytest.fixture(scope="module")
def whole(blend, tmp_path_factory):
    """An uninterrupted run of each kind, made once."""
    made, root = {}, tmp_path_factory.mktemp("whole")

    def get(*more):
        if more not in made:
            made[more] = root / str(len(made))
            train(made[more], *blend, *RUN, *more)
        return made[more]

    return get


def test_the_run_has_the_events_to_survive(blend, whole, tmp_path):
    """Each of the STOPS is where its description says."""
    steps = {
        r["iteration"]: r for r in read_rows(whole(*FORMATS["fp16"], *OVERFLOWING, *NO_VALIDATION))
    }
    assert set(range(1, STEPS + 1)) - steps.keys() == {16, 17, 18, 29, 30, 31}
    assert [steps[i]["batch"] for i in (1, 2, 8, 12, 14, 15)] == [2, 2, 4, 6, 8, 8]
    skipped = [i for i, r in steps.items() if r["skipped"]]
    assert skipped[:3] == [1, 2, 3] and any(i > 18 for i in skipped) and len(skipped) < 12
    scales = [steps[i]["loss_scale"] for i in steps]
    least = min(scales)
    assert scales[0] == scales[1] == 2 * scales[2]  # forgiven, halved
    assert max(scales[scales.index(least) :]) >= 4 * least  # doubled twice
    settings = flags.parse_settings(
        config.TrainConfig, arguments(tmp_path, *blend), "meshwright train"
    ).config
    mixed = build_datasets(settings, WORDS + 1)["train"]
    small = mixed.parts[0]
    per_epoch = (int(small.indexed.sizes.sum()) - 1) // SEQ
    taken = {
        i: int((mixed.dataset_idx[: r["consumed_samples"]] == 0).sum()) for i, r in steps.items()
    }
    assert small.epochs == 2 and taken[20] < per_epoch < taken[27] < taken[STEPS] < 2 * per_epoch


@pytest.mark.parametrize("kind", [*reversed(FORMATS)])  # fp16 first: it has the most state
def test_stopped_again_and_again_it_is_the_same_run(blend, whole, tmp_path, kind):
    more = [*FORMATS[kind], *OVERFLOWING, *NO_VALIDATION]
    overflows = [r["iteration"] for r in read_rows(whole(*more)) if r["skipped"]]
    assert bool(overflows) == (kind == "fp16")
    stop_and_go(tmp_path, sorted({*STOPS, *overflows} - {STEPS}), *blend, *RUN, *more)
    require_equal(whole(*more), tmp_path)


@pytest.mark.parametrize("kind", [*reversed(FORMATS)])
def test_stopped_inside_a_skipped_range(blend, whole, tmp_path, kind):
    """178 samples end the run at iteration 30, within 29-31; then it is made longer."""
    more = [*FORMATS[kind], *OVERFLOWING, *NO_VALIDATION]
    train(tmp_path, *blend, *RUN, *more, "--train-samples=178")
    assert step_folder(tmp_path, 30).is_dir() and read_rows(tmp_path)[-1]["iteration"] == 28
    train(tmp_path, *blend, *RUN, *more)
    assert losses(tmp_path) == losses(whole(*more))
    assert saved(tmp_path, STEPS)[0] == saved(whole(*more), STEPS)[0]


@pytest.mark.parametrize(
    "more",
    [
        ["--optimizer=muon"],
        ["--optimizer=muon", *FORMATS["fp16"], "--ema=0.9"],
        ["--optimizer=sgd"],
        ["--optimizer=sgd", *FORMATS["fp16"]],
        ["--cpu-optimizer"],
        ["--cpu-optimizer", *FORMATS["fp16"]],
        ["--cpu-optimizer", "--optimizer=sgd", *FORMATS["bf16"]],
        ["--dataloader-type=cyclic", *FORMATS["bf16"]],
        ["--loss-mean=microbatch", "--num-workers=2"],
        (
            "--lr-decay-style=WSD --lr-wsd-decay-samples=50 --weight-decay-incr-style=cosine "
            "--start-weight-decay=0.01 --end-weight-decay=0.9"
        ).split(),
    ],
    ids=lambda more: " ".join(more),
)
def test_stopped_with_other_rules(blend, whole, tmp_path, more):
    more = [*SHORT, *more, *OVERFLOWING, *NO_VALIDATION]
    stop_and_go(tmp_path, [2, 18, 20], *blend, *RUN, *more)
    require_equal(whole(*more), tmp_path, SHORT_STEPS)


@pytest.mark.parametrize("kind", ["fp16", "float32"])
def test_stopped_between_validations(blend, whole, tmp_path, kind):
    """At 10 right after one, at 12 and 13 between two."""
    more = [
        *SHORT,
        *FORMATS[kind],
        *OVERFLOWING,
        "--eval-interval=5",
        "--eval-iters=2",
        "--split=70,20,10",
        "--keep-best",
    ]
    stop_and_go(tmp_path, [10, 12, 13], *blend, *RUN, *more)
    require_equal(whole(*more), tmp_path, SHORT_STEPS)
    rows = read_rows(tmp_path, "validation")
    assert [r["iteration"] for r in rows] == [5, 10, 15, 20, 22, 22]
    assert len({r["loss"] for r in rows}) == len(rows)


def forget_scale(monkeypatch):
    monkeypatch.setattr("meshwright.optim.loss_scale.LossScale.load", lambda self, state: None)


def forget_clean_steps(monkeypatch):
    kind = meshwright.optim.loss_scale.LossScale
    load = kind.load
    monkeypatch.setattr(kind, "load", lambda self, state: load(self, state | {"growth_tracker": 0}))


def forget_adams_time(monkeypatch):
    monkeypatch.setattr(
        "meshwright.parallel.flat.FlatStore.steps", property(lambda s: 0, lambda s, v: None)
    )


def forget_schedule(monkeypatch):
    load = meshwright.training.state.state.State.accept
    monkeypatch.setattr(
        "meshwright.training.state.state.State.accept",
        lambda self, source: load(
            self, dataclasses.replace(source, state=source.state | {"schedule_samples": 100})
        ),
    )


def forget_moments(monkeypatch):
    load = meshwright.checkpoint.loading.load_checkpoint

    def weights_alone(path, want, **more):
        def weights(source):
            return {name: entry for name, entry in want(source).items() if "/" not in name}

        return load(path, weights, **more | {"options": more["options"]._replace(optimizer=False)})

    monkeypatch.setattr("meshwright.checkpoint.loading.load_checkpoint", weights_alone)


@pytest.mark.parametrize(
    "forget", [forget_scale, forget_clean_steps, forget_adams_time, forget_schedule, forget_moments]
)
@pytest.mark.fault("F3")
def test_forgotten_state_shows(blend, whole, tmp_path, monkeypatch, forget):
    """The control: if these runs were equal too, the tests above would prove nothing."""
    more = [*SHORT, *FORMATS["fp16"], *OVERFLOWING, *NO_VALIDATION]
    taken = [r["iteration"] for r in read_rows(whole(*more)) if not r["skipped"]]
    stop = taken[1]  # the scale has come down, and half of its clean steps are done
    train(tmp_path, *blend, *RUN, *more, f"--exit-interval={stop}")
    forget(monkeypatch)
    train(tmp_path, *blend, *RUN, *more)
    assert losses(tmp_path)[:stop] == losses(whole(*more))[:stop]
    assert losses(tmp_path) != losses(whole(*more))


# Options of the network

# For each network the flags, and one flag that contradicts it.
OPTIONS = [
    (
        "--position-embedding-type=rope --swiglu --normalization=RMSNorm --num-query-groups=2",
        "--rotary-base=5000",
    ),
    (
        "--use-rotary-position-embeddings --rotary-percent=0.5 --disable-bias-linear --bf16",
        "--rotary-percent=1",
    ),
    ("--position-embedding-type=alibi", "--position-embedding-type=none"),
    (
        "--position-embedding-type=alibi --num-attention-heads=6 --hidden-size=48 --fp16",
        "--num-attention-heads=3",
    ),
    ("--squared-relu --qk-layernorm", "--no-qk-layernorm"),
    (
        "--apply-residual-connection-post-layernorm --bf16",
        "--no-apply-residual-connection-post-layernorm",
    ),
    ("--embed-layernorm --group-query-attention", "--no-embed-layernorm"),
    ("--disable-bias-linear --add-qkv-bias", "--no-add-qkv-bias"),
    ("--use-parallel-residual --bf16", "--no-use-parallel-residual"),
    ("--disable-layernorm-bias --disable-bias-linear", "--layernorm-bias"),
    (
        "--untie-embeddings-and-output-weights --optimizer=muon",
        "--no-untie-embeddings-and-output-weights",
    ),
    ("--kv-channels=12 --position-embedding-type=rope", "--kv-channels=8"),
    ("--apply-layernorm-1p --normalization=RMSNorm --embed-layernorm", "--no-apply-layernorm-1p"),
    (
        "--position-embedding-type=rope --reset-attention-mask --reset-position-ids",
        "--position-embedding-type=none",
    ),
    (
        "--recompute-granularity=full --recompute-method=uniform --recompute-num-layers=2",
        "--ffn-hidden-size=96",
    ),
    (
        "--recompute-granularity=full --recompute-method=block --swiglu --ffn-hidden-size=40",
        "--no-swiglu",
    ),
    (
        "--recompute-activations --group-query-attention --qk-layernorm --fp16",
        "--num-query-groups=4",
    ),
    (
        "--fp32-residual-connection --bf16 --embed-layernorm --checkpoint-activations",
        "--layernorm-epsilon=1e-3",
    ),
    (
        "--fp32-residual-connection --fp16 --apply-residual-connection-post-layernorm",
        "--normalization=RMSNorm",
    ),
    (
        "--init-method-xavier-uniform --glu-activation=geglu --position-embedding-type=none",
        "--glu-activation=reglu",
    ),
    (
        "--no-bias-gelu-fusion --untie-embeddings-and-output-weights --optimizer=sgd",
        "--openai-gelu",
    ),
    (
        "--glu-activation=reglu --kv-channels=4 --num-query-groups=2 --params-dtype=float64",
        "--num-layers=3",
    ),
    (
        "--attention-impl=sdpa --position-embedding-type=alibi --recompute-activations",
        "--hidden-size=64",
    ),
    (
        "--hidden-dropout=0 --attention-dropout=0 --reset-attention-mask --eod-mask-loss",
        "--squared-relu",
    ),
]


@pytest.mark.parametrize(
    ("options", "contradiction"), OPTIONS, ids=[options for options, _ in OPTIONS]
)
def test_options(blend, tmp_path, capsys, options, contradiction):
    """A resumed run is equal, its text does not depend on the cache; other flags are refused."""
    more = [
        *blend,
        "--num-layers=2",
        "--train-samples=24",
        "--lr-decay-samples=24",
        "--global-batch-size=4",
        *NO_VALIDATION,
    ]
    more += [*options.split(), "--initial-loss-scale=1024"]
    a, b = tmp_path / "a", tmp_path / "b"
    train(a, *more)
    train(b, *more, "--exit-interval=3")
    train(b, *more)
    assert len(losses(a)) == 6
    assert losses(a) == losses(b) and saved(a, 6) == saved(b, 6)

    assert main(["train", *arguments(b, *more, contradiction)]) == 65
    flag = contradiction.partition("=")[0].replace("--no-", "--")
    # the setting that it stands for
    flag = "--bias-gelu-fusion" if flag == "--openai-gelu" else flag
    listed = re.findall(r"(--\S+) .*, the checkpoint has", capsys.readouterr().err)
    assert flag in listed and (flag != "--bias-gelu-fusion" or len(listed) == 1)
    assert len(read_rows(b)) == 6

    (tmp_path / "prompts").write_text("3 1 2\n57\n60 11 4 7 7 1 0 2 9\n")
    texts = []
    for cache in ([], ["--recompute"]):
        out = tmp_path / "text"
        written = [
            "--sample-input-file",
            str(tmp_path / "prompts"),
            "--sample-output-file",
            str(out),
        ]
        assert main(["generate", str(a), *written, *cache, "--device=cpu"]) == 0
        texts.append(out.read_text())
    assert texts[0] == texts[1] and len(texts[0].split()) > 13
