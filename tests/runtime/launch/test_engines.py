"""`meshwright launch --write`: what the files hold, read back, checked by rules, and executed."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from documents import ROOT
from helpers import TINY_FLAGS, free_port, read_rows
from meshwright.__main__ import main
from meshwright.base.errors import (
    DONE,
    FINAL,
    HANG,
    LOCKED,
    UNAVAILABLE,
    UNEQUAL,
    UNEXPECTED,
    USAGE,
)
from meshwright.config import flags
from meshwright.config.schema import TrainConfig
from meshwright.runtime.launch import agent, engines
from meshwright.runtime.launch.launcher import LaunchConfig

ENGINES = sorted(engines.ENGINES)
MODEL = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16".split()
# Words that shells, YAML, JSON, Docker or Kubernetes would change if they were not quoted.
HARD = [
    "my data/it's",
    '$HOME "x"',
    "$(id) $$ ${A}",
    "back\\slash\\",
    "a: b # c",
    "[1, 2]{*}",
    "µ→中文",
    "@NODES@",
]
TRAIN = [
    "train",
    *MODEL,
    "--micro-batch-size",
    "1",
    "--global-batch-size",
    "8",
    "--lr",
    "1e-5",
    "--train-iters",
    "010",
]
TRAIN += [
    "--data-path",
    *HARD,
    "--seed",
    "1234",
    "--save",
    "run",
    "--load=run",
    "--tokenizer",
    "on",
    "--bf16",
]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in [n for n in os.environ if n.startswith(("MESHWRIGHT_", "SLURM_"))]:
        monkeypatch.delenv(name)
    return tmp_path


def write(
    capsys: pytest.CaptureFixture[str], engine: str, *words: str, nodes: int = 2, devices: int = 4
) -> str:
    """Return what launch prints for an engine."""
    nodes = 1 if engine == "docker" else nodes
    place = ["--nnodes", str(nodes), "--nproc-per-node", str(devices)]
    capsys.readouterr()
    assert main(["launch", "--write", engine, *place, *words]) == DONE
    return capsys.readouterr().out


def fake(path: Path, script: str) -> None:
    """Make a program of a few lines of bash."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


# Read back


def by_bash(script: str, **environ: str) -> list[str]:
    """Run a script that prints words, each with a NUL behind it."""
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, env=os.environ | environ, check=True
    )
    return done.stdout.decode().split("\0")[:-1]


def read_slurm(text: str) -> list[str]:
    array = text[text.index("COMMAND=(") : text.index("\n)\n") + 2]
    started = re.search(r"(--nproc-per-node .*?) \"\$\{COMMAND", text, re.S)
    assert started
    words = (
        started[1]
        .replace("\\\n", "")
        .replace('"${hosts[0]}"', "host")
        .replace('"$PORT"', "29500")
        .split()
    )
    return [*words, "--node-rank", "0", *by_bash(f"{array}\nprintf '%s\\0' \"${{COMMAND[@]}}\"")]


def expand(word: str) -> str:
    """Expand a word as Kubernetes does: $(NAME) of the environment, and $$ for $."""
    known = {"JOB_COMPLETION_INDEX": "0", "PET_MASTER_ADDR": "host"}
    return re.sub(r"\$\$|\$\((\w+)\)", lambda m: known.get(m[1], m[0]) if m[1] else "$", word)


def read_kubernetes(text: str) -> list[str]:
    return [expand(word) for word in list(yaml.safe_load_all(text))[1]["spec"]["trainer"]["args"]][
        1:
    ]


def read_jobset(text: str) -> list[str]:
    (job,) = yaml.safe_load(text)["spec"]["replicatedJobs"]
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    return [expand(word) for word in container["args"]][1:]


def read_skypilot(text: str) -> list[str]:
    home = Path("home")
    fake(home / "environment/bin/meshwright", 'printf "%s\\0" "$@"')
    script = yaml.safe_load(text)["run"].replace("cd /work\n", "")
    return by_bash(
        script, HOME=str(home.resolve()), SKYPILOT_NODE_IPS="host\nother", SKYPILOT_NODE_RANK="1"
    )[1:]


