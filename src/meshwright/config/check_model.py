"""Check the architecture, and compare it with a checkpoint's."""

from __future__ import annotations

from collections.abc import Collection

from meshwright.config.fast_paths import FUSED_BLOCK, unknown_to
from meshwright.config.problem import Problem, missing, stated, with_value
from meshwright.config.schema import ARCHITECTURE, OUTCOME, Data, Model, Training


def architecture_problems(m: Model, d: Data) -> list[Problem]:
    out = []
    for name in ("num_layers", "hidden_size", "num_attention_heads"):
        if getattr(m, name) is None:
            text = f"{{{name}}} is needed (or {{preset}}, which gives a whole architecture)"
            out.append(Problem((name,), text, "missing"))
    if d.seq_length is None:
        most = (
            f"; the model reads up to {m.max_position_embeddings}"
            if m.max_position_embeddings
            else ""
        )
        out.append(missing("seq_length", f"tokens of one sample{most}"))
    elif (
        m.position == "learned"
        and m.max_position_embeddings
        and m.max_position_embeddings < d.seq_length
    ):
        text = (
            f"{stated(m, 'max_position_embeddings')} is below {stated(d, 'seq_length')}: "
            "positions past the table have no embedding; lower {seq_length}, or give a new model a longer table"
        )
        out.append(Problem(("max_position_embeddings", "seq_length"), text))
    return out + heads_problems(m) + rope_problems(m) + (window_problems(m) if m.num_layers else [])


def heads_problems(m: Model) -> list[Problem]:
    """Check the widths of the heads and the activation."""
    out = []
    width = m.hidden_size
    heads = m.num_attention_heads
    groups = m.num_query_groups
    if width and heads and heads > 0 and not m.kv_channels and width % heads:
        product = (
            f"{stated(m, 'hidden_size')} is not a multiple of {stated(m, 'num_attention_heads')}"
        )
        out.append(
            Problem(
                ("hidden_size", "num_attention_heads"),
                f"{product}; change one or set {{kv_channels}}",
            )
        )
    if heads and groups and groups > 0 and heads % groups:
        text = f"{stated(m, 'num_attention_heads')} is not a multiple of {stated(m, 'num_query_groups')}"
        out.append(Problem(("num_attention_heads", "num_query_groups"), text))
    # Two numbers are rotated together.
    if m.position == "rope" and (m.rotary_percent > 1 or m.rotating % 2 or m.rotating < 2):
        text = (
            f"{stated(m, 'rotary_percent')} of heads of {m.head_dim} rotates {m.rotating} numbers; "
            "they must be even and fit the head"
        )
        out.append(Problem(("rotary_percent",), text))
    # swiglu and glu_activation may both be given: the second says which gate it is.
    if m.squared_relu and (m.swiglu or m.glu_activation):
        text = "{squared_relu=True} contradicts {swiglu=True} and {glu_activation}; give one activation"
        out.append(Problem(("squared_relu", "swiglu", "glu_activation"), text))
    return out


def rope_problems(m: Model) -> list[Problem]:
    """Check the numbers of a scaling of rotary frequencies; those of a folder are checked too."""
    out = []
    if m.rope_scaling == "llama3" and m.rope_high_freq_factor <= m.rope_low_freq_factor:
        text = f"{stated(m, 'rope_high_freq_factor')} must be above {stated(m, 'rope_low_freq_factor')}"
        out.append(Problem(("rope_high_freq_factor", "rope_low_freq_factor"), text))
    if m.rope_scaling == "yarn":
        if m.original_max_position_embeddings is None:
            text = "{rope_scaling=yarn} needs {original_max_position_embeddings}: positions before the scaling"
            out.append(Problem(("original_max_position_embeddings",), text))
        if m.beta_fast <= m.beta_slow:
            text = f"{stated(m, 'beta_fast')} must be above {stated(m, 'beta_slow')}"
            out.append(Problem(("beta_fast", "beta_slow"), text))
        if m.rotary_base <= 1:
            text = f"{{rope_scaling=yarn}} needs a {{rotary_base}} above 1, not {m.rotary_base:g}"
            out.append(Problem(("rotary_base",), text))
    return out


