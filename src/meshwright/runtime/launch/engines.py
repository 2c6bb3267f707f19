"""Write a command into the file of an engine that starts it on a cluster or in a container.

    meshwright launch --write slurm --nnodes 2 --nproc-per-node 8 train --num-layers 24 ...

The file starts `meshwright launch` once on each node, with the command word for word. An engine
starts the same command again after an interruption, so it must continue its own checkpoints.
This module imports no torch, and needs none of the engines: a template of each engine's own file is
filled in, because users read and change it; TorchX and its like submit jobs that nobody sees.
"""

from __future__ import annotations

import json
import os
import pkgutil
import re
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from meshwright.base.device import NVIDIA
from meshwright.base.errors import DONE, FINAL, LOCKED
from meshwright.base.files import fill, replacing
from meshwright.base.version import PROJECT, our_version
from meshwright.config import check_layout, checks, flags
from meshwright.config.fields import spelling
from meshwright.config.pages import LAUNCHED, PAGES
from meshwright.config.problem import SettingsError, listed, require
from meshwright.config.schema import TrainConfig
from meshwright.runtime.launch.elastic import CompleteSettings, find_shapes, parse_train
from meshwright.runtime.launch.launcher import (
    PORT,
    LaunchConfig,
    build_program,
    find_bounds,
    require_numbers,
)

RESTARTS = 20  # most starts after the first
CORES = 4  # for each rank: its main thread, two readers, and one for saving
WAIT = 600  # seconds for the other nodes, which may pull an image first
GRACE = 330  # seconds to save after a signal; launch gives its ranks 300
WORK = "/work"  # in a container: where relative paths begin
CLAIM = "meshwright"  # the volume claim with data and checkpoints


@dataclass(frozen=True)
class ClusterJob:
    """A command, the nodes for it, and what the files of all engines name."""

    command: list[str]
    nodes: int
    devices: int  # of each node
    name: str
    image: str
    port: int | None  # on the first node
    launch: list[str]  # more flags of launch
    uses_gpus: bool
    run_folder: str | None  # with metrics.jsonl
    environment: dict[str, str]
    is_elastic: bool  # goes on when nodes are lost
    folder: str  # where relative paths in the command begin
    file: str

    def words(self, node: str, address: str) -> list[str]:
        """Return the arguments of `meshwright` on one node."""
        place: list[str] = []
        if self.nodes > 1:
            place = ["--nnodes", str(self.nodes), "--node-rank", node, "--master-addr", address]
            place += ["--master-port", str(self.port or PORT)]
        return [
            "launch",
            "--nproc-per-node",
            str(self.devices),
            *place,
            *self.launch,
            *self.command,
        ]


def write_engine_file(
    config: LaunchConfig, sources: Mapping[str, str], command: list[str], complete: CompleteSettings
) -> int:
    """Write the file of the engine `config.write`, or print it.

    `sources` names the source of each setting; `complete` takes a model's settings from --load.
    """
    assert config.write
    job, notes = make_job(config, sources, command, complete)
    template, values = ENGINES[config.write]
    text = fill(f"runtime/launch/templates/{template}", **values_for_all(job) | values(job))
    if config.write_to is None:
        print(text, end="")
    else:
        # A file that someone may have changed by hand is not replaced in silence.
        path = Path(config.write_to)
        if path.exists() and not config.overwrite:
            raise SettingsError(
                f"{{write_to={path}}} exists; give another name, or {{overwrite=True}} to replace it",
                LOCKED,
            )
        with replacing(path, typed=True) as file:
            file.write(text.encode())
        print(
            f"{path}: {config.write}, {job.nodes} x {job.devices} ranks; its first lines say how to start it"
        )
    for line in notes:
        print(f"note: {line}", file=sys.stderr)
    return DONE


