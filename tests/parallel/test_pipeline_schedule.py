"""Schedules are complete, free of deadlock, in message order, and have the known bubbles."""

from __future__ import annotations

import pytest

from meshwright.apps.plan import timeline as timelines
from meshwright.apps.plan.timeline import StageTimes, makespan, simulate
from meshwright.base.errors import UserError
from meshwright.config import flags
from meshwright.config.schema import TrainConfig
from meshwright.parallel.pipeline_schedule import Action, most_sent, schedule, stages_of

SIZES = [1, 2, 3, 4, 5, 6, 7, 8]
CASES = [("gpipe", 1), ("1f1b", 1), ("1f1b", 2), ("1f1b", 3), ("1f1b", 4)]


def microbatches(pp, chunks):
    return [pp * n for n in (1, 2, 3, 5)] if chunks > 1 else [1, 2, 3, 5, 8, 13]


@pytest.mark.parametrize("pp", SIZES)
@pytest.mark.parametrize(("kind", "chunks"), CASES)
def test_complete_in_order_and_free_of_deadlock(kind, chunks, pp):
    for m in microbatches(pp, chunks):
        lists = [schedule(kind, pp, rank, m, chunks) for rank in range(pp)]
        for todo in lists:
            assert sorted(todo) == sorted(
                Action(op, c, i) for op in "FB" for c in range(chunks) for i in range(m)
            )
            for op in "FB":
                for c in range(chunks):
                    assert [a.microbatch for a in todo if a[:2] == (op, c)] == list(range(m))
        timeline = simulate(kind, pp, m, chunks)  # raises on deadlock
        assert [list(ran) for ran in timeline.spans] == lists
        for ran in timeline.spans:
            ends = [0.0, *(end for _, end in ran.values())]
            assert all(
                start >= end for (start, _), end in zip(ran.values(), ends[:-1], strict=True)
            )


@pytest.mark.parametrize("pp", SIZES[1:])
@pytest.mark.parametrize(("kind", "chunks"), CASES)
def test_messages_are_received_in_the_order_of_sending(kind, chunks, pp):
    """Test each channel: two ranks, a direction, and whether it wraps around."""
    last = pp * chunks - 1
    for m in microbatches(pp, chunks):
        sent, received = {}, {}
        for rank in range(pp):
            for op, chunk, i in schedule(kind, pp, rank, m, chunks):
                stage, step = chunk * pp + rank, 1 if op == "F" else -1
                for messages, begin, end in (
                    (sent, stage, stage + step),
                    (received, stage - step, stage),
                ):
                    if 0 <= begin <= last and 0 <= end <= last:
                        channel = (begin % pp, end % pp, op, max(begin, end) % pp == 0)
                        messages.setdefault(channel, []).append((end, i))
        assert sent == received
        assert len(sent) == 2 * (pp - 1) + (2 if chunks > 1 else 0)


def ends_with(kind, pp, m, chunks, kept):
    """Return when each rank has ended if it waits for the arrival of gradients but the last `kept`.

    A message is received when the action that needs it begins. A forward pass takes 1, others 2.
    """
    todo = [schedule(kind, pp, rank, m, chunks) for rank in range(pp)]
    stages, last = [stages_of(rank, pp, chunks) for rank in range(pp)], pp * chunks - 1
    homes = {stage: rank for rank, own in enumerate(stages) for stage in own}
    clocks, done, sent, received, waiting = [0.0] * pp, [0] * pp, {}, {}, [[] for _ in range(pp)]

    def advance(rank):
        if len(waiting[rank]) > kept:
            if waiting[rank][0] not in received:
                return False
            clocks[rank] = max(clocks[rank], received[waiting[rank].pop(0)])
            return True
        if done[rank] == len(todo[rank]):
            return False
        op, chunk, i = todo[rank][done[rank]]
        stage, way = stages[rank][chunk], 1 if op == "F" else -1
        needed = (stage - way, way, i)
        if 0 <= needed[0] <= last:
            if needed not in sent:
                return False
            clocks[rank] = received[needed] = max(clocks[rank], sent[needed])
        clocks[rank] += 2 if op == "B" else 1
        if 0 <= stage + way <= last:
            sent[stage, way, i] = clocks[rank]
            if way < 0 and homes[stage - 1] != rank:
                waiting[rank].append((stage, way, i))
        done[rank] += 1
        return True

    while any([advance(rank) for rank in range(pp)]):  # every rank, not only the first that can
        pass
    assert done == [len(actions) for actions in todo], "a deadlock"
    return clocks


@pytest.mark.parametrize("pp", [*SIZES[1:], 12, 16])
@pytest.mark.parametrize(("kind", "chunks"), CASES)
def test_waiting_for_old_messages_ends_and_costs_nothing(kind, chunks, pp):
    for m in [pp * n for n in (1, 2, 3)]:
        waiting = ends_with(kind, pp, m, chunks, most_sent(chunks))
        assert max(waiting) <= 1.011 * max(ends_with(kind, pp, m, chunks, 1000))
    if chunks > 1:
        with pytest.raises(AssertionError, match="deadlock"):
            ends_with(kind, pp, 2 * pp, chunks, 0)


