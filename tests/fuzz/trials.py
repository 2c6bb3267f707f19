"""One leg of a case on one rank, by the real Trainer, and its distance from one process.

Compared are, after every step, the loss, norms, counters and the loss scale, each parameter's
gradient as it was summed, the weights and the optimizer's state, and every validation. A rank
compares the parts that it holds, copies too.

How far apart may they be?

    float64   NEAR of the number itself; of a tensor's largest element.
    others    A layout adds the same numbers in another order. Each addition rounds by up to u,
              2^-24 in float32, 2^-8 in bfloat16 and 2^-11 in float16. How roundings add up and
              grow, the same run in one process and the same format tells: its distance from
              float64 is made of as many roundings of the same size. The layout's may be SPREAD
              times that, or SPREAD u if that is more: one process can be close by chance. Adam can
              turn a rounding into a step, which a third run of one process tells: float64, its
              gradients shaken by u of each tensor's largest (Muon's by bfloat16's). The more
              distant one counts. Some networks turn one rounding in ten into a change of a whole
              step, so a case that is too far away is compared again with LOOKS shaken runs of
              each format.
    squares   Adam's second moments may be as far as the squares of such gradients.
    weights   Adam divides gradients by their own size, so that one that is 0 but for rounding can
              move a weight by up to the learning rate; see `step_errors`. In all but float64 this
              is a step in any direction, and so it is for Lion, which takes only signs. Other
              gradients then move too: after the first step, a tensor's distance is compared with
              the largest relative one of all tensors.
    masters   In 16 bits a weight may move by less than half a step of its format, and only its
              master has that. So weights after less weights before are compared too, by the same
              rules and with what float32 loses; where one process is sure of an update, that of a
              layout is about as large; and as few masters fit in 16 bits as in one process.
    exactly   All ranks record the same numbers; counters, learning rates, loss scales and skipped
              steps are those of one process; steps that a layout takes again after a resume have
              the same bits. Layouts that differ only in their data-parallel ranks need not have:
              they add gradients in another order. Steps that CUDA graphs take have the bits of
              the same leg without graphs.
    fp8       One process with it is as far from float64 as its format makes it, so what all share
              is not seen by that: its losses and gradients are also compared with bfloat16's. How
              far apart these may be, baselines tell: runs of the same network that multiply
              unscaled numbers, each with a random error as large as half a step of its fp8 format.
              So a network that turns such errors into another gradient altogether allows it in fp8,
              and all others do not. The baselines are runs with other roundings, too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from fuzz import plain
from fuzz.cases import WORDS, Case, configs, goes_back, in_one_process
from meshwright.base import device as devices
from meshwright.config.schema import Precision, TrainConfig
from meshwright.kernels import moments

NEAR = 1e-9
LIKE = 1e-6  # Adam's steps make roundings larger
FP8 = 1 / 16  # half a step of e4m3, the least that losses of fp8 and bfloat16 may be apart
NOISY = 8.0  # times the distance of the farthest baseline
EOD = 5  # of mock data
LOUD = 1000.0  # times the loss
SPREAD = 16.0
LOOKS = 8
STRIDE = 3.0  # steps of Adam are about lr, or a few times that at first
TINY = 1e-30  # Lion has no term that makes the steps of small gradients smaller
ROUNDINGS = 8  # of the largest gradient, in each other one
UNIT = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11, "float64": 2.0**-53}
EXACT = ("batch", "consumed", "lr", "next_lr", "loss_scale", "skipped", "weight_decay")
NUMBERS = ("loss", "grad_norm", "params_norm")
# Gradients that are 0 but for rounding, such as those of keys' biases, are as small as the
# roundings of larger ones. Below this share of the largest tensor's, differences count less.
SMALL = {
    "": 1e-5,
    "exp_avg": 1e-5,
    "exp_avg_sq": 1e-10,
    "momentum": 1e-5,
    "weights": 1e-5,
    "ema": 1e-5,
}

MOVED = 0.5  # of the updates in which all runs in one process agree with float64,
SURE = 0.25  # if these are so much of all: the others of a chaotic network agree by chance
FITTING = 0.25  # of a tensor's masters, that may be numbers of 16 bits by chance
BIG = 1e-3  # the same for the tensors that tell how far roundings have grown

Pieces = list[tuple[tuple[slice, ...], Tensor]]  # each with its place in the full tensor
Tensors = dict[str, Pieces]


@dataclasses.dataclass
class Trace:
    """What a run recorded, by iteration."""

    rows: dict[int, dict[str, float]] = dataclasses.field(default_factory=dict)
    validations: dict[str, float] = dataclasses.field(default_factory=dict)
    gradients: dict[int, Tensors] = dataclasses.field(default_factory=dict)
    states: dict[int, Tensors] = dataclasses.field(default_factory=dict)
    went_back: dict[int, int] = dataclasses.field(default_factory=dict)  # to which step
    # tokens by sample, of a step
    samples: dict[int, dict[int, list[int]]] = dataclasses.field(default_factory=dict)
    written: list[Any] = dataclasses.field(default_factory=list)  # texts of decoders
    # "off, because ..." if a capture failed that should not, "on" if steps were captured
    graphs: str = ""

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {
            n: _each(torch.Tensor.numpy, getattr(self, n)) for n in ("gradients", "states")
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(
            state | {n: _each(torch.from_numpy, state[n]) for n in ("gradients", "states")}
        )

    # The parts of meshwright.training.log.metrics.Metrics that a Trainer uses.
    folder, iteration = None, 0

    def step(
        self, iteration: int, consumed: int, seconds: float, next_lr: float, values: dict[str, Any]
    ) -> None:
        names = [*EXACT, *NUMBERS, "num_zeros"]
        more = {"consumed": consumed, "next_lr": next_lr}
        self.rows[iteration] = {n: float(v) for n, v in (values | more).items() if n in names}

    def validation(self, consumed: int, check: Any) -> None:
        title = f"{check.name} {check.dataset} {check.when}, step {check.iteration}"
        self.validations[title] = check.loss
        if check.ema_loss is not None:
            self.validations[f"{title}, of the average"] = check.ema_loss
        for part, loss in (check.by_position | check.by_data).items():
            self.validations[f"{title}: {part}"] = loss

    def roll_back(self, to: int, iteration: int, **more: Any) -> None:
        self.went_back[iteration] = to

    def row(self, *values: Any, **more: Any) -> None:
        pass

    def sync(self) -> None:
        pass

    def close(self) -> None:
        pass


def _each(act: Callable[[Any], Any], steps: dict[int, Any]) -> dict[int, Any]:
    """Convert tensors, which are pickled as arrays in a tenth of the time."""
    return {
        i: {n: [(at, act(x)) for at, x in pieces] for n, pieces in named.items()}
        for i, named in steps.items()
    }


class _Poison(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, losses: Tensor, bad: Tensor) -> Tensor:
        ctx.save_for_backward(bad)
        return losses.view_as(losses)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.masked_fill(ctx.saved_tensors[0], math.inf), None


def spoil(net: Any, spoilt: dict[str, tuple[int, ...]]) -> None:
    """Let some samples have infinite gradients, losses that are NaN, or very large ones."""
    plain = net.loss
    chosen = {how: torch.tensor(samples, device=net.device) for how, samples in spoilt.items()}

    def change(losses: Tensor, batch: Any) -> Tensor:
        # not of a validation
        for how, samples in chosen.items() if torch.is_grad_enabled() else ():
            bad = (batch.sample_ids[:, None] == samples).any(1)[:, None].expand(batch.labels.shape)
            if how == "poison":
                losses = _Poison.apply(losses, bad)  # type: ignore[no-untyped-call]
            else:
                losses = losses * torch.where(bad, math.nan if how == "spoil" else LOUD, 1.0)
        return losses

    if chosen:
        net.loss = lambda out, batch: {
            name: change(losses, batch) for name, losses in plain(out, batch).items()
        }


def placed(named: Any, values: dict[str, Tensor] | None = None, scale: float = 1.0) -> Tensors:
    """Return copies of this rank's tensors with their places, by a store's named_state."""
    out: Tensors = {}
    for name, (_, boxes, kept) in named.items():
        tensor = kept if values is None else values[name]
        flat = moments.expanded(tensor.detach().reshape(-1), torch.float64).cpu() / scale
        pieces = flat.split([math.prod(size) for _, size in boxes])
        places = [tuple(slice(o, o + n) for o, n in zip(*box, strict=True)) for box in boxes]
        out[name] = [
            (p, x.clone().view(box[1])) for p, x, box in zip(places, pieces, boxes, strict=True)
        ]
    return out


@contextlib.contextmanager
def traced(trainer: Any, trace: Trace, shake: float, seed: int) -> Iterator[None]:
    """Keep the gradients of each step as they were summed, and the state after it.

    The step gets them shaken by up to that share of the largest one of their tensor. A CUDA graph
    copies them as it did when it was captured, so the copies never move.
    """
    store, step, react, progress = (
        trainer.net.store,
        trainer.step,
        trainer.guard.react,
        trainer.progress,
    )
    next_batch = trainer.next_batch
    finish_sums, random = store.finish_sums, torch.Generator().manual_seed(seed)
    summed: dict[str, Tensor] = {}

    def finish() -> None:
        finish_sums()
        for name, gradient in store.each_gradient():
            if name not in summed:
                summed[name] = torch.empty_like(gradient)
            summed[name].copy_(gradient)
            if shake:
                noise = (
                    torch.rand(gradient.shape, generator=random, dtype=gradient.dtype) * 2 - 1
                ).to(gradient.device)
                gradient.add_(noise * gradient.abs().max(), alpha=shake)

    def keep_state() -> None:
        trace.states[progress.iteration] = placed(store.named_state())

    def read_and_keep() -> Any:
        batches = next_batch()
        trace.samples[progress.iteration + 1] = {
            int(number): [*row, int(labels[-1])]
            for b in batches
            for number, row, labels in zip(b.sample_ids, b.tokens.tolist(), b.labels, strict=True)
        }
        return batches

    def step_and_keep() -> None:
        number, scale = progress.iteration + 1, trainer.state.scaler.scale
        step()
        trace.gradients[number] = placed(store.named_state(with_optimizer=False), summed, scale)
        keep_state()

    def react_and_keep(settled: Any) -> bool:
        if went_back := react(settled):
            keep_state()
        return bool(went_back)

    keep_state()
    store.finish_sums, trainer.step, trainer.guard.react = finish, step_and_keep, react_and_keep
    trainer.next_batch = read_and_keep
    try:
        yield
    finally:  # a cycle through torch's hooks is never freed, nor are the threads of its groups
        del store.finish_sums, trainer.step, trainer.guard.react, trainer.next_batch


def train(
    config: TrainConfig,
    team: Any,
    layout: Any,
    kept: int,
    spoilt: dict[str, tuple[int, ...]],
    shake: float = 0.0,
    seed: int = 0,
    write: Callable[[Any, int], list[Any]] | None = None,
) -> Trace:
    """Train one leg, as `meshwright train` does after its set-up.

    One that is lost after the step `kept` saves nothing after it. `write` takes the network at its
    end.
    """
    from meshwright.training.before.resolve import find_vocabulary
    from meshwright.training.health.stop import StopConditions
    from meshwright.training.log.timers import Startup, Timers
    from meshwright.training.loop import ALL_DONE, Trainer
    from meshwright.training.network import Spec
    from meshwright.training.run import finish_run
    from meshwright.training.setup import build_state, open_feed

    device = open_device(config, team.rank)
    vocabulary = find_vocabulary(config, None)
    # mock data know no end of a document
    marking: Any = vocabulary.tokenizer or SimpleNamespace(eod=EOD)
    timers, stop = (
        Timers(0, "minmax", device, team),
        StopConditions(config.training, time.perf_counter()),
    )
    state = build_state(
        Spec(config, layout, device, vocabulary.size, vocabulary.padded), team, Startup()
    )
    spoil(state.net, spoilt)
    if "spike" in spoilt:
        # A case has too few steps for the usual number of losses before a spike.
        state.losses = deque(state.losses, maxlen=8)
    trace = Trace()
    trainer = Trainer(state, open_feed(state, marking, None), trace, timers, stop)  # type: ignore[arg-type]
    save = trainer.saving.run

    def save_what_is_kept(step: int) -> None:
        if not kept or step <= kept:
            save(step)

    keeping = mock.patch.object(trainer.saving, "run", save_what_is_kept)
    with contextlib.closing(trainer), traced(trainer, trace, shake, seed), keeping:
        reason = trainer.train(Startup())
        if not kept:
            finish_run(trainer, reason, vocabulary.tokenizer)
        trainer.state.saver.wait()
        if config.data.seq_length and not kept and reason == ALL_DONE:  # as one process ends
            title = f"windows scored at step {trainer.progress.iteration}"
            trace.validations[title] = score_windows(trainer, config.data.seq_length)
        if (graphs := trainer.net.graphs) is not None:
            # Without Triton torch's AdamW reads its numbers on the host, which no graph can.
            is_lost = graphs.why_off and trainer.net.store.reads_tensors
            trace.graphs = (
                f"off, because {graphs.why_off}" if is_lost else "on" if graphs.captured else ""
            )
        if write is not None and config.data.seq_length:
            with torch.no_grad():
                trace.written = write(trainer.net, config.data.seq_length)
    return trace


def score_windows(trainer: Any, length: int) -> float:
    """Return the nats per token that --eval-tasks would find in some windows, with all ranks."""
    from meshwright.data.windows import Window
    from meshwright.parallel.window_losses import score_part, score_windows

    net, vocab, team = trainer.net, trainer.state.vocab, trainer.team

    def scorer(batches: Any) -> Tensor:
        values = score_part(net, vocab, batches).cpu()
        team.sum(values)
        return values

    windows = [
        Window([(7 * n + i * i) % vocab for i in range(2 + (5 * n) % length)], n % 2)
        for n in range(6)
    ]
    values = torch.cat(
        list(score_windows(scorer, windows, length, trainer.config.micro_batch, True))
    )
    return float(values[:, 0].sum()) / sum(len(ids) - 1 - first for ids, first in windows)


def score_texts(net: Any, length: int) -> list[Any]:
    """Return texts of a decoder and of a beam search, with what chose their tokens."""
    from meshwright.config.schema import Sampling
    from meshwright.data.tokenizers import Null
    from meshwright.generation import decoder
    from meshwright.generation.beam import BeamOptions, search_beams
    from meshwright.generation.language_model import LanguageModel
    from meshwright.generation.requests import Request

    model = LanguageModel(net.parts[0].eval(), Null(WORDS), 0, length)
    kinds = [
        Sampling(temperature=0.0),
        Sampling(temperature=0.0, repetition_penalty=1.7),
        Sampling(temperature=1.5, top_k=3),
        Sampling(temperature=1.0, top_p=0.01),
        Sampling(temperature=1.0, top_p=0.6),
    ]
    prompts = [
        [(5 * i + n) % WORDS for i in range(1 + (3 * n) % (length - 2))] for n in range(len(kinds))
    ]
    requests = [
        Request(prompt, dataclasses.replace(kind, out_seq_length=length), 3, n, logprobs=0)
        for n, (prompt, kind) in enumerate(zip(prompts, kinds, strict=True))
    ]
    out: list[Any] = [[prompt, [], [], kind] for prompt, kind in zip(prompts, kinds, strict=True)]
    # prompts of these few tokens are long ones
    with mock.patch.multiple(decoder, CHUNK=3, ECHO_CHUNK=2):
        for number, event in decoder.run_requests(decoder.Decoder(model, 3), requests):
            out[number][1].append(event.token)
            out[number][2].append(event.logprob)
        for text in search_beams(model, requests[2], BeamOptions(3)):
            out.append([prompts[2], text.tokens, text.logprobs, None])
    return out


def write_texts(net: Any, length: int) -> list[list[Any]]:
    """Return what a decoder writes without CUDA graphs and with them, or nothing if it has none."""
    from meshwright.config.schema import Sampling
    from meshwright.data.tokenizers import Null
    from meshwright.generation.decoder import Decoder, run_requests
    from meshwright.generation.language_model import LanguageModel
    from meshwright.generation.requests import Request

    model = LanguageModel(net.parts[0].eval(), Null(WORDS), 0, length)
    kinds = (Sampling(temperature=t, out_seq_length=length) for t in (0.0, 1.0, 2.0, 1.0))
    requests = [Request([EOD, *range(n)], kind, 3, n, logprobs=2) for n, kind in enumerate(kinds)]
    written: list[list[Any]] = []
    for is_captured in (False, True):
        decoder = Decoder(model, 3)
        if decoder.steps is None:
            return []
        decoder.steps.captures = is_captured
        events = sorted(run_requests(decoder, requests), key=lambda each: each[0])
        written.append([(number, event.token, event.logprob) for number, event in events])
    return written


def open_device(config: TrainConfig, rank: int = 0) -> torch.device:
    """Return the device of a rank; there may be fewer of them than ranks."""
    return devices.open_device(config.parallel.device, rank % max(devices.count_accelerators(), 1))


def without_triton() -> contextlib.AbstractContextManager[Any]:
    """Let all be computed by torch's kernels, and fp8 by products of its numbers in float32."""
    return mock.patch.object(devices, "has_kernels", lambda device: False)


