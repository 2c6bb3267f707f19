"""DeepSpeed checkpoints: every ZeRO stage reads as the masters and moments that DeepSpeed held."""

from __future__ import annotations

import importlib.util
from argparse import Namespace

import deepspeed_files as files
import pytest
import torch
from foreign import assert_reads, our_name, read_tensors

from meshwright.base.errors import UserError
from meshwright.checkpoint import loading
from meshwright.checkpoint.steps import StepLocation
from meshwright.compat.formats.megatron import deepspeed
from meshwright.compat.formats.table import DEEPSPEED
from on_ranks import run_ranks

HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None
BF16, FP16 = {"bf16": True}, {"fp16": True}
CASES = {
    "float32": (0, 1, {}),
    "bf16 without ZeRO": (0, 2, BF16),
    "fp16 without ZeRO": (0, 2, FP16),
    "ZeRO-1": (1, 2, BF16),
    "ZeRO-1, tp2": (1, 4, BF16 | {"tp": 2}),
    "ZeRO-2": (2, 3, FP16),
    "ZeRO-3": (3, 2, BF16),
    "pipeline, tp2": (1, 4, BF16 | {"pp": 2, "tp": 2}),
    "pipeline, bf16 optimizer": (1, 4, BF16 | {"pp": 2, "float32 accumulation": True}),
}

FIRST = ("ZeRO-1, tp2", "ZeRO-2", "ZeRO-3", "pipeline, tp2")


@pytest.mark.whole
@pytest.mark.skipif(not HAS_DEEPSPEED, reason="DeepSpeed cannot be imported (the extra `peers`)")
@pytest.mark.parametrize(
    "case", [c if c in FIRST else pytest.param(c, marks=pytest.mark.long) for c in CASES]
)
def test_what_deepspeed_writes(case, tmp_path):
    stage, world, options = CASES[case]
    run_ranks(files.body, world, str(tmp_path), stage, options)
    truths = [torch.load(tmp_path / f"truth_{rank}.pt") for rank in range(world)]
    source = deepspeed.open_deepspeed(tmp_path / "global_step3")
    assert_reads(source, join_ranks(truths, options))
    assert source.config["num_attention_heads"] == 2 and source.config["num_layers"] == files.L
    state = source.state
    assert state["iteration"] == 3 and state["consumed_train_samples"] == 24
    # some of its optimizers take one on zeros, to have a state
    assert state["optimizer_steps"] in (3, 4)
    assert state["schedule"]["decay"] == 800 and state["schedule_samples"] == 24
    if "fp16" in options:
        assert state["loss_scale"]["dynamic"] and state["loss_scale"]["scale"] == 16.0
    if case in ("ZeRO-1", "ZeRO-2", "ZeRO-3"):
        run_ranks(files.zero_to_fp32, 1, str(tmp_path))
        masters = {pipeline_name(name): t for name, t in torch.load(tmp_path / "fp32.pt").items()}
        assert_reads(
            source, masters | {name: t for name, t in read_tensors(source).items() if "/" in name}
        )


@pytest.mark.whole
@pytest.mark.skipif(not HAS_DEEPSPEED, reason="DeepSpeed cannot be imported (the extra `peers`)")
@pytest.mark.parametrize(
    "case", ["pipeline, tp2", pytest.param("ZeRO-1, tp2", marks=pytest.mark.long)]
)
def test_universal_by_deepspeed(case, tmp_path):
    stage, world, options = CASES[case]
    run_ranks(files.body, world, str(tmp_path), stage, options)
    run_ranks(files.universal, 1, str(tmp_path / "global_step3"))
    source = deepspeed.open_deepspeed(tmp_path / "global_step3_universal")
    assert_reads(
        source,
        join_ranks([torch.load(tmp_path / f"truth_{rank}.pt") for rank in range(world)], options),
    )
    assert source.state["optimizer_steps"] == 3 and source.state["schedule"]["decay"] == 800


def join_ranks(truths, options):
    """Join the tensor ranks and name the stages by their layers; data ranks must agree."""
    tp, pp = options.get("tp", 1), options.get("pp", 1)
    out = {}
    for stage in range(pp):
        first = stage * len(truths) // pp  # pipe, data, model
        for name, kinds in truths[first].items():
            for kind in kinds:
                parts = [truths[first + rank][name][kind] for rank in range(tp)]
                cut = files.cut_of(name)
                mine = pipeline_name(name) + (f"/{kind}" if kind else "")
                tensor = parts[0] if cut is None else torch.cat(parts, cut)
                assert mine not in out or torch.equal(out[mine], tensor)
                out.setdefault(mine, tensor)
    return out


