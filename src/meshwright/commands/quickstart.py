"""`meshwright quickstart FOLDER`: own text to a model that one can talk to, on this machine."""

from __future__ import annotations

import dataclasses
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from meshwright import host
from meshwright.errors import DONE, SIGINT
from meshwright.settings import flags
from meshwright.settings.fields import MISSING, flag
from meshwright.settings.text_inputs import TextInputs

MARK = ".meshwright-quickstart"  # marks a folder as a quickstart's, and holds its progress
# Bytes of text that a second can make use of: of one core, and of an accelerator.
PER_CORE, PER_ACCELERATOR = 32_000, 4_000_000


@dataclass(frozen=True, kw_only=True)
class QuickstartConfig(TextInputs):
    """Settings of `meshwright quickstart`."""

    input: list[str] = flag(
        MISSING,
        "your text: folders, or files of any kind that preprocess reads",
        positional=True,
        value="PATH",
        word="TEXT",
        short="folders, or files of text; - for standard input",
        docs="data evaluation",
    )
    minutes: float = flag(10, "minutes until the model talks, everything included", bound=">0")
    output: Path | None = flag(
        None, "folder for everything that is made (none: the text's name and -model)", docs="tutorial"
    )
    device: str = flag(
        "auto",
        "auto (an accelerator if there is one), cpu, cuda ...",
        value="FORM",
        short="auto, cpu, cuda, npu, xpu, or one, as cuda:1",
    )
    overwrite: bool = flag(False, "start again where a model is already; that one is kept aside")

    def problems(self) -> list[str]:
        return self.input_problems()


ABOUT = "Make a model of your own text on this machine, by commands that are printed, to be learnt and changed."


def main(argv: list[str]) -> int:
    c = flags.parse_settings(QuickstartConfig, argv, "meshwright quickstart", about=ABOUT).config
    # Imported late, for a quick --help.
    from meshwright.checkpoint import owner
    from meshwright.quickstart import folder as folders
    from meshwright.quickstart.collect import InputDocuments
    from meshwright.quickstart.own_text import Deadline, already_done, is_accelerated, make_model
    from meshwright.quickstart.tour import Tour

    deadline = Deadline(c.minutes)
    rate = PER_ACCELERATOR if is_accelerated(c.device) else PER_CORE * min(host.cores(), 8)
    documents = InputDocuments(c, c.minutes * 60 * rate)
    folder = c.output or default_folder(c.input[0])
    folders.claim_folder(folder, MARK, "quickstart")
    progress = folders.TourProgress(folder / MARK, settings(c))
    tour = Tour(folder, "quickstart.log", c.device)
    with owner.lock_folder(folder):
        if c.overwrite or not progress.resume():
            if not c.overwrite:
                folders.require_no_model(folder)
            folders.clear_folder(folder, "quickstart")
        elif "end" in progress.done:
            already_done(tour, progress, documents)
            return DONE
        else:
            print(f"{folder} holds an unfinished quickstart of this text; going on")
        try:
            make_model(tour, documents, progress, deadline)
        except KeyboardInterrupt:
            again = [word for word in argv if word != "--overwrite"]  # which would begin anew
            print(f"\nstopped; to go on:  {shlex.join(['meshwright', 'quickstart', *again])}")
            return SIGINT
    return DONE


def default_folder(text: str) -> Path:
    """Return a name that no shell and no command takes for a pattern or a flag."""
    name = re.sub(r"[*?\[\]]", "", Path(text).resolve().name).strip("-. ")
    return Path(f"{re.split('[.:]', name)[0] or 'text'}-model")


def settings(c: QuickstartConfig) -> dict[str, object]:
    """Return what decides about the result, to be compared with an earlier quickstart's."""
    values = dataclasses.asdict(c)
    del values["overwrite"]
    for name in ("encoding", "on_error", "table"):  # earlier quickstarts did not have them
        if values[name] == getattr(TextInputs, name):
            del values[name]
    return values | {"input": [one if "://" in one else str(Path(one).resolve()) for one in c.input], "output": ""}
