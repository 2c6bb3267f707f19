"""Conversion between all formats keeps every number and needs little memory."""

import contextlib
import filecmp
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from helpers import TINY_FLAGS, captured_output, write_counting
from meshwright.__main__ import main
from meshwright.base.errors import BAD_DATA, DONE, LOCKED, USAGE, UserError
from meshwright.checkpoint import loading, native
from meshwright.checkpoint.boxes import Box, split_boxes
from meshwright.checkpoint.convert import complete_source, native_files, select
from meshwright.checkpoint.formats import HUGGING_FACE
from meshwright.checkpoint.huggingface import writer as huggingface_writer
from meshwright.checkpoint.pickle import writer
from meshwright.checkpoint.sources import MappedSource, Source, TensorInfo, TensorView
from meshwright.checkpoint.steps import NATIVE
from meshwright.config.schema import TokenizerFlags
from meshwright.data import tokenizers

pytestmark = pytest.mark.whole
ROOT = Path(__file__).resolve().parents[2]


class Made(Source):
    """A GPT whose numbers are computed on demand from the tensor's name and their place in it."""

    @classmethod
    def of(cls, layers, width, heads, vocab, positions, optimizer=False):
        known = {"wte.weight": (vocab, width), "wpe.weight": (positions, width)}
        for i in range(layers):
            for name, out, into in (
                ("attn.qkv", 3, 1),
                ("attn.proj", 1, 1),
                ("mlp.fc", 4, 1),
                ("mlp.proj", 1, 4),
            ):
                known |= {
                    f"h.{i}.{name}.weight": (out * width, into * width),
                    f"h.{i}.{name}.bias": (out * width,),
                }
            known |= {
                f"h.{i}.{norm}.{kind}": (width,)
                for norm in ("ln_1", "ln_2")
                for kind in ("weight", "bias")
            }
        known |= {"ln_f.weight": (width,), "ln_f.bias": (width,)}
        if optimizer:
            known |= {
                f"{name}/{kind}": shape
                for name, shape in known.items()
                for kind in ("exp_avg", "exp_avg_sq")
            }
        config = {"num_layers": layers, "hidden_size": width, "num_attention_heads": heads}
        config |= {"ffn_hidden_size": 4 * width, "max_position_embeddings": positions}
        made = cls(
            "made", Path("made"), 7, config=config, vocab=vocab, state=STATE if optimizer else {}
        )
        made.known = {name: TensorInfo(shape, "float32") for name, shape in known.items()}
        return made

    @property
    def tensors(self):
        return self.known

    def fill(self, want):
        for name, (_, boxes, tensor) in want.items():
            seed = sum(map(ord, name)) % 100
            for box, flat in split_boxes(boxes, tensor.view(-1)):
                rows, columns = (
                    torch.arange(box.size[0], dtype=torch.float32) + box.offset[0],
                    torch.zeros(1),
                )
                if len(box.size) > 1:
                    columns = torch.arange(box.size[1], dtype=torch.float32) + box.offset[1]
                flat.view(len(rows), len(columns)).copy_(
                    torch.outer(rows + seed, 1 / (columns + 3)) / 1e5
                )

    def of_vocabulary(self, size):
        return self

    def parts(self, name):
        return [("made", Box((0,) * len(self.known[name].shape), self.known[name].shape))]


STATE = json.loads("""{
    "iteration": 7, "consumed_train_samples": 28, "schedule_samples": 28, "optimizer_steps": 7, "skips": [],
    "epochs": null, "nonfinite_in_a_row": 0, "best_iteration": null, "best_loss": null, "true_vocab_size": 61,
    "padded_vocab_size": 128, "positions": 16, "network": "GPT of Block", "blends": null, "losses": [], "rollbacks": 0,
    "loss_scale": {"dynamic": false, "scale": 1.0, "growth_tracker": 0, "hysteresis_tracker": 2, "in_a_row": 0},
    "schedule": {
        "max_lr": 0.01, "min_lr": 0.0, "warmup": 0.0, "decay": 40, "style": "linear", "start_wd": 0.01,
        "end_wd": 0.01, "wd_samples": 40, "wd_style": "constant"
    }
}""")


def values(path):
    source = loading.open_checkpoint(path, report=lambda line: None)
    assert source is not None
    source = source if source.vocab else source.of_vocabulary(61)
    out = {
        name: torch.empty(known.shape, dtype=getattr(torch, known.dtype))
        for name, known in source.tensors.items()
    }
    source.fill({name: native.undivided(t) for name, t in out.items()})
    return out, source


def assert_equal(a, b):
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


