"""Megatron-LM's server; there is none here yet."""

import sys

print(
    "tools/run_text_generation_server.py: there is no server yet; generate text by "
    "`meshwright generate --interactive DIR`, or for a file of prompts by tools/generate_samples_gpt.py "
    "--load DIR --sample-input-file FILE",
    file=sys.stderr,
)
sys.exit(2)
