"""Training steps of other programs on our models: transformers, megatron-core, and a plain GPT.

python -m meshwright.apps.bench.programs REQUEST FILE writes a line of JSON for each micro-batch
that it tries, then one for more steps of the fastest. A step is forward, backward, clipping and
fused AdamW on random tokens that are already on the device; its loss is read, as a log would.

transformers trains float32 weights under bfloat16 autocast with SDPA, as its Trainer does.
megatron-core is its GPTModel of local layers with bfloat16 weights, float32 gradients and its
distributed optimizer. Neither Transformer Engine nor apex is needed; torch does what they would:
attention is SDPA, AdamW is torch's fused one, norm and scaling of gradients are foreach kernels.
plain.py has the plain GPT, which takes the row's own micro-batches.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.apps.bench.plain import compiled, precision
from meshwright.base import device as devices
from meshwright.base.errors import UserError
from meshwright.config import flags
from meshwright.config.fields import spelling
from meshwright.config.problem import SettingsError
from meshwright.config.schema import Model, TrainConfig, options_of
from meshwright.model.counts import padded_size
from meshwright.runtime.ranks.orphans import die_with_launcher

PeerStep = Callable[[Tensor], Tensor]  # tokens [micro, seq + 1] -> loss
TRIAL_STEPS = 5  # steps of each micro-batch, the first two not counted


def main(request: dict[str, Any], path: Path) -> None:
    config = flags.parse_settings(
        TrainConfig, [*request["flags"], "--mock-data", "--train-iters=1000"], "peer"
    ).config
    # Our flags describe the model; the other program is given its shape.
    device = devices.open_device(config.parallel.device)
    build, package = PROGRAMS[request["program"]]
    ids = config.tokenizer.vocab_size
    assert ids
    step = build(
        config, padded_size(ids, config.model.make_vocab_size_divisible_by, 1, None), device
    )
    trial = Trial(step, config.data.seq_length or 0, ids, device)
    about = {"version": version(package)}
    speeds: dict[int, float] = {}
    with path.open("w", buffering=1) as file:
        for micro in request["micros"]:
            speeds[micro] = trial.speed(micro, TRIAL_STEPS)
            row = about | {"micro": micro, "tokens_per_second": speeds[micro]}
            file.write(json.dumps({"event": "tried"} | row) + "\n")
        # The fastest micro-batch once more, for as many steps as our own row has.
        best = max(speeds, key=lambda micro: speeds[micro])
        if speeds[best]:
            if device.type != "cpu":
                devices.reset_memory(device)
            row = about | {"micro": best, "tokens_per_second": trial.speed(best, request["steps"])}
            row |= {"peak_bytes": devices.peak_memory(device), "losses": trial.losses}
            file.write(json.dumps({"event": "done"} | row) + "\n")


class Trial:
    """Steps of one program, with micro-batches of any size."""

    def __init__(self, step: PeerStep, length: int, ids: int, device: torch.device) -> None:
        self.step = step
        self.length = length
        self.ids = ids
        self.device = device
        self.losses: list[float] = []

    def speed(self, micro: int, steps: int) -> float:
        """Return the median tokens/s after the first third; 0 if the memory is not enough."""
        batches = torch.randint(self.ids, (4, micro, self.length + 1), device=self.device)
        seconds = list[float]()
        self.losses = []
        try:
            for n in range(steps):
                began = time.perf_counter()
                self.losses.append(self.step(batches[n % 4]).item())
                devices.synchronize(self.device)
                seconds.append(time.perf_counter() - began)
        except Exception as error:
            if not devices.is_out_of_memory(error):
                raise
            return 0.0
        finally:
            del batches
            # What a failed micro-batch has left would make the next one fail too.
            gc.collect()
            if self.device.type != "cpu":
                torch.accelerator.empty_cache()
        return micro * self.length / statistics.median(seconds[-(-steps // 3) :])


# Options that decide which network of transformers is compared, or change no time of a step.
COMPARED = {
    "layernorm_bias",
    "qk_layernorm",
    "use_parallel_residual",
    "final_logit_softcapping",
    "rope_scaling",
}


def transformers_network(m: Model, length: int, padded: int) -> nn.Module:
    """Return GPT2LMHeadModel or LlamaForCausalLM with the shape and dropout of a model of ours."""
    hf: Any = importlib.import_module("transformers")
    if m.windowed_layers:
        raise SettingsError(
            "transformers is not compared on a network with windows; leave {window_size} out"
        )
    if others := [name for name in options_of(m) if name not in COMPARED]:
        listed = ", ".join(map(spelling, others))
        raise UserError(f"transformers is not compared on a network with {listed}")
    common: dict[str, Any] = {
        "vocab_size": padded,
        "attn_implementation": "sdpa",
        "use_cache": False,
        "tie_word_embeddings": not m.untie_embeddings_and_output_weights,
    }
    kind = (
        m.position,
        (m.normalization, m.norm_bias, m.qk_layernorm),
        m.activation,
        m.add_bias_linear,
        m.final_logit_softcapping,
        m.use_parallel_residual,
    )
    # The two networks of transformers that have our shapes; another would not be a comparison.
    if kind == ("learned", ("LayerNorm", True, False), "gelu-tanh", True, 0.0, False):
        gpt2 = hf.GPT2Config(
            **common,
            n_embd=m.hidden_size,
            n_layer=m.num_layers,
            n_head=m.num_attention_heads,
            n_inner=m.ffn,
            n_positions=length,
            resid_pdrop=m.hidden_dropout,
            embd_pdrop=m.hidden_dropout,
            attn_pdrop=m.attention_dropout,
            loss_type="ForCausalLM",
        )
        return hf.GPT2LMHeadModel(gpt2)  # type: ignore[no-any-return]
    if kind == ("rope", ("RMSNorm", False, False), "swiglu", False, 0.0, False):
        llama = hf.LlamaConfig(
            **common,
            hidden_size=m.hidden_size,
            num_hidden_layers=m.num_layers,
            intermediate_size=m.ffn,
            num_attention_heads=m.num_attention_heads,
            num_key_value_heads=m.groups,
            head_dim=m.head_dim,
            max_position_embeddings=length,
        )
        return hf.LlamaForCausalLM(llama)  # type: ignore[no-any-return]
    raise UserError(f"transformers is not compared on this network: {kind}")


def decay_groups(network: nn.Module, decay: float) -> list[dict[str, Any]]:
    """Return all parameters in two groups: matrices, and vectors, which do not decay."""
    matrices = [p for p in network.parameters() if p.dim() > 1]
    vectors = [p for p in network.parameters() if p.dim() <= 1]
    return [
        {"params": matrices, "weight_decay": decay},
        {"params": vectors, "weight_decay": 0.0},
    ]


def transformers(
    config: TrainConfig, padded: int, device: torch.device, compiled: bool = False
) -> PeerStep:
    o = config.optimizer
    length = config.data.seq_length or 0
    with device:
        network = transformers_network(config.model, length, padded).train()
    groups = decay_groups(network, o.weight_decay)
    optimizer = torch.optim.AdamW(
        groups, lr=o.lr or 1e-4, betas=(o.adam_beta1, o.adam_beta2), fused=True
    )
    # Shapes stay the same, so no symbolic ones are compiled.
    run = torch.compile(network, dynamic=False) if compiled else network
    is_bf16 = device.type != "cpu"

    def step(tokens: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        ids = tokens[:, :-1].contiguous()
        with torch.autocast(device.type, torch.bfloat16) if is_bf16 else contextlib.nullcontext():
            loss: Tensor = run(input_ids=ids, labels=ids).loss
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0, foreach=True)
        optimizer.step()
        return loss.detach()

    return step


def plain_gpt(config: TrainConfig, padded: int, device: torch.device) -> PeerStep:
    """Return a step of the plain GPT, which accumulates the micro-batches of the flags."""
    m, o = config.model, config.optimizer
    if m.position != "learned" or m.activation != "gelu-tanh" or options_of(m):
        raise UserError("the plain GPT is compared on GPT-2's network only")
    recomputes = config.training.recompute_granularity == "full"
    with device:
        network, run = compiled(m, config.data.seq_length or 0, padded, recomputes)
    optimizer = torch.optim.AdamW(
        decay_groups(network, o.weight_decay), lr=o.lr or 1e-4, fused=True
    )

    def step(tokens: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        parts = tokens.split(config.micro_batch)  # type: ignore[no-untyped-call]
        total = torch.zeros((), device=device)
        for part in parts:
            with precision(device):
                loss = run(part[:, :-1].contiguous(), part[:, 1:].contiguous()) / len(parts)
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0, foreach=True)
        optimizer.step()
        return total

    return step


def megatron_settings(m: Model, dtype: torch.dtype) -> dict[str, Any]:
    """Return the settings of TransformerConfig that hold on one GPU and on several."""
    return dict(
        num_layers=m.num_layers,
        hidden_size=m.hidden_size,
        num_attention_heads=m.num_attention_heads,
        ffn_hidden_size=m.ffn,
        hidden_dropout=m.hidden_dropout,
        attention_dropout=m.attention_dropout,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bias_activation_fusion=True,
        bias_dropout_fusion=True,
        masked_softmax_fusion=False,
        attention_softmax_in_fp32=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        cross_entropy_loss_fusion=True,
        cross_entropy_fusion_impl="native",
    )


def megatron_optimizer_settings(dtype: torch.dtype) -> dict[str, Any]:
    return dict(
        optimizer="adam",
        lr=1e-4,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=True,
        clip_grad=1.0,
        weight_decay=0.1,
        adam_beta1=0.9,
        adam_beta2=0.95,
    )


def megatron_layers() -> Any:
    """Return megatron-core's local layers with SDPA as their attention."""
    specs: Any = importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
    spec = specs.get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.core_attention = attention_by_torch()
    return spec


