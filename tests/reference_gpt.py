"""An independent implementation of the network from its specification, to test the package's.

numpy, float64, loops over samples and heads; slow and simple on purpose. Weights have the names of
the checkpoint: {name: array}, [out, in], tables at the true vocabulary size. Every step is an
analytic function of the weights, complex ones too, so `slope` differentiates with an imaginary
step: f(w + i h d) = f(w) + i h f'(w) d + O(h^2). Nothing is subtracted, so h may be 1e-30, which
leaves no error and steps over no kink of a ReLU.
"""

from __future__ import annotations

import math

import numpy as np

from meshwright.config.schema import Model

Weights = dict[str, np.ndarray]


def logits(
    w: Weights,
    m: Model,
    tokens: np.ndarray,
    position_ids: np.ndarray | None = None,
    doc_ids: np.ndarray | None = None,
    drop: dict[int, np.ndarray] | None = None,
) -> np.ndarray:
    """Map tokens [B, T] to logits [B, T, V]. `drop` holds dropout's factors at each site.

    Sites 0, 2i + 1, 2i + 2 are [B, T, H]: after the embedding, attention and MLP of layer i.
    Site ~i is [B, heads, T, T], the attention probabilities of layer i.
    """
    rows = []
    for b, row in enumerate(tokens):
        places = np.arange(len(row)) if position_ids is None else position_ids[b]
        documents = np.zeros(len(row)) if doc_ids is None else doc_ids[b]
        factors = {site: x[b] for site, x in (drop or {}).items()}
        rows.append(one_sample(w, m, row, places, documents, factors))
    return np.stack(rows)


def one_sample(w: Weights, m: Model, tokens, places, documents, drop) -> np.ndarray:
    x = w["wte.weight"][tokens]
    if m.embed_layernorm:
        x = norm(w, m, "ln_emb", x)
    if m.position == "learned":
        x = x + w["wpe.weight"][places]
    x = x * drop.get(0, 1.0)
    for i in range(m.num_layers):
        y = norm(w, m, f"h.{i}.ln_1", x)
        branch = attention(w, m, i, y, places, documents, drop.get(~i))
        before = x
        x = (y if m.apply_residual_connection_post_layernorm else x) + branch * drop.get(
            2 * i + 1, 1.0
        )
        y = norm(w, m, f"h.{i}.ln_2", before if m.use_parallel_residual else x)
        branch = mlp(w, m, f"h.{i}.mlp", y)
        x = (y if m.apply_residual_connection_post_layernorm else x) + branch * drop.get(
            2 * i + 2, 1.0
        )
    head = w["lm_head.weight"] if m.untie_embeddings_and_output_weights else w["wte.weight"]
    out = norm(w, m, "ln_f", x) @ head.T
    cap = m.final_logit_softcapping
    return cap * np.tanh(out / cap) if cap else out


def norm(w: Weights, m: Model, name: str, x: np.ndarray) -> np.ndarray:
    weight = w[f"{name}.weight"] + (1.0 if m.apply_layernorm_1p else 0.0)
    if m.normalization == "LayerNorm":
        x = x - x.mean(-1, keepdims=True)
    y = x / np.sqrt((x * x).mean(-1, keepdims=True) + m.layernorm_epsilon) * weight
    assert (f"{name}.bias" in w) == (m.normalization == "LayerNorm" and m.layernorm_bias), name
    return y + w[f"{name}.bias"] if f"{name}.bias" in w else y


def linear(w: Weights, name: str, x: np.ndarray, biased: bool) -> np.ndarray:
    assert (f"{name}.bias" in w) == biased, name
    y = x @ w[f"{name}.weight"].T
    return y + w[f"{name}.bias"] if biased else y


def attention(w: Weights, m: Model, layer: int, x, places, documents, drop) -> np.ndarray:
    name, furthest = f"h.{layer}.attn", reach(m, layer, len(x))
    heads, d = m.num_attention_heads, m.kv_channels or m.hidden_size // m.num_attention_heads
    groups = m.num_query_groups or (1 if m.group_query_attention else heads)
    per_group = heads // groups
    # [T, groups (per_group + 2) d]
    rows = linear(w, f"{name}.qkv", x, m.add_bias_linear or m.add_qkv_bias)
    out = []
    for head in range(heads):
        # of this head's group: its queries, its key, its value
        start = head // per_group * (per_group + 2) * d
        at = start + head % per_group * d
        q = rows[:, at : at + d]
        k = rows[:, start + per_group * d : start + (per_group + 1) * d]
        v = rows[:, start + (per_group + 1) * d : start + (per_group + 2) * d]
        if m.qk_layernorm:
            q, k = norm(w, m, f"{name}.ln_q", q), norm(w, m, f"{name}.ln_k", k)
        if m.position == "rope":
            q, k = rotated(q, places, m), rotated(k, places, m)
        o = np.zeros(q.shape, np.result_type(q, k, v))
        for t in range(len(x)):
            seen = [s for s in range(t + 1) if documents[s] == documents[t] and t - s <= furthest]
            scores = np.array([q[t] @ k[s] for s in seen]) / math.sqrt(d)
            if m.position == "alibi":
                scores = scores + slope_of(head, heads) * (np.array(seen) - t)
            e = np.exp(scores - scores.real.max())
            p = e / e.sum()
            o[t] = (p if drop is None else p * drop[head, t, seen]) @ v[seen]
        out.append(o)
    return linear(w, f"{name}.proj", np.concatenate(out, axis=-1), m.add_bias_linear)