def convert(*words, status=DONE):
    """Run the command; return its lines and notices."""
    with captured_output() as said:
        got = main(["convert", *map(str, words)])
    assert got == status, said
    return said


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Hugging Face folder with 61 ids, written by our writer."""
    path = tmp_path_factory.mktemp("source") / "hf"
    huggingface_writer.write_huggingface(Made.of(2, 32, 4, 61, 16), path)
    return path


FOUR_RANKS = ("--target-tensor-parallel-size=2", "--target-pipeline-parallel-size=2")


@pytest.mark.flag("paths to")
def test_a_circle_of_conversions_ends_with_the_same_file(folder, tmp_path):
    """Hugging Face -> native -> Megatron over four ranks -> native -> Hugging Face."""
    (line,), _ = convert(folder, tmp_path / "a", "--to", "native")
    pattern = r".*hf \(Hugging Face\) -> .*a \(native\): 28 tensors, 111,744 bytes in \d+\.\d s, [\d,]+\.\d MB/s"
    assert re.fullmatch(pattern, line)
    convert(tmp_path / "a", tmp_path / "b", "--to=torch", *FOUR_RANKS)
    ranks = sorted(p.parent.name for p in (tmp_path / "b").rglob("*.pt"))
    assert ranks == ["mp_rank_00_000", "mp_rank_00_001", "mp_rank_01_000", "mp_rank_01_001"]
    convert(tmp_path / "b", tmp_path / "c", "--to", "native")
    convert(tmp_path / "c", tmp_path / "d", "--to", "huggingface")
    for name in ("a", "b", "c", "d"):
        assert_equal(values(tmp_path / name)[0], values(folder)[0])
    assert filecmp.cmp(
        folder / "model.safetensors", tmp_path / "d" / "model.safetensors", shallow=False
    )


@pytest.mark.flag("no_optimizer")
def test_optimizer_state_and_counters_are_converted(tmp_path):
    """A run continues from its checkpoint -> Megatron's tree -> ours as from its own."""
    run = str(tmp_path / "run")
    assert main(["train", *TINY_FLAGS, "--exit-interval=3", "--save", run]) == DONE
    assert main(["train", *TINY_FLAGS, "--load", run, "--save", run]) == DONE
    start = tmp_path / "run" / "iter_0000003"
    convert(start, tmp_path / "torch", "--to=torch", "--target-tensor-parallel-size=2")
    convert(tmp_path / "torch", tmp_path / "back", "--to=native")
    a, b = values(start), values(tmp_path / "back")
    assert_equal(a[0], b[0])
    assert (
        any("/exp_avg_sq" in name for name in a[0]) and a[1].state == b[1].state and b[1].step == 3
    )
    more = ["--load", str(tmp_path / "back"), "--save", str(tmp_path / "on")]
    assert main(["train", *TINY_FLAGS, *more]) == DONE
    assert_equal(values(tmp_path / "run")[0], values(tmp_path / "on")[0])
    convert(start, tmp_path / "bare", "--to=native", "--no-optimizer", "--dtype=bfloat16")
    bare = values(tmp_path / "bare")[0]
    assert_equal(bare, {name: t.bfloat16() for name, t in a[0].items() if "/" not in name})


@pytest.mark.flag("dtype")
def test_precision(folder, tmp_path):
    convert(folder, tmp_path / "half", "--to=huggingface", "--dtype=float16")
    assert json.loads((tmp_path / "half" / "config.json").read_text())["torch_dtype"] == "float16"
    half = values(tmp_path / "half")[0]
    assert_equal(half, {name: t.half() for name, t in values(folder)[0].items()})
    convert(tmp_path / "half", tmp_path / "torch", "--to=torch", "--dtype=float32")
    assert_equal(values(tmp_path / "torch")[0], {name: t.float() for name, t in half.items()})


