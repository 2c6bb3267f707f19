"""`meshwright plan`: what a run will need, and the fastest layout, before anything is paid for."""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from meshwright.apps.pages.html import write_page
from meshwright.apps.plan import describe
from meshwright.apps.plan.goodput import ExpectedGoodput, Interruptions, expect, losses_of
from meshwright.apps.plan.prediction import Machine, Prediction, find_machine
from meshwright.apps.plan.search import Found, Freedom, LegalLayouts, Search
from meshwright.base import host
from meshwright.base.errors import DONE, USAGE
from meshwright.base.files import replacing
from meshwright.base.records import json_ready
from meshwright.config import checks, flags
from meshwright.config.check_steps import batch_problems
from meshwright.config.fields import flag, group, with_settings
from meshwright.config.presets import family_of
from meshwright.config.problem import Problem, SettingsError, in_words, listed, require, stated
from meshwright.config.schema import TrainConfig
from meshwright.training.sizes import ranks_of_machine

ABOUT = (
    "Predict memory, time and cost of a training, without a device. The flags are those of train. Without flags of a "
    "layout, the fastest of all that fit is searched. Memory is measured on tensors without any, or estimated."
)
# Flags that divide the model or the batch: with one of them that layout is predicted, not searched.
DIVIDING = (
    "tensor_model_parallel_size",
    "sequence_parallel",
    "pipeline_model_parallel_size",
    "num_layers_per_virtual_pipeline_stage",
    "pipeline_schedule",
    "pipeline_layout",
    "context_parallel_size",
    "zero_stage",
)
GPT2_VOCABULARY = 50_257
MOST_DEVICES = 16_384  # the most that are tried where a run does not fit
ENOUGH_SECONDS = 3.0  # for each series of such trials: near the given number, powers of two ...
DRAWN = 40  # layouts in the picture of a search


@dataclass(frozen=True)
@group(docs="plan")
class PlanFlags:
    """Devices, search, costs and output of `meshwright plan`."""

    gpus: int | None = flag(None, "number of devices: another name of --world-size", bound=">0")
    gpu: str | None = flag(
        None,
        "device: a name such as h200, or the file of a profile (none: the one of this machine)",
        value="FORM",
    )
    gpus_per_node: int | None = flag(
        None, "devices of one machine (none: as the device's profile says)", bound=">0"
    )
    link: float | None = flag(
        None,
        "GB/s of each device to other machines, in one direction (none: as the profile says)",
        bound=">0",
    )
    search: bool | None = flag(
        None,
        "search layouts, and keep what is given of one (none: search if no flag of a layout is given)",
    )
    allow_fp8: bool = flag(
        False, "search layouts that multiply in 8 bits too, where the device can"
    )
    best: int = flag(10, "number of layouts in the table of a search", bound=">0")
    price: float | None = flag(None, "price of a device for an hour", bound=">0")
    mtbf: float = flag(
        50_000.0,
        "mean hours between failures of one device; the default is that of Llama 3's 16,384 H100",
        bound=">0",
    )
    restart_minutes: float = flag(5.0, "minutes from a failure to the next step", bound=">=0")
    storage_speed: float | None = flag(
        None,
        "GB/s at which a machine writes its part of a checkpoint (none: as the profile says)",
        bound=">0",
    )
    write: str | None = flag(
        None, "write the settings to this file, for `train --config`", value="FILE"
    )
    write_page: str | None = flag(None, "write text and pictures to this .html file", value="FILE")
    pictures: str | None = flag(
        None, "write the pictures into this folder, as .svg files", value="DIR"
    )
    json: bool = flag(False, "print JSON instead of text")


@dataclass(frozen=True)
class LayoutPlanConfig(TrainConfig):
    """Settings of `meshwright plan`."""

    plan: PlanFlags = PlanFlags()

    def problems(self) -> list[Problem]:
        p = self.plan
        out = []
        if p.gpus and self.parallel.world_size not in (None, p.gpus):
            both = f"{stated(p, 'gpus')} and {stated(self.parallel, 'world_size')}"
            text = f"{both} are one setting; give one"
            out.append(Problem(("gpus", "world_size"), text))
        if p.write and not p.write.endswith(".toml"):
            text = f"{stated(p, 'write')} writes settings in TOML; give a name that ends in .toml"
            out.append(Problem(("write",), text))
        if p.write_page and not p.write_page.endswith((".html", ".htm")):
            text = f"{stated(p, 'write_page')} writes a page; give a name that ends in .html"
            out.append(Problem(("write_page",), text))
        return out

    @property
    def run(self) -> TrainConfig:
        """The training, with what a plan does not need filled in."""
        c = TrainConfig(**{f.name: getattr(self, f.name) for f in dataclasses.fields(TrainConfig)})
        open_settings: dict[str, Any] = {}
        if self.plan.gpus is not None:
            open_settings["world_size"] = self.plan.gpus
        # `auto` tries sizes on a device, which a plan does not have.
        if c.training.micro_batch_size in (None, "auto") and not c.training.num_accumulation_steps:
            open_settings["micro_batch_size"] = 1
        return with_settings(c, **open_settings, **unneeded(c))


