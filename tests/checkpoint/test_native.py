"""Tensors saved in any boxes load in any other boxes, bit for bit, or the damage is named."""

from __future__ import annotations

import json
import random
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from measured import in_child
from safetensors import safe_open

from helpers import (
    DTYPES,
    blank,
    box_elements,
    captured_output,
    error_of,
    flip_bit,
    hold_equal,
    open_step,
    random_tensor,
)
from meshwright.base.errors import TOO_OLD, UserError
from meshwright.checkpoint import loading, manifests, native, publish, steps
from meshwright.checkpoint.loading import OpenOptions
from meshwright.checkpoint.native import BoxedTensor, undivided
from meshwright.cli import inspect
from meshwright.config import flags
from meshwright.config.schema import ABSENT, TrainConfig
from meshwright.training.state.resume import checkpoint_architecture, differences


def model(seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, BoxedTensor]:
    shapes = {"wte.weight": (50, 8), "h.0.attn.qkv.weight": (24, 8), "ln_f.bias": (8,)}
    out = {
        name: undivided(random_tensor(shape, dtype, seed + i))
        for i, (name, shape) in enumerate(shapes.items())
    }
    return out | {f"{name}/exp_avg": undivided(e.tensor / 2) for name, e in out.items()}


def state(step: int) -> dict[str, object]:
    return {"iteration": step, "consumed_train_samples": 8 * step, "lr": 0.1 + 1e-17 * step}


def save(root: Path, step: int, seed: int = 0) -> dict[str, BoxedTensor]:
    named = model(seed)
    native.save_step(root, step, named, state(step), {"num_layers": 1})
    return named


def test_safetensors_reads_our_files(tmp_path: Path) -> None:
    named = {f"t.{dtype}": undivided(random_tensor((3, 5), dtype)) for dtype in DTYPES}
    named |= {"scalar": undivided(torch.tensor(3.0)), "empty": undivided(torch.empty(0, 4))}
    full = random_tensor((4, 6), torch.bfloat16)
    boxes = [((0, 0), (3, 6)), ((3, 1), (1, 5)), ((0, 0), (0, 6)), ((3, 0), (1, 1))]
    native.save_step(
        tmp_path, 1, named | {"part": BoxedTensor((4, 6), boxes, box_elements(full, boxes))}, {}
    )
    with safe_open(tmp_path / "iter_0000001" / "rank_00000.safetensors", "pt") as file:
        assert set(file.keys()) == {*named, "part[0:3,0:6]", "part[3:4,0:1]", "part[3:4,1:6]"}
        for name, entry in named.items():
            read = file.get_tensor(name)
            assert torch.equal(read, entry.tensor) and read.dtype == entry.tensor.dtype
        assert torch.equal(file.get_tensor("part[3:4,1:6]"), full[3:4, 1:6])
    index = manifests.parse_json((tmp_path / "iter_0000001" / native.INDEX).read_bytes(), tmp_path)[
        "tensors"
    ]
    for tensor in index.values():  # every element aligned, for readers that map the file
        assert all(box["begin"] % native.SIZES[tensor["dtype"]] == 0 for box in tensor["boxes"])


def test_the_lines_of_a_save_and_a_load(tmp_path: Path) -> None:
    with captured_output() as (said, _):
        assert loading.load_checkpoint(tmp_path, {}) is None
    assert said == []  # the caller says what that means
    named = model()
    native.save_step(tmp_path, 5000, named, state(5000))
    where = f"checkpoint at iteration    5000 to {tmp_path}"
    assert native.save_messages(tmp_path, 5000) == (
        f"saving {where}\n",
        f"  successfully saved {where}",
    )
    want = blank(named)
    with captured_output() as (said, _):
        loaded = loading.load_checkpoint(tmp_path, want)
    assert loaded is not None and loaded[:2] == (5000, state(5000)) and hold_equal(named, want)
    assert said == [
        f" loading checkpoint from {tmp_path} at iteration 5000",
        " checkpoint version 3.0",
        f"  successfully loaded checkpoint from {tmp_path} at iteration 5000",
    ]


