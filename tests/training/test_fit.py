"""`--micro-batch-size auto`, counted on a CPU and tried on a GPU; and the reasons to stop early."""

import os
import re
import signal
import tomllib

import pytest
import torch

from meshwright.apps.plan.part import PlanForecast
from meshwright.config import flags
from meshwright.config.schema import TrainConfig, Training
from meshwright.training.before import memory as fit
from meshwright.training.health.stop import StopConditions

pytestmark = pytest.mark.whole  # seconds, not moments

CPU, GIB = torch.device("cpu"), 2**30
FEW = "--train-iters 2 --eval-iters 0 --global-batch-size 12 --micro-batch-size".split()


@pytest.fixture
def memory(monkeypatch):
    """memory(n) leaves n bytes free; counted[-2:] are the bytes of one and three samples."""
    counted, real = [], fit.peak_bytes

    def peak_bytes(attempt, size):
        counted.append((size, real(attempt, size)))
        return counted[-1][1]

    def arrange(free):
        monkeypatch.setattr("meshwright.base.host.free_host_memory", lambda: free)
        return counted

    monkeypatch.setattr(fit, "peak_bytes", peak_bytes)
    return arrange


def each(counted):
    """Return the bytes of one sample."""
    last = dict(counted[-2:])
    return (last[3] - last[1]) / 2


def chosen(got):
    assert got.status == 0
    return int(re.search(r" > --micro-batch-size auto: (\d+) \(", got.out)[1])


# On a CPU, by the command


def test_follows_the_memory(run, memory):
    """Slightly less memory than a size needs gives the next smaller divisor."""
    counted, one_step = memory(0), (*FEW, "auto", "--train-iters", "1")
    assert chosen(run(*one_step)) == 1
    one = each(counted)
    for size, smaller in ((12, 6), (2, 1)):
        needed = size * one / fit.MEMORY_SHARE
        memory(needed * 1.001)
        assert chosen(run(*one_step)) == size
        memory(needed * 0.999)
        assert chosen(run(*one_step)) == smaller
    memory(2**60)
    got = run(*one_step)
    assert (
        chosen(got) == 12
        and f"one sample takes {one / 2**20:,.1f} MiB, {2**30:,.1f} GiB are free" in got.out
    )


@pytest.mark.parametrize(("ramp", "want"), [(("6", "3", "12"), 3), (("2", "5", "12"), 1)])
def test_divides_every_size_of_a_ramp(run, memory, ramp, want):
    memory(2**60)
    got = run(
        *FEW, "auto", "--train-iters", "none", "--train-samples", "48", "--rampup-batch-size", *ramp
    )
    sizes = got.column("batch")
    assert chosen(got) == want and len(set(sizes)) > 1 and all(n % want == 0 for n in sizes)


@pytest.mark.parametrize(
    "flags",
    [["--fp16", "--initial-loss-scale", "256"]],
    ids="".join,
)
def test_attempts_leave_no_trace(run, memory, tmp_path, flags):
    """Losses and checkpoint equal those of the same size given by hand, bit for bit."""
    counted = memory(0)
    assert chosen(run(*FEW, "auto", *flags)) == 1
    memory(4.5 * each(counted) / fit.MEMORY_SHARE)
    auto = run(*FEW, "auto", *flags, "--save", str(tmp_path / "auto"))
    byhand = run(*FEW, "4", *flags, "--save", str(tmp_path / "hand"))
    assert chosen(auto) == 4 and auto.losses == byhand.losses and len(auto.losses) == 2
    assert auto.column("grad_norm") == byhand.column("grad_norm")
    files = [
        {p.name: p.read_bytes() for p in (tmp_path / n).rglob("*.safetensors")}
        for n in ("auto", "hand")
    ]
    assert files[0] == files[1] and files[0]


