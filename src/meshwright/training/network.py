"""Build the network of one rank: the plain model, cut by the layout, with its parameter store."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from meshwright.base import device as devices
from meshwright.base.console import remark
from meshwright.base.errors import UserError
from meshwright.checkpoint.saved_model import GPT_NETWORK
from meshwright.config.check_mup import given_bases
from meshwright.config.problem import SettingsError
from meshwright.config.schema import Optimizer, TrainConfig
from meshwright.model import fp8, pick
from meshwright.model.attention import allow_shapes
from meshwright.model.gpt import GPT, Options, name_of
from meshwright.optim.loss_scale import dtype_of
from meshwright.optim.rule_table import OWN_RATES
from meshwright.parallel import comm, overlap, symmetric_memory
from meshwright.parallel.flat import FlatStore
from meshwright.parallel.layout import MORE_ROOMS, Layout
from meshwright.parallel.pipeline import Pipeline, stages
from meshwright.parallel.store import StoreSpec
from meshwright.parallel.tensor import SampleColumns, shard_layers
from meshwright.runtime.cuda_graphs import CudaGraphs
from meshwright.training import graph_rule
from meshwright.training import graphs as graph
from meshwright.training.micro_step import Loss, Network, checking_logits, make_loss
from meshwright.training.sharded_graphs import ShardedGraphs
from meshwright.training.stage_graphs import StageGraphs

if TYPE_CHECKING:
    from meshwright.parallel.fsdp import FullyShardedStore

Model = Callable[..., nn.Module]  # as GPT: (config.Model, vocab, padded, positions, options=...)


@dataclass(frozen=True)
class Spec:
    """Everything that a rank's network is built from."""

    config: TrainConfig
    layout: Layout
    device: torch.device
    vocab: int
    padded: int  # the vocabulary size of the tables
    model: Model | None = None  # the user's own, instead of GPT
    loss: Loss | None = None  # the user's own, instead of cross entropy
    # Settings under older names, which are saved beside the others.
    switches: Mapping[str, bool] = field(default_factory=dict)

    @property
    def positions(self) -> int:
        positions = self.config.model.max_position_embeddings or self.config.data.seq_length
        assert positions
        return positions

    @property
    def sequence(self) -> bool:
        """Whether sequence parallelism is on."""
        return self.config.parallel.sequence_parallel and self.layout.tp > 1

    @property
    def options(self) -> Options:
        config = self.config
        t = config.training
        if self.model is not None and t.fused_kernels == "auto":
            t = replace(t, fused_kernels="off")  # they compute our own blocks only
        options = pick.options(t, config.model, config.precision, self.device)
        # With fp8, each product would end a compiled graph.
        return replace(options, compiled=False) if config.precision.fp8_format else options


def build_network(
    spec: Spec, report_parameters: Callable[[int], None] = lambda number: None
) -> Network:
    """Build the model on the meta device, cut it to this rank's part, allocate and compile it.

    Call `report_parameters` with the number of this rank's parameters before they are allocated.
    """
    config, layout, device, options = spec.config, spec.layout, spec.device, spec.options
    m, p, o = config.model, config.parallel, config.optimizer

    # Connect the groups of ranks by a first collective; refuse what this model cannot have.
    comm.open_all(layout, device, () if o.optimizer == "muon" else ("matrices",))
    require_own_model(spec)
    fp8.require_fp8(config.precision, device)

    # Build the model on the meta device, where tensors have shapes but no memory.
    columns = SampleColumns()
    parts, heads, name, execution = build_parts(spec, options, columns)
    names = {n: x for part in parts for n, x in part.named_parameters()}
    report_parameters(sum(x.numel() for x in names.values()))
    if o.optimizer == "muon" and not any(n.startswith("h.") for n in names):
        layers = "the matrices of layers named h.*, but this model has none"
        raise SettingsError(f"{{optimizer=muon}} updates {layers}; choose another {{optimizer}}")
    if spec.model:
        require_rated_tables(o, names.keys())

    # Build the store, which allocates weights, gradients and optimizer state.
    dtype = dtype_of(config.precision)
    store_spec = StoreSpec(
        optimizer=o,
        dtype=dtype,
        device=device,
        vocab=spec.vocab,
        offload=p.offloads,
        layout=layout,
        zero=p.zero_stage,
        sequence_parallel=spec.sequence,
        tied=layout.pp > 1 and not m.untie_embeddings_and_output_weights,
        mapper=sums_by_copies(config, layout, device),
        model=m if spec.model is None else None,
    )
    is_sharded = p.zero_stage == 3 and layout.group("shard") is not None
    without = graph_rule.reason_against(config, device.type, bool(spec.model or spec.loss))
    stream = None if without else devices.new_stream(device)
    with devices.on_stream(stream):  # autograd adds up gradients on the parameters' own stream
        devices.reserve_workspaces(device, dtype)
        store = new_store(parts, store_spec, is_sharded)
        store.set_scales(fp8.attach_fp8(parts, config.precision, device))
    if len(config.sample_lengths) > 1:
        allow_shapes(len(config.sample_lengths))
    if options.compiled:
        for part in parts:
            pick.compile_blocks(part)

    # Make the loss, and the graphs that will record steps with it.
    loss, terms = make_loss(spec.vocab, layout, spec.loss, config.training.z_loss_coef)
    if spec.model is not None:
        loss = checking_logits(loss, spec.vocab)
    graphs = None
    if without is None:
        needs_room = config.training.cuda_graphs == "auto"
        kind = StageGraphs if layout.pp > 1 else ShardedGraphs if is_sharded else graph.Graphs
        width = config.sample_lengths[-1] // layout.cp
        graphs = kind(CudaGraphs(device), parts, store, needs_room, 2 + len(terms), width)
    return Network(
        parts=parts,
        store=store,
        loss=loss,
        terms=terms,
        device=device,
        layout=layout,
        sequence=spec.sequence,
        heads=heads,
        columns=columns,
        pipeline=open_pipeline(spec, parts) if layout.pp > 1 else None,
        name=name,
        execution=execution,
        is_compiled=options.compiled,
        stream=stream,
        graphs=graphs,
        without_graphs=without,
    )


