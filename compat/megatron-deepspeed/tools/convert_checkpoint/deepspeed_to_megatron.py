"""Write a DeepSpeed checkpoint as Megatron-LM's tree: `meshwright convert --to torch`."""

import sys

import arguments

if __name__ == "__main__":
    a, others = arguments.parse(__doc__)
    sizes = [
        "--target-tensor-parallel-size",
        str(a.target_tp),
        "--target-pipeline-parallel-size",
        str(a.target_pp),
    ]
    weights = ["--no-optimizer"] if a.for_release else []
    sys.exit(
        arguments.run(
            ["convert", a.input_folder, a.output_folder, "--to", "torch", *sizes, *weights, *others]
        )
    )
