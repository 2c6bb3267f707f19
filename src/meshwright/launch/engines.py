"""Write a command into the file of an engine that starts it on a cluster or in a container.

    meshwright launch --write slurm --nnodes 2 --nproc-per-node 8 train --num-layers 24 ...

The file starts `meshwright launch` once on each node, with the command word for word. An engine
starts the same command again after an interruption, so it must continue its own checkpoints.
This module imports no torch, and needs none of the engines.
"""

from __future__ import annotations

import json
import os
import pkgutil
import re
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from meshwright.device import NVIDIA
from meshwright.errors import BAD_DATA, DONE, IO, LOCKED, NON_FINITE, USAGE, UserError
from meshwright.files import fill, replacing
from meshwright.launch.elastic import find_shapes
from meshwright.launch.launcher import PORT, LaunchConfig, build_program, find_bounds
from meshwright.settings import checks, flags
from meshwright.settings.fields import spelling
from meshwright.settings.pages import PAGES, TOGETHER
from meshwright.settings.schema import TrainConfig
from meshwright.version import PROJECT, our_version

FINAL = (USAGE, BAD_DATA, NON_FINITE, LOCKED, IO)  # another start would end the same way
RESTARTS = 20  # most starts after the first
CORES = 4  # for each rank: its main thread, two readers, and one for saving
WAIT = 600  # seconds for the other nodes, which may pull an image first
GRACE = 330  # seconds to save after a signal; launch gives its ranks 300
USER = 10001  # of the container
WORK = "/work"  # in a container: where relative paths begin
CLAIM = "meshwright"  # the volume claim with data and checkpoints

Complete = Callable[[TrainConfig, set[str]], TrainConfig]


@dataclass(frozen=True)
class Job:
    """A command, the nodes for it, and what the files of all engines name."""

    command: list[str]
    nodes: int
    devices: int  # of each node
    name: str
    image: str
    port: int | None = None  # on the first node
    launch: list[str] = field(default_factory=list)  # more flags of launch
    uses_gpus: bool = True
    run_folder: str | None = None  # with metrics.jsonl
    environment: dict[str, str] = field(default_factory=dict)
    is_elastic: bool = False  # goes on when nodes are lost
    folder: str = ""  # where relative paths in the command begin
    file: str = "FILE"

    def words(self, node: str, address: str) -> list[str]:
        """Return the arguments of `meshwright` on one node."""
        place: list[str] = []
        if self.nodes > 1:
            place = ["--nnodes", str(self.nodes), "--node-rank", node, "--master-addr", address]
            place += ["--master-port", str(self.port or PORT)]
        return ["launch", "--nproc-per-node", str(self.devices), *place, *self.launch, *self.command]

    @property
    def origin(self) -> str:
        return f"Written by `meshwright launch --write`, version {our_version()}."


def write(given: LaunchConfig, sources: Mapping[str, str], command: list[str], complete: Complete) -> int:
    """Write the file of the engine `given.write`, or print it.

    `sources` says which settings were given; `complete` takes a model's settings from --load.
    """
    assert given.write
    job, notes = make_job(given, sources, command, complete)
    text = WRITERS[given.write](job)
    if given.write_to is None:
        print(text, end="")
    else:
        path, of = Path(given.write_to), f"{given.write}, {job.nodes} x {job.devices} ranks"
        if path.exists() and not given.overwrite:
            raise UserError(f"--write-to {path} exists; give another name, or --overwrite to replace it", LOCKED)
        with replacing(path) as file:
            file.write(text.encode())
        print(f"{path}: {of}; its first lines say how to start it")
    for line in notes:
        print(f"note: {line}", file=sys.stderr)
    return DONE