def use_torch_in_megatron(optimizer: Any) -> None:
    """Replace megatron-core's loops over gradients, then its optimizer's loop over parameters."""
    clip: Any = importlib.import_module("megatron.core.optimizer.clip_grads")
    clip.l2_norm_impl = foreach_norm
    clip.multi_tensor_scale_impl = foreach_scale
    # megatron-core chains optimizers where some parameters are updated apart.
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for group in part.optimizer.param_groups:
            group |= {"fused": True, "foreach": False}


def megatron(config: TrainConfig, padded: int, device: torch.device) -> PeerStep:
    core: Any = importlib.import_module("megatron.core")
    ddp: Any = importlib.import_module("megatron.core.distributed")
    optim: Any = importlib.import_module("megatron.core.optimizer")
    gpt: Any = importlib.import_module("megatron.core.models.gpt")
    module: Any = importlib.import_module("megatron.core.transformer.module")
    transformer: Any = importlib.import_module("megatron.core.transformer.transformer_config")
    m = config.model
    length = config.data.seq_length or 0
    kind = (m.position, m.norm_bias, m.activation, m.add_bias_linear, m.use_parallel_residual)
    if kind != ("learned", True, "gelu-tanh", True, False) or m.windowed_layers:
        raise UserError("megatron-core is compared on GPT-2's network only")

    # A world of one rank, which megatron-core needs.
    is_cpu = device.type == "cpu"
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]  # of this process alone
    torch.distributed.init_process_group(
        "gloo" if is_cpu else "nccl", store=store, rank=0, world_size=1
    )
    core.parallel_state.initialize_model_parallel(1, 1, create_gloo_process_groups=False)
    if not is_cpu:
        core.tensor_parallel.model_parallel_cuda_manual_seed(123)

    # Its network, and around it bf16, its flat buffers and its optimizer.
    dtype = torch.bfloat16
    settings = transformer.TransformerConfig(
        **megatron_settings(m, dtype), use_cpu_initialization=is_cpu
    )
    more = dict(
        position_embedding_type="learned_absolute", share_embeddings_and_output_weights=True
    )
    network = gpt.GPTModel(
        settings, megatron_layers(), vocab_size=padded, max_sequence_length=length, **more
    )
    # bf16 weights first, then buffers of float32 gradients around them, as its training does.
    network = module.Float16Module(settings, network.to(device)).train()
    of_data = ddp.DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=True
    )
    network = ddp.DistributedDataParallel(settings, of_data, network)
    of_optimizer = optim.OptimizerConfig(**megatron_optimizer_settings(dtype))
    optimizer = optim.get_megatron_optimizer(of_optimizer, [network], use_gloo_process_groups=False)
    use_torch_in_megatron(optimizer)
    positions = torch.arange(length, device=device)

    def step(tokens: Tensor) -> Tensor:
        network.zero_grad_buffer()
        optimizer.zero_grad()
        batch_positions = positions.expand(len(tokens), -1)
        # Labels are the tokens that follow; megatron-core returns the loss of each.
        losses = network(
            tokens[:, :-1].contiguous(), batch_positions, None, labels=tokens[:, 1:].contiguous()
        )
        loss: Tensor = losses.float().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        ddp.finalize_model_grads([network], None)
        optimizer.step()
        return loss.detach()

    return step


