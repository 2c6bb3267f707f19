"""Write checkpoints with megatron-core itself, on CPU: a small GPTModel after two steps.

megatron-core was made for GPUs; its calls of CUDA are answered here for the CPU. Beside the
checkpoint each rank saves what it held as `truth_0.pt`: for each parameter the share's place, and
the weights, masters and moments in memory. Tried with megatron-core 0.12.3 (needed for
"fully_sharded_model_space") and 0.16.1 on torch 2.13:

    pip install --no-deps --target PEERS megatron-core==0.16.1
    pip install --no-deps --target PEERS einops ninja packaging

and PEERS on PYTHONPATH.
"""

from __future__ import annotations

import contextlib
import sys
import types
import warnings
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

VOCAB, POSITIONS = 96, 16
SIZES = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4}


class OnCpu(TorchFunctionMode):
    """Make tensors on the CPU that are requested on a GPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


def without_gpu() -> None:
    import numpy
    import packaging
    import torch.distributed.checkpoint.filesystem as filesystem

    kind, write = torch.Tensor.type, filesystem._write_item
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.Tensor.cuda = lambda self, *_, **__: self
    torch.Tensor.type = lambda self, *a: (
        kind(self, *a) if a else "torch.cuda." + kind(self).split(".")[-1]
    )
    # What releases of 2024 and 2025 find changed in other packages:
    numpy.product = numpy.prod
    sys.modules.setdefault("pkg_resources", types.SimpleNamespace(packaging=packaging))  # type: ignore[arg-type]
    form = {"serialization_format": filesystem.SerializationFormat.TORCH_SAVE}
    filesystem._write_item = lambda *a, **k: write(*a, **form | k)
    OnCpu().__enter__()


def body(folder: str, tp: int, pp: int, options: dict[str, Any]) -> None:
    """Run on each rank.

    Options: cfg (of TransformerConfig), tied, rope, bf16, optimizer (None, "whole" or a sharding).
    """
    warnings.simplefilter("ignore")
    without_gpu()
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()  # there is no dropout
    parallel_state.initialize_model_parallel(tp, pp)
    model, config = build(tp, pp, options)
    sharding = options.get("optimizer")
    metadata = (
        {"distrib_optim_sharding_type": sharding} if sharding not in (None, "whole") else None
    )
    logits = model(*inputs(), None).detach() if tp * pp == 1 and not options.get("bf16") else None
    optimizer = trained(model, config, options) if sharding else None
    tree: dict[str, Any] = {"model": model.sharded_state_dict(metadata=metadata)}
    if optimizer is not None:
        fresh = {"model": model.sharded_state_dict(metadata=metadata)}
        how = {"metadata": metadata} if metadata else {}
        try:
            tree["optimizer"] = optimizer.sharded_state_dict(fresh, **how)
        except TypeError:  # until 0.13
            tree["optimizer"] = optimizer.sharded_state_dict(fresh, sharding_type=sharding)
        tree["opt_param_scheduler"] = SCHEDULER
    (Path(folder) / "iter_0000010").mkdir(exist_ok=True)
    dist.barrier()
    truth = {
        "parameters": list(shares(model, optimizer, sharding)),
        "logits": logits,
        "tokens": inputs()[0],
    }
    torch.save(truth, Path(folder) / f"truth_{dist.get_rank()}.pt")
    tree |= {"args": arguments(options), "iteration": 10, "checkpoint_version": 3.0}
    dist_checkpointing.save(tree, f"{folder}/iter_0000010")
    dist.barrier()


SCHEDULER = {
    "max_lr": 1e-3,
    "min_lr": 1e-5,
    "lr_warmup_steps": 16,
    "num_steps": 80,
    "lr_decay_style": "cosine",
}
SCHEDULER |= {
    "lr_decay_steps": 800,
    "start_wd": 0.1,
    "end_wd": 0.1,
    "wd_incr_style": "constant",
    "wd_incr_steps": 800,
}


def arguments(options: dict[str, Any]) -> Namespace:
    cfg = options.get("cfg", {})
    return Namespace(
        **SIZES,
        global_batch_size=8,
        consumed_train_samples=80,
        norm_epsilon=1e-5,
        group_query_attention="num_query_groups" in cfg,
        num_query_groups=cfg.get("num_query_groups", 1),
        swiglu=cfg.get("gated_linear_unit", False),
        padded_vocab_size=VOCAB,
        position_embedding_type="rope" if options.get("rope") else "learned_absolute",
        seq_length=POSITIONS,
        num_experts=None,
        bias_gelu_fusion=True,
    )


def build(tp: int, pp: int, options: dict[str, Any]) -> tuple[Any, Any]:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    half = options.get("bf16", False)
    dtype = torch.bfloat16 if half else torch.float32
    cfg = dict(options.get("cfg", {}))
    if cfg.get("gated_linear_unit"):
        cfg["activation_func"] = torch.nn.functional.silu
    else:
        cfg["activation_func"] = lambda x: torch.nn.functional.gelu(x, approximate="tanh")
    config = TransformerConfig(
        **SIZES,
        **cfg,
        use_cpu_initialization=True,
        bf16=half,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    torch.manual_seed(5)
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization=config.normalization),
        VOCAB,
        POSITIONS,
        parallel_state.is_pipeline_first_stage(),
        parallel_state.is_pipeline_last_stage(),
        parallel_output=False,
        share_embeddings_and_output_weights=options.get("tied", True),
        position_embedding_type="rope" if options.get("rope") else "learned_absolute",
    )
    with torch.no_grad():
        for n, (name, p) in enumerate(model.named_parameters()):
            if p.ndim == 1:  # norms and biases begin alike
                p += 0.1 * torch.randn(
                    p.shape, generator=torch.Generator().manual_seed(n + 50 * int("layers" in name))
                )
    return model.to(dtype), config


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(VOCAB, (2, POSITIONS), generator=torch.Generator().manual_seed(1))
    return tokens, torch.arange(POSITIONS).expand(2, -1)


def trained(model: Any, config: Any, options: dict[str, Any]) -> Any:
    """Return the optimizer after two steps on gradients of noise."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, distrib_optimizer, get_megatron_optimizer

    # asks for Transformer Engine, for no weights at all
    if hasattr(distrib_optimizer, "quantize_param_shard"):
        distrib_optimizer.quantize_param_shard = lambda *_, **__: None
    distributed = options["optimizer"] != "whole"
    wrapped = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(
            use_distributed_optimizer=distributed, bucket_size=options.get("bucket")
        ),
        model,
    )
    adam = {"optimizer": "adam", "lr": 1e-3, "weight_decay": 0.1}
    precision = {
        "bf16": config.bf16,
        "params_dtype": config.params_dtype,
        "use_distributed_optimizer": distributed,
    }
    optimizer = get_megatron_optimizer(OptimizerConfig(**adam, **precision), [wrapped])
    for step in range(2):
        noise = torch.Generator().manual_seed(step)
        for p in model.parameters():
            p.main_grad.copy_(torch.randn(p.main_grad.shape, generator=noise))
        optimizer.step()
    return optimizer