def make_job(
    config: LaunchConfig, sources: Mapping[str, str], command: list[str], complete: CompleteSettings
) -> tuple[ClusterJob, list[str]]:
    """Check the flags and the command as far as this machine can; return notes for the user."""
    for name in ("node_rank", "master_addr", "node_ips"):
        if getattr(config, name) is not None:
            raise SettingsError(
                f"{{write}} and {{{name}}}: the engine numbers the nodes; leave {{{name}}} out"
            )
    # These are numbers of the cluster, which this machine cannot count.
    nodes = 1 if config.nnodes is None else config.nnodes
    count = config.nproc_per_node
    require_numbers(config, nodes)
    if not re.fullmatch("[1-9][0-9]{0,3}", count):
        raise SettingsError(
            f"{{nproc_per_node={count}}} would count the devices here; give {{write}} the number of each node"
        )
    # This is called for its errors: what cannot be started need not be written.
    build_program(command)
    checked = check_command(command, nodes, int(count), complete)
    trained = checked if isinstance(checked, TrainConfig) else None
    device = NVIDIA
    if hasattr(checked, "parallel"):
        device = checked.parallel.device
    if device.split(":")[0] not in ("auto", NVIDIA, "cpu"):
        raise SettingsError(
            f"{{device={device}}}: {{write}} knows how to ask for {NVIDIA} and cpu only"
        )
    run_folder = trained and (trained.checkpoint.run_dir or trained.checkpoint.save)
    # Engines take names of lower-case letters, digits and hyphens.
    stem = Path(run_folder or command[0]).stem
    slug = re.sub("[^a-z0-9]+", "-", stem.lower()).strip("-")
    # The flags of our launcher, which the file calls.
    launch = ["--max-restarts", str(config.max_restarts)] if config.max_restarts else []
    bounds = find_bounds(config, nodes * int(count))
    if bounds[0]:
        if config.write == "ray":
            raise SettingsError(
                "{write=ray} starts the same nodes again; for {min_ranks} use {engine=ray} in their place"
            )
        find_shapes(command, *bounds, complete)
        launch += [f"--min-ranks={bounds[0]}", f"--max-ranks={bounds[1]}"]
    if nodes > 1:
        wait = str(WAIT) if sources["wait"] == "default" else f"{config.wait:g}"
        launch += ["--wait", wait]
    environment = {n: value for n, value in os.environ.items() if n.startswith("MESHWRIGHT_")}
    job = ClusterJob(
        command,
        nodes,
        int(count),
        name=f"meshwright-{slug}"[:40].rstrip("-"),
        image=config.image or f"meshwright:{our_version()}",
        port=config.master_port,
        launch=launch,
        uses_gpus=device != "cpu",
        run_folder=run_folder or None,
        environment=environment,
        is_elastic=bounds[0] > 0,
        folder=str(Path.cwd()),
        file=Path(config.write_to or "FILE").name,
    )
    return job, notices(job, config.write or "", trained)


def check_command(command: list[str], nodes: int, devices: int, complete: CompleteSettings) -> Any:
    """Check a command of ours as `--dry-run` does, but without data and checkpoint.

    Return its settings, or None for a script.
    """
    name, *words = command
    if name not in PAGES:
        return None
    page = PAGES[name]
    ranks = nodes * devices
    # Other commands are checked by their own settings alone.
    cls = pkgutil.resolve_name(page.config)
    if cls is not TrainConfig:
        parsed = flags.parse_settings(
            cls, words, f"meshwright {name}", page.positional, check=False
        )
        return parsed.config
    config = parse_train([*command, "--dry-run"], ranks, complete)
    wrong = check_layout.parallel_problems(config)
    if wrong:
        raise SettingsError(
            f"--nnodes {nodes} x --nproc-per-node {devices} are {ranks} ranks. {listed(wrong)}"
        )
    # A checkpoint that is not here may complete the model.
    if not (config.checkpoint.load and config.model.num_layers is None):
        require(checks.problems(config))
    c = config.checkpoint
    if c.save and (not c.load or c.save_overwrite):
        how = "leave out --save-overwrite" if c.load else f"add --load {shlex.quote(c.save)}"
        raise SettingsError(
            f"{{save={c.save}}}: after an interruption the same command must continue from there; {how}"
        )
    return config


