"""Refuse to write a DeepSpeed folder of another layout: any layout loads the one that is there."""

import arguments

if __name__ == "__main__":
    arguments.refuse_layout(arguments.parse(__doc__)[0], "a DeepSpeed folder of another layout")