def shares(model: Any, optimizer: Any, sharding: str | None) -> Any:
    """Yield (name with global layer, cut dimension, tensor rank, shape, begin, values)."""
    from megatron.core import parallel_state

    first = model.decoder.layers[0].layer_number - 1
    rank = parallel_state.get_tensor_model_parallel_rank()
    inner = None if optimizer is None else getattr(optimizer, "chained_optimizers", [optimizer])[0]
    for name, p in model.named_parameters():
        # a later stage's copy
        if name == "output_layer.weight" and model.share_embeddings_and_output_weights:
            continue
        if name.startswith("decoder.layers."):
            number, rest = name.removeprefix("decoder.layers.").split(".", 1)
            name = f"decoder.layers.{int(number) + first}.{rest}"
        cut = p.partition_dim if getattr(p, "tensor_model_parallel", False) else None
        values, begin = {"": p.detach().reshape(-1)}, 0
        if inner is not None and sharding == "whole":
            main = getattr(p, "main_param", p)
            values = {"": main.detach().reshape(-1)}
            values |= {
                k: v.reshape(-1) for k, v in inner.optimizer.state[main].items() if k != "step"
            }
        elif inner is not None:
            if p not in inner.model_param_gbuf_map:  # another rank's
                continue
            begin = inner._get_model_param_range_map(p)["param"].start
            group, number = inner.model_param_group_index_map[p]
            main = inner.optimizer.param_groups[group]["params"][number]
            values = {"": main.detach().clone()} | {
                k: v for k, v in inner.optimizer.state[main].items() if k != "step"
            }
        yield name, cut, rank, tuple(p.shape), begin, {k: v.clone() for k, v in values.items()}
