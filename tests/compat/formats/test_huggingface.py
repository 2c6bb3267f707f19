"""Hugging Face folders in both directions: equal logits, bit-equal weights, and refusals."""

import contextlib
import dataclasses
import json
import os
import re
import shutil
import tomllib
from pathlib import Path

import pytest
import torch
import yaml
from foreign import assert_reads, read_tensors

from helpers import error_of
from meshwright import __main__ as cli
from meshwright.base.errors import LOCKED, UserError
from meshwright.checkpoint import native
from meshwright.checkpoint.convert import select
from meshwright.checkpoint.huggingface import reader as huggingface
from meshwright.checkpoint.huggingface import writer as huggingface_writer
from meshwright.checkpoint.huggingface.writer import write_huggingface as write
from meshwright.config.schema import Model, TokenizerFlags
from meshwright.data import tokenizers
from meshwright.model.gpt import GPT
from meshwright.model.positions import Positions

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.whole, pytest.mark.filterwarnings("ignore")]

VOCAB, LENGTH = 61, 16
TABLE = yaml.safe_load(Path(__file__).with_name("huggingface.yaml").read_text())


def settings_of(name):
    """Return the kind of a network of the table, and its settings."""
    config = dict(TABLE["networks"][name])
    return config.pop("kind"), config


def theirs(name, **changes):
    """Return one of their networks, filled with random numbers."""
    kind, config = settings_of(name)
    architecture = getattr(
        transformers, f"{kind}LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
    )
    model = architecture(
        getattr(transformers, f"{kind}Config")(**config | changes, attn_implementation="eager")
    ).eval()
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(
                torch.randn(p.shape, generator=random) * (0.2 if p.ndim > 1 else 0.5)
                + (p.ndim == 1)
            )
    return model


def ours(source):
    """Return our network with a source's settings and weights."""
    m = dataclasses.replace(
        Model(), **source.config | {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    )
    model = GPT(m, source.vocab, source.vocab, LENGTH).eval()
    named = dict(model.named_parameters())
    assert {n: tuple(p.shape) for n, p in named.items()} == {
        n: t.shape for n, t in source.tensors.items()
    }
    with torch.no_grad():
        source.fill({name: native.undivided(p.detach()) for name, p in named.items()})
    return model


@torch.no_grad()
def assert_same_logits(mine, other, length=LENGTH):
    x = torch.randint(0, VOCAB, (3, length), generator=torch.Generator().manual_seed(2))
    want = other(x).logits
    assert want.std() > 0.1
    torch.testing.assert_close(
        mine(x, Positions()), want, rtol=1e-5, atol=1e-5 * float(want.abs().max())
    )


def as_native(root, source):
    """Save the source in our own format and open it."""
    named = {name: native.undivided(t) for name, t in read_tensors(source).items()}
    state = {"true_vocab_size": source.vocab, "positions": source.config["max_position_embeddings"]}
    native.save_step(root, 7, named, state, source.config)
    return native.open_native(root / "iter_0000007", 7)


@pytest.mark.parametrize("name", TABLE["networks"])
def test_both_ways(name, tmp_path):
    """Going transformers -> ours -> native -> theirs keeps logits and every number."""
    model = theirs(name)
    model.save_pretrained(tmp_path / "a")
    source = huggingface.open_huggingface(tmp_path / "a")
    assert_same_logits(ours(source), model)
    stored = as_native(tmp_path / "native", source)
    write(stored, tmp_path / "b")
    back = huggingface.open_huggingface(tmp_path / "b")
    assert_reads(back, read_tensors(source))
    assert back.config == source.config
    said = json.loads((tmp_path / "b" / "config.json").read_text())
    assert said["tie_word_embeddings"] is not source.config["untie_embeddings_and_output_weights"]
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "b", attn_implementation="eager"
    )
    kind = type(model).__name__
    assert type(again).__name__ == (
        kind if "sliding_window" in said else kind.replace("Mistral", "Llama")
    )
    assert_same_logits(ours(stored), again)
    if name != "llama-mlp-bias":  # where ours has zeros, theirs had nothing
        for key, value in model.state_dict().items():
            assert torch.equal(again.state_dict()[key], value), key


