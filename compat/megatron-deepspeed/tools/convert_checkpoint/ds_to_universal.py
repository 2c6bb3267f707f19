"""Refuse to write a universal checkpoint: any layout loads the DeepSpeed folder that is there."""

import arguments

if __name__ == "__main__":
    arguments.refuse_layout(arguments.parse(__doc__)[0], "a universal checkpoint")