@dataclass(frozen=True)
class Plan:
    """What the command found."""

    prediction: Prediction
    found: Found | None  # by a search
    length: int | None  # steps
    losses: Interruptions
    goodput: ExpectedGoodput
    enough: int | None = None  # devices that hold the run, if these do not
    tried: int = 0  # the most devices that were tried for that


def unneeded(c: TrainConfig) -> dict[str, Any]:
    """Return settings that train needs and a plan does not, where they are not given."""
    lr = {} if c.optimizer.lr else {"lr": 1e-4}
    return lr if c.lengths else lr | {"train_iters": 10**6}


def main(argv: list[str]) -> int:
    parsed = flags.parse_settings(LayoutPlanConfig, argv, "meshwright plan", about=ABOUT)
    if parsed.print_config:
        print(flags.to_toml(parsed.config, parsed.sources))
        return DONE
    # The architecture of a loaded checkpoint is part of its folder.
    if parsed.config.checkpoint.load:
        from meshwright.training.before.resolve import complete_settings

        of_train = cast(flags.Parsed[TrainConfig], parsed)
        completed = cast(LayoutPlanConfig, complete_settings(of_train))
        parsed = dataclasses.replace(parsed, config=completed)
    asked = parsed.config.plan
    with in_words(parsed.words):
        plan = make_plan(parsed)

    text = text_of(plan, asked)
    if asked.json:
        print(json.dumps(json_ready(as_json(plan, asked)), indent=2))
    else:
        print("\n".join(text))

    written = []
    if asked.pictures or asked.write_page:
        written += write_drawings(plan, asked, text)
    if asked.write:
        written.append(write_settings(Path(asked.write), plan, unneeded(parsed.config)))
    if not asked.json:
        for path in written:
            print(f"written: {path}")
    return DONE if plan.prediction.fits else USAGE


def make_plan(parsed: flags.Parsed[LayoutPlanConfig]) -> Plan:
    """Predict the given layout, or search for the fastest."""
    config, asked = parsed.config.run, parsed.config.plan
    per_node = asked.gpus_per_node
    if not per_node and config.parallel.num_gpus_per_node > 1:
        per_node = config.parallel.num_gpus_per_node
    machine = find_machine(asked.gpu, per_node, asked.link, asked.storage_speed)
    machine = machine.shared_by(per_node or ranks_of_machine(config))
    prediction = Prediction(config, machine, vocabulary_of(config, parsed.sources)).measured()

    # A layout is searched if the flags name no part of it, or if it is asked for.
    given = given_settings(parsed)
    found = None
    searches = asked.search
    if searches is None:
        searches = not given.intersection(DIVIDING)
    if searches:
        # Garbage collection would take a tenth of the time, and a search makes hardly any cycles.
        with host.collector_off():
            prediction, found = search(prediction, given, asked)
    else:
        require([take_devices(problem) for problem in checks.problems(config, needs_data=False)])

    # Time, saves and failures of the whole run.
    length = prediction.config.steps if parsed.config.lengths else None
    losses = losses_of(prediction.save, config.world, asked.mtbf, asked.restart_minutes)
    step = prediction.time.seconds
    seconds = None if length is None else length * step
    expected = expect(losses, step, seconds, config.checkpoint.save_interval)
    plan = Plan(prediction, found, length, losses, expected)
    if prediction.fits or machine.profile.kind == "cpu":
        return plan

    # It does not fit: how many devices would be enough?
    if found is not None:
        config = with_settings(config, **half_precision(config, given, machine))
        freedom = Freedom(given)
    else:  # the layout was given, so it is kept
        freedom = Freedom(given.union(describe.LAYOUT))
    enough, tried = find_enough(dataclasses.replace(prediction, config=config), freedom)
    return dataclasses.replace(plan, enough=enough, tried=tried)


def take_devices(problem: Problem) -> Problem:
    """Return a problem that names plan's --gpus where the checks of train propose a launch."""
    text = re.sub(r"start (\d+) \(meshwright launch [^)]*\)", r"take --gpus \1", problem.text)
    return dataclasses.replace(problem, text=text)


