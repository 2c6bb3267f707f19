"""Megatron-LM's folders, written without our code, are read exactly; ours are Megatron's tree."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign import assert_reads, read_tensors
from megatron_files import Form, forward, ours, plain, rounded, write

from meshwright.base.errors import BAD_DATA, UserError
from meshwright.checkpoint import loading, native
from meshwright.checkpoint.sources import MappedSource, Source, TensorView
from meshwright.checkpoint.steps import StepLocation
from meshwright.cli import convert
from meshwright.compat.formats.adam import MOMENTS, match_numbered
from meshwright.compat.formats.megatron import reader as megatron
from meshwright.compat.formats.megatron import writer as megatron_writer
from meshwright.compat.formats.table import MEGATRON
from meshwright.config.schema import Model
from meshwright.model.gpt import GPT
from meshwright.model.positions import Positions
from meshwright.optim.schedule import Schedule

Tensors = dict[str, torch.Tensor]


def with_moments(f: Form) -> tuple[Tensors, Tensors]:
    """Return weights and moments as plain models, and the tensors that must be read."""
    three = [plain(f, seed) for seed in (1, 2, 3)]
    expected = ours(f, three[0])
    for kind, values in zip(("exp_avg", "exp_avg_sq"), three[1:], strict=True):
        expected |= {f"{name}/{kind}": tensor for name, tensor in ours(f, values).items()}
    return three, expected  # type: ignore[return-value]


def write_trained(folder: Path, f: Form) -> Path:
    """Write a step with the optimizer's state."""
    return write(folder / "iter_0000007", f, *with_moments(f)[0])


