"""A layout equals one process in every tensor, and a seeded bug is found and named."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from unittest import mock

import pytest
import torch

from fuzz.bugs import BUGS
from layouts import parse
from meshwright.apps.pages.runs import CERTIFICATE
from meshwright.apps.report.page import show_certificate
from meshwright.apps.verify import certificate
from meshwright.apps.verify.compare import Quantity, Recorder, compare_with_one_process
from meshwright.base.errors import UNEQUAL, UserError
from meshwright.checkpoint.boxes import Box
from meshwright.config.schema import TrainConfig
from meshwright.parallel import shard
from meshwright.training import small_run
from meshwright.training.small_run import RankSetup
from on_ranks import make_team, run_ranks

TP = "--world-size 2 --tensor-model-parallel-size 2 --sequence-parallel --num-layers 1 --bf16 --qk-layernorm"
TP += " --attention-dropout 0.1"
MORE = [
    "--world-size 2 --zero-stage 3 --recompute-granularity full --untie-embeddings-and-output-weights --bf16",
    "--world-size 2 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --cpu-optimizer --fp16",
    "--world-size 2 --context-parallel-size 2 --zero-stage 2 --optimizer sgd --eod-mask-loss --params-dtype float32",
    "--world-size 2 --tensor-model-parallel-size 2 --zero-stage 1 --optimizer lion --bf16",
    "--world-size 2 --zero-stage 1 --hidden-size 1024 --num-attention-heads 16 --seq-length 512 --num-query-groups 4 "
    "--max-position-embeddings 512 --swiglu --position-embedding-type rope --num-layers 24",
]


def compare_all(file: str, lines: list[str]) -> None:
    """Compare each layout and write what was found; the one named "broken" has a bug."""
    team, found = make_team(), {}
    setup = RankSetup(team, connect=small_run.Connected())
    for line in lines:
        wrong = mock.patch.object(shard, "is_partial", lambda *_: False)
        flags = re.sub(
            "--(bf16|fp16)",
            r"--params-dtype float32 --\1",
            TP.replace("--bf16 ", "") if line == "broken" else line,
        )
        with wrong if line == "broken" else mock.MagicMock():
            made = compare_with_one_process(parse(flags), team, 1, None, setup)
        found[line] = certificate.certificate(parse(flags), made, setup, ["command"])
        found[line]["table"] = "\n".join(certificate.comparison_table(parse(flags), made, setup))
        if not made.is_equal:
            found[line]["error"] = certificate.describe_difference(made, Path("run"))
    if team.is_rank_0:
        Path(file).write_text(json.dumps(found))


def found_in(folder, lines):
    run_ranks(compare_all, 2, str(folder / "found.json"), lines)
    return json.loads((folder / "found.json").read_text())


def require_equal(made):
    compared = [(one["precision"], one["what"]) for one in made["compared"]]
    exact = [("float64", what) for what in Quantity]
    assert made["verdict"] == "equal" and compared[: len(exact)] == exact
    for precision in {precision for precision, _ in compared} - {"float64"}:
        whats = [what for dtype, what in compared[len(exact) :] if dtype == precision]
        assert {"loss", "gradients", "weights", "optimizer state", "loss scale"} < set(whats)
        assert whats == [what for what in Quantity if what in whats]
    assert all(one["is_equal"] for one in made["compared"]) and not made["differences"]
    assert len(made["gradients"]) >= 14 and 0 < max(made["gradients"].values()) < 1e-9


def test_a_layout_equals_one_process_and_a_missing_sum_is_named(tmp_path):
    found = found_in(tmp_path, [TP, "broken"])
    made, broken = found[TP], found["broken"]
    require_equal(made)
    assert "saving and resuming in bf16: compared in float64" in made["not_compared"]
    assert (
        made["layout"]["tensor"] == 2
        and made["reduced"]["hidden_size"] == 32
        and made["settings"]["bf16"]
    )
    assert (
        "in bfloat16, one process updated by" in made["table"] and "DIFFERENT" not in made["table"]
    )

    first = broken["differences"][0]
    assert (
        broken["verdict"] == "different"
        and first["what"] == Quantity.GRADIENTS
        and first["where"].startswith("step 1, rank")
    )
    assert (
        "ln_" in first["name"]
        or first["name"].endswith("proj.bias")
        or first["name"] == "wpe.weight"
    ), first
    assert (
        f"gradients differ first, {first['name']} by" in broken["error"]
        and "DIFFERENT" in broken["table"]
    )

    for values, words in (
        (made, "<b>Layout verified</b>: 20 parameters, "),
        (broken, "<b>Layout differs</b>: gradients, "),
    ):
        (tmp_path / CERTIFICATE).write_text(json.dumps(values))
        assert words in show_certificate(tmp_path)[0]
    (tmp_path / CERTIFICATE).write_text("{")
    assert show_certificate(tmp_path) == show_certificate(tmp_path / "none") == []


def verify_with_rounded_masters(folder: str) -> None:
    team = make_team()
    line = f"--world-size 3 --zero-stage 1 --num-layers 2 --global-batch-size 3 --verify-layout 1 --run-dir {folder}"
    config = parse(f"{line} --params-dtype float32 --bf16")
    with (
        BUGS["rounded-masters"](),
        pytest.raises(UserError, match="weights differ first.* in bfloat16") as caught,
    ):
        certificate.verify_layout(
            config, RankSetup(team), ["command"], lambda comparison, line: None
        )
    assert caught.value.status == UNEQUAL


def test_infinities_are_beyond_every_tolerance() -> None:
    recorder = Recorder(TrainConfig(), torch.device("cpu"))
    ours = {"w": ((2,), [Box((0,), (2,))], torch.tensor([1.0, 2.0]))}
    recorder.tensors(Quantity.WEIGHTS, 1, ours, {"w": torch.tensor([1.0, math.inf])})
    (seen,) = recorder.seen.values()
    assert seen.largest == math.inf and seen.first == (1, math.inf)


def test_masters_that_lose_their_low_bits_are_found(tmp_path):
    """They change nothing in float64; the certificate says what was compared in bfloat16."""
    run_ranks(verify_with_rounded_masters, 3, str(tmp_path))
    made = json.loads((tmp_path / CERTIFICATE).read_text())
    compared = {(one["precision"], one["what"]): one for one in made["compared"]}
    wrong = {key for key, one in compared.items() if not one["is_equal"]}
    assert wrong == {("bfloat16", "weights"), ("bfloat16", "norm of the weights")}
    assert (
        compared["bfloat16", "weights"]["tolerance"]
        == 1e-5
        < 1e-3
        < compared["bfloat16", "weights"]["largest"]
    )
    assert (
        compared["bfloat16", "optimizer state"]["largest"]
        == 0
        == compared["bfloat16", "loss scale"]["tolerance"]
    )


@pytest.mark.long
def test_more_layouts(tmp_path):
    found = found_in(tmp_path, MORE)
    for made in found.values():
        require_equal(made)
    last = [made["compared"][-1]["precision"] for made in found.values()]
    assert last == ["bfloat16", "float16", "float32", "bfloat16", "float64"]
    assert found[MORE[-1]]["reduced"]["hidden_size"] < 100