def write_release(weights, root):
    """Write as Megatron-LM of 2019: no settings, half precision, a padded table, qkv by kind."""
    folder = root / "release" / "mp_rank_00"
    folder.mkdir(parents=True)
    (root / "latest_checkpointed_iteration.txt").write_text("release")
    names = {
        "attn.qkv": "attention.query_key_value",
        "attn.proj": "attention.dense",
        "mlp.fc": "mlp.dense_h_to_4h",
    }
    names |= {
        "mlp.proj": "mlp.dense_4h_to_h",
        "ln_1": "input_layernorm",
        "ln_2": "post_attention_layernorm",
    }
    inner = {
        f"final_layernorm.{kind}": weights[f"ln_f.{kind}"].half() for kind in ("weight", "bias")
    }
    for i in range(2):
        for ours, theirs in names.items():
            for kind in ("weight", "bias"):
                value = weights[f"h.{i}.{ours}.{kind}"].half()
                if ours == "attn.qkv":  # version 0: all queries, all keys, all values
                    value = value.view(4, 3, 8, -1).transpose(0, 1).reshape(value.shape)
                inner[f"layers.{i}.{theirs}.{kind}"] = value.clone()
    table = torch.cat((weights["wte.weight"], torch.zeros(67, 32))).half()
    positions = weights["wpe.weight"].half()
    embedding = {"word_embeddings": {"weight": table}, "position_embeddings": {"weight": positions}}
    model = {"embedding": embedding, "transformer": inner}
    torch.save({"model": {"language_model": model}, "iteration": 0}, folder / "model_optim_rng.pt")


def test_flags_describe_a_release_of_2019(folder, tmp_path):
    weights, src = values(folder)[0], tmp_path / "release"
    write_release(weights, src)
    assert "--num-attention-heads" in joined(
        convert(src, tmp_path / "x", "--to=huggingface", status=BAD_DATA)
    )
    said = convert(src, tmp_path / "x", "--to=native", "--num-attention-heads=4", status=USAGE)
    assert "--true-vocab-size" in joined(said)
    flags = ["--num-attention-heads=4", "--true-vocab-size=61"]
    convert(src, tmp_path / "hf", "--to=huggingface", "--layernorm-epsilon=1e-3", *flags)
    assert_equal(values(tmp_path / "hf")[0], {name: t.half() for name, t in weights.items()})
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["n_head"] == 4 and config["layer_norm_epsilon"] == 1e-3
    convert(src, tmp_path / "native", "--to=native", *flags)
    assert values(tmp_path / "native")[1].config["num_attention_heads"] == 4


def joined(said):
    return "\n".join([*said[0], *said[1]])


def test_a_model_without_a_step_says_so(folder, capsys):
    assert main(["inspect", str(folder)]) == 0
    assert " no step recorded | parameters " in capsys.readouterr().out


@pytest.mark.flag("target_tensor_parallel_size target_pipeline_parallel_size")
def test_impossible_conversions_are_refused(folder, tmp_path):
    new, native = tmp_path / "x", "--to=native"
    convert(folder, tmp_path / "a", native)
    two = [folder, new, native, "--num-layers=3", "--hidden-size=8"]
    for words, status, text in [
        ([folder, new], USAGE, "--to and two folders"),
        ([folder, native], USAGE, "--to and two folders"),
        ([folder, new, "--to=onnx"], USAGE, "--to"),
        (
            [folder, new, "--to=nanogpt"],
            USAGE,
            "error: --to: 'nanogpt' is none of native, torch, huggingface; its ckpt.pt",
        ),
        ([tmp_path / "none", new, native], BAD_DATA, "there is no folder"),
        ([folder, folder, native], LOCKED, "already holds"),
        ([folder, tmp_path / "a", native], LOCKED, "already holds"),
        ([folder, folder, "--to=huggingface"], LOCKED, "not empty"),
        (two, BAD_DATA, "--num-layers 3, the checkpoint has 2"),
        (two, BAD_DATA, "--hidden-size 8, the checkpoint has 32"),
        ([folder, new, native, "--true-vocab-size=62"], BAD_DATA, "a vocabulary of 62 ids"),
        ([folder, new, "--to=torch", "--target-tensor-parallel-size=0"], USAGE, "must be above 0"),
        ([saved(tmp_path), new, native, "--dtype=float16"], USAGE, "--no-optimizer"),
        ([folder, new, native, "--dry-run"], DONE, "nothing was written"),
    ]:
        assert text in joined(convert(*words, status=status)), words
        assert not new.exists()


def saved(tmp_path):
    source = Made.of(2, 32, 4, 61, 16, optimizer=True)
    named = {
        name: native.undivided(torch.empty(known.shape)) for name, known in source.tensors.items()
    }
    source.fill(named)
    native.save_step(tmp_path / "saved", 7, named, STATE, source.config)
    return tmp_path / "saved"


def test_a_failure_leaves_nothing(folder, tmp_path, monkeypatch):
    """A folder that was there stays, empty as it was."""

    def fail(run):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(native, "byte_views", fail)
    monkeypatch.setattr(writer, "tensor_bytes", fail)
    for to in ("native", "torch"):
        convert(folder, tmp_path / "new", "--to", to, status=74)
        assert not (tmp_path / "new").exists()
        (tmp_path / to).mkdir()
        convert(folder, tmp_path / to, "--to", to, status=74)
        assert list((tmp_path / to).iterdir()) == []