SHORT = f"--mock-data --micro-batch-size 1 --train-iters 1 --lr 1e-3 --eval-iters 0 --device cpu --vocab-size {VOCAB}"


@pytest.mark.parametrize("name", ["llama-grouped", "gpt2", "neox"])
def test_what_a_folder_states_is_trained_with_and_exported(name, tmp_path, capsys):
    """Issue 13, line 5: dropouts, epsilon, rotary base and initial deviation; a flag wins."""
    stated = {"attention_dropout": 0.03, "initializer_range": 0.05, "rms_norm_eps": 1e-4}
    if name == "gpt2":
        stated = {
            "attn_pdrop": 0.03,
            "resid_pdrop": 0.07,
            "embd_pdrop": 0.2,
            "initializer_range": 0.05,
        }
    if name == "neox":
        stated = {
            "hidden_dropout": 0.07,
            "attention_dropout": 0.03,
            "initializer_range": 0.05,
            "layer_norm_eps": 1e-3,
        }
    theirs(name, **stated).save_pretrained(tmp_path / "a")
    run = ["train", *SHORT.split(), "--seq-length", str(LENGTH), "--load", str(tmp_path / "a")]
    assert cli.main([*run, "--save", str(tmp_path / "b"), "--save-hf", str(tmp_path / "c")]) == 0
    assert "does not state" not in capsys.readouterr().out
    model = tomllib.loads((tmp_path / "b" / "config.toml").read_text())["model"]
    assert (
        model["hidden_dropout"] == stated.get("resid_pdrop", stated.get("hidden_dropout", 0))
        and model["attention_dropout"] == 0.03
    )
    config = json.loads((tmp_path / "c" / "config.json").read_text())
    assert {key: config[key] for key in stated} == stated
    more = [
        "--attention-dropout",
        "0.2",
        "--save",
        str(tmp_path / "d"),
        "--save-hf",
        str(tmp_path / "e"),
    ]
    assert cli.main([*run, *more]) == 0
    config = json.loads((tmp_path / "e" / "config.json").read_text())
    assert config["attn_pdrop" if name == "gpt2" else "attention_dropout"] == 0.2
    to = ["--to", "huggingface", "--init-method-std", "0.01"]
    assert (
        cli.main(
            [
                "convert",
                str(tmp_path / "a"),
                str(tmp_path / "f"),
                *to,
                "--true-vocab-size",
                str(VOCAB),
            ]
        )
        == 0
    )
    assert "next: AutoModelForCausalLM.from_pretrained('" in capsys.readouterr().err
    assert json.loads((tmp_path / "f" / "config.json").read_text()) == (
        json.loads((tmp_path / "c" / "config.json").read_text()) | {"initializer_range": 0.01}
    )


def test_a_gpt2_states_what_theirs_does_and_what_other_programs_read(tmp_path):
    """llama.cpp reads config.json itself, and there `n_ctx`, which transformers left out."""
    theirs("gpt2").save_pretrained(tmp_path / "theirs")
    source = as_native(tmp_path / "run", huggingface.open_huggingface(tmp_path / "theirs"))
    write(source, tmp_path / "ours", tokenizer=tokenizers.Null(VOCAB - 1))
    stated = json.loads((tmp_path / "ours" / "config.json").read_text())
    # What the config.json of OpenAI's models says of the network and of texts.
    names = "activation_function architectures attn_pdrop bos_token_id embd_pdrop eos_token_id initializer_range"
    names += " layer_norm_epsilon model_type n_ctx n_embd n_head n_layer n_positions resid_pdrop vocab_size"
    assert not set(names.split()) - stated.keys()
    assert stated["n_ctx"] == stated["n_positions"] == LENGTH
    ends = {"bos_token_id": VOCAB - 1, "eos_token_id": VOCAB - 1}
    same_size = transformers.GPT2Config(
        **settings_of("gpt2")[1] | ends, architectures=["GPT2LMHeadModel"], dtype="float32"
    ).to_dict()
    read = transformers.AutoConfig.from_pretrained(tmp_path / "ours").to_dict()
    differing = {
        name for name in read.keys() | same_size.keys() if read.get(name) != same_size.get(name)
    }
    assert differing == {"n_ctx", "n_inner", "_name_or_path"}
    assert read["n_inner"] == 4 * read["n_embd"]  # their None


