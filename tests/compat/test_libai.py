"""The commands of LiBai, on a CPU."""

from __future__ import annotations

import json
import math
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

import fakes
from blocks import block, covers
from documents import ROOT, by_deepspeed, run, shell, steps
from helpers import free_port
from meshwright.base.errors import UserError
from meshwright.data.files.indexed import Indexed

pytestmark = [pytest.mark.whole, pytest.mark.timeout(180)]

SYSTEM = ROOT / "compat/libai"
CONFIG = "configs/gpt2_nl24_nah16_hs1024.py"
# The parameters after the document's eleven, and changes of the config: sizes for a CPU.
SMALL = (
    "4 01b1d32 6 2 model.cfg.hidden_size=32 model.cfg.ffn_hidden_size=64 model.cfg.num_attention_heads=4 \
    model.cfg.max_seq_length=32 dataloader.train.dataset[0].max_seq_length=32 train.evaluation.eval_iter=2 \
    --no-tensorboard"
)
# As train.sh starts them, without a launcher
PRINT = """python3() { printf '%q ' "$@"; echo; }\nexport -f python3\n"""


@pytest.fixture(scope="module")
def clone(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `git clone` and the document's data leave it, with a folder of configs that may change."""
    folder = tmp_path_factory.mktemp("libai")
    for name in ("tools", "oneflow"):
        (folder / name).symlink_to(SYSTEM / name)
    for name in ("configs", "libai"):
        shutil.copytree(SYSTEM / name, folder / name)
    for path in [*place.glob("gpt2-*"), *place.glob("my-gpt2_text_document.*")]:
        (folder / path.name).symlink_to(path)
    return folder


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch, clone: Path) -> Any:
    monkeypatch.syspath_prepend(str(SYSTEM / "tools"))
    monkeypatch.chdir(clone)
    import train_net

    return train_net


def flags_of(
    tool: Any, words: list[str], config: str = CONFIG, world: int = 1
) -> tuple[list[str], list[str]]:
    base = tool.resolve(str(SYSTEM / "configs/gpt2_pretrain.py"), [])
    flags, notes = tool.to_flags(tool.resolve(config, words), base, world)
    return flags, notes


def lines(ranks: int, **numbers: str) -> list[str]:
    """Return the document's two lines with fewer ranks a node, smaller batches and sizes."""
    text = (
        block("benchmarks/run-libai")
        .replace('"10.10.0.8"', "127.0.0.1")
        .replace("2 8 ", f"2 {ranks} ")
    )
    for old, new in {"32 512": "2 8", "60 1920": "4 32", **numbers}.items():
        text = text.replace(old, new)
    return [f"{line} {SMALL}" for line in text.splitlines()]


def given_to_ranks(clone: Path, line: str) -> list[str]:
    """Return what train_net.py is given by a line of the document, which runs nothing."""
    words = shlex.split(shell(clone, PRINT + line).splitlines()[1])
    assert words[:3] == ["-m", "meshwright", "launch"]
    return words[words.index("--config-file") :]


