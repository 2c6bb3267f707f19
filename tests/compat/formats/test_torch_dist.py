"""Megatron-Core checkpoints read as the tensors that megatron-core held, and give its logits.

Without megatron-core, torch.distributed.checkpoint writes the same names and boxes (`Boxes` below).
"""

from __future__ import annotations

import importlib.metadata
import shutil
import warnings
from argparse import Namespace
from math import prod

import core_files
import pytest
import torch
import torch.distributed.checkpoint as dcp
from foreign import HAS_CORE, assert_reads, our_name, read_tensors
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from helpers import error_of
from meshwright.base.errors import UserError
from meshwright.checkpoint import loading
from meshwright.checkpoint.saved_model import model_settings
from meshwright.checkpoint.steps import StepLocation
from meshwright.compat.formats.megatron import torch_dist
from meshwright.compat.formats.table import TORCH_DIST
from meshwright.config.schema import Model
from meshwright.model.gpt import GPT
from meshwright.model.positions import Positions
from on_ranks import run_ranks

pytestmark = pytest.mark.whole  # importing torch.distributed.checkpoint takes a second

VERSION = importlib.metadata.version("megatron-core") if HAS_CORE else ""
STRETCHES = "fully_sharded_model_space"  # which releases since 0.14 read and do not write


# Files of megatron-core

LLAMA = {
    "cfg": {
        "gated_linear_unit": True,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "num_query_groups": 2,
    },
    "rope": True,
    "tied": False,
}
CASES = {
    "Llama": (1, 1, 1, LLAMA),
    "tp2": (2, 1, 1, {"optimizer": "whole"}),
    "pp2": (1, 2, 1, {"optimizer": "whole", "bf16": True}),
    "dp2 by parameter": (1, 1, 2, {"optimizer": "fully_reshardable", "bf16": True}),
    "tp2 Llama by parameter": (2, 1, 1, LLAMA | {"optimizer": "fully_reshardable", "bf16": True}),
    "tp2 pp2 as in memory": (
        2,
        2,
        1,
        {"optimizer": "dp_reshardable", "bf16": True, "bucket": 9000},
    ),
    "tp2 dp2 Llama in stretches": (2, 1, 2, LLAMA | {"optimizer": STRETCHES, "bf16": True}),
}

FIRST = ("Llama", "tp2 Llama by parameter", "tp2 pp2 as in memory", "tp2 dp2 Llama in stretches")


@pytest.mark.skipif(not HAS_CORE, reason="megatron-core cannot be imported (the extra `peers`)")
@pytest.mark.parametrize(
    "case", [c if c in FIRST else pytest.param(c, marks=pytest.mark.long) for c in CASES]
)
def test_what_megatron_core_writes(case, tmp_path):
    tp, pp, dp, options = CASES[case]
    kind = options.get("optimizer")
    if (kind == STRETCHES) != (VERSION < "0.14") and kind not in (None, "whole"):
        pytest.skip(f"megatron-core {VERSION} does not write {options['optimizer']}")
    run_ranks(core_files.body, tp * pp * dp, str(tmp_path), tp, pp, options)
    source = torch_dist.open_torch_dist(tmp_path / "iter_0000010")
    truths = [torch.load(path) for path in sorted(tmp_path.glob("truth_*.pt"))]
    got = read_tensors(source)
    assert_reads(source, join_ranks(truths, bool(options.get("cfg"))))
    assert source.config["num_attention_heads"] == 4 and source.config["num_layers"] == 4
    if options.get("optimizer"):
        assert len(got) == 3 * len([n for n in got if "/" not in n])
        assert (
            source.step == source.state["iteration"] == 10 and source.state["optimizer_steps"] == 2
        )
        assert source.state["schedule"]["max_lr"] == 1e-3 and source.state["schedule_samples"] == 80
    if truths[0]["logits"] is not None:
        settings = {k: v for k, v in source.config.items() if k in Model.__dataclass_fields__}
        model = GPT(
            Model(**settings | {"hidden_dropout": 0.0, "attention_dropout": 0.0}),
            96,
            96,
            core_files.POSITIONS,
        )
        model.load_state_dict(got)
        logits = model(truths[0]["tokens"], Positions())
        torch.testing.assert_close(logits, truths[0]["logits"].float(), atol=1e-5, rtol=0)


