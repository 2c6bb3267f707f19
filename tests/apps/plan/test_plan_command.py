"""`meshwright plan`: a prediction, a search, and the files that it writes."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from pages import Page

from helpers import TINY_FLAGS
from meshwright.__main__ import main
from meshwright.apps.plan import command, describe, estimate
from meshwright.apps.plan.memory import RankMemory
from meshwright.apps.plan.part import PlanForecast
from meshwright.apps.plan.prediction import Machine, find_machine
from meshwright.base.device_profiles import load_profile, product_speed, profile_of, this_cpu
from meshwright.base.errors import USAGE
from meshwright.config import checks, flags
from meshwright.config.fields import with_settings
from meshwright.config.schema import TrainConfig

SMALL = "--preset gpt2-345m --gpus 4 --gpu h100".split()
LAYOUT = [*SMALL, "--tensor-model-parallel-size=2", "--bf16"]


def plan(capsys: pytest.CaptureFixture[str], *argv: str, status: int = 0) -> str:
    assert main(["plan", *argv]) == status
    return capsys.readouterr().out


def plan_json(capsys: pytest.CaptureFixture[str], *argv: str, status: int = 0) -> dict[str, Any]:
    out: dict[str, Any] = json.loads(plan(capsys, *argv, "--json", status=status))
    return out


@pytest.mark.flag("gpus gpu price plan.json")
def test_a_given_layout_is_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    text = plan(capsys, *LAYOUT, "--train-tokens=1e9", "--price=2")
    for part in (
        "354,823,168 parameters on 4 x NVIDIA H100",
        "4 ranks = 2 data x 2 tensor",
        "memory of the fullest rank",
        "fits, ",
        "sent by a rank in a step",
        "tokens per second",
        "MFU",
        "1,907 steps, 1.0 billion tokens",
        " at 2 an hour",
        "best save interval",
        "flags: --tensor-model-parallel-size 2 ",
    ):
        assert part in text, part
    data = plan_json(capsys, *LAYOUT, "--train-tokens=1e9", "--price=2")
    assert "best" not in data and data["fits"] and data["layout"]["tensor_model_parallel_size"] == 2
    assert sum(data["memory"]["kinds"].values()) == data["memory"]["allocated"]
    assert sum(data["time"]["parts"].values()) == pytest.approx(data["time"]["seconds"])
    assert data["cost"] == pytest.approx(2 * data["device_hours"])
    assert data["checkpoint"]["bytes"] == pytest.approx(12 * 354_823_168, rel=0.01)


def test_the_tokens_of_smaller_steps(capsys: pytest.CaptureFixture[str]) -> None:
    """All steps are taken for as long as the one that is planned, the longest."""
    words = [*LAYOUT, "--global-batch-size=512", "--train-samples=2000000"]
    assert "3,906 steps, 2.0 billion tokens: 0" in plan(capsys, *words)
    # Of 2,000 steps of 512 samples, each lacks 768 tokens.
    grown = plan(capsys, *words, "--seq-length-schedule=0:256 2000:1024")
    assert "3,906 steps, 1.3 billion tokens: at most 0" in grown
    ramped = plan(capsys, *words, "--rampup-batch-size", "256", "256", "500000")
    assert " steps, 2.0 billion tokens: at most 0" in ramped


@pytest.mark.usefixtures("estimated")
def test_a_layout_that_does_not_fit_says_the_least_change(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The named flags, given too, make it fit; so it can be done by hand."""
    words = "--preset=gpt3-6.7b --gpus=8 --gpu=a100-40 --bf16 --tensor-model-parallel-size=2"
    argv = words.split()
    text = plan(capsys, *argv, status=USAGE)
    change = re.search(r"does not fit: .*; the least change that makes it fit: (--.*?) \(", text)
    assert change
    assert "  fits, " in plan(capsys, *argv, *change[1].split())
    hopeless = plan(
        capsys, "--preset=gpt3-175b", "--gpus=1", "--gpu=v100", "--zero-stage=0", status=USAGE
    )
    assert "no change of layout makes it fit" in hopeless


