"""The private names of torch that the package uses: each still exists, and no other is used.

After an update of torch, a failure here names what is gone, and the table the file that needs it.
When all tests pass, extend the range: tests/test_torch_range.py lists where it is stated.
"""

from __future__ import annotations

import ast
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

SOURCE = Path(__file__).parents[1] / "src" / "meshwright"
AGENT = "torch.distributed.elastic.agent.server.local_elastic_agent.LocalElasticAgent"

# Found by `used`, which reads imports and attributes of imported modules.
READ = {
    "torch._C": "cuda_graphs: a pool of memory for captured graphs",
    "torch._C._cuda_endAllocateToPool": "",
    "torch._C._cuda_releasePool": "",
    "torch._C._distributed_c10d.PrefixStore": "launch, ranks: the stores of a run without torch.distributed's import",
    "torch._C._distributed_c10d.Store": "",
    "torch._C._distributed_c10d.TCPStore": "",
    "torch._addmm_activation": "kernels/decode: bias and GELU in a product's kernel",
    "torch._dynamo": "model/attention: the limit of recompilations",
    "torch._foreach_copy_": "kernels/fp8, parallel/fsdp: many small tensors at once",
    "torch._foreach_mul_": "",
    "torch._foreach_norm": "",
    "torch._scaled_mm": "kernels/fp8: products of fp8",
    "torch._softmax_backward_data": "kernels/causal: the gradient of a softmax in one pass",
    "torch._utils": "checkpoint/pickle: how torch's pickles name a tensor",
    "torch._utils._rebuild_tensor_v2": "",
    "torch.distributed._functional_collectives": "parallel/comm: collectives that torch.compile can trace",
    "torch.distributed._symmetric_memory": "parallel/agree: memory that ranks map from each other",
    "torch.distributed.ProcessGroupGloo._Options": "ranks/gloo: the number of threads",
    "torch.distributed.distributed_c10d._get_default_store": "parallel/layout: a group that its own ranks alone make",
    "torch.distributed.distributed_c10d._get_default_timeout": "",
    "torch.distributed.distributed_c10d._new_process_group_helper": "",
    "torch.distributed.distributed_c10d._world": "",
    "torch.testing._internal.distributed.fake_pg.FakeStore": "training/before/one_rank: a rank without the others",
    "torch.utils._python_dispatch.TorchDispatchMode": "training/before/memory: the largest tensor of a step",
    "torch.utils._pytree.tree_map_only": "",
    "torch._C._current_autograd_node": "apps/plan/measure: which node of the backward pass runs",
    "torch._C._current_graph_task_id": "apps/plan/measure: whether a backward pass runs",
    "torch.distributed.fsdp._fully_shard._fsdp_collectives": "apps/plan/measure: fully_shard without memory",
    "torch.distributed.fsdp._fully_shard._fsdp_init": "",
    "torch.distributed.fsdp._fully_shard._fsdp_param": "",
    "torch.distributed.fsdp._fully_shard._fsdp_param_group": "",
    "torch.distributed.fsdp._fully_shard._fsdp_state": "",
    "torch.distributed.fsdp._fully_shard._fully_shard": "",
    "torch.ops.aten._safe_softmax": "apps/plan/measure: attention by scores",
    "torch.utils._device": "apps/plan/measure: what makes tensors",
    "torch.utils._device._device_constructors": "",
    "torch.utils._pytree.tree_leaves": "apps/plan/measure: the tensors of an operation",
}
# Reached through objects, so that `used` cannot find them.
REACHED = {
    "torch._disable_dynamo": "lazy_compiler: its attribute __dynamo_disable of a function",
    "torch.distributed._symmetric_memory.enable_symm_mem_for_group": "parallel/agree",
    "torch.distributed._symmetric_memory.empty": "parallel/symmetric_memory",
    "torch.distributed._symmetric_memory.rendezvous": "parallel/symmetric_memory",
    "torch._C._distributed_c10d.Store.clone": "ranks/watchdog: since torch 2.8, but not in torch's type stubs",
    "torch.distributed.ProcessGroupGloo._Options._threads": "ranks/gloo",
    "torch.distributed.ProcessGroupGloo._Options._timeout": "ranks/gloo",
    "torch.distributed.ProcessGroupGloo._Options._devices": "ranks/gloo",
    **{
        f"{AGENT}.{name}": "launch/agent, members"
        for name in (
            "_monitor_workers",
            "_exit_barrier",
            "_shutdown",
            "_assign_worker_ranks",
            "_stop_workers",
        )
    },
}
AGENT_FIELDS = ("_pcontext", "_remaining_restarts", "_worker_group")  # set by its __init__
NEEDS_CUDA = ("torch._C._cuda_",)


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def used(path: Path) -> Iterator[str]:
    """Yield the private names of torch that a file imports or reads from what it imports."""
    nodes = [*ast.walk(ast.parse(path.read_text()))]
    modules: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                modules[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
                yield alias.name
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules |= {
                alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names
            }
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
    inner = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    for node in nodes:
        parts: list[str] = []
        top: ast.expr = (
            node
            if isinstance(node, ast.Attribute) and id(node) not in inner
            else ast.Constant(None)
        )
        while isinstance(top, ast.Attribute):
            parts.insert(0, top.attr)
            top = top.value
        if isinstance(top, ast.Name) and top.id in modules:
            name = modules[top.id]
            for part in parts:  # up to the last private part
                name += f".{part}"
                if part.startswith("_"):
                    yield name


def test_every_private_name_is_listed() -> None:
    found: dict[str, str] = {}
    for path in SOURCE.rglob("*.py"):
        for name in used(path):
            if name.startswith("torch.") and is_private(name):
                found[name] = str(path.relative_to(SOURCE))
    assert {name: path for name, path in found.items() if name not in READ} == {}
    assert set(READ) == set(found)


@pytest.mark.parametrize("name", [*READ, *REACHED])
def test_torch_still_has(name: str) -> None:
    if name.startswith(NEEDS_CUDA) and not torch.backends.cuda.is_built():
        pytest.skip("this torch is built without CUDA")
    pkgutil.resolve_name(name)


def test_torchs_agent_still_sets_its_fields() -> None:
    set_by_init = {
        *LocalElasticAgent.__init__.__code__.co_names,
        *LocalElasticAgent.__base__.__init__.__code__.co_names,
    }
    assert set_by_init >= {*AGENT_FIELDS}
