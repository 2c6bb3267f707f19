"""`pip install -e .` in this folder installs Meshwright from the clone; it has no code itself."""

from pathlib import Path

from setuptools import setup

clone = Path(__file__).resolve().parents[2].as_uri()
setup(
    name="libai-by-meshwright",
    version="0.0",
    py_modules=[],
    install_requires=[f"meshwright @ {clone}"],
)