def updates(trace: Trace, i: int) -> Tensors:
    """Return by how much a step has moved each weight."""
    after, before = trace.states[i], trace.states[max(n for n in trace.states if n < i)]
    return {
        name: [(place, x - old) for (place, x), (_, old) in zip(pieces, before[name], strict=True)]
        for name, pieces in after.items()
        if "/" not in name
    }


class References(NamedTuple):
    """The run in one process."""

    exact: Trace  # in float64
    # first in the format of the case, then shaken by its roundings, then the baselines
    rounded: list[Trace]
    baselines: list[Trace]  # of fp8, with random errors


def alone(
    case: Case, config: TrainConfig, shake: float = 0.0, seed: int = 0, writes: bool = False
) -> Trace:
    """Train in one process, in a folder of its own if the run may go back."""
    from meshwright.parallel.layout import Layout
    from meshwright.runtime.ranks.team import Team

    with tempfile.TemporaryDirectory() as folder, without_triton():
        c = dataclasses.replace(config.checkpoint, save=folder if goes_back(config) else None)
        config = dataclasses.replace(config, checkpoint=c)
        return train(
            config, Team(), Layout(), 0, case.spoilt, shake, seed, score_texts if writes else None
        )


def references(case: Case, looks: int = 1) -> References:
    """Train the case in one process; with several looks, shake both formats as often."""
    config = in_one_process(case)
    dtype = config.precision.dtype
    own = alone(case, config, writes=dtype == "float64")
    if dtype == "float64":
        return References(own, [own], [])
    exact = in_float64(case)
    shake = UNIT["bfloat16" if config.optimizer.optimizer == "muon" else dtype]
    formats = [exact] if looks == 1 else [exact, config]
    shaken = [alone(case, one, shake, seed + 1) for one in formats for seed in range(looks)]
    baselines = (
        [baseline_of_fp8(case, config, seed) for seed in range(looks + 1)]
        if config.precision.fp8_format
        else []
    )
    # no other step has overflowed
    like = [trace for trace in (*shaken, *baselines) if _skipped(trace) == _skipped(own)]
    return References(alone(case, exact, writes=True), [own, *like], baselines)