def make_job(
    given: LaunchConfig, sources: Mapping[str, str], command: list[str], complete: Complete
) -> tuple[Job, list[str]]:
    """Check the flags and the command as far as this machine can; return notes for the user."""
    for name in ("node_rank", "master_addr", "node_ips"):
        if getattr(given, name) is not None:
            raise UserError(f"--write and {spelling(name)}: the engine numbers the nodes; leave {spelling(name)} out")
    nodes, count = 1 if given.nnodes is None else given.nnodes, given.nproc_per_node
    if nodes < 1:
        raise UserError(f"--nnodes {nodes} must be 1 or more")
    if not re.fullmatch("[1-9][0-9]{0,3}", count):
        raise UserError(f"--nproc-per-node {count} would count the devices here; give --write the number of each node")
    if given.master_port is not None and not 0 < given.master_port < 65536:
        raise UserError(f"--master-port {given.master_port} is not a port; use 1 to 65535")
    build_program(command)
    config = check_command(command, nodes, int(count), complete)
    trained = config if isinstance(config, TrainConfig) else None
    device = config.parallel.device if config is not None and hasattr(config, "parallel") else NVIDIA
    if device.split(":")[0] not in ("auto", NVIDIA, "cpu"):
        raise UserError(f"--device {device}: --write knows how to ask for {NVIDIA} and cpu only")
    where = trained and (trained.checkpoint.run_dir or trained.checkpoint.save)
    slug = re.sub("[^a-z0-9]+", "-", Path(where or command[0]).stem.lower()).strip("-")
    launch = ["--max-restarts", str(given.max_restarts)] if given.max_restarts else []
    if (bounds := find_bounds(given, nodes * int(count)))[0]:
        if given.write == "ray":
            raise UserError("--write ray starts the same nodes again; for --min-ranks use --engine ray in their place")
        find_shapes(command, *bounds, complete)
        launch += [f"--min-ranks={bounds[0]}", f"--max-ranks={bounds[1]}"]
    if nodes > 1:
        launch += ["--wait", str(WAIT) if sources["wait"] == "default" else f"{given.wait:g}"]
    job = Job(
        command,
        nodes,
        int(count),
        name=f"meshwright-{slug}"[:40].rstrip("-"),
        image=given.image or f"meshwright:{our_version()}",
        port=given.master_port,
        launch=launch,
        uses_gpus=device != "cpu" and command[0] != "preprocess",
        run_folder=where or None,
        environment={name: value for name, value in os.environ.items() if name.startswith("MESHWRIGHT_")},
        is_elastic=bounds[0] > 0,
        folder=str(Path.cwd()),
        file=Path(given.write_to or "FILE").name,
    )
    return job, notices(job, given.write or "", trained)


def check_command(command: list[str], nodes: int, devices: int, complete: Complete) -> Any:
    """Check a command of ours as `--dry-run` does, but without data and checkpoint.

    Return its settings, or None for a script.
    """
    name, *words = command
    if name not in PAGES:
        return None
    page, ranks = PAGES[name], nodes * devices
    cls = pkgutil.resolve_name(page.config)
    if cls is not TrainConfig:
        return flags.parse_settings(cls, words, f"meshwright {name}", page.positional, check=False).config
    words = [f"--world-size={ranks}", *words, "--dry-run"]
    parsed = flags.parse_settings(TrainConfig, words, "meshwright train", check=False)
    config = parsed.config
    if config.checkpoint.load and Path(config.checkpoint.load).exists():
        config = complete(config, {name for name, source in parsed.sources.items() if source != "default"})
    if wrong := checks.parallel_problems(config):
        raise UserError(f"--nnodes {nodes} x --nproc-per-node {devices} are {ranks} ranks. {flags.listed(wrong)}")
    # A checkpoint that is not here may complete the model.
    if not (config.checkpoint.load and config.model.num_layers is None) and (wrong := checks.problems(config)):
        raise UserError(flags.listed(wrong))
    c = config.checkpoint
    if c.save and (not c.load or c.save_overwrite):
        how = "leave out --save-overwrite" if c.load else f"add --load {shlex.quote(c.save)}"
        raise UserError(f"--save {c.save}: after an interruption the same command must continue from there; {how}")
    return config