WEIGHTS = {
    "no version": Form(version=None, words="2019"),
    "version 1, TP 4, PP 2": Form(version=1.0, tp=4, pp=2),
    "bfloat16": Form(dtype=torch.bfloat16),
    "virtual stages, TP 2, PP 4": Form(layers=8, tp=2, pp=4, chunks=2),
    "one dictionary": Form(flat=True, tp=2, pp=2),
    "late 2023": Form(words="late 2023"),
    "core": Form(words="core", tp=2),
    "gated with biases": Form(gated=True, tp=4),
    "query groups": Form(heads=8, groups=4, tp=2),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_of_every_form(name: str, tmp_path: Path) -> None:
    f = WEIGHTS[name]
    model = plain(f)
    source = megatron.open_megatron(write(tmp_path / "iter_0000007", f, model)).of_vocabulary(
        f.vocab
    )
    assert_reads(source, {name: t.to(f.dtype) for name, t in ours(f, model).items()})
    assert source.version == str(f.version or 0) and not source.state


STATES = {
    "2019": Form(state="2019", words="2019", version=None, tp=2),
    "float32": Form(state="fp32", dtype=torch.float32, tp=2, pp=2),
    "masters, version 1, TP 4": Form(state="masters", version=1.0, tp=4),
    "masters, virtual stages": Form(state="masters", layers=4, pp=2, chunks=2),
    "masters, BigCode": Form(state="masters", groups=1, multi_query=True, tp=2),
    "sharded, bfloat16, 7 ranks": Form(
        state="sharded", dtype=torch.bfloat16, dp=7, gated=True, tp=2
    ),
    "flat, TP 2, PP 2": Form(state="flat", tp=2, pp=2, dp=5),
    "buckets": Form(state="buckets", tp=2, gated=True, dp=7),
}


@pytest.mark.parametrize("name", STATES)
def test_optimizer_of_every_form_is_read_and_written(name: str, tmp_path: Path) -> None:
    f = STATES[name]
    three, expected = with_moments(f)
    source = megatron.open_megatron(write(tmp_path / "iter_0000007", f, *three)).of_vocabulary(
        f.vocab
    )
    assert_reads(source, expected)
    state = source.state
    assert (state["iteration"], state["optimizer_steps"], source.step) == (7, 6, 7)
    assert (state["consumed_train_samples"], state["schedule_samples"]) == (56, 48)
    curve = {
        "max_lr": 1e-3,
        "min_lr": 1e-5,
        "warmup": 16,
        "decay": 800,
        "style": "cosine",
        "start_wd": 0.01,
    }
    assert state["schedule"] | curve | {"wd_style": "constant"} == state["schedule"]
    scale = [
        state["loss_scale"][k] for k in ("dynamic", "scale", "growth_tracker", "hysteresis_tracker")
    ]
    assert scale == ([False, 1.0, 0, 2] if f.state == "fp32" else [True, 4096.0, 5, 1])
    # Writing in another layout and saving as ours change no bit.
    ranks = 1 if f.multi_query else 4
    folder = written(source, tmp_path / "again/iter_0000007", ranks, 2, padded=68)
    again = megatron.open_megatron(folder)
    named = {name: native.undivided(tensor) for name, tensor in read_tensors(again).items()}
    native.save_step(tmp_path / "run", 7, named, again.state, again.config)
    last = native.open_native(tmp_path / "run/iter_0000007", 7)
    assert_reads(last, expected)
    assert again.config == source.config
    assert last.state == again.state == state


@pytest.mark.parametrize("masters", [0, 1, 2])
def test_weights_with_a_master_each_or_some_or_none(masters: int) -> None:
    """A weight in float32 beside ones in half precision may have a master or be its own."""
    weights = [("half", torch.ones(2).half()), ("full", torch.ones(3))]
    state = {i: dict.fromkeys(MOMENTS, torch.zeros(len(w))) for i, (_, w) in enumerate(weights)}
    copies = [torch.full((len(weight),), 2.0) for _, weight in weights[:masters]]
    tree = {"state": state, "param_groups": [{"params": [0, 1]}], "fp32_groups": [copies]}
    values = match_numbered(Path(), tree, weights)
    assert [float(x[""][0]) for x in values] == [2.0] * masters + [1.0] * (2 - masters)


def build_model(source: Source, f: Form) -> GPT:
    config = {
        n.name: source.config[n.name] for n in dataclasses.fields(Model) if n.name in source.config
    }
    m = Model(**config | {"attention_impl": "reference"})
    gpt = GPT(m, f.vocab, f.vocab, f.positions)
    tensors = read_tensors(source, torch.float32)
    gpt.load_state_dict({name: tensor for name, tensor in tensors.items() if "/" not in name})
    return gpt.eval()


NETWORKS = {
    "version 1": Form(version=1.0, pp=2),
    "llama": Form(gated=True, bias=False, rms=True, untied=True, tp=2),
    "query groups": Form(heads=8, groups=2, tp=2, dtype=torch.float32),
    "BigScience": Form(bigscience=True, embed_norm=True, gated=True, tp=2),
    "as the 345M release": Form(version=None, words="2019", args=False),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_logits(name: str, tmp_path: Path) -> None:
    f = NETWORKS[name]
    model = plain(f)
    step = "iter_0000007" if f.args else "release"
    source = megatron.open_megatron(write(tmp_path / step, f, model), heads=f.heads).of_vocabulary(
        f.vocab
    )
    tokens = torch.randint(f.vocab, (2, f.positions), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        logits = build_model(source, f)(tokens, Positions())
    torch.testing.assert_close(
        logits, forward(f, rounded(model, f.dtype), tokens), rtol=0, atol=1e-5
    )


def test_the_345m_release(tmp_path: Path) -> None:
    """Without arguments or version, the shapes give all but the heads."""
    f = Form(version=None, words="2019", args=False, iteration=0)
    folder = write(tmp_path / "release", f, plain(f))
    with pytest.raises(UserError, match="--num-attention-heads"):
        megatron.open_megatron(folder)
    source = megatron.open_megatron(folder, heads=4)
    assert (source.version, source.state, source.vocab, source.step) == ("0", {}, None, 0)
    assert source.tensors["wte.weight"].shape == (64, 32)
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 64}
    sizes |= {"max_position_embeddings": 16, "add_bias_linear": True}
    assert source.config | sizes == source.config
    assert_reads(
        source.of_vocabulary(61), {name: t.half() for name, t in ours(f, plain(f)).items()}
    )


def test_a_file_without_a_schedule_or_samples(tmp_path: Path) -> None:
    f = Form(state="masters")
    three, expected = with_moments(f)
    folder = write(tmp_path / "iter_0000007", f, *three)
    change(lambda t: t.pop("opt_param_scheduler"))(folder)
    source = megatron.open_megatron(folder).of_vocabulary(f.vocab)
    assert_reads(source, expected)
    assert "schedule" not in source.state and source.state["schedule_samples"] == 56
    change(
        lambda t: [
            delattr(t["args"], name) for name in ("consumed_train_samples", "global_batch_size")
        ]
    )(folder)
    source = megatron.open_megatron(folder)
    assert not source.state and not source.has_optimizer and "how many samples" in source.notes[0]


def test_settings_from_arguments(tmp_path: Path) -> None:
    f = Form(bigscience=True, embed_norm=True, gated=True)
    folder = write(tmp_path / "iter_0000007", f, plain(f))
    source = megatron.open_megatron(folder)
    stated = {
        "glu_activation": "geglu",
        "position_embedding_type": "learned_absolute",
        "embed_layernorm": True,
    }
    stated |= {"fp16": True, "seq_length": 16, "layernorm_epsilon": 1e-5}
    stated |= {"num_query_groups": None, "normalization": "LayerNorm"}
    assert {name: source.config[name] for name in stated} == stated and source.vocab == 61

    for place, ours_ in (("alibi", "alibi"), ("rotary", "rope")):
        f = Form(bigscience=True, place=place)
        source = megatron.open_megatron(write(tmp_path / place, f, plain(f)))
        assert (
            source.config["position_embedding_type"] == ours_
            and "max_position_embeddings" not in source.config
        )
    f = Form(place="none", words="late 2023")
    assert (
        "--position-embedding-type"
        in megatron.open_megatron(write(tmp_path / "unsaid", f, plain(f))).notes[0]
    )


# Damage


def load(path: Path) -> Any:
    return torch.load(path, weights_only=False)


def change(
    edit: Callable[[Any], Any], rank: str = "00", name: str = "model_optim_rng.pt"
) -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        path = folder / f"mp_rank_{rank}" / name
        tree = load(path)
        edit(tree)
        torch.save(tree, path)

    return act


def encoder(tree: Any) -> Any:
    return tree["model"]["language_model"]["encoder"]


def adam(tree: Any) -> Any:
    return tree["optimizer"]["optimizer"]


def swap_layers(tree: Any) -> None:
    """Exchange the masters of two layers; every shape still agrees."""
    group = tree["optimizer"]["fp32_from_fp16_params"][0]
    group[2], group[6] = group[6], group[2]


WEIGHT, NORM = "layers.1.mlp.dense_h_to_4h.weight", "layers.1.input_layernorm.weight"
DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "a rank is missing": (
        lambda folder: shutil.rmtree(folder / "mp_rank_00"),
        r"no file: \(0, 0\)",
    ),
    "a rank twice": (
        lambda f: shutil.copytree(f / "mp_rank_00", f / "mp_rank_00_000") and None,
        "same rank",
    ),
    "cut short": (
        lambda f: (f / "mp_rank_01/model_optim_rng.pt").write_bytes(b"PK\3\4") and None,
        "mp_rank_01",
    ),
    "another version": (
        change(lambda t: t.update(checkpoint_version=2.0), "01"),
        "checkpoint_version 3.0, .* has 2.0",
    ),
    "another iteration": (change(lambda t: t.update(iteration=8), "01"), "iteration 7, .* has 8"),
    "more layers said": (
        change(lambda t: setattr(t["args"], "num_layers", 5)),
        "2 layers in its files and 5",
    ),
    "a part less": (change(lambda t: encoder(t).pop(WEIGHT)), "not on all tensor ranks"),
    "an unknown part": (
        change(lambda t: encoder(t).update({"layers.0.moe.gate.weight": torch.ones(2)})),
        "moe.gate",
    ),
    "another shape": (
        change(lambda t: encoder(t).update({WEIGHT: torch.ones(33, 32)})),
        r"\(33, 32\), but \(32, 32\)",
    ),
    "other heads": (
        change(lambda t: setattr(t["args"], "num_attention_heads", 5)),
        "--num-attention-heads 5",
    ),
    "copies differ": (
        change(lambda t: encoder(t)[NORM].mul_(1.5), "01"),
        r"must hold the same h.1.ln_1.weight",
    ),
    "layers of the optimizer exchanged": (
        change(swap_layers),
        "not those of the model; add --no-load-optim",
    ),
    "a moment less": (
        change(lambda t: adam(t)["state"][3].pop("exp_avg")),
        r"has nothing; add --no-load",
    ),
    "keys that are lists": (
        change(lambda t: adam(t)["param_groups"][0].update(params=[[]])),
        "not laid",
    ),
    "weights in one row": (
        change(lambda t: encoder(t).update({WEIGHT: torch.ones(1024).half()})),
        "no|follows",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_refused(name: str, tmp_path: Path) -> None:
    f = Form(tp=2, state="masters")
    folder = write_trained(tmp_path, f)
    damage, words = DAMAGES[name]
    damage(folder)
    with pytest.raises(UserError, match=words) as refused:
        loading.open_step(StepLocation(MEGATRON, folder, 7, tmp_path))
    assert refused.value.status == BAD_DATA and str(folder) in str(refused.value)


@pytest.mark.parametrize(
    ("state", "edit", "words"),
    [
        (
            "flat",
            lambda t: t[0][torch.float32].update(param=t[0][torch.float32]["param"][:500]),
            "differ in size",
        ),
        (
            "flat",
            lambda t: t[0][torch.float32]["param"].copy_(t[0][torch.float32]["param"].flip(0)),
            "not those of",
        ),
        (
            "flat",
            lambda t: [
                t[0][torch.float32].update({k: v[:500]}) for k, v in t[0][torch.float32].items()
            ],
            "ends before",
        ),
        ("buckets", lambda t: t[0][torch.float32]["exp_avg"].pop(), "differ in size"),
    ],
)
def test_damaged_buffers(state: str, edit: Any, words: str, tmp_path: Path) -> None:
    f = Form(state=state)
    folder = write_trained(tmp_path, f)
    change(edit, name="distrib_optim.pt")(folder)
    with pytest.raises(UserError, match=words):
        megatron.open_megatron(folder)
    assert megatron.open_megatron(folder, optimizer=False).tensors


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_masters_may_differ_by_a_last_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    """The last bit of the model's dtype; float16's is an eighth of bfloat16's."""
    f, bit = Form(state="masters", dtype=dtype), torch.finfo(dtype).eps
    folder = write_trained(tmp_path, f)
    change(lambda t: t["optimizer"]["fp32_from_fp16_params"][0][2].data.mul_(1 + 0.4 * bit))(folder)
    assert megatron.open_megatron(folder).has_optimizer
    change(lambda t: t["optimizer"]["fp32_from_fp16_params"][0][2].data.mul_(1 + 4 * bit))(folder)
    with pytest.raises(UserError, match="not those of the model"):
        megatron.open_megatron(folder)


@pytest.mark.parametrize(
    ("stated", "wanted"),
    [
        ({"lr_wsd_decay_samples": 80, "lr_wsd_decay_style": "minus_sqrt"}, (80, "minus_sqrt")),
        ({"lr_wsd_decay_iters": 20}, (160, "exponential")),
        ({}, None),
    ],
)
def test_wsd(stated: dict[str, Any], wanted: tuple[int, str] | None, tmp_path: Path) -> None:
    f = Form(state="masters")
    folder = write_trained(tmp_path, f)
    change(lambda t: t["opt_param_scheduler"].update(lr_decay_style="WSD"))(folder)
    change(lambda t: vars(t["args"]).update(stated, lr_warmup_init=1e-6))(folder)
    source = megatron.open_megatron(folder)
    assert source.state["schedule_samples"] == 48 and source.has_optimizer
    if wanted is None:
        assert "schedule" not in source.state and "lr_wsd_decay_samples" in source.notes[-1]
        return
    curve = source.state["schedule"]
    assert (curve["wsd_samples"], curve["wsd_style"], curve["init_lr"]) == (*wanted, 1e-6)
    again = written(source.of_vocabulary(61), tmp_path / "again/iter_0000007", 1, 1)
    change(lambda t: t.pop("meshwright"))(again)
    assert megatron.open_megatron(again).state["schedule"] == curve


def test_data_ranks_that_are_missing(tmp_path: Path) -> None:
    f = Form(state="sharded")
    folder = write_trained(tmp_path, f)
    shutil.rmtree(folder / "mp_rank_00_001")
    with pytest.raises(UserError, match="data ranks are missing"):
        megatron.open_megatron(folder)
    (folder / "mp_rank_00_002").rename(folder / "mp_rank_00_001")
    with pytest.raises(UserError, match="it is of 12 parameters, the model has 16"):
        megatron.open_megatron(folder)


def test_tensor_ranks_of_two_types(tmp_path: Path) -> None:
    folder = write(tmp_path / "iter_0000007", Form(tp=2), plain(Form()))
    change(lambda t: encoder(t).update({WEIGHT: encoder(t)[WEIGHT].float()}), "01")(folder)
    with pytest.raises(UserError, match="several types"):
        megatron.open_megatron(folder)


def test_copies_that_differ_by_rounding_are_reported(tmp_path: Path) -> None:
    f = Form(layers=4, tp=2, pp=2)
    folder = write(tmp_path / "iter_0000007", f, plain(f))
    change(lambda t: encoder(t)[NORM][0].mul_(1 + 2**-10), "01_000")(folder)
    source = megatron.open_megatron(folder)
    assert [note for note in source.notes if "1 tensors" in note and "h.1.ln_1.weight" in note]
    change(lambda t: t["model"]["word_embeddings_for_head"]["weight"].add_(1), "00_001")(folder)
    with pytest.raises(UserError, match="must hold the same wte"):
        megatron.open_megatron(folder)


# Writing


CONFIG = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 64}
CONFIG |= {
    "max_position_embeddings": 16,
    "layernorm_epsilon": 1e-5,
    "adam_beta2": 0.95,
    "fp16": True,
}
STATE = {
    "iteration": 7,
    "consumed_train_samples": 56,
    "schedule_samples": 48,
    "optimizer_steps": 6,
    "skips": [[3, "x"]],
    "epochs": [[2, True]],
    "blends": None,
    "loss_scale": {
        "dynamic": True,
        "scale": 4096.0,
        "growth_tracker": 5,
        "hysteresis_tracker": 1,
        "in_a_row": 0,
    },
    "schedule": dataclasses.asdict(
        Schedule(1e-3, 1e-5, 16.0, 800, "cosine", 0.01, 0.01, 800, "constant")
    ),
}


def native_source(root: Path, f: Form, config: dict[str, Any]) -> tuple[Source, Tensors]:
    _, tensors = with_moments(f)
    named = {name: native.undivided(tensor) for name, tensor in tensors.items()}
    native.save_step(root, 7, named, STATE | {"true_vocab_size": f.vocab}, config)
    return native.open_native(root / "iter_0000007", 7), tensors


def source_of(
    f: Form, config: dict[str, Any], folder: Path = Path()
) -> tuple[MappedSource, Tensors]:
    """Return the same state in memory."""
    _, tensors = with_moments(f)
    views = {name: [TensorView((0,) * tensor.ndim, tensor)] for name, tensor in tensors.items()}
    return MappedSource(
        "memory", folder, 7, config=config, state=STATE, vocab=f.vocab, views=views
    ), tensors


def written(
    source: Source, folder: Path, t: int, p: int, padded: int = 64, optimizer: bool = True
) -> Path:
    for name, produce in megatron_writer.megatron_files(source, t, p, padded, optimizer).items():
        (folder / name).parent.mkdir(parents=True)
        with open(folder / name, "wb") as file:
            produce(file.write)
    return folder


@pytest.mark.parametrize(("t", "p"), [(1, 4), (4, 1), (2, 2)])
def test_from_native_and_back(t: int, p: int, tmp_path: Path) -> None:
    f = Form(layers=4)
    source, tensors = (
        native_source(tmp_path / "run", f, CONFIG) if t == p == 2 else source_of(f, CONFIG)
    )
    back = megatron.open_megatron(written(source, tmp_path / "iter_0000007", t, p))
    assert_reads(back, tensors)
    assert (back.config, back.state, back.vocab) == (source.config, source.state, source.vocab)


LLAMA = {
    "swiglu": True,
    "normalization": "RMSNorm",
    "bf16": True,
    "fp16": False,
    "add_bias_linear": False,
}
LLAMA |= {"untie_embeddings_and_output_weights": True}
ROPE = {"position_embedding_type": "rope"}


@pytest.mark.parametrize(
    "options",
    [
        (Form(gated=True, bias=False, rms=True, untied=True), LLAMA),
        (
            Form(gated=True, bigscience=True, embed_norm=True),
            {"glu_activation": "geglu", "embed_layernorm": True},
        ),
        (Form(place="rotary"), ROPE | {"rope_scaling": "llama3", "rope_scaling_factor": 32.0}),
        (Form(place="rotary"), ROPE | {"rope_scaling": "linear", "rope_scaling_factor": 2}),
        (Form(heads=8, groups=4), {"num_attention_heads": 8, "num_query_groups": 4, "fp16": False}),
    ],
    ids=["llama", "bigscience", "llama 3.2", "linear", "float32 with groups"],
)
def test_other_networks_from_native_and_back(
    options: tuple[Form, dict[str, Any]], tmp_path: Path
) -> None:
    f, more = options
    source, tensors = source_of(f, CONFIG | {"num_layers": 2} | more)
    folder = written(source, tmp_path / "iter_0000007", 2, 2)
    assert_reads(megatron.open_megatron(folder), tensors)
    for path in folder.glob("*/*.pt"):  # and without our own words
        tree = load(path)
        del tree["meshwright"]
        torch.save(tree, path)
    back = megatron.open_megatron(folder)
    assert_reads(back, tensors)
    for name in more:
        assert back.config[name] == more[name], name


def leaves(tree: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield where each value of dictionaries and lists lies, and the value."""
    if not isinstance(tree, dict | list):
        yield place, tree
        return
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        yield from leaves(value, (*place, key))


def test_the_tree_is_megatrons(tmp_path: Path) -> None:
    """Each rank has the names, order, shapes and numbers that Megatron's strict loader requires."""
    f = Form(layers=4, tp=2, pp=2, vocab=64, state="masters")
    source, _ = source_of(f, CONFIG)
    ours = written(source, tmp_path / "ours/iter_0000007", 2, 2)
    theirs = write_trained(tmp_path / "theirs", f)
    files = sorted(path.relative_to(theirs) for path in theirs.rglob("*.pt"))
    assert sorted(path.relative_to(ours) for path in ours.rglob("*.pt")) == files
    for file in files:
        got, wanted = load(ours / file), load(theirs / file)
        assert [place for place, _ in leaves(got["model"])] == [
            place for place, _ in leaves(wanted["model"])
        ]
        for part in (
            "model",
            "optimizer",
            "opt_param_scheduler",
            "iteration",
            "checkpoint_version",
        ):
            found = dict(leaves(got[part], (part,)))
            for place, value in leaves(wanted[part], (part,)):
                if isinstance(value, torch.Tensor):
                    assert torch.equal(found[place], value), place
                elif place[-1] not in ("lr", "betas", "weight_decay"):
                    assert found[place] == value, place
        assert type(got["args"]).__name__ == "Namespace"
        sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "padded_vocab_size")
        assert [getattr(got["args"], name) for name in sizes] == [2, 2, 64]
        assert [group["wd_mult"] for group in inner_groups(got)] == [1.0, 0.0]


def inner_groups(tree: Any) -> list[dict[str, Any]]:
    return tree["optimizer"]["optimizer"]["param_groups"]  # type: ignore[no-any-return]


def test_one_part_in_memory_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    f = Form(layers=2)
    source, _ = source_of(f, CONFIG | {"num_layers": 2})
    asked: list[int] = []
    fill = source.fill
    monkeypatch.setattr(source, "fill", lambda want: (asked.append(len(want)), fill(want))[1])
    produce = megatron_writer.megatron_files(source, 2, 1, 64, True)[
        "mp_rank_00/model_optim_rng.pt"
    ]
    assert not asked
    produce(lambda data: None)
    assert set(asked) == {1} and len(asked) == 4 * (2 + 2 * 12 + 2)  # weights, masters, two moments


def test_models_that_megatron_cannot_hold() -> None:
    source, _ = source_of(Form(layers=4), CONFIG)
    with pytest.raises(
        UserError,
        match="(?s)4 heads cannot be divided by 3.*64 rows of the MLP.*4 layers .* by 3.*61 ids do not fit 60",
    ):
        megatron_writer.megatron_files(source, 3, 3, 60, True)
    for name, words in {
        "h.0.attn.ln_q.weight": "no place in it, such as h.0.attn.ln_q.weight",
        "wte.weight/momentum": r"state \(exp_avg, exp_avg_sq, momentum\) is not Adam's: leave it out by --no-optimizer",
    }.items():
        source, _ = source_of(Form(layers=4), CONFIG)
        source.views[name] = source.views["ln_f.weight"]
        with pytest.raises(UserError, match=words):
            megatron_writer.megatron_files(dataclasses.replace(source), 1, 1, 64, True)


def test_an_optimizer_without_a_schedule_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, tensors = source_of(Form(layers=4), CONFIG | {"lr": 0.5})
    # as of Megatron-Core's
    source.state = {"iteration": 7, "consumed_train_samples": 0, "schedule_samples": 0}
    folder = written(source, tmp_path / "iter_0000007", 2, 1)
    assert "does not state its schedule" in capsys.readouterr().err
    tree = load(folder / "mp_rank_00/model_optim_rng.pt")
    assert (
        "opt_param_scheduler" not in tree
        and tree["optimizer"]["optimizer"]["param_groups"][0]["lr"] == 0.5
    )
    back = megatron.open_megatron(folder)
    assert_reads(back, tensors)
    assert back.state == source.state


def test_no_master_is_rounded(tmp_path: Path) -> None:
    """Weights without an optimizer are the masters; with one they are read from it."""
    source, tensors = source_of(Form(layers=4, gated=True), CONFIG | {"swiglu": True})
    weights = {name: tensor for name, tensor in tensors.items() if "/" not in name}
    back = megatron.open_megatron(
        written(source, tmp_path / "a/iter_0000007", 2, 1, optimizer=False)
    )
    assert_reads(back, weights)
    assert back.state == STATE  # counters survive --no-save-optim
    folder = written(source, tmp_path / "b/iter_0000007", 1, 2)
    assert encoder(load(folder / "mp_rank_00_001/model_optim_rng.pt"))[NORM].dtype == torch.float16
    back = megatron.open_megatron(folder, optimizer=False)
    assert_reads(back, weights)
    assert back.state == STATE
    folder.rename(tmp_path / "b/release")
    back = megatron.open_megatron(tmp_path / "b/release")
    assert_reads(back, weights)
    assert not back.state


FALSE_WORDS: dict[str, Callable[[Any], Any]] = {
    "no dictionary": lambda own: [own],
    "a tensor": lambda own: own | {"state": STATE | {"x": torch.ones(1)}},
    "NaN": lambda own: own | {"config": {"lr": float("nan")}},
    "less than nothing": lambda own: own | {"state": STATE | {"consumed_train_samples": -1}},
    "half a step": lambda own: own | {"state": STATE | {"iteration": 7.5}},
    "a rate in words": lambda own: (
        own | {"state": STATE | {"schedule": STATE["schedule"] | {"max_lr": "1"}}}
    ),  # type: ignore[operator]
}


@pytest.mark.parametrize("name", FALSE_WORDS)
def test_our_own_entry_is_checked(name: str, tmp_path: Path) -> None:
    source, _ = source_of(Form(layers=4), CONFIG)
    folder = written(source, tmp_path / "iter_0000007", 1, 1, optimizer=False)
    change(lambda t: t.update(meshwright=FALSE_WORDS[name](t["meshwright"])))(folder)
    with pytest.raises(UserError, match="not what") as refused:
        megatron.open_megatron(folder)
    assert refused.value.status == BAD_DATA and str(folder) in str(refused.value)


def test_state_in_our_own_format_is_checked(tmp_path: Path) -> None:
    named = {"wte.weight": native.undivided(torch.ones(2, 2))}
    native.save_step(tmp_path, 7, named, STATE | {"optimizer_steps": "6"})
    with pytest.raises(UserError, match=r"state.json: not what a run saves: optimizer_steps"):
        native.open_native(tmp_path / "iter_0000007", 7)
    curve = dataclasses.asdict(
        Schedule(1e-3, 0.0, 0, 80, "WSD", 0.1, 0.1, 80, "constant", wsd_samples=8)
    )
    native.save_step(tmp_path, 8, named, STATE | {"schedule": curve})
    native.open_native(tmp_path / "iter_0000008", 8)
    native.save_step(tmp_path, 9, named, STATE | {"schedule": curve | {"wsd_samples": 0}})
    with pytest.raises(UserError, match=r"not what a run saves: schedule \(.*division by zero"):
        native.open_native(tmp_path / "iter_0000009", 9)


@pytest.mark.parametrize("more", [["--dtype=bfloat16"], []])
def test_convert_rounds_only_with_dtype(more: list[str], tmp_path: Path) -> None:
    source, _ = native_source(tmp_path / "run", Form(layers=4), CONFIG)
    argv = [str(tmp_path / "run"), str(tmp_path / "out"), "--to=torch", "--no-optimizer", *more]
    assert convert.main(argv) == 0
    weights = megatron.open_megatron(tmp_path / "out/iter_0000007")
    assert {known.dtype for known in weights.tensors.values()} == {
        "bfloat16" if more else "float32"
    }
