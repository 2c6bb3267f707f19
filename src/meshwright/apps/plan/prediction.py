"""What a run will need on given devices: memory of each rank, time of a step, checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from meshwright.apps.plan import estimate, memory
from meshwright.apps.plan.measure.operations import StepOperations
from meshwright.apps.plan.memory import RankMemory
from meshwright.apps.plan.saving import SaveTime, save_time
from meshwright.apps.plan.timeline import StageTimes
from meshwright.apps.plan.timing import StepTerms, StepTime, measured_operations, terms_of
from meshwright.base.device import ask_nvidia_smi
from meshwright.base.device_profiles import (
    DeviceProfile,
    Links,
    load_profile,
    profile_names,
    profile_of,
    this_cpu,
)
from meshwright.base.errors import UserError
from meshwright.config.schema import TrainConfig
from meshwright.model.counts import padded_size
from meshwright.training.sizes import most_of_a_machine


@dataclass(frozen=True)
class Machine:
    """Devices of one kind, and what connects them."""

    profile: DeviceProfile
    links: Links
    sharers: int = 1  # ranks that share a device: those of a machine share its CPU and its memory

    def shared_by(self, ranks: int) -> Machine:
        """Return the machine with so many ranks, if they share a CPU; each has a GPU of its own."""
        if self.profile.kind != "cpu" or ranks == 1:
            return self
        # A rank computes at its share of the speed.
        peaks = {dtype: peak / ranks for dtype, peak in self.profile.peaks.items()}
        each = replace(self.profile, peaks=peaks, bandwidth=self.profile.bandwidth / ranks)
        return Machine(each, replace(self.links, gpus_per_node=ranks), ranks)


@dataclass(frozen=True)
class Prediction:
    """A run in a layout on a machine, predicted when asked.

    Its memory and what a step executes are estimated by closed forms, or measured with torch.
    """

    config: TrainConfig
    machine: Machine
    vocabulary: int
    is_measured: bool = False

    def measured(self) -> Prediction:
        """Return the prediction by real steps, if this machine can measure them.

        It takes seconds and patches torch, so nothing may train in this process. Only the blocks of
        a GPU can be measured, so a plan for a CPU stays an estimate.
        """
        return replace(
            self, is_measured=self.machine.profile.kind != "cpu" and memory.can_measure()
        )

    @cached_property
    def padded(self) -> int:
        m = self.config.model
        p = self.config.parallel
        divisor = m.make_vocab_size_divisible_by
        return padded_size(
            self.vocabulary, divisor, p.tensor_model_parallel_size, m.pad_vocab_size_to
        )

    @cached_property
    def ranks(self) -> list[RankMemory]:
        """The memory of each pipeline rank."""
        if self.is_measured:
            return memory.memory_of_ranks(self.config, self.padded, self.machine.profile)
        return estimate.memory_of_ranks(self.config, self.padded, self.machine.profile)

    @cached_property
    def left_first(self) -> int:
        """Bytes left free by the rank that is estimated to be the fullest: a quick answer."""
        if not self.is_measured:
            return self.left
        # Measuring takes seconds for each rank, so only the likeliest is measured.
        rank = replace(self, is_measured=False).fullest
        first = memory.memory_of_rank(self.config, self.padded, rank, self.machine.profile)
        return self.machine.profile.memory_bytes - first.total

    @cached_property
    def operations(self) -> StepOperations | None:
        """What a step executes, if it is measured; a step of compiled blocks cannot be."""
        if not self.is_measured:
            return None
        return measured_operations(self.config, self.padded, self.machine.profile)

    @cached_property
    def terms(self) -> StepTerms:
        machine = self.machine
        return terms_of(self.config, self.padded, machine.profile, machine.links, self.operations)

    @cached_property
    def time(self) -> StepTime:
        return self.terms.result()

    @property
    def stage_times(self) -> StageTimes:
        """Seconds of a micro-batch in each stage."""
        return self.terms.stage_times(self.terms.all_stages())

    @cached_property
    def save(self) -> SaveTime:
        return save_time(self.config, self.padded, self.machine.profile)

    @property
    def tokens_per_second(self) -> float:
        return self.time.tokens_per_second

    @cached_property
    def fullest(self) -> int:
        """The pipeline rank whose tensors need the most memory."""
        return max(range(len(self.ranks)), key=lambda rank: self.ranks[rank].allocated)

    @property
    def need(self) -> int:
        """Bytes of the fullest rank's process."""
        return self.ranks[self.fullest].total

    @property
    def need_of_device(self) -> int:
        """Bytes of the fullest rank's process, or of all ranks of the fullest machine on a CPU."""
        if self.machine.sharers == 1:
            return self.need
        each = [rank.total for rank in self.ranks]
        return most_of_a_machine(each, self.config.world, self.machine.sharers)

    @property
    def tensors(self) -> int:
        """Bytes of the fullest rank's tensors, and of the driver and its libraries."""
        memory = self.ranks[self.fullest]
        return memory.allocated + memory.context

    @property
    def left(self) -> int:
        """Bytes that are left free where memory is the shortest; negative if it does not fit."""
        return self.machine.profile.memory_bytes - self.need_of_device

    @property
    def fits(self) -> bool:
        return self.left >= 0


def predict(config: TrainConfig, profile: DeviceProfile, vocabulary: int) -> Prediction:
    """Return what a run will need on a machine of such devices, estimated: for other apps."""
    return Prediction(config, Machine(profile, profile.links), vocabulary)


def find_machine(
    name: str | None,
    per_node: int | None = None,
    link: float | None = None,
    disk: float | None = None,
) -> Machine:
    """Return the machine of a profile, or this one, with other links or storage in GB/s."""
    profile = load_profile(name) if name else this_device()
    profile = this_cpu() if profile.name == "cpu" else profile
    if disk is not None:
        profile = replace(profile, storage={**profile.storage, "disk": disk * 1e9})
    links = profile.links if per_node is None else replace(profile.links, gpus_per_node=per_node)
    return Machine(profile, links if link is None else links.with_network(link * 1e9))


def this_device() -> DeviceProfile:
    """Return the profile of this machine's devices: of its GPU, or of its CPU if it has none."""
    try:
        # The driver's tool is asked, since importing torch takes seconds.
        product = ask_nvidia_smi("name", "csv,noheader").splitlines()[0]
    except (RuntimeError, IndexError):
        return load_profile("cpu")
    profile = profile_of(product)
    if profile is None:
        known = ", ".join(profile_names())
        raise UserError(
            f"no profile of {product}; give --gpu one of {known}, or a file of `bench --calibrate`"
        )
    return profile