def notices(job: Job, engine: str, config: TrainConfig | None) -> list[str]:
    """Return what the file takes for granted."""
    c = config.checkpoint if config else None
    out = []
    if c and not c.save:
        out.append("without --save and --load, an interrupted run begins again at step 0")
    elif c and c.load != c.save:
        out.append(
            f"--load {c.load} is not --save {c.save}: an interrupted run stops; submit it again with both the same"
        )
    if c and c.save and not c.save_interval:
        out.append("without --save-interval only a signal and the end save; a crash loses all steps since")
    if config and not config.training.exit_signal_handler:
        out.append("--no-exit-signal-handler: a run that the engine stops does not save")
    for name in ("exit_interval", "exit_duration_in_mins"):
        if config and getattr(config.training, name):
            out.append(f"{spelling(name)} ends the run with status 0, after which no engine starts it again")
    if config and c and c.load and config.model.num_layers is None:
        out.append(f"the model comes from --load {c.load}; only the number of ranks was checked")
    if config is None and job.command[0] not in PAGES:
        out.append(f"the flags of {job.command[0]} were not checked")
    away = engine in ("kubernetes", "jobset", "skypilot", "docker")
    values = [word.partition("=")[2] if word.startswith("-") else word for word in job.command]
    absolute = [value for value in values if value.startswith(("/", "~"))]
    out.append(f"relative paths begin in {WORK if away else job.folder}" + " of the container" * away)
    if absolute:
        out.append(f"these must be there on every node{', inside the container' * away}: {', '.join(absolute)}")
    if job.environment:
        out.append(f"settings of the environment are written too: {', '.join(job.environment)}")
    return out


def by_lines(words: list[str]) -> list[list[str]]:
    """Divide a command into lines that each begin with a flag."""
    lines: list[list[str]] = [[]]
    for word in words:
        if (word.startswith("--") or word in TOGETHER) and lines[-1]:
            lines.append([])
        lines[-1].append(word)
    return lines


def slurm(job: Job) -> str:
    return fill(
        "launch/templates/slurm.sh",
        ORIGIN=job.origin,
        NAME=job.name,
        NODES=job.nodes,
        DEVICES=job.devices,
        CPUS=CORES * job.devices,
        GPUS=f"#SBATCH --gpus-per-node={job.devices}\n" if job.uses_gpus else "",
        KEEP="#SBATCH --no-kill\n" if job.is_elastic else "",
        STEP=" --no-kill" if job.is_elastic else "",
        PYTHON=shlex.quote(sys.executable),
        FOLDER=shlex.quote(job.folder),
        PORT=job.port or f"$(({PORT - 9500} + SLURM_JOB_ID % 9000))",
        COMMAND="\n".join(f"    {shlex.join(line)}" for line in by_lines(job.command)),
        EXPORTS="".join(f"export {name}={shlex.quote(value)}\n" for name, value in job.environment.items()),
        LAUNCH=shlex.join(job.launch),
        FINAL=" | ".join(map(str, FINAL)),
    )


def ray(job: Job) -> str:
    return fill(
        "launch/templates/ray.py.txt",
        ORIGIN=job.origin,
        FILE=job.file,
        NODES=job.nodes,
        RESOURCES=json.dumps({"CPU": CORES * job.devices} | ({"GPU": job.devices} if job.uses_gpus else {})),
        FOLDER=repr(job.folder),
        PORT=job.port or PORT,
        FINAL=FINAL,
        ENVIRONMENT=repr(job.environment),
        LAUNCH=repr(["--nproc-per-node", str(job.devices), *job.launch]),
        COMMAND="\n".join(f"    {', '.join(map(repr, line))}," for line in by_lines(job.command)),
    )


def docker(job: Job) -> str:
    if job.nodes > 1:
        raise UserError(f"--write docker is for one machine, --nnodes is {job.nodes}; take kubernetes, jobset or slurm")
    alive = "import os, sys, time; sys.exit(time.time() - os.path.getmtime(sys.argv[1]) > 3600)"
    healthy = ["python", "-c", alive, f"{job.run_folder}/metrics.jsonl"]
    if job.run_folder is None:
        healthy = ["python", "-c", "import os; os.kill(1, 0)"]
    compiler = "# Triton compiles with it while a training starts.\nRUN apt-get update \\\n"
    compiler += "    && apt-get install -y --no-install-recommends 'gcc=4:12.2.*' 'libc6-dev=2.36-*' \\\n"
    compiler += "    && rm -rf /var/lib/apt/lists/*\n"
    command = job.words("0", "")
    lines = [", ".join(map(json.dumps, line)) for line in by_lines(command)]
    quoted = {name: re.sub(r'(["\\$])', r"\\\1", value) for name, value in job.environment.items()}
    return fill(
        "launch/templates/Dockerfile",
        ORIGIN=job.origin,
        VERSION=our_version(),
        FILE=job.file,
        IMAGE=job.image,
        CLONE=shlex.quote(str(PROJECT.parent)) if PROJECT.is_file() else "CLONE",
        GPUS="--gpus all " if job.uses_gpus else "",
        PODMAN=", with --device nvidia.com/gpu=all for --gpus all" if job.uses_gpus else "",
        NV="--nv " if job.uses_gpus else "",
        COMPILER=compiler if job.uses_gpus else "",
        ENVIRONMENT="".join(f'ENV {name}="{value}"\n' for name, value in quoted.items()),
        HEALTH=f"HEALTHCHECK --interval=5m --start-period=1h CMD {json.dumps(healthy)}",
        COMMAND="[" + ", \\\n     ".join(lines) + "]",
    )


