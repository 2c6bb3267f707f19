"""LiBai's script: `meshwright train` with the settings of a LiBai config, which is read as data."""

import argparse
import json
import os
import re
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[2] / "src"))  # runs from a clone too, without an install
sys.path.insert(1, str(HERE))

import yaml  # noqa: E402
from config_flags import FLAGS, TABLES, flattened, override, to_flags  # noqa: E402

from meshwright.__main__ import main  # noqa: E402
from meshwright.base.errors import UserError  # noqa: E402
from meshwright.base.files import replacing  # noqa: E402
from meshwright.compat.flags.lazy_config import read_lazy_config  # noqa: E402
from meshwright.runtime.ranks.world import find_world  # noqa: E402

MODULES = ("libai", "oneflow", "flowvision", "omegaconf")
# A folder of logs as OneAutoTest's script names it, args_libai_gpt2.sh
BENCHMARK = re.compile(r"LibAI_\w+_\d+n\d+g_\d{8}_\d{6,}")
FAST = "train.train_epoch=0 train.train_iter=20 train.evaluation.eval_period=10 train.log_period=1".split()


def resolve(path: str, words: list[str]) -> dict[str, dict]:
    """Return a config's tables with `key=value` words applied."""
    found = read_lazy_config(Path(path), MODULES, [HERE.parent])
    config = {name: found[name] for name in TABLES if isinstance(found.get(name), dict)}
    config.setdefault("graph", {})
    if missing := set(TABLES) - set(config):
        raise UserError(
            f"{path} has no {' and no '.join(sorted(missing))}; import LiBai's defaults as its configs do"
        )
    override(config, words)
    return config


def as_edited_for_benchmarks(train: dict, words: list[str]) -> tuple[list[str], list[str]]:
    """Do what a benchmark's guide edits into LiBai's sources: save nothing, show the GPUs' memory.

    OneAutoTest's script removes `model_final`, the last step, so a run that ends before its first
    `train.checkpointer.period` leaves no model. Return more flags, and notes.
    """
    steps, checkpointer, notes = train["train_iter"], train["checkpointer"], []
    is_given = any(word.startswith("train.checkpointer.period=") for word in words)
    if steps < checkpointer["period"] and not is_given:
        checkpointer["period"] = 0
        notes = ["a benchmark saves no model; train.checkpointer.period=N saves every N steps"]
    return ["--nvidia-smi-at", str(min(steps, 99))], notes


def train(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        usage="%(prog)s --config-file FILE [flags] [key=value ...]", allow_abbrev=False
    )
    parser.epilog = "Other flags are those of `meshwright train`, such as --device cpu."
    parser.add_argument(
        "--config-file", required=True, metavar="FILE", help="LiBai's Python file of settings"
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on with the run in train.output_dir"
    )
    parser.add_argument(
        "--eval-only", action="store_true", help="validate and test train.load_weight"
    )
    parser.add_argument(
        "--fast-dev-run", action="store_true", help="20 steps, each logged, validated every ten"
    )
    words = [word for word in argv if re.match(r"\+{0,2}[a-z_]\w*[.\[][^=]*=", word)]
    given, more = parser.parse_known_args([word for word in argv if word not in words])
    words += FAST * given.fast_dev_run + ["train.resume=True"] * given.resume
    config, world = resolve(given.config_file, words), find_world(os.environ, None)
    folder = Path(str(config["train"]["output_dir"]))
    is_benchmark = BENCHMARK.fullmatch(folder.name) and not config["train"].get("train_epoch")
    if world.size > world.local_size:  # scripts name the folder by each machine's clock
        config["train"]["output_dir"] = re.sub(r"_\d{8}_\d{6,}$", "", str(folder))
    usual = resolve(str(HERE.parent / "configs/gpt2_pretrain.py"), [])
    extra, remarks = list[str](), list[str]()
    try:
        if is_benchmark:
            extra, remarks = as_edited_for_benchmarks(config["train"], words)
        flags, notes = to_flags(config, usual, world.size)
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
        raise UserError(
            f"{given.config_file} lacks a setting, or has one of another kind: {error!r}"
        ) from None
    for note in [*notes, *remarks] if world.rank == 0 else []:
        print(f"note: {note}", file=sys.stderr)
    if not (world.rank or {"--dry-run", "--print-config"} & set(more)):
        folder = Path(str(config["train"]["output_dir"]))
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(folder / "config.yaml") as file:  # json: a name's reference is a text there
            file.write(
                yaml.safe_dump(json.loads(json.dumps(config)), default_flow_style=None).encode()
            )
    named = [key for key, value in flattened(config) if key in FLAGS and value is not None]
    keys = {FLAGS[key].removeprefix("--").replace("-", "_"): key for key in named}
    flags += [*["--skip-train"] * given.eval_only, *extra, *more]
    return main(["train", *flags], spellings=keys)


if __name__ == "__main__":
    try:
        sys.exit(train(sys.argv[1:]))
    except (UserError, OSError) as error:
        # the machine's first rank says it
        time.sleep(3 * (os.environ.get("LOCAL_RANK", "0") != "0"))
        print(f"train_net.py: error: {error}", file=sys.stderr)
        sys.exit(getattr(error, "status", 74))
