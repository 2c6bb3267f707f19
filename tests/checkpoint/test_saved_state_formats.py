"""A checkpoint holds the optimizer's state in its format; a run may go on in another one."""

import json
import math

import pytest
import torch

import stores
from meshwright.checkpoint import loading, native
from meshwright.config.schema import Optimizer
from meshwright.kernels import moments
from stores import GATED, is_equal, make, snapshot, take_step

FORMATS = ["float32", "bfloat16", "float8"]


def made(tmp_path, dtype, rule="adam"):
    model, store = make(GATED, Optimizer(optimizer=rule, optimizer_state_dtype=dtype))
    for _ in range(2):
        take_step(model, store)
    path = tmp_path / dtype
    native.save_step(path, 2, store.named_state(), {"iteration": 2, "optimizer_steps": 2})
    return path, model, store


def loaded(path, dtype, capsys, rule="adam"):
    model, store = make(GATED, Optimizer(optimizer=rule, optimizer_state_dtype=dtype), seed=5)
    state = loading.load_checkpoint(path, store.named_state())
    store.publish_weights()
    store.steps = state.state["optimizer_steps"]
    return model, store, capsys.readouterr().out


@pytest.mark.parametrize("rule", ["adam", pytest.param("muon", marks=pytest.mark.long)])
def test_files_hold_the_formats_and_resume_is_exact(tmp_path, capsys, rule):
    sizes = {}
    for dtype in FORMATS:
        path, model, store = made(tmp_path, dtype, rule)
        folder = path / "iter_0000002"
        index = json.loads((folder / "index.json").read_text())["tensors"]
        kinds = {name.partition("/")[2]: entry["dtype"] for name, entry in index.items()}
        codes = {"float32": ("F32", "F32"), "bfloat16": ("BF16", "BF16"), "float8": ("I8", "U8")}[
            dtype
        ]
        assert (kinds[""], kinds["exp_avg"], kinds["exp_avg_sq"]) == ("F32", *codes)
        assert kinds.get("momentum", codes[0]) == codes[0]
        sizes[dtype] = (folder / "rank_00000.safetensors").stat().st_size
        other, again, said = loaded(path, dtype, capsys, rule)
        assert "converted" not in said and is_equal(snapshot(again), snapshot(store))
        for m, s in ((model, store), (other, again)):
            take_step(m, s)
        assert is_equal(snapshot(again), snapshot(store))
    sixteen, eight = (0.72, 0.56) if rule == "adam" else (0.8, 0.7)
    assert (
        sizes["bfloat16"] < sixteen * sizes["float32"]
        and sizes["float8"] < eight * sizes["float32"]
    )


def test_an_export_to_megatron_has_float32(tmp_path):
    from meshwright.compat.formats.megatron import writer

    path, _, store = made(tmp_path, "float8")
    source = loading.open_checkpoint(path)
    source.vocab = stores.VOCAB
    target = type(
        "Target",
        (),
        {"tensors": source.tensors, "source": source, "padded": 64, "t": 1, "model": GATED},
    )
    for key in ("exp_avg", "exp_avg_sq"):
        part = writer.rank_part(target, f"h.0.attn.proj.weight/{key}", 0).make()
        assert part.dtype is torch.float32
        assert torch.equal(
            part, moments.expanded(store.named_state()[f"h.0.attn.proj.weight/{key}"][2])
        )


@pytest.mark.parametrize("dtype", FORMATS)
def test_a_run_may_go_on_in_another_format(tmp_path, capsys, dtype):
    """Moments are rounded to the nearest, once; what another program wrote in float32 as well."""
    path, _, store = made(tmp_path, dtype)
    before = {n: x for n, (_, _, x) in store.named_state().items()}
    for other in (name for name in FORMATS if name != dtype):
        model, again, said = loaded(path, other, capsys)
        assert "tensors converted from" in said
        bound = {"float32": 0.0, "bfloat16": 2.0**-8, "float8": 2.0**-3}[other]
        for name, (_, _, got) in again.named_state().items():
            want, got = moments.expanded(before[name]), moments.expanded(got)
            floor = 2.0**-28 if other == "float8" else 0.0
            assert (
                (got - want).abs() <= (bound if "/" in name else 0) * want.abs() + floor
            ).all(), name
        assert math.isfinite(take_step(model, again).item()) and again.steps == 3
