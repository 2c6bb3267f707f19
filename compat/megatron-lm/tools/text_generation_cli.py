"""Megatron-LM's client of its server; there is no server here yet."""

import sys

print(
    "tools/text_generation_cli.py: there is no server to ask yet; `meshwright generate --interactive DIR` reads "
    "prompts and answers",
    file=sys.stderr,
)
sys.exit(2)