@pytest.mark.fault("F8")
@pytest.mark.promise("Checksums find damage before a tensor is used")
def test_bit_flips_never_load(
    tmp_path: Path, figures: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full verification sees a flip in any file, reading one in what it reads."""
    monkeypatch.setattr(manifests, "CHUNK", 2048)  # several a file, the first with its header
    rng = random.Random(0)
    good = save(tmp_path, 1)
    save(tmp_path, 2, seed=10)
    folder = steps.step_folder(tmp_path, 2)
    for i in range(60):
        path = sorted(folder.iterdir())[i % 5]
        bit = rng.randrange(8 * path.stat().st_size)
        flip_bit(path, bit)
        error_of(lambda: manifests.verify_step(folder, full=True))
        if i < 15:
            want = blank(good)
            verify = "full" if path.name == native.CONFIG else "read"
            with captured_output() as (said, _):
                loaded = loading.load_checkpoint(tmp_path, want, options=OpenOptions(verify))
            assert loaded is not None and loaded.step == 1 and hold_equal(good, want)
            assert any(
                line.startswith("WARNING: skipping iter_0000002") and path.name in line
                for line in said
            )
        flip_bit(path, bit)
    loaded = loading.load_checkpoint(tmp_path, blank(good))
    assert loaded is not None and loaded.step == 2
    figures(flips="60/60")


@pytest.mark.flag("verify")
def test_reading_leaves_other_chunks_alone_and_full_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifests, "CHUNK", 64)
    named = save(tmp_path, 1)
    path = steps.step_folder(tmp_path, 1) / "rank_00000.safetensors"
    flip_bit(path, 8 * (path.stat().st_size - 1))  # wte.weight/exp_avg is written last
    want = {name: entry for name, entry in blank(named).items() if "/" not in name}
    assert loading.load_checkpoint(
        tmp_path, want, options=OpenOptions(optimizer=False)
    ) and hold_equal(want, named)
    assert path.name in error_of(
        lambda: loading.load_checkpoint(
            tmp_path, want, options=OpenOptions("full", optimizer=False)
        )
    )
    assert path.name in error_of(lambda: loading.load_checkpoint(tmp_path, blank(named)))
    assert path.name in error_of(
        lambda: loading.load_checkpoint(steps.step_folder(tmp_path, 1), blank(named))
    )


def test_names_and_shapes_must_agree(tmp_path: Path) -> None:
    named = save(tmp_path, 1)
    save(tmp_path, 2)
    want = blank(named)
    del want["ln_f.bias/exp_avg"]
    want["wte.weight"] = undivided(torch.zeros(60, 8))
    want["h.1.ln_1.weight"] = undivided(torch.zeros(3))
    message = error_of(lambda: loading.load_checkpoint(tmp_path, want))
    assert "wte.weight: the model has (60, 8), the checkpoint (50, 8)" in message
    assert "h.1.ln_1.weight: the model has (3,), the checkpoint has none" in message
    assert "ln_f.bias/exp_avg: the model has none, the checkpoint has (8,)" in message
    assert not want["wte.weight"].tensor.any()  # compared before anything was read
    message = error_of(
        lambda: loading.load_checkpoint(tmp_path, want, options=OpenOptions(optimizer=False))
    )
    assert "ln_f.bias/exp_avg" not in message


def test_another_dtype_is_converted_and_reported(tmp_path: Path) -> None:
    named = save(tmp_path, 1)
    want = blank(model(dtype=torch.bfloat16))
    with captured_output() as (said, _):
        loading.load_checkpoint(tmp_path, want)
    assert " 6 tensors converted from F32 to BF16" in said
    assert all(torch.equal(want[name].tensor, named[name].tensor.bfloat16()) for name in named)


def edit_index(folder: Path, change: dict[str, object]) -> None:
    """Change the entry of a tensor in the index, and make every hash right again."""
    index = manifests.parse_json((folder / native.INDEX).read_bytes(), folder)
    index["tensors"]["wte.weight"].update(change)
    manifest = manifests.read_manifest(folder)
    (folder / native.INDEX).unlink()
    manifest[native.INDEX] = publish.write_file(
        folder / native.INDEX, lambda write: write(native.as_json(index))
    )
    (folder / manifests.MANIFEST).write_bytes(manifests.encode_manifest(manifest))


@pytest.mark.fault("F9")
def test_a_hostile_index_is_damaged(tmp_path: Path) -> None:
    named = save(tmp_path, 1)
    good = {
        "file": "rank_00000.safetensors",
        "offset": [0, 0],
        "size": [50, 8],
        "begin": 0,
        "end": 1600,
    }
    index = (steps.step_folder(tmp_path, 1) / native.INDEX).read_text()
    bad_boxes = [
        {"begin": 10**9, "end": 10**9 + 1600},  # past the end
        {"begin": -8, "end": 1592},
        {"end": 1604},  # bytes do not fit
        {"size": [51, 8], "end": 1632},  # outside the tensor
        {"size": [49, 8], "end": 1568},  # a hole
        {"file": "../secret"},
        {"size": [1e3, 8]},
    ]
    changes = [{"boxes": 5}, {"dtype": "F128"}, {"shape": [10**30, 8]}, {"shape": [1] * 1000}]
    for change in [{"boxes": [good | bad]} for bad in bad_boxes] + changes:
        edit_index(steps.step_folder(tmp_path, 1), change)
        assert native.INDEX in error_of(lambda: loading.load_checkpoint(tmp_path, blank(named))), (
            change
        )
        edit_index(steps.step_folder(tmp_path, 1), json.loads(index)["tensors"]["wte.weight"])
    assert loading.load_checkpoint(tmp_path, blank(named))
    edit_index(steps.step_folder(tmp_path, 1), {"shape": [10**9, 10**9]})  # compared, not allocated
    assert "(1000000000, 1000000000)" in error_of(
        lambda: loading.load_checkpoint(tmp_path, blank(named))
    )


@pytest.mark.fault("F28")
def test_a_huge_header_is_noticed_and_never_parsed(tmp_path: Path) -> None:
    named = save(tmp_path, 1)
    path = steps.step_folder(tmp_path, 1) / "rank_00000.safetensors"
    path.write_bytes(struct.pack("<Q", 1 << 40) + path.read_bytes()[8:])
    assert path.name in error_of(lambda: loading.load_checkpoint(tmp_path, blank(named)))


@pytest.mark.promise("What a file says about sizes is checked before memory is taken")
def test_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """128 MB are saved whole and loaded as half the columns, with a few chunks held at the peak."""
    chunk = 2 << 20
    monkeypatch.setattr(manifests, "CHUNK", chunk)
    monkeypatch.setattr(native, "PART", chunk)
    monkeypatch.setattr(manifests, "THREADS", 2)  # of any machine
    monkeypatch.setattr(manifests, "AHEAD", 4)
    shape = (4000, 8000)
    saved = {"x": undivided(torch.ones(shape))}
    half = torch.full((4000 * 4000,), 2.0)
    wanted = {"x": BoxedTensor(shape, [((0, 4000), (4000, 4000))], half)}

    def save_and_load() -> Iterator[int]:
        native.save_step(tmp_path, 1, saved, {})
        tracemalloc.start()
        loading.load_checkpoint(tmp_path, wanted)
        assert bool((half == 1).all())
        yield tracemalloc.get_traced_memory()[1]

    work = in_child(save_and_load)
    assert not work.end
    [held] = work.results
    assert held < 8 * chunk  # those read ahead, one that is read, one joined and one used again
    assert work.memory < 32 * chunk  # also torch's, and what threads keep of freed memory


def test_entries_that_do_not_fit_are_not_saved(tmp_path: Path) -> None:
    for entry in (
        BoxedTensor((4,), [((0,), (3,))], torch.zeros(4)),
        BoxedTensor((4,), [((2,), (3,))], torch.zeros(3)),
        BoxedTensor((4, 1), [((0,), (4,))], torch.zeros(4)),
        BoxedTensor((4,), [((0,), (3,))], torch.zeros(3)),  # a hole
        BoxedTensor((4,), [((0,), (3,)), ((2,), (1,))], torch.zeros(4)),  # twice
        undivided(torch.zeros(4, dtype=torch.complex64)),
    ):
        with pytest.raises(ValueError):
            native.save_step(tmp_path, 1, {"x": entry}, {})
    with pytest.raises(ValueError):
        native.save_step(tmp_path, 1, {}, {"loss": float("nan")})
    with pytest.raises(UserError, match="would have"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "INDEX_LIMIT", 10)
        save(tmp_path, 1)
    with pytest.raises(RuntimeError):
        native.save_step(tmp_path, 1, {"x": undivided(torch.zeros(2, 3).t())}, {})
    assert steps.list_steps(tmp_path) == []


def test_inspect_shows_steps_tensors_and_damage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    assert inspect.main([str(tmp_path)]) == 0
    capsys.readouterr()
    (steps.step_folder(tmp_path, 1) / native.STATE).unlink()
    # one damaged step: the status says so too
    error_of(lambda: inspect.main([str(tmp_path), "--tensors"]))
    shown = capsys.readouterr().out
    assert "iter_0000002  sizes: ok, contents not checked (--full does)" in shown
    assert "iteration 2 | consumed samples 16" in shown
    for part in (
        "iter_0000001  verified: NO",
        "parameters 600 |",
        "num_layers 1",
        "wte.weight/exp_avg",
        "50x8  F32",
    ):
        assert part in shown, part
    assert "1,600 bytes" in shown
    assert inspect.main([str(tmp_path / "iter_0000002"), "--full"]) == 0
    assert "every byte" in capsys.readouterr().out
    error_of(lambda: inspect.main([str(tmp_path), "--step", "1"]))
    assert "iter_0000001" in capsys.readouterr().out
    assert f"no step 7 in {tmp_path}; there are 1, 2" in error_of(
        lambda: inspect.main([str(tmp_path), "--step", "7"])
    )
    assert f"there is no folder {tmp_path}/none" in error_of(
        lambda: inspect.main([str(tmp_path / "none")])
    )
    (tmp_path / "tok").mkdir()
    for name in ("tok", "none"):  # a --run-dir alone has no checkpoint
        message = error_of(lambda name=name: inspect.main([str(tmp_path / name)]))
        assert f"{tmp_path}/{name}" in message and message.endswith(
            "; give the save folder of a training, or another program's checkpoint"
        )
    assert f"{tmp_path}/tok holds no checkpoint;" in error_of(
        lambda: inspect.main([str(tmp_path / "tok")])
    )
    assert open_step(tmp_path, 2).state == state(2)
    assert open_step(tmp_path, 2).config == ABSENT | {"num_layers": 1}


def test_a_step_that_does_not_record_an_option_has_none(tmp_path: Path) -> None:
    save(tmp_path, 7)
    config = flags.parse_settings(
        TrainConfig, ["--preset", "llama3.2-1b", "--load", str(tmp_path)], "test"
    ).config
    assert config.model.rope_scaling == "llama3"
    assert (
        checkpoint_architecture(config, set(), open_step(tmp_path, 7)).model.rope_scaling == "none"
    )
    for flag in (
        "--use-parallel-residual",
        "--disable-layernorm-bias",
        "--final-logit-softcapping=30",
        "--window-size=3",
    ):
        config = flags.parse_settings(
            TrainConfig, ["--mock-data", "--num-layers=1", flag], "test", check=False
        ).config
        assert "contradict" in error_of(
            lambda config=config: differences(config, open_step(tmp_path, 7).config)
        ), flag


def test_a_step_of_a_release_before_0_15_is_refused(tmp_path: Path) -> None:
    """A run of 0.14 stated its data, but not the base of muP; 0.17 adds that in a conversion."""
    of_0_14 = {"num_layers": 1, "data_fingerprint": [], "data_contents": []}
    native.save_step(tmp_path, 7, {}, {"iteration": 7}, of_0_14)
    message = error_of(lambda: open_step(tmp_path, 7))
    assert message.startswith(f"{steps.step_folder(tmp_path, 7)} {TOO_OLD}; ")
    native.save_step(tmp_path, 8, {}, {"iteration": 8}, ABSENT | of_0_14)
    assert open_step(tmp_path, 8).state["iteration"] == 8
