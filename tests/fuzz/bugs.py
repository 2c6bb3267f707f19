"""Defects of kinds that frameworks have had, seeded to prove that the fuzz finds them.

Each replaces a method within the ranks of a layout; the run in one process stays as it is. Those in
SHARED are in that run too, as in code that all layouts share: only the independent trainer differs.
Those in ON_GPU are of CUDA graphs and need a GPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from meshwright.optim.loss_scale import LossScale
from meshwright.optim.schedule import Schedule


def missing_reduction() -> AbstractContextManager[Any]:
    """With ZeRO 1 or 2 and several copies of the shards, gradients are not summed over these."""
    from meshwright.parallel import comm
    from meshwright.parallel.flat import FlatStore

    plain = FlatStore.finish_sums

    def finish_sums(store: Any) -> None:
        skipped = store.layout.group("replicas")
        total = comm.total
        with mock.patch.object(
            comm, "total", lambda x, group: x if group is skipped else total(x, group)
        ):
            plain(store)

    return mock.patch.object(FlatStore, "finish_sums", finish_sums)


def wrong_dropout_offset() -> AbstractContextManager[Any]:
    """With sequence parallelism, every tensor rank draws the dropout of the first rank's rows."""
    from meshwright.training.micro_step import Network

    plain = Network.stream_of

    def stream_of(net: Any, b: Any, samples: Any, first: int) -> Any:
        at = plain(net, b, samples, first)
        if samples is None:
            return at
        rows = b.tokens.numel() // net.layout.tp
        return dataclasses.replace(
            at, samples=samples.repeat_interleave(b.tokens.shape[1])[:rows][None]
        )

    return mock.patch.object(Network, "stream_of", stream_of)


def double_counted_tied_gradient() -> AbstractContextManager[Any]:
    """The table that the first and the last stage share gets its gradient twice."""
    from meshwright.parallel.flat import FlatStore

    plain = FlatStore.finish_sums

    def finish_sums(store: Any) -> None:
        plain(store)
        if store.sharding.tied and "wte" in store.buckets:
            bucket = store.buckets["wte"]
            _, begin = store.part_offsets(bucket)
            store.share[begin : begin + bucket.size // store.shard_count] *= 2

    return mock.patch.object(FlatStore, "finish_sums", finish_sums)


def rounded_masters() -> AbstractContextManager[Any]:
    """With ZeRO 1 or 2 over more than two ranks, masters keep only the bits of 16-bit weights."""
    from meshwright.parallel.flat import FlatStore

    plain = FlatStore.step

    def step(store: Any, *arguments: Any) -> Any:
        norm = plain(store, *arguments)
        if store.shard_count > 2 and store.dtype.itemsize == 2:
            store.master.copy_(store.master.to(store.dtype))
        return norm

    return mock.patch.object(FlatStore, "step", step)


def stale_scaler() -> AbstractContextManager[Any]:
    """A resumed fp16 run begins with the initial loss scale."""
    return mock.patch.object(LossScale, "load", lambda scaler, state: None)


def shifted_data() -> AbstractContextManager[Any]:
    """A resumed run reads from one sample too far on."""
    from meshwright.training.loop import Trainer

    plain = Trainer.next_batch

    def next_batch(trainer: Any) -> Any:
        if trainer.feed.train_steps is None and trainer.state.has_loaded:
            trainer.feed.next(
                trainer.progress.consumed_train_samples + 1, trainer.progress.iteration
            )
        return plain(trainer)

    return mock.patch.object(Trainer, "next_batch", next_batch)


def decayed_vectors() -> AbstractContextManager[Any]:
    """Biases and norms decay like matrices."""
    from meshwright.optim import rules

    plain = rules.param_group
    return mock.patch.object(rules, "param_group", lambda *which: plain(*which)._replace(decay=1.0))


def schedule_ahead() -> AbstractContextManager[Any]:
    """The learning rate is that of the next sample."""
    plain = Schedule.lr
    return mock.patch.object(Schedule, "lr", lambda schedule, samples: plain(schedule, samples + 1))


def other_order() -> AbstractContextManager[Any]:
    """The order of the samples is drawn from another seed."""
    from meshwright.data import loader

    plain = loader.build_indices

    def build_indices(*arguments: Any) -> Any:
        *before, seed, cutoff, storage = arguments
        return plain(*before, seed + 1, cutoff, storage)

    return mock.patch.object(loader, "build_indices", build_indices)


def moved_casts() -> AbstractContextManager[Any]:
    """After the search for what is not finite, fp8's weights lie where no CUDA graph reads them.

    Release 0.11.0 had it: after a loss that was NaN a run with fp8 and CUDA graphs went on with the
    weights of the wrong step.
    """
    from meshwright.kernels.fp8 import Cast, Scales

    plain = Scales.trial

    @contextlib.contextmanager
    def trial(scales: Any) -> Iterator[None]:
        with plain(scales):
            yield
        for product in scales.products:
            if product.cast is not None:
                product.cast = Cast(*(None if x is None else x.clone() for x in product.cast))

    return mock.patch.object(Scales, "trial", trial)


def repeated_dropout() -> AbstractContextManager[Any]:
    """CUDA graphs draw the dropout of the samples with which they were captured."""
    from meshwright.training import graphs

    plain = graphs.copy_into

    def copy_into(to: Any, batch: Any) -> None:
        plain(to, dataclasses.replace(batch, sample_ids=to.sample_ids))

    return mock.patch.object(graphs, "copy_into", copy_into)


def stale_casts() -> AbstractContextManager[Any]:
    """Products in fp8 go on with the weights with which they began."""
    from meshwright.kernels.fp8 import Fp8Product

    plain = Fp8Product.refresh

    def refresh(product: Any) -> None:
        if product.cast is None:
            plain(product)

    return mock.patch.object(Fp8Product, "refresh", refresh)


ON_GPU = ("moved-casts", "repeated-dropout")
SHARED = ("decayed-vectors", "schedule-ahead", "other-order", "stale-casts")
BUGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "missing-reduction": missing_reduction,
    "wrong-dropout-offset": wrong_dropout_offset,
    "double-counted-tied-gradient": double_counted_tied_gradient,
    "rounded-masters": rounded_masters,
    "stale-scaler": stale_scaler,
    "shifted-data": shifted_data,
    "decayed-vectors": decayed_vectors,
    "schedule-ahead": schedule_ahead,
    "other-order": other_order,
    "stale-casts": stale_casts,
    "moved-casts": moved_casts,
    "repeated-dropout": repeated_dropout,
}
