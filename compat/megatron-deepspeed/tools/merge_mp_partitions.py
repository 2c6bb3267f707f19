"""Join the ranks of a checkpoint: `meshwright convert --to torch` with one tensor-parallel rank."""

import argparse
import sys
from pathlib import Path

# runs from a clone too, without an install
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "src"))

from meshwright.__main__ import main  # noqa: E402

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--load", required=True, help="folder of the checkpoint to join")
    parser.add_argument("--save", required=True, help="folder to write, which is made")
    parser.add_argument("--model-type", choices=["GPT"], default="GPT")
    parser.add_argument(
        "--target-pipeline-model-parallel-size", default="1", help="pipeline stages to write"
    )
    for flag in ("--tensor-model-parallel-size", "--pipeline-model-parallel-size"):
        parser.add_argument(flag, help="not needed: the layout of --load is read from its files")
    a, others = parser.parse_known_args()
    if a.tensor_model_parallel_size or a.pipeline_model_parallel_size:
        print(
            "the ranks of --load are counted from its files; the sizes given have no effect",
            file=sys.stderr,
        )
    stages = ["--target-pipeline-parallel-size", a.target_pipeline_model_parallel_size]
    sys.exit(main(["convert", a.load, a.save, "--to", "torch", *stages, *others]))
