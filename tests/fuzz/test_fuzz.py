"""The fuzz: cases can be drawn, read, shrunk; equal ones are equal, and seeded bugs are found."""

from __future__ import annotations

import json

import pytest
import torch

from fuzz import cases, crews, program
from fuzz.bugs import BUGS, ON_GPU
from fuzz.crews import Crew, Outcome, write_data
from graphs_on_cpu import stand_in
from meshwright.base import device as devices
from meshwright.base.errors import USAGE
from meshwright.data import blend
from meshwright.generation import decoder
from meshwright.kernels import gradients

SMALL = "--num-layers 1 --train-iters 2 --eval-iters 0 --global-batch-size 2"
TP = "--world-size 2 --tensor-model-parallel-size 2 --sequence-parallel"


@pytest.fixture(scope="module")
def crew(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz")
    write_data(folder / "data")
    crew = Crew(folder / "crew", folder / "data")
    yield crew
    crew.close()


def test_drawn_cases_are_legal_and_read_back():
    for number in range(3):
        case, drawing = cases.draw(1, number)
        assert cases.read(str(case)) == case == cases.draw(1, number)[0]
        assert not cases.refusals(case) and drawing.values["legs", str(len(case.legs))] == 1


def test_a_case_begins_with_few_flags_and_later_ones_win():
    case = cases.read(
        "--bf16 --data-path small | 2+1: --world-size 2 --micro-batch-size 2 | --num-layers 3"
    )
    first, last = cases.configs(case)
    assert (
        first.precision.dtype == "bfloat16" and not first.data.mock_data and first.micro_batch == 2
    )
    assert (
        last.model.num_layers == 3
        and last.world == 1
        and case.legs[0].end == 2
        and case.legs[0].lost == 1
    )


def test_a_bad_case_shrinks_to_what_makes_it_bad():
    class Stub:
        def run(self, case, bug):
            bad = "--swiglu" in case.flags and any(
                "--zero-stage 2" in leg.flags for leg in case.legs
            )
            return Outcome("differs" if bad else "equal")

    flags = "--num-layers 4 --swiglu --qk-layernorm --hidden-dropout 0.1 --global-batch-size 8"
    case = cases.read(
        f"{flags} | 1+1: --world-size 2 --zero-stage 2 | 2: --world-size 4 | --world-size 2"
    )
    small = program.shrink(case, Stub(), "", "differs")
    assert str(small) == "--swiglu | --zero-stage 2"


def test_cases_for_gpus_are_legal_and_need_no_gpu_to_be_drawn(capsys):
    for gpus in (1, 2):
        drawn = [cases.draw(2, number, gpus)[0] for number in range(12)]
        assert [cases.read(str(case)) for case in drawn] == drawn and not any(
            map(cases.refusals, drawn)
        )
        assert all(
            config.parallel.device == "cuda" for case in drawn for config in cases.configs(case)
        )
        assert max(case.ranks for case in drawn) <= 2  # they may share a GPU if there is one
    alone = [cases.in_one_process(case) for case in drawn]
    assert all(
        c.training.cuda_graphs == c.training.fused_kernels == c.training.compile == "off"
        for c in alone
    )
    if not torch.cuda.is_available():
        assert program.main(["--device", "cuda", "--cases", "1"]) == USAGE
        assert capsys.readouterr().err.count("\n") == 1


GRAPHS = """--bf16 --fp8-format hybrid --num-layers 1 --hidden-size 32 --num-attention-heads 2 --train-iters 7
--hidden-dropout 0.1 --eval-iters 0 --spoil 18 --on-nonfinite rollback:1 --save saved --save-at-start --save-interval 3
| --decode --cuda-graphs on"""


@pytest.mark.parametrize("bug", ["", "moved-casts"])
def test_a_leg_in_cuda_graphs_has_the_bits_of_the_leg_without(bug, monkeypatch, tmp_path):
    """By a stand-in on a CPU: the run goes back from step 5 to 3, and its graphs go on."""
    stand_in(monkeypatch)
    monkeypatch.setattr(devices, "has_fp8", lambda device: True)
    traces = []
    result = crews.run_leg(
        traces, cases.read(GRAPHS.replace("\n", " ")), 0, (0, 1), str(tmp_path), bug
    )
    wrong = "".join(result.wrong)
    assert (
        result.graphs == "on"
        and bool(wrong) == bool(bug)
        and ("with CUDA graphs" in wrong) == bool(bug)
    )
    assert traces[0].went_back == {5: 3} and len(traces[0].rows) == 7
    assert ("step 6, with" in wrong) == bool(bug) and "step 5, with" not in wrong


def test_a_leg_that_is_lost_saves_nothing_after_its_end(tmp_path):
    case = cases.read("--train-iters 4 --eval-iters 0 | 1+2: | ")
    assert not crews.run_leg([], case, 0, (0, 1), str(tmp_path), "").wrong
    assert [path.name for path in (tmp_path / "run").glob("iter_*")] == ["iter_0000001"]


@pytest.mark.timeout(300)
def test_equal_cases_are_equal_and_a_seeded_bug_is_found(crew):
    resumed = cases.read(
        f"{SMALL} --hidden-dropout 0.2 --poison 1 --on-nonfinite skip:9 | 1+1: {TP} --async-save | {TP}"
    )
    outcome = crew.run(resumed)
    assert outcome.kind == "equal" and 0 < outcome.most < 0.1, outcome
    half = cases.read(
        f"{SMALL} --fp16 --initial-loss-scale 16 --loss-scale-window 1 --data-path ends | 1: | "
    )
    assert crew.run(half).kind == "equal"
    outcome = crew.run(half, "stale-scaler")
    assert outcome.kind == "differs" and "loss_scale: 16.0 instead of 32.0" in "".join(
        outcome.lines
    )
    outcome = crew.run(
        cases.read(f"--position-embedding-type none --eod-mask-loss --data-path nowhere | {TP}")
    )
    assert outcome.kind == "refused" and "nowhere" in "".join(outcome.lines)


@pytest.mark.timeout(300)
def test_packed_runs_are_equal_in_all_layouts_and_resumed(crew):
    legs = "1: --world-size 2 | 2: --world-size 2 --context-parallel-size 2"
    legs += " | --world-size 2 --pipeline-model-parallel-size 2"
    data = "--data-path 0.3 small 0.7 large --split 90,10,0 --packing best-fit"
    outcome = crew.run(
        cases.read(f"{data} --position-embedding-type rope --eval-interval 2 | {legs}")
    )
    assert outcome.kind == "equal" and 0 < outcome.most < 0.1, outcome


def forgets_scale(monkeypatch):
    plain = gradients.clip_and_check
    monkeypatch.setattr(
        gradients,
        "clip_and_check",
        lambda squares, loss, scale, *more: plain(squares, loss, 1.0, *more),
    )


def mixes_a_batch(monkeypatch):
    plain = blend.blend_order

    def order(*arguments):
        which, number = plain(*arguments)
        which[:2], number[:2] = which[:2][::-1].copy(), number[:2][::-1].copy()
        return which, number

    monkeypatch.setattr(blend, "blend_order", order)


def reads_chunks_apart(monkeypatch):
    plain = decoder.ContinuedTexts

    def texts(cache, slots, used, seen, *ends):
        return plain(cache, slots, used, int(used[0]) if ends else seen, *ends)

    monkeypatch.setattr(decoder, "ContinuedTexts", texts)


HALF = "--fp16 --initial-loss-scale 8 --loss-scale-window 1 --hysteresis 2"


@pytest.mark.parametrize(
    ("defect", "flags", "words"),
    [
        (forgets_scale, HALF, "grad_norm"),
        (mixes_a_batch, "--data-path 0.3 small 0.7 ends --split 90,10,0", "step 1: samples"),
        (reads_chunks_apart, "", "a text: token 0 has the log-probability"),
    ],
)
def test_the_independent_trainer_sees_what_all_layouts_share(
    defect, flags, words, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    write_data(tmp_path)
    case = cases.read(f"{flags} --eval-iters 0 --hidden-size 16 --num-attention-heads 2")
    if defect is forgets_scale:
        assert crews.run_one([], case, str(tmp_path), False, "") == []
    defect(monkeypatch)
    wrong = crews.run_one([], case, str(tmp_path), False, "")
    assert any(words in line and "by the independent trainer" in line for line in wrong), wrong


LEVERS = """--untie-embeddings-and-output-weights --embedding-lr 3e-3 --head-lr 2e-2 --vector-lr 5e-3 --init-method-std
0.2 --zero-init-projections --cautious-weight-decay --weight-decay 0.5 --weight-decay-incr-style rate --min-lr 1e-3"""


@pytest.mark.parametrize(
    "flags",
    [f"{LEVERS} --optimizer muon", "--num-layers 2 --window-size 6 --window-attn-skip-freq 2"],
    ids=["levers", "windows"],
)
def test_the_independent_trainer_agrees(flags, monkeypatch, tmp_path):
    """With own peak rates, projections that start at 0 and a cautious decay; with windows."""
    monkeypatch.chdir(tmp_path)
    write_data(tmp_path)
    case = cases.read(f"{flags} --train-iters 4 --eval-iters 0".replace("\n", " "))
    assert crews.run_one([], case, str(tmp_path), False, "") == []


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_every_seeded_bug_is_found(tmp_path, capsys):
    assert program.main(["--bug", "all", "--jobs", "2", "--json", str(tmp_path / "found")]) == 0
    found = json.loads((tmp_path / "found").read_text())["found_after_cases"]
    assert found.keys() == BUGS.keys() - {*ON_GPU} and all(
        0 < n <= program.FIND for n in found.values()
    )


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_random_cases_equal_one_process(tmp_path):
    assert (
        program.main(
            ["--cases", "40", "--jobs", "2", "--seed", "1", "--json", str(tmp_path / "record")]
        )
        == 0
    )
    record = json.loads((tmp_path / "record").read_text())
    assert record["cases"] == 40 and record["differing"] == 0 and record["versions"]["torch"]
    assert record["values"]["zero"]["--zero-stage 3"] > 0