def open_pipeline(spec: Spec, parts: list[Any]) -> Pipeline:
    p, dtype = spec.config.parallel, dtype_of(spec.config.precision)
    # Stages send the residual stream in the format that it has within them.
    sent = torch.float32 if spec.options.fp32_residual and dtype is not torch.float64 else dtype
    hidden = spec.config.model.hidden_size or 0
    pipeline = Pipeline(spec.layout, p.pipeline_schedule, parts, hidden, spec.sequence, sent)
    pipeline.open(spec.device)
    return pipeline


def new_store(parts: list[Any], spec: StoreSpec, is_sharded: bool) -> FlatStore | FullyShardedStore:
    if not is_sharded:
        return FlatStore(parts, spec)
    from meshwright.parallel.fsdp import FullyShardedStore

    return FullyShardedStore(parts, spec)


def build_parts(
    spec: Spec, options: Options, columns: SampleColumns
) -> tuple[list[Any], range | None, str, str]:
    """Return this rank's parts of the model, its attention heads, the model's name and execution.

    Heads that are None are all of the model's. The execution is a description for the log.
    """
    config, layout, m = spec.config, spec.layout, spec.config.model
    sizes = spec.vocab, spec.padded, spec.positions
    # A custom model is not cut: every rank has all of it.
    if spec.model is not None:
        with torch.device("meta"):
            custom = spec.model(m, *sizes, options=options)
        if not isinstance(custom, torch.nn.Module):
            kind = type(custom).__name__
            raise UserError(f"model() returned an object of type {kind}; return an nn.Module")
        refuse_what_is_not_saved(custom)
        name = name_of(custom)
        way = "compiled" if options.compiled else "plain"
        return [custom], None, name, f"{way} {name}, a custom model"

    # Ours has blocks of the class that runs best here, and its layers are divided into stages.
    with torch.device("meta"):
        block, execution = pick.pick(m, spec.device, options)

        def make() -> GPT:
            return GPT(m, *sizes, block, options)

        parts = stages(make, config.stages, layout)

    # Tensor parallelism replaces tables and matrices by this rank's shares of them.
    heads = None
    by_rows = matmuls_by_rows(spec) if spec.sequence else None
    with torch.device("meta"):
        for part in parts:
            heads = shard_layers(part, layout, by_rows, columns)
    # The name is the same for all classes of blocks, because they compute the same.
    return list(parts), heads, GPT_NETWORK, execution


def matmuls_by_rows(spec: Spec) -> overlap.PlainMatmuls:
    """Choose whether sequence parallelism overlaps products with copies, and log the choice."""
    config, layout, group = spec.config, spec.layout, spec.layout.group("tp")
    assert group is not None
    # The bytes of the rows that a rank holds between products and that the others copy.
    tokens = config.micro_batch * (config.data.seq_length or 0) // (layout.cp * layout.tp)
    room = tokens * (config.model.hidden_size or 0) * dtype_of(config.precision).itemsize
    unworthy = "compiled layers would be cut at each product" if spec.options.compiled else ""
    chosen, reason = overlap.choose_matmuls(
        config.parallel.tp_overlap, group, spec.device, room, unworthy
    )
    if not reason:
        size = room * (layout.tp + MORE_ROOMS) / 2**20
        remark(
            f" > tensor parallelism: products overlap the copies of rows ({size:.0f} MiB are mapped)"
        )
    elif devices.is_accelerator(spec.device):
        remark(f" > tensor parallelism: collectives before and after products, because {reason}")
    return chosen