def test_saved_and_kept_on_resume(run, memory, tmp_path):
    """config.toml and the checkpoint hold the number; a resumed run keeps it while it fits."""
    save, flags = tmp_path / "save", (*FEW, "auto", "--lr-decay-iters", "6")
    counted = memory(0)
    run(*flags)
    one = each(counted)
    memory(4.5 * one / fit.MEMORY_SHARE)
    first = run(*flags, "--save", str(save))
    assert chosen(first) == 4
    settings = tomllib.loads((save.parent / "run1" / "config.toml").read_text())
    assert (
        settings["training"]["micro_batch_size"] == 4
        and settings["training"]["global_batch_size"] == 12
    )

    def again(*more):
        return run(*flags, "--load", str(save), "--train-iters", "4", *more)

    memory(2**60)
    resumed = again()
    assert chosen(resumed) == 4 and resumed.column("iteration") == [3, 4]
    assert chosen(again("--finetune")) == 12  # another run
    # 4 does not divide it
    assert chosen(again("--global-batch-size", "18", "--override-opt_param-scheduler")) == 18
    memory(2.5 * one / fit.MEMORY_SHARE)
    assert chosen(again()) == 2
    whole = run(*FEW, "4", "--lr-decay-iters", "6", "--train-iters", "4")
    assert first.losses + resumed.losses == whole.losses


@pytest.mark.long
def test_more_fits_with_less_kept(run, memory):
    """Recomputation, bf16 and shorter samples each fit a larger micro-batch."""
    counted = memory(0)
    base = (*FEW, "auto", "--num-layers", "6", "--train-iters", "1")
    run(*base)
    one = each(counted)
    memory(2.5 * one / fit.MEMORY_SHARE)
    assert chosen(run(*base)) == 2
    assert chosen(run(*base, "--recompute-granularity", "full")) > 2 and each(counted) < one / 2
    assert chosen(run(*base, "--seq-length", "8")) > 2 and each(counted) < 0.6 * one
    for more in (
        ["--recompute-activations"],
        ["--bf16"],
        "--recompute-granularity full --recompute-method block".split(),
    ):
        run(*base, *more)
        assert 0.3 * one < each(counted) < one, more


# The count


def test_peak_bytes_counts_what_lives_and_each_storage_once():
    def attempt(n):
        a, b = torch.zeros(n, 4), torch.zeros(n, 8, dtype=torch.float64)
        b.view(-1)[:3].add_(1)
        del a
        c = torch.zeros(n, 3).expand(5, n, 3)
        del b
        return c.transpose(0, 1) if n else None

    # a and b; b and c are 76
    assert [fit.peak_bytes(attempt, n) for n in (1, 10, 10)] == [80, 800, 800]

    def twice(n):
        for _ in range(5):
            attempt(n)
        torch.zeros(n, 25)

    assert fit.peak_bytes(twice, 10) == 1000


# A GPU


class Card:
    """A card with `have` GiB: `attempt` needs 10 and `slope` for each sample."""

    def __init__(self, monkeypatch, have, slope=1.0, worse=(), held=4):
        self.have, self.slope, self.worse, self.tried = have, slope, worse, []
        self.peak, self.held, self.cleared = 0, held, 0
        cuda = {
            "mem_get_info": lambda d: (int((have - held) * GIB), int(have * GIB)),
            "memory_reserved": lambda d: held * GIB,
            "reset_peak_memory_stats": lambda d: setattr(self, "peak", 0),
            "memory_stats_as_nested_dict": lambda d: {
                "allocated_bytes": {"all": {"peak": self.peak}}
            },
            "empty_cache": lambda: setattr(self, "cleared", self.cleared + 1),
        }
        for name, function in cuda.items():
            monkeypatch.setattr(torch.cuda, name, function)
        monkeypatch.setattr(torch.accelerator, "synchronize", lambda d: None)
        # It takes half a second among all modules of the tests.
        monkeypatch.setattr(fit.gc, "collect", lambda: None)

    def attempt(self, size):
        self.tried.append(size)
        needed = 10 + self.slope * size
        if needed > self.have or size in self.worse:
            raise torch.OutOfMemoryError("out of memory")
        self.peak = max(self.peak, int(needed * GIB))

    def largest(self, batches, preferred=None, planned=None):
        return fit.find_largest(self.attempt, batches, torch.device("cuda"), preferred, planned)