class Quoted(str):
    """A string that YAML quotes: readers take some plain words, as 1e5 or on, for other types."""


class Block(str):
    """A string of several lines, written as such."""


class Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


Dumper.add_representer(Quoted, lambda d, s: d.represent_scalar("tag:yaml.org,2002:str", str(s), style='"'))
Dumper.add_representer(Block, lambda d, s: d.represent_scalar("tag:yaml.org,2002:str", str(s), style="|"))


def dump(comments: list[str], *documents: dict[str, Any]) -> str:
    texts = [yaml.dump(one, Dumper=Dumper, sort_keys=False, width=10**6, allow_unicode=True) for one in documents]
    return "".join(f"# {line}".rstrip() + "\n" for line in comments) + "---\n".join(texts)


def container(job: Job, address: str) -> dict[str, Any]:
    """Return the container of one node; the index of its pod is the number of the node."""
    # Kubernetes replaces $(NAME) in a command, and $$ by $.
    quoted = replace(job, command=[word.replace("$", "$$") for word in job.command])
    words = quoted.words("$(JOB_COMPLETION_INDEX)", address)
    wanted = {"nvidia.com/gpu": job.devices} if job.uses_gpus else {"cpu": job.devices}
    environment = [{"name": name, "value": Quoted(text.replace("$", "$$"))} for name, text in job.environment.items()]
    return {
        "name": "node",
        "image": job.image,
        "command": ["meshwright"],
        "args": [Quoted(word) for word in words],
        "workingDir": WORK,
        **({"env": environment} if environment else {}),
        "resources": {"limits": {name: Quoted(number) for name, number in wanted.items()}},
        "volumeMounts": [{"name": "work", "mountPath": WORK}, {"name": "memory", "mountPath": "/dev/shm"}],
    }


def job_of_nodes(job: Job, address: str) -> dict[str, Any]:
    """Return the template of the Kubernetes Job whose pods are the nodes."""
    volumes = [
        {"name": "work", "persistentVolumeClaim": {"claimName": CLAIM}},
        {"name": "memory", "emptyDir": {"medium": "Memory"}},
    ]
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE,
        "securityContext": {"runAsNonRoot": True, "runAsUser": USER, "runAsGroup": USER, "fsGroup": USER},
        "containers": [container(job, address)],
        "volumes": volumes,
    }
    final = {"containerName": "node", "operator": "In", "values": list(FINAL)}
    return {
        "completionMode": "Indexed",
        "parallelism": job.nodes,
        "completions": job.nodes,
        "backoffLimit": RESTARTS if job.is_elastic else 0,  # a lost pod comes again by itself, or with all others
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": final}]},
        "template": {"spec": pod},
    }


def failure_policy() -> dict[str, Any]:
    """Return JobSet's rule: a final status fails all, any other failure starts all nodes again."""
    rule = {"name": "final", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    return {"maxRestarts": RESTARTS, "rules": [rule]}


def kubernetes_comments(job: Job, needs: str) -> list[str]:
    return [
        job.origin,
        "",
        f"It needs {needs}, the image {job.image} in a registry of the cluster",
        "(`meshwright launch --write docker` writes its Dockerfile; --image gives another name), and the",
        f"volume claim {CLAIM} with the data, mounted at {WORK}, where relative paths in the command begin.",
        f"{job.nodes} nodes share the claim: its access mode is ReadWriteMany." if job.nodes > 1 else "",
        "",
        f"    kubectl apply -f {shlex.quote(job.file)}",
        "",
        (
            "A lost node is replaced while the others go on"
            if job.is_elastic
            else "After an interruption all nodes start again"
        )
        + f", at most {RESTARTS} times; statuses "
        + f"{', '.join(map(str, FINAL))} end the job.",
    ]


def jobset(job: Job) -> str:
    document = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": job.name},
        "spec": {
            "failurePolicy": failure_policy(),
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "replicatedJobs": [
                {
                    "name": "node",
                    "replicas": 1,
                    "template": {"spec": job_of_nodes(job, f"{job.name}-node-0-0.{job.name}")},
                }
            ],
        },
    }
    return dump(kubernetes_comments(job, "JobSet"), document)


