"""Check the architecture, and compare it with a checkpoint's."""

from __future__ import annotations

from collections.abc import Collection

from meshwright.config.fields import spelling
from meshwright.config.schema import ARCHITECTURE, OUTCOME, Data, Model, Training


def architecture_problems(m: Model, d: Data) -> list[str]:
    out = []
    for name in ("num_layers", "hidden_size", "num_attention_heads"):
        if getattr(m, name) is None:
            out.append(f"{spelling(name)} is needed (or --preset, which gives a whole architecture)")
    if d.seq_length is None:
        most = f"; the model reads up to {m.max_position_embeddings}" if m.max_position_embeddings else ""
        out.append(f"--seq-length is needed: tokens of one sample{most}")
    elif m.position == "learned" and m.max_position_embeddings and m.max_position_embeddings < d.seq_length:
        out.append(
            f"--max-position-embeddings {m.max_position_embeddings} is below --seq-length {d.seq_length}: "
            "positions past the table have no embedding; lower --seq-length, or give a new model a longer table"
        )
    h, n = m.hidden_size, m.num_attention_heads
    if h and n and n > 0 and not m.kv_channels and h % n:
        out.append(f"--hidden-size {h} is not a multiple of --num-attention-heads {n}; change one or set --kv-channels")
    if n and m.num_query_groups and m.num_query_groups > 0 and n % m.num_query_groups:
        out.append(f"--num-attention-heads {n} is not a multiple of --num-query-groups {m.num_query_groups}")
    if m.position == "rope" and (m.rotary_percent > 1 or m.rotating % 2 or m.rotating < 2):
        out.append(
            f"--rotary-percent {m.rotary_percent} of heads of {m.head_dim} rotates {m.rotating} numbers; "
            "they must be even and fit the head"
        )
    if m.squared_relu and (m.swiglu or m.glu_activation):
        out.append("--squared-relu contradicts --swiglu and --glu-activation; give one activation")
    return out + rope_problems(m) + (window_problems(m) if m.num_layers else [])


def rope_problems(m: Model) -> list[str]:
    """Check the numbers of a scaling of rotary frequencies; those of a folder are checked too."""
    out = []
    if m.rope_scaling == "llama3" and m.rope_high_freq_factor <= m.rope_low_freq_factor:
        out.append(
            f"--rope-high-freq-factor {m.rope_high_freq_factor:g} must be above --rope-low-freq-factor "
            f"{m.rope_low_freq_factor:g}"
        )
    if m.rope_scaling == "yarn":
        if m.original_max_position_embeddings is None:
            out.append("--rope-scaling yarn needs --original-max-position-embeddings: positions before the scaling")
        if m.beta_fast <= m.beta_slow:
            out.append(f"--beta-fast {m.beta_fast:g} must be above --beta-slow {m.beta_slow:g}")
        if m.rotary_base <= 1:
            out.append(f"--rope-scaling yarn needs a --rotary-base above 1, not {m.rotary_base:g}")
    return out


def has_megatrons_scaling(m: Model) -> bool:
    """Return whether Megatron's arguments can express the scaling of rotary frequencies."""
    constants = m.rope_low_freq_factor, m.rope_high_freq_factor, m.original_positions
    expressed = {"none": True, "linear": m.rope_scaling_factor % 1 == 0, "llama3": constants == (1.0, 4.0, 8192)}
    return m.position != "rope" or expressed.get(m.rope_scaling, False)


def window_problems(m: Model) -> list[str]:
    """Check the form of the settings of windows; those of a checkpoint are checked too."""
    for name, outcome in (("window_size", "window"), ("window_attn_skip_freq", "windowed_layers")):
        try:
            getattr(m, outcome)
        except ValueError as error:
            return [f"{spelling(name)} {str(getattr(m, name))[:100]}: {error}"]
    return []


def kernel_problems(t: Training, m: Model) -> list[str]:
    """Check how the layers are computed."""
    out = []
    if m.num_layers and t.recompute_num_layers > m.num_layers and t.recompute_granularity == "full":
        out.append(f"--recompute-num-layers {t.recompute_num_layers} is above --num-layers {m.num_layers}")
    if t.fused_kernels == "on" and t.compile == "on":
        out.append("--fused-kernels on and --compile on are two ways to run the layers; give one")
    if t.fused_kernels == "on" and m.qk_layernorm:
        out.append("--fused-kernels on: they do not norm queries and keys (--qk-layernorm); leave it at auto")
    if t.fused_kernels == "on" and m.use_parallel_residual:
        out.append("--fused-kernels on: they have no --use-parallel-residual; leave it at auto")
    if m.use_parallel_residual and m.apply_residual_connection_post_layernorm:
        out.append("--use-parallel-residual adds to the stream, not to --apply-residual-connection-post-layernorm's")
    return out


def contradictions(asked: Model, saved: Model, names: Collection[str] = ARCHITECTURE) -> list[str]:
    """Describe each of these settings that differs from the checkpoint's."""
    defaults = Model()
    out: list[str] = []
    left_open: list[str] = []
    for name in names:
        value, outcome = getattr(asked, name), OUTCOME.get(name, name)
        ours, theirs = (getattr(m, outcome) for m in (asked, saved))
        if ours == theirs:
            continue
        # If several flags decide one outcome, report those that differ, and of them those that were
        # given. If none differs, the outcome follows another flag, as key/value heads follow heads.
        group = [n for n in names if OUTCOME.get(n, n) == outcome]
        differing = [n for n in group if getattr(asked, n) != getattr(saved, n)]
        given = [n for n in differing if getattr(asked, n) != getattr(defaults, n)]
        if name in (given or differing):
            shown, has = ("none" if x is None else x for x in (value, theirs))
            (left_open if value is None else out).append(f"{spelling(name)} {shown}, the checkpoint has {has}")
    return out or left_open  # what was left open may only follow another flag