def pipeline_name(name):
    """Return our name for one of a model, or of a pipeline, whose modules have numbers."""
    name = our_name(name.removeprefix("language_model.").replace("tied_modules.embed", "embedding"))
    number, _, rest = name.partition(".")
    if number.isdigit():
        return f"ln_f.{rest}" if rest in ("weight", "bias") else f"h.{int(number) - 3}.{rest}"
    return name


# By hand

FORMS = {
    "gated, tp2": {"tp": 2, "dp": 3, "gated": True},
    "ZeRO-3": {"dp": 3, "stage": 3},
    "pipeline of three, tp2": {"pp": 3, "tp": 2, "dp": 3},
    "pipeline before param_slice_mappings": {"pp": 3, "mapping": False},
}


def expected_tensors(values, rows=files.V - 3):
    """Return values under our names, with the true vocabulary and a gate's halves separate."""
    out = {}
    for kind, tensors in values.items():
        for name, t in tensors.items():
            mine = our_name(name)
            if mine in ("wte.weight", "lm_head.weight"):
                t = t[:rows]
            if ".mlp.fc." in mine and len(t) == 2 * files.F:
                t = t.view(2, files.F, *t.shape[1:])
            out[mine + (f"/{kind}" if kind else "")] = t
    return out


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_zero(form, tmp_path):
    values = files.model(gated=FORMS[form].get("gated", False))
    source = deepspeed.open_deepspeed(files.write(tmp_path, values, **FORMS[form]))
    assert_reads(source, expected_tensors(values))
    assert source.vocab == files.V - 3
    state = source.state
    assert (
        state["iteration"] == 30
        and state["optimizer_steps"] == 30
        and state["schedule"]["warmup"] == 16
    )
    scale = {
        "dynamic": True,
        "scale": 512.0,
        "growth_tracker": 20,
        "hysteresis_tracker": 2,
        "in_a_row": 0,
    }
    assert state["loss_scale"] == scale
    if "stage" not in FORMS[form]:
        source = deepspeed.open_deepspeed(source.folder, optimizer=False)
        assert_reads(
            source, {name: t.bfloat16() for name, t in expected_tensors({"": values[""]}).items()}
        )
        assert source.state["iteration"] == 30


@pytest.mark.parametrize("options", [{"untied": True}, {"embedding_norm": True}])
def test_parts_that_some_models_have(options, tmp_path):
    values = files.model(**options)
    source = deepspeed.open_deepspeed(files.write(tmp_path, values, pp=2))
    assert_reads(source, expected_tensors(values))
    assert source.config["untie_embeddings_and_output_weights"] == ("untied" in options)
    assert source.config["embed_layernorm"] == ("embedding_norm" in options)


def test_weights_only(tmp_path):
    values = files.model()
    source = deepspeed.open_deepspeed(files.write(tmp_path, values, tp=2, pp=2, only_weights=True))
    assert_reads(
        source, {name: t.bfloat16() for name, t in expected_tensors({"": values[""]}).items()}
    )
    assert not source.state


def test_an_embedding_that_the_last_stage_saved_too(tmp_path):
    values = files.model()
    folder = files.write(tmp_path, values, pp=2)
    name = "layer_{:02d}-model_00-model_states.pt"
    (folder / name.format(files.L + 5)).write_bytes((folder / name.format(1)).read_bytes())
    assert_reads(deepspeed.open_deepspeed(folder), expected_tensors(values))


def test_fp16_of_fused_adam_without_zero(tmp_path):
    """One flat tensor of masters per group."""
    values = files.model()
    folder = files.write(tmp_path, values, only_weights=True)
    groups = [
        [n for n, t in values[""].items() if (t.ndim == 1) == norms] for norms in (False, True)
    ]
    rows = {
        kind: [torch.cat([t[n].reshape(-1) for n in group]) for group in groups]
        for kind, t in values.items()
    }
    states = {i: {kind: rows[kind][i] for kind in ("exp_avg", "exp_avg_sq")} for i in (0, 1)}
    inner = {"state": states, "param_groups": [{"params": [i], "step": 30} for i in (0, 1)]}
    scale = {"cur_scale": 64.0, "cur_iter": 30, "last_overflow_iter": 9, "scale_window": 1000}
    optimizer = {
        "optimizer_state_dict": inner,
        "fp32_groups_flat": rows[""],
        "dynamic_loss_scale": True,
        **scale,
    }
    change(folder / "mp_rank_00_model_states.pt", lambda tree: tree.update(optimizer=optimizer))
    source = deepspeed.open_deepspeed(folder)
    assert_reads(source, expected_tensors(values))
    assert source.state["optimizer_steps"] == 30 and source.state["loss_scale"]["scale"] == 64.0


