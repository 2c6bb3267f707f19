"""`meshwright train` with a stand-in for CUDA graphs, for tests on several ranks.

With FAILS=n in the environment, the capture of rank 0 that has this number fails.
"""

import os
import sys

import pytest

from graphs_on_cpu import ByRecorder, Recorder, stand_in
from meshwright.__main__ import main

if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as monkeypatch:
        stand_in(monkeypatch)
        if "FAILS" in os.environ and os.environ["RANK"] == "0":
            ByRecorder.prepared["fails"] = int(os.environ["FAILS"])
        status = main(["train", *sys.argv[1:]])
        for recorder in Recorder.made:
            print("calls:", *recorder.calls)
    sys.exit(status)
