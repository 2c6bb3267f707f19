"""nanoGPT's ckpt.pt, by a network, an optimizer and a loop that share nothing with the reader."""

import json
import math
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from foreign import assert_reads, read_tensors
from torch import nn
from torch.nn import functional as F

from helpers import error_of, open_step, read_rows
from meshwright.__main__ import main
from meshwright.checkpoint import loading
from meshwright.data.files.writer import Writer

pytestmark = pytest.mark.whole

LAYERS, WIDTH, HEADS, VOCAB, LENGTH = 2, 24, 3, 50, 12
SAVED, MORE, BATCH, ACCUMULATED = 3, 5, 2, 2
# The warm-up goes on after the checkpoint, and the decay ends before the last step.
CONFIG = {
    "batch_size": BATCH,
    "gradient_accumulation_steps": ACCUMULATED,
    "grad_clip": 1.0,
    "weight_decay": 0.1,
}
CONFIG |= {
    "learning_rate": 1e-2,
    "min_lr": 1e-3,
    "warmup_iters": 4,
    "lr_decay_iters": 7,
    "max_iters": 8,
}
CONFIG |= {
    "beta1": 0.9,
    "beta2": 0.95,
    "decay_lr": True,
    "dtype": "float32",
    "init_from": "scratch",
}
ARGS = {"n_layer": LAYERS, "n_head": HEADS, "n_embd": WIDTH, "block_size": LENGTH, "bias": True}
ARGS |= {"vocab_size": VOCAB, "dropout": 0.0}
# All samples of a text that repeats itself are the same.
SAMPLE = np.random.RandomState(0).randint(VOCAB - 1, size=LENGTH)

FLAGS = "--device=cpu --no-tensorboard --num-workers=0 --log-interval=1 --split=100,0,0 --eval-iters=0".split()
FLAGS += (
    f"--tokenizer-type=NullTokenizer --vocab-size={VOCAB - 1} --train-iters={SAVED + MORE}".split()
)
RECIPE = f"--micro-batch-size={BATCH} --global-batch-size={BATCH * ACCUMULATED} --weight-decay=0.1".split()
RECIPE += (
    "--adam-beta2=0.95 --lr=1e-2 --min-lr=1e-3 --lr-decay-style=cosine --lr-decay-iters=7".split()
)
RECIPE += "--lr-warmup-iters=4".split()
READ = f"--device=cpu --tokenizer-type=NullTokenizer --vocab-size={VOCAB - 1}".split()


class Attention(nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH, bias), nn.Linear(WIDTH, WIDTH, bias)

    def forward(self, x):
        q, k, v = (
            t.unflatten(2, (HEADS, -1)).transpose(1, 2) for t in self.c_attn(x).split(WIDTH, dim=2)
        )
        scores = q @ k.transpose(2, 3) / math.sqrt(WIDTH / HEADS)
        scores = scores.masked_fill(torch.ones(x.shape[1], x.shape[1]).triu(1).bool(), -math.inf)
        return self.c_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.c_fc, self.c_proj = (
            nn.Linear(WIDTH, 4 * WIDTH, bias),
            nn.Linear(4 * WIDTH, WIDTH, bias),
        )

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x)))