@pytest.mark.parametrize(
    ("have", "want"),
    [
        (1000, 24),
        (34 / 0.92 + 0.01, 24),
        (34 / 0.92 - 0.01, 12),
        (18 / 0.92 - 0.01, 6),
        (13.1, 2),
        (12.5, 1),
    ],
)
def test_the_largest_divisor_below_the_line(monkeypatch, have, want):
    """Two attempts give the line, 10 + n; the third is the choice. 92 % may be filled."""
    card = Card(monkeypatch, have)
    size, message = card.largest([24])
    assert size == want and card.tried == [1, 2, *([want] if 10 + want <= 0.92 * have else [])]
    assert message == f"one sample takes 1.00 GiB beside 10.00, of {have:,.1f}"
    assert card.cleared >= 4


def test_the_plan_is_tried_first(monkeypatch):
    """It is kept if it fits and the next divisor would not; otherwise all is measured."""
    for have, slope, tried in (
        (20, 1.0, [8]),  # 12 samples would need 22 GiB of 18.4
        (1000, 1.0, [24]),  # there is no larger divisor
        (20, 1.5, [8, 1, 2, 4]),  # the plan is too small: 8 need 22
        (20, 0.2, [8, 1, 2, 24]),  # it is too large
    ):
        card = Card(monkeypatch, have, slope)
        size, message = card.largest([24], planned=lambda n: (10 + n) * GIB)
        assert card.tried == tried and size == tried[-1], (have, slope)
        assert message.startswith("as planned") == (len(tried) == 1)
    card = Card(monkeypatch, 11.5)
    assert card.largest([24], planned=lambda n: 12 * n * GIB)[0] == 1 and card.tried == [1, 2]


def test_the_plan_knows_sizes_of_a_micro_batch():
    words = "--preset gpt2-345m --mock-data --bf16 --micro-batch-size auto --global-batch-size 16 --train-iters 3"
    config = flags.parse_settings(TrainConfig, words.split(), "meshwright train").config
    one, two, four = (PlanForecast().planned_bytes(config, 50304, n) for n in (1, 2, 4))
    assert one > 355e6 * 18 and four - two == pytest.approx(2 * (two - one), rel=0.02) and two > one


def test_an_attempt_that_runs_out_of_memory(monkeypatch):
    """The next smaller divisor is tried; if two samples do not fit, one is taken untried."""
    card = Card(monkeypatch, 1000, worse=(24, 12, 8))
    assert card.largest([24])[0] == 6 and card.tried == [1, 2, 24, 12, 8, 6]
    card = Card(monkeypatch, 11.5)
    assert card.largest([24]) == (1, "two samples do not fit") and card.tried == [1, 2]
    card = Card(monkeypatch, 5)
    assert card.largest([24])[0] == 1


@pytest.mark.long
def test_a_ramp_and_an_earlier_choice_on_a_card(monkeypatch):
    assert Card(monkeypatch, 1000).largest([24, 16, 4])[0] == 4
    assert Card(monkeypatch, 1000).largest([7, 3])[0] == 1
    card = Card(monkeypatch, 1000)
    assert card.largest([24], 6) == (6, "as before") and card.tried == [6]
    card = Card(monkeypatch, 20)
    assert card.largest([24], 12)[0] == 8 and card.tried == [12, 1, 2, 8]  # 12 needs 22
    card = Card(monkeypatch, 1000)
    assert card.largest([24], 5)[0] == 24 and 5 not in card.tried  # divides none