def notices(job: ClusterJob, engine: str, config: TrainConfig | None) -> list[str]:
    """Return what the user should know about the file."""
    c = config.checkpoint if config else None
    notes = []
    if c and not c.save:
        notes.append("without --save and --load, an interrupted run begins again at step 0")
    elif c and c.load != c.save:
        both = f"--load {c.load} is not --save {c.save}"
        notes.append(f"{both}: an interrupted run stops; submit it again with both the same")
    if c and c.save and not c.save_interval:
        notes.append(
            "without --save-interval only a signal and the end save; a crash loses all steps since"
        )
    if config and not config.training.exit_signal_handler:
        notes.append("--no-exit-signal-handler: a run that the engine stops does not save")
    for name in ("exit_interval", "exit_duration_in_mins"):
        if config and getattr(config.training, name):
            notes.append(
                f"{spelling(name)} ends the run with status 0, after which no engine starts it again"
            )
    if config and c and c.load and config.model.num_layers is None:
        notes.append(f"the model comes from --load {c.load}; only the number of ranks was checked")
    if config is None and job.command[0] not in PAGES:
        notes.append(f"the flags of {job.command[0]} were not checked")
    # Say where the command's paths are: containers have a file system of their own.
    in_container = engine in ("kubernetes", "jobset", "skypilot", "docker")
    folder = f"{WORK} of the container" if in_container else job.folder
    notes.append(f"relative paths begin in {folder}")
    absolute = []
    for word in job.command:
        value = word.partition("=")[2] if word.startswith("-") else word
        if value.startswith(("/", "~")):
            absolute.append(value)
    if absolute:
        where = "on every node, inside the container" if in_container else "on every node"
        notes.append(f"these must be there {where}: {', '.join(absolute)}")
    if job.environment:
        notes.append(f"settings of the environment are written too: {', '.join(job.environment)}")
    return notes


def by_lines(words: list[str]) -> list[list[str]]:
    """Divide a command into lines that each begin with a flag."""
    lines: list[list[str]] = [[]]
    for word in words:
        if (word.startswith("--") or word in LAUNCHED) and lines[-1]:
            lines.append([])
        lines[-1].append(word)
    return lines


def values_for_all(job: ClusterJob) -> dict[str, object]:
    """Return what the templates of several engines name."""
    return {
        "ORIGIN": f"Written by `meshwright launch --write`, version {our_version()}.",
        "FILE": job.file,
        "QUOTEDFILE": shlex.quote(job.file),
        "NAME": job.name,
        "NODES": job.nodes,
        "DEVICES": job.devices,
    }


def values_for_slurm(job: ClusterJob) -> dict[str, object]:
    command = [f"    {shlex.join(line)}" for line in by_lines(job.command)]
    # The job would not have these settings of this shell.
    exports = [f"export {name}={shlex.quote(value)}\n" for name, value in job.environment.items()]
    return {
        "CPUS": CORES * job.devices,
        "GPUS": f"#SBATCH --gpus-per-node={job.devices}\n" if job.uses_gpus else "",
        "KEEP": "#SBATCH --no-kill\n" if job.is_elastic else "",
        "STEP": " --no-kill" if job.is_elastic else "",
        "PYTHON": shlex.quote(sys.executable),
        "FOLDER": shlex.quote(job.folder),
        "PORT": job.port or f"$(({PORT - 9500} + SLURM_JOB_ID % 9000))",
        "COMMAND": "\n".join(command),
        "EXPORTS": "".join(exports),
        "LAUNCH": shlex.join(job.launch),
        "FINAL": " | ".join(map(str, FINAL)),
    }


