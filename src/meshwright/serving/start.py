"""Run the server until a signal, or until its decoder fails."""

from __future__ import annotations

import asyncio
import socket

from meshwright import console
from meshwright.errors import DONE
from meshwright.generation.decoder import Decoder
from meshwright.generation.requests import Request
from meshwright.serving.app import TextServer
from meshwright.serving.scheduler import Scheduler
from meshwright.serving.served import ServedModel
from meshwright.settings.schema import Sampling
from meshwright.web.guard import Limits
from meshwright.web.protocol import make_server


def run_server(served: ServedModel, limits: Limits, slots: int, queue: int, listening: socket.socket) -> int:
    """Serve on a listening socket; return the exit status."""
    decoder = Decoder(served.model, slots)
    warm_up(decoder)
    scheduler = Scheduler(decoder, slots, queue, served.model.device)
    http = make_server(TextServer(served, scheduler, limits).app, limits.read_seconds)

    def stop() -> None:
        http.should_exit = True

    async def serve() -> None:
        scheduler.on_break = stop
        scheduler.start()
        try:
            await http.serve([listening])
        finally:
            await asyncio.to_thread(scheduler.close)

    host, port = listening.getsockname()[:2]
    where = f"[{host}]" if ":" in host else host
    console.say(f"serving {served.name}, step {served.model.step}, on http://{where}:{port} (Ctrl-C stops)")
    asyncio.run(serve())
    if scheduler.broken is not None:
        raise scheduler.broken
    console.say("stopped")
    return DONE


def warm_up(decoder: Decoder) -> None:
    """Generate a few tokens: compile kernels, and find damaged weights, before anyone waits."""
    decoder.submit(Request([], Sampling(out_seq_length=4)))
    while decoder.waiting or decoder.active:
        decoder.step()
