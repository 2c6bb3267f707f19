"""Check what settings carried over from a smaller model (optim/mup.py) cannot be combined with."""

from __future__ import annotations

from meshwright.config.problem import Problem
from meshwright.config.schema import Model, TrainConfig


def given_bases(m: Model) -> list[str]:
    """Return the settings that name a smaller model."""
    return [n for n in ("mup_base_hidden_size", "mup_base_num_layers") if getattr(m, n) is not None]


def mup_problems(c: TrainConfig) -> list[Problem]:
    m = c.model
    o = c.optimizer
    p = c.precision
    given = given_bases(m)
    if not given:
        return []
    # Messages name the first of the two that is given.
    base = given[0]
    out = []
    if o.optimizer == "sgd":
        text = f"{{{base}}} has no factors for {{optimizer=sgd}}; choose adamw, lion or muon"
        out.append(Problem((base, "optimizer"), text))
    if m.init_method_xavier_uniform:
        text = f"{{{base}}} sets the spread of initial weights, as {{init_method_xavier_uniform=True}} does; give one"
        out.append(Problem((base, "init_method_xavier_uniform"), text))
    if m.mup_base_num_layers is not None and m.apply_residual_connection_post_layernorm:
        text = (
            "{mup_base_num_layers} divides what a branch adds to the residual stream, which "
            "{apply_residual_connection_post_layernorm=True} norms in each layer; give one of them"
        )
        out.append(
            Problem(("mup_base_num_layers", "apply_residual_connection_post_layernorm"), text)
        )
    # What follows is about the width alone.
    if m.mup_base_hidden_size is None:
        return out
    if o.optimizer == "muon" and o.muon_split_qkv == "groups":
        text = (
            "{muon_split_qkv=groups} orthogonalises matrices that do not grow with the width, for which "
            "{mup_base_hidden_size} has no factor; give off or on"
        )
        out.append(Problem(("muon_split_qkv", "mup_base_hidden_size"), text))
    if m.apply_layernorm_1p and not m.untie_embeddings_and_output_weights and (p.bf16 or p.fp16):
        text = (
            "{mup_base_hidden_size} divides the last norm's weight, of which {apply_layernorm_1p=True} stores the "
            "distance from 1: in 16 bits too coarse; give {apply_layernorm_1p=False} or "
            "{untie_embeddings_and_output_weights=True}"
        )
        out.append(Problem(("mup_base_hidden_size", "apply_layernorm_1p"), text))
    return out
