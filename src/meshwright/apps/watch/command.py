"""`meshwright watch DIR ...`: the page of runs that go on, live in a browser."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from meshwright.base.errors import DONE, UNAVAILABLE, UserError
from meshwright.base.hints import near_path
from meshwright.base.storage.addresses import address_of, as_typed, is_address
from meshwright.config import flags
from meshwright.config.fields import MISSING, flag
from meshwright.config.problem import Problem, plain, stated

PORT = 6400
FETCH_SECONDS = 20.0  # between looks into object storage
ADVICE = "; give the folder of a run, or one below which runs begin later"


@dataclass(frozen=True)
class WatchConfig:
    """Settings of `meshwright watch`."""

    folders: list[Path] = flag(
        MISSING,
        "run folder, --run-dir or --save of a training; or a folder below which runs are, or begin later",
        positional=True,
        remote=True,
        word="DIR",
    )
    port: int = flag(PORT, "port of the page on this machine (0: any free one)", bound=">=0")

    def problems(self) -> list[Problem]:
        local = [f for f in self.folders if not is_address(as_typed(f))]
        texts = [f"{f} is a file; give the folder of a run" for f in local if f.is_file()]
        texts += [
            f"{f} does not exist{near_path(str(f)) or ADVICE}" for f in local if not f.exists()
        ]
        out = [Problem(("folders",), plain(text)) for text in texts]
        if self.port > 65535:
            out.append(Problem(("port",), f"{stated(self, 'port')} must be at most 65535"))
        return out


def main(argv: list[str]) -> int:
    about = "Show runs in a browser while they go on: curves, samples and scores, several runs over each other."
    c = flags.parse_settings(WatchConfig, argv, "meshwright watch", about=about).config
    try:
        from meshwright.apps.watch.app import serve_page
    except ModuleNotFoundError as error:
        # Packages of the extra `serve`; another missing module is a mistake of ours.
        if error.name is None or error.name.split(".")[0] not in ("starlette", "uvicorn", "h11"):
            raise
        hint = "install it with pip install 'meshwright[serve]'"
        raise UserError(f"watch needs {error.name}: {hint}", UNAVAILABLE) from None
    from meshwright.apps.watch.overview import Watcher

    def show(port: int) -> None:
        print(f"http://localhost:{port}/", flush=True)
        print(
            f"from another machine: ssh -L {port}:localhost:{port} HOST; Ctrl-C ends the page, not the runs",
            flush=True,
        )

    with fetching([folder for folder in c.folders if address_of(folder)]):
        serve_page(Watcher(c.folders), c.port, show)
    return DONE


@contextlib.contextmanager
def fetching(folders: list[Path]) -> Iterator[None]:
    """Bring here what runs in object storage say of themselves, now and every FETCH_SECONDS."""
    from meshwright.checkpoint import lease, mirror

    # The first look is waited for, so that the page has something to show.
    for folder in folders:
        mirror.fetch_runs(folder)
    ended = threading.Event()

    def go_on() -> None:
        while folders and not ended.wait(FETCH_SECONDS):
            for folder in folders:
                # A look that fails is made again; the page shows what is here.
                with lease.noting_failure():
                    mirror.fetch_runs(folder)

    threading.Thread(target=go_on, daemon=True).start()
    try:
        yield
    finally:
        ended.set()
