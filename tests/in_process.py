"""Commands of a tour in this process; trainings keep their own, which start warm."""

import contextlib
import io
import subprocess

import warm
from meshwright.__main__ import main


class InProcess:
    """Stands in for subprocess.Popen: runs every command but `train` in this process."""

    def __new__(cls, command, **options):
        if command[3] == "train":
            return subprocess_popen([warm.python(), *command[1:]], **options)
        return super().__new__(cls)

    def __init__(self, command, **options):
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(options["stderr"]):
            self.status = main(command[3:])
        self.stdout = io.StringIO(out.getvalue())

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def wait(self):
        return self.status


subprocess_popen = subprocess.Popen
