"""Megatron-LM's server of generated text; there is none here yet."""

import sys
from pathlib import Path

instead = "`meshwright generate --interactive DIR` answers prompts that you type"
files = "tools/generate_samples_gpt.py --load DIR --sample-input-file FILE those of a file"
print(f"tools/{Path(sys.argv[0]).name}: there is no server yet; {instead}, {files}", file=sys.stderr)
sys.exit(2)