def baseline_of_fp8(case: Case, config: TrainConfig, seed: int) -> Trace:
    """Train with the products of fp8 in bfloat16, whose factors have errors as large as fp8's."""
    from meshwright.kernels import fp8, gradients

    random = torch.Generator().manual_seed(seed)

    def erring(x: Tensor, bits: int = 4) -> Tensor:
        error = (torch.rand(x.shape, generator=random) * 2 - 1).to(x.device) * 2.0**-bits
        return (x.float() * (1 + error)).to(x.dtype)

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, parameter: Tensor, bias: Tensor | None) -> Tensor:
            ctx.factors, ctx.parameter, ctx.bias = (
                (erring(x), erring(parameter.flatten(0, -2))),
                parameter,
                bias,
            )
            return torch.nn.functional.linear(
                *ctx.factors, None if bias is None else bias.flatten()
            )

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
            (x, weight), g = (
                ctx.factors,
                erring(grad, 3 if config.precision.fp8_format == "hybrid" else 4),
            )
            rows = g.reshape(-1, g.shape[-1]), x.reshape(-1, x.shape[-1])
            of_bias = gradients.from_rows(ctx.bias if ctx.needs_input_grad[2] else None, grad)
            return g @ weight, gradients.from_product(ctx.parameter, *rows), of_bias

    def multiply(product: Any, x: Tensor, parameter: Tensor, bias: Tensor | None = None) -> Tensor:
        return Product.apply(x, parameter, bias)  # type: ignore[no-any-return,no-untyped-call]

    with mock.patch.object(fp8.Fp8Product, "__call__", multiply):
        return alone(case, config)