def reach(m: Model, layer: int, length: int) -> int:
    """Return how far back a layer sees, by Megatron's forms of its two settings."""
    skipped = str(m.window_attn_skip_freq or "0")
    kinds = eval(skipped)  # of this file's tests
    is_full = kinds[layer] == 0 if isinstance(kinds, list) else kinds and (layer + 1) % kinds == 0
    return length if is_full or m.window_size is None else int(str(m.window_size).split(",")[0])


def rotated(x: np.ndarray, places: np.ndarray, m: Model) -> np.ndarray:
    rotating = int(x.shape[-1] * m.rotary_percent)
    y = x.copy()
    for i in range(rotating // 2):
        angle = places * scaled_frequency(m, i, rotating)
        a, b = x[:, i], x[:, i + rotating // 2]
        y[:, i] = a * np.cos(angle) - b * np.sin(angle)
        y[:, i + rotating // 2] = b * np.cos(angle) + a * np.sin(angle)
    if m.rope_scaling == "yarn":
        y[:, :rotating] *= m.rope_attention_factor
    return y


def scaled_frequency(m: Model, i: int, rotating: int) -> float:
    """Return the frequency of pair i: as it is if fast, divided if slow, a mean of both between."""
    frequency, factor, before = (
        m.rotary_base ** (-2 * i / rotating),
        m.rope_scaling_factor,
        m.original_positions,
    )
    if m.rope_scaling == "none":
        return frequency
    slowness = 1.0
    if m.rope_scaling == "llama3":
        longest, shortest = before / m.rope_low_freq_factor, before / m.rope_high_freq_factor
        wave = 2 * math.pi / frequency
        between = (before / wave - m.rope_low_freq_factor) / (
            m.rope_high_freq_factor - m.rope_low_freq_factor
        )
        slowness = 0.0 if wave < shortest else 1.0 if wave > longest else 1 - between
    if m.rope_scaling == "yarn":
        ends = [
            rotating / 2 * math.log(before / (2 * math.pi * b), m.rotary_base)
            for b in (m.beta_fast, m.beta_slow)
        ]
        first, last = max(math.floor(ends[0]), 0), min(math.ceil(ends[1]), rotating - 1)
        slowness = min(max((i - first) / (last - first), 0.0), 1.0)
    return frequency / factor * slowness + frequency * (1 - slowness)


def slope_of(head: int, heads: int) -> float:
    """Return 2^(-8/n), 2^(-16/n), ... for a power of two n <= heads, then every other of 2n."""
    n = 1
    while 2 * n <= heads:
        n *= 2
    return (
        2.0 ** (-8 * (head + 1) / n) if head < n else 2.0 ** (-8 * (2 * (head - n) + 1) / (2 * n))
    )


def mlp(w: Weights, m: Model, name: str, x: np.ndarray) -> np.ndarray:
    gate_kind = m.glu_activation or ("swiglu" if m.swiglu else None)
    if gate_kind and not m.squared_relu:
        # [2, F, H], [2, F]
        weight, bias = w[f"{name}.fc.weight"], w.get(f"{name}.fc.bias", np.zeros((2, 1)))
        assert (f"{name}.fc.bias" in w) == m.add_bias_linear
        gate, up = x @ weight[0].T + bias[0], x @ weight[1].T + bias[1]
        y = {"swiglu": silu, "geglu": gelu_erf, "reglu": relu, "liglu": lambda x: x}[gate_kind](
            gate
        ) * up
    else:
        y = linear(w, f"{name}.fc", x, m.add_bias_linear)
        y = relu(y) ** 2 if m.squared_relu else gelu_tanh(y) if m.bias_gelu_fusion else gelu_erf(y)
    return linear(w, f"{name}.proj", y, m.add_bias_linear)


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def relu(x: np.ndarray) -> np.ndarray:
    return np.where(x.real > 0, x, 0)


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def gelu_erf(x: np.ndarray) -> np.ndarray:
    z = x / math.sqrt(2)
    erf = np.vectorize(math.erf)(z.real)
    # the first terms of its Taylor series, whose next is of the order of the step's square
    if np.iscomplexobj(z):
        erf = erf + 1j * z.imag * 2 / math.sqrt(math.pi) * np.exp(-(z.real**2))
    return 0.5 * x * (1 + erf)


def loss(
    w: Weights, m: Model, tokens: np.ndarray, labels: np.ndarray, mask: np.ndarray, **where
) -> complex | float:
    """Return the mean cross entropy over the tokens whose mask is 1."""
    total = 0.0
    for x, label, counted in zip(logits(w, m, tokens, **where), labels, mask, strict=True):
        for t in range(len(label)):
            if counted[t]:
                e = x[t] - x[t].real.max()
                total = total + np.log(np.exp(e).sum()) - e[label[t]]
    return total / mask.sum()


def slope(w: Weights, name: str, direction: np.ndarray, *arguments, **where) -> float:
    """Return the derivative of `loss` with respect to the named weight along the direction."""
    step = 1e-30
    moved = {**w, name: w[name] + 1j * step * direction}
    return float(loss(moved, *arguments, **where).imag / step)
