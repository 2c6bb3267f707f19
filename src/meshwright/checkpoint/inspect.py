"""`meshwright inspect DIR`: what a checkpoint folder holds, and whether it is whole."""

from meshwright.checkpoint.native import main_inspect as main

__all__ = ["main"]
