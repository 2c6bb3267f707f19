"""A checkpoint of any layout continues in any other as if the run had never stopped."""

from __future__ import annotations

import pytest

from layouts import NEAR, alone, furthest, parse, rows_of, run_all

pytestmark = [pytest.mark.whole, pytest.mark.timeout(300)]

LAYOUTS = {
    "one": "",
    "dp2": "--world-size 2",
    "zero1": "--world-size 2 --zero-stage 1",
    "zero2x4": "--world-size 4 --zero-stage 2",
    "zero3": "--world-size 2 --zero-stage 3",
    "hybrid": "--world-size 4 --zero-stage 3 --num-distributed-optimizer-instances 2",
    "tp2": "--world-size 2 --tensor-model-parallel-size 2 --sequence-parallel",
    "tp4": "--world-size 4 --tensor-model-parallel-size 4",
    "tp2pp2": "--world-size 4 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2",
    "pp2": "--world-size 2 --pipeline-model-parallel-size 2",
    "pp4": "--world-size 4 --pipeline-model-parallel-size 4",
    "interleaved": "--world-size 2 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
    "uneven": "--world-size 2 --pipeline-model-parallel-size 2 --pipeline-layout 1,3",
    "cp2": "--world-size 2 --context-parallel-size 2",
    "tp2zero1": "--world-size 4 --tensor-model-parallel-size 2 --zero-stage 1",
    "offload": "--world-size 2 --zero-stage 2 --cpu-optimizer",
}
FEW = ["tp2>zero3", "pp2>cp2"]  # two ranks before and after, so that they start twice
PAIRS = """
    tp2pp2>zero3 one>tp2zero1 zero3>offload hybrid>tp2 dp2>zero2x4 dp2>tp2 pp4>one one>tp4 zero3>tp2pp2 tp4>zero2x4
    zero2x4>pp4 zero1>dp2 tp2>hybrid interleaved>uneven uneven>interleaved cp2>pp2 tp2zero1>one offload>zero3
    tp2pp2>tp2 zero2x4>one one>zero3 zero1>interleaved
""".split()
STEPS = 3
MORE = "--global-batch-size 8 --seed 11 --ema 0.3"  # whose loss is in the row of the validation


def save(trainer):
    trainer.state.save()


def samples(trainer):
    """Return the rows, and the samples of this rank's next step."""
    batches = trainer.feed.read_again(trainer.progress.consumed_train_samples)
    return [rows_of(trainer), [int(i) for micro in batches for i in micro.sample_ids]]


@pytest.mark.parametrize(
    "arrows",
    [FEW, pytest.param(FEW + PAIRS, marks=pytest.mark.long)],
    ids=lambda arrows: f"{len(arrows)} pairs",
)
@pytest.mark.fault("F5")
def test_a_checkpoint_continues_in_another_layout(tmp_path, arrows):
    pairs = {tuple(arrow.split(">")) for arrow in arrows}
    first = {name: parse(f"{MORE} {LAYOUTS[name]} --save {tmp_path / name}") for name, _ in pairs}
    for world in sorted({c.world for c in first.values()}):
        run_all({n: c for n, c in first.items() if c.world == world}, world, STEPS, read=save)
    second = {
        f"{a} -> {b}": parse(
            f"{MORE} {LAYOUTS[b]} --load {tmp_path / a} --exit-on-missing-checkpoint"
        )
        for a, b in pairs
    }
    got = {}
    for world in sorted({c.world for c in second.values()}):
        got |= run_all(
            {n: c for n, c in second.items() if c.world == world}, world, STEPS, read=samples
        )
    ((want, _),) = run_all({"": alone(parse(MORE))}, 1, 2 * STEPS, read=samples)[""]
    wrong, most = [], 0.0
    for pair, ranks in got.items():
        far = furthest(ranks[0][0], want[STEPS:])
        most = max(most, far)
        if not far < NEAR:
            wrong.append(f"{pair}: {far:.1e} from the run that never stopped")
        seen = sorted({i for _, ids in ranks for i in ids})
        if seen != list(range(16 * STEPS, 16 * STEPS + 8)):  # two runs of STEPS steps of eight
            wrong.append(f"{pair}: the next step reads the samples {seen}")
    assert not wrong, "\n".join(wrong)
    print(f"{len(pairs)} pairs, at most {most:.1e} from the run that never stopped")
