"""`meshwright quickstart FOLDER`: own text to a model that one can talk to, on this machine."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path

from meshwright.config import flags
from meshwright.config.fields import MISSING, flag
from meshwright.config.problem import Problem
from meshwright.config.text_inputs import TextInputs


@dataclass(frozen=True, kw_only=True)
class QuickstartConfig(TextInputs):
    """Settings of `meshwright quickstart`."""

    input: list[str] = flag(
        MISSING,
        "your text: folders, or files of any kind that preprocess reads",
        positional=True,
        value="PATH",
        word="TEXT",
        docs="data evaluation",
    )
    minutes: float = flag(10, "minutes until the model talks, everything included", bound=">0")
    output: Path | None = flag(
        None,
        "folder for everything that is made (none: the text's name and -model)",
        docs="tutorial",
    )
    device: str = flag("auto", "auto (an accelerator if there is one), cpu, cuda ...", value="FORM")
    overwrite: bool = flag(False, "start again where a model is already; that one is kept aside")

    def problems(self) -> list[Problem]:
        return self.input_problems()


ABOUT = "Make a model of your own text on this machine, by commands that are printed, to be learnt and changed."


def main(argv: list[str]) -> int:
    c = flags.parse_settings(QuickstartConfig, argv, "meshwright quickstart", about=ABOUT).config
    # Imported late, for a quick --help.
    from meshwright.apps.quickstart.own_text import Deadline
    from meshwright.apps.quickstart.start import TourRequest, open_texts, start_tour

    deadline = Deadline(c.minutes)
    documents = open_texts(c, c.minutes, c.device)
    folder = c.output or default_folder(c.input[0])
    request = TourRequest("quickstart", folder, c.minutes, c.device, c.overwrite, settings(c))
    return start_tour(request, documents, deadline, argv)


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
    return values | {
        "input": [one if "://" in one else str(Path(one).resolve()) for one in c.input],
        "output": "",
    }
