"""The commands of Ascend's GPT-2, on a CPU."""

from __future__ import annotations

import bz2
import contextlib
import json
import re
import runpy
import shutil
import threading
import time
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import yaml

import fakes
from blocks import block, covers
from documents import (
    ROOT,
    by_deepspeed,
    shell,
    started,
)
from meshwright.config import flags
from meshwright.config.schema import TrainConfig
from meshwright.data.files.indexed import Indexed
from meshwright.runtime.launch.launcher import LaunchPlan

pytestmark = [pytest.mark.whole, pytest.mark.timeout(180)]


# The drop-in

SMALL = """ --num-layers=2 --hidden-size=32 --num-attention-heads=4 --seq-length=32 --max-position-embeddings=32
    --global-batch-size=4 --micro-batch-size=1 --log-interval=2 --eval-interval=2 --eval-iters=1 --num-workers=0
    --device=cpu""".replace("\n", "")


@pytest.fixture(scope="module")
def system(place: Path) -> Path:
    """The folder of the drop-in, as in a clone."""
    folder = place / "compat/ascend-gpt2"
    shutil.copytree(ROOT / "compat/ascend-gpt2", folder, symlinks=True)
    shutil.copy(ROOT / "pyproject.toml", place)
    (folder.parent / "megatron-deepspeed").symlink_to(ROOT / "compat/megatron-deepspeed")
    return folder


def written(folder: Path, name: str, script: str) -> Path:
    folder.mkdir()
    (folder / name).write_text(script)
    (folder / name).chmod(0o755)
    return folder


TABLE = yaml.safe_load("""
    columns: tensor_model_parallel_size pipeline_model_parallel_size hidden_size num_layers seq_length
      num_attention_heads batch micro lr min_lr recompute_granularity loss_scale
    345M: [1, 2, 1024, 24, 1024, 16, 16, 4, 1.5e-4, 1.5e-5, full, null]
    1.3B: [2, 2, 2048, 24, 1024, 16, 32, 8, 2.0e-4, 2.0e-5, full, null]
    2.7B: [2, 2, 2560, 32, 2048, 32, 32, 8, 1.6e-4, 1.6e-5, full, null]
    3.7B: [2, 2, 3072, 32, 2048, 32, 16, 4, 1.2e-4, 1.2e-5, full, null]
    345M_without_mp: [1, 1, 1024, 24, 1024, 16, 64, 8, 1.5e-4, 1.0e-5, null, 65536.0]
    full: {train_iters: 500000, lr_decay_iters: 320000}
    performance: {train_iters: 300, lr_decay_iters: 300}
    common: {initial_loss_scale: 4096, loss_scale_window: 500, lr_decay_style: cosine,
      lr_warmup_fraction: 0.01, weight_decay: 0.01, clip_grad: 1.0, hidden_dropout: 0,
      attention_dropout: 0, seed: 1234, split: "949,50,1", num_workers: 16, zero_stage: 0, fp16: true,
      eval_interval: 1000, eval_iters: 10, log_interval: 100, steps_per_print: 1}
""")
# In place of python3: it records its arguments and prints what LINES holds.
RECORDER = """#!/bin/sh
printf '%s\\0' "$@" "" >> "$ARGS"
cat "$LINES"
exit "${STATUS:-0}"
"""


@pytest.fixture
def recorded(system: Path, tmp_path: Path) -> str:
    """Shell lines after which the scripts start no rank; $ARGS has what they would start."""
    lines = [f"steps: {n} loss: 3.0 iter time (s): 0.1 samples/sec: {n}.000" for n in range(1, 251)]
    lines[:0] = ["  seq_length ...................................... 1024"]
    lines[100:100] = [
        " validation loss at iteration 100 | lm loss value: 3.4E+00 | lm loss PPL: 2.65E+01 | "
    ]
    lines += [
        " validation loss at iteration 200 | lm loss value: NAN | lm loss PPL: NAN | ",
        " validation loss at the end of training for val data | lm loss value: 3.5E+00 | lm loss PPL: 3.3E+01 | ",
        " validation loss at the end of training for test data | lm loss value: 1E+00 | lm loss PPL: 2.7E+00 | ",
    ]
    (tmp_path / "lines").write_text("\n".join(lines) + "\n")
    folder = written(tmp_path / "first", "python3", RECORDER)
    return f"export PATH={folder}:$PATH ARGS={tmp_path}/args LINES={tmp_path}/lines\n"