def test_oneflows_launcher(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its module is found in the folder of the scripts, with its flags and its defaults."""
    ran: list[tuple[Any, list[str]]] = []
    monkeypatch.setattr(
        "meshwright.runtime.launch.agent.launch_ranks",
        lambda plan, program: ran.append((plan, program)) or 0,
    )
    monkeypatch.chdir(clone)
    monkeypatch.syspath_prepend(str(clone))
    script = ["tools/train_net.py", "--config-file", CONFIG, "train.seed=1"]
    for flags in (
        "--nproc_per_node 8 --nnodes 2 --node_rank 1 --master_addr 10.0.0.1 --master_port 12345",
        "",
    ):
        monkeypatch.setattr("sys.argv", ["launch.py", *flags.split(), *script])
        with pytest.raises(SystemExit) as end:
            runpy.run_module("oneflow.distributed.launch", run_name="__main__")
        assert end.value.code == 0
    (two, program), (one, _) = ran
    assert (two.processes, two.nodes, two.node, two.address, two.port) == (
        8,
        2,
        1,
        "10.0.0.1",
        12345,
    )
    assert (one.processes, one.nodes) == (1, 1) and program == ["-u", *script]


@pytest.mark.long
@covers("benchmarks/run-libai")
def test_the_benchmark_under_its_launcher(clone: Path, tmp_path: Path) -> None:
    """Its folder of logs: LiBai's lines, memory after 6 steps, the config; nothing is saved."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/nvidia-smi").write_text(
        "#!/bin/sh\necho 'name, memory.used [MiB]'\necho 'A100, 12345 MiB'\n"
    )
    (tmp_path / "bin/nvidia-smi").chmod(0o755)
    port = f"export PATH={tmp_path / 'bin'}:$PATH PORT={free_port()}\n"
    logs = run(
        clone, *(port + line for line in lines(1, **{"60 1920": "2 8", "2 4 true": "2 1 true"}))
    )
    folders = [clone / log.splitlines()[0].removeprefix("LOG_FILENAME=") for log in logs]
    name = r"LibAI_gpt2_nl4_nah16_hs1024_FP16_actrue_mp2_pp1_mb2_gb8_2n1g_\d+_\d+"
    assert all(
        re.fullmatch(name, folder.name) and folder.parent.name == "2n1g" for folder in folders
    )
    assert "iteration:" not in logs[1]
    lead = folders[0]
    (log,) = lead.glob("output.log")
    shown = log.read_text()
    assert logs[0].endswith(shown)
    found = re.findall(
        r"^ eta: \S+  iteration: (\d)/6  consumed_samples: (\d+)  total_loss: \d", shown, re.M
    )
    assert found == [("1", "16"), ("3", "32"), ("5", "48")]
    assert "A100, 12345 MiB" in shown and not [*lead.glob("iter_*"), *lead.glob("model*")]
    output = lead.with_name(re.sub(r"_\d+_\d+$", "", lead.name))  # both machines' one
    assert yaml.safe_load((output / "config.yaml").read_text())["train"]["output_dir"] == str(
        output.relative_to(clone)
    )
    assert "nl4_fp16_1x2x1_ac_mb2_gb8_2n1g" in shell(
        clone, f"python tools/extract_logs.py {log.relative_to(clone)}"
    )


def test_the_documents_unequal_lines_are_refused_on_all_ranks(clone: Path) -> None:
    """Its second node has another batch, `60 1920`: named on each node, not trained or hung on."""
    numbers = {"2 4 true": "2 1 true"}
    given = [given_to_ranks(clone, line) for line in lines(1, **numbers)]
    ends, logs = by_deepspeed(clone, given, 1, "tools/train_net.py")
    assert ends == [2, 2]
    for log in logs:
        assert (
            "global_batch_size: 8 on rank 0, 32 on rank 1" in log
            and "micro_batch_size: 2 on rank 0, 4" in log
        )


@covers("benchmarks/libai-pipeline-stages")
def test_stages_of_layers(tool: Any) -> None:
    """The document's line in the config, and LiBai's own division without it."""
    path = Path("configs/stages.py")
    path.write_text(f"{Path(CONFIG).read_text()}\n{block('benchmarks/libai-pipeline-stages')}")
    words = ["train.dist.pipeline_parallel_size=4"]
    for config, counts in ((CONFIG, [6, 7, 7, 4]), (str(path), [6, 6, 6, 6])):
        flags, _ = flags_of(tool, words, config)
        ids = json.loads(flags[flags.index("--pipeline-layout") + 1])
        assert [ids.count(n) for n in range(4)] == counts and ids == sorted(ids)
    assert "--pipeline-layout" not in flags_of(tool, [], str(path))[0]