def has_megatrons_scaling(m: Model) -> bool:
    """Return whether Megatron's arguments can express the scaling of rotary frequencies."""
    # Megatron's factor of positions is a whole number, and Llama 3's constants are in its code.
    constants = m.rope_low_freq_factor, m.rope_high_freq_factor, m.original_positions
    expressed = {
        "none": True,
        "linear": m.rope_scaling_factor % 1 == 0,
        "llama3": constants == (1.0, 4.0, 8192),
    }
    return m.position != "rope" or expressed.get(m.rope_scaling, False)


def window_problems(m: Model) -> list[Problem]:
    """Check that a list of layers with a window fits the layers; also one of a checkpoint."""
    name = "window_attn_skip_freq"
    try:
        _ = m.windowed_layers
    except ValueError as error:
        return [
            Problem((name,), f"{with_value(name, str(m.window_attn_skip_freq)[:100])}: {error}")
        ]
    return []


def option_words(m: Model, name: str) -> str:
    """Return a Problem's words for an option of the network: a switch with its value."""
    value = getattr(m, name)
    return f"{{{name}={value}}}" if isinstance(value, bool) else f"{{{name}}}"


def kernel_problems(t: Training, m: Model) -> list[Problem]:
    """Check how the layers are computed."""
    out = []
    # Selective recomputation is of attention alone, in every layer.
    if m.num_layers and t.recompute_num_layers > m.num_layers and t.recompute_granularity == "full":
        text = f"{stated(t, 'recompute_num_layers')} is above {stated(m, 'num_layers')}"
        out.append(Problem(("recompute_num_layers", "num_layers"), text))
    if t.fused_kernels == "on" and t.compile == "on":
        text = "{fused_kernels=on} and {compile=on} are two ways to run the layers; give one"
        out.append(Problem(("fused_kernels", "compile"), text))
    for name in unknown_to(FUSED_BLOCK, m) if t.fused_kernels == "on" else ():
        text = f"{{fused_kernels=on}}: they have no {option_words(m, name)}; leave it at auto"
        out.append(Problem(("fused_kernels", name), text))
    if m.use_parallel_residual and m.apply_residual_connection_post_layernorm:
        both = ("use_parallel_residual", "apply_residual_connection_post_layernorm")
        text = "{use_parallel_residual=True} and {apply_residual_connection_post_layernorm=True} cannot be combined"
        out.append(
            Problem(
                both, f"{text}: one adds to the stream, the other to the norm's output; give one"
            )
        )
    return out


def contradictions(
    asked: Model, saved: Model, names: Collection[str] = ARCHITECTURE
) -> list[Problem]:
    """Describe each of these settings that differs from the checkpoint's."""
    # Compare what flags come to, such as `groups`: the flag for it may be left out.
    defaults = Model()
    out: list[Problem] = []
    left_open: list[Problem] = []
    for name in names:
        value = getattr(asked, name)
        outcome = OUTCOME.get(name, name)
        theirs = getattr(saved, outcome)
        if getattr(asked, outcome) == theirs:
            continue
        # If several flags decide one outcome, report those that differ, and of them those that were
        # given. If none differs, the outcome follows another flag, as key/value heads follow heads.
        group = [n for n in names if OUTCOME.get(n, n) == outcome]
        differing = [n for n in group if getattr(asked, n) != getattr(saved, n)]
        given = [n for n in differing if getattr(asked, n) != getattr(defaults, n)]
        if name not in (given or differing):
            continue
        has = "none" if theirs is None else theirs
        ours = f"{{{name}}} {value}" if isinstance(value, bool) else with_value(name, value)
        problem = Problem((name,), f"{ours}, the checkpoint has {has}")
        (left_open if value is None else out).append(problem)
    # What was left open may only follow another flag.
    return out or left_open
