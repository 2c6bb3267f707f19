"""Cases: what is trained, in which layouts, where it stops; drawn at random, or read from a line.

A line of a case is `FLAGS | END: LAYOUT | ...`: flags of `meshwright train` for the run that one
process takes from its first step to its last, then the legs in which a layout takes it. `3: FLAGS`
stops and saves after step 3; `3+2: FLAGS` saves after step 3, takes two steps more and is lost, so
that the next leg takes these two again; the last leg has no number. The flags of OURS are none of
Meshwright: they spoil samples, and choose how a leg is run.

A case with `--device cuda` runs on GPUs, and so does its one process, with torch's kernels alone.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import random
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterator

import network_values
from meshwright.base.errors import UserError
from meshwright.config import checks, flags
from meshwright.config.schema import Checkpoint, Parallel, TrainConfig
from network_values import Chances

WORDS = 36  # of NullTokenizer; the end of a document is 36, so the vocabulary's size is a prime
# What a case is if it says nothing else. A flag of a case replaces those of the same line.
BASE = """
    --num-layers 2
    --hidden-size 16 --num-attention-heads 2
    --seq-length 8
    --micro-batch-size 1
    --global-batch-size 4
    --train-iters --train-samples --train-tokens = --train-iters 3
    --lr 1e-2
    --mock-data --data-path --train-data-path = --mock-data
    --make-vocab-size-divisible-by 8
    --hidden-dropout 0
    --attention-dropout 0
    --params-dtype --bf16 --fp16 = --params-dtype float64
    --eval-iters 1
    --seed 1
    --num-workers 0
    --device cpu
    --micro-batch-size --num-accumulation-steps = --micro-batch-size 1
"""
ALWAYS = "--tokenizer-type NullTokenizer --log-params-norm --data-cache-path cache".split()
MOST_RANKS = 8
MOST_STEPS = 8
MOST_STEPS_ON_GPU = 12  # of which the first two of each kind are no CUDA graphs
OURS = {
    "--poison": "the gradients of these samples are infinite",
    "--spoil": "the losses of these samples are NaN",
    "--spike": "the losses of these samples are a thousand times as large",
    "--no-triton": "torch's kernels instead of Triton's",
    "--decode": "at the leg's end texts are written, by a decoder in CUDA graphs and by one without",
    "--own-group": "a single rank shards and sends as one of several does",
}


@dataclasses.dataclass(frozen=True)
class Leg:
    """A part of a run in one layout: `end` is the step after which it is saved, 0 the run's end."""

    flags: tuple[str, ...]
    end: int = 0
    lost: int = 0  # steps after the save that are taken for nothing

    def __str__(self) -> str:
        where = f"{self.end}+{self.lost}: " if self.lost else f"{self.end}: " if self.end else ""
        return f"{where}{' '.join(self.flags)}".strip()


@dataclasses.dataclass(frozen=True)
class Case:
    flags: tuple[str, ...]  # each with its values
    legs: tuple[Leg, ...]

    def __str__(self) -> str:
        return " | ".join([" ".join(self.flags), *map(str, self.legs)])

    @property
    def spoilt(self) -> dict[str, tuple[int, ...]]:
        """Samples by what of OURS is done to them."""
        words = [f.split() for f in self.flags if name_of(f) in ("--poison", "--spoil", "--spike")]
        return {name[2:]: tuple(map(int, numbers)) for name, *numbers in words}

    @property
    def ranks(self) -> int:
        return max(config.world for config in configs(self))


def split_flags(line: str) -> tuple[str, ...]:
    return tuple(x.strip() for x in re.split(r"\s+(?=--)", f" {line.strip()}") if x.strip())


def read(line: str) -> Case:
    first, *rest = line.split("|")
    legs = []
    for text in rest or [""]:
        found = re.fullmatch(r"\s*(?:(\d+)(?:\+(\d+))?:)?(.*)", text)
        assert found
        legs.append(Leg(split_flags(found[3]), int(found[1] or 0), int(found[2] or 0)))
    return Case(split_flags(first), tuple(legs))


# Settings of a case


def name_of(flag: str) -> str:
    return flag.split()[0]


