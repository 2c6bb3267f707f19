"""docs/adding-a-format.md: its reader and its record, run as they are printed there."""

import re
import sys
import tomllib
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from foreign import assert_reads, read_tensors
from torch import nn
from torch.nn import functional as F

from meshwright.base import registry
from meshwright.checkpoint import formats, loading, native
from meshwright.config.schema import Model
from meshwright.model.gpt import GPT
from meshwright.model.positions import Positions

PAGE = Path(__file__).parents[3] / "docs" / "adding-a-format.md"
WIDTH, HEADS, VOCAB, LENGTH = 16, 2, 20, 8


class ToyBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            t.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for t in self.qkv(self.norm1(x)).tensor_split(3, dim=-1)
        )
        x = x + self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ToyGPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks, self.norm = nn.ModuleList(ToyBlock() for _ in range(2)), nn.LayerNorm(WIDTH)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.tokens.weight.T


def trained(steps: int = 3) -> tuple[ToyGPT, torch.optim.Optimizer]:
    torch.manual_seed(0)
    toy = ToyGPT()
    groups = [[p for p in toy.parameters() if (p.ndim > 1) == decays] for decays in (True, False)]
    adam = torch.optim.AdamW(
        [{"params": groups[0]}, {"params": groups[1], "weight_decay": 0.0}], lr=0.01
    )
    ids = torch.randint(0, VOCAB, (2, LENGTH))
    for _ in range(steps):
        adam.zero_grad()
        F.cross_entropy(toy(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
        adam.step()
    return toy, adam


@pytest.fixture
def toy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[ToyGPT, torch.optim.Optimizer]]:
    """Register the page's format, and write a checkpoint of it into tmp_path."""
    reader, record = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.S | re.M)
    (entry,) = re.findall(r"^```toml\n(.*?)^```", PAGE.read_text(), flags=re.S | re.M)
    named = tomllib.loads(entry)["project"]["entry-points"]["meshwright.formats"]
    module = types.ModuleType("toyformat")
    exec(compile(reader, str(PAGE), "exec"), module.__dict__)
    exec(compile(record, str(PAGE), "exec"), module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    ours = registry.entries("formats")
    monkeypatch.setattr(registry, "entries", lambda group: ours | named)
    formats.all_formats.cache_clear()
    model, adam = trained()
    args = {"heads": HEADS, "vocab": VOCAB, "batch": 2}
    tree = {"model": model.state_dict(), "optimizer": adam.state_dict(), "step": 3, "args": args}
    torch.save(tree, tmp_path / "toy.pt")
    yield model, adam
    formats.all_formats.cache_clear()


def test_the_page_reads_weights_moments_and_state(toy, tmp_path: Path) -> None:
    model, adam = toy
    for path in (tmp_path, tmp_path / "toy.pt"):
        source = loading.require_checkpoint(path)
        assert (source.kind, source.step, source.vocab) == ("ToyGPT", 3, VOCAB)
    assert source.state == {
        "iteration": 3,
        "consumed_train_samples": 6,
        "schedule_samples": 6,
        "optimizer_steps": 3,
    }
    ours = GPT(
        Model(hidden_dropout=0.0, attention_dropout=0.0, **source.config), VOCAB, VOCAB, LENGTH
    ).eval()
    with torch.no_grad():
        source.fill({name: native.undivided(p.detach()) for name, p in ours.named_parameters()})
        ids = torch.arange(LENGTH)[None]
        torch.testing.assert_close(ours(ids, Positions()), model(ids))
    tensors = read_tensors(source)
    moments = {id(p): state for p, state in adam.state.items()}
    for theirs, name in (("blocks.1.up", "h.1.mlp.fc"), ("norm", "ln_f")):
        p = model.get_parameter(f"{theirs}.weight")
        assert torch.equal(tensors[f"{name}.weight/exp_avg_sq"], moments[id(p)]["exp_avg_sq"])
    key = moments[id(model.get_parameter("blocks.0.qkv.weight"))]["exp_avg"][
        WIDTH : WIDTH + WIDTH // HEADS
    ]
    rows = slice(WIDTH // HEADS, 2 * WIDTH // HEADS)  # the first head's key follows its query
    assert torch.equal(tensors["h.0.attn.qkv.weight/exp_avg"][rows], key)
    weights = {name: tensor for name, tensor in tensors.items() if "/" not in name}
    assert_reads(
        loading.require_checkpoint(tmp_path, loading.OpenOptions(optimizer=False)), weights
    )
