"""A step's kernels beside the plain reference and float64, for all norms, widths and lengths.

The Triton kernels run on a GPU if there is one, else in Triton's interpreter.
"""

import pytest
import torch
from test_activation import DEVICE, distance, nan_in_new_memory  # noqa: F401

from meshwright.kernels import decode, references
from meshwright.kernels.decode import BAD, NONE, CachedTexts, DecodeLinear, Draws, TextState
from meshwright.kernels.heads import HeadSizes
from meshwright.kernels.norm import NormWeights
from meshwright.kernels.qk_norm import HeadNorms

# the interpreter cuts bfloat16 off
ERROR = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 3e-2}
WORST = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # it has no products of bfloat16


def draw(*shape, dtype=torch.float32, mean=0.0):
    return (torch.randn(shape) + mean).to(DEVICE, dtype)


def doubled(x):
    if isinstance(x, torch.Tensor):
        return x.double() if x.is_floating_point() else x
    return type(x)(*map(doubled, x)) if isinstance(x, tuple) and hasattr(x, "_fields") else x


LAYERS = {  # norm, bias, kind, residual
    "qkv": ("layer", True, "", False),
    "llama-qkv": ("rms", False, "", False),
    "proj": (None, True, "", True),
    "llama-proj": (None, False, "", True),
    "gelu": ("layer", True, "gelu-tanh", False),
    "swiglu": ("rms", False, "swiglu", False),
    "biased-geglu": ("layer", True, "geglu", False),
    "head": ("layer", False, "", False),
    "nanogpt": ("unbiased", False, "gelu", False),
}


def layer_of(name, n, k, dtype):
    norm, has_bias, kind, has_residual = LAYERS[name]
    width = n * (1 + kind.endswith("glu"))
    shift = draw(k, dtype=dtype) if norm == "layer" else None
    weights = (
        None
        if norm is None
        else NormWeights(draw(k, dtype=dtype), shift, 1e-5, float(norm == "rms"), norm != "rms")
    )
    bias = draw(width, dtype=dtype) if has_bias else None
    return DecodeLinear(draw(width, k, dtype=dtype) * k**-0.5, bias, weights, kind), has_residual


@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize("name", LAYERS)
def test_linear(name, dtype, monkeypatch):
    """Sizes that fill no tile; x has a mean, which the norm removes."""
    monkeypatch.setattr(references, "is_triton", lambda x: True)
    layer, has_residual = layer_of(name, 21, 130, dtype)
    x = draw(1, 130, dtype=dtype, mean=1.0)
    residual = draw(1, 21, dtype=dtype) if has_residual else None
    got = decode.linear(x, layer, residual)
    want = decode.linear_of_rows(doubled(x), doubled(layer), doubled(residual))
    assert got.dtype is dtype and got.shape == (1, 21) and distance(got, want) < ERROR[dtype]
    assert distance(decode.linear_of_rows(x, layer, residual), want) < ERROR[dtype]


def test_every_tile_gives_the_same():
    from meshwright.kernels.triton.decode import LinearTile, linear_of_row, tile_of

    layer, _ = layer_of("swiglu", 40, 130, torch.float32)
    x = draw(1, 130)
    want = decode.linear_of_rows(doubled(x), doubled(layer))
    for tile in (LinearTile(1), LinearTile(8, 8), LinearTile(64)):
        assert distance(linear_of_row(x, layer, None, tile), want) < 2e-6
    for columns in (64, 1024, 4096, 50304):
        for inner in (64, 768, 1024, 4096, 8192, 20480):
            tile = tile_of(columns, inner, 132)
            assert tile.columns * inner / tile.warps <= 4096 and tile.warps in (4, 8, 16)


SHAPES = {  # groups, queries of each, head_dim, rotated pairs
    "gpt2": (3, 1, 64, 0),
    "llama": (2, 4, 64, 32),
    "96": (1, 2, 96, 0),
    "neox": (2, 1, 128, 16),
}
LENGTHS = [0, 63, 64, 150]


def case(shape, dtype, room=256):
    groups, per_group, dim, half = SHAPES[shape]
    sizes, slots = HeadSizes(groups, per_group, dim), torch.tensor([4, 0, 5, 2], device=DEVICE)
    keys, values = (draw(6, room, groups, dim, dtype=dtype) for _ in range(2))
    used = torch.full((6,), 7, device=DEVICE).index_copy(
        0, slots, torch.tensor(LENGTHS, device=DEVICE)
    )
    texts = CachedTexts(keys, values, slots, used, 256)
    angles = torch.randn(room, half, device=DEVICE)
    rotation = (angles.cos(), angles.sin()) if half else None
    return draw(4, groups * (per_group + 2) * dim, dtype=dtype), texts, sizes, rotation


@pytest.mark.parametrize(("processors", "dtype"), [(2, torch.float32), (132, WORST)])
@pytest.mark.parametrize("shape", SHAPES)
def test_attend(shape, processors, dtype, monkeypatch):
    """In one part and in several, some of them empty: values, and what is added to the cache."""
    monkeypatch.setattr("meshwright.base.device.processors", lambda device: processors)
    compare(*case(shape, dtype), None, monkeypatch)


NORMS = {  # whether rows are centered, whether there is a bias, what is added to the weight
    "rms": (False, False, 0.0),
    "layer-1p": (True, True, 1.0),
    "unbiased": (True, False, 0.0),
}