def values_for_ray(job: ClusterJob) -> dict[str, object]:
    resources = {"CPU": CORES * job.devices}
    if job.uses_gpus:
        resources["GPU"] = job.devices
    command = [f"    {', '.join(map(repr, line))}," for line in by_lines(job.command)]
    return {
        "RESOURCES": json.dumps(resources),
        "FOLDER": repr(job.folder),
        "PORT": job.port or PORT,
        "FINAL": FINAL,
        "ENVIRONMENT": repr(job.environment),
        "LAUNCH": repr(["--nproc-per-node", str(job.devices), *job.launch]),
        "COMMAND": "\n".join(command),
    }


def values_for_docker(job: ClusterJob) -> dict[str, object]:
    if job.nodes > 1:
        raise SettingsError(
            f"{{write=docker}} is for one machine, {{nnodes}} is {job.nodes}; take kubernetes, jobset or slurm"
        )
    # Healthy is a run whose log has grown within the hour; without a folder, one that is there.
    is_fresh = "import os, sys, time; sys.exit(time.time() - os.path.getmtime(sys.argv[1]) > 3600)"
    healthy = ["python", "-c", is_fresh, f"{job.run_folder}/metrics.jsonl"]
    if job.run_folder is None:
        healthy = ["python", "-c", "import os; os.kill(1, 0)"]
    compiler = (
        "# Triton compiles with it while a training starts.\n"
        "RUN apt-get update \\\n"
        "    && apt-get install -y --no-install-recommends 'gcc=4:12.2.*' 'libc6-dev=2.36-*' \\\n"
        "    && rm -rf /var/lib/apt/lists/*\n"
    )
    lines = [", ".join(map(json.dumps, line)) for line in by_lines(job.words("0", ""))]
    # A Dockerfile expands $ and ends a string at a quotation mark.
    quoted = {name: re.sub(r'(["\\$])', r"\\\1", value) for name, value in job.environment.items()}
    return {
        "VERSION": our_version(),
        "IMAGE": job.image,
        "CLONE": shlex.quote(str(PROJECT.parent)) if PROJECT.is_file() else "CLONE",
        "GPUS": "--gpus all " if job.uses_gpus else "",
        "PODMAN": ", with --device nvidia.com/gpu=all for --gpus all" if job.uses_gpus else "",
        "NV": "--nv " if job.uses_gpus else "",
        "COMPILER": compiler if job.uses_gpus else "",
        "ENVIRONMENT": "".join(f'ENV {name}="{value}"\n' for name, value in quoted.items()),
        "HEALTH": f"HEALTHCHECK --interval=5m --start-period=1h CMD {json.dumps(healthy)}",
        "COMMAND": "[" + ", \\\n     ".join(lines) + "]",
    }


def as_yaml(text: str, style: str | None = None) -> str:
    """Return a YAML scalar: plain where possible, or in the style " or |."""
    scalar = yaml.dump(text, default_style=style, width=10**6, allow_unicode=True)
    return scalar.removesuffix("...\n").removesuffix("\n")


def quoted(text: object) -> str:
    """Return a quoted YAML string: readers take some plain words, as 1e5 or on, for other types."""
    return as_yaml(str(text), '"')