def test_what_a_folder_does_not_state_is_noted(tmp_path, capsys):
    theirs("llama-grouped").save_pretrained(tmp_path / "a")
    change_config(tmp_path / "a", attention_dropout=None, rms_norm_eps=1e-5)
    run = ["train", *SHORT.split(), "--seq-length", str(LENGTH), "--load", str(tmp_path / "a")]
    assert cli.main(run) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "does not state" in line)
    assert line.endswith("transformers' defaults are used: attention_dropout 0")
    theirs("gpt2").save_pretrained(tmp_path / "b")
    change_config(tmp_path / "b", embd_pdrop=0.2)
    again = huggingface.open_huggingface(tmp_path / "b")
    assert again.config["embedding_dropout"] == 0.2 and not again.notes
    change_config(tmp_path / "b", resid_pdrop=1.5)
    assert "resid_pdrop is 1.5; it must be in [0, 1)" in error_of(
        lambda: huggingface.open_huggingface(tmp_path / "b")
    )


def test_files_of_every_kind(tmp_path, monkeypatch):
    """Safetensors and pickles, single or in parts, without the prefix, in half precision."""
    model = theirs("gpt2")
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="20KB")
    model.transformer.save_pretrained(tmp_path / "bare")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    want = read_tensors(huggingface.open_huggingface(tmp_path / "one"))
    for name in ("many", "bare"):
        assert_reads(huggingface.open_huggingface(tmp_path / name), want)
    state = {k: v for k, v in model.state_dict().items() if k != "lm_head.weight"}
    # as versions before 4.28 had it
    state["transformer.h.0.attn.bias"] = torch.ones(1, 1, 16, 16, dtype=torch.uint8)
    for name in ("pickle", "pickles"):
        (tmp_path / name).mkdir()
        shutil.copy(tmp_path / "one" / "config.json", tmp_path / name)
    torch.save(state, tmp_path / "pickle" / "pytorch_model.bin")
    halves = [dict(list(state.items())[i::2]) for i in (0, 1)]
    where = {}
    for i, half in enumerate(halves):
        torch.save(half, tmp_path / "pickles" / f"pytorch_model-{i}.bin")
        where |= dict.fromkeys(half, f"pytorch_model-{i}.bin")
    (tmp_path / "pickles" / "pytorch_model.bin.index.json").write_text(
        json.dumps({"weight_map": where})
    )
    for name in ("pickle", "pickles"):
        assert_reads(huggingface.open_huggingface(tmp_path / name), want)
    monkeypatch.setattr(huggingface_writer, "MAX_SHARD", 20_000)
    write(
        select(huggingface.open_huggingface(tmp_path / "one"), dtype="bfloat16"), tmp_path / "half"
    )
    source = huggingface.open_huggingface(tmp_path / "half")
    half = read_tensors(source)
    assert_reads(source, {k: v.bfloat16() for k, v in want.items()})
    index = json.loads((tmp_path / "half" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "half")
    assert again.dtype is torch.bfloat16 and torch.equal(
        again.transformer.wte.weight, half["wte.weight"]
    )


def test_folders_of_equal_shapes_have_different_identities(tmp_path):
    """Ranks compare identities, so that all load the same numbers."""
    theirs("gpt2").save_pretrained(tmp_path / "a")
    known = huggingface.open_huggingface(tmp_path / "a").identity
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    (tmp_path / "b" / "trainer.log").write_text("whatever a run writes beside it")
    os.mkfifo(tmp_path / "b" / "pipe")
    assert huggingface.open_huggingface(tmp_path / "b").identity == known
    with (tmp_path / "b" / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x7f")
    assert huggingface.open_huggingface(tmp_path / "b").identity != known


def test_a_table_with_more_rows_than_ids_and_one_that_differs(tmp_path):
    model = theirs("gpt2")
    model.save_pretrained(tmp_path)
    change_config(tmp_path, vocab_size=50)
    source = huggingface.open_huggingface(tmp_path)
    assert source.vocab == 50 and source.tensors["wte.weight"].shape == (50, 32)
    change_config(tmp_path, vocab_size=VOCAB)
    from safetensors.torch import load_file, save_file

    state = load_file(tmp_path / "model.safetensors")
    head = state["transformer.wte.weight"].clone()
    save_file(state | {"lm_head.weight": head}, tmp_path / "model.safetensors", {"format": "pt"})
    assert "lm_head.weight" not in huggingface.open_huggingface(tmp_path).tensors
    head[0, 0] += 1
    save_file(state | {"lm_head.weight": head}, tmp_path / "model.safetensors", {"format": "pt"})
    source = huggingface.open_huggingface(tmp_path)
    assert (
        source.config["untie_embeddings_and_output_weights"] and "stay separate" in source.notes[0]
    )
    assert torch.equal(read_tensors(source)["lm_head.weight"], head)


def change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_unsupported_options_are_refused_by_name(tmp_path):
    for name in ("gpt2", "llama-grouped", "neox"):
        theirs(name).save_pretrained(tmp_path / name)
    for name, changes, said in TABLE["refused"]:
        shutil.copytree(tmp_path / name, tmp_path / "x")
        change_config(tmp_path / "x", **changes)
        message = error_of(lambda: huggingface.open_huggingface(tmp_path / "x"))
        assert re.search(said, message) and str(tmp_path) in message
        shutil.rmtree(tmp_path / "x")
    change_config(
        tmp_path / "llama-grouped",
        model_type="mistral",
        sliding_window=LENGTH,
        rope_parameters=None,
        rope_theta=5.0,
    )
    assert huggingface.open_huggingface(tmp_path / "llama-grouped").config["rotary_base"] == 5.0


@pytest.mark.promise("Names and links that lead out of the folder are refused")
def test_damaged_folders_and_names_that_lead_out(tmp_path):
    theirs("gpt2").save_pretrained(tmp_path / "good")
    intact = (tmp_path / "good" / "model.safetensors").read_bytes()
    outside = tmp_path / "outside.safetensors"
    outside.write_bytes(intact)
    tensors, index = "model.safetensors", "model.safetensors.index.json"

    def break_it(folder, how):
        if isinstance(how, bytes):
            (folder / tensors).write_bytes(how)
        elif isinstance(how, dict):
            (folder / tensors).unlink()
            (folder / index).write_text(json.dumps(how))
        else:
            how(folder)

    def link(folder):
        (folder / tensors).unlink()
        (folder / tensors).symlink_to(outside)

    name = "transformer.wte.weight"
    for how, said in [
        (b"", "not a safetensors file"),
        (intact[:100], "not a complete safetensors"),
        (b"\xff" * 6 + b"\0\0{" + intact[9:], "bytes; at most"),
        ({}, "weight_map"),
        ({"weight_map": {name: "../outside.safetensors"}}, "not a plain name"),
        (link, "nothing outside the folder is read"),
        (lambda f: (f / "config.json").unlink(), "does not exist"),
        (lambda f: (f / "config.json").write_text("[" * 100_000), "JSON"),
        (lambda f: (f / tensors).unlink(), "has neither"),
    ]:
        shutil.copytree(tmp_path / "good", tmp_path / "x")
        break_it(tmp_path / "x", how)
        assert re.search(said, error_of(lambda: huggingface.open_huggingface(tmp_path / "x")))
        shutil.rmtree(tmp_path / "x")
    cache = tmp_path / "models--a--b"  # as the library's cache has it: links to ../../blobs
    (cache / "blobs").mkdir(parents=True)
    (cache / "snapshots" / "1").mkdir(parents=True)
    for file in ("config.json", tensors):
        shutil.copy(tmp_path / "good" / file, cache / "blobs" / f"of-{len(file)}")
        (cache / "snapshots" / "1" / file).symlink_to(f"../../blobs/of-{len(file)}")
    assert_reads(
        huggingface.open_huggingface(cache / "snapshots" / "1"),
        read_tensors(huggingface.open_huggingface(tmp_path / "good")),
    )


def test_settings_they_cannot_express_are_listed(tmp_path):
    for name in ("gpt2", "llama-grouped"):
        theirs(name).save_pretrained(tmp_path / name)
    for name, changes, listed in TABLE["inexpressible"]:
        source = huggingface.open_huggingface(tmp_path / name)
        source.config |= changes
        message = error_of(lambda source=source: write(source, tmp_path / "out"))
        assert all(words in message for words in listed), message
        assert len(message.splitlines()) == 1 + len(listed), message
    source = huggingface.open_huggingface(tmp_path / "gpt2")
    source.state["network"] = "Mine"
    with pytest.raises(UserError, match="a Mine"):
        write(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_window_over_all_positions_is_not_exported(tmp_path):
    """It hides nothing, so also kinds without windows can express the model."""
    for name, window, kind in (
        ("llama-grouped", LENGTH - 1, "llama"),
        ("llama-grouped", LENGTH - 2, "mistral"),
    ):
        theirs(name).save_pretrained(tmp_path / "a")
        source = huggingface.open_huggingface(tmp_path / "a")
        source.config |= {"window_size": f"{window},0", "max_position_embeddings": LENGTH}
        write(source, tmp_path / f"{window}")
        said = json.loads((tmp_path / f"{window}" / "config.json").read_text())
        assert said["model_type"] == kind and ("sliding_window" in said) == (kind == "mistral")
    theirs("gpt2").save_pretrained(tmp_path / "b")
    source = huggingface.open_huggingface(tmp_path / "b")
    source.config |= {"window_size": "1000,0"}
    write(source, tmp_path / "c")


def test_a_folder_is_complete_or_absent(tmp_path, monkeypatch):
    theirs("gpt2").save_pretrained(tmp_path / "a")
    source = huggingface.open_huggingface(tmp_path / "a")
    assert "not empty" in error_of(lambda: write(source, tmp_path / "a"), LOCKED)
    (tmp_path / "b").mkdir()
    (tmp_path / "b.tmp").mkdir()
    (tmp_path / "b.tmp" / "mine").write_text("nothing of ours")

    def fail(path, source, parts):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, contextlib.suppress(OSError):
        patch.setattr(huggingface_writer, "write_safetensors", fail)
        write(source, tmp_path / "b")
    assert not list((tmp_path / "b").iterdir())
    (tmp_path / "link").symlink_to(tmp_path / "b")
    write(source, tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "b").stat().st_mode == (
        tmp_path / "a"
    ).stat().st_mode
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b", "b.tmp", "link"]
    assert [p.name for p in (tmp_path / "b.tmp").iterdir()] == ["mine"]
    files = ["config.json", "generation_config.json", "model.safetensors"]
    assert sorted(p.name for p in (tmp_path / "b").iterdir()) == files


TEXT = "the cat sat on the mat. Ein Bär, 12 mats…\n\n  the cat"


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vocabulary")
    tokenizers.train_bpe([TEXT] * 3, 290, folder)
    return folder


def write_with(tokenizer, folder):
    theirs("gpt2", vocab_size=300).save_pretrained(folder.with_name("source"))
    return write(
        huggingface.open_huggingface(folder.with_name("source")), folder, tokenizer=tokenizer
    )


def test_tokenizer_of_two_files(vocabulary, tmp_path):
    tokenizer = tokenizers.GPT2BPE(vocabulary / "vocab.json", vocabulary / "merges.txt")
    assert write_with(tokenizer, tmp_path / "out") == []
    check_tokenizer(tmp_path / "out", tokenizer)
    write(
        huggingface.open_huggingface(tmp_path / "out"),
        tmp_path / "again",
        tokenizer=tokenizers.HuggingFace(tmp_path / "out"),
    )
    check_tokenizer(tmp_path / "again", tokenizer)


def test_a_folder_brings_its_tokenizer(vocabulary, tmp_path, capsys):
    """generate and train find it without flags; a tokenizer given by flag wins."""
    tokenizer = tokenizers.GPT2BPE(vocabulary / "vocab.json", vocabulary / "merges.txt")
    write_with(tokenizer, tmp_path / "out")
    load = ["--load", str(tmp_path / "out")]
    said = ["--prompt", "the cat", "--greedy", "--out-seq-length", "3"]
    assert cli.main(["generate", *load, *said]) == 0
    text = capsys.readouterr().out
    assert text.startswith("the cat") and len(text) > len("the cat\n")
    assert (
        cli.main(["generate", *load, *said, "--vocab-file", "nosuch", "--merge-file", "nosuch"])
        != 0
    )
    assert "nosuch" in capsys.readouterr().err
    more = "--mock-data --micro-batch-size 1 --train-iters 1 --lr 1e-3 --eval-iters 0 --num-workers 0".split()
    more += ["--device", "cpu"]
    assert cli.main(["train", *load, *more, "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert (
        f"(vocabulary {tokenizer.size} padded to 384)" in printed
        and f"one step: {LENGTH} tokens" in printed
    )
    assert "before the run can start" not in printed
    assert cli.main(["train", *load, "--save", str(tmp_path / "run"), *more]) == 0
    kept = tokenizers.build_tokenizer(TokenizerFlags(), tmp_path / "run" / "tokenizer")
    assert kept.encode(TEXT) == tokenizer.encode(TEXT)
    file = tmp_path / "out" / "tokenizer.json"
    settings = json.loads(file.read_text())
    assert (
        type(tokenizers.build_tokenizer(TokenizerFlags(), tmp_path / "out")) is tokenizers.GPT2BPE
    )
    # as Qwen's, which has the two files too
    for other in ({"pre_tokenizer": None}, {"normalizer": {"type": "NFC"}}):
        file.write_text(json.dumps(settings | other))
        assert (
            type(tokenizers.build_tokenizer(TokenizerFlags(), tmp_path / "out"))
            is tokenizers.HuggingFace
        )
    file.unlink()
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {"vocab.json", "merges.txt"}
    assert cli.main(["generate", *load, *said]) == 0 and capsys.readouterr().out.endswith(text)


def check_tokenizer(folder, tokenizer):
    loaded = transformers.AutoTokenizer.from_pretrained(folder)
    assert loaded(TEXT)["input_ids"] == tokenizer.encode(TEXT) and loaded.model_max_length == LENGTH
    assert loaded.decode(tokenizer.encode(TEXT)) == TEXT
    added = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    assert {t["content"] for t in added if t["special"]} == {"<|endoftext|>"}
    assert loaded.eos_token_id == tokenizer.eod == loaded.convert_tokens_to_ids("<|endoftext|>")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.eos_token_id == model.generation_config.eos_token_id == tokenizer.eod
    ids = model.generate(
        **loaded("the cat", return_tensors="pt"), max_new_tokens=3, do_sample=False
    )
    assert ids.shape[1] <= len(tokenizer.encode("the cat")) + 3


def test_tokenizers_without_a_counterpart(tmp_path):
    notes = write_with(tokenizers.Bytes(), tmp_path / "out")
    assert "ByteTokenizer" in notes[0] and not (tmp_path / "out" / "tokenizer.json").exists()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["eos_token_id"] == config["bos_token_id"] == 256
    source = huggingface.open_huggingface(tmp_path / "out")
    assert "no tokenizer is written" in write(source, tmp_path / "none")[0]
    config = transformers.AutoConfig.from_pretrained(tmp_path / "none")
    assert config.bos_token_id is None and config.eos_token_id is None
    with pytest.raises(UserError, match="1,001 ids, .* 300 rows"):
        write(source, tmp_path / "other", tokenizer=tokenizers.Null(1000))