def test_inspection_of_a_megatron_step_reads_no_numbers_without_full(folder, tmp_path):
    convert(folder, tmp_path / "a", "--to=torch")
    (path,) = (tmp_path / "a").rglob("*.pt")
    wte = values(folder)[0]["wte.weight"].numpy().tobytes()[:100]
    raw = path.read_bytes()
    path.write_bytes(raw.replace(wte, bytes(100)))
    for words, status, text in (
        ([], DONE, "contents not checked"),
        (["--full"], BAD_DATA, "verified: NO"),
    ):
        with captured_output() as said:
            assert main(["inspect", str(tmp_path / "a"), *words]) == status
        assert text in joined(said)


def test_a_known_vocabulary_is_not_cut(folder, tmp_path):
    """A Hugging Face folder counts the padding of its table, so fewer ids may be true."""
    _, notices = convert(folder, tmp_path / "a", "--to=native", "--true-vocab-size=60")
    assert any(
        "1 of 61 rows for tokens are cut off, the vocabulary has 60 ids" in line for line in notices
    )
    assert values(tmp_path / "a")[0]["wte.weight"].shape == (60, 32)
    source = Made.of(2, 32, 4, 61, 16)
    for kind, size in (("Megatron", 60), ("Megatron", 62), (HUGGING_FACE, 62), (NATIVE, 60)):
        source.kind = kind
        with pytest.raises(UserError, match=f"a vocabulary of {size} ids, the checkpoint has 61$"):
            complete_source(source, {}, TokenizerFlags(vocab_size=size))


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    path = tmp_path_factory.mktemp("vocabulary")
    tokenizers.train_bpe(["the cat sat on the mat"] * 3, 270, path)
    return path


def test_the_tokenizer_is_converted(vocabulary, tmp_path):
    """It is named by flags, kept by a run, or in a Hugging Face folder."""
    files = ["--vocab-file", vocabulary / "vocab.json", "--merge-file", vocabulary / "merges.txt"]
    kept = tokenizers.GPT2BPE(vocabulary / "vocab.json", vocabulary / "merges.txt")
    huggingface_writer.write_huggingface(Made.of(2, 32, 4, kept.size, 16), tmp_path / "hf")
    _, notices = convert(tmp_path / "hf", tmp_path / "bare", "--to=huggingface")
    assert "no tokenizer is written" in notices[0]
    convert(tmp_path / "hf", tmp_path / "a", "--to=native", *files)
    assert (
        tokenizers.is_same(kept, tmp_path / "a/tokenizer")
        and (tmp_path / "a/tokenizer/meta.json").exists()
    )
    convert(tmp_path / "a", tmp_path / "b", "--to=huggingface")
    assert json.loads((tmp_path / "b" / "config.json").read_text())["eos_token_id"] == kept.eod
    convert(tmp_path / "b", tmp_path / "c", "--to=torch")
    assert tokenizers.is_same(kept, tmp_path / "c" / "tokenizer")
    for name in ("a", "b"):
        words, vocab = (
            ["--out-seq-length=4", "--prompt=the cat", "--device=cpu"],
            files if name == "b" else [],
        )
        with captured_output() as said:
            assert main(["generate", str(tmp_path / name), *words, *map(str, vocab)]) == DONE, said
    huggingface_writer.write_huggingface(Made.of(2, 32, 4, 300, 16), tmp_path / "wide")
    said = joined(convert(tmp_path / "wide", tmp_path / "d", "--to=native", *files))
    assert f"--true-vocab-size {kept.size}" in said and not (tmp_path / "d" / "tokenizer").exists()


def commands_of(page):
    """Return the lines of its shell blocks."""
    blocks = re.findall(r"```sh\n(.*?)```", page.read_text(), re.S)
    words = [
        shlex.split(line, comments=True)
        for block in blocks
        for line in block.replace("\\\n", " ").splitlines()
    ]
    return [line for line in words if line]


def test_the_commands_of_docs_checkpoints_work(folder, tmp_path, monkeypatch):
    """They run in their order, in a folder that has what they name."""
    monkeypatch.chdir(tmp_path)
    flags = ["--tokenizer-type=ByteTokenizer", *(f for f in TINY_FLAGS if "vocab-size" not in f)]
    assert main(["train", *flags, "--save", "run", "--position-embedding-type", "rope"]) == DONE
    write_counting(tmp_path / "corpus_text_document", [200])
    shutil.copytree(folder, "gpt2")
    write_release(values(folder)[0], Path("megatron_lm_345m"))
    lines = commands_of(ROOT / "docs" / "checkpoints.md")
    assert len(lines) >= 7
    smaller = {"16": "4", "50257": "61", "8192": "64", "2048": "16", "400": "2"}
    for words in lines:
        assert words[0] == "meshwright"
        with captured_output() as said:
            assert main([smaller.get(word, word) for word in words[1:]]) == DONE, (words, said)