def sums_by_copies(
    config: TrainConfig, layout: Layout, device: torch.device
) -> symmetric_memory.BufferMapper | None:
    """Choose whether data-parallel ranks sum gradients by copies, and log the choice.

    None stands for collectives.
    """
    wanted, zero = config.parallel.data_parallel_sums, config.parallel.zero_stage
    # From ZeRO 2 on a rank keeps only its share of the gradients: others find none to fetch.
    if zero > 1 and layout.group("shard") is not None:
        if wanted == "copies":
            raise SettingsError(
                f"{{data_parallel_sums=copies}} is for ZeRO 0 and 1, not {zero}; leave it out"
            )
        return None
    chosen, reason = symmetric_memory.choose_mapper(
        wanted, layout.group("shard" if zero else "gradients"), device
    )
    if chosen is not None:
        remark(" > data parallelism: copy engines fetch gradients from the other ranks' memory")
    elif reason and devices.is_accelerator(device):
        remark(f" > data parallelism: collectives, because {reason}")
    return chosen


def require_rated_tables(o: Optimizer, names: Set[str]) -> None:
    """Refuse a learning rate for tables that a custom model lacks."""
    for setting in sorted(set(OWN_RATES.values())):
        tables = [table for table, own in OWN_RATES.items() if own == setting]
        if getattr(o, setting) is not None and names.isdisjoint(tables):
            raise SettingsError(
                f"{{{setting}}} is for {' and '.join(tables)}, which this model lacks; leave it out"
            )


def require_own_model(spec: Spec) -> None:
    """Refuse settings that a custom model or loss cannot have."""
    config, p = spec.config, spec.config.parallel
    if not (spec.model or spec.loss):
        return
    if p.model_ranks > 1:
        raise UserError(
            f"a custom model or loss can only be trained with data parallelism, not cut over {p.model_ranks} ranks; "
            "set the tensor, pipeline and context sizes to 1"
        )
    if spec.model and p.zero_stage > 1:
        raise SettingsError(
            f"ZeRO {p.zero_stage} with a custom model: only {{zero_stage=0}} and 1 handle parameters that the loss "
            "does not depend on; choose one of these"
        )
    if spec.loss and config.training.z_loss_coef:
        raise SettingsError(
            "{z_loss_coef} is a term of our own loss, and this one is custom; add the term there"
        )
    # Only our own layers implement these.
    settings = {"{fp8_format}": bool(config.precision.fp8_format)}
    settings |= {"{fused_kernels=on}": config.training.fused_kernels == "on"}
    settings |= {f"{{{name}}}": True for name in given_bases(config.model)}
    for setting, is_given in settings.items():
        if spec.model and is_given:
            raise SettingsError(
                f"{setting} is for the layers of our own models, and this one is custom; leave it out"
            )


def refuse_what_is_not_saved(model: nn.Module) -> None:
    """Refuse a custom model that holds more than trained parameters, which are all we save."""
    if next(model.parameters(), None) is None:
        raise UserError("the model has no parameters, so nothing can be trained; give it some")
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    if frozen:
        names = ", ".join(frozen[:5])
        raise UserError(
            f"the model has parameters without requires_grad: {names}; every parameter must be trained"
        )
    drops = [
        name
        for name, m in model.named_modules()
        if "Dropout" in type(m).__name__ and getattr(m, "p", False)
    ]
    if drops:
        why = "whose dropout depends on a generator's state and would not resume exactly"
        raise UserError(
            f"the model has {', '.join(drops[:5])}, {why}; use model.gpt.join or kernels.dropout"
        )
    buffers = [name for name, _ in model.named_buffers()]
    known = dict(model.named_parameters())
    twice = [
        name for name, _ in model.named_parameters(remove_duplicate=False) if name not in known
    ]
    if buffers or twice:
        kind = "buffers" if buffers else "parameters with two names"
        advice = (
            "compute constants in forward" if buffers else "refer to the one parameter in forward"
        )
        raise UserError(f"the model has {kind}: {', '.join((buffers or twice)[:5])}; {advice}")