def norms_of(kind, dim, dtype):
    centers, has_bias, plus = NORMS[kind]

    def weights():
        bias = draw(dim, dtype=dtype) if has_bias else None
        return NormWeights(draw(dim, dtype=dtype), bias, 0.1, plus, centers)

    return HeadNorms(weights(), weights())


@pytest.mark.parametrize(
    ("shape", "kind", "dtype"),
    [
        ("llama", "rms", torch.float32),
        ("llama", "rms", WORST),
        ("gpt2", "layer-1p", torch.float32),
        ("96", "rms", torch.float32),
        ("neox", "layer-1p", torch.float32),
        ("neox", "unbiased", WORST),
    ],
)
def test_attend_with_norms_of_heads(shape, kind, dtype, monkeypatch):
    """Queries and keys have a mean, a size and weights of their own."""
    qkv, texts, sizes, rotation = case(shape, dtype)
    norms = norms_of(kind, sizes.head_dim, dtype)
    compare(3 * qkv + 1, texts, sizes, rotation, norms, monkeypatch)


def compare(qkv, texts, sizes, rotation, norms, monkeypatch):
    """Compare both kernels with float64."""
    monkeypatch.setattr(references, "is_triton", lambda x: True)
    dtype = qkv.dtype
    exact, again = (
        doubled(texts),
        CachedTexts(*(x.clone() if isinstance(x, torch.Tensor) else x for x in texts)),
    )
    want = decode.attend.plain(qkv.double(), exact, sizes, rotation, doubled(norms))
    for _ in range(2):  # the counters are 0 again
        got = decode.attend(qkv, texts, sizes, rotation, norms)
        assert got.dtype is dtype and distance(got, want) < ERROR[dtype]
    assert distance(decode.attend.plain(qkv, again, sizes, rotation, norms), want) < ERROR[dtype]
    assert torch.equal(texts.values, again.values)
    # Rounded where the network rounds, between norm and rotation too: 8 to 36 % differ otherwise.
    if dtype is not torch.float32:
        new = len(texts.slots) * sizes.groups * sizes.head_dim
        assert (texts.keys != again.keys).sum() < 0.02 * new
    assert distance(texts.keys, exact.keys) < ERROR[dtype] / 10


def rows_of(slots):
    token, used = torch.randint(0, 60, (slots,)), torch.randint(0, 9, (slots,))
    active = torch.arange(slots) % 3 > 0
    return TextState(
        *(x.to(DEVICE) for x in (token, used, used + 1 + torch.arange(slots) % 4, active))
    )


@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize("learned", [False, True])
def test_embed(dtype, learned, monkeypatch):
    monkeypatch.setattr(references, "is_triton", lambda x: True)
    rows, slots = rows_of(9), torch.tensor([3, 0, 8, 5], device=DEVICE)
    wte, wpe = draw(60, 40, dtype=dtype), draw(9, 40, dtype=dtype) if learned else None
    x = decode.embed(rows, slots, wte, wpe)
    assert x.dtype is dtype
    assert distance(x, decode.embed.plain(rows, slots, wte.double(), doubled(wpe))) < ERROR[dtype]


@pytest.mark.parametrize("is_drawn", [False, True])
@pytest.mark.parametrize("dtype", ERROR)
def test_pick(dtype, is_drawn, monkeypatch):
    """Ends of documents, limits, rows that have ended, ties, numbers that are not finite."""
    monkeypatch.setattr(references, "is_triton", lambda x: True)
    slots, vocab = torch.tensor([4, 0, 8, 5, 7, 1, 2, 10, 11], device=DEVICE), 5000
    logits = draw(9, 5056, dtype=dtype)
    logits[:, vocab:] = 99
    logits[0, [4100, 77, 2100]] = 9  # a tie
    logits[2, 4999], logits[3, 10] = 9, 9
    logits[4, 3000], logits[5, 0], logits[6] = float("nan"), float("inf"), float("-inf")
    temperature = torch.tensor(
        [0, 0.5, 1, 3e30, 0, 0.1, 1e-38, 2, 1, 1, 0, 1.5], dtype=torch.float64, device=DEVICE
    )
    draws = Draws(temperature, torch.arange(12, device=DEVICE) * -(2**59) + 5) if is_drawn else None
    for eod in (10, -1):
        rows = rows_of(12)
        want = TextState(*(x.clone() for x in rows))
        report = decode.choose_tokens.plain(logits, vocab, slots, want, eod, draws)
        assert (
            report[0] == (77 if not is_drawn else report[0])
            and BAD in report.tolist()
            and NONE in report.tolist()
        )
        assert torch.equal(decode.choose_tokens(logits, vocab, slots, rows, eod, draws), report)
        for name in ("used", "limit", "active"):
            assert torch.equal(getattr(rows, name), getattr(want, name)), name
        known = slots[report != BAD]
        assert torch.equal(rows.token[known], want.token[known])


def test_each_text_has_its_counter(monkeypatch):
    from meshwright.kernels.triton import decode as kernels

    asked = []

    def counters(used, number):
        asked.append(number)
        return torch.zeros(64, dtype=torch.int32, device=used.device)

    monkeypatch.setattr(kernels, "COUNTERS", 4)
    monkeypatch.setattr(kernels, "counters", counters)
    for rows in (3, 9):
        kernels.choose_tokens(
            draw(rows, 10), 10, torch.arange(rows, device=DEVICE), rows_of(12), -1
        )
    assert asked == [4, 16]