def attention_by_torch() -> type:
    module: Any = importlib.import_module("megatron.core.transformer.module")

    class TorchAttention(module.MegatronModule):  # type: ignore[misc]
        """Causal attention of [sequence, batch, heads, columns] with dropout, by SDPA."""

        def __init__(self, config: Any, *unused: Any, **more: Any) -> None:
            super().__init__(config=config)
            self.p = config.attention_dropout

        def forward(
            self, query: Tensor, key: Tensor, value: Tensor, *unused: Any, **more: Any
        ) -> Tensor:
            s, b, heads, size = query.shape
            # SDPA wants [batch, heads, sequence, columns].
            q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
            y = F.scaled_dot_product_attention(
                q, k, v, dropout_p=self.p if self.training else 0.0, is_causal=True
            )
            return y.permute(2, 0, 1, 3).reshape(s, b, heads * size)

    return TorchAttention


def foreach_norm(
    chunk: int, flag: Tensor, lists: list[list[Tensor]], per_tensor: bool
) -> tuple[Tensor, None]:
    """Take the place of megatron-core's loop, which waits for the device at each tensor."""
    # Its caller takes (norm, norms of each tensor) and uses the first.
    return torch.stack(torch._foreach_norm(lists[0])).norm()[None], None


def foreach_scale(chunk: int, flag: Tensor, lists: list[list[Tensor]], scale: float) -> None:
    torch._foreach_mul_(lists[1], scale)  # the same tensors as lists[0]


PROGRAMS: dict[str, tuple[Callable[[TrainConfig, int, torch.device], PeerStep], str]] = {
    "plain-compiled": (plain_gpt, "torch"),
    "transformers": (transformers, "transformers"),
    "transformers-compiled": (functools.partial(transformers, compiled=True), "transformers"),
    "megatron-core": (megatron, "megatron-core"),
}


if __name__ == "__main__":
    die_with_launcher()
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
