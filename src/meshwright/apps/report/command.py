"""`meshwright report`: a page for a run, a comparison of several, exact losses, a table of logs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from meshwright.base.errors import DONE
from meshwright.base.runs.sweeps import expand_sweeps
from meshwright.base.storage.addresses import address_of, as_typed, is_address
from meshwright.config import flags
from meshwright.config.fields import MISSING, flag
from meshwright.config.problem import Problem, missing


@dataclass(frozen=True)
class ReportConfig:
    """Settings of `meshwright report`."""

    folders: list[Path] = flag(
        MISSING,
        "run folder: --run-dir, or --save, of the training; with several, each is compared with the first; the folder "
        "of a sweep stands for its runs; with --logs, folders of logs, or logs",
        positional=True,
        remote=True,
        word="DIR",
    )
    output: Path | None = flag(
        None,
        "file for the page (none: DIR/report.html, or compare.html in the first of several folders); with --logs, for "
        "a picture of the table, .svg or .png",
        docs="tutorial",
    )
    losses: bool = flag(
        False,
        "print iteration, loss, gradient norm and learning rate as hexadecimal floats: equal text means equal bits",
    )
    json: bool = flag(
        False, "print the comparison as JSON; write a page only with --output", docs="data"
    )
    logs: bool = flag(
        False,
        "print a table of speed, memory and loss from logs of ours, Megatron-LM, DeepSpeed, LiBai and OneFlow: medians "
        "without the first line and the first tenth of the iterations",
    )
    table: Literal["text", "csv", "markdown", "json"] = flag("text", "form of the table of --logs")
    tolerance: float | None = flag(
        None,
        "exit with status 1 if the losses of two runs at a common iteration differ by more than this",
    )

    def problems(self) -> list[Problem]:
        # A page is a file of this machine; by default it goes into the run's folder.
        writes_page = not (self.output or self.json or self.losses)
        if writes_page and is_address(as_typed(self.folders[0])):
            about = "a file of this machine for the page of a run in object storage"
            return [missing("output", about)]

        # A table of logs has options of its own.
        if self.logs:
            options = ("losses", "json", "tolerance")
            others = [name for name in options if getattr(self, name) not in (False, None)]
            text = "does not go with {logs=True}; {table} is the form of its table"
            return [Problem((name, "logs"), f"{{{name}}} {text}") for name in others]
        if self.table != "text":
            text = "{table} is the form of the table of {logs=True}; give both"
            return [Problem(("table",), text)]

        # One run has numbers, several have differences.
        several = len(expand_sweeps(self.folders)) > 1
        if self.losses and (self.output or several):
            text = "{losses=True} prints one run's numbers; give one folder and no {output}"
            return [Problem(("losses", "output"), text)]
        if not several and (self.json or self.tolerance is not None):
            text = "{json=True} and {tolerance} compare runs; give two folders or more"
            return [Problem(("json", "tolerance"), text)]
        return []


def main(argv: list[str]) -> int:
    about = (
        "Write one page with plots of a run, or a comparison of several, or print a table of logs."
    )
    c = flags.parse_settings(ReportConfig, argv, "meshwright report", about=about).config
    # Runs in object storage are copied here first, and read like any other.
    if any(map(address_of, c.folders)):
        from meshwright.checkpoint import mirror

        for folder in c.folders:
            mirror.fetch_runs(folder)
    if c.logs:
        from meshwright.apps.report.logs import extract

        return extract(c.folders, c.table, c.output)
    folders = expand_sweeps(c.folders)
    if len(folders) > 1:
        from meshwright.apps.report.compare import compare_runs

        return compare_runs(folders, c.output, c.json, c.tolerance)
    (folder,) = folders
    if c.losses:
        from meshwright.base.runs.history import read_history

        for s in read_history(folder).steps:
            print(s.iteration, s.loss.hex(), s.grad_norm.hex(), s.lr.hex())
    else:
        from meshwright.apps.report.page import write_report

        print(write_report(folder, c.output))
    return DONE
