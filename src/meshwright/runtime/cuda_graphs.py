"""Capture of work in CUDA graphs, for the steps of training and of generation."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable

import torch

from meshwright.base import device as devices
from meshwright.base import host

# of free memory; the rest is for the gaps of the allocator and for other libraries
MEMORY_SHARE = 0.92


class CudaGraphs:
    """torch's CUDA graphs with one pool of memory; capture on a stream other than the default."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pool = torch.cuda.graph_pool_handle()

    def prepare(self) -> None:
        gc.collect()
        devices.synchronize(self.device)
        torch.cuda.empty_cache()

    def has_room(self) -> bool:
        """Compare the free memory with the peak so far.

        A validation cannot use the graphs' memory, and needs at most as much as a step does.
        """
        peak = devices.peak_memory(self.device) or 0
        allocated = torch.cuda.memory_allocated(self.device)
        return 2 * peak - allocated <= MEMORY_SHARE * devices.free_memory(self.device)

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        with host.collector_off():  # it could free an older graph, which a capture does not survive
            # Other threads read files, pin memory and watch over NCCL meanwhile.
            graph.capture_begin(self.pool, capture_error_mode="thread_local")
            try:
                run()
            except BaseException:
                with contextlib.suppress(RuntimeError):
                    self.end(graph)
                # torch may still count the old one as in use
                self.pool = torch.cuda.graph_pool_handle()
                raise
            self.end(graph)
        return graph.replay

    def end(self, graph: torch.cuda.CUDAGraph) -> None:
        try:
            graph.capture_end()
        except RuntimeError:
            with contextlib.suppress(RuntimeError, AttributeError):  # torch has left the pool open
                torch._C._cuda_endAllocateToPool(self.device.index, self.pool)
                torch._C._cuda_releasePool(self.device.index, self.pool)
            with contextlib.suppress(RuntimeError, AttributeError):  # and the generator recording
                generator = torch.cuda.default_generators[self.device.index]
                generator.graphsafe_set_state(generator.clone_state())
            raise

    def discard(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self.prepare()