class InFloat64(Precision):
    """The settings of another format, such as the loss scale of fp16, with numbers in float64."""

    dtype = property(lambda self: "float64")  # type: ignore[assignment]


def in_float64(case: Case) -> TrainConfig:
    """Return the configuration in one process and float64, which keeps the loss scale of fp16."""
    config = in_one_process(case)
    p = dataclasses.replace(config.precision, fp32_residual_connection=False, fp8_format=None)
    return dataclasses.replace(config, precision=InFloat64(**vars(p)))


def unlike_plain(case: Case, made: References) -> list[str]:
    """Return in what the run in one process differs from that of the independent trainer.

    That one has no dropout, so a case with dropout is trained once more without.
    """
    config, own = in_float64(case), made.rounded[0]
    if plain.beyond(config) or {*case.spoilt} - {"poison"} or goes_back(config):
        return []
    without = {name: 0.0 for name in ("hidden_dropout", "attention_dropout", "embedding_dropout")}
    bare, ours = (
        dataclasses.replace(config, model=dataclasses.replace(config.model, **without)),
        made.exact,
    )
    if bare.model != config.model:
        ours = alone(case, bare, writes=True)
    distances = Distances(bare)
    planned = plain.rows(
        in_one_process(case), lambda step, _: bool(own.rows.get(step, {}).get("skipped"))
    )
    for step, _, row in planned:
        for name in EXACT:
            if name in own.rows.get(step, {}):
                distances.near(f"step {step}: {name}", own.rows[step][name], row[name])
    weights = {name: x for name, ((_, x),) in ours.states[0].items() if "/" not in name}
    distances.wrong += plain.unlike_drawn(weights, bare.model)
    eod = EOD if bare.data.mock_data else WORDS
    taken, after = [], weights
    for made_step in plain.train(bare, weights, WORDS + 1, eod, case.spoilt.get("poison", ())):
        step, row, after = made_step.number, made_step.row, made_step.weights
        taken.append(step)
        distances.same(f"step {step}: samples", ours.samples.get(step), made_step.samples)
        for name in sorted(row.keys() & ours.rows.get(step, {}).keys()):
            distances.near(f"step {step}: {name}", ours.rows[step][name], row[name])
        if not row["skipped"] and step in ours.gradients:
            distances.like(f"step {step}: gradient", ours.gradients[step], made_step.gradients)
            distances.like(f"step {step}: weights", ours.states[step], after)
        if bare.optimizer.ema and step in ours.states:
            kept = {name: ours.states[step][f"{name}/ema"] for name in after}
            distances.like(f"step {step}: average", kept, made_step.average)
    distances.same("the steps", sorted(ours.rows), taken)
    for text in ours.written:
        distances.wrong += plain.unlike_chosen(after, bare.model, *text)
    return [f"{line}, by the independent trainer" for line in distances.wrong]


