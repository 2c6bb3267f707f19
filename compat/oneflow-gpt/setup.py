"""`python3 -m pip install -e .`: this folder, and Meshwright from the clone that holds it."""

from pathlib import Path

from setuptools import setup

CLONE = Path(__file__).resolve().parents[2]

setup(
    name="oneflow-gpt",
    version="0.9.0",
    packages=["oneflow_gpt"],
    package_data={"oneflow_gpt": ["defaults.toml"]},
    install_requires=[f"meshwright @ {CLONE.as_uri()}"],
)
