"""OneFlow-GPT's container launcher: a command in a container that installs Meshwright from here.

python3 tools/launch_container.py --cmd "python3 -m oneflow_gpt.training ..." [--dry-run]
"""

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1]
CLONE = SOURCE.parents[1]
ENGINES = ("docker", "podman", "apptainer")
# the oldest version for Meshwright, and that of the image without --py
OLDEST, PYTHON = "3.10", "3.12"

SCRIPT = f"""set -e
export PIP_CACHE_DIR=/var/cache/pip PYTHONUSERBASE=/var/cache/python PIP_ROOT_USER_ACTION=ignore
PATH="/opt/python/{{tag}}-{{tag}}/bin:$PATH"
if ! python3 -c 'import sys; sys.exit(sys.version_info < (3, {OLDEST[2:]}))'; then
    echo "this image has $(python3 --version 2>&1); Meshwright needs {OLDEST} or later: give another --image" >&2
    exit 69
fi
python3 -m pip install --quiet {{packages}}
{{cmd}}
"""


def fail(message: str, status: int = 2) -> None:
    print(f"launch_container.py: error: {message}", file=sys.stderr)
    sys.exit(status)


def note(message: str) -> None:
    print(f"note: {message}", file=sys.stderr)


def script(given: argparse.Namespace) -> str:
    """Return the program of the container's shell."""
    if not any((given.src / name).is_file() for name in ("setup.py", "pyproject.toml")):
        fail(
            f"--src {given.src} has no setup.py; give the folder that holds oneflow_gpt/, such as {SOURCE}"
        )
    packages = ["-e", str(given.src)]
    if given.wheel and given.wheel.name.startswith("oneflow-"):
        note(
            f"--wheel {given.wheel.name} is not installed: Meshwright, from --src, trains in its place"
        )
    elif given.wheel:
        if not given.wheel.is_file():
            fail(f"--wheel {given.wheel} does not exist")
        packages = [str(given.wheel.resolve()), *packages]
    return SCRIPT.format(
        tag="cp" + given.py.replace(".", ""), packages=shlex.join(packages), cmd=given.cmd
    )


def command(given: argparse.Namespace, engine: str, file: str) -> list[str]:
    """Return the engine's command, which runs the file in the container."""
    mounts = dict.fromkeys(map(str, (given.src, Path.cwd(), *given.mounts, file)))
    if wrong := [path for path in mounts if ":" in path or "," in path]:
        fail(f"{wrong[0]}: {engine} cannot mount a path with ':' or ','")
    pairs = [f"{path}:{path}" for path in mounts] + [f"{given.cache}:/var/cache"]
    values = [
        f"{n}={given.proxy}"
        for n in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")
        if given.proxy
    ]
    if engine == "apptainer":
        image = given.image if Path(given.image).exists() else f"docker://{given.image}"
        words = ["apptainer", "exec", "--nv", *(w for v in values for w in ("--env", v))]
        return [
            *words,
            *(w for p in pairs for w in ("--bind", p)),
            "--pwd",
            os.getcwd(),
            image,
            "bash",
            file,
        ]
    gpus = ["--gpus", "all"]
    if engine == "podman":
        gpus = ["--device", "nvidia.com/gpu=all", "--security-opt", "label=disable"]
    words = [
        engine,
        "run",
        *(["-it"] if given.interactive and sys.stdin.isatty() else []),
        "--rm",
        *gpus,
    ]
    words += ["--privileged"] * given.privileged + [
        "--network",
        "host",
        "--shm-size=8g",
        "--ulimit",
        "memlock=-1",
    ]
    words += [w for v in values for w in ("-e", v)] + [w for p in pairs for w in ("-v", p)]
    return [*words, "-w", os.getcwd(), "--name", "oneflow_gpt", given.image, "bash", file]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--cmd", default="bash", help="what to run (default: a shell)")
    parser.add_argument(
        "--src", type=Path, default=SOURCE, help="folder to install with pip install -e"
    )
    parser.add_argument("--image", help=f"image (default: python:{PYTHON}, or the version of --py)")
    parser.add_argument(
        "--wheel", type=Path, help="wheel to install before --src; OneFlow's is left out"
    )
    parser.add_argument(
        "--extra-mount", type=Path, help="another folder to mount (default: /data, if there)"
    )
    parser.add_argument("--py", default=PYTHON, help="Python version")
    parser.add_argument("--proxy", help="HTTP proxy of the container")
    parser.add_argument(
        "--no-interactive", action="store_false", dest="interactive", help="without a terminal"
    )
    parser.add_argument("--engine", choices=ENGINES, help="default: the first that is installed")
    parser.add_argument(
        "--privileged", action="store_true", help="give the container all of the machine's devices"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the script and the command, and start nothing"
    )
    return parser.parse_args()


def main() -> int:
    given = parse()
    given.src, given.cache = given.src.resolve(), Path.home() / "var-cache"
    if not re.fullmatch(r"3\.\d{1,2}", given.py):
        fail(f"--py {given.py} is not a version such as {PYTHON}")
    if int(given.py[2:]) < int(OLDEST[2:]):
        note(f"--py {given.py}: Meshwright needs Python {OLDEST} or later; {PYTHON} is used")
        given.py = PYTHON
    if old_image := (given.image or "").startswith("oneflow-manylinux2014"):
        note(
            f"--image {given.image} has Python 3.7 and glibc 2.17, too old for torch; python:{given.py} is used"
        )
    given.image = f"python:{given.py}" if old_image or not given.image else given.image
    if given.extra_mount and not given.extra_mount.is_dir():
        fail(f"--extra-mount {given.extra_mount} is not a folder")
    extra = given.extra_mount or Path("/data")
    given.mounts = [CLONE] * given.src.is_relative_to(CLONE) + [extra.resolve()] * extra.is_dir()
    given.mounts += [given.wheel.resolve()] if given.wheel and given.wheel.is_file() else []
    engine = given.engine or next(filter(shutil.which, ENGINES), "docker")
    text = script(given)
    if given.dry_run:
        print(f"# SCRIPT\n{text}\n{shlex.join(command(given, engine, 'SCRIPT'))}")
        return 0
    if not shutil.which(engine):
        fail(
            f"{engine} is not installed; install one of {', '.join(ENGINES)}, or see the command with --dry-run",
            69,
        )
    given.cache.mkdir(exist_ok=True)
    with tempfile.NamedTemporaryFile("w", prefix="oneflow_gpt-", suffix=".sh") as file:
        file.write(text)
        file.flush()
        words = command(given, engine, file.name)
        print(f"tempfile name: {file.name}\n{shlex.join(words)}", flush=True)
        with subprocess.Popen(words) as process:
            # Ctrl-C reaches the engine too, which ends the container
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            return process.wait()


if __name__ == "__main__":
    sys.exit(main())
