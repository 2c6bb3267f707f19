"""`meshwright train`: settings from flags and files, then one run, or a launch of several ranks."""

from __future__ import annotations

from meshwright.commands import launch
from meshwright.errors import DONE, UserError
from meshwright.ranks.world import World
from meshwright.settings import flags
from meshwright.settings.schema import TrainConfig


def main(argv: list[str]) -> int:
    return launch.run_rank(argv, lambda words, world: command_line(argv, words, world))


def command_line(argv: list[str], words: list[str], world: World) -> int:
    dry, prints = "--dry-run" in argv, "--print-config" in argv
    try:
        about = "Pre-train a GPT. Without --save nothing is written."
        parsed = flags.parse_settings(TrainConfig, words, "meshwright train", check=not dry, about=about)
    except UserError as error:
        if not prints:
            raise
        try:  # print the settings before the error
            parsed = flags.parse_settings(TrainConfig, [*words, "--dry-run"], "meshwright train", check=False)
        except UserError:
            raise error from None
        print(flags.to_toml(parsed.config, parsed.sources))
        raise
    config = parsed.config
    if config.checkpoint.load:
        from meshwright.training.state.resume import checkpoint_architecture

        given = {name for name, source in parsed.sources.items() if source != "default"}
        config = checkpoint_architecture(config, given)
        before, now = flags.to_dict(parsed.config), flags.to_dict(config)
        changed = {name: f"checkpoint {config.checkpoint.load}" for name in now if now[name] != before[name]}
        parsed.sources.update(changed)
    if parsed.print_config:
        print(flags.to_toml(config, parsed.sources))
        return DONE
    from meshwright.training import run
    from meshwright.training.before import preflight
    from meshwright.verify.rehearsal import rehearse

    launched = None if dry else launch.relaunch(config.parallel, ["train", *argv])
    if launched is not None:
        return launched
    if world.local_rank == 0:
        flags.print_notices(parsed)
    if dry:
        return preflight.dry_run(config)
    command = ["meshwright", "train", *argv]
    return run.run(config, command=command, handle_signals=True, idle=parsed.idle, rehearse=rehearse)