def join_ranks(truths, gated):
    """Join the ranks' shares by megatron-core's own record of where each tensor is cut."""
    parts, shapes, cuts = {}, {}, {}
    for truth in truths:
        for name, cut, rank, shape, begin, values in truth["parameters"]:
            shapes[name], cuts[name] = shape, cut
            for kind, value in values.items():
                flat = parts.setdefault((name, kind), {}).setdefault(
                    rank, torch.zeros(prod(shape), dtype=value.dtype)
                )
                flat[begin : begin + len(value)] = value
    out = {}
    for (name, kind), by_rank in parts.items():
        each = [by_rank[rank].view(shapes[name]) for rank in sorted(by_rank)]
        if name.endswith("linear_fc1.weight") and gated:
            full = torch.stack([torch.cat([t.chunk(2)[i] for t in each]) for i in (0, 1)])
        else:
            full = each[0] if cuts[name] is None else torch.cat(each, cuts[name])
        out[our_name(name) + (f"/{kind}" if kind else "")] = full
    return out


# Files of torch.distributed.checkpoint


class Boxes:
    """A tensor that is written in several boxes, as if it were cut over ranks."""

    def __init__(self, shape, boxes):
        self.shape, self.boxes = torch.Size(shape), {tuple(at): t for at, t in boxes}

    def __create_write_items__(self, fqn, _):
        for at, t in self.boxes.items():
            chunk = ChunkStorageMetadata(torch.Size(at), t.shape)
            data = TensorWriteData(chunk, TensorProperties.create_from_tensor(t), self.shape)
            yield WriteItem(
                MetadataIndex(fqn, torch.Size(at)), WriteItemType.SHARD, tensor_data=data
            )


class Planner(dcp.DefaultSavePlanner):
    def lookup_object(self, index):
        found = self.state_dict[index.fqn]
        return (
            found.boxes[tuple(index.offset)]
            if isinstance(found, Boxes)
            else super().lookup_object(index)
        )


def noise(*shape, seed=[0]):  # noqa: B006  counts the calls
    seed[0] += 1
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed[0]))


H, F, L, V, P = 8, 12, 2, 16, 4


def small(gated=False):
    """Return the weights of all layers under megatron-core's names."""
    rows = 2 * F if gated else F
    layer = {
        "self_attention.linear_qkv.layer_norm_": (H,),
        "self_attention.linear_qkv.": (3 * H, H),
        "self_attention.linear_proj.": (H, H),
        "mlp.linear_fc1.layer_norm_": (H,),
        "mlp.linear_fc1.": (rows, H),
        "mlp.linear_fc2.": (H, F),
    }
    out = {}
    for name, (n, *columns) in layer.items():
        out[f"decoder.layers.{name}weight"], out[f"decoder.layers.{name}bias"] = (
            noise(L, n, *columns),
            noise(L, n),
        )
    return out | {
        "embedding.word_embeddings.weight": noise(V, H),
        "embedding.position_embeddings.weight": noise(P, H),
        "decoder.final_layernorm.weight": noise(H),
        "decoder.final_layernorm.bias": noise(H),
    }


def expected(weights):
    out = {}
    for name, t in weights.items():
        mine = our_name(
            name.replace("linear_qkv.layer_norm_", "ln_1!").replace(
                "linear_fc1.layer_norm_", "ln_2!"
            )
        )
        mine = mine.replace("self_attention.ln_1!", "ln_1.").replace("mlp.ln_2!", "ln_2.")
        for layer in range(L) if mine.startswith("h.") else [None]:
            one = t if layer is None else t[layer]
            if ".mlp.fc." in mine and one.shape[0] == 2 * F:
                one = one.view(2, F, *one.shape[1:])
            out[mine if layer is None else mine.replace("h.", f"h.{layer}.", 1)] = one
    return out