def unlike_bf16(case: Case, made: References) -> list[str]:
    """Return where losses and gradients of one process with fp8 are too far from one without."""
    config, own = in_one_process(case), made.rounded[0]
    if not config.precision.fp8_format:
        return []
    distances, p = Distances(config), dataclasses.replace(config.precision, fp8_format=None)
    bf16 = alone(case, dataclasses.replace(config, precision=p))
    for step, row in bf16.rows.items():
        runs = [
            run
            for run in (own, *made.baselines)
            if step in run.rows and not run.rows[step]["skipped"]
        ]
        if row["skipped"] or own not in runs or len(runs) == 1:
            continue
        far, *others = [abs(run.rows[step]["loss"] - row["loss"]) for run in runs]
        allowed = NOISY * max(*others, FP8 * abs(row["loss"]))
        distances.note(f"step {step}: loss in fp8", far, allowed, f" (bf16's is {row['loss']})")
        for name, ((_, true),) in bf16.gradients[step].items():
            far, *others = [float((run.gradients[step][name][0][1] - true).norm()) for run in runs]
            allowed = NOISY * max(*others, FP8 * float(true.norm()), SMALL[""] * row["grad_norm"])
            distances.note(f"step {step}: gradient of {name} in fp8", far, allowed)
    return distances.wrong


