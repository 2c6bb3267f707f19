"""A small GPT trainer that shares no code with the package, for mistakes that all layouts share.

Plain torch in float64, the whole global batch at once, written from the documentation and the
papers: the network, the losses, order of samples, schedules, decay, clipping, loss scale and the
update rules. It reads fields of the settings, begins with the weights of the run that it is
compared with, and knows nothing of dropout, whose random numbers are the package's own. Of these
weights it knows the spread, and of texts that a decoder wrote the tokens that could be chosen.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

Weights = dict[str, Tensor]
Sample = np.ndarray
CERTAIN = 7.0  # standard deviations
CLOSE = 1e-6


def beyond(config: Any) -> str:
    """Return what this trainer cannot do of a case, or ""."""
    d, m, t = config.data, config.model, config.training
    cannot = {
        "the cyclic order": d.dataloader_type == "cyclic",
        "a blend without weights": len(d.data_path) > 1
        and not d.data_path[0].replace(".", "").isdigit(),
        "means of micro-batches that may be empty": t.loss_mean == "microbatch" and d.eod_mask_loss,
        "the slope of relu at 0": m.glu_activation == "reglu",
    }
    return next((what for what, is_so in cannot.items() if is_so), "")


# The network


def norm(w: Weights, m: Any, name: str, x: Tensor) -> Tensor:
    if m.normalization == "LayerNorm":
        x = x - x.mean(-1, keepdim=True)
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + m.layernorm_epsilon)
    x = x * (w[f"{name}.weight"] + (1 if m.apply_layernorm_1p else 0))
    return x + w[f"{name}.bias"] if f"{name}.bias" in w else x


def linear(w: Weights, name: str, x: Tensor) -> Tensor:
    return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))


def frequencies(m: Any, rotating: int) -> Tensor:
    n = torch.arange(0, rotating, 2, dtype=torch.float64)
    plain, factor, before = (
        m.rotary_base ** (-n / rotating),
        m.rope_scaling_factor,
        m.original_max_position_embeddings,
    )
    if m.rope_scaling == "none":
        return plain
    if m.rope_scaling == "linear":
        return plain / factor
    if m.rope_scaling == "llama3":
        turns = before * plain / (2 * math.pi)
        keep = (
            (turns - m.rope_low_freq_factor) / (m.rope_high_freq_factor - m.rope_low_freq_factor)
        ).clamp(0, 1)
    else:
        low, high = (
            rotating * math.log(before / (2 * math.pi * beta)) / (2 * math.log(m.rotary_base))
            for beta in (m.beta_fast, m.beta_slow)
        )
        low, high = max(math.floor(low), 0), min(math.ceil(high), rotating - 1)
        keep = 1 - ((n / 2 - low) / max(high - low, 1e-3)).clamp(0, 1)
    return plain * keep + plain / factor * (1 - keep)


def rotate(x: Tensor, places: Tensor, m: Any) -> Tensor:
    """Rotate heads [B, heads, T, d] in pairs of the first and second half of what rotates."""
    rotating = int(x.shape[-1] * m.rotary_percent)
    angles = (places[:, None, :, None] * frequencies(m, rotating)).repeat(1, 1, 1, 2)
    turned, rest = x[..., :rotating], x[..., rotating:]
    half = torch.cat([-turned[..., rotating // 2 :], turned[..., : rotating // 2]], -1)
    turned = turned * angles.cos() + half * angles.sin()
    if m.rope_scaling == "yarn":
        turned = turned * m.rope_attention_factor
    return torch.cat([turned, rest], -1)


def slopes(heads: int) -> Tensor:
    """Return ALiBi's slopes, as its authors give them for any number of heads."""

    def of_power(n: int) -> list[float]:
        return [2 ** (-8 * (i + 1) / n) for i in range(n)]

    closest = 2 ** math.floor(math.log2(heads))
    return torch.tensor(
        of_power(closest) + of_power(2 * closest)[::2][: heads - closest], dtype=torch.float64
    )


def window(m: Any, layer: int) -> int:
    """Return how many tokens before its own a layer sees."""
    if m.window_size is None:
        return 1 << 30
    every = m.window_attn_skip_freq
    # In words: what our own parser makes of them is not to be trusted here.
    is_full = str(every).isdigit() and (layer + 1) % int(str(every)) == 0
    return 1 << 30 if is_full else int(str(m.window_size).split(",")[0])