@pytest.mark.parametrize("pp", SIZES)
@pytest.mark.parametrize("forward", [1.0, 2.0])
def test_bubbles(pp, forward):
    for m in (pp, 2 * pp, 5 * pp):
        idle = (pp - 1) / (m + pp - 1)
        for kind in ("gpipe", "1f1b"):
            timeline = simulate(kind, pp, m, 1, StageTimes.even(pp, 1, forward))
            assert timeline.bubble == pytest.approx(idle)
            assert timeline.total == pytest.approx((m + pp - 1) * (forward + 2))
        for chunks in (2, 4):
            timeline = simulate("1f1b", pp, m, chunks, StageTimes.even(pp, chunks, forward))
            assert timeline.total == pytest.approx((m + (pp - 1) / chunks) * (forward + 2))
            assert timeline.bubble == pytest.approx((pp - 1) / (m * chunks + pp - 1))


@pytest.mark.parametrize(("kind", "chunks"), CASES)
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_a_long_step_lasts_as_its_repeating_rounds_do(kind, chunks, pp):
    """The first and the last stage are slower, messages take time, and the rest is not even."""
    forward = [1.0 + 0.1 * (s % 2) for s in range(pp * chunks)]
    forward[-1] += 0.7
    times = StageTimes(tuple(forward), tuple(2 * f for f in forward), 0.05)
    for m in (pp, 6 * pp, 9 * pp + (0 if chunks > 1 and kind == "1f1b" else 1)):
        assert makespan(kind, pp, m, chunks, times) == pytest.approx(
            simulate(kind, pp, m, chunks, times).total
        )


@pytest.mark.parametrize("pp", SIZES)
def test_live_activations(pp):
    for m in (1, pp, 3 * pp):
        assert simulate("1f1b", pp, m).live == [min(pp - rank, m) for rank in range(pp)]
        assert simulate("gpipe", pp, m).live == [m] * pp
    for chunks in (2, 3):
        for rank, live in enumerate(simulate("1f1b", pp, 3 * pp, chunks).live):
            assert live <= 2 * (pp - rank - 1) + (chunks - 1) * pp + 1


def test_refused():
    with pytest.raises(
        ValueError, match=r"micro-batches \(6\) that are a multiple of the stages \(4\)"
    ):
        schedule("1f1b", 4, 0, 6, 2)
    with pytest.raises(ValueError, match="gpipe has one chunk"):
        schedule("gpipe", 4, 0, 8, 2)


def test_deadlock_is_detected(monkeypatch):
    monkeypatch.setattr(timelines, "schedule", lambda *_: [Action("B", 0, 0), Action("F", 0, 0)])
    with pytest.raises(RuntimeError, match=r"deadlocks: 2 ranks are at \[0, 0\]"):
        simulate("1f1b", 2, 1)


# torch's own schedules


def plain(actions, pp):
    """Convert torch's actions to ours, without its idle slots."""
    found = [
        (a.computation_type.value, a.stage_index // pp, a.microbatch_index) for a in actions if a
    ]
    return [Action(*a) for a in found if a[0] in "FB"]


@pytest.mark.parametrize("pp", SIZES)
@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
def test_same_lists_as_torch(chunks, pp):
    from torch.distributed.pipelining import schedules as torchs

    for m in microbatches(pp, 2):
        for rank in range(pp):
            # its constructor wants a process group
            oracle = object.__new__(torchs.ScheduleInterleaved1F1B)
            oracle.pp_group_size, oracle.n_local_stages, oracle._n_microbatches = pp, chunks, m
            oracle.number_of_rounds, oracle.microbatches_per_round = m // pp, pp
            if chunks > 1:
                theirs = oracle._calculate_single_rank_operations(rank)
            # torch's interleaved schedule warms up too long with one chunk; use its 1F1B helper
            else:
                ahead = min(m, pp - rank - 1)
                theirs = torchs._get_1f1b_rank_ops(
                    1,
                    pp,
                    ahead,
                    m - ahead,
                    ahead,
                    rank,
                    lambda k, rank=rank: rank,
                    lambda k, rank=rank: rank,
                )
            assert plain(theirs, pp) == schedule("1f1b", pp, rank, m, chunks)


@pytest.mark.parametrize("removed", ["zero-bubble", "zbv"])
def test_removed_schedules_are_read_from_saved_settings_alone(removed, tmp_path):
    assert flags.from_saved(TrainConfig, {"pipeline_schedule": removed}, "x") == {
        "pipeline_schedule": "1f1b"
    }
    with pytest.raises(UserError, match=f"'{removed}' is none of 1f1b, gpipe; it was removed"):
        flags.parse_settings(TrainConfig, ["--pipeline-schedule", removed], "train")
    (tmp_path / "config.toml").write_text(f'pipeline_schedule = "{removed}"\n')
    parsed = flags.parse_settings(
        TrainConfig, ["--config", str(tmp_path / "config.toml")], "train", check=False
    )
    assert parsed.config.parallel.pipeline_schedule == "1f1b"
    assert any(f"pipeline_schedule {removed} in" in notice for notice in parsed.notices)