@functools.cache
def parse(flags_of_run: tuple[str, ...]) -> TrainConfig:
    given, out = {name_of(f) for f in flags_of_run}, []
    for line in BASE.strip().splitlines():
        names, _, default = line.partition(" = ")
        if not given & {word for word in names.split() if word.startswith("--")}:
            out += (default or names).split()
    # Flags of one line belong together: a case that gives one of them gives all.
    words = [word for f in flags_of_run if name_of(f) not in OURS for word in shlex.split(f)]
    has_files = not given.isdisjoint(("--data-path", "--train-data-path"))
    size = f"--vocab-size={WORDS if has_files else WORDS + 1}"
    return flags.parse_settings(
        TrainConfig, [*ALWAYS, size, *out, *words], "meshwright test", check=False
    ).config


def configs(case: Case) -> list[TrainConfig]:
    """Return the configuration of each leg, without its folder."""
    return [parse((*case.flags, *leg.flags)) for leg in case.legs]


def in_one_process(case: Case) -> TrainConfig:
    """Return the configuration of the run in one process, with micro-batches as large as can be.

    With --loss-mean microbatch their size decides the numbers. It saves only to go back.
    """
    config = parse(case.flags)
    t, p = config.training, config.parallel
    t = dataclasses.replace(t, cuda_graphs="off", fused_kernels="off", compile="off")
    if t.loss_mean == "global":
        size = math.gcd(*config.batches)
        t = dataclasses.replace(t, micro_batch_size=size, num_accumulation_steps=None)
    t = dataclasses.replace(t, global_batch_size=config.global_batch)
    alone = Parallel(world_size=1, device=p.device)
    saving = config.checkpoint if goes_back(config) else Checkpoint()
    return dataclasses.replace(config, training=t, parallel=alone, checkpoint=saving)


def goes_back(config: TrainConfig) -> bool:
    """Whether a bad step makes the run go back to a checkpoint."""
    return "rollback" in (config.training.on_nonfinite.word, config.training.on_spike.word)


def steps_of(case: Case) -> int:
    return in_one_process(case).steps


