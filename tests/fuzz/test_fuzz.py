"""The fuzz: cases can be drawn, read, shrunk; equal ones are equal, and seeded bugs are found."""

from __future__ import annotations

import json

import pytest

from fuzz import cases, program
from fuzz.bugs import BUGS
from fuzz.crews import Crew, Outcome, write_data

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
    case = cases.read("--bf16 --data-path small | 2+1: --world-size 2 --micro-batch-size 2 | --num-layers 3")
    first, last = cases.configs(case)
    assert first.precision.dtype == "bfloat16" and not first.data.mock_data and first.micro_batch == 2
    assert last.model.num_layers == 3 and last.world == 1 and case.legs[0].end == 2 and case.legs[0].lost == 1


def test_a_bad_case_shrinks_to_what_makes_it_bad():
    class Stub:
        def run(self, case, bug):
            bad = "--swiglu" in case.flags and any("--zero-stage 2" in leg.flags for leg in case.legs)
            return Outcome("differs" if bad else "equal")

    flags = "--num-layers 4 --swiglu --qk-layernorm --hidden-dropout 0.1 --global-batch-size 8"
    case = cases.read(f"{flags} | 1+1: --world-size 2 --zero-stage 2 | 2: --world-size 4 | --world-size 2")
    small = program.shrink(case, Stub(), "", "differs")
    assert str(small) == "--swiglu | --zero-stage 2"


@pytest.mark.timeout(300)
def test_equal_cases_are_equal_and_a_seeded_bug_is_found(crew):
    resumed = cases.read(f"{SMALL} --hidden-dropout 0.2 --poison 1 --on-nonfinite skip:9 | 1+1: {TP} | {TP}")
    outcome = crew.run(resumed)
    assert outcome.kind == "equal" and 0 < outcome.most < 0.1, outcome
    half = cases.read(f"{SMALL} --fp16 --initial-loss-scale 16 --loss-scale-window 1 --data-path ends | 1: | ")
    assert crew.run(half).kind == "equal"
    outcome = crew.run(half, "stale-scaler")
    assert outcome.kind == "differs" and "loss_scale: 16.0 instead of 32.0" in "".join(outcome.lines)
    # Each has an order of samples of its own: one in the cache is not made again.
    for bug, words in (("decayed-vectors", "weights of"), ("schedule-ahead", ": lr: "), ("other-order", ": loss: ")):
        line = f"{SMALL} --data-path ends --lr-decay-style linear --weight-decay 0.3 --seed {len(bug)}"
        outcome = crew.run(cases.read(f"{line} | "), bug)
        assert outcome.kind == "differs" and words in "".join(outcome.lines), (bug, outcome)
        assert "by the independent trainer" in outcome.lines[-1]
    outcome = crew.run(cases.read(f"--position-embedding-type none --eod-mask-loss --data-path nowhere | {TP}"))
    assert outcome.kind == "refused" and "nowhere" in "".join(outcome.lines)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_every_seeded_bug_is_found(tmp_path, capsys):
    assert program.main(["--bug", "all", "--jobs", "2", "--json", str(tmp_path / "found")]) == 0
    found = json.loads((tmp_path / "found").read_text())["found_after_cases"]
    assert found.keys() == BUGS.keys() and all(0 < n <= program.FIND for n in found.values())


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_random_cases_equal_one_process(tmp_path):
    assert program.main(["--cases", "40", "--jobs", "2", "--seed", "1", "--json", str(tmp_path / "record")]) == 0
    record = json.loads((tmp_path / "record").read_text())
    assert record["cases"] == 40 and record["differing"] == 0 and record["versions"]["torch"]
    assert record["values"]["zero"]["--zero-stage 3"] > 0