def values_for_pods(
    job: ClusterJob, address: str, indent: str, indent_of_final: str
) -> dict[str, object]:
    """Return the values of both templates of Kubernetes.

    The lines of a container and of the final statuses begin with `indent` and `indent_of_final`.

    Kubernetes replaces $(NAME) in a command, and $$ by $. The index of a pod is the number of its
    node.
    """
    command = [word.replace("$", "$$") for word in job.command]
    words = replace(job, command=command).words("$(JOB_COMPLETION_INDEX)", address)
    values = {name: quoted(text.replace("$", "$$")) for name, text in job.environment.items()}
    environment = [
        f"{indent}- name: {name}\n{indent}  value: {value}\n" for name, value in values.items()
    ]
    share = "#\n"
    if job.nodes > 1:
        share = f"# {job.nodes} nodes share the claim: its access mode is ReadWriteMany.\n"
    begins_again = "After an interruption all nodes start again"
    is_replaced = "A lost node is replaced while the others go on"
    return {
        "IMAGENAME": job.image,
        "IMAGE": as_yaml(job.image),
        "SHARE": share,
        "RESTART": is_replaced if job.is_elastic else begins_again,
        # A lost pod comes again by itself, or with all others.
        "BACKOFF": RESTARTS if job.is_elastic else 0,
        "RESTARTS": RESTARTS,
        "GRACE": GRACE,
        "STATUSES": ", ".join(map(str, FINAL)),
        "FINAL": "\n".join(f"{indent_of_final}- {status}" for status in FINAL),
        "ARGS": "\n".join(f"{indent}- {quoted(word)}" for word in words),
        "ENVIRONMENT": f"{indent}env:\n{''.join(environment)}" if environment else "",
        "RESOURCE": "nvidia.com/gpu" if job.uses_gpus else "cpu",
    }


def values_for_skypilot(job: ClusterJob) -> dict[str, object]:
    """Return the values of a managed job.

    Its launcher restarts the run after crashes, SkyPilot after losses of nodes.
    """
    restarts = [] if "--max-restarts" in job.launch else ["--max-restarts", "3"]
    words = replace(job, launch=[*job.launch, *restarts]).words("@RANK@", "@FIRST@")
    lines = " \\\n    ".join(shlex.join(line) for line in by_lines(words))
    # The shell's variables, after the quoting of the words.
    for name, variable in {"@RANK@": "$SKYPILOT_NODE_RANK", "@FIRST@": "$first"}.items():
        lines = lines.replace(name, f'"{variable}"', 1)
    # SkyPilot lists the nodes' addresses, the first node's first.
    find_first = 'first=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)'
    environment = "".join(f"  {name}: {quoted(value)}\n" for name, value in job.environment.items())
    # The nodes write one checkpoint together, which caches of a bucket do not show in time.
    volume = f"the volume {CLAIM}, which all nodes can write (`sky volumes apply`)"
    bucket = "a bucket of that name; it must be free in your cloud, or yours"
    has_several = job.nodes > 1
    mount = f"  {WORK}:\n    name: {job.name}\n    mode: MOUNT_CACHED"
    if has_several:
        mount = f"volumes:\n  {WORK}: {CLAIM}"
    resources = f"cpus: {CORES * job.devices}+"
    if job.uses_gpus:
        resources = f"accelerators: H100:{job.devices}"
    script = f"cd {WORK}\n{find_first}\nexec ~/environment/bin/meshwright {lines}\n"
    return {
        "PLACE": volume if has_several else bucket,
        "CHOOSE": " Choose the accelerators." if job.uses_gpus else "",
        "RESOURCES": resources,
        "CLONE": as_yaml(str(PROJECT.parent) if PROJECT.is_file() else "CLONE"),
        "MOUNT": mount,
        "ENVIRONMENT": f"envs:\n{environment}" if environment else "",
        "RUN": as_yaml(script, "|"),
    }


# The template of each engine, and what it names besides `values_for_all`.
ENGINES: dict[str, tuple[str, Callable[[ClusterJob], dict[str, object]]]] = {
    "slurm": ("slurm.sh", values_for_slurm),
    "kubernetes": (
        "kubernetes.yaml",
        lambda job: values_for_pods(job, "$(PET_MASTER_ADDR)", " " * 4, " " * 18),
    ),
    "jobset": (
        "jobset.yaml",
        lambda job: values_for_pods(job, f"{job.name}-node-0-0.{job.name}", " " * 14, " " * 14),
    ),
    "skypilot": ("skypilot.yaml", values_for_skypilot),
    "ray": ("ray.py.txt", values_for_ray),
    "docker": ("Dockerfile", values_for_docker),
}
