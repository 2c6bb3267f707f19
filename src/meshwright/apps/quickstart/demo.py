"""`meshwright demo [DIR]`: `meshwright quickstart` on a text that every machine has.

The text is the source of Python's standard library. Half-way the training is stopped and resumed.
"""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

from meshwright.base.console import fit
from meshwright.base.errors import BAD_DATA, DONE, UserError
from meshwright.config import flags
from meshwright.config.fields import flag

# Tests, tables of character codes, help texts and installed packages: not the library's own code.
LEFT_OUT = [
    "test",
    "tests",
    "idle_test",
    "idlelib",
    "encodings",
    "pydoc_data",
    "site-packages",
    "dist-packages",
]
FEWEST_FILES = 20
PROMPTS = ("def __init__(self,", "class Error(", "for name in")

GPT2_345M = (
    "meshwright train --preset gpt2-345m --bf16 --data-path my-corpus_text_document --vocab-file gpt2-vocab.json "
    "--merge-file gpt2-merges.txt --split 949,50,1 --save gpt2-345m --load gpt2-345m --save-interval 1000"
)


@dataclass(frozen=True)
class DemoConfig:
    """Settings of `meshwright demo`."""

    dir: Path = flag(Path("demo"), "folder that the demo writes (default: demo)", positional=True)
    minutes: float = flag(4, "minutes until the model writes, everything included", bound=">0")
    device: str = flag("auto", "auto (an accelerator if there is one), cpu, cuda ...", value="FORM")
    overwrite: bool = flag(False, "start again where a model is already; that one is kept aside")


def main(argv: list[str]) -> int:
    about = "Train and use a small model on this machine, in some minutes. After Ctrl-C the same command goes on."
    c = flags.parse_settings(DemoConfig, argv, "meshwright demo", about=about).config
    # Imported late, for a quick --help.
    from meshwright.apps.quickstart.own_text import Deadline, Showing
    from meshwright.apps.quickstart.start import TourRequest, open_texts, start_tour
    from meshwright.config.text_inputs import TextInputs

    deadline = Deadline(c.minutes)
    folder = Path(sysconfig.get_path("stdlib"))
    texts = TextInputs(input=[str(folder)], include=["*.py"], exclude=LEFT_OUT, on_error="skip")
    documents = open_texts(texts, c.minutes, c.device)
    if (number := len(documents.inputs.paths)) < FEWEST_FILES:
        shortage = f"{folder} has {number} usable .py files, but {FEWEST_FILES} are needed"
        raise UserError(f"{shortage}; use a full installation of Python", BAD_DATA)
    # Nobody expects tests and installed packages in the library, so none are said to be left out.
    documents.inputs.passed.counts.clear()
    print(fit(f"The text: the source of Python's standard library, in {folder}"), flush=True)
    settings = {"minutes": c.minutes, "device": c.device}
    request = TourRequest(
        "demo", c.dir, c.minutes, c.device, c.overwrite, settings, Showing(PROMPTS, resumes=True)
    )
    if (status := start_tour(request, documents, deadline, argv)) == DONE:
        print("  meshwright quickstart FOLDER     the same with your own text")
        real = f"The real thing, GPT-2 345M on one GPU, once `meshwright preprocess` has read your text:\n  {GPT2_345M}"
        print(fit(real))
    return status
