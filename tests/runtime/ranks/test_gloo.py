"""Groups of a layout have one gloo thread, which torch's data race needs two of
(docs/known-issues.md).
"""

import os
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from meshwright.parallel.layout import Layout, connect
from meshwright.runtime.ranks import gloo
from on_ranks import run_ranks


def body(interface):
    if interface:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    layout = connect(Layout(tp=2, rank=dist.get_rank()))
    group = layout.group("tp")
    assert group._get_backend(torch.device("cpu")).options._threads == 1
    x = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(x, group=group)
    assert float(x) == 3


@pytest.mark.parametrize("interface", ["", "lo"])
def test_groups_of_a_layout_have_one_thread(interface):
    run_ranks(body, 2, interface)


@pytest.mark.fault("F17")
def test_the_time_out_is_passed_on():
    store = dist.HashStore()
    made = gloo._create(
        SimpleNamespace(store=store, group_rank=0, group_size=1, timeout=dist.default_pg_timeout),
        None,
    )
    assert made.options._timeout == dist.default_pg_timeout and made.options._threads == 1
