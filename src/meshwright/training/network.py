"""The network as one rank runs it, and what is done with a batch: one update, or a mean loss.

`train_step` is the middle of the way of a batch: data/loader.py reads it from disk, train_step runs it through the model,
parallel/zero.py turns its gradients into new weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.checkpoint.saved_model import GPT_NETWORK
from meshwright.data.loader import Batch
from meshwright.errors import UserError
from meshwright.model import pick
from meshwright.model.attention import Stream, Where
from meshwright.model.gpt import GPT, Options, name_of
from meshwright.model.loss import token_losses
from meshwright.optim.loss_scale import dtype_of
from meshwright.parallel import comm
from meshwright.parallel.layout import Layout
from meshwright.parallel.pipeline import Pipeline, require_tried, stages
from meshwright.parallel.pipeline_schedule import OWN, V_SHAPED
from meshwright.parallel.tensor import joining, spread
from meshwright.parallel.zero import ParameterStore, StoreSpec
from meshwright.parallel.zero3 import FullyShardedStore
from meshwright.settings.schema import Parallel, TrainConfig

Model = Callable[..., nn.Module]  # as GPT: (config.Model, vocab, padded, positions, options=...)
Loss = Callable[[Tensor, Batch], Tensor]  # logits [B, T, vocab] and the batch to losses [B, T]


@dataclass
class Network:
    """`parts`: the whole model, or a pipeline rank's stages of it; `store` holds all their numbers."""

    parts: list[Any]
    store: ParameterStore | FullyShardedStore
    loss: Loss
    device: torch.device
    layout: Layout = Layout()
    sequence: bool = False  # parallelism of the sequence
    heads: range | None = None  # of the model's heads, those computed here
    pipeline: Pipeline | None = None
    name: str = GPT_NETWORK  # kept with a checkpoint: which network its tensors belong to
    why: str = ""  # how it is run, in words

    def train(self, training: bool = True) -> None:
        for part in self.parts:
            part.train(training)

    @property
    def is_counted(self) -> bool:
        """Whether this rank's loss is one of those whose sum is the batch's: the last stage has it, tensor ranks alike."""
        return any(getattr(part, "last", True) for part in self.parts) and not self.layout.at("tp")

    def where(self, b: Batch, seed: int | None) -> Where:
        """Where this rank's part of a micro-batch stands in the run. Without a seed there is no dropout."""
        t, device, layout = b.tokens.shape[1], b.tokens.device, self.layout
        samples = None if seed is None else b.sample_ids
        w = Where(samples, None, seed or 0, b.first_sample, b.position_ids, b.doc_ids, heads=self.heads)
        first = layout.at("cp") * t
        if layout.cp > 1:
            w.columns, w.length = torch.arange(first, first + t, device=device), t * layout.cp
        if self.sequence:
            rows = b.tokens.numel() // layout.tp
            n = torch.arange(layout.at("tp") * rows, (layout.at("tp") + 1) * rows, device=device)
            ids = None if b.position_ids is None else b.position_ids.flatten()[n][None]
            w.stream = Stream(None if samples is None else samples[n // t][None], (first + n % t)[None], ids)
        return w


def build(
    config: TrainConfig,
    layout: Layout,
    device: torch.device,
    vocab: int,
    padded: int,
    positions: int,
    model: Model | None = None,
    loss: Loss | None = None,
    tell: Callable[[int], None] = lambda parameters: None,
) -> Network:
    """The plain model on the meta device, cut to this rank's part, given memory, compiled. `tell` is told its number of
    parameters."""
    m, p, o = config.model, config.parallel, config.optimizer
    if layout.pp > 1:
        require_tried(p.pipeline_schedule, device)
    comm.open_all(layout, device)
    options = pick.options(config.training, m, config.precision, device)
    if layout.pp > 1 and p.pipeline_schedule not in OWN:  # the weights' gradients wait outside of any graph
        options = replace(options, compiled=False)
    sequence = p.sequence_parallel and layout.tp > 1
    if model or loss:
        refuse_to_cut(p, model is not None)
    with torch.device("meta"):
        if model is None:
            parts, heads, why = ours(config, layout, device, vocab, padded, positions, options, sequence)
            name = GPT_NETWORK  # whichever block was picked: they are twins
        else:
            parts, heads = [model(m, vocab, padded, positions, options=options)], None
            name = name_of(parts[0])
            why = f"{'compiled' if options.compiled else 'plain'} {name}, a model of its own"
            refuse_what_is_not_kept(parts[0])
    tied = layout.pp > 1 and not m.untie_embeddings_and_output_weights
    if tied and parts[0].first and parts[-1].last:  # a V-shaped pipeline has both ends of the model on its first rank
        parts[-1].wte = parts[0].wte
    tied = tied and p.pipeline_schedule not in V_SHAPED
    names = {n: x for part in parts for n, x in part.named_parameters()}
    tell(sum(x.numel() for x in names.values()))
    if o.optimizer == "muon" and not any(n.startswith("h.") for n in names):
        raise UserError("--optimizer muon is for the matrices of layers named h.*, of which this model has none")
    dtype = dtype_of(config.precision)
    spec = StoreSpec(o, dtype, device, vocab, p.offloads, layout, p.zero, sequence, tied)
    store: ParameterStore | FullyShardedStore
    if p.zero == 3 and layout.group("shard") is not None:
        store = FullyShardedStore(parts, spec)
    else:
        store = ParameterStore(parts, spec)
    if options.compiled:
        for part in parts:
            pick.compile_blocks(part)
    pipeline, combine = None, joining(layout)
    if layout.pp > 1:
        wide = torch.float32 if options.fp32_residual and dtype is not torch.float64 else dtype
        pipeline = Pipeline(layout, p.pipeline_schedule, parts, m.hidden_size or 0, sequence, wide)
        pipeline.open(device)

    def losses(logits: Tensor, batch: Batch) -> Tensor:
        if loss is not None:
            return of_each_token(loss(logits[..., :vocab], batch), batch)
        return token_losses(logits, batch.labels, vocab, layout.at("tp") * logits.shape[-1], combine)

    return Network(parts, store, losses, device, layout, sequence, heads, pipeline, name, why)


def ours(
    config: TrainConfig,
    layout: Layout,
    device: torch.device,
    vocab: int,
    padded: int,
    positions: int,
    options: Options,
    sequence: bool,
) -> tuple[list[Any], range | None, str]:
    """This rank's parts of a GPT, the heads that it computes, and how it is run."""
    m, heads = config.model, None
    assert config.data.seq_length
    block, why = pick.pick(m, device, options.compiled)
    parts = stages(
        lambda: GPT(m, vocab, padded, positions, block, options),
        config.stages,
        layout,
        config.parallel.pipeline_schedule,
    )
    for part in parts:
        heads = spread(part, layout, sequence, config.data.seq_length // layout.cp)
    return list(parts), heads, why


def of_each_token(losses: Tensor, batch: Batch) -> Tensor:
    """A user's losses, if they are what they must be."""
    if losses.shape != batch.labels.shape:
        raise UserError(
            f"loss returned a tensor of shape {tuple(losses.shape)}: it must be [B, T] = {tuple(batch.labels.shape)}, one "
            "loss for each token, neither summed nor averaged"
        )
    return losses


def refuse_to_cut(p: Parallel, model: bool) -> None:
    """A user's loss, or model."""
    if p.model_ranks > 1:
        raise UserError(
            f"a model or a loss of one's own is trained by data parallelism alone: how it would be cut over {p.model_ranks} "
            "ranks is not known; give tensor, pipeline and context sizes of 1"
        )
    if model and p.zero > 1:
        raise UserError(
            f"ZeRO {p.zero} with a model of one's own: only --zero-stage 0 and 1 wait for parameters that a loss "
            "leaves out"
        )


def refuse_what_is_not_kept(model: nn.Module) -> None:
    """A user's network: what its constructor made beside parameters has no memory and is in no checkpoint."""
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    if frozen:
        raise UserError(
            f"the model has parameters without requires_grad: {', '.join(frozen[:5])}; all that it has is trained"
        )
    drops = [name for name, m in model.named_modules() if "Dropout" in type(m).__name__ and getattr(m, "p", False)]
    if drops:
        raise UserError(
            f"the model has {', '.join(drops[:5])}, whose dropout follows a generator's state and would not continue exactly: "
            "use model.gpt.join, or kernels.dropout"
        )
    buffers = [name for name, _ in model.named_buffers()]
    known = dict(model.named_parameters())
    twice = [name for name, _ in model.named_parameters(remove_duplicate=False) if name not in known]
    if buffers or twice:
        raise UserError(
            f"the model has {'buffers' if buffers else 'parameters of two names'}: {', '.join((buffers or twice)[:5])}; "
            + ("compute constants in forward" if buffers else "refer to the one parameter in forward")
        )
