"""Sums of symmetric memory, with threads as ranks and memory of the host; how they are chosen."""

import contextlib
import threading
from unittest import mock

import pytest
import torch

from layouts import FLAGS
from meshwright.base import device as devices
from meshwright.base.errors import UserError
from meshwright.config import flags
from meshwright.config.schema import TrainConfig
from meshwright.parallel import symmetric_memory
from meshwright.parallel.symmetric_memory import SymmetricBuffer, trial_numbers
from meshwright.training import network

SIZE = 1000


class Stream:
    """The part of a stream that is used: on a CPU, all work is done when it is submitted."""

    device = torch.device("cpu")

    def wait_stream(self, other):
        pass

    def wait_event(self, event):
        event.waited = True

    def record_event(self):
        return type("Event", (), {"waited": False})()


@pytest.fixture
def run(monkeypatch):
    """run(ranks, work) calls work(rank, SymmetricBuffer) in a thread a rank; return all buffers."""
    monkeypatch.setattr(devices, "current_stream", lambda device: Stream())
    monkeypatch.setattr(devices, "use_stream", lambda stream: contextlib.nullcontext())

    def run_all(ranks, work):
        torch.manual_seed(ranks)
        buffers = [torch.randint(-99, 99, (SIZE,)).float() for _ in range(ranks)]
        before, barrier, failures = (
            [x.clone() for x in buffers],
            threading.Barrier(ranks, timeout=20),
            [],
        )

        def one(rank):
            try:
                work(rank, SymmetricBuffer(buffers, rank, barrier.wait, Stream()))
            except BaseException as error:
                failures.append(error)
                barrier.abort()

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures, failures
        return before, buffers

    return run_all


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("span", [(0, SIZE), (100, 480), (7, 11), (999, 1)])
def test_total(run, ranks, span):
    begin, size = span

    def work(rank, flat):
        flat.reserve(size)
        done = flat.total(begin, size)
        done.wait()
        assert done.event.waited

    before, after = run(ranks, work)
    inside = slice(begin, begin + size)
    for old, new in zip(before, after, strict=True):
        assert torch.equal(new[inside], sum(x[inside] for x in before))
        assert torch.equal(new[:begin], old[:begin]) and torch.equal(
            new[begin + size :], old[begin + size :]
        )


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_scatter_then_gather(run, ranks):
    """ZeRO 1: each rank's part of the sum, here doubled, comes back to all."""
    begin, size = 200, 640

    def work(rank, flat):
        flat.reserve(size)
        out = torch.full((size // ranks,), float("nan"))
        flat.scatter(begin, size, out).wait()
        flat.barrier()  # the norm's sum over all ranks
        flat.own[flat.part(begin, size, rank)] = 2 * out
        flat.gather(begin, size).wait()

    before, after = run(ranks, work)
    expected = 2 * sum(x[begin : begin + size] for x in before)
    assert all(torch.equal(x[begin : begin + size], expected) for x in after)


def test_memory_is_clear_before_others_map_it(monkeypatch):
    """A signal that comes before torch has cleared the memory would be lost, and the rank hang."""
    cpu = torch.device("cpu")
    order = []

    def empty(size, dtype, device):
        order.append("empty")
        return torch.ones(size, dtype=dtype, device=device)

    def rendezvous(own, name):
        order.append(f"rendezvous, sum {own.sum():g}")
        return mock.Mock(get_buffer=lambda *_: own)

    memory = mock.Mock(empty=empty, rendezvous=rendezvous)
    monkeypatch.setattr(symmetric_memory, "map_memory_of", lambda group: memory)
    monkeypatch.setattr(symmetric_memory, "stream_barrier", lambda words, rank: None)
    monkeypatch.setattr(symmetric_memory.dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(symmetric_memory.dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(devices, "new_stream", lambda device: Stream())
    monkeypatch.setattr(devices, "synchronize", lambda device: order.append(f"wait for {device}"))
    symmetric_memory.BufferMapper(mock.Mock(), cpu).zeros(8, torch.float32)
    assert order == ["empty", "wait for cpu", "rendezvous, sum 0"] * 2


@pytest.mark.flag("data_parallel_sums")
def test_choice(monkeypatch):
    cpu = torch.device("cpu")
    assert symmetric_memory.choose_mapper("auto", None, cpu) == (None, "")
    for wanted, reason in (
        ("collectives", "of --data-parallel-sums collectives"),
        ("auto", "the device is not an NVIDIA GPU"),
    ):
        assert symmetric_memory.choose_mapper(wanted, object(), cpu) == (None, reason)
    with pytest.raises(
        UserError, match="--data-parallel-sums copies: the device is not .*; give .* auto"
    ):
        symmetric_memory.choose_mapper("copies", object(), cpu)


@pytest.mark.parametrize(("zero", "group"), [(0, "gradients"), (1, "shard"), (2, None), (3, None)])
def test_each_stage_of_zero(monkeypatch, zero, group):
    layout, given = mock.Mock(group=lambda name: name), mock.Mock(return_value=("mapper", ""))
    monkeypatch.setattr(network.symmetric_memory, "choose_mapper", given)
    for wanted in ("auto", "copies"):
        words = f"{FLAGS} --world-size 2 --zero-stage {zero} --data-parallel-sums {wanted}".split()
        config = flags.parse_settings(TrainConfig, words, "test").config
        refusal = pytest.raises(
            UserError, match=f"copies is for ZeRO 0 and 1, not {zero}; leave it out"
        )
        with refusal if group is None and wanted == "copies" else contextlib.nullcontext():
            chosen = network.sums_by_copies(config, layout, torch.device("cpu"))
            assert chosen == (group and "mapper")
    assert [call.args[1] for call in given.call_args_list] == [group] * 2 * (group is not None)


def test_a_wrong_sum_is_refused(monkeypatch):
    """Every start adds numbers up in both ways."""

    monkeypatch.setattr(symmetric_memory.dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(symmetric_memory.dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(symmetric_memory.dist, "all_reduce", lambda x, group: None)
    for error in (0, 1):
        buffer = mock.Mock(device=torch.device("cpu"), own=torch.zeros(symmetric_memory.TRIAL_SIZE))
        buffer.total.side_effect = lambda *_, own=buffer.own, error=error: (
            own[-1].add_(error),
            mock.Mock(),
        )[1]
        assert symmetric_memory.sums_are_right(buffer, None) == (error == 0)


@pytest.mark.parametrize("ranks", [2, 3, 8, 64, 1024])
def test_the_numbers_of_the_trial_have_an_exact_sum(ranks: int) -> None:
    """Beyond 2^24 the order of the addition would decide, and three GPUs would not map memory."""
    cpu = torch.device("cpu")
    largest = float(trial_numbers(0, ranks, cpu).max())  # a rank has its multiple of it
    assert largest * ranks * (ranks + 1) / 2 <= 2**24
    assert not torch.equal(trial_numbers(0, ranks, cpu), trial_numbers(1, ranks, cpu))