BENCHMARK = (
    "logs/LibAI_gpt2_nl24_nah16_hs1024_FP16_actrue_mp1_pp1_mb2_gb2_1n1g_20261129_222413142312253"
)
# What OneAutoTest's script and its user give -> period of saving, steps after which memory is shown
SAVED = {
    f"train.output_dir={BENCHMARK} train.train_iter=220": ("", "99"),
    f"train.output_dir={BENCHMARK} train.train_iter=6": ("", "6"),
    f"train.output_dir={BENCHMARK} train.train_iter=6000": ("5000", "99"),
    f"train.output_dir={BENCHMARK} train.train_iter=220 train.checkpointer.period=500": (
        "500",
        "99",
    ),
    "train.output_dir=gpt_20261129_222413142312253 train.train_iter=220": ("5000", ""),
}


@covers("benchmarks/libai-switch-off-saving", "benchmarks/libai-show-memory")
@pytest.mark.parametrize("words", SAVED)
def test_a_benchmark_needs_no_edits(
    tool: Any, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The edits of the document find their files, and change nothing."""
    for name, edit in (("default", "switch-off-saving"), ("trainer", "show-memory")):
        with Path(f"libai/engine/{name}.py").open("r+") as file:
            assert file.readline().startswith("# Nothing is to be edited here")
            file.write(block(f"benchmarks/libai-{edit}"))
    found: list[str] = []
    monkeypatch.setattr(tool, "main", lambda argv, spellings: found.extend(argv) or 0)
    assert tool.train(["--config-file", CONFIG, *words.split()]) == 0
    pairs = dict(zip(found, found[1:], strict=False))
    wanted = SAVED[words]
    assert (pairs.get("--save-interval", ""), pairs.get("--nvidia-smi-at", "")) == wanted
    assert ("a benchmark saves no model" in capsys.readouterr().err) == (not wanted[0])


CHANGES = {
    "train.amp.enabled=True": "--fp16 --initial-loss-scale 262144 --loss-scale-window 2000 --hysteresis 1",
    "train.zero_optimization.enabled=True train.zero_optimization.stage=2": "--zero-stage 2",
    "train.warmup_ratio=0.01": "--lr-warmup-iters 100 --lr-warmup-init 1.5e-07",
    "train.scheduler={'_target_':'WarmupPolynomialLR'}": "--lr-decay-style linear --min-lr 0.0001",
    "train.scheduler={'_target_':'x.WarmupCosineAnnealingLR','eta_min':1e-6}": "--lr-decay-style cosine --min-lr 1e-06",
    "train.checkpointer.period=7": "--save ./output --save-interval 7 --keep-last 100 --save-overwrite",
    "train.load_weight=old": "--load old --finetune --save-overwrite",
    "train.load_weight=old/model_final/": "--load old --finetune --save-overwrite",
    "train.resume=True": "--load ./output --exit-on-missing-checkpoint --eval-iters",
    "train.global_batch_size=60": "--eval-iters 8",
    "model.cfg.apply_residual_post_layernorm=True": "--apply-residual-connection-post-layernorm",
    "optim._target_=oneflow.optim.SGD optim.momentum=0.8": "--optimizer sgd --adam-beta1",
    "dataloader.train.splits=[[8,1,1]]": "--data-path my-gpt2_text_document --split 8,1,1 --seq-length 1024",
}


@pytest.mark.parametrize("words", CHANGES)
def test_settings_become_flags(tool: Any, words: str) -> None:
    flags, notes = flags_of(tool, words.split(), world=4)
    assert CHANGES[words] in " ".join(flags)
    assert notes == (
        ["the decay starts after the warm-up, as Megatron's; LiBai's starts at step 0"]
        * ("ratio" in words)
    )


def test_a_length_in_epochs(tool: Any) -> None:
    """LiBai's: the larger of the steps and of the readings, whose last step may be partial."""
    words = [
        "train.global_batch_size=7",
        "train.train_epoch=2",
        "dataloader.train.dataset[0].max_seq_length=32",
    ]
    tokens = Indexed("my-gpt2_text_document").tokens_of(0, 57)  # split 949,50,1 of 60 documents
    steps = math.ceil((tokens - 1) // 32 * 2 / 7)
    for length, want in ((0, steps), (3, steps), (10**6, 10**6)):
        flags, notes = flags_of(
            tool, [*words, f"train.train_iter={length}", "train.warmup_ratio=0.1"]
        )
        assert flags[flags.index("--train-iters") + 1] == str(want)
        assert flags[flags.index("--lr-warmup-iters") + 1] == str(math.ceil(want * 0.1))
        assert (
            f"train.train_iter, {length} steps, and train.train_epoch, {steps} steps of this data"
            in notes[0]
        )


REFUSED = {
    "train.evaluation.eval_perod=3": "eval_perod is no setting here; did you mean train.evaluation.eval_period?",
    "model.cfg.hidden_layers=12": "model.cfg.hidden_layers is 12, but --num-layers is 24 by another key; give one",
    "train.scheduler._target_=libai.scheduler.WarmupStepLR": "WarmupStepLR is refused; known are WarmupCosineLR,",
    "model._target_=libai.models.BertForPreTraining": "model._target_ BertForPreTraining is refused; known are GPT",
    "train.dist.pipeline_num_layers=12": "pipeline_num_layers 12 must be model.cfg.num_layers 24",
    "train.evaluation.eval_after_n_epoch=1": "refused: saves and validations are counted in steps; give None",
    "dataloader.train.dataset[0].mask=1": "dataloader.train.dataset: mask is no setting here",
    "train.warmup_ratio=abc": "train.warmup_ratio=abc must be a number, such as 0",
    "train.amp.enabled=no": "train.amp.enabled=no must be True or False, such as True",
    "train.train_epoch=two": "train.train_epoch=two must be a number, such as 0",
    "dataloader.train.dataset[3].seed=1": "no table dataloader.train.dataset.3",
}


@pytest.mark.parametrize("word", REFUSED)
def test_what_has_no_counterpart_is_refused_by_name(tool: Any, word: str) -> None:
    from meshwright.base.errors import UserError

    with pytest.raises(UserError) as refusal:
        flags_of(tool, [word])
    assert REFUSED[word] in str(refusal.value)


def test_settings_without_effect_are_reported_once(tool: Any) -> None:
    words = ["train.rdma_enabled=False", "graph.debug=2", "graph.auto_parallel.enabled=True"]
    words += ["model.cfg.head_size=64"]
    assert flags_of(tool, words)[1] == [
        "model.cfg.head_size has no effect: LiBai's GPT reads hidden_size and ffn_hidden_size",
        "train.rdma_enabled has no effect: NCCL decides",
        "graph has no effect: there is one mode, and the layout is given by its sizes",
    ]
    assert flags_of(tool, [])[1] == []


OWN = """
import oneflow as flow
from omegaconf import DictConfig
from libai.config import LazyCall, get_config
from .common.models.gpt import pretrain_model as model
from .common.optim import optim

train = get_config("common/train.py").train
dataloader = get_config("common/data/gpt_dataset.py").dataloader
tokenization = get_config("common/data/gpt_dataset.py").tokenization
prefix = "my-gpt2" + "_text_document"
for ds in dataloader.train.dataset:
    ds.data_prefix = ds.indexed_dataset.data_prefix = prefix
    ds.max_seq_length = 16
model.cfg.update(dict(hidden_layers=2, hidden_size=8 * 4, num_attention_heads=4, max_seq_length=16))
model.cfg["ffn_hidden_size"] = 4 * model.cfg.hidden_size
train.update(train_iter=4, log_period=2, train_micro_batch_size=2, output_dir="own", dist=dict(
    tensor_parallel_size=1, pipeline_parallel_size=1, pipeline_num_layers=model.cfg.hidden_layers))
train.checkpointer.period = 2
train.evaluation.enabled = False
optim.lr = 1e-3
"""
# As LiBai's configs have it since March 2023.
TEST = """
from libai.data import build_nlp_test_loader
from libai.data.data_utils import get_indexed_dataset
from libai.data.datasets import GPT2Dataset

train.checkpointer.save_model_after_n_epoch = None
dataloader.test = [
    LazyCall(build_nlp_test_loader)(
        dataset=LazyCall(GPT2Dataset)(
            name="gpt-2", data_prefix="x", indexed_dataset=LazyCall(get_indexed_dataset)(
                data_prefix="x", data_impl="mmap", skip_warmup=False),
            max_seq_length=16, max_num_samples=10, seed=1234),
        test_batch_size=4)
]
dataloader.test[0].dataset.data_prefix = prefix
dataloader.test[0].dataset.indexed_dataset.data_prefix = prefix
"""


def test_a_test_set_beside(tool: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """It has a loss of its own, beside that of the set that `splits` makes."""
    Path("configs/tests.py").write_text(OWN.replace('"own"', '"tests"') + TEST)
    words = (
        "train.evaluation.enabled=True train.evaluation.eval_period=2 train.evaluation.eval_iter=1"
    )
    start = ["--config-file", "configs/tests.py", "--no-tensorboard"]
    assert tool.train([*start, *words.split(), "--device=cpu"]) == 0
    said = capsys.readouterr()
    assert "validation loss at iteration 2 | " in said.out
    assert "validation loss at iteration 2 on test0 | " in said.out
    assert "each set of dataloader.test has a validation loss of its own" in said.err
    longer = "dataloader.test[0].dataset.max_seq_length=32"
    with pytest.raises(UserError, match="max_seq_length 32 must be the training's 16"):
        flags_of(tool, [longer], "configs/tests.py")
    with pytest.raises(UserError, match=r"dataloader.test\[0\]: sampler is no setting here"):
        flags_of(tool, ["dataloader.test[0].sampler=1"], "configs/tests.py")


def test_a_config_of_ones_own(tool: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Trained, resumed further, evaluated; started anew it moves the first run aside."""
    Path("configs/own.py").write_text(OWN)
    start = ["--config-file", "configs/own.py", "--no-tensorboard"]
    assert tool.train(start) == 0
    assert "iteration: 3/4" in capsys.readouterr().out
    assert sorted(path.name for path in Path("own").glob("iter_*")) == [
        "iter_0000002",
        "iter_0000004",
    ]
    assert (
        tool.train([*start, "--resume", "train.train_iter=5", "--override-opt_param-scheduler"])
        == 0
    )
    assert "iteration: 4/5" in capsys.readouterr().out
    evaluation = [
        "train.train_iter=5",
        "train.evaluation.enabled=True",
        "train.evaluation.eval_iter=1",
    ]
    assert tool.train([*start, "--resume", "--eval-only", *evaluation]) == 0
    assert " validation loss at " in capsys.readouterr().out and len(steps(Path("own"))) == 5
    assert tool.train([*start, "train.train_iter=2"]) == 0
    assert "moved the earlier run to" in capsys.readouterr().out
    assert math.isfinite(steps(Path("own"))[-1][0]) and len(steps(Path("own"))) == 2


def test_bad_input_ends_in_a_sentence(
    clone: Path, tool: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    (clone / "configs/bad.py").write_text("import os\nos.system('touch hacked')\n")
    script = "python3() { return 70; }\nexport -f python3\nbash tools/args_libai_gpt2.sh "
    for words, said, status in (
        ("", "0 parameters; give CONFIG", 2),
        ("none.py", "there is no config none.py", 2),
        (
            f"{CONFIG} 1 1 0 a 1 1 yes",
            "USE_FP16 is yes and ACTIVATION_CHECKPOINT false; give true or false",
            2,
        ),
        (f"{CONFIG} 1 1 0 a 1 1 true true 4 4 24 a/b", "RUN_COMMIT is a/b", 2),
        (f"{CONFIG} 1 1 0 a 1 1 true true 4 4 24 c x", "TRAIN_ITERS is x", 2),
        (f"{CONFIG} 1 1", "LOG_FILENAME=", 70),  # the training's
    ):
        assert said in shell(clone, script + words, status)
    assert "usage: train.sh" in shell(clone, "bash tools/train.sh tools/train_net.py", 2)
    bad = [sys.executable, "tools/train_net.py", "--config-file"]
    done = subprocess.run([*bad, "configs/bad.py"], cwd=clone, capture_output=True, text=True)
    assert done.returncode == 2 and not (clone / "hacked").exists()
    assert done.stderr.endswith(
        "bad.py:1: module os is not read; names of libai, oneflow, flowvision, omegaconf are known\n    import os\n"
    )
    from meshwright.base.errors import UserError

    for word, said in (
        ("train.train_iter=abc", "must be a number, such as"),
        ("train.dist.tensor_parallel_size=0", "tensor_parallel_size 0 must be above 0"),
        ("optim.betas=3", "lacks a setting, or has one of another kind"),
    ):
        with pytest.raises(UserError, match=said):
            tool.train(["--config-file", CONFIG, word])
    (clone / "configs/few.py").write_text("train = dict()")
    with pytest.raises(
        UserError, match="few.py has no dataloader and no model and no optim and no tokenization"
    ):
        tool.train(["--config-file", "configs/few.py"])
    assert (
        tool.train(["--config-file", CONFIG, "train.train_micro_batch_size=-3", "--dry-run"]) == 2
    )
    assert "train.train_micro_batch_size -3 must be above 0" in capsys.readouterr().err


def test_train_sh(clone: Path) -> None:
    """LiBai's general form and its variables."""
    more = "--fast-dev-run optim.lr=1e-3 --device cpu"
    script = f"NODE=2 NODE_RANK=1 ADDR=10.0.0.1 PORT=7 bash tools/train.sh tools/train_net.py {CONFIG} 4 {more}"
    launch = "--nproc_per_node 4 --nnodes 2 --node_rank 1 --master_addr 10.0.0.1 --master_port 7 --wait 600"
    want = f"-m meshwright launch {launch} tools/train_net.py --config-file {CONFIG} {more}"
    assert shell(clone, PRINT + script).split() == want.split()


@covers("benchmarks/libai-installation")
def test_installation(tmp_path: Path, place: Path) -> None:
    """LiBai's repository, wheels and pip are stood in for; setup.py asks for this clone alone."""
    files = tmp_path / "files"
    shutil.copytree(SYSTEM, files / "libai", symlinks=True)
    first = fakes.put_first(tmp_path / "bin", files)
    shell(tmp_path, f"set -e\n{first}{block('benchmarks/libai-installation')}pwd; test -f setup.py")
    assert "pip install -e ." in (tmp_path / "bin/calls").read_text()
    made = subprocess.run(
        [sys.executable, "setup.py", "-q", "egg_info", "-e", str(tmp_path)],
        cwd=SYSTEM,
        capture_output=True,
        text=True,
    )
    assert made.returncode == 0, made.stderr
    (asked,) = tmp_path.glob("*.egg-info/requires.txt")
    # releases of setuptools space it in their own ways
    requirement = Requirement(asked.read_text().strip())
    assert (requirement.name, requirement.url) == ("meshwright", ROOT.as_uri())


def test_overrides(tool: Any) -> None:
    config = {"a": {"b": 1, "sets": [{"path": "x"}, 5]}}
    words = [
        "a.b=[0]*2",
        "a.sets[0].path=./gpt=2",
        "a.sets.1=1e-3",
        "a.amp.enabled=TRUE",
        "+a.c=null",
        "a.d=",
        "a.e='1'",
    ]
    tool.override(config, words)
    sets = [{"path": "./gpt=2"}, 0.001]
    assert config == {
        "a": {"b": [0, 0], "sets": sets, "amp": {"enabled": True}, "c": None, "d": "", "e": "1"}
    }
    for word in ("a=1", "c.b=1", "a.b.0.c=1", "a.sets.2=1", "a.sets.x.y=1", "a.c.d=1"):
        with pytest.raises(UserError, match=f"{word}(:| is not a setting)"):
            tool.override(config, [word])