# Memory


def test_a_selection_has_the_parts_and_the_vocabulary_of_its_source(tmp_path):
    weight = {"wte.weight": [TensorView((0, 0), torch.ones(64, 4))]}
    chosen = select(MappedSource("Megatron", tmp_path, views=weight), dtype="float16")
    assert chosen.parts("wte.weight") == [(tmp_path.name, Box((0, 0), (64, 4)))]
    cut = chosen.of_vocabulary(61)
    assert cut.vocab == 61 and cut.tensors == {"wte.weight": TensorInfo((61, 4), "float16")}


def anonymous(status):
    """Return the bytes of memory that is no file's, from a process's status file in /proc."""
    return sum(int(kb) * 1024 for kb in re.findall(r"^Rss(?:Anon|Shmem):\s+(\d+) kB", status, re.M))


def most_memory(*words):
    """Return the most anonymous memory of the command while it runs, and its seconds.

    It has as many threads as on a machine of many cores, which all have buffers.
    """
    code = (
        "import os, sys; os.cpu_count = lambda: 64;"
        "from meshwright.__main__ import main; sys.exit(main(sys.argv[1:]))"
    )
    began, most, argv = time.perf_counter(), 0, [sys.executable, "-c", code, *map(str, words)]
    process = subprocess.Popen(argv, env=os.environ | {"OMP_NUM_THREADS": "2"})
    while process.poll() is None:
        with contextlib.suppress(OSError):
            most = max(most, anonymous(Path(f"/proc/{process.pid}/status").read_text()))
        time.sleep(0.005)
    assert process.returncode == DONE
    return most, time.perf_counter() - began


def imported():
    """Return the anonymous memory of a process that has only imported what the command does."""
    code = (
        "import torch, safetensors, tokenizers, meshwright.checkpoint.convert, meshwright.model.gpt;"
        "import meshwright.checkpoint.huggingface.reader;"
        "import meshwright.compat.formats.megatron.writer; print(open('/proc/self/status').read())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return anonymous(done.stdout)


@pytest.mark.long
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("optimizer", [False, True], ids=["weights", "optimizer"])
def test_memory(optimizer, tmp_path, record_property):
    """More than 5 GB in every direction, within twice the largest tensor and 200 MB."""
    if shutil.disk_usage(tmp_path).free < 30e9:
        pytest.skip("30 GB of disk are needed")
    source = Made.of(24, 1152 if optimizer else 2048, 16, 50257, 1024, optimizer)
    sizes = [torch.Size(known.shape).numel() * 4 for known in source.tensors.values()]
    size, largest = sum(sizes), max(sizes)
    assert size > 5e9
    base, rows = imported(), []
    allowed = base + 2 * largest + 200e6
    before = first = tmp_path / "0"
    (write_made if optimizer else huggingface_writer.write_huggingface)(source, first)
    for number, to in enumerate(
        ["torch", "native"] if optimizer else ["native", "torch", "huggingface"], start=1
    ):
        after = tmp_path / str(number)
        most, took = most_memory(
            "convert", before, after, "--to", to, *(FOUR_RANKS if to == "torch" else ())
        )
        rows.append(
            f"to {to:12} {most / 1e6:6.0f} MB of {allowed / 1e6:.0f} allowed, {size / took / 1e6:5.0f} MB/s"
        )
        if before != first:
            shutil.rmtree(before)
        before = after
    rows.insert(0, f"{size:,} bytes, largest tensor {largest:,}, imported {base / 1e6:.0f} MB")
    record_property("table", "\n".join(rows))
    same = sorted(p.relative_to(first) for p in first.rglob("*.safetensors"))
    assert same and all(filecmp.cmp(first / p, before / p, shallow=False) for p in same)
    shutil.rmtree(tmp_path)
    assert all(int(row.split()[2]) * 1e6 <= allowed for row in rows[1:]), rows


def write_made(source, root):
    """Write as `native.save` would, one tensor at a time."""
    from meshwright.checkpoint import publish

    source.state = STATE | {"true_vocab_size": 50257, "positions": 1024}
    root.mkdir()
    publish.write_step(root, 7, native_files(select(source)))