@functools.cache
def problems_alone(flags_of_run: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(map(str, checks.problems(in_one_process(Case(flags_of_run, ())))))


@functools.cache
def refusals(case: Case) -> tuple[str, ...]:
    """Return what the checks of settings say against a case."""
    try:
        made = configs(case)
        out = list(problems_alone(case.flags))
    except (UserError, ValueError) as error:
        return (str(error),)
    out += [str(problem) for config in made for problem in checks.problems(config)]
    return tuple(out) or tuple(line for config in made for line in beyond_settings(config))


def beyond_settings(config: TrainConfig) -> list[str]:
    """Return why a legal run cannot be trained here, or cannot equal one process."""
    m, out = config.model, []
    is_drawn_apart = m.attention_impl == "sdpa" or (
        m.attention_impl == "auto" and config.parallel.device != "cpu"
    )
    if m.attention_dropout and is_drawn_apart:
        out.append("torch's fused attention draws its own dropout, which depends on the layout")
    if m.glu_activation == "reglu" and config.precision.dtype != "float64":
        out.append(
            "the slope of relu jumps, so a rounding at 0 can change a gradient by any amount"
        )
    if config.optimizer.optimizer_state_dtype != "float32" and config.precision.dtype != "float64":
        out.append(
            "a rounding of float32 can move a number of the optimizer's state by a step of its format"
        )
    return out


# Drawing

TRAINING: dict[str, Chances] = {
    "format": {
        "--params-dtype float64": 12,
        "--params-dtype float32": 2,
        "--bf16": 2,
        "--bf16 --fp32-residual-connection": 1,
        "--bf16 --fp8-format hybrid --fp8-amax-history-len 2 --fp8-amax-compute-algo max": 1,
        "--bf16 --fp8-format e4m3 --fp8-recipe tensorwise": 1,
        "--fp16 --initial-loss-scale 16 --loss-scale-window 2": 2,
        "--fp16 --initial-loss-scale 64 --loss-scale-window 1 --hysteresis 1": 1,
        "--fp16 --initial-loss-scale 8 --loss-scale-window 1 --hysteresis 2": 4,
        "--fp16 --loss-scale 128 --fp32-residual-connection": 1,
    },
    "hidden dropout": {
        "--hidden-dropout 0": 1,
        "--hidden-dropout 0.1": 2,
        "--hidden-dropout 0.3": 1,
    },
    "attention dropout": {"--attention-dropout 0": 4, "--attention-dropout 0.1": 1},
    "embedding dropout": {"": 3, "--embedding-dropout 0.2": 1},
    "z-loss": {"": 3, "--z-loss-coef 0.1": 1},
    "mean": {"": 3, "--loss-mean microbatch": 1},
    "marks": {
        "": 4,
        "--eod-mask-loss": 2,
        "--reset-attention-mask": 1,
        "--reset-position-ids": 1,
        "--eod-mask-loss --reset-attention-mask --reset-position-ids": 3,
    },
    "data": {
        "--mock-data": 5,
        "--data-path small --split 80,15,5": 2,
        "--data-path ends --split 80,15,5": 4,
        "--data-path 0.3 small 0.7 ends --split 90,10,0": 2,
        "--data-path small large --split 100,0,0": 1,
        "--data-path small --split 70,20,10 --dataloader-type cyclic": 1,
        "--train-data-path small --valid-data-path tiny ends --multiple-validation-sets": 1,
        "--data-path 2 tiny 1 small --split 100,0,0": 1,
        "--data-path tiny --split 100,0,0": 2,
        "--data-path ends --split 80,15,5 --packing best-fit": 3,
        "--data-path 0.3 small 0.7 large --split 90,10,0 --packing best-fit": 2,
        "--data-path 6 small 0 large 4 ends --split 90,10,0 --blend-stages '30%: 1 large 1 small' '75%: ends'": 2,
        "--data-path 1 tiny 1 ends --split 100,0,0 --packing best-fit --blend-stages '3: 3 ends 1 tiny'": 1,
        "--train-data-path 1 small 0 large --valid-data-path tiny --blend-stages '17 tokens: 1 large 2 small'": 1,
    },
    "last epoch": {"": 2, "--last-epoch-cutoff 1": 1, "--last-epoch-cutoff 0.5": 1},
    "validation": {
        "--eval-iters 0": 1,
        "": 2,
        "--eval-iters 2 --eval-interval 2": 2,
        "--full-validation": 1,
    },
    "skipped": {
        "": 8,
        "--skip-train-iteration-range 1-1": 1,
        "--skip-train-iteration-range 2-3": 1,
        "--skip-train-iteration-range 2-2 4-4": 1,
    },
    "optimizer": {
        "--lr 1e-2": 6,
        "--lr 1e-6": 2,  # most updates are below half a step of 16 bits
        "--lr 3e-3 --adam-beta1 0.5 --adam-beta2 0.8 --adam-eps 1e-4": 2,
        "--optimizer sgd --lr 0.3": 2,
        "--optimizer sgd --lr 0.1 --sgd-momentum 0": 1,
        "--optimizer lion --lr 3e-3": 2,
        "--optimizer lion --lr 1e-6": 1,
        "--optimizer lion --lr 1e-3 --lion-beta1 0.5 --lion-beta2 0.8": 1,
        "--optimizer muon --lr 1e-2": 2,
        "--optimizer muon --lr 1e-2 --muon-num-ns-steps 3 --muon-momentum 0.8": 1,
        "--optimizer muon --lr 1e-2 --muon-split-qkv on": 1,
        "--optimizer muon --lr 1e-2 --muon-split-qkv groups": 1,
    },
    "rates": {
        "": 5,
        "--embedding-lr 2e-3 --vector-lr 5e-3": 1,
        "--embedding-lr 0": 1,
        "--head-lr 3e-3": 1,
    },
    "state": {"": 8, "--optimizer-state-dtype bfloat16": 1, "--optimizer-state-dtype float8": 1},
    "schedule": {
        "--lr-decay-style constant": 3,
        "": 1,
        "--lr-decay-style cosine --min-lr 1e-4": 2,
        "--lr-decay-style inverse-square-root": 1,
    },
    "decay": {
        "": 2,
        "--weight-decay 0.3": 2,
        "--weight-decay 0": 1,
        "--weight-decay 0.3 --weight-decay-incr-style rate": 1,
        "--weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 0.5": 1,
        "--weight-decay-incr-style cosine --start-weight-decay 0.4 --end-weight-decay 0.1": 1,
    },
    "cautious": {"": 3, "--cautious-weight-decay": 1},
    "clipping": {"": 2, "--clip-grad 0.25": 3, "--clip-grad 0": 1},
    "average": {"": 3, "--ema 0.9": 1, "--ema 0.2": 1},
    "zeros": {"": 3, "--log-num-zeros-in-grad": 1},
}
SIZES: dict[str, Chances] = {
    "tensor": {"1": 5, "2": 5, "3": 1, "4": 2},
    "pipeline": {"1": 5, "2": 5, "3": 1, "4": 2},
    "context": {"1": 6, "2": 5, "3": 1, "4": 2},
    "data": {"1": 4, "2": 5, "3": 1, "4": 3},
}
LAYOUT: dict[str, Chances] = {
    "zero": {"": 3, "--use-distributed-optimizer": 3, "--zero-stage 2": 3, "--zero-stage 3": 4},
    "copies": {"": 1, "--num-distributed-optimizer-instances 2": 1},
    "sequence parallelism": {"": 1, "--sequence-parallel": 1},
    "pipeline schedule": {
        "": 5,
        "--pipeline-schedule gpipe": 1,
        "--num-layers-per-virtual-pipeline-stage 1": 3,
        "--num-layers-per-virtual-pipeline-stage 2": 1,
    },
    "stages": {"even": 3, "drawn": 1},
    "host": {"": 5, "--cpu-optimizer": 1, "--remote-device cpu": 1},
    "micro-batch": {f"--micro-batch-size {n}": w for n, w in {1: 4, 2: 3, 3: 1, 4: 1}.items()}
    | {"--num-accumulation-steps 2": 1},
    "recomputation": {
        "": 4,
        "--recompute-granularity full": 1,
        "--recompute-granularity selective": 1,
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2": 1,
        "--recompute-granularity full --recompute-method block --recompute-num-layers 1": 1,
        "--recompute-granularity full --checkpoint-in-cpu": 1,
    },
    "reading": {"": 4, "--num-workers 2": 1},
    "saving": {"": 4, "--async-save": 2, "--ckpt-format torch": 1},
    "attention": {"": 4, "--attention-impl reference": 1, "--attention-impl sdpa": 1},
    "padding": {
        "": 3,
        "--make-vocab-size-divisible-by 1": 1,
        "--make-vocab-size-divisible-by 128": 1,
        "--pad-vocab-size-to 48": 1,
    },
    "schedule on resume": {
        "": 6,
        "--use-checkpoint-opt_param-scheduler": 1,
        "--override-opt_param-scheduler": 1,
    },
    "products": {"": 3, "--tp-overlap off": 1},
    "kernels": {"": 2, "--fused-kernels on": 1},
}
# What is drawn otherwise for GPUs: sizes that fp8 and the kernels' tiles fit, and little for which
# torch compiles a kernel (document masks, ALiBi, windows), which takes longer than a case.
ON_GPU: dict[str, Chances] = {
    **network_values.ON_GPU,
    "sequence": {
        "--seq-length 16": 3,
        "--seq-length 32": 4,
        "--seq-length 64": 1,
        "--seq-length 24": 1,
    },
    "format": {
        "--bf16": 4,
        "--bf16 --fp32-residual-connection": 1,
        "--bf16 --fp8-format e4m3": 5,
        "--bf16 --fp8-format hybrid --fp8-amax-history-len 2 --fp8-amax-compute-algo max": 6,
        "--bf16 --fp8-format hybrid --fp8-recipe tensorwise": 3,
        "--bf16 --fp8-format hybrid --first-last-layers-bf16": 1,
        "--fp16 --initial-loss-scale 16 --loss-scale-window 2": 2,
        "--fp16 --initial-loss-scale 64 --loss-scale-window 1 --hysteresis 1": 2,
        "--fp16 --loss-scale 128 --fp32-residual-connection": 1,
        "--params-dtype float32": 2,
        "--params-dtype float64": 1,
    },
    "attention dropout": {
        "--attention-dropout 0": 8,
        "--attention-dropout 0.1 --attention-impl reference": 1,
    },
    "marks": {
        "": 12,
        "--eod-mask-loss": 3,
        "--reset-position-ids": 2,
        "--eod-mask-loss --reset-attention-mask --reset-position-ids": 1,
    },
    "optimizer": {
        "--lr 1e-2": 8,
        "--lr 3e-3 --adam-beta1 0.5 --adam-beta2 0.8 --adam-eps 1e-4": 3,
        "--optimizer lion --lr 3e-3": 2,
        "--optimizer muon --lr 1e-2": 2,
        "--optimizer sgd --lr 0.3": 1,
    },
    "host": {"": 14, "--cpu-optimizer": 1},
    "kernels": {
        "--compile off": 6,
        "--compile off --fused-kernels off": 2,
        "--compile off --no-triton": 1,
    },
    "graphs": {"--cuda-graphs on": 6, "": 1, "--cuda-graphs off": 1},
    "zero": {
        "": 3,
        "--zero-stage 1 --own-group": 2,
        "--zero-stage 1 --own-group --data-parallel-sums collectives": 1,
        "--zero-stage 2 --own-group": 1,
    },
    "decoder": {"": 3, "--decode": 1},
}
# A layout of one rank, and one of two that share a GPU: only gloo lets them.
ALONE: dict[str, Chances] = {
    name: {"": 1}
    for name in ("copies", "sequence parallelism", "pipeline schedule", "stages", "products")
}
SHARED_GPU = ALONE | {
    "graphs": {"--distributed-backend gloo --cuda-graphs off --data-parallel-sums collectives": 1},
    "decoder": {"": 1},
    "zero": {"": 1, "--zero-stage 1": 2, "--zero-stage 2": 1},
}
SHARING = 0.15  # of the legs


class Drawing:
    """Draws cases; counts what was drawn, and what the checks of settings refused.

    `gpus` is the number of GPUs that it draws for, 0 for CPUs.
    """

    def __init__(self, seed: str, gpus: int = 0) -> None:
        self.gpus = gpus
        own = ON_GPU if gpus else {}
        self.common = {
            name: own.get(name, chances)
            for name, chances in (network_values.VALUES | TRAINING).items()
        }
        self.layout = LAYOUT | {
            name: chances for name, chances in own.items() if name not in self.common
        }
        if gpus > 1:
            self.layout |= {"zero": LAYOUT["zero"], "decoder": {"": 1}}
        self.random = random.Random(seed)
        self.values: Counter[tuple[str, str]] = Counter()  # of the case drawn last
        self.rejected = 0

    def pick(self, name: str, chances: Chances) -> str:
        return self.random.choices(list(chances), list(chances.values()))[0]

    def case(self) -> Case:
        while True:
            values: list[tuple[str, str]] = []
            found = self._common(values)
            legs = self._legs(found, values) if found is not None else None
            if found is not None and legs is not None:
                self.values = Counter(values)
                return Case(found, tuple(legs))

    def _accept(self, case: Case) -> bool:
        if not refusals(case):
            return True
        self.rejected += 1
        return False

    def _common(self, values: list[tuple[str, str]]) -> tuple[str, ...] | None:
        chosen = {n: self.pick(n, chances) for n, chances in self.common.items()}
        r = self.random
        batch = r.choice([2, 4, 4, 4, 6, 8, 8, 12])
        steps = r.choice([4, 6, 8, 10, 11, 12] if self.gpus else [2, 3, 3, 4, 5])
        unit, most, each = r.choice([("iters", steps, 1), ("samples", steps * batch, batch)])
        length = f"--train-{unit} {most + (r.randrange(batch) if unit == 'samples' else 0)}"
        if unit == "samples" and r.random() < 0.2 and chosen["sequence"] == "--seq-length 8":
            length = f"--train-tokens {8 * most + r.randrange(8)}"
        if unit == "samples" and batch > 2 and r.random() < 0.5:
            start = r.choice([n for n in range(1, batch) if batch % n == 0])
            chosen["ramp"] = (
                f"--rampup-batch-size {start} {r.choice([start, batch - start])} {r.randint(1, most)}"
            )
        chosen["warm-up"] = self.pick(
            "warm-up",
            {
                "": 3,
                f"--lr-warmup-{unit} {each}": 2,
                "--lr-warmup-fraction 0.3 --lr-warmup-init 1e-4": 1,
            },
        )
        if r.random() < 0.15:
            style = r.choice(["exponential", "linear", "cosine", "minus_sqrt"])
            wsd = f"--lr-wsd-decay-style {style} --lr-wsd-decay-{unit} {each}"
            chosen["schedule"] = f"--lr-decay-style WSD {wsd}"
        if self.gpus:
            chosen |= {
                "device": "--device cuda",
                "fault": self._fault(batch, steps, "fp8" in chosen["format"]),
            }
        elif r.random() < (0.5 if "--fp16" in chosen["format"] else 0.2):
            samples = range(most if unit == "samples" else most * batch)
            some = " ".join(str(n) for n in sorted(set(r.choices(samples, k=r.choice([1, 2, 4])))))
            chosen["poison"] = f"--poison {some} --on-nonfinite skip:9"
        values += chosen.items()
        chosen["length"], chosen["batch"] = length, f"--global-batch-size {batch}"
        if "microbatch" in chosen["mean"]:
            chosen["mean"] += f" --micro-batch-size {r.choice([1, 1, 2, 2, 3])}"
        chosen["seed"] = f"--seed {r.randrange(10**6)}"
        found = tuple(f for text in chosen.values() for f in split_flags(text))
        case = Case(found, (Leg(()),))
        most_steps = MOST_STEPS_ON_GPU if self.gpus else MOST_STEPS
        return found if self._accept(case) and 2 <= steps_of(case) <= most_steps else None

    def _fault(self, batch: int, steps: int, is_fp8: bool) -> str:
        """Return what goes wrong, mostly in steps that are CUDA graphs, and what is done."""
        # What fp8 clamps of a spike depends on the micro-batches before it, so on the layout.
        how = self.pick(
            "fault", {"": 4, "--poison": 2, "--spoil": 6} | ({} if is_fp8 else {"--spike": 1})
        )
        if not how:
            return ""
        r, saves = (
            self.random,
            f"--save saved --save-at-start --save-interval {self.random.choice([1, 2, 3])}",
        )
        sample = r.randrange(batch * min(r.choice([0, 3, 3, 9]), steps - 1), batch * steps)
        if how == "--spike":
            return f"--spike {sample} --on-spike rollback:2 --spike-factor 30 {saves}"
        reaction = r.choice(["--on-nonfinite skip:9", f"--on-nonfinite rollback:2 {saves}"])
        return f"{how} {sample} {reaction}"

    def _legs(self, common: tuple[str, ...], values: list[tuple[str, str]]) -> list[Leg] | None:
        r, steps = self.random, steps_of(Case(common, (Leg(()),)))
        # a run goes back to what one process has saved too
        saved = parse(common).checkpoint.save_interval or 1
        ends = range(saved, steps, saved)
        stops = sorted(r.sample(ends, min(len(ends), r.choices([0, 1, 2], [4, 5, 2])[0])))
        legs: list[Leg] = []
        for end in [*stops, 0]:
            if legs and r.random() < 0.25:
                # the same layout again must give the same bits
                found: tuple[str, ...] | None = legs[-1].flags
                again = [("layout", "as before")]
            else:
                found, again = self._layout(common)
            if found is None:
                return None
            values += again
            is_lost = end and r.random() < 0.4 and not goes_back(parse(common))
            lost = r.randint(1, steps - end) if is_lost else 0
            legs.append(Leg(found, end, lost))
        values += [
            ("legs", str(len(legs))),
            *(("lost steps", str(leg.lost > 0)) for leg in legs[:-1]),
        ]
        return legs

    def _layout(
        self, common: tuple[str, ...]
    ) -> tuple[tuple[str, ...] | None, list[tuple[str, str]]]:
        """Return the flags of a legal layout and what was drawn; None if 50 draws found none."""
        for attempt in range(60):
            if attempt % 12 == 0:  # else keep the sizes, so that rarer ones get their chance
                sizes = self._sizes()
                tables = self.layout
                if self.gpus and math.prod(sizes) == 1:
                    tables = tables | ALONE | {name: ON_GPU[name] for name in ("zero", "decoder")}
                elif math.prod(sizes) > self.gpus > 0:
                    tables = tables | SHARED_GPU
            chosen = {name: self.pick(name, chances) for name, chances in tables.items()}
            names = ("tensor-model-parallel", "pipeline-model-parallel", "context-parallel")
            found = [f"--world-size {math.prod(sizes)}"]
            found += [f"--{n}-size {k}" for n, k in zip(names, sizes, strict=False) if k > 1]
            shown = dict(chosen)
            chosen["stages"] = (
                self._stages(common, sizes[1], chosen) if chosen["stages"] == "drawn" else ""
            )
            if any(f.startswith("--loss-mean") for f in common):
                del chosen["micro-batch"], shown["micro-batch"]
            found += [f for text in chosen.values() for f in split_flags(text)]
            layout = tuple(found)
            if self._accept(Case(common, (Leg(layout),))):
                by_size = dict(zip(SIZES, map(str, sizes), strict=True))
                return layout, [*shown.items(), *by_size.items(), ("ranks", str(math.prod(sizes)))]
        return None, []

    def _sizes(self) -> list[int]:
        """Return the sizes of the dimensions: mostly 2 to 4 ranks, sometimes up to MOST_RANKS.

        A GPU has a rank, and rarely shares itself between two data-parallel ones.
        """
        if self.gpus and self.random.random() < SHARING:
            return [1, 1, 1, 2]
        while True:
            if self.gpus == 1:
                return [1, 1, 1, 1]
            sizes = [int(self.pick(name, chances)) for name, chances in SIZES.items()]
            chance = {1: 0.2, 2: 0.6, 3: 1.0, 4: 1.0}.get(math.prod(sizes), 0.5)
            if math.prod(sizes) <= (self.gpus or MOST_RANKS) and self.random.random() < chance:
                return sizes

    def _stages(self, common: tuple[str, ...], pipeline: int, chosen: dict[str, str]) -> str:
        """Return uneven stages for as many layers and ranks."""
        layers = parse(common).model.num_layers or 1
        found = re.search(r"virtual-pipeline-stage (\d)", chosen["pipeline schedule"])
        chunks = layers // (pipeline * int(found[1])) if found else 1
        count = pipeline * max(1, chunks)
        if pipeline == 1 or count > layers:
            return ""
        borders = [0, *sorted(self.random.sample(range(1, layers), count - 1)), layers]
        return "--pipeline-layout " + ",".join(
            str(b - a) for a, b in zip(borders, borders[1:], strict=False)
        )


def draw(seed: int, number: int, gpus: int = 0) -> tuple[Case, Drawing]:
    """Return case `number` of a seed, the same whatever else is drawn."""
    drawing = Drawing(f"{seed}/{number}", gpus)
    return drawing.case(), drawing


def smaller(case: Case) -> Iterator[Case]:
    """Yield simpler cases, the simplest first: fewer legs, fewer flags, smaller numbers."""
    seen = {case}
    for one in _simpler(case):
        if one not in seen and not refusals(one):
            yield one
        seen.add(one)


def _simpler(case: Case) -> Iterator[Case]:
    legs, replace = case.legs, dataclasses.replace
    if len(legs) > 1:
        yield from (replace(case, legs=(replace(leg, end=0, lost=0),)) for leg in legs)
        yield from (replace(case, legs=legs[:n] + legs[n + 1 :]) for n in range(len(legs) - 1))
    yield from (_with_leg(case, n, replace(leg, lost=0)) for n, leg in enumerate(legs) if leg.lost)
    for change in (_without, _halved, _decremented):
        yield from (replace(case, flags=f) for f in change(case.flags))
        for n, leg in enumerate(legs):
            yield from (_with_leg(case, n, replace(leg, flags=f)) for f in change(leg.flags))
    yield from (
        _with_leg(case, n, replace(leg, end=leg.end - 1))
        for n, leg in enumerate(legs)
        if leg.end > 1
    )


def _with_leg(case: Case, n: int, leg: Leg) -> Case:
    return dataclasses.replace(case, legs=(*case.legs[:n], leg, *case.legs[n + 1 :]))


Flags = tuple[str, ...]


def _without(some: Flags) -> list[Flags]:
    return [some[:n] + some[n + 1 :] for n in range(len(some))]


def _changed(some: Flags, change: Callable[[int], int]) -> list[Flags]:
    out = []
    for n, flag in enumerate(some):
        name, *values = flag.split()
        if (
            len(values) == 1
            and values[0].isdigit()
            and change(int(values[0])) >= 1
            and name != "--seed"
        ):
            out.append((*some[:n], f"{name} {change(int(values[0]))}", *some[n + 1 :]))
    return out


def _halved(some: Flags) -> list[Flags]:
    return [f for f in _changed(some, lambda x: x // 2) if f != some]


def _decremented(some: Flags) -> list[Flags]:
    return _changed(some, lambda x: x - 1)