def find_enough(start: Prediction, freedom: Freedom) -> tuple[int | None, int]:
    """Return the nearest number of devices that is enough, and the largest that was tried.

    Numbers are tried by their distance up to twice the given one, then powers of two and what is
    between them, each for ENOUGH_SECONDS at most.
    """
    count = start.config.world
    tried = [0]

    def first_enough(numbers: Iterable[int]) -> int | None:
        for number in in_time(numbers):
            tried.append(number)
            trial = Search(start.machine, start.vocabulary, freedom)
            if trial.find_small(with_settings(start.config, world_size=number)) is not None:
                return number
        return None

    # Near the given number any count may be what someone has.
    near: list[int] = []
    for distance in range(1, count):
        near += [count + distance, count - distance]
    if enough := first_enough([*near, 2 * count]):
        return enough, max(tried)
    # Further away powers of two come first: most layouts divide them.
    powers = (1 << n for n in range(count.bit_length() + 1, MOST_DEVICES.bit_length()))
    if enough := first_enough(powers):
        # Something between the power before and this one may be enough too.
        below = max(number for number in tried if number < enough)
        return first_enough(range(below + 1, enough)) or enough, enough
    return None, max(tried)


def in_time(numbers: Iterable[int]) -> Iterator[int]:
    """Yield numbers to try for ENOUGH_SECONDS."""
    began = time.perf_counter()
    for number in numbers:
        if time.perf_counter() - began >= ENOUGH_SECONDS:
            return
        yield number


def given_settings(parsed: flags.Parsed[LayoutPlanConfig]) -> frozenset[str]:
    """Return the settings that a search keeps: those typed, and those that a file or shell changes.

    A preset's or recipe's batch sizes, and the defaults that a run's config.toml lists, are free.
    """
    ours = flags.to_dict(parsed.config)
    defaults = flags.to_dict(TrainConfig())
    out = set()
    for name, source in parsed.sources.items():
        # Where each value comes from, as `--print-config` writes it.
        is_typed = source.startswith("command line")
        is_free = source.startswith(("default", "preset", "recipe"))
        is_changed = name in defaults and ours[name] != defaults[name]
        if is_typed or (is_changed and not is_free):
            out.add(name)
    return frozenset(out)


def vocabulary_of(config: TrainConfig, sources: Mapping[str, str]) -> int:
    """Return the number of ids: that of the flags or the data, else that of the preset's source."""
    t = config.tokenizer
    d = config.data
    is_named = t.tokenizer or t.vocab_file or t.tokenizer_model
    if is_named or d.data_path or d.train_data_path or config.checkpoint.load:
        from meshwright.training.before.resolve import find_vocabulary

        return find_vocabulary(config, None).size
    if t.vocab_size:
        return t.vocab_size
    for source in sources.values():
        if source.startswith("preset "):
            return family_of(source.removeprefix("preset ")).vocabulary
    return GPT2_VOCABULARY


def search(start: Prediction, given: frozenset[str], asked: PlanFlags) -> tuple[Prediction, Found]:
    """Return the fastest layout that fits, and all that was found; UserError if none is legal."""
    config = start.config
    machine = start.machine
    if config.training.global_batch_size is None:
        raise SettingsError("{global_batch_size} is needed to search layouts: samples of one step")
    config = with_settings(config, **half_precision(config, given, machine))
    freedom = Freedom(given, asked.allow_fp8 and "fp8" in machine.profile.peaks)
    found = Search(machine, start.vocabulary, freedom, asked.best).run(config)
    chosen = found.fitting[0] if found.fitting else found.nearest
    if chosen is None:
        reasons = []
        for count, reason in found.refusals.listed():
            reasons.append(Problem((), f"{count:,} x {reason}"))
        near = near_flags(start, freedom, config)
        cure = f"take {' or '.join(near)}" if near else "take another number of devices"
        none = Problem((), f"no layout of {config.world:,} devices is legal; {cure}")
        raise SettingsError(listed([none, *reasons]))
    require(checks.problems(chosen.config, needs_data=False))
    return chosen, found


