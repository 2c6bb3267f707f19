"""`meshwright report`: one page with pictures for a run, or the comparison of several; --losses prints exact numbers."""

from __future__ import annotations

import argparse
from pathlib import Path

from meshwright.errors import DONE
from meshwright.report.compare import compare
from meshwright.report.history import read_history
from meshwright.report.page import write_report


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="meshwright report", description="One page with pictures of a run, or of some."
    )
    parser.add_argument(
        "folders",
        metavar="DIR",
        type=Path,
        nargs="+",
        help="run folder: --run-dir, or --save, of the training; several are compared, each with the first",
    )
    parser.add_argument(
        "--output",
        metavar="FILE",
        type=Path,
        help="where to write the page (default: DIR/report.html, of several runs compare.html in the first folder)",
    )
    parser.add_argument(
        "--losses",
        action="store_true",
        help="print iteration, loss, gradient norm and learning rate as hexadecimal floats: equal text is equal bits",
    )
    parser.add_argument("--json", action="store_true", help="print the comparison as JSON; no page without --output")
    parser.add_argument(
        "--tolerance",
        metavar="X",
        type=float,
        help="exit with 1 if the losses of two runs at a common iteration are further apart than this",
    )
    args = parser.parse_args(argv)
    if args.losses and (args.output or len(args.folders) > 1):
        parser.error("--losses prints one run's numbers: give one folder and no --output")
    if len(args.folders) > 1:
        return compare(args.folders, args.output, args.json, args.tolerance)
    if args.json or args.tolerance is not None:
        parser.error("--json and --tolerance compare runs: give two folders or more")
    (folder,) = args.folders
    if args.losses:
        for s in read_history(folder).steps:
            print(s.iteration, s.loss.hex(), s.grad_norm.hex(), s.lr.hex())
    else:
        print(write_report(folder, args.output))
    return DONE