def test_a_pipeline_without_zero_loads_weights_only(tmp_path):
    folder = files.write(tmp_path, files.model(), pp=2, only_weights=True)
    change(folder / "mp_rank_00_model_states.pt", lambda tree: tree.update(optimizer={"state": {}}))
    source = deepspeed.open_deepspeed(folder)
    assert (
        not source.has_optimizer
        and "--no-load-optim" in source.notes[0]
        and source.state["iteration"] == 30
    )


def test_universal(tmp_path):
    values = files.model(untied=True)
    source = deepspeed.open_deepspeed(files.joined_by_hand(tmp_path, values))
    assert_reads(source, expected_tensors(values, files.V))
    assert source.state["optimizer_steps"] == 30
    for path in (tmp_path / "global_step30_universal").rglob("exp_avg.pt"):
        path.unlink()
    source = deepspeed.open_deepspeed(tmp_path / "global_step30_universal")
    assert_reads(source, expected_tensors({"": values[""]}, files.V))
    assert not source.state


def test_universal_of_gates_over_tensor_ranks(tmp_path):
    """Halves joined separately are read; halves mixed by tensor rank are refused."""
    values = files.model(gated=True)
    folder = files.joined_by_hand(tmp_path, values)
    # one tensor rank
    assert_reads(deepspeed.open_deepspeed(folder), expected_tensors(values, files.V))
    args = Namespace(**vars(files.ARGS), tensor_model_parallel_size=2)
    change(folder / "mp_rank_00_model_states.pt", lambda tree: tree.update(args=args))
    for path in folder.glob("zero/*dense_h_to_4h*/*.pt"):
        if path.stem != "step" and not (
            path.stem == "exp_avg" and path.parent.name == "3.mlp.dense_h_to_4h.bias"
        ):
            saved = torch.load(path)
            saved = saved if isinstance(saved, dict) else {"param": saved}
            torch.save(saved | {"param_n_sub_params": 2}, path)
    with pytest.raises(UserError, match="parameter_with_2_sub_params_cat_dim_0") as refused:
        deepspeed.open_deepspeed(folder)
    path = folder / "zero/3.mlp.dense_h_to_4h.bias/exp_avg.pt"
    assert str(path) in str(refused.value)
    torch.save({"param": deepspeed.read_tensor(path, False).clone(), "param_n_sub_params": 2}, path)
    assert_reads(deepspeed.open_deepspeed(folder), expected_tensors(values, files.V))


def change(path, act):
    """Edit a saved tree."""
    with files.as_deepspeeds():
        tree = torch.load(path, weights_only=False)
        act(tree)
        torch.save(tree, path)


def without(name):
    return lambda folder: (folder / name).unlink()


def changed(name, act):
    return lambda folder: change(folder / name, act)


def state(tree):
    return tree["optimizer_state_dict"]


FILE = "layer_03-model_00-model_states.pt"
SHARE = "bf16_zero_pp_rank_6_mp_rank_03_optim_states.pt"
DAMAGES = {
    "a data rank": (without("bf16_zero_pp_rank_10_mp_rank_03_optim_states.pt"), "data rank 10"),
    "the last data rank": (
        without("bf16_zero_pp_rank_11_mp_rank_03_optim_states.pt"),
        "elements of the master",
    ),
    "a layer": (without("layer_04-model_01-model_states.pt"), "tensor rank|missing|layer"),
    "a rank's file": (without("mp_rank_01_model_states.pt"), "pipeline rank 1"),
    "a parameter": (changed(FILE, lambda t: t.pop("mlp.dense_h_to_4h.weight")), "mlp.fc.weight"),
    "another order": (
        changed(SHARE, lambda t: state(t)["single_partition_of_fp32_groups"][0].neg_()),
        "not those of",
    ),
    "a copy that differs": (
        changed(FILE, lambda t: t["input_layernorm.bias"].add_(1)),
        "not of one checkpoint",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_refused(damage, tmp_path):
    spoil, said = DAMAGES[damage]
    folder = files.write(tmp_path, files.model(), tp=2, pp=2, dp=12)
    spoil(folder)
    with pytest.raises(UserError, match=said):
        loading.open_step(StepLocation(DEEPSPEED, folder, 30, tmp_path))


def test_no_heads_and_no_files(tmp_path):
    folder = files.write(tmp_path, files.model())
    change(folder / "mp_rank_00_model_states.pt", lambda t: t.pop("args"))
    with pytest.raises(UserError, match="--num-attention-heads"):
        deepspeed.open_deepspeed(folder)
    assert deepspeed.open_deepspeed(folder, heads=4).config["num_attention_heads"] == 4
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no file for"):
        deepspeed.open_deepspeed(tmp_path / "empty")