def read_ray(text: str) -> list[str]:
    given: dict[str, Any] = {}
    for name in ("LAUNCH", "COMMAND"):
        found = re.search(rf"^{name} = (.*?\])$", text, re.S | re.M)
        assert found
        exec(f"{name} = {found[1]}", given)
    words: list[str] = [*given["LAUNCH"], "--nnodes", "2", *given["COMMAND"]]
    return words


def read_docker(text: str) -> list[str]:
    words: list[str] = json.loads(instructions(text)[-1].removeprefix("CMD "))
    return words[1:]


# For each engine, the name of its example, and how the words of `launch` are read back.
FILES: dict[str, tuple[str, Callable[[str], list[str]]]] = {
    "slurm": ("run.sbatch", read_slurm),
    "kubernetes": ("trainjob.yaml", read_kubernetes),
    "jobset": ("jobset.yaml", read_jobset),
    "skypilot": ("sky.yaml", read_skypilot),
    "ray": ("driver.py", read_ray),
    "docker": ("Dockerfile", read_docker),
}


def read_back(engine: str, text: str) -> LaunchConfig:
    return flags.parse_settings(LaunchConfig, FILES[engine][1](text), "meshwright launch").config


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.promise("Files that `launch --write` writes for a shell give each word back as it was")
def test_the_command_is_read_back_word_for_word(
    engine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = write(capsys, engine, "--max-restarts", "2", *TRAIN)
    given = read_back(engine, text)
    assert given.command == TRAIN
    assert (given.nnodes or 1, given.nproc_per_node, given.max_restarts) == (
        1 + (engine != "docker"),
        "4",
        2,
    )
    assert given.wait == (30 if engine == "docker" else engines.WAIT)
    configs = [
        flags.parse_settings(TrainConfig, c[1:], "", check=False).config
        for c in (TRAIN, given.command)
    ]
    assert configs[0] == configs[1] and configs[1].data.data_path == HARD


@pytest.mark.parametrize("engine", ENGINES)
def test_a_run_that_survives_the_loss_of_nodes(
    engine: str, capsys: pytest.CaptureFixture[str], place: Path
) -> None:
    if engine == "ray":
        words = ["--nnodes=2", "--nproc-per-node=4", "--min-ranks=4", *TRAIN]
        assert main(["launch", "--write=ray", *words]) == USAGE
        assert "use --engine ray" in capsys.readouterr().err
        assert main(["launch", "--write=slurm", "--engine=ray", *words]) == USAGE
        return
    texts = [write(capsys, engine, *words, *TRAIN) for words in ((), ("--min-ranks", "4"))]
    given = [read_back(engine, text) for text in texts]
    most = 4 if engine == "docker" else 8
    assert [(one.min_ranks, one.max_ranks) for one in given] == [(None, None), (4, most)]
    if engine == "slurm":
        assert ["--no-kill" in text for text in texts] == [False, True]
        assert re.search(r"^#SBATCH --no-kill$", texts[1], re.M) and re.search(
            r"^srun --no-kill ", texts[1], re.M
        )
    elif engine in ("kubernetes", "jobset"):
        assert [re.findall(r"backoffLimit: (\d+)", text) for text in texts] == [
            ["0"],
            [str(engines.RESTARTS)],
        ]


@pytest.mark.parametrize("engine", ENGINES)
def test_settings_of_the_environment_are_in_the_file(
    engine: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    value = "a $b 'c' \"d\" \\e"
    monkeypatch.setenv("MESHWRIGHT_TENSORBOARD_DIR", value)
    text = write(capsys, engine, *TRAIN)
    if engine == "slurm":
        (line,) = [line for line in text.splitlines() if line.startswith("export ")]
        found = by_bash(
            f'{line}\nprintf "%s\\0" "$MESHWRIGHT_TENSORBOARD_DIR"', MESHWRIGHT_TENSORBOARD_DIR=""
        )
        assert found == [value]
    elif engine == "docker":
        (line,) = [line for line in instructions(text) if line.startswith("ENV MESH")]
        # as Docker unquotes it
        assert by_bash(f'X={line.partition("=")[2]}; printf "%s\\0" "$X"') == [value]
    elif engine == "ray":
        assert f"ENVIRONMENT = { {'MESHWRIGHT_TENSORBOARD_DIR': value}!r}\n" in text
    elif engine == "skypilot":
        assert yaml.safe_load(text)["envs"] == {"MESHWRIGHT_TENSORBOARD_DIR": value}
    else:
        documents = list(yaml.safe_load_all(text))
        pods = (
            documents[1]["spec"]["trainer"]
            if engine == "kubernetes"
            else containers(documents[0])[0]
        )
        assert [(e["name"], expand(e["value"])) for e in pods["env"]] == [
            ("MESHWRIGHT_TENSORBOARD_DIR", value)
        ]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_script_and_a_cpu(engine: str, capsys: pytest.CaptureFixture[str], place: Path) -> None:
    (place / "my_script.py").touch()
    text = write(capsys, engine, "my_script.py", "--x", "$y")
    assert read_back(engine, text).command == ["my_script.py", "--x", "$y"]
    words = {
        "slurm": "gpus-per-node",
        "ray": '"GPU":',
        "skypilot": "accelerators",
        "docker": "--gpus",
    }
    assert words.get(engine, "nvidia.com/gpu") in text
    text = write(capsys, engine, *TRAIN, "--device", "cpu")
    assert not re.search(words.get(engine, "nvidia.com/gpu"), text)


EXAMPLES = ROOT / "examples/engines"


def example(engine: str) -> str:
    """Write what the page's first command writes for an engine, with places of an invented user."""
    page = (ROOT / "docs/engines.md").read_text(encoding="utf-8").replace("\\\n", " ")
    line = next(
        line for line in page.splitlines() if line.startswith("meshwright launch --write slurm ")
    )
    file = Path(FILES[engine][0])
    words = line.replace("slurm", engine, 1).replace("run.sbatch", file.name, 1).split()[1:]
    if engine == "docker":
        words[words.index("--nnodes") + 1] = "1"
    assert main([*words[:1], "--overwrite", *words[1:]]) == DONE
    text = file.read_text(encoding="utf-8").replace(
        sys.executable, "/home/me/meshwright/.venv/bin/python"
    )
    return text.replace(str(Path.cwd()), "/home/me/work").replace(str(ROOT), "/home/me/meshwright")


def unversioned(text: str) -> str:
    return re.sub(r"((?:version|Meshwright) |meshwright:)\d+\.\d+\.\d+", r"\1VERSION", text)


@pytest.mark.parametrize("engine", ENGINES)
def test_examples(engine: str) -> None:
    """`python tests/runtime/launch/test_engines.py` writes them anew."""
    shown = (EXAMPLES / FILES[engine][0]).read_text(encoding="utf-8")
    assert unversioned(shown) == unversioned(example(engine))


# Refused before a file is written


def test_another_file_is_kept(capsys: pytest.CaptureFixture[str], place: Path) -> None:
    start = ["launch", "--write", "slurm", "--nproc-per-node", "4", "--write-to"]
    (place / "run.sh").write_text("mine")
    assert main([*start, "run.sh", *TRAIN]) == LOCKED
    assert "--overwrite" in capsys.readouterr().err and (place / "run.sh").read_text() == "mine"
    assert main([*start, "run.sh", "--overwrite", *TRAIN]) == DONE
    out, err = capsys.readouterr()
    assert out == "run.sh: slurm, 1 x 4 ranks; its first lines say how to start it\n"
    assert f"relative paths begin in {place}\n" in err
    assert (place / "run.sh").read_text().startswith("#!/bin/bash\n")


def test_notes(capsys: pytest.CaptureFixture[str]) -> None:
    def notes(*words: str) -> str:
        assert (
            main(["launch", "--write", "docker", "--nproc-per-node", "1", "train", *words]) == DONE
        )
        return capsys.readouterr().err

    base = [*MODEL, *"--micro-batch-size 1 --lr 1 --train-iters 9 --data-path /data/x".split()]
    err = notes(*base)
    assert "without --save and --load, an interrupted run begins again" in err
    assert (
        "relative paths begin in /work of the container" in err
        and "inside the container: /data/x" in err
    )
    err = notes(*base, "--save", "new", "--load", "old")
    assert (
        "an interrupted run stops" in err
        and "without --save-interval only a signal and the end save" in err
    )
    err = notes(*base, "--exit-duration-in-mins", "50", "--no-exit-signal-handler")
    assert "--exit-duration-in-mins ends the run with status 0" in err and "does not save" in err
    assert "only the number of ranks was checked" in notes(
        *base[10:], "--save", "run", "--load", "run"
    )


# Their fields


def containers(document: dict[str, Any]) -> list[dict[str, Any]]:
    template = document["spec"].get("template", document)
    (job,) = template["spec"]["replicatedJobs"]
    pods: list[dict[str, Any]] = job["template"]["spec"]["template"]["spec"]["containers"]
    return pods


# The fields of SkyPilot 0.14 that its file uses. Kubeflow's models, below, check the others.
SKYPILOT = {"name", "num_nodes", "resources", "file_mounts", "volumes", "envs", "setup", "run"}
RESOURCES = {"accelerators", "cpus", "job_recovery"}


def test_skypilot(capsys: pytest.CaptureFixture[str]) -> None:
    several = yaml.safe_load(write(capsys, "skypilot", *TRAIN))
    assert several["num_nodes"] == 2 and several["resources"]["accelerators"] == "H100:4"
    assert several["resources"]["job_recovery"] == {
        "max_restarts_on_errors": 0,
        "recover_on_exit_codes": [75],
    }
    assert several["volumes"] == {"/work": "meshwright"} and list(several["file_mounts"]) == [
        "~/meshwright"
    ]
    words = read_skypilot(write(capsys, "skypilot", *TRAIN))
    place = "--nnodes 2 --node-rank 1 --master-addr host --master-port 29500".split()
    assert words[2:10] == place and words[10:14] == "--wait 600 --max-restarts 3".split()
    one = yaml.safe_load(write(capsys, "skypilot", *TRAIN, nodes=1))
    assert (
        one["file_mounts"]["/work"] == {"name": "meshwright-run", "mode": "MOUNT_CACHED"}
        and "volumes" not in one
    )
    for document in (several, one):
        assert document.keys() <= SKYPILOT and document["resources"].keys() <= RESOURCES


# Dockerfile


def instructions(text: str) -> list[str]:
    """Return the instructions of a Dockerfile, continued lines joined."""
    lines = [
        line for line in text.replace("\\\n", "").splitlines() if line and not line.startswith("#")
    ]
    return [re.sub(r" +", " ", line) if line.startswith("RUN") else line for line in lines]


def test_health(capsys: pytest.CaptureFixture[str], place: Path) -> None:
    """The container is healthy as long as the run writes its figures."""
    line = next(
        one
        for one in instructions(write(capsys, "docker", *TRAIN))
        if one.startswith("HEALTHCHECK ")
    )
    words = json.loads(line.partition(" CMD ")[2])
    words[0] = sys.executable

    def status() -> int:
        return subprocess.run(words, stderr=subprocess.DEVNULL).returncode

    (place / "run").mkdir()
    assert status() == 1
    (place / "run/metrics.jsonl").touch()
    assert status() == 0
    os.utime(place / "run/metrics.jsonl", (0, time.time() - 4000))
    assert status() == 1


@pytest.mark.parametrize("engine", ["slurm", "kubernetes", "jobset", "ray"])
def test_no_engine_starts_again_what_ends_the_same_way(
    engine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong layout that --verify-layout found, say, is computed once; the launcher agrees."""
    text = write(capsys, engine, *TRAIN)
    lists = {"slurm": r"    ([\d| ]+) \| 126 \| 127\)", "ray": r"FINAL = \((.*)\)"}
    (statuses,) = re.findall(lists.get(engine, r"values:\n([- \d\n]+?)\n +template"), text)
    assert [int(n) for n in re.findall(r"\d+", statuses)] == list(FINAL) and UNEQUAL in FINAL
    assert all(agent.is_final(status) for status in FINAL)


@pytest.mark.parametrize("page", ["docs/engines.md", "docs/zh/engines.md"])
def test_the_page_lists_the_statuses(page: str) -> None:
    rows = re.findall(r"^\| (\d[^|]*) \| [^|]+ \| ([^|]+) \|$", (ROOT / page).read_text(), re.M)
    statuses = [[int(n) for n in re.findall(r"\d+", first)] for first, _ in rows]
    assert statuses[:3] == [[DONE], [UNEXPECTED, UNAVAILABLE, HANG], list(FINAL)]


# Their own tools, where they are installed (the extra `engines`)


@pytest.mark.whole
@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("engine", ["kubernetes", "jobset"])
def test_kubeflows_own_models(engine: str, nodes: int, capsys: pytest.CaptureFixture[str]) -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models")
    kinds = {
        "JobSet": "JobsetV1alpha2JobSet",
        "TrainJob": "TrainerV1alpha1TrainJob",
        "TrainingRuntime": "TrainerV1alpha1TrainingRuntime",
    }
    for document in yaml.safe_load_all(write(capsys, engine, *TRAIN, nodes=nodes)):
        model = getattr(models, kinds[document["kind"]]).from_dict(document)
        assert model.to_dict() == document  # a model drops fields that it does not know


@pytest.mark.parametrize("nodes", [1, 2])
def test_skypilots_own_schema(nodes: int, capsys: pytest.CaptureFixture[str]) -> None:
    schemas = pytest.importorskip("sky.utils.schemas")
    jsonschema = pytest.importorskip("jsonschema")
    document = yaml.safe_load(write(capsys, "skypilot", *TRAIN, nodes=nodes))
    jsonschema.validate(document, schemas.get_task_schema())
    jsonschema.validate(document["resources"], schemas.get_resources_schema())


@pytest.mark.parametrize("engine, tool", [("docker", "hadolint"), ("slurm", "shellcheck")])
def test_linters(engine: str, tool: str, capsys: pytest.CaptureFixture[str], place: Path) -> None:
    program = shutil.which(
        tool, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    )
    if program is None:
        pytest.skip(f"{tool} is not installed")
    words = [word for word in TRAIN if "\\" not in word]  # which hadolint cannot read in JSON
    (place / "file").write_text(write(capsys, engine, *words))
    done = subprocess.run([program, "file"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


# Slurm: the script runs, on programs that stand in for those of Slurm

SRUN = """
while [[ $1 == --* ]]; do shift; done
pids=()
for ((node = 0; node < SLURM_JOB_NUM_NODES; node++)); do
    env SLURM_NODEID=$node SLURM_PROCID=$node SLURM_NTASKS=2 SLURM_LOCALID=0 SLURM_STEP_ID=0 "$@" & pids+=($!)
done
echo "${pids[@]}" > "$FAKE/pids"
most=0
for pid in "${pids[@]}"; do
    wait "$pid"; status=$?
    [[ $status -le $most ]] || most=$status
done
exit "$most"
"""
SCONTROL = """
case $1 in
    show) for ((node = 0; node < SLURM_JOB_NUM_NODES; node++)); do echo 127.0.0.1; done ;;
    requeue) echo "$2" >> "$FAKE/requeued" ;;
esac
"""
SCANCEL = (
    '[[ $* == "--signal=TERM 77.0" ]] && read -ra pids < "$FAKE/pids" && kill -TERM "${pids[@]}"'
)


class Slurm:
    """Runs a script as sbatch does, and again as long as it asks for that; `warn` sends USR1."""

    def __init__(self, folder: Path, script: str) -> None:
        self.folder, self.script, self.starts = folder, folder / "run.sbatch", 0
        self.script.write_text(script)
        given = dict(
            line.removeprefix("#SBATCH --").split("=")
            for line in re.findall("^#SBATCH .*=.*", script, re.M)
        )
        assert "\n#SBATCH --requeue\n" in script and given["signal"] == "B:USR1@600"
        for name, text in {"srun": SRUN, "scontrol": SCONTROL, "scancel": SCANCEL}.items():
            fake(folder / "bin" / name, text)
        self.environ = os.environ | {
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "FAKE": str(folder),
            "SLURM_JOB_ID": "77",
            "SLURM_JOB_NODELIST": "node[1-2]",
            "SLURM_JOB_NUM_NODES": given["nodes"],
            "SLURM_CPUS_PER_TASK": given["cpus-per-task"],
        }

    def submit(self, warn: Callable[[], bool] = lambda: False) -> int:
        """Return the status of the last start; the first is warned as soon as `warn` says so."""
        while True:
            environ = self.environ | (
                {"SLURM_RESTART_COUNT": str(self.starts)} if self.starts else {}
            )
            process = subprocess.Popen(["bash", str(self.script)], env=environ)
            while process.poll() is None:
                if self.starts == 0 and warn():
                    process.send_signal(signal.SIGUSR1)
                    break
                time.sleep(0.01)
            status = process.wait()
            self.starts += 1
            requeued = self.folder / "requeued"
            if not requeued.exists():
                return status
            assert requeued.read_text() == "77\n"
            requeued.unlink()


@pytest.mark.parametrize(
    "statuses, warned, expected",
    [
        ("0", False, (0, 1)),
        ("75 0", False, (0, 2)),
        ("1 75 137 0", False, (0, 4)),
        ("143 0", True, (0, 2)),  # stopped before the time limit
        ("143 0", False, (143, 1)),  # stopped by scancel
        ("138 0", False, (0, 2)),  # the scheduler warned the run itself
        *((f"{status} 0", False, (status, 1)) for status in FINAL[:1]),
        ("75 65 0", False, (65, 2)),
        ("1 " * 30, False, (1, 21)),  # the first start, and 20 more
    ],
)
def test_slurm_queues_again_what_can_continue(
    statuses: str,
    warned: bool,
    expected: tuple[int, int],
    capsys: pytest.CaptureFixture[str],
    place: Path,
) -> None:
    # Stands in for Python: the first node takes the next status, a warned one waits for TERM.
    wait = (
        "trap 'exit 143' TERM; touch started; while :; do sleep 0.01; done"
        if warned
        else "exit 143"
    )
    fake(
        place / "python",
        f"""[[ $6 == 0 ]] || exit 0
read -r status rest < statuses
echo "$rest" > statuses
[[ $status != 143 ]] || {{ {wait}; }}
exit "$status" """,
    )
    (place / "statuses").write_text(statuses + "\n")
    script = re.sub(r"^PYTHON=\S+", "PYTHON=./python", write(capsys, "slurm", *TRAIN), flags=re.M)
    slurm = Slurm(place, script)
    status = slurm.submit((place / "started").exists if warned else lambda: False)
    assert (status, slurm.starts) == expected


@pytest.mark.long
def test_slurm_trains_on_two_nodes(capsys: pytest.CaptureFixture[str], place: Path) -> None:
    """A run that is warned saves, is queued again, continues at its step and finishes."""
    words = [
        *TINY_FLAGS,
        "--train-iters=100",
        "--eval-interval=100",
        "--save=run dir",
        "--load=run dir",
    ]
    port = ["--master-port", str(free_port())]
    slurm = Slurm(place, write(capsys, "slurm", *port, "train", *words, devices=1))
    assert slurm.submit(lambda: len(read_rows(place / "run dir")) > 5) == 0
    assert [row["iteration"] for row in read_rows(place / "run dir")] == list(range(1, 101))
    saved, last = (row["iteration"] for row in read_rows(place / "run dir", "save"))
    assert [row["iteration"] for row in read_rows(place / "run dir", "start")] == [
        0,
        saved,
    ] and last == 100
    assert slurm.starts == 2


# Ray: the driver runs, on a module that stands in for Ray's


class Task:
    def __init__(self, function: Callable[..., Any], argv: tuple[Any, ...] = ()) -> None:
        self.function, self.argv = function, argv

    def options(self, **given: Any) -> Task:
        assert given.pop("scheduling_strategy")[0] == "group" and {"num_cpus"} <= given.keys() <= {
            "num_cpus",
            "num_gpus",
        }
        return self

    def remote(self, *argv: Any) -> Task:
        return Task(self.function, argv)


@pytest.mark.parametrize(
    "statuses, expected",
    [
        ([[0, 0]], 0),
        ([[75, 1], [0, 0]], 0),
        ([[75, 65]], 65),
        ([[76, 1]], 76),
        ([[-9, 75], [143, 143]], 143),
        ([[1, 1]] * 30, 1),
    ],
)
def test_the_ray_driver(
    statuses: list[list[int]],
    expected: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    place: Path,
) -> None:
    calls: list[list[str]] = []
    groups: list[tuple[list[dict[str, int]], str]] = []

    class Process:
        def __init__(self, words: list[str], cwd: str, env: dict[str, str]) -> None:
            assert cwd == str(place)
            calls.append(words)

        def poll(self) -> int:
            self.returncode = statuses[(len(calls) - 1) // 2][(len(calls) - 1) % 2]
            return self.returncode

    def group(bundles: list[dict[str, int]], strategy: str) -> Any:
        groups.append((bundles, strategy))
        return types.SimpleNamespace(ready=lambda: Task(lambda: None))

    fake = types.SimpleNamespace
    util = fake(
        get_node_ip_address=lambda: "10.0.0.7",
        placement_group=fake(placement_group=group, remove_placement_group=lambda group: None),
        scheduling_strategies=fake(
            PlacementGroupSchedulingStrategy=lambda group, placement_group_bundle_index: ("group",)
        ),
    )
    ray = fake(
        remote=lambda **options: Task,
        get=lambda task: task.function(*task.argv),
        wait=lambda tasks, num_returns, timeout: (tasks, []),
        init=lambda: None,
        util=util,
        exceptions=fake(TaskCancelledError=KeyError, RayError=OSError),
    )
    modules: dict[str, Any] = {"ray": ray, "ray.util": util}
    modules |= {
        f"ray.util.{name}": getattr(util, name)
        for name in ("placement_group", "scheduling_strategies")
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    (place / "driver.py").write_text(write(capsys, "ray", *TRAIN))
    monkeypatch.setattr(subprocess, "Popen", Process)
    monkeypatch.setattr(signal, "signal", lambda number, act: None)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path("driver.py", run_name="__main__")
    assert ended.value.code == expected
    assert len(calls) == 2 * min(len(statuses), 21)
    assert groups[0] == ([{"CPU": 16, "GPU": 4}] * 2, "STRICT_SPREAD")
    for node, words in enumerate(calls[:2]):
        assert words[:5] == [sys.executable, "-u", "-m", "meshwright", "launch"]
        given = flags.parse_settings(LaunchConfig, words[5:], "").config
        assert (given.nnodes, given.node_rank, given.master_addr, given.command) == (
            2,
            node,
            "10.0.0.7",
            TRAIN,
        )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for name in ENGINES:
            EXAMPLES.joinpath(FILES[name][0]).write_text(example(name), encoding="utf-8")