class Block(nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(WIDTH, bias=bias), Attention(bias)
        self.ln_2, self.mlp = nn.LayerNorm(WIDTH, bias=bias), Mlp(bias)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    def __init__(self, bias):
        super().__init__()
        parts = {"wte": nn.Embedding(VOCAB, WIDTH), "wpe": nn.Embedding(LENGTH, WIDTH)}
        parts |= {
            "h": nn.ModuleList(Block(bias) for _ in range(LAYERS)),
            "ln_f": nn.LayerNorm(WIDTH, bias=bias),
        }
        self.transformer, self.lm_head = nn.ModuleDict(parts), nn.Linear(WIDTH, VOCAB, bias=False)
        self.transformer.wte.weight = self.lm_head.weight
        for p in self.parameters():
            nn.init.normal_(p, std=0.2)

    def forward(self, ids):
        x = self.transformer.wte(ids) + self.transformer.wpe.weight[: ids.shape[1]]
        for block in self.transformer.h:
            x = block(x)
        return self.lm_head(self.transformer.ln_f(x))


def rate(step, config, is_newer):
    top, low, warmup = config["learning_rate"], config["min_lr"], config["warmup_iters"]
    if not config["decay_lr"]:
        return top
    if step < warmup:
        return top * (step + 1) / (warmup + 1) if is_newer else top * step / warmup
    share = min(1, (step - warmup) / (config["lr_decay_iters"] - warmup))
    return low + 0.5 * (1 + math.cos(math.pi * share)) * (top - low)


class Trainer:
    """nanoGPT's loop on the one sample."""

    def __init__(self, is_newer=True, bias=True, **config):
        torch.manual_seed(0)
        self.model, self.config, self.is_newer, self.step = (
            NanoGPT(bias),
            CONFIG | config,
            is_newer,
            0,
        )
        self.args = ARGS | {"bias": bias}
        parameters = [p for _, p in self.model.named_parameters()]
        groups = [[p for p in parameters if (p.dim() >= 2) is decays] for decays in (True, False)]
        groups = [
            {"params": g, "weight_decay": wd} for g, wd in zip(groups, (0.1, 0.0), strict=True)
        ]
        self.adam = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
        self.losses, self.rates = [], []
        self.set_rate()

    def set_rate(self):
        for group in self.adam.param_groups:
            group["lr"] = rate(self.step, self.config, self.is_newer)

    def train(self, steps):
        ids = torch.from_numpy(np.append(SAMPLE, SAMPLE[0]))[None]
        for _ in range(steps):
            self.set_rate()
            loss = F.cross_entropy(self.model(ids[:, :-1])[0], ids[0, 1:])
            self.adam.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.adam.step()
            self.losses.append(loss.item())
            self.rates.append(self.adam.param_groups[0]["lr"])
            self.step += 1
        self.set_rate()
        return self

    def tree(self, prefix=""):
        model = {prefix + name: tensor for name, tensor in self.model.state_dict().items()}
        more = {"iter_num": self.step, "best_val_loss": torch.tensor(1.5), "config": self.config}
        return {"model": model, "optimizer": self.adam.state_dict(), "model_args": self.args} | more

    def tensors(self):
        """Return the weights and moments under our names, with the rows of qkv by head."""
        out = {}
        for theirs, p in self.model.named_parameters():
            name = theirs.removeprefix("transformer.").replace("c_attn", "qkv").replace("c_", "")
            kinds = {"": p.detach()} | {
                f"/{kind}": self.adam.state[p][kind] for kind in ("exp_avg", "exp_avg_sq")
            }
            for kind, tensor in kinds.items():
                by_head = (
                    tensor.unflatten(0, (3, HEADS, -1)).transpose(0, 1).flatten(0, 2)
                    if "qkv" in name
                    else tensor
                )
                out[name + kind] = by_head.clone()
        return out


@pytest.fixture(scope="module")
def trained():
    """Return the tree of a checkpoint; save_checkpoint writes what was changed in a copy of it."""
    return Trainer().train(SAVED).tree()


@pytest.fixture
def text(tmp_path):
    with Writer(tmp_path / "text", np.uint16) as writer:
        writer.add(np.tile(SAMPLE, 100))
        writer.end_document()
    return ["--data-path", str(tmp_path / "text")]


def save_checkpoint(folder, tree):
    folder.mkdir(exist_ok=True)
    torch.save(tree, folder / "ckpt.pt")
    return folder


@pytest.mark.parametrize(("prefix", "bias"), [("", True), ("_orig_mod.", False)])
def test_every_number_is_read(prefix, bias, tmp_path):
    trainer = Trainer(bias=bias).train(SAVED)
    folder = save_checkpoint(tmp_path / "out", trainer.tree(prefix))
    for path in (folder, folder / "ckpt.pt"):
        source = loading.require_checkpoint(path)
        assert (source.kind, source.step, source.vocab, source.folder) == (
            "nanoGPT",
            SAVED,
            VOCAB,
            folder,
        )
    assert_reads(source, trainer.tensors())
    assert (
        source.state["consumed_train_samples"] == SAVED * BATCH * ACCUMULATED and not source.notes
    )
    weights = {name: tensor for name, tensor in trainer.tensors().items() if "/" not in name}
    assert_reads(loading.require_checkpoint(folder, loading.OpenOptions(optimizer=False)), weights)


CASES = {
    "newer": (True, {}, ["--lr-warmup-init", str(1e-2 / 5)]),
    "older": (False, {}, []),
    "unbiased": (True, {"bias": False}, ["--lr-warmup-init", str(1e-2 / 5)]),
    "constant": (True, {"decay_lr": False}, ["--lr-decay-style=constant", "--lr-warmup-iters=0"]),
}


@pytest.mark.parametrize(
    ("case", "is_named"),
    [("newer", True), ("newer", False), ("older", False), ("unbiased", True), ("constant", False)],
)
def test_a_run_continues_as_torch_would(case, is_named, tmp_path, text, capsys):
    """Losses, rates, weights and moments, by flags that name its schedule and with its own."""
    is_newer, config, flags = CASES[case]
    trainer = Trainer(is_newer, **config).train(SAVED)
    folder = save_checkpoint(tmp_path / "out", trainer.tree())
    recipe = (
        [*RECIPE, *flags]
        if is_named
        else [*RECIPE[:4], "--use-checkpoint-opt_param-scheduler", "--lr=1"]
    )
    assert (
        main(
            [
                "train",
                *FLAGS,
                *text,
                *recipe,
                "--load",
                str(folder),
                "--save",
                str(tmp_path / "run"),
            ]
        )
        == 0
    )
    assert "contradict" not in capsys.readouterr().out
    trainer.train(MORE)
    rows = read_rows(tmp_path / "run")
    assert [row["iteration"] for row in rows] == [*range(SAVED + 1, SAVED + MORE + 1)]
    np.testing.assert_allclose([row["loss"] for row in rows], trainer.losses[SAVED:], rtol=2e-6)
    np.testing.assert_allclose([row["lr"] for row in rows], trainer.rates[SAVED:], rtol=1e-12)
    ours = read_tensors(open_step(tmp_path / "run", SAVED + MORE))
    for name, tensor in trainer.tensors().items():
        difference = ours[name] - tensor
        # those of keys have no gradient but rounding, of which Adam makes steps
        if "qkv.bias" in name:
            difference.view(HEADS, 3, -1)[:, 1] = 0
        assert difference.norm() <= 1e-5 * tensor.norm(), name


def test_every_command_reads_it(trained, tmp_path, text, capsys):
    path = str(save_checkpoint(tmp_path / "out", trained) / "ckpt.pt")
    (tmp_path / "scored.txt").write_text("1 2 3 4 5 6 7 8 9")
    for command in (
        ["train", *FLAGS, *text, *RECIPE, "--load", path, "--finetune"],
        [
            "train",
            *FLAGS,
            *text,
            *RECIPE,
            "--load",
            path,
            "--no-load-optim",
            "--lr-warmup-init=0.002",
        ],
        ["train", *FLAGS, *text, *RECIPE, "--load", path, "--dry-run", "--lr-warmup-init=0.002"],
        ["generate", path, *READ, "--prompt", "1 2 3", "--max-new-tokens=2"],
        ["evaluate", path, *READ, "--input", str(tmp_path / "scored.txt")],
        ["chat", path, *READ, "--dry-run"],
        ["serve", path, *READ, "--dry-run"],
        ["inspect", path],
        ["inspect", path, path],
        ["convert", path, str(tmp_path / "native"), "--to", "native"],
        ["convert", path, str(tmp_path / "hf"), "--to", "huggingface"],
    ):
        assert main(command) == 0, command
    shown = capsys.readouterr().out
    assert (
        "nanoGPT checkpoint: weights and optimizer state" in shown
        and f"iteration {SAVED} | consumed" in shown
    )
    assert loading.require_checkpoint(tmp_path / "native").step == SAVED
    assert (
        json.loads((tmp_path / "hf" / "config.json").read_text())["activation_function"] == "gelu"
    )


def test_a_run_in_its_folder(trained, tmp_path, text, capsys):
    """Its own steps come first from then on; the file goes on to mean nanoGPT's."""
    folder = save_checkpoint(tmp_path / "out", trained)
    run = [
        "train",
        *FLAGS,
        *text,
        *RECIPE,
        "--lr-warmup-init=0.002",
        "--save",
        str(folder),
        "--load",
    ]
    assert main([*run, str(folder)]) == 0
    assert loading.require_checkpoint(folder).step == SAVED + MORE
    assert loading.require_checkpoint(folder / "ckpt.pt").kind == "nanoGPT"
    capsys.readouterr()
    assert main(["inspect", str(folder / "ckpt.pt")]) == 0
    assert "nanoGPT checkpoint" in capsys.readouterr().out
    assert main([*run, str(folder / "ckpt.pt")]) == 73
    shutil.copy(folder / "ckpt.pt", folder / "ckpt_3.pt")
    assert "is not the nanoGPT model in" in error_of(
        lambda: loading.open_checkpoint(folder / "ckpt_3.pt")
    )


def test_weights_alone_and_causal_masks(trained, tmp_path):
    """Files without an optimizer, without settings, and of torch 1."""
    masks = {
        f"transformer.h.{n}.attn.bias": torch.ones(1, 1, LENGTH, LENGTH).tril()
        for n in range(LAYERS)
    }
    tree = trained | {"model": trained["model"] | masks}
    without = {key: value for key, value in tree.items() if key != "optimizer"}
    for weights in (without, without | {"optimizer": None}):
        source = loading.require_checkpoint(save_checkpoint(tmp_path, weights))
        assert (
            not source.state and not source.has_optimizer and not source.notes and source.step == 0
        )
    config = {key: value for key, value in CONFIG.items() if key != "batch_size"}
    source = loading.require_checkpoint(save_checkpoint(tmp_path, tree | {"config": config}))
    assert not source.state and not source.has_optimizer
    assert source.notes == [
        " > note: its config does not state batch_size, so only the weights are used; `train` needs --finetune for that"
    ]


def test_padding_of_the_table_may_be_cut(trained, tmp_path):
    """Without a vocabulary of its own nanoGPT takes GPT-2's size rounded up."""
    folder = save_checkpoint(tmp_path / "out", trained)
    to = [str(tmp_path / "native"), "--to", "native", "--true-vocab-size", str(VOCAB - 3)]
    assert main(["convert", str(folder), *to]) == 0
    assert loading.require_checkpoint(tmp_path / "native").tensors["wte.weight"].shape == (
        VOCAB - 3,
        WIDTH,
    )


@pytest.mark.parametrize("state", [[3], {"param_groups": [{"lr": 1e-2}]}])
def test_a_fork_s_other_optimizer_leaves_the_weights(state, trained, tmp_path, text, capsys):
    folder = save_checkpoint(tmp_path / "out", trained | {"optimizer": state})
    assert "; add --no-load-optim (of convert: --no-optimizer) to load" in error_of(
        lambda: loading.open_checkpoint(folder)
    )
    source = loading.require_checkpoint(folder, loading.OpenOptions(optimizer=False))
    assert source.state["iteration"] == SAVED and source.config["adam_beta2"] == 0.95
    assert main(["generate", str(folder), *READ, "--prompt", "1 2 3", "--max-new-tokens=2"]) == 0
    assert main(["convert", str(folder), str(tmp_path / "hf"), "--to", "huggingface"]) == 0
    if state == [3]:
        assert (
            main(["train", *FLAGS, *text, *RECIPE, "--load", str(folder), "--no-load-optim"]) == 0
        )


class Payload:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch '{self.marker}'",)


def test_bad_files_are_refused_with_their_reason(trained, tmp_path):
    model, args, adam = (trained[key] for key in ("model", "model_args", "optimizer"))
    head, up = torch.ones(VOCAB, WIDTH), "transformer.h.0.mlp.c_fc.weight"
    groups, state = adam["param_groups"], adam["state"]
    all_in_one = [{**groups[0], "params": groups[0]["params"] + groups[1]["params"]}]
    uneven = state | {1: state[1] | {"step": torch.tensor(2.0)}}
    for part, value, words in (
        ("model_args", args | {"bias": False}, "bias has no place"),
        (
            "model_args",
            args | {"n_kv_head": 1},
            "model_args name n_kv_head, which nanoGPT does not have",
        ),
        ("model_args", args | {"n_head": 5}, "n_head 5, which does not divide the width 24"),
        ("model", model | {up: torch.ones(3)}, "h.0.mlp.fc.weight: [3]"),
        ("model", model | {up: "3"}, "not laid out as nanoGPT's checkpoints"),
        ("model", model | {"lm_head.weight": head}, "lm_head.weight is not the table of tokens"),
        ("iter_num", "3", "iter_num '3' and 4 samples a step are no counts"),
        ("config", CONFIG | {"batch_size": 0}, "0 samples a step are no counts"),
        (
            "optimizer",
            adam | {"param_groups": all_in_one},
            "its groups are of [28] parameters, where 10 decay and 18",
        ),
        ("optimizer", adam | {"state": {}}, "parameters have no state"),
        ("optimizer", adam | {"state": uneven}, "its parameters have had [2, 3] steps"),
        ("best_val_loss", Payload(tmp_path / "marker"), "was not run"),
    ):
        folder = save_checkpoint(tmp_path / "out", trained | {part: value})
        said = error_of(lambda folder=folder: loading.open_checkpoint(folder))
        assert words in said and str(folder) in said, said
    assert not Path(tmp_path / "marker").exists()
    (tmp_path / "out" / "ckpt.pt").write_bytes(b"PK\3\4")
    assert "not a checkpoint that can be read" in error_of(
        lambda: loading.open_checkpoint(tmp_path / "out")
    )