@pytest.mark.parametrize("devices", ["--num_gpus 8", "--include localhost:0,1,2,3,4,5,6,7"])
def test_run_py_is_deepspeeds_launcher(
    system: Path, monkeypatch: pytest.MonkeyPatch, devices: str
) -> None:
    """As the published scripts call it."""
    ran: list[tuple[LaunchPlan, list[str]]] = []
    monkeypatch.setattr(
        "meshwright.runtime.launch.agent.launch_ranks",
        lambda plan, program: ran.append((plan, program)) or 0,
    )
    monkeypatch.chdir(system)
    script = [str(system / "pretrain_gpt.py"), "--deepspeed", "--deepspeed_config=./ds_config.json"]
    monkeypatch.setattr("sys.argv", ["run.py", *devices.split(), *script])
    with pytest.raises(SystemExit) as end:
        runpy.run_path("run.py", run_name="__main__")
    ((plan, program),) = ran
    assert (
        end.value.code == 0
        and (plan.processes, plan.nodes) == (8, 1)
        and program == ["-u", *script]
    )


def test_the_environment_of_an_npu(system: Path) -> None:
    """The published scripts source it, on a machine without CANN too."""
    out = shell(
        system, "set -e\nsource ./test/env_npu.sh\necho $HCCL_CONNECT_TIMEOUT $HCCL_EXEC_TIMEOUT"
    )
    assert out == "1800 1200\n"


def train_block(place: Path) -> str:
    script = block("ascend-gpt2/train").replace(
        "--train_iters=$train_iters", f"--train_iters=$train_iters{SMALL}"
    )
    return f"export RANK_SIZE=2 real_data_path={place}/data selected_model_size=345M train_iters=5\n{script}"


def assert_finals(out: str) -> None:
    line = r"-+ Final result -+\nFinal Performance samples/sec : [\d.]+\nFinal Train lm loss PPL\(accuracy\): [\d.]+\n"
    assert len(re.findall(line + r"E2E Training Duration sec : \d+\n", out)) == 2


@covers("ascend-gpt2/train")
def test_train(place: Path, system: Path, tmp_path: Path, recorded: str) -> None:
    """Both scripts, one after the other; what the first starts runs as two ranks, which print what
    both find in the log.
    """
    shutil.rmtree(system / "ckpts", ignore_errors=True)
    (tmp_path / "lines").write_text("")
    shell(system, f"{recorded}{train_block(place)}", 1)
    assert (system / "data").resolve() == (place / "data").resolve()
    runs = [run.split("\0")[6:] for run in (tmp_path / "args").read_text().split("\0\0")[:-1]]
    assert ["--save" in run for run in runs] == [True, False]
    ends, logs = by_deepspeed(system, [runs[0]], 2)
    assert ends == [0, 0], "\n".join(logs)
    layout = "data-parallel-size: 1, tensor-model-parallel size: 1, pipeline-model-parallel size: 2"
    assert layout in logs[0]
    assert len(re.findall(r"^steps: \d loss: .* samples/sec: ", logs[0], re.M)) == 5
    (tmp_path / "lines").write_text(logs[0])
    assert_finals(shell(system, f"{recorded}{train_block(place)}"))
    assert (system / "ckpts/ckpts_tmp/iter_0000005").is_dir()


@pytest.mark.parametrize(
    ("size", "kind"),
    [*((size, "full") for size in TABLE if size[0].isdigit()), ("1.3B", "performance")],
)
def test_settings_of_each_size(
    place: Path, system: Path, tmp_path: Path, recorded: str, size: str, kind: str
) -> None:
    shutil.rmtree(system / "ckpts", ignore_errors=True)
    script = f"{recorded} bash ./test/train_{kind}_8p.sh --data_path={place}/data --model_size"
    out = shell(system, f"{script}={size}")
    assert (
        f"| NAME | params | PPL | samples/s | seq_len | Steps |\n| 8p | {size} | 26.5 | 200.5 | 1024 | 250 |\n"
        in out
    )
    # the last hundred, the least
    assert "samples/sec : 200.5\nFinal Train lm loss PPL(accuracy): 26.5\n" in out
    words = (tmp_path / "args").read_text().split("\0")[:-2]
    assert words[:6] == ["-m", "meshwright", "launch", "--nproc-per-node", "8", "train"]
    argv = [str(system / w) if w.startswith(("ckpts/", "test/")) else w for w in words[6:]]
    c = flags.parse_settings(TrainConfig, [*argv, "--world-size", "8"], "meshwright train").config
    seen = flags.to_dict(c) | {"batch": c.global_batch, "micro": c.micro_batch}
    names = TABLE["columns"].split()
    assert [seen[name] for name in names] == TABLE[size]
    expected = TABLE["common"] | TABLE[kind]
    assert {name: seen[name] for name in expected} == expected
    saved = ("ckpts/ckpts_tmp", 100000) if kind == "full" else (None, None)
    if kind == "full":
        other = "1.3B" if size == "345M" else "345M"
        assert f"ckpts_tmp holds a run of {size}, not {other}: move" in shell(
            system, f"{script}={other}", 1
        )
    assert (
        c.checkpoint.save and str(Path(c.checkpoint.save).relative_to(system)),
        c.checkpoint.save_interval,
    ) == saved


