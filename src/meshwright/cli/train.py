"""`meshwright train`: settings from flags and files, then one run, or a launch of several ranks."""

from __future__ import annotations

from meshwright.base.errors import DONE, UserError
from meshwright.cli import launch
from meshwright.config import checks, flags
from meshwright.config.problem import SettingsError, in_words, require
from meshwright.config.schema import TrainConfig
from meshwright.runtime.ranks.world import World


def main(argv: list[str]) -> int:
    return launch.run_rank(argv, lambda words, world: command_line(argv, words, world))


def command_line(argv: list[str], words: list[str], world: World) -> int:
    dry = "--dry-run" in argv
    prints = "--print-config" in argv
    try:
        about = "Pre-train a GPT. Without --save nothing is written."
        parsed = flags.parse_settings(
            TrainConfig, words, "meshwright train", check=not dry, about=about
        )
    except UserError as error:
        if not prints:
            raise
        try:  # print the settings before the error
            parsed = flags.parse_settings(
                TrainConfig, [*words, "--dry-run"], "meshwright train", check=False
            )
        except UserError:
            raise error from None
        print(flags.to_toml(parsed.config, parsed.sources))
        raise
    config = parsed.config
    start = None
    if config.checkpoint.load:
        from meshwright.training.before.resolve import complete_from_start

        config, start = complete_from_start(parsed, world.size)
    # Print the settings in their final form, which the checkpoint has completed.
    if parsed.print_config:
        print(flags.to_toml(config, parsed.sources))
        return DONE
    if config.checkpoint.load and not dry:  # the settings are complete only now
        require(checks.problems(config), parsed.words)
    # The modules of a run are imported only now, so that mistakes in flags are reported at once.
    from meshwright.training import run
    from meshwright.training.before import preflight
    from meshwright.training.before.resolve import (
        Caller,
        note_export,
        require_run_in_place,
        require_start_folder,
    )

    require_start_folder(parsed)
    require_run_in_place(parsed)
    # OneFlow's flags ask for ranks without a launcher; then this process starts them.
    launched = None if dry else launch.relaunch(config.parallel, world, ["train", *argv])
    if launched is not None:
        return launched
    # These are printed once on each machine, as errors in the flags are.
    if world.local_rank == 0:
        note_export(parsed, config)
        flags.print_notices(parsed)
    if config.parallel.rank is not None and not dry:
        raise SettingsError(
            f"{{rank={config.parallel.rank}}} is for --dry-run; a launcher gives a run's ranks their numbers"
        )
    with in_words(parsed.words):
        if dry:
            return preflight.dry_run(config, world, start)
        command = ["meshwright", "train", *argv]
        caller = Caller(handle_signals=True, start=start)
        return run.run(config, world, caller, command, parsed.ignored)
