"""Check what settings carried over from a smaller model (optim/mup.py) cannot be combined with."""

from __future__ import annotations

from meshwright.config.fields import spelling
from meshwright.config.schema import Model, TrainConfig


def given_bases(m: Model) -> list[str]:
    """Return the flags that name a smaller model."""
    return [spelling(n) for n in ("mup_base_hidden_size", "mup_base_num_layers") if getattr(m, n) is not None]


def mup_problems(c: TrainConfig) -> list[str]:
    m, o, p = c.model, c.optimizer, c.precision
    given = given_bases(m)
    if not given:
        return []
    out = []
    if o.optimizer == "sgd":
        out.append(f"{given[0]} has no factors for --optimizer sgd; choose adamw, lion or muon")
    if m.init_method_xavier_uniform:
        out.append(f"{given[0]} sets the spread of initial weights, as --init-method-xavier-uniform does; give one")
    if m.mup_base_num_layers is not None and m.apply_residual_connection_post_layernorm:
        out.append(
            "--mup-base-num-layers divides what a branch adds to the residual stream, which "
            "--apply-residual-connection-post-layernorm norms in each layer; give one of them"
        )
    if m.mup_base_hidden_size is None:
        return out
    if o.optimizer == "muon" and o.muon_split_qkv == "groups":
        out.append(
            "--muon-split-qkv groups orthogonalises matrices that do not grow with the width, for which "
            "--mup-base-hidden-size has no factor; give off or on"
        )
    if m.apply_layernorm_1p and not m.untie_embeddings_and_output_weights and (p.bf16 or p.fp16):
        out.append(
            "--mup-base-hidden-size divides the last norm's weight, of which --apply-layernorm-1p stores the distance "
            "from 1: in 16 bits too coarse; give --no-apply-layernorm-1p or --untie-embeddings-and-output-weights"
        )
    return out