def test_train_iters_count_in_both_scripts(
    place: Path, system: Path, tmp_path: Path, recorded: str
) -> None:
    """The original's performance script ignores them. Another --data_path than ./data is read."""
    other = tmp_path / "other data"
    other.mkdir()
    shutil.rmtree(system / "ckpts", ignore_errors=True)
    for kind in ("full", "performance"):
        out = shell(
            system, f"{recorded} bash test/train_{kind}_8p.sh --data_path='{other}' --train_iters=7"
        )
        words = (tmp_path / "args").read_text().split("\0\0")[-2].split("\0")
        assert (
            words[words.index("--train-iters") + 1] == "7"
            and f"{other}/my-gpt_text_sentence" in words
        )
        assert f"./data is there already, and another folder: training reads {other}" in out


def test_errors(place: Path, system: Path, recorded: str) -> None:
    shutil.rmtree(system / "ckpts", ignore_errors=True)
    script = "bash ./test/train_full_8p.sh"
    data = f"--data_path={place}/data"
    assert shell(system, script, 1) == '[Error] para "data_path" must be confing\n'
    choose = "Invalid model size. Please choose from: 345M 1.3B 2.7B 3.7B 345M_without_mp\n"
    assert shell(system, f"{script} {data} --model_size=7B", 1) == choose
    missing = shell(system, f"{script} --data_path=./none", 1)
    assert f"is no folder, seen from {system}; test/dataset_preprocess_gpt.sh makes" in missing
    assert "--data_path needs a value: --data_path=..." in shell(
        system, f"{script} --data_path x", 2
    )
    assert "x is no option" in shell(system, f"{script} x", 2)
    assert "bash test/train_full_8p.sh --data_path=DIR" in shell(system, f"{script} --help")
    out = shell(system, f"{recorded} STATUS=70 {script} {data}", 70)  # the training's
    assert (
        "training ended with status 70" in out
        and "samples/sec: 250.000" in out
        and "Final" not in out
    )
    (system / "test/output/0/train_0.log").unlink()  # else it may be a run's that continues
    out = shell(system, f"{recorded} LINES=/dev/null {script} {data}", 1)
    assert "Final Performance samples/sec : no step is in" in out and "no validation is in" in out


def test_a_signal_reaches_the_training(place: Path, system: Path, tmp_path: Path) -> None:
    """It may save before it ends; the script waits, and has its status."""
    slow = "#!/bin/bash\ntrap 'echo saved; exit 143' TERM\necho begun\nfor n in {1..600}; do sleep 0.1; done\n"
    folder = written(tmp_path / "first", "python3", slow)
    log = system / "test/output/0/train_0.log"
    log.unlink(missing_ok=True)
    script = f"export PATH={folder}:$PATH; exec bash test/train_performance_8p.sh --data_path={place}/data"
    with started(system, script) as (process,):
        while not (log.exists() and "begun" in log.read_text()):
            assert process.poll() is None
            time.sleep(0.02)
        process.terminate()
        assert process.wait(20) == 143
    assert log.read_text() == "begun\nsaved\n"