def test_other_errors_are_not_taken_for_a_full_card(monkeypatch):
    card = Card(monkeypatch, 1000)

    def attempt(size):
        raise RuntimeError("a defect")

    with pytest.raises(RuntimeError, match="a defect"):
        fit.find_largest(attempt, [4], torch.device("cuda"), None)
    assert card.cleared == 2


# Reasons to stop before the last step


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.fault("F16")
def test_signal(tmp_path, monkeypatch, capfd, number, status):
    """A signal is noted and wins over other reasons; a second one exits; handlers are restored."""
    before = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
    end = StopConditions(Training(kill_switch_path=str(tmp_path)), 0.0, "run")
    saved = [1200, 600]
    monkeypatch.setattr("meshwright.checkpoint.steps.list_steps", lambda folder: saved)
    with end.handle_signals():
        assert end.reason() == f"kill switch {tmp_path}" and end.status == 0 and end.signal is None
        signal.raise_signal(number)
        assert end.signal is number and end.reason() == number.name and end.status == status
        message = f"{number.name}: finishing this step and saving; send it again to stop at once\n"
        assert capfd.readouterr().err == message
        left = []
        monkeypatch.setattr(os, "_exit", left.append)
        for again in (signal.SIGINT, signal.SIGTERM):
            signal.raise_signal(again)
            saved.clear()
        first, second = capfd.readouterr().err.splitlines()  # the replaced _exit returns
        assert first == "stopped at once; step 1,200 is saved: it goes on from there"
        assert second == "stopped at once; no step is saved"
        assert left == [130, 143]
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)] == before


@pytest.mark.parametrize("first", [signal.SIGUSR1, signal.SIGUSR2])
@pytest.mark.fault("F16")
def test_a_warning(monkeypatch, capfd, first):
    """Schedulers warn several times, some all processes, and send SIGTERM while the run saves."""
    end, left = StopConditions(Training(), 0.0, "run"), []
    monkeypatch.setattr(os, "_exit", left.append)
    with end.handle_signals():
        for number in (first, first, signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR2):
            signal.raise_signal(number)
        assert (
            end.signal is first
            and end.reason() == first.name
            and end.status == 128 + first
            and not left
        )
        assert capfd.readouterr().err == f"{first.name}: finishing this step and saving\n"
        signal.raise_signal(signal.SIGTERM)
    assert left == [143] and "stopped at once" in capfd.readouterr().err


@pytest.mark.flag("exit_signal")
def test_exit_signal():
    """Only the named signals are caught, and those that always are."""
    names = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGXCPU")
    for given, caught in (
        (Training(), names[:4]),
        (Training(exit_signal=["SIGXCPU"]), ("SIGTERM", "SIGINT", "SIGXCPU")),
    ):
        before = {name: signal.getsignal(signal.Signals[name]) for name in names}
        with StopConditions(given, 0.0).handle_signals():
            changed = {
                n
                for n, handler in before.items()
                if signal.getsignal(signal.Signals[n]) is not handler
            }
        assert changed == {*caught}
        assert before == {name: signal.getsignal(signal.Signals[name]) for name in names}


def test_signals_are_left_alone():
    """With --no-exit-signal-handler; and handlers are restored after an exception."""
    seen = []
    old = signal.signal(signal.SIGTERM, lambda *a: seen.append(a[0]))
    try:
        end = StopConditions(Training(exit_signal_handler=False), 0.0)
        with end.handle_signals():
            signal.raise_signal(signal.SIGTERM)
        assert seen == [signal.SIGTERM] and end.reason() is None and end.status == 0
        end = StopConditions(Training(), 0.0)
        with pytest.raises(ZeroDivisionError), end.handle_signals():
            raise ZeroDivisionError
        signal.raise_signal(signal.SIGTERM)
        assert len(seen) == 2 and end.signal is None
    finally:
        signal.signal(signal.SIGTERM, old)