def _skipped(trace: Trace) -> dict[int, float]:
    return {i: row["skipped"] for i, row in trace.rows.items()}


def leg_config(case: Case, number: int, folder: Path, has_graphs: bool = True) -> TrainConfig:
    """Return the configuration of a leg that saves to, and loads from, a folder."""
    leg, config = case.legs[number], configs(case)[number]
    c = dataclasses.replace(config.checkpoint, load=str(folder) if number else None)
    t = config.training
    if leg.end:
        c = dataclasses.replace(c, save_interval=leg.end if leg.lost else c.save_interval)
        t = dataclasses.replace(t, exit_interval=leg.end + leg.lost)
    if len(case.legs) > 1 or c.save:
        c = dataclasses.replace(c, save=str(folder))
    if not has_graphs or ("--own-group" in leg.flags and config.parallel.zero_stage > 1):
        t = dataclasses.replace(t, cuda_graphs="off")  # ZeRO 2 of several ranks has none
    return dataclasses.replace(config, checkpoint=c, training=t)


class Free(NamedTuple):
    """What Adam's steps allow: in weights, and in all that later steps compute from them."""

    kind: str  # of tensors without a suffix in their name
    is_late: bool
    weights: float = 0.0


class Distances:
    """Collects what is too far away; `most` is the largest share of what is allowed."""

    def __init__(self, config: TrainConfig) -> None:
        dtype, o = config.precision.dtype, config.optimizer
        # Lion's float64 has no such steps
        none = {"sgd": None, "lion": None if dtype == "float64" else TINY}
        self.eps = none.get(o.optimizer, o.adam_eps)
        self.wrong: list[str] = []
        self.most, self.where = 0.0, ""
        self.dtype, self.unit = dtype, UNIT[dtype]

    def note(self, what: str, far: float, allowed: float, text: str = "") -> None:
        share = far / allowed if allowed else math.inf if far else 0.0
        if not share <= self.most:
            self.most, self.where = share, what
        if not far <= allowed:
            self.wrong.append(f"{what}: {far:.2e} apart, {allowed:.2e} allowed{text}")

    def same(self, what: str, got: Any, want: Any) -> None:
        if repr(got) != repr(want):  # NaN is NaN
            self.wrong.append(f"{what}: {got} instead of {want}")

    def near(self, what: str, got: float, want: float) -> None:
        self.note(
            what, abs(got - want), LIKE * max(abs(want), LIKE), f" ({got!r} instead of {want!r})"
        )

    def like(self, what: str, got: Tensors, want: dict[str, Tensor]) -> None:
        """Compare a run in one process with another program's, whose roundings are its own."""
        largest = max(float(x.abs().max()) for x in want.values())
        for name, true in want.items():
            ((_, ours),) = got[name]
            self.note(f"{what} of {name}", float((ours - true).abs().max()), LIKE * largest)

    def number(self, what: str, got: float, one: References, of: Callable[[Trace], float]) -> None:
        exact, rounded = of(one.exact), list(map(of, one.rounded))
        if not all(map(math.isfinite, (got, exact, *rounded))):
            return self.same(f"{what} is finite", math.isfinite(got), math.isfinite(rounded[0]))
        if self.dtype == "float64":
            allowed = NEAR * abs(exact)
        else:
            allowed = SPREAD * max(self.unit * abs(exact), *(abs(x - exact) for x in rounded))
        self.note(what, abs(got - exact), allowed, f" ({got!r} instead of {exact!r})")

    def tensors(
        self, what: str, got: Tensors, one: References, of: Callable[[Trace], Tensors], free: Free
    ) -> None:
        exact, rounded = of(one.exact), list(map(of, one.rounded))
        sizes = {name: float(x.abs().max()) for name, ((_, x),) in exact.items()}
        apart = {
            name: max(float((each[name][0][1] - x).abs().max()) for each in rounded)
            for name, ((_, x),) in exact.items()
        }
        kinds = {name: name.partition("/")[2] or free.kind for name in exact}
        most = {kind: max(sizes[n] for n in exact if kinds[n] == kind) for kind in kinds.values()}
        # The largest relative distance of one process among the tensors that are not tiny.
        grown = {kind: 0.0 for kind in most}
        for name, kind in kinds.items() if free.is_late else ():
            if sizes[name] > BIG * most[kind]:
                grown[kind] = max(grown[kind], apart[name] / sizes[name])
        for name, pieces in got.items():
            kind, ((_, true),) = kinds[name], exact[name]
            largest = max(sizes[name], SMALL[kind] * most[kind])
            if self.dtype == "float64":
                allowed = NEAR * largest
            else:
                allowed = SPREAD * max(apart[name], max(grown[kind], self.unit) * largest)
            if kind in ("weights", "ema"):  # an average is no further away than its weights
                allowed = max(allowed, free.weights)
            if kind == "exp_avg_sq" and self.dtype != "float64":
                allowed = max(allowed, of_squares(sizes[name], apart[name]))
            far = max(
                (float((x - true[place]).abs().max()) for place, x in pieces if x.numel()),
                default=0.0,
            )
            self.note(f"{what} of {name}", far, allowed)

    def compare(self, got: Trace, one: References) -> None:
        exact, own = one.exact, one.rounded[0]
        for i, row in got.rows.items():
            if i not in own.rows:
                self.wrong.append(f"step {i} was taken, which one process did not take")
                continue
            self.rows(i, row, one)
            self.same(f"step {i}: the run goes back to", got.went_back.get(i), own.went_back.get(i))
            before = self.step_errors(range(i), exact, own)
            if not row["skipped"]:
                if self.dtype == "float64" and "num_zeros" in row:
                    self.zeros(i, row["num_zeros"], exact.gradients[i])
                free = Free("", bool(before))
                self.tensors(
                    f"step {i}: gradient",
                    got.gradients[i],
                    one,
                    lambda t, i=i: t.gradients[i],
                    free,
                )  # type: ignore[misc]
            errors = before + self.step_errors([i], exact, own)
            free = Free("weights", bool(errors), sum(errors))
            self.tensors(f"step {i}: state", got.states[i], one, lambda t, i=i: t.states[i], free)  # type: ignore[misc]
            if self.dtype in ("bfloat16", "float16") and not row["skipped"]:
                self.masters(i, got, one, bool(before))
        for key, loss in got.validations.items():
            if key in own.validations:
                self.number(f"loss of the {key}", loss, one, lambda t, key=key: t.validations[key])  # type: ignore[misc]
            else:
                self.wrong.append(f"{key}: a validation that one process did not make")

    def masters(self, i: int, got: Trace, one: References, is_late: bool) -> None:
        """Compare a step's updates, and whether masters have what 16 bits would lose."""
        exact, own, dtype = one.exact, one.rounded[0], getattr(torch, self.dtype)
        largest = max(
            float(x.abs().max()) for name, ((_, x),) in exact.states[i].items() if "/" not in name
        )
        rounding = ROUNDINGS * UNIT["float32"] * largest
        made, true, similar = (
            updates(got, i),
            updates(exact, i),
            [updates(run, i) for run in one.rounded],
        )
        free = Free("weights", is_late, rounding + sum(self.step_errors([i], exact, own)))
        self.tensors(f"step {i}: update", made, one, lambda trace: updates(trace, i), free)
        moved = wanted = total = 0.0
        for name, pieces in made.items():
            ((_, right),), ((_, master),) = true[name], own.states[i][name]
            most = torch.stack([(each[name][0][1] - right).abs() for each in similar]).amax(0)
            is_sure = (most < 0.1 * right.abs()) & (right.abs() > rounding)
            fitting = 0
            for place, x in pieces:
                sure = is_sure[place]
                moved += float((x * right[place])[sure].sum())
                wanted += float(right[place][sure].square().sum())
                total += float(right[place].square().sum())
                fitting -= int((master[place].to(dtype) == master[place]).sum())
            fitting += sum(int((x.to(dtype) == x).sum()) for _, x in got.states[i][name])
            count = sum(x.numel() for _, x in pieces)
            self.note(
                f"step {i}: masters of {name} in 16 bits",
                max(fitting, 0),
                FITTING * count + ROUNDINGS,
            )
        if wanted > SURE * total:
            self.note(f"step {i}: share of the update", abs(moved / wanted - 1), MOVED)

    def step_errors(self, steps: Iterable[int], exact: Trace, own: Trace) -> list[float]:
        """Return by how much a rounding of gradients can change a weight in each step.

        Adam moves a weight by lr m / (sqrt(v) + eps), where both may be roundings of 0.
        """
        out = []
        for i in steps if self.eps is not None else ():
            if i in own.rows and not own.rows[i]["skipped"]:
                largest = max(float(x.abs().max()) for ((_, x),) in exact.gradients[i].values())
                out.append(
                    own.rows[i]["lr"] * min(STRIDE, ROUNDINGS * self.unit * largest / self.eps)
                )
        return out

    def zeros(self, i: int, got: float, exact: Tensors) -> None:
        """Check the number of gradients that are 0: others may be 0 or a rounding of it."""
        largest = max(float(x.abs().max()) for ((_, x),) in exact.values())
        small = sum(int((x.abs() <= 1e-13 * largest).sum()) for ((_, x),) in exact.values())
        unused = sum(
            int((x == 0).all(-1).sum()) * x.shape[-1]
            for n, ((_, x),) in exact.items()
            if n == "wte.weight"
        )
        if not unused <= got <= small:
            self.wrong.append(f"step {i}: {got:g} gradients are 0, not {unused} to {small}")

    def rows(self, i: int, row: dict[str, float], one: References) -> None:
        own = one.rounded[0].rows[i]
        self.same(f"step {i}: numbers recorded", sorted(row), sorted(own))
        for name in EXACT:
            self.same(f"step {i}: {name}", row.get(name), own.get(name))
        for name in NUMBERS:
            self.number(f"step {i}: {name}", row[name], one, lambda t, name=name: t.rows[i][name])  # type: ignore[misc]

    def repeated(self, got: Trace, before: Trace, how: str = "taken again") -> None:
        """Require the bits of the steps that the same layout took before."""
        for key in got.validations.keys() & before.validations.keys():
            self.same(f"loss of the {key}, {how}", got.validations[key], before.validations[key])
        for i in sorted(got.rows.keys() & before.rows.keys()):
            self.same(f"step {i}, {how}", got.rows[i], before.rows[i])
            for kind in ("gradients", "states"):
                mine, theirs = getattr(got, kind)[i], getattr(before, kind)[i]
                wrong = [name for name in mine if not equal(mine[name], theirs[name])]
                if wrong and not (kind == "gradients" and got.rows[i]["skipped"]):
                    where = ", ".join(
                        f"{name} ({difference(mine[name], theirs[name])})" for name in wrong[:4]
                    )
                    self.wrong.append(f"step {i}, {how}: other {kind} of {where}")


def of_squares(size: float, apart: float) -> float:
    """Return how far a square may be if another, so far from this size, is of a rounded number."""
    root = math.sqrt(size)
    return (root + SPREAD * (math.sqrt(size + apart) - root)) ** 2 - size


def difference(a: Pieces, b: Pieces) -> str:
    """Say how many numbers differ, where the first one is, and how far apart they are."""
    mine, theirs = (torch.cat([x.flatten().double() for _, x in pieces]) for pieces in (a, b))
    differ = (mine != theirs).nonzero().flatten()
    apart = (mine - theirs).abs()[differ]
    return f"{len(differ)} of {len(mine)} from {int(differ[0])}, at most {float(apart.max()):.1e} apart"


def equal(a: Pieces, b: Pieces) -> bool:
    """Whether all numbers are the same; NaN equals NaN."""
    pairs = zip(a, b, strict=True)
    return all(
        torch.equal(x, y) or bool(((x == y) | (x.isnan() & y.isnan())).all())
        for (_, x), (_, y) in pairs
    )