def attention(
    w: Weights, m: Any, layer: int, x: Tensor, places: Tensor, documents: Tensor
) -> Tensor:
    name, (batch, length, _) = f"h.{layer}.attn", x.shape
    heads, d = m.num_attention_heads, m.kv_channels or m.hidden_size // m.num_attention_heads
    groups = m.num_query_groups or (1 if m.group_query_attention else heads)
    rows = (
        linear(w, f"{name}.qkv", x)
        .view(batch, length, groups, heads // groups + 2, d)
        .permute(0, 2, 3, 1, 4)
    )
    # [B, groups, heads of the group, T, d]
    q, k, v = rows[:, :, :-2], rows[:, :, -2:-1], rows[:, :, -1:]
    if m.qk_layernorm:
        q, k = norm(w, m, f"{name}.ln_q", q), norm(w, m, f"{name}.ln_k", k)
    k, v = k.expand_as(q), v.expand_as(q)
    q, k, v = (y.reshape(batch, heads, length, d) for y in (q, k, v))
    if m.position_embedding_type in ("rope", "rotary"):
        q, k = rotate(q, places, m), rotate(k, places, m)
    scores = q @ k.mT / math.sqrt(d)
    back = torch.arange(length)[:, None] - torch.arange(length)
    if m.position_embedding_type == "alibi":
        scores = scores - slopes(heads)[:, None, None] * back
    hidden = (
        (back < 0)
        | (back > window(m, layer))
        | (documents[:, :, None] != documents[:, None, :])[:, None]
    )
    mixed = scores.masked_fill(hidden, -math.inf).softmax(-1) @ v
    return linear(w, f"{name}.proj", mixed.transpose(1, 2).reshape(batch, length, heads * d))


def mlp(w: Weights, m: Any, name: str, x: Tensor) -> Tensor:
    gated = m.glu_activation or ("swiglu" if m.swiglu else "")
    if gated and not m.squared_relu:
        gate, up = (
            F.linear(
                x,
                w[f"{name}.fc.weight"][i],
                w[f"{name}.fc.bias"][i] if f"{name}.fc.bias" in w else None,
            )
            for i in (0, 1)
        )
        y = {"swiglu": F.silu, "geglu": F.gelu, "reglu": F.relu, "liglu": lambda gate: gate}[gated](
            gate
        ) * up
    else:
        y = linear(w, f"{name}.fc", x)
        y = (
            F.relu(y) ** 2
            if m.squared_relu
            else F.gelu(y, approximate="tanh" if m.bias_gelu_fusion else "none")
        )
    return linear(w, f"{name}.proj", y)


def logits(w: Weights, m: Any, tokens: Tensor, places: Tensor, documents: Tensor) -> Tensor:
    x = w["wte.weight"][tokens]
    if m.embed_layernorm:
        x = norm(w, m, "ln_emb", x)
    if m.position_embedding_type.startswith(("learned", "absolute")):
        x = x + w["wpe.weight"][places]
    after = m.apply_residual_connection_post_layernorm
    for i in range(m.num_layers):
        y = norm(w, m, f"h.{i}.ln_1", x)
        middle = (y if after else x) + attention(w, m, i, y, places, documents)
        y = norm(w, m, f"h.{i}.ln_2", x if m.use_parallel_residual else middle)
        x = (y if after else middle) + mlp(w, m, f"h.{i}.mlp", y)
    out = F.linear(norm(w, m, "ln_f", x), w.get("lm_head.weight", w["wte.weight"]))
    cap = m.final_logit_softcapping
    return cap * torch.tanh(out / cap) if cap else out


# The data


def read_documents(prefix: str) -> list[Sample]:
    """Return the documents as they were drawn."""
    drawn = np.load(f"{prefix}.npz")
    return np.split(drawn["tokens"], drawn["sizes"].cumsum()[:-1])


def order_of(
    documents: list[Sample], first: int, stop: int, wanted: int, config: Any
) -> list[Sample]:
    """Return Megatron's samples: documents are shuffled, joined, cut, and shuffled again."""
    length = config.data.seq_length
    rng = np.random.RandomState(config.training.seed)
    per_epoch = sum(len(documents[n]) for n in range(first, stop))
    epochs = 1
    while (epochs * per_epoch - 1) // length < wanted:
        epochs += 1
    total, before = ((e * per_epoch - 1) // length for e in (epochs, epochs - 1))
    missing = wanted - before
    is_apart = epochs > 1 and missing < int(
        config.data.last_epoch_cutoff * ((per_epoch - 1) // length)
    )
    order: list[int] = []
    for count in (epochs - 1, 1) if is_apart else (epochs,):
        part = np.array(list(range(first, stop)) * count, dtype=np.int32)
        rng.shuffle(part)
        order += part.tolist()
    stream = np.concatenate([documents[n] for n in order]).astype(np.int64)
    numbers: list[int] = []
    for a, b in ((0, before), (before, total)) if is_apart else ((0, total),):
        part = np.arange(a, b, dtype=np.uint32)
        rng.shuffle(part)
        numbers += part.tolist()
    return [stream[n * length : (n + 1) * length + 1] for n in numbers]


Piece = tuple[int, int, int]  # document, first token, tokens


def pack(sizes: list[int], documents: range, length: int, seed: int) -> list[list[Piece]]:
    """Put each piece, the longest first, into the sample with the least room that suffices."""
    order = np.array(documents)
    np.random.RandomState(seed).shuffle(order)
    pieces = [
        (n, at, min(length + 1, sizes[n] - at))
        for n in order.tolist()
        for at in range(0, sizes[n] - 1, length)
    ]
    samples: list[list[Piece]] = []
    rooms: dict[int, list[int]] = {}  # samples by their room, in the order in which they came to it
    for piece in sorted(pieces, key=lambda piece: -piece[2]):
        room = min((r for r, waiting in rooms.items() if waiting and r >= piece[2]), default=0)
        if room:
            number = rooms[room].pop(0)
        else:
            room, number = length + 1, len(samples)
            samples.append([])
        samples[number].append(piece)
        rooms.setdefault(room - piece[2], []).append(number)
    return samples


def packed_order_of(
    documents: list[Sample], first: int, stop: int, wanted: int, config: Any
) -> list[Sample]:
    """Return packed samples, in another order in each epoch: tokens and their positions."""
    length, seed = config.data.seq_length, config.training.seed
    out: list[Sample] = []
    made = []
    for pieces in pack([len(document) for document in documents], range(first, stop), length, seed):
        tokens = [int(documents[n][at + k]) for n, at, size in pieces for k in range(size)]
        places = [k for *_, size in pieces for k in range(size)]
        padding = [0] * (length + 1 - len(tokens))
        made.append(np.array([tokens + padding, places + padding]))
    while len(out) < wanted:
        order = np.arange(len(made))
        np.random.RandomState([seed, len(out) // len(made)]).shuffle(order)
        out += [made[n] for n in order]
    return out


def samples_of(config: Any, wanted: int, vocabulary: int) -> Any:
    """Return what gives the sample of a number."""
    d, seed = config.data, config.training.seed
    if d.mock_data:
        return lambda k: np.random.RandomState([seed, k]).randint(vocabulary, size=d.seq_length + 1)
    paths, split = d.train_data_path, [1.0]
    if not paths:
        paths, split = d.data_path, [*map(float, str(d.split).split(","))]
    words = paths if len(paths) > 1 else ["1", *paths]
    prefixes = words[1::2]
    stages = blends_of(config, prefixes, words, wanted)
    parts = {}
    for prefix in prefixes:
        documents = read_documents(prefix)
        train = round(len(documents) * split[0] / sum(split))
        some = sum(math.ceil(count * shares.get(prefix, 0) * 1.005) for count, shares in stages)
        order = order_of if d.packing == "stream" else packed_order_of
        parts[prefix] = iter(
            order(documents, 0, train, wanted if len(prefixes) == 1 else max(some, 1), config)
        )
    chosen = []
    for count, shares in stages:
        taken = dict.fromkeys(shares, 0)
        for k in range(count):  # always the set that is furthest behind its share
            which = max(shares, key=lambda prefix: shares[prefix] * max(k, 1) - taken[prefix])
            chosen.append(next(parts[which]))
            taken[which] += 1
    return lambda k: chosen[k]


def blends_of(
    config: Any, prefixes: list[str], words: list[str], wanted: int
) -> list[tuple[int, dict[str, float]]]:
    """Return the blends of a run one after the other: samples of each, and shares by prefix."""
    begins, blends = [0], [dict(zip(prefixes, map(float, words[::2]), strict=True))]
    for text in map(str, config.data.blend_stages):
        begin, _, rest = text.partition(":")
        pairs = rest.split() if len(rest.split()) > 1 else ["1", rest.strip()]
        if begin.endswith("%"):
            begins.append(round(wanted * float(begin[:-1]) / 100))
        else:
            number, *unit = begin.split()
            begins.append(
                math.ceil(int(number) / config.data.seq_length)
                if unit == ["tokens"]
                else int(number)
            )
        blends.append(dict(zip(pairs[1::2], map(float, pairs[::2]), strict=True)))
    stages = []
    for begin, end, blend in zip(begins, [*begins[1:], wanted], blends, strict=True):
        weights = np.array([blend[prefix] for prefix in prefixes if blend.get(prefix)])
        shares = dict(
            zip(
                [prefix for prefix in prefixes if blend.get(prefix)],
                weights / weights.sum(),
                strict=True,
            )
        )
        stages.append((max(min(end, wanted) - begin, 0), shares))
    return stages


# The schedules


def batches(config: Any) -> Iterator[int]:
    """Yield the size of each global batch of the run."""
    t, consumed = config.training, 0
    full = t.global_batch_size
    samples = t.train_samples or (
        t.train_tokens // config.data.seq_length if t.train_tokens else None
    )
    for step in range(1 << 30):
        size = full
        if t.rampup_batch_size:
            start, more, over = t.rampup_batch_size
            stages = (full - start) // more
            size = (
                full
                if consumed > over
                else min(full, start + more * int(consumed / (over / stages)))
            )
        if step == t.train_iters or (samples is not None and consumed + size > samples):
            return
        yield size
        consumed += size


def run_samples(config: Any) -> int:
    t = config.training
    if t.train_iters:
        return int(t.train_iters * t.global_batch_size)
    return int(t.train_samples or t.train_tokens // config.data.seq_length)


def in_samples(config: Any, name: str, default: float = 0) -> float:
    """Return a length that is given in steps, samples or tokens."""
    o, t, d = config.optimizer, config.training, config.data
    given = {unit: getattr(o, f"{name}_{unit}", None) for unit in ("iters", "samples", "tokens")}
    if given["iters"]:
        return float(given["iters"] * t.global_batch_size)
    if given["tokens"]:
        return float(given["tokens"] // d.seq_length)
    return float(given["samples"] or default)


def rate(config: Any, n: float) -> float:
    """Return the learning rate after n samples."""
    o = config.optimizer
    end = in_samples(config, "lr_decay", run_samples(config))
    warm_up = (
        o.lr_warmup_fraction * end if o.lr_warmup_fraction else in_samples(config, "lr_warmup")
    )
    if warm_up and n <= warm_up:
        return float(o.lr_warmup_init + (o.lr - o.lr_warmup_init) * n / warm_up)
    if o.lr_decay_style == "constant":
        return float(o.lr)
    if n > end:
        return float(o.min_lr)
    if o.lr_decay_style == "inverse-square-root":
        return float(max(o.min_lr, o.lr * math.sqrt(max(warm_up, 1)) / math.sqrt(max(n, 1))))
    r = (n - warm_up) / (end - warm_up)
    share = {"linear": 1 - r, "cosine": (math.cos(math.pi * r) + 1) / 2}.get(o.lr_decay_style, 1.0)
    if o.lr_decay_style == "WSD":
        part = in_samples(config, "lr_wsd_decay")
        s = (n - (end - part)) / part
        ways = {
            "exponential": 2 * 0.5**s - 1,
            "linear": 1 - s,
            "cosine": (math.cos(math.pi * s) + 1) / 2,
            "minus_sqrt": 1 - math.sqrt(max(s, 0)),
        }
        share = ways[o.lr_wsd_decay_style] if s > 0 else 1.0
    return float(o.min_lr + (o.lr - o.min_lr) * share)


def decay(config: Any, n: float) -> float:
    o = config.optimizer
    if o.weight_decay_incr_style == "constant":
        return float(o.weight_decay)
    if o.weight_decay_incr_style == "rate":
        return float(o.weight_decay * (rate(config, n) / o.lr))
    r = min(n / run_samples(config), 1.0)
    if o.weight_decay_incr_style == "cosine":
        r = (math.cos(math.pi * (1 - r)) + 1) / 2
    return float(o.start_weight_decay + (o.end_weight_decay - o.start_weight_decay) * r)


class Scale:
    """The loss scale of fp16."""

    def __init__(self, p: Any) -> None:
        self.is_dynamic = p.fp16 and not p.loss_scale
        self.value = float(p.loss_scale or p.initial_loss_scale) if p.fp16 else 1.0
        self.least, self.window, self.patience = p.min_loss_scale, p.loss_scale_window, p.hysteresis
        self.tolerated, self.clean = self.patience, 0

    def after(self, overflowed: bool) -> None:
        if not self.is_dynamic:
            return
        if overflowed:
            self.clean, self.tolerated = 0, self.tolerated - 1
            if self.tolerated <= 0:
                self.value = max(self.value / 2, self.least)
        else:
            self.clean += 1
            if self.clean == self.window:
                self.clean, self.tolerated, self.value = 0, self.patience, self.value * 2


# The update rules


def newton_schulz(x: Tensor, steps: int) -> Tensor:
    is_tall = x.shape[0] > x.shape[1]
    x = x.mT if is_tall else x
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(steps):
        y = x @ x.mT
        x = 3.4445 * x + (-4.7750 * y + 2.0315 * y @ y) @ x
    return x.mT if is_tall else x


def carried(m: Any, name: str, is_muon: bool = False) -> tuple[float, float]:
    """Return the factors of a parameter's initial spread and of its steps, by µP and CompleteP.

    Both papers keep multipliers of the logits and of the branches apart from the weights; decay
    shrinks a weight by as much as in the small model.
    """
    wide = m.hidden_size / (m.mup_base_hidden_size or m.hidden_size)
    deep = m.num_layers / (m.mup_base_num_layers or m.num_layers)
    *_, module, leaf = name.split(".")
    if module == "lm_head" or (module == "ln_f" and not m.untie_embeddings_and_output_weights):
        return 1 / wide, 1 / wide
    multiplier = 1 / deep if module == "proj" else 1.0
    if leaf != "weight" or module not in ("qkv", "fc", "proj"):
        return multiplier, multiplier
    return multiplier * wide**-0.5, multiplier * wide ** (-0.5 if is_muon else -1)


def code_values(is_second: bool) -> np.ndarray:
    """Return the numbers that a state of 8 bits holds: at last four in each power of two."""
    least, codes = (-53, 256) if is_second else (-26, 128)
    return np.array(
        [
            k / 4 * 2.0**least if k < 4 else (1 + k % 4 / 4) * 2.0 ** (k // 4 - 1 + least)
            for k in range(codes)
        ]
    )


def hash_of(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.uint32)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ x >> np.uint32(shift)) * np.uint32(factor)
    return x ^ x >> np.uint32(16)


def in_fewer_bits(x: Tensor, name: str, is_second: bool, dtype: str, step: int) -> Tensor:
    """Return the state as it is stored: the upper of two codes if the place's number says so."""
    if dtype == "float32":
        return x
    key = hash_of(hash_of(np.array([step ^ 0x9E3779B9])) ^ np.uint32(zlib.crc32(name.encode())))
    drawn = hash_of(np.arange(x.numel()).astype(np.uint32) ^ key) >> np.uint32(
        16 if is_second else 0
    ) & np.uint32(0xFFFF)
    signed = x.flatten().float().numpy()
    size = np.abs(signed).astype(np.float64)
    if dtype == "bfloat16":
        low = (
            (np.abs(signed).view(np.uint32) & np.uint32(0xFFFF0000))
            .view(np.float32)
            .astype(np.float64)
        )
        high = ((np.abs(signed).view(np.uint32) & np.uint32(0xFFFF0000)) + np.uint32(0x10000)).view(
            np.float32
        )
        high, share = high.astype(np.float64), drawn / 65536
    else:
        known = code_values(is_second)
        at = np.clip(np.searchsorted(known, size, "right") - 1, 0, len(known) - 2)
        low, high, share = known[at], known[at + 1], (drawn * 32 + 16) / 2**21
    got = np.where((size - low) / (high - low) + share >= 1, high, low)
    if dtype == "float8" and is_second:
        got = np.where(size > 2.0**-80, np.maximum(got, known[1]), got)
    return torch.from_numpy(np.copysign(got, signed)).view(x.shape)


class Optimizer:
    def __init__(self, o: Any, m: Any, w: Weights) -> None:
        self.o, self.m, self.w, self.count = o, m, w, 0
        self.first = {name: torch.zeros_like(x) for name, x in w.items()}
        self.second = {name: torch.zeros_like(x) for name, x in w.items()}

    def matrices(self, name: str, x: Tensor) -> list[list[int]]:
        """Return the rows of each matrix that Muon orthogonalises."""
        if "attn.qkv" not in name or self.o.muon_split_qkv == "off":
            # of a gate, two matrices
            rows = torch.arange(x.numel() // x.shape[-1]).view(-1, x.shape[-2])
            return [list(map(int, some)) for some in rows]
        m, out = self.m, dict[tuple[str, int], list[int]]()
        per_group = [*"q" * (m.num_attention_heads // m.groups), "k", "v"]
        for row in range(len(x)):
            group, head = divmod(row // m.head_dim, len(per_group))
            out.setdefault(
                (per_group[head], group if self.o.muon_split_qkv == "groups" else 0), []
            ).append(row)
        return list(out.values())

    def peak(self, name: str, is_vector: bool) -> float:
        """Return the parameter's highest learning rate."""
        o = self.o
        if is_vector:
            given = o.vector_lr
        elif name in ("wte.weight", "wpe.weight"):
            given = o.embedding_lr
        else:
            given = o.head_lr if name == "lm_head.weight" else None
        return float(o.lr if given is None else given)

    def decayed(self, x: Tensor, update: Tensor, lr: float, wd: float) -> Tensor:
        """Return what the decay leaves of the weights x in a step by -lr times `update`."""
        if not self.o.cautious_weight_decay:
            return x * (1 - lr * wd)
        return torch.where(update * x < 0, x, x * (1 - lr * wd))

    def step(self, gradients: Weights, lr_of_step: float, wd: float) -> None:
        self.count += 1
        for name, x in self.w.items():
            g, m, o = gradients[name], self.first[name], self.o
            lr = lr_of_step * self.peak(name, x.dim() == 1 or name.endswith(".bias")) / o.lr
            own = wd if x.dim() > 1 and not name.endswith(".bias") else 0.0
            kind = o.optimizer
            if kind == "muon" and not (
                name.startswith("h.") and own == wd and x.dim() > 1 and "bias" not in name
            ):
                kind = "adam"
            _, step = carried(self.m, name, kind == "muon")
            v = self.second[name]
            if kind == "sgd":
                g = g + own * x
                m.copy_(m * o.sgd_momentum + g)
                x -= lr * m
            elif kind == "lion":
                c = o.lion_beta1 * m + (1 - o.lion_beta1) * g
                update = torch.where(c.abs() < 1e-13, 0.0, c.sign())
                x.copy_(self.decayed(x, update, lr, own) - lr * step * update)
                m.lerp_(g, 1 - o.lion_beta2)
            elif kind == "muon":
                m.lerp_(g, 1 - o.muon_momentum)
                update = g.lerp(m, o.muon_momentum)
                for rows in self.matrices(name, x):
                    made = newton_schulz(update.flatten(0, -2)[rows], o.muon_num_ns_steps)
                    left = self.decayed(x.flatten(0, -2)[rows], made, lr, wd)
                    x.flatten(0, -2)[rows] = (
                        left - lr * step * 0.2 * math.sqrt(max(made.shape)) * made
                    )
            else:
                m.lerp_(g, 1 - o.adam_beta1)
                v.mul_(o.adam_beta2).add_((1 - o.adam_beta2) * g * g)
                root = (v / (1 - o.adam_beta2**self.count)).sqrt() + o.adam_eps
                update = m / (1 - o.adam_beta1**self.count) / root
                x.copy_(self.decayed(x, update, lr, own) - lr * step * update)
            for is_second, moment in enumerate((m, v)):
                stored = in_fewer_bits(
                    moment, name, bool(is_second), o.optimizer_state_dtype, self.count
                )
                moment.copy_(stored)


# A run


def loss_of(w: Weights, config: Any, ids: Tensor, eod: int) -> tuple[Tensor, Tensor]:
    """Return what is minimized and the loss that is shown."""
    d, t = config.data, config.training
    is_packed = d.packing != "stream"
    begins = ids[:, 1] == 0 if is_packed else torch.empty(0)
    ids = ids[:, 0] if is_packed else ids
    tokens, labels = ids[:, :-1], ids[:, 1:]
    length = tokens.shape[1]
    places = torch.arange(length).repeat(len(tokens), 1)
    ends = (tokens == eod).cumsum(1)
    documents = torch.cat([torch.zeros_like(ends[:, :1]), ends[:, :-1]], 1)
    if is_packed:
        documents = begins[:, :-1].cumsum(1)
    if is_packed or d.reset_position_ids:
        is_first = F.pad(documents.diff(dim=1) > 0, (1, 0))
        places = places - torch.where(is_first, places, 0).cummax(1).values
    if not is_packed and not d.reset_attention_mask:
        documents = torch.zeros_like(documents)
    out = logits(w, config.model, tokens, places, documents)
    counted = torch.ones(tokens.shape, dtype=torch.float64)
    if is_packed:
        counted = (~begins[:, 1:]).double()
    elif d.eod_mask_loss:
        counted = (tokens != eod).double()
    each = F.cross_entropy(out.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
    z = out.logsumexp(-1) ** 2
    size = len(ids) if t.loss_mean == "global" else t.micro_batch_size
    shown, minimized = [], []
    for e, square, c in zip(each.split(size), z.split(size), counted.split(size), strict=True):
        number = c.sum().clamp(min=1)
        shown.append((e * c).sum() / number)
        minimized.append(shown[-1] + t.z_loss_coef * (square * c).sum() / number)
    return torch.stack(minimized).mean(), torch.stack(shown).mean()


def skipped_steps(config: Any) -> set[int]:
    out: set[int] = set()
    for text in map(str, config.data.skip_train_iteration_range):
        a, b = map(int, text.split("-"))
        out |= set(range(a, b + 1))
    return out


def rows(
    config: Any, is_skipped: Callable[[int, range], bool]
) -> Iterator[tuple[int, range, dict[str, float]]]:
    """Yield for each step its number, its samples and what is recorded of its place in the run."""
    consumed, taken, scale, left_out = 0, 0, Scale(config.precision), skipped_steps(config)
    for step, size in enumerate(batches(config), 1):
        numbers = range(consumed, consumed + size)
        consumed += size
        if step in left_out:
            continue
        skipped = is_skipped(step, numbers)
        row = {"batch": size, "consumed": consumed, "skipped": skipped, "loss_scale": scale.value}
        row |= {"lr": rate(config, taken), "weight_decay": decay(config, taken)}
        scale.after(skipped)
        taken += 0 if skipped else size
        yield step, numbers, row | {"next_lr": rate(config, taken)}


def unlike_drawn(weights: Weights, m: Any) -> list[str]:
    """Return where initial weights are not spread as the settings say."""
    wrong = []
    for name, x in weights.items():
        *module, kind = name.split(".")
        is_norm = module[-1].startswith("ln")
        share, _ = carried(m, name)
        center, std, extra = (
            share - m.apply_layernorm_1p if is_norm and kind == "weight" else 0.0,
            0.0,
            2.0,
        )
        if kind == "weight" and not is_norm:
            layers = m.mup_base_num_layers or m.num_layers
            std = (
                share * m.init_method_std / (math.sqrt(2 * layers) if module[-1] == "proj" else 1.0)
            )
            if m.init_method_xavier_uniform:
                # kurtosis less 1
                std, extra = math.sqrt(2 / (x.numel() // x.shape[-1] + x.shape[-1])), 0.8
            if module[-1] == "proj" and m.zero_init_projections:
                std = 0.0
        far, allowed = abs(float(x.mean()) - center), CERTAIN * std / math.sqrt(x.numel())
        if far > allowed + CLOSE:
            wrong.append(
                f"initial {name}: its mean is {far:.2e} from {center}, {allowed:.2e} allowed"
            )
        far, allowed = (
            abs(float((x - center).square().mean()) - std**2),
            CERTAIN * math.sqrt(extra / x.numel()) * std**2,
        )
        if far > allowed + CLOSE * std**2 + CLOSE**2:  # a norm's value may be rounded to float32
            wrong.append(
                f"initial {name}: its variance is {far:.2e} from {std**2:.2e}, {allowed:.2e} allowed"
            )
    return wrong


def unlike_chosen(
    w: Weights, m: Any, prompt: list[int], tokens: list[int], logprobs: list[float], kind: Any
) -> list[str]:
    """Return which tokens of a text could not be chosen, or have another probability.

    `kind` is how they were sampled, None in a beam search.
    """
    ids = torch.tensor([[*prompt, *tokens]])
    one = torch.zeros_like(ids)
    out = logits(w, m, ids, torch.arange(ids.shape[1])[None], one)[0, len(prompt) - 1 : -1]
    wrong = []
    for n, (token, logprob, x) in enumerate(zip(tokens, logprobs, out, strict=True)):
        true = float(x.log_softmax(-1)[token])
        if abs(true - logprob) > CLOSE * max(1.0, abs(true)):
            wrong.append(f"a text: token {n} has the log-probability {logprob}, not {true}")
        if kind is None:
            continue
        if kind.repetition_penalty != 1:
            seen = ids[0, : len(prompt) + n].unique()
            x = x.index_copy(
                0,
                seen,
                torch.where(
                    x[seen] > 0,
                    x[seen] / kind.repetition_penalty,
                    x[seen] * kind.repetition_penalty,
                ),
            )
        sorted_x = x.sort(descending=True).values
        least = sorted_x[0]
        if kind.temperature and kind.top_k:
            least = sorted_x[kind.top_k - 1]
        elif kind.temperature and kind.top_p:
            before = (sorted_x / kind.temperature).softmax(-1).cumsum(-1)
            least = sorted_x[int((before < kind.top_p).sum())]
        if x[token] < least - CLOSE * max(1.0, abs(float(least))):
            wrong.append(f"a text: token {n} is {token}, which could not be chosen by {kind}")
    return wrong


class Step(NamedTuple):
    number: int
    row: dict[str, float]  # what is recorded of it
    samples: dict[int, list[int]]  # their tokens
    gradients: Weights
    weights: Weights  # after it
    average: Weights  # of the weights, after it


def train(
    config: Any, weights: Weights, vocabulary: int, eod: int, poisoned: tuple[int, ...]
) -> Iterator[Step]:
    w = {name: x.clone().requires_grad_() for name, x in weights.items()}
    o, sample = config.optimizer, samples_of(config, run_samples(config), vocabulary)
    optimizer = Optimizer(o, config.model, {name: x.detach() for name, x in w.items()})
    average = {name: x.clone() for name, x in weights.items()}
    for number, samples, row in rows(
        config, lambda _, samples: not set(samples).isdisjoint(poisoned)
    ):
        ids = torch.from_numpy(np.stack([sample(k) for k in samples]).astype(np.int64))
        minimized, shown = loss_of(w, config, ids, eod)
        gradients = dict(
            zip(
                w,
                torch.autograd.grad(minimized, list(w.values()), materialize_grads=True),
                strict=True,
            )
        )
        row["loss"] = float(shown.detach())
        if not row["skipped"]:
            row["grad_norm"] = length = math.sqrt(
                sum(float((g * g).sum()) for g in gradients.values())
            )
            clip = min(1.0, o.clip_grad / (length + 1e-6)) if o.clip_grad else 1.0
            optimizer.step(
                {name: g * clip for name, g in gradients.items()}, row["lr"], row["weight_decay"]
            )
            keep = min(o.ema, (1 + optimizer.count) / (10 + optimizer.count))
            average = {
                name: keep * x + (1 - keep) * optimizer.w[name] for name, x in average.items()
            }
        read = ids.tolist() if config.data.packing == "stream" else ids[:, 0].tolist()
        yield Step(
            number, row, dict(zip(samples, read, strict=True)), gradients, optimizer.w, average
        )