SHARDED = "--preset=gpt3-175b --gpu=h100 --tensor-model-parallel-size=8 --zero-stage=3 --bf16 "
SHARDED += "--micro-batch-size=1 --recompute-granularity=full"


@pytest.mark.whole
@pytest.mark.usefixtures("estimated")
def test_devices_that_are_too_few_are_answered_by_a_number_that_is_enough(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With the flags of the layout kept; a plan of that number then fits."""
    text = plan(capsys, *SHARDED.split(), "--gpus=8", status=USAGE)
    # The nearest number, not the next power of two: with 8 tensor ranks 8, 16 ... share it.
    assert "\n  48 devices of this kind are enough: see --gpus 48\n" in text
    assert "  fits, " in plan(capsys, *SHARDED.split(), "--gpus=48")
    data = plan_json(capsys, "--preset=llama2-7b", "--gpu=h100", "--gpus=1", status=USAGE)
    assert data["enough_devices"] == data["tried_devices"] == 2
    alone = "--preset=gpt3-175b --gpus=8 --gpu=h100 --tensor-model-parallel-size=8".split()
    unchanged = "  with this layout unchanged it fits no number up to 16,384 devices of this kind\n"
    assert unchanged in plan(capsys, *alone, status=USAGE)
    assert "of this kind" not in plan(capsys, *LAYOUT)


@pytest.mark.whole
@pytest.mark.flag("write best")
@pytest.mark.usefixtures("estimated")
def test_the_best_layouts_are_searched_and_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """`train --config` takes the file that the search writes."""
    file = tmp_path / "plan.toml"
    data = plan_json(capsys, *SMALL, f"--write={file}", "--best=3")
    speeds = [one["time"]["tokens_per_second"] for one in data["best"]]
    assert (
        len(speeds) == 3
        and speeds == sorted(speeds, reverse=True)
        and data["layout"] == data["best"][0]["layout"]
    )
    assert data["layout"]["bf16"], "the search computes in the format of the device"
    written = tomllib.loads(file.read_text())
    assert written["model"] == {
        "num_layers": 24,
        "hidden_size": 1024,
        "num_attention_heads": 16,
    } | {"max_position_embeddings": 1024}
    assert (
        main(["train", "--config", str(file), "--dry-run", "--mock-data", "--vocab-size=50257"])
        == 0
    )
    assert "4 ranks = " in capsys.readouterr().out
    text = plan(capsys, *SMALL, "--best=3")
    assert "the best 3 layouts" in text and "layouts that may be as fast do not fit; " in text


@pytest.mark.whole
@pytest.mark.flag("search")
@pytest.mark.usefixtures("estimated")
def test_a_search_keeps_what_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    given = "--micro-batch-size=2 --zero-stage=1 --recompute-granularity=selective"
    found = plan_json(capsys, *SMALL, *given.split(), "--search", "--best=2")
    layouts = [one["layout"] for one in found["best"]]
    kept = {"micro_batch_size": 2, "zero_stage": 1, "recompute_granularity": "selective"}
    assert layouts and all(layout | kept == layout for layout in layouts)


@pytest.mark.whole
@pytest.mark.flag("allow_fp8")
@pytest.mark.usefixtures("estimated")
def test_fp8_is_searched_where_the_device_has_it_and_the_user_allows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = ["--preset=gpt3-6.7b", "--gpus=2", "--best=1"]
    assert plan_json(capsys, *argv, "--gpu=h200", "--allow-fp8")["layout"]["fp8_format"] == "hybrid"
    assert "fp8_format" not in plan_json(capsys, *argv, "--gpu=h200")["layout"]
    assert "fp8_format" not in plan_json(capsys, *argv, "--gpu=a100-80", "--allow-fp8")["layout"]


def test_a_product_has_its_profile() -> None:
    for product, name in (
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("Tesla V100-SXM2", "v100"),
    ):
        profile = profile_of(product)
        assert profile is not None and profile.name == name
    assert profile_of("NVIDIA GeForce 256") is None
    links = find_machine("h200", 4, 12.5).links
    assert (links.gpus_per_node, links.between.bandwidth) == (4, 12.5e9)


@pytest.mark.flag("gpus_per_node link mtbf restart_minutes storage_speed")
@pytest.mark.usefixtures("estimated")
def test_the_machine_and_its_failures_are_the_users(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--preset=gpt2-345m", "--gpus=16", "--gpu=h100", "--bf16", "--zero-stage=1"]
    before, text = plan_json(capsys, *argv), plan(capsys, *argv, "--gpus-per-node=4", "--link=10")
    assert "4 devices a machine: 450 GB/s within a machine, 10 GB/s to others" in text
    after = plan_json(
        capsys, *argv, "--link=10", "--mtbf=1600", "--restart-minutes=10", "--storage-speed=0.5"
    )
    assert after["time"]["parts"]["data"] > before["time"]["parts"]["data"]
    assert (
        after["goodput"]["hours_between_failures"] == 100 and after["checkpoint"]["restart"] == 600
    )
    assert after["checkpoint"]["written"] > before["checkpoint"]["written"]
    assert after["goodput"]["share"] < before["goodput"]["share"] < 1


@pytest.mark.pictures
@pytest.mark.flag("pictures write_page")
@pytest.mark.usefixtures("estimated")
def test_pictures_and_page(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page, folder = tmp_path / "plan.html", tmp_path / "pictures"
    argv = [*SMALL, "--search", "--pipeline-model-parallel-size=2", "--micro-batch-size=8"]
    out = plan(capsys, *argv, "--best=2", f"--pictures={folder}", f"--write-page={page}")
    names = ["schedule", "memory", "layouts", "goodput"]
    assert out.endswith(
        "".join(f"written: {folder}/{name}.svg\n" for name in names) + f"written: {page}\n"
    )
    assert all((folder / f"{name}.svg").read_text().count("<svg") == 1 for name in names)
    titles = Page(page.read_text()).drawings
    assert list(titles) == [
        "Pipeline",
        "Memory of the pipeline ranks",
        "Time and memory of the layouts",
        "Goodput over the save interval",
    ]


def test_flags_of_a_layout_are_parsed_back() -> None:
    argv = "--tensor-model-parallel-size 2 --sequence-parallel --zero-stage 1 --micro-batch-size 4 --bf16".split()
    config = flags.parse_settings(TrainConfig, argv, "meshwright train", check=False).config
    assert describe.as_flags(describe.layout_settings(config)).split() == argv
    assert not checks.unusable(config)


@pytest.mark.whole
def test_a_plan_without_torch_is_estimated_and_says_so() -> None:
    words = [*SMALL, "--best=1"]
    code = "import sys; sys.modules['torch'] = None\n"  # as if it were not installed
    code += f"from meshwright.__main__ import main; assert main(['plan', *{words!r}]) == 0\n"
    code += "assert 'matplotlib' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "estimated, within about 5 %; install torch to measure it" in done.stdout
    assert "time, estimated by closed forms" in done.stdout


def test_what_is_measured_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """Two kinds of figures, each named; a compiled block's operations are not known."""
    assert "memory of the fullest rank, measured on tensors without memory" in plan(capsys, *LAYOUT)
    data = plan_json(capsys, *LAYOUT)
    assert data["memory_is"] == data["time_is"] == "measured"
    data = plan_json(capsys, *LAYOUT, "--compile=on", "--cuda-graphs=off")
    assert (data["memory_is"], data["time_is"]) == ("measured", "estimated")
    data = plan_json(capsys, "--preset=gpt2-345m", "--gpu=cpu", "--gpus=1", "--zero-stage=0")
    assert data["memory_is"] == data["time_is"] == "estimated"


@pytest.mark.usefixtures("estimated")
def test_launch_refuses_to_write_what_cannot_fit(capsys: pytest.CaptureFixture[str]) -> None:
    train = "train --preset=gpt3-13b --mock-data --vocab-size=50257"
    argv = ["--write=slurm", "--nproc-per-node=8", *train.split()]
    assert main(["launch", "--gpu=v100", *argv]) == USAGE
    error = " ".join(capsys.readouterr().err.split())
    assert "does not fit" in error and "--gpu any writes it all the same" in error
    assert main(["launch", "--gpu=any", *argv]) == 0


def test_a_dry_run_ends_with_the_plan(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(describe, "find_machine", lambda name: find_machine("h200"))
    argv = ["train", "--bf16", "--mock-data", "--vocab-size=50257", "--dry-run"]
    assert main([*argv, "--preset=gpt2-345m"]) == 0
    assert re.search(
        r"plan on NVIDIA H200.*: fits, .* left: .*; a step takes about ", capsys.readouterr().out
    )


def test_a_dry_run_that_does_not_fit_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    """But not one of another --world-size, which is meant for other machines."""
    tiny = dataclasses.replace(load_profile("h200"), memory_bytes=1)
    monkeypatch.setattr(describe, "find_machine", lambda name: Machine(tiny, tiny.links))
    argv = ["train", *TINY_FLAGS, "--dry-run"]
    assert main(argv) == USAGE
    assert re.search(r"plan on NVIDIA H200.*: does not fit: ", capsys.readouterr().out)
    assert main([*argv, "--world-size=2"]) == main([*argv, "--world-size=1"]) == 0


def test_ranks_on_a_cpu_share_its_memory(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four ranks of a machine need four times as much, and as many on four machines do not."""
    cpu = dataclasses.replace(load_profile("cpu"), memory_bytes=1 << 30, context_bytes=300 << 20)
    for module in (describe, command):
        monkeypatch.setattr(module, "find_machine", lambda *_: Machine(cpu, cpu.links))
    tiny = [*TINY_FLAGS, "--global-batch-size=24"]
    for words, count in (("", 1), ("--world-size=3", 3), ("--world-size=4", 4)):
        main(["train", *tiny, "--dry-run", *words.split()])
        said = capsys.readouterr().out
        assert (": fits, " in said) == (count < 4)
        assert (f", which {count} ranks of a machine share" in said) == (count > 1)
    for words, status in (("--gpus=4", USAGE), ("--gpus=4 --gpus-per-node=1", 0)):
        plan_json(capsys, *tiny, "--zero-stage=0", *words.split(), status=status)


def test_the_plan_of_this_cpu_is_by_its_measured_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.base.device_profiles.product_speed", lambda: 80e9)
    monkeypatch.setattr("meshwright.base.host.cores", lambda: 3)
    load_profile.cache_clear()
    this_cpu.cache_clear()
    profile = find_machine("cpu").profile
    assert profile.title == "this CPU of 3 cores, 80 GFLOP/s measured of one"
    assert profile.peaks["float32"] == pytest.approx(240e9) and profile.peaks[
        "float64"
    ] == pytest.approx(120e9)
    load_profile.cache_clear()
    this_cpu.cache_clear()


def test_the_speed_of_a_core_is_that_of_the_fastest_product(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another program delays one product, not all: 2 x 64^3 operations in 4 us, the shortest."""
    ticks = [0.0]
    for seconds in (9e-6, 4e-6, 2e-2, 6e-6, 1.0):
        ticks += [ticks[-1], ticks[-1] + seconds]
    times = iter([*ticks, ticks[-1]])
    monkeypatch.setattr("meshwright.base.device_profiles.time.perf_counter", lambda: next(times))
    assert product_speed() == pytest.approx(524_288 / 4e-6)

    times = iter([0.0, 9.0, 9.5, 9.5])  # this process did not run for seconds
    assert product_speed() == pytest.approx(524_288 / 0.5)


def test_no_launch_is_refused_for_an_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    """A training that does not fit by the closed forms is measured before it is refused."""
    words = "--preset gpt2-345m --bf16 --mock-data --micro-batch-size 1".split()
    config = flags.parse_settings(TrainConfig, words, "meshwright train").config
    exact = estimate.memory_of_ranks
    too_much = RankMemory({"activations": 1 << 40}, 0, lambda: 1 << 40)
    monkeypatch.setattr(
        estimate, "memory_of_ranks", lambda *given: [too_much for _ in exact(*given)]
    )
    assert PlanForecast().why_too_large(config, "h200") is None
    large = with_settings(config, micro_batch_size=4096, global_batch_size=4096)
    assert "does not fit" in (PlanForecast().why_too_large(large, "h200") or "")
