"""List the tensors of the step that a file belongs to: `meshwright inspect STEP --tensors`."""

import sys
from pathlib import Path

import arguments

if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        arguments.refuse("a file of a checkpoint is needed: inspect_checkpoint.py FILE")
    path = Path(sys.argv[1])
    if not path.exists():
        arguments.refuse(
            f"there is no file {path}; give a file of a checkpoint, or the folder of a step"
        )
    folder = path.parent if path.is_file() else path
    # iter_0000500/mp_rank_00/...
    folder = folder.parent if folder.name.startswith("mp_rank_") else folder
    sys.exit(arguments.run(["inspect", str(folder), "--tensors", *sys.argv[2:]]))