TEXT = "Mr. A. B. Smith has {{{{t}}}} [[x|{0}.5 m]]. Yes!"
PAGE = f"<page><title>T{{0}}</title><ns>0</ns><revision><text>{TEXT}</text></revision></page>"
DUMP = f"<mediawiki>{''.join(map(PAGE.format, range(3)))}</mediawiki>"


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), lambda *a: Quiet(*a, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@covers("ascend-gpt2/preprocess", "ascend-gpt2/data-folder")
def test_preprocess(place: Path, tmp_path: Path) -> None:
    """The dump is downloaded if it is not there; ./data then has the document's files."""
    system = tmp_path / "compat/ascend-gpt2"
    shutil.copytree(ROOT / "compat/ascend-gpt2", system, symlinks=True)
    for name in ("tools", "src"):
        (tmp_path / name).symlink_to(ROOT / name)
    (system / "data").mkdir()
    for name in ("gpt2-vocab.json", "gpt2-merges.txt"):  # else fetched
        (system / "data" / name).symlink_to(place / name)
    (tmp_path / "web").mkdir()
    dump = "enwiki-latest-pages-articles.xml.bz2"
    (tmp_path / "web" / dump).write_bytes(bz2.compress(DUMP.encode()))
    with served(tmp_path / "web") as address:
        made = shell(
            system, f"export DUMP_URL={address}/{dump}\n" + block("ascend-gpt2/preprocess")
        )
    assert "3 documents, 9 sequences" in made and (system / dump).exists()
    names = set(re.findall(r"[\w-]+\.\w+", block("ascend-gpt2/data-folder")))
    assert len(names) == 4 and names <= {path.name for path in (system / "data").iterdir()}
    tokenizer = json.loads((system / "data/gpt2-vocab.json").read_text())
    assert Indexed(system / "data/my-gpt_text_sentence").doc_idx.tolist() == [0, 3, 6, 9]
    assert "<|endoftext|>" in tokenizer  # which no sentence ends with
    tokens = np.fromfile(system / "data/my-gpt_text_sentence.bin", np.uint16)
    assert tokenizer["<|endoftext|>"] not in tokens
    again = shell(system, "bash test/dataset_preprocess_gpt.sh")  # without a download
    assert "is already there" in again
    assert "[Error] nothing: no such file or folder" in shell(
        system, "bash test/dataset_preprocess_gpt.sh nothing", 1
    )
    own = shell(system, f"bash test/dataset_preprocess_gpt.sh '{place}/my-corpus.json'", 73)
    assert "my-gpt_text_sentence.idx exist already" in own and "--overwrite" in own
    own = shell(
        system,
        f"bash test/dataset_preprocess_gpt.sh '{place}/my-corpus.json' --overwrite --lang chinese",
    )
    assert "60 documents" in own


SOURCES = (
    "reference-sources ascend-sources clone requirements deepspeed original-sources enter".split()
)


@covers(*(f"ascend-gpt2/{name}" for name in SOURCES))
def test_sources_and_installs(place: Path, system: Path, tmp_path: Path) -> None:
    """With programs that fetch nothing: each block as it stands, in the folder that it is for."""
    text = {name: block(f"ascend-gpt2/{name}") for name in SOURCES}
    for name, value in (("{url}", "$url"), ("{code_path}", "${url##*/}/$code_path")):
        text["clone"] = text["clone"].replace(name, value)
    text["clone"] = text["clone"].replace("${url##*/}/", "ModelZoo-PyTorch/")
    text["enter"] = text["enter"].replace("${模型文件夹名称}", "GPT-2_for_PyTorch")
    model = tmp_path / "files/ModelZoo-PyTorch/PyTorch/built-in/nlp"
    model.mkdir(parents=True)
    (model / "GPT-2_for_PyTorch").symlink_to(system)
    script = fakes.put_first(tmp_path / "bin", tmp_path / "files") + "set -e\n"
    script += "".join(text[name] for name in ("reference-sources", "ascend-sources", "clone"))
    script += f"(cd GPT-2_for_PyTorch\n{text['requirements']})\n"
    script += (
        "".join(f"({text[name]})\n" for name in ("deepspeed", "original-sources"))
        + text["enter"]
        + "ls; pwd -P"
    )
    out = shell(tmp_path, script)
    assert out.endswith(f"{system}\n") and "pretrain_gpt.py" in out
    assert (tmp_path / "bin/calls").read_text().splitlines() == [
        "git clone https://gitee.com/ascend/ModelZoo-PyTorch.git",
        "pip3 install -r requirements.txt",
        "pip3 install deepspeed==0.6.0",
        "git clone -b adaptor https://gitee.com/ascend/DeepSpeed.git",
        "pip3 install ./",
        "git clone https://github.com/microsoft/Megatron-DeepSpeed.git",
        "git checkout b4d4a0e",
    ]
    assert (system / (system / "requirements.txt").read_text().strip()).resolve() == place
    assert 'name = "meshwright"' in (place / "pyproject.toml").read_text()