def near_flags(start: Prediction, freedom: Freedom, config: TrainConfig) -> list[str]:
    """Return the next numbers of devices and the next global batch that have a legal layout."""

    def layouts_of(config: TrainConfig) -> LegalLayouts:
        run = Search(start.machine, start.vocabulary, freedom).run_of(config)
        return LegalLayouts(run, freedom)

    def next_number(numbers: Iterable[int]) -> list[str]:
        """Return the first of these numbers that has a legal layout, if it is found in time."""
        for number in in_time(numbers):
            # One micro-batch that some shape can share out is enough for a legal layout.
            legal = layouts_of(with_settings(config, world_size=number))
            if any(legal.micro_batches(shape) for shape in legal.shapes()):
                return [f"--gpus {number}"]
        return []

    count = config.world
    batch = config.global_batch
    legal = layouts_of(config)
    near = [*next_number(range(count - 1, 0, -1)), *next_number(range(count + 1, 2 * count))]

    # The multiples of what all ranks pass at once, below and above the batch.
    sizes = set[int]()
    for shape in legal.shapes():
        unit = shape.micro_batch_size * legal.run.data_ranks(shape)
        run_config = legal.run.config_of(shape)
        for size in (batch // unit * unit, -(-batch // unit) * unit):
            if not size or size in sizes:
                continue
            if not batch_problems(with_settings(run_config, global_batch_size=size)):
                sizes.add(size)
    if sizes:
        nearest = min(sizes, key=lambda size: (abs(size - batch), size))
        near.append(f"--global-batch-size {nearest}")
    return near


def half_precision(config: TrainConfig, given: frozenset[str], machine: Machine) -> dict[str, bool]:
    """Return the setting of the 16-bit format that the device has, unless a flag names a format."""
    if given & {"fp16", "bf16", "params_dtype"} or config.precision.dtype != "float32":
        return {}
    peaks = machine.profile.peaks
    if "bfloat16" in peaks:
        return {"bf16": True}
    return {"fp16": True} if "float16" in peaks else {}


# Output


def text_of(plan: Plan, asked: PlanFlags) -> list[str]:
    one = plan.prediction
    lines = [*describe.head_lines(one), "", *describe.memory_lines(one)]

    # If it does not fit, whether more devices would help.
    if plan.enough:
        lines.append(f"  {plan.enough:,} devices of this kind are enough: see --gpus {plan.enough}")
    elif plan.tried:
        which = "with this layout unchanged it fits no number"
        if plan.found is not None:
            which = "no layout with these flags was found that fits"
        more = "; more were not tried, give a larger --gpus" if plan.tried < MOST_DEVICES else ""
        lines.append(f"  {which} up to {plan.tried:,} devices of this kind{more}")

    # What a step sends and takes, what the run costs, and the layouts beside the chosen one.
    lines += describe.sent_lines(one)
    lines += describe.time_lines(one, plan.length, asked.price)
    lines += describe.checkpoint_lines(plan.losses, plan.goodput, one.save.bytes)
    if plan.found is not None:
        lines += ["", *describe.found_lines(plan.found, asked.best)]
    settings = describe.layout_settings(one.config)
    return [*lines, "", f"flags: {describe.as_flags(settings)}"]


def as_json(plan: Plan, asked: PlanFlags) -> dict[str, Any]:
    """Return a plan as JSON has it: sizes in bytes, times in seconds."""
    one = plan.prediction
    out: dict[str, Any] = describe.as_dict(one)
    if plan.length is not None:
        seconds = plan.length * one.time.seconds
        hours = seconds * one.config.world / 3600
        out["steps"] = plan.length
        out["seconds"] = seconds
        out["device_hours"] = hours
        if asked.price is not None:
            out["cost"] = hours * asked.price
    out["checkpoint"] = {"bytes": one.save.bytes, **dataclasses.asdict(plan.losses)}
    out["goodput"] = dataclasses.asdict(plan.goodput)
    if not one.fits:
        out["enough_devices"] = plan.enough
        out["tried_devices"] = plan.tried
    if found := plan.found:
        refused = found.refusals.listed()
        out["best"] = [describe.as_dict(each) for each in found.fitting[: asked.best]]
        out["refused"] = [{"count": count, "reason": reason} for count, reason in refused]
        out["too_large"] = found.too_large
        out["slower"] = found.slower
    return out


def write_settings(path: Path, plan: Plan, filled_in: Collection[str]) -> Path:
    """Write what was given and chosen as a file for `train --config`; return its path."""
    config = flags.to_dict(plan.prediction.config)
    defaults = flags.to_dict(TrainConfig())
    # Settings that only the plan needed filled in are left to train.
    changed = {name for name, value in config.items() if value != defaults[name]}
    toml = flags.to_toml(plan.prediction.config, only=changed.difference(filled_in))
    head = (
        "# Made by `meshwright plan`. Train with `meshwright train --config FILE`, data and --save."
    )
    with replacing(path, typed=True) as file:
        file.write(f"{head}\n\n{toml}".encode())
    return path


def write_drawings(plan: Plan, asked: PlanFlags, text: list[str]) -> list[Path]:
    """Write the pictures, and the page with all of them."""
    from meshwright.apps.plan import pictures

    one = plan.prediction
    drawn = [pictures.memory_drawing(one)]
    if (schedule := pictures.schedule_drawing(one)) is not None:
        drawn.insert(0, schedule)
    if plan.found:
        drawn.append(pictures.layouts_drawing(one, plan.found.ranked[:DRAWN]))
    drawn.append(pictures.goodput_drawing(plan.losses, plan.goodput, one.time.seconds))
    written = []
    if asked.pictures:
        written += pictures.write_pictures(Path(asked.pictures), drawn)
    if asked.write_page:
        page = pictures.page_of(describe.title(one), text, drawn)
        written.append(write_page(Path(asked.write_page), page, typed=True))
    return written
