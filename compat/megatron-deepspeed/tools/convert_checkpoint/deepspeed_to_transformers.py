"""Write a DeepSpeed checkpoint for transformers: `meshwright convert --to huggingface`."""

import sys

import arguments

if __name__ == "__main__":
    a, others = arguments.parse(__doc__)
    if (a.target_tp, a.target_pp) != (1, 1):
        sizes = f"--target_tp {a.target_tp} --target_pp {a.target_pp}"
        arguments.refuse(
            f"{sizes}: a folder for transformers has no ranks; give 1 and 1, or leave both out"
        )
    sys.exit(
        arguments.run(["convert", a.input_folder, a.output_folder, "--to", "huggingface", *others])
    )
