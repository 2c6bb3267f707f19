"""Start a tour in its folder, or take up an earlier one."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from meshwright.apps.quickstart import folder as folders
from meshwright.apps.quickstart.collect import LEAST_BYTES, InputDocuments
from meshwright.apps.quickstart.own_text import (
    Deadline,
    Showing,
    already_done,
    is_accelerated,
    make_model,
    require_parts,
    require_same_text,
    train_longer,
)
from meshwright.apps.quickstart.tour import Tour
from meshwright.base import host
from meshwright.base.console import fit, fitted_output
from meshwright.base.errors import DONE, SIGINT
from meshwright.config.text_inputs import TextInputs

# Bytes of text that a second can make use of: of one core, and of an accelerator.
PER_CORE, PER_ACCELERATOR = 32_000, 4_000_000


@dataclass(frozen=True)
class TourRequest:
    """A tour that a command asks for."""

    name: str  # of the command
    folder: Path
    minutes: float
    device: str
    overwrite: bool
    # All that decides about the result, to be compared with an earlier tour's.
    settings: dict[str, object]
    showing: Showing = Showing()


def open_texts(texts: TextInputs, minutes: float, device: str) -> InputDocuments:
    """Find the text: as much of it as can be used in these minutes."""
    rate = PER_ACCELERATOR if is_accelerated(device) else PER_CORE * min(host.cores(), 8)
    # A sample of less would be refused as too little text, however much there is.
    return InputDocuments(texts, max(minutes * 60 * rate, 10 * LEAST_BYTES))


def start_tour(
    request: TourRequest, documents: InputDocuments, deadline: Deadline, argv: list[str]
) -> int:
    """Make the model, or the rest of an unfinished one; return 130 after Ctrl-C."""
    require_parts()
    folder = request.folder
    name = request.name
    mark = f".meshwright-{name}"  # marks a folder as a tour's, and holds its progress
    progress = folders.TourProgress(folder / mark, request.settings)
    tour = Tour(folder, f"{name}.log", request.device)
    try:
        with fitted_output(), folders.claim_folder(folder, mark, name):
            # Begin anew, take up a finished tour, or go on with an unfinished one.
            if request.overwrite or not progress.resume():
                if not request.overwrite:
                    folders.require_no_model(folder, progress.changes)
                folders.clear_folder(folder, name)
            elif "end" in progress.done:
                require_same_text(tour, progress, documents)
                if not train_longer(tour, progress, deadline):
                    already_done(tour, progress)
                    return DONE
            else:
                print(f"{folder} holds an unfinished {name} of this text; going on")
                train_longer(tour, progress, deadline)
            make_model(tour, documents, progress, deadline, request.showing)
    except KeyboardInterrupt:
        again = [word for word in argv if word != "--overwrite"]  # which would begin anew
        print(fit(f"\nstopped; to go on:  {shlex.join(['meshwright', name, *again])}"), flush=True)
        return SIGINT
    return DONE
