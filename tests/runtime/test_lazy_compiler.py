"""Functions that torch leaves uncompiled import its compiler only once something else has."""

import subprocess
import sys

import pytest

CODE = """
import sys, torch
from torch import nn
from meshwright.optim import rules

def step(kind):
    w = nn.Parameter(torch.ones(2))
    optimizer = kind([w], lr=0.5, fused=True)
    w.grad = torch.ones(2)
    with torch.no_grad():
        optimizer.step()
    return w.tolist()

mine = [step(rules.AdamW), step(rules.SGD)]
assert "torch._dynamo" not in sys.modules
assert mine == [step(torch.optim.AdamW), step(torch.optim.SGD)]
assert "torch._dynamo" in sys.modules
step(rules.AdamW), step(rules.AdamW)
plain = torch.optim.Optimizer.add_param_group.__wrapped__
assert plain.__dynamo_disable._torchdynamo_disable  # made by torch
"""


@pytest.mark.long
def test_the_compiler_is_imported_by_torch_alone() -> None:
    subprocess.run([sys.executable, "-c", CODE], check=True)