def kubernetes(job: Job) -> str:
    """Return a TrainJob of Kubeflow Trainer, and its runtime with volumes and restarts.

    The shared runtime torch-distributed has no place for volumes that all releases understand.
    """
    nodes = job_of_nodes(job, "$(PET_MASTER_ADDR)")
    trainer = nodes["template"]["spec"]["containers"][0]
    own = {name: trainer.pop(name) for name in ("image", "command", "args", "env", "resources") if name in trainer}
    trainer["image"] = own["image"]
    step = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    for name in ("parallelism", "completions"):  # they follow numNodes
        del nodes[name]
    runtime = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": {"name": job.name, "labels": {"trainer.kubeflow.org/framework": "torch"}},
        "spec": {
            "mlPolicy": {"numNodes": job.nodes, "torch": {}},
            "template": {
                "spec": {
                    "failurePolicy": failure_policy(),
                    "replicatedJobs": [{"name": "node", "template": {"metadata": {"labels": step}, "spec": nodes}}],
                }
            },
        },
    }
    group = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": job.name}
    resources = {"resourcesPerNode": own.pop("resources")}
    train = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": job.name},
        "spec": {
            "runtimeRef": group,
            "trainer": {"numNodes": job.nodes, "numProcPerNode": job.devices, **own, **resources},
        },
    }
    return dump(kubernetes_comments(job, "Kubeflow Trainer 2"), runtime, train)


def skypilot(job: Job) -> str:
    """Return a managed job: its launcher restarts after crashes, SkyPilot after losses of nodes."""
    restarts = [] if "--max-restarts" in job.launch else ["--max-restarts", "3"]
    words = replace(job, launch=[*job.launch, *restarts]).words("@RANK@", "@FIRST@")
    lines = " \\\n    ".join(shlex.join(line) for line in by_lines(words))
    for name, variable in {"@RANK@": "$SKYPILOT_NODE_RANK", "@FIRST@": "$first"}.items():
        lines = lines.replace(name, f'"{variable}"', 1)
    source = str(PROJECT.parent) if PROJECT.is_file() else "CLONE"
    count = {"accelerators": f"H100:{job.devices}"} if job.uses_gpus else {"cpus": f"{CORES * job.devices}+"}
    bucket = {} if job.nodes > 1 else {WORK: {"name": job.name, "mode": "MOUNT_CACHED"}}
    document = {
        "name": job.name,
        "num_nodes": job.nodes,
        "resources": count | {"job_recovery": {"max_restarts_on_errors": 0, "recover_on_exit_codes": [75]}},
        "file_mounts": {"~/meshwright": source} | bucket,
        "volumes": {WORK: CLAIM} if job.nodes > 1 else {},
        "envs": {name: Quoted(value) for name, value in job.environment.items()},
        "setup": Block(
            "python3 -m venv ~/environment\n"
            "~/environment/bin/pip install -c ~/meshwright/constraints.txt ~/meshwright\n"
        ),
        "run": Block(
            f'cd {WORK}\nfirst=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)\nexec ~/environment/bin/meshwright {lines}\n'
        ),
    }
    place = "a bucket of that name; it must be free in your cloud, or yours"
    if job.nodes > 1:  # the nodes write one checkpoint together, which caches of a bucket do not show in time
        place = f"the volume {CLAIM}, which all nodes can write (`sky volumes apply`)"
    comments = [
        job.origin,
        "",
        f"{WORK} holds data and checkpoints, and relative paths in the command begin there. It is",
        f"{place}.",
        "~/meshwright is a clone of Meshwright." + " Choose the accelerators." * job.uses_gpus,
        "",
        f"    sky jobs launch {shlex.quote(job.file)}",
        "",
        "After a preemption, a lost node or a time-out, SkyPilot runs the same command again.",
    ]
    return dump(comments, {name: value for name, value in document.items() if value})


WRITERS: dict[str, Callable[[Job], str]] = {
    "slurm": slurm,
    "kubernetes": kubernetes,
    "jobset": jobset,
    "skypilot": skypilot,
    "ray": ray,
    "docker": docker,
}
