"""`meshwright train`: settings from flags and files, then one run, or a launch of several ranks."""

from __future__ import annotations

import os
import re
import time

from meshwright.errors import DONE, UserError
from meshwright.launch.world import World, find_world, require_world_size
from meshwright.settings import flags, help
from meshwright.settings.schema import TrainConfig


def main(argv: list[str]) -> int:
    world = find_world(os.environ, None)
    try:
        return command_line(argv, world)
    except UserError as error:
        if world.local_rank and not error.everywhere:  # the machine's first rank was given the same flags
            from meshwright.training.run import REPORT_SECONDS

            time.sleep(REPORT_SECONDS)
        raise


def command_line(argv: list[str], world: World) -> int:
    dry, prints = "--dry-run" in argv, "--print-config" in argv
    if world.rank and (dry or prints or help.asked(argv) is not None):
        return DONE
    words = argv if world.size == 1 else [f"--world-size={world.size}", *argv]
    if world.size > 1 and (said := re.search(r"--world-size[= ](\d{1,9})( |$)", " ".join(argv))):
        require_world_size(world, int(said[1]))  # before the batch size is divided by it
    try:
        about = "Pre-train a GPT. Without --save nothing is written."
        parsed = flags.parse(TrainConfig, words, "meshwright train", check=not dry, about=about)
    except UserError as error:
        if not prints:
            raise
        try:  # print the settings before the error
            parsed = flags.parse(TrainConfig, [*words, "--dry-run"], "meshwright train", check=False)
        except UserError:
            raise error from None
        print(flags.to_toml(parsed.config, parsed.sources))
        raise
    config = parsed.config
    if config.checkpoint.load:
        from meshwright.training.resume import checkpoint_architecture

        given = {name for name, source in parsed.sources.items() if source != "default"}
        config = checkpoint_architecture(config, given)
        before, now = flags.to_dict(parsed.config), flags.to_dict(config)
        changed = {name: f"checkpoint {config.checkpoint.load}" for name in now if now[name] != before[name]}
        parsed.sources.update(changed)
    if parsed.print_config:
        print(flags.to_toml(config, parsed.sources))
        return DONE
    from meshwright.commands import launch
    from meshwright.training import preflight, run

    launched = None if dry else launch.relaunch(config.parallel, ["train", *argv])
    if launched is not None:
        return launched
    if world.local_rank == 0:
        flags.print_notices(parsed)
    if dry:
        return preflight.dry_run(config)
    return run.run(config, command=["meshwright", "train", *argv], handle_signals=True, idle=parsed.idle)