def write(folder, tree, common=None):
    folder = folder / "iter_0000010"
    shutil.rmtree(folder, ignore_errors=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that this is one process
        dcp.save(
            tree, checkpoint_id=folder, planner=Planner(flatten_state_dict=False), no_dist=True
        )
    args = Namespace(
        num_attention_heads=2, global_batch_size=4, weight_decay=0.1, consumed_train_samples=40
    )
    settings = {"args": args, "iteration": 10, "optimizer": {"param_groups": [{"step": 10}]}}
    settings |= {"opt_param_scheduler": core_files.SCHEDULER}
    torch.save(settings if common is None else common, folder / "common.pt")
    return folder


def cut(t, shares):
    """Yield boxes of a tensor, cut into this many shares along each dimension."""
    size = [n // k for n, k in zip(t.shape, shares, strict=True)]
    for which in torch.cartesian_prod(*map(torch.arange, shares)).view(-1, len(shares)).tolist():
        at = [i * n for i, n in zip(which, size, strict=True)]
        yield (
            which,
            at,
            t[tuple(slice(a, a + n) for a, n in zip(at, size, strict=True))].contiguous(),
        )


@pytest.mark.parametrize("prefix", ["", "module."])
def test_names_of_equal_and_different_layers(prefix, tmp_path):
    weights = small()
    alike = {prefix + n: t for n, t in weights.items()} | {
        prefix + "decoder.layers.mlp.linear_fc1._extra_state": b"x"
    }
    assert_reads(torch_dist.open_torch_dist(write(tmp_path, alike)), expected(weights))
    apart = {}
    for n, t in weights.items():
        for layer in range(L):
            apart[prefix + n.replace("layers.", f"layers.{layer}.")] = (
                t[layer] if "layers." in n else t
            )
    names = {"self_attention.linear_qkv.layer_norm_": "input_layernorm."}
    names |= {"mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm."}
    for theirs, local in names.items():
        apart = {n.replace(theirs, local): t for n, t in apart.items()}
    source = torch_dist.open_torch_dist(
        write(tmp_path, apart, {"args": Namespace(num_attention_heads=2), "iteration": 10})
    )
    assert_reads(source, expected(weights))
    assert not source.state  # weights alone
    assert source.config["max_position_embeddings"] == P and source.config["ffn_hidden_size"] == F


def test_optimizer_by_parameter_and_in_stretches(tmp_path):
    """Stretches begin and end anywhere in a rank's share; masters take the weights' place."""
    weights = small(gated=True)
    masters, m, v = ({n: torch.randn_like(t) for n, t in weights.items()} for _ in range(3))
    kinds = {"fp32_param": masters, "exp_avg": m, "exp_avg_sq": v}
    wanted = expected(masters) | {f"{n}/exp_avg": t for n, t in expected(m).items()}
    wanted |= {f"{n}/exp_avg_sq": t for n, t in expected(v).items()}
    by_parameter, stretches = dict(weights), dict(weights)
    for kind, tensors in kinds.items():
        for name, t in tensors.items():
            shares = [1] * t.ndim
            if "layers." in name:
                rows = 4 if "fc1" in name and t.shape[1] > H else 1
                shares = [L, rows, *[2 if "fc2.w" in name else 1] * (t.ndim - 2)]
            pieces = list(cut(t, shares))
            by_parameter[f"optimizer.state.{kind}.{name}"] = Boxes(
                t.shape, [(at, piece) for _, at, piece in pieces]
            )
            flat = []
            for which, _, piece in pieces:
                row = piece.reshape(-1)
                border = 1 + row.numel() // 3
                for a, part in ((0, row[:border]), (border, row[border:])):
                    flat.append(([*which, a], part.view(*[1] * t.ndim, -1)))
            shape = (*shares, t.numel() // prod(shares))
            stretches[f"chained_0.optimizer.state.{kind}.{name}"] = Boxes(shape, flat)
    for tree in (by_parameter, stretches):
        source = torch_dist.open_torch_dist(write(tmp_path, tree))
        assert_reads(source, wanted)
        assert source.state["optimizer_steps"] == 10 and source.state["schedule"]["decay"] == 800
        assert_reads(torch_dist.open_torch_dist(source.folder, trust=True), wanted)
        source = torch_dist.open_torch_dist(source.folder, optimizer=False)
        assert_reads(source, expected(weights))
        assert source.state["iteration"] == 10


def test_separate_halves_of_a_gate(tmp_path):
    weights = small(gated=True)
    tree = dict(weights)
    for name in [n for n in tree if "fc1.weight" in n or "fc1.bias" in n]:
        tree[f"{name}_w"], tree[f"{name}_v"] = (t.contiguous() for t in tree.pop(name).chunk(2, 1))
    assert_reads(torch_dist.open_torch_dist(write(tmp_path, tree)), expected(weights))


BUCKET = "optimizer.distributed.dp_group_idx_{}.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_{}.{}"
# with Transformer Engine
MODULES = ["linear_proj", "linear_qkv.layer", "linear_qkv", "fc1.layer", "fc1", "fc2"]


def in_memory(kinds, borders):
    """Return the buffers of two stages of one layer, with new buckets at these parameters.

    The last parameter comes first; each starts at a multiple of 64.
    """
    out = {}
    for stage in (0, 1):
        names = [n for n in kinds["param"] if "embedding" in n] if stage == 0 else []
        layer = [n for n in kinds["param"] if "layers." in n]
        names += sorted(
            layer, key=lambda n: (min(i for i, m in enumerate(MODULES) if m in n), "bias" in n)
        )
        last = [
            "decoder.final_layernorm.weight",
            "decoder.final_layernorm.bias",
            "embedding.word_embeddings.weight",
        ]
        names += last * stage
        for kind, tensors in kinds.items():
            rows = [torch.zeros(0)]
            for n in reversed(names):
                flat = (tensors[n][stage] if "layers." in n else tensors[n]).reshape(-1)
                if any(border in n for border in borders) and len(rows[-1]):
                    rows.append(torch.zeros(0))
                rows[-1] = torch.cat([rows[-1], torch.zeros(-len(rows[-1]) % 64), flat])
            for number, row in enumerate(rows):
                # of data ranks
                parts = [([at], row[at : at + 100]) for at in range(0, len(row), 100)]
                out[BUCKET.format(stage, number, kind)] = Boxes(row.shape, parts)
    return out


def test_buffers_of_the_distributed_optimizer(tmp_path):
    weights = small()
    m, v = ({n: torch.randn_like(t) for n, t in weights.items()} for _ in range(2))
    kinds = {"param": weights, "exp_avg": m, "exp_avg_sq": v}
    half = {n: t.bfloat16() for n, t in weights.items()}
    step = {
        "optimizer.distributed.dp_group_idx_0.optimizer/shard_0_1": [
            {"param_groups": [{"step": 12}]}
        ]
    }
    tree = half | in_memory(kinds, ["word_embeddings", "fc2.weight"]) | step
    source = torch_dist.open_torch_dist(write(tmp_path, tree))
    wanted = expected(weights)
    for kind in ("exp_avg", "exp_avg_sq"):
        wanted |= {f"{n}/{kind}": t for n, t in expected(kinds[kind]).items()}
    assert_reads(source, wanted)
    assert source.state["optimizer_steps"] == 12


@pytest.mark.parametrize("why", ["one is not there", "other weights", "another size"])
def test_buffers_that_do_not_fit_are_reported(why, tmp_path):
    weights = small()
    kinds = {"param": weights, "exp_avg": weights, "exp_avg_sq": weights}
    if why == "other weights":
        kinds["param"] = {n: -t for n, t in weights.items()}
    buffers = in_memory(kinds, ["word_embeddings"])
    if why == "one is not there":
        buffers.pop(BUCKET.format(1, 0, "exp_avg"))
    if why == "another size":
        row = noise(900)
        buffers |= {BUCKET.format(1, 1, kind): Boxes(row.shape, [([0], row)]) for kind in kinds}
    source = torch_dist.open_torch_dist(write(tmp_path, weights | buffers))
    assert_reads(source, expected(weights))
    assert not source.has_optimizer and "--no-load-optim" in source.notes[0]
    assert source.state["iteration"] == 10  # which --no-load-optim goes on from


def spoil_part(tree):
    """Remove a box."""
    t = tree["embedding.word_embeddings.weight"]
    tree["embedding.word_embeddings.weight"] = Boxes(t.shape, [([0, 0], t[:8])])


def spoil_share(tree):
    tree["optimizer.state.exp_avg.decoder.final_layernorm.bias"] = Boxes(
        (3, 4), [([0, 0], noise(3, 4))]
    )


REFUSED = {
    "a part is missing": (spoil_part, "missing or duplicated"),
    "a layer has no norm": (
        lambda t: t.pop("decoder.layers.mlp.linear_fc1.layer_norm_weight"),
        "missing",
    ),
    "experts": (
        lambda t: t.update({"decoder.layers.mlp.router.weight": noise(L, 4, H)}),
        "mlp.router",
    ),
    "shares that do not fit": (spoil_share, "not laid out"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_refused(why, tmp_path):
    tree, (spoil, said) = small(), REFUSED[why]
    spoil(tree)
    with pytest.raises(UserError, match=said):
        loading.open_step(StepLocation(TORCH_DIST, write(tmp_path, tree), 10, tmp_path))


@pytest.mark.parametrize(
    ("window", "skipped", "want"),
    [
        (None, None, (0, ())),
        ((3, 0), None, (3, (0, 1))),
        ((3, -1), 2, (3, (0,))),
        ([3, 0], [0, 1], (3, (1,))),
        ((-1, 0), 2, (0, ())),
        ((3, 1), None, "'3,1' is neither L nor L,0"),
        ((3, 0), [1], "a list is of 1 layers, but --num-layers is 2"),
    ],
)
def test_windows_of_megatron_core(window, skipped, want, tmp_path):
    args = Namespace(num_attention_heads=2, window_size=window, window_attn_skip_freq=skipped)
    source = torch_dist.open_torch_dist(write(tmp_path, small(), {"args": args}))
    if isinstance(want, str):
        assert want in error_of(lambda: model_settings(source.config, tmp_path))
    else:
        m = model_settings(source.config, tmp_path)
        assert (m.window, m.windowed_layers) == want


def test_options_that_we_do_not_build_are_named(tmp_path):
    common = {"args": Namespace(num_attention_heads=2, multi_latent_attention=True)}
    with pytest.raises(UserError, match="multi_latent_attention True"):
        torch_dist.open_torch_dist(write(tmp_path, small(), common))
    with pytest.raises(UserError, match="--num-attention-heads"):
        torch_dist.open_torch_dist(write(tmp_path, small(), {}))
    assert (
        torch_dist.open_torch_dist(tmp_path / "iter_0000010", heads=4).config["num_attention_heads"]
        == 4
    )
