"""Flags and settings: where values come from, and what is refused with which message."""

import dataclasses
import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from parsing import parse, refusal

import meshwright
from helpers import TINY_FLAGS
from meshwright.__main__ import COMMANDS, main
from meshwright.base.errors import BAD_DATA, USAGE, UserError
from meshwright.cli.convert import ConvertConfig
from meshwright.cli.data import MergeConfig, verbs
from meshwright.compat.flags import megatron_flags as foreign_flags
from meshwright.config import check_model, fields, flags, schema
from meshwright.config.argv import answer_unknown, read_argv, syntax_of
from meshwright.config.schema import GenerateConfig, TrainConfig
from meshwright.config.text_inputs import PreprocessConfig

CONFIGS = fields.every_config()


# Where values come from


def test_precedence(tmp_path, monkeypatch):
    file = tmp_path / "c.toml"
    file.write_text(
        "[model]\nnum_layers = 3\nhidden_size = 48\nnum_attention_heads = 4\nhidden_dropout = 0.2\n"
    )
    monkeypatch.setenv("MESHWRIGHT_HIDDEN_SIZE", "64")
    monkeypatch.setenv("MESHWRIGHT_NUM_ATTENTION_HEADS", "8")
    got = parse("--preset", "gpt2-117m", "--config", str(file), "--num-attention-heads", "2")
    m, d = got.config.model, got.config.data
    assert (d.seq_length, m.num_layers, m.hidden_size, m.num_attention_heads) == (1024, 3, 64, 2)
    assert m.hidden_dropout == 0.2 and m.attention_dropout == 0.1
    names = "seq_length num_layers hidden_size num_attention_heads attention_dropout".split()
    wanted = ["preset gpt2-117m", str(file), "environment", "command line", "default"]
    assert [got.sources[name] for name in names] == wanted


@pytest.mark.parametrize(
    "text",
    [
        "lr: 1e-4\nfp16: yes\ndata_path: [a, b]\nsplit: 949,50,1\ntrain-iters: 2.0e+3",
        "optimizer: {lr: 1.0e-4}\nfp16: 1\ndata: {data-path: a b, split: '949,50,1'}\ntrain_iters: '2000'",
    ],
)
def test_yaml(tmp_path, text):
    file = tmp_path / "c.yaml"
    file.write_text(text)
    c = parse("--config", str(file)).config
    assert (c.optimizer.lr, c.precision.fp16, c.data.data_path, c.data.split.shares) == (
        1e-4,
        True,
        ["a", "b"],
        (949, 50, 1),
    )
    assert c.training.train_iters == 2000 and type(c.training.train_iters) is int


def test_settings_of_the_environment_are_named(monkeypatch, capsys):
    for name in ("LR_WARMUP_ITERS", "SEED", "LR", "TRAIN_SAMPLES"):
        monkeypatch.setenv(f"MESHWRIGHT_{name}", "1")
    line = "note: from the environment: MESHWRIGHT_SEED, MESHWRIGHT_LR_WARMUP_ITERS\n"
    # --lr and --train-iters of the command line win
    assert main(["train", *TINY_FLAGS, "--dry-run"]) == 0
    assert capsys.readouterr().err == line
    monkeypatch.delenv("MESHWRIGHT_SEED")
    monkeypatch.delenv("MESHWRIGHT_LR_WARMUP_ITERS")
    assert parse(*TINY_FLAGS).notices == []


@pytest.mark.parametrize(
    ("words", "notice"),
    [
        (
            "--window-size 15",
            "--window-size 15 has no effect in this training: a sample has only 16 tokens",
        ),
        ("--window-size 14", ""),
        ("--window-size=-1,0", ""),
        (
            "--window-size 3 --window-attn-skip-freq [0,0]",
            "--window-size 3 has no effect: --window-attn-skip-freq",
        ),
        (
            "--rope-scaling linear",
            "--rope-scaling has no effect without --position-embedding-type rope",
        ),
        (
            "ROPE --rope-scaling linear --rope-scaling-factor 1",
            "--rope-scaling linear has no effect with --rope-sc",
        ),
        ("ROPE --rope-scaling yarn --rope-scaling-factor 1 --rope-attention-factor 2", ""),
        ("ROPE --rope-scaling linear", ""),
        (
            "--cautious-weight-decay --weight-decay 0",
            "--cautious-weight-decay has no effect with --weight-decay 0",
        ),
        ("--cautious-weight-decay", ""),
        (
            "--optimizer sgd --sgd-momentum 0 --optimizer-state-dtype bfloat16",
            "--optimizer-state-dtype bfloat16 has no effect with --sgd-momentum 0",
        ),
    ],
)
def test_what_others_leave_without_effect_is_noticed(words, notice):
    notices = parse(
        *TINY_FLAGS, *words.replace("ROPE", "--position-embedding-type rope").split()
    ).notices
    assert len(notices) == bool(notice) and all(line.startswith(notice) for line in notices), (
        notices
    )


def test_the_notices_of_a_loaded_run_know_its_checkpoint(tmp_path, capsys):
    scaled = "--position-embedding-type rope --rope-scaling linear --rope-scaling-factor 4"
    run = ["train", *TINY_FLAGS, *f"--eval-iters 0 --exit-interval 1 --save {tmp_path}/a".split()]
    assert main([*run, *scaled.split()]) == 0
    capsys.readouterr()
    again = f"--load {tmp_path}/a --rope-scaling-factor 4 --dry-run"
    assert main([*run, *again.split()]) == 0
    assert "has no effect" not in capsys.readouterr().err


def test_settings_that_amount_to_the_same_are_no_difference():
    both = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "seq_length": 16,
        "global_batch_size": 4,
    }
    first = {
        "train_iters": 6,
        "lr_warmup_fraction": 0.5,
        "lr_decay_iters": None,
        "save": "a",
        "hidden_dropout": 0.2,
    }
    same = {
        "train_samples": 24,
        "lr_warmup_iters": 3,
        "lr_decay_iters": 6,
        "save": "a",
        "run_dir": "a",
    }
    same |= {
        "hidden_dropout": 0.2,
        "embedding_dropout": 0.2,
        "max_position_embeddings": 16,
        "ffn_hidden_size": 128,
    }
    assert flags.differing([both | first, both | same]) == []
    other = same | {"train_samples": 28, "ffn_hidden_size": 64, "embedding_dropout": 0.1}
    wanted = ["train_iters", "train_samples", "embedding_dropout", "ffn_hidden_size"]
    assert flags.differing([both | first, both | other]) == wanted
    assert (
        flags.differing([both | first, both | same | {"num_layers": "many"}])[-1]
        == "ffn_hidden_size"
    )


def test_print_config_names_sources_and_reads_back(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("MESHWRIGHT_SEED", "7")
    odd = "a b/'\"\\ é 中 😀 \x7f\t#.txt"
    argv = ["train", *TINY_FLAGS, "--save", odd, "--data-path", "x y", "--adam-eps=1e-16", "--fp16"]
    assert main([*argv, "--print-config"]) == 0
    shown = capsys.readouterr().out
    assert "seed = 7  # environment" in shown and "num_layers = 2  # command line" in shown
    assert "adam_beta1 = 0.9  # default" in shown and "# load = none  # default" in shown
    file = tmp_path / "again.toml"
    file.write_text(shown, encoding="utf-8")
    monkeypatch.delenv("MESHWRIGHT_SEED")
    again = parse("--config", str(file)).config
    assert again.checkpoint.save == odd and again == parse(*argv[1:], "--seed", "7").config


def test_saved_settings_of_an_older_or_newer_release():
    got = flags.from_saved(
        TrainConfig, {"lr": 0.1, "of_the_future": 3, "num_layers": 2}, "checkpoint"
    )
    assert got == {"lr": 0.1, "num_layers": 2}
    with pytest.raises(UserError) as caught:
        flags.from_saved(TrainConfig, {"lr": "x"}, "checkpoint 5")
    assert (
        caught.value.status == BAD_DATA
        and str(caught.value) == "lr in checkpoint 5: 'x' is not a number"
    )


# Spellings


def test_every_field_has_help_and_no_two_flags_collide():
    for cls in CONFIGS:
        names = [f.name for g in fields.config_groups(cls).values() for f in dataclasses.fields(g)]
        assert len(names) == len(set(names)), cls
        seen = {}
        for _, f, _ in fields.config_fields(cls).values():
            assert fields.help_of(f).strip() and not fields.help_of(f).endswith("."), f.name
            for spelling in {fields.spelling(f.name), *f.metadata["aliases"]}:
                assert seen.setdefault(spelling, f.name) == f.name, spelling
        for spelling in seen:
            assert spelling not in foreign_flags.RETIRED or (cls, spelling) == (
                MergeConfig,
                "--datasets",
            )
            # `train` refuses DeepSpeed's --include and Megatron's --chat-template.
            is_other = cls is not TrainConfig and spelling in ("--include", "--chat-template")
            assert spelling not in foreign_flags.REFUSED or is_other
        if cls is TrainConfig:
            padding = {
                "--make-vocab-size-divisible-by",
                "--pad-vocab-size-to",
                "--padded-vocab-size",
            }
            assert not set(seen) & set(foreign_flags.NO_EFFECT) - padding


def test_every_alias_sets_its_field():
    for cls in CONFIGS:
        syntax = syntax_of(cls)
        for _, f, kind in fields.config_fields(cls).values():
            for alias in f.metadata["aliases"]:
                typed = read_argv([alias] if kind is bool else [alias, "1"], syntax)
                is_off = kind is bool and alias.startswith(("--disable", "--no-"))
                want = not is_off if kind is bool else ["1"] if fields.is_list(kind) else "1"
                assert typed.values == {f.name: want} and not typed.unknown, alias


def test_both_x_and_no_x():
    for cls in CONFIGS:
        names = [
            n
            for n, (_, _, kind) in fields.config_fields(cls).items()
            if kind is bool and not n.startswith("no_")
        ]
        on = [fields.spelling(n) for n in names]
        off = ["--no-" + flag[2:] for flag in on]
        # the last one counts
        for argv, want in ((on, True), (off, False), (on + off, False), (off + on, True)):
            got = flags.to_dict(parse(*argv, cls=cls).config)
            assert {got[n] for n in names} <= {want}, cls
    c = parse("--no-load-optim").config.checkpoint
    assert c.no_load_optim and not c.no_save_optim


def test_equals_sign_and_blanks():
    c = parse(
        "--lr=1e-3",
        "--save=a b=c",
        "--data-path",
        "one two",
        "three",
        "--split=949, 50, 1",
        "--seed=1e3",
    ).config
    assert (c.optimizer.lr, c.checkpoint.save, c.training.seed) == (1e-3, "a b=c", 1000)
    assert (c.data.data_path, str(c.data.split)) == (["one two", "three"], "949, 50, 1")


@pytest.mark.parametrize(
    ("typed", "advice"),
    [
        ("--tensor-model-parallel", "did you mean --tensor-model-parallel-size?"),
        ("--num_layer", "did you mean --num-layers?"),
        ("--lr-decay-s", "see --help"),  # -samples or -style
    ],
)
def test_the_beginning_of_a_flag(typed, advice):
    """argparse takes it for the flag, so scripts of other trainers may have it."""
    assert refusal(typed, "2") == f"unknown flag {typed}; {advice}"


def test_underscores_for_hyphens():
    got = parse(
        "--seq_length", "8", "--train_iters=5", "--no_progress", "--data_path", "a_b", "c"
    ).config
    assert (got.data.seq_length, got.training.train_iters, got.logging.progress) == (8, 5, False)
    assert got.data.data_path == ["a_b", "c"]


# Refusals


@pytest.mark.parametrize(
    ("asked", "saved", "words"),
    [
        (
            {"num_attention_heads": 8},
            {"num_attention_heads": 4},
            "--num-attention-heads 8, the checkpoint has 4",
        ),
        (
            {"num_query_groups": 2},
            {"num_query_groups": 4},
            "--num-query-groups 2, the checkpoint has 4",
        ),
        (
            {"num_query_groups": None},
            {"num_query_groups": 4},
            "--num-query-groups none, the checkpoint has 4",
        ),
    ],
)
def test_a_contradiction_names_the_flag_that_differs(asked, saved, words):
    """And not --group-query-attention, which decides the same number together with it."""
    ours, theirs = (
        schema.Model(**{"num_attention_heads": 8} | values) for values in (asked, saved)
    )
    assert [*map(str, check_model.contradictions(ours, theirs))] == [words]
    if "num_query_groups" in asked and asked["num_query_groups"]:
        both = [dataclasses.replace(m, group_query_attention=True) for m in (ours, theirs)]
        assert [*map(str, check_model.contradictions(*both))] == [words]


@pytest.mark.fault("F29")
@pytest.mark.promise("Unknown names and wrong types are refused")
def test_all_problems_at_once(tmp_path, monkeypatch, capsys):
    file = tmp_path / "c.toml"
    file.write_text("seed = 'x'\nunheard_of = 1\n")
    monkeypatch.setenv("MESHWRIGHT_CLIP_GRAD", "much")
    argv = "--num-layer 2 --lr fast --batch-size 4 --bert-load x --hidden-size 30 --num-attention-heads 4"
    assert (
        main(["train", "--config", str(file), *argv.split(), "--num-experts", "4", "--mock-data"])
        == USAGE
    )
    err = capsys.readouterr().err
    for words in (
        "seed in",
        "unknown setting 'unheard_of' in",
        "MESHWRIGHT_CLIP_GRAD: 'much' is not a number",
        "did you mean --num-layers",
        "--lr: 'fast'",
        "no flag --batch-size; here it is",
        "for BERT",
        "--hidden-size 30 is not a multiple",
        "--num-experts 4 is not yet",
        "--seq-length and --train-iters are needed too",
    ):
        assert err.count(words) == 1, words
    assert "--lr is needed" not in err and "Traceback" not in err  # it is there, only not a number


def test_unknown_environment(monkeypatch):
    monkeypatch.setenv("MESHWRIGHT_APPEND_EOD", "1")  # another command's
    parse()
    monkeypatch.setenv("MESHWRIGHT_NUM_LAYER", "1")
    assert (
        "unknown setting 'MESHWRIGHT_NUM_LAYER'; did you mean MESHWRIGHT_NUM_LAYERS?" in refusal()
    )


@pytest.mark.parametrize(
    ("name", "raw", "words"),
    [
        ("a.yaml", b"[" * 1500, "--config"),
        ("a.yaml", b"lr: \x00", "--config"),
        ("a.toml", b"lr = " + b"[" * 5000, "--config"),
        (
            "a.toml",
            b"a." * 20_000 + b"a = 1",
            "a.toml: a key has more than 8 parts; no file of settings needs that",
        ),
        ("a.toml", b"lr = 1\n[" + b"a . " * 20_000 + b"a]\n", "a key has more than 8 parts"),
        (
            "a.toml",
            b"lr = 1 # '\n" + b'\'\'."\\"".' * 10_000 + b"a = 1",
            "a key has more than 8 parts",
        ),
        ("a.toml", b"lr = [{" + b"a." * 20_000 + b"a = 1}]", "a key has more than 8 parts"),
        (
            "a.toml",
            b"".join(b"[a%d]\n" % i for i in range(20_000)),
            "20,000 keys and tables; at most 10,000 are read",
        ),
        ("a.toml", bytes(range(256)), "not UTF-8 text"),
        ("a.toml", b"\x00", "--config"),
    ],
)
@pytest.mark.fault("F29")
@pytest.mark.promise(
    "Configuration holds settings only", "TOML, JSON and YAML's safe loader make no objects"
)
def test_hostile_files(tmp_path, monkeypatch, name, raw, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_bytes(raw)
    assert words in refusal("--config", name)
    assert [p.name for p in tmp_path.iterdir()] == [name]


QUOTE = "'"


def test_text_in_toml_may_have_dots_and_brackets(tmp_path):
    """Only keys and tables are counted, and an open string takes no longer than a closed one."""
    dots, path = "a.b.c.d.e.f.g.h.i.j [[ = " * 1_000, tmp_path / "a.toml"
    forms = [
        f'"{dots}"',
        f"'{dots}'",
        f'"""\n{dots}"\n\\"""{dots}"""',
        f"'''\n{dots}'\n'''",
        f'"" # {dots}',
    ]
    for text in forms:
        path.write_text(f"save = {text}\nseed = 7\n")
        assert parse("--config", str(path)).config.training.seed == 7
    escaped = '\\"' * 50_000
    for text in (
        f'"""{escaped}',
        f'"""{escaped}\\',
        '"""' * 50_001,
        f"{3 * QUOTE}{50_000 * QUOTE}",
        f'"{escaped}',
    ):
        path.write_text(f"lr = {text}")
        assert "--config" in refusal("--config", str(path))


# Addresses instead of paths

S3 = "s3://bucket/y"


def test_addresses_in_files_environment_and_python(tmp_path, monkeypatch):
    (tmp_path / "c.toml").write_text(f"save_hf = '{S3}'")
    (tmp_path / "paths.txt").write_text(f"0.5 a\n0.5 {S3}\n")
    (tmp_path / "paths.json").write_text(f'{{"train": ["{S3}"]}}')
    wanted = f"{S3} is an address"
    said = refusal("--config", str(tmp_path / "c.toml"))
    assert said.startswith(f"save_hf = '{S3}' in {tmp_path / 'c.toml'} is an address")
    for flag in ("--data-args-path", "--per-split-data-args-path"):
        file = str(tmp_path / ("paths.json" if "per" in flag else "paths.txt"))
        assert f"{flag} {file}: {wanted}" in refusal(flag, file, check=True)
    with pytest.raises(UserError, match=wanted):
        meshwright.convert(tmp_path, S3)
    monkeypatch.setenv("MESHWRIGHT_LOCAL_DIR", S3)
    assert refusal().startswith(f"MESHWRIGHT_LOCAL_DIR='{S3}' is an address")


def test_a_prompt_may_hold_an_address():
    assert parse("--prompt", f"{S3} is", cls=GenerateConfig).config.texts.prompt == f"{S3} is"


@pytest.mark.fault("F28")
def test_a_file_that_stands_for_gigabytes(tmp_path):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    (tmp_path / "a.yaml").write_text(
        "\n".join([*lines, "lr: *a11", "save: *a11", "data_path: *a11", "fp16: *a11"])
    )
    assert len(refusal("--config", str(tmp_path / "a.yaml"))) < 10_000


def test_empty_file_is_no_mistake(tmp_path):
    for name in ("a.toml", "a.yaml"):
        (tmp_path / name).write_text("")
        assert parse("--config", str(tmp_path / name)).config == TrainConfig()


def test_a_byte_order_mark_is_no_setting(tmp_path):
    """Editors of Windows write one."""
    for name, text in (("a.toml", "lr = 0.5\n"), ("a.yaml", "lr: 0.5\n")):
        (tmp_path / name).write_text(text, encoding="utf-8-sig")
        assert parse("--config", str(tmp_path / name)).config.optimizer.lr == 0.5


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        (
            "a.toml",
            "seed = 1\n[training]\nseed = 2\n",
            "seed in FILE is given twice, as 1 and as 2",
        ),
        (
            "a.toml",
            "train-iters = 1\ntrain_iters = 2\n",
            "train_iters in FILE is given twice, as 1",
        ),
        (
            "a.toml",
            "learning_rate = 0.1\nlr = 0.2\n",
            "lr in FILE is given twice, as 0.1 and as 0.2; remove one",
        ),
        (
            "a.toml",
            "seed = 1\nlr = 0.1\nseed = 2\n",
            "FILE: line 3 gives a key or section again that an earlier line gives; remove one",
        ),
        (
            "a.toml",
            "[training]\nseed = 1\n[training]\nlr = 2\n",
            "FILE: line 3 gives a key or section again that an earlier line gives; remove one",
        ),
        (
            "a.yaml",
            "seed: 1\nlr: 0.1\nseed: 2\n",
            "FILE: seed is given twice, in lines 1 and 3; remove one",
        ),
        (
            "a.yaml",
            "training: {seed: 1, seed: 2}\n",
            "FILE: seed is given twice, in line 1; remove one",
        ),
        # as yaml.safe_load takes merge keys, which no settings need
        ("a.yaml", "training: {<<: {seed: 1}, seed: 2}\n", ""),
    ],
)
def test_a_setting_that_a_file_gives_twice(tmp_path, name, text, words):
    """None of the two is silently passed over."""
    path = tmp_path / name
    path.write_text(text)
    if words:
        assert words.replace("FILE", str(path)) in refusal("--config", str(path))
    else:
        assert parse("--config", str(path)).config.training.seed == 2


def test_sections_of_other_commands_keep_their_settings(tmp_path):
    """A setting of another command may have the name of ours, and one file may hold both."""
    path = tmp_path / "all.toml"
    sections = ["[training]\nseed = 5\n", "[deduplication]\nseed = 7\n"]
    texts = ["[evaluate]\ninput = ['b']\n", "[preprocess]\ninput = ['a']\nlog_interval = 3\n"]
    for content in (sections + texts, texts[::-1] + sections[::-1]):
        path.write_text("".join(content))
        config = parse("--config", str(path)).config
        assert (config.training.seed, config.logging.log_interval) == (5, 100)
        prepared = parse("--config", str(path), cls=PreprocessConfig).config.preprocess
        assert (prepared.input, prepared.log_interval) == (["a"], 3)
    path.write_text("[deduplication]\nsead = 7\n")
    assert f"unknown setting 'sead' in {path}" in refusal("--config", str(path))


# Flags without effect


def test_flags_without_effect_are_reported_once(capsys):
    got = parse("--DDP-impl", "local", "--DDP-impl=torch", "--no-bias-dropout-fusion", "--use-rdma")
    flags.print_notices(got)
    err = capsys.readouterr().err.splitlines()
    assert len(err) == 3 and got.config == TrainConfig()
    assert err[0].startswith(
        "note: --DDP-impl is accepted and has no effect: gradients lie in flat buffers"
    )
    without = "--local-dir has no effect without an address such as s3://bucket/run"
    assert parse("--local-dir", "d", "--save", "r").notices == [without]
    assert parse("--local-dir", "d", "--data-path", "s3://b/x", "--save", "r").notices == []
    assert parse("--use-distributed-optimizer").notices == [
        "--use-distributed-optimizer has no effect without several data-parallel ranks"
    ]
    gpt2 = "--vocab-file v --merge-file m".split()
    unread = "--tokenizer-model is not read by GPT2BPETokenizer, which takes --vocab-file and --merge-file"
    assert parse(*gpt2, "--tokenizer-model", "t").notices == [unread]
    assert parse("--vocab-file", "v", "--tokenizer-type", "BertWordPieceCase").notices == []
    llama = "--tokenizer-type Llama2Tokenizer --tokenizer-model t".split()
    unread = "is not read by Llama2Tokenizer, which takes --tokenizer-model"
    assert parse(*gpt2, *llama).notices == [f"--vocab-file {unread}", f"--merge-file {unread}"]
    assert parse("--profile").notices == ["--profile has no effect without --save or --run-dir"]


def test_no_effect_takes_its_values():
    counts = {
        name: 3 if count == "*" else int(count)
        for name, (count, _) in foreign_flags.NO_EFFECT.items()
    }
    argv = [word for name, count in counts.items() for word in (name, *["1"] * count)]
    for cls in CONFIGS:
        options = syntax_of(cls).options
        wanted = [
            f"{name} is accepted and has no effect: {why}"
            for name, (_, why) in foreign_flags.NO_EFFECT.items()
            if options[name].target == name  # else the command has a use for it
        ]
        assert [n for n in parse(*argv, cls=cls).notices if "is accepted" in n] == wanted


# Presets


def test_a_length_replaces_that_of_the_preset_or_file(tmp_path):
    """A layer's unit replaces the others of the layers below; in one layer two are refused."""
    argv = ["--preset", "gpt2-117m", "--mock-data", "--vocab-size", "64", "--train-iters", "2000"]
    o = parse(*argv, "--lr-warmup-iters", "200").config.optimizer
    assert (o.lr_warmup_fraction, o.lr_warmup_iters, o.lr_decay_iters) == (None, 200, 1280)
    argv[-2:] = "--train-samples 9000 --lr-decay-iters none --lr-warmup-samples 100".split()
    c = parse(*argv).config
    assert (c.training.train_iters, c.warmup_samples, c.decay_samples) == (None, 100, 9000)
    (tmp_path / "c.toml").write_text("train_samples = 9000")
    assert parse("--config", str(tmp_path / "c.toml"), "--train-epochs", "2").config.lengths == [
        "train_epochs"
    ]
    with pytest.raises(UserError, match="both set the warm-up"):
        parse(*argv, "--lr-warmup-fraction", "0.1", check=True)


# Start-up

PLAIN = """
import sys
from meshwright.__main__ import main
HEAVY = {"torch", "numpy", "rich", "matplotlib", "tokenizers", "yaml"}
for line in sys.argv[1:]:
    try:
        main(line.split())
    except SystemExit:
        pass
    assert not HEAVY & set(sys.modules), (line, HEAVY & set(sys.modules))
"""
YARDSTICK = "import argparse, concurrent.futures, inspect, logging, tomllib, unittest.mock; print('0' * 200)"
PRINT = " ".join(["train", *TINY_FLAGS, "--print-config"])


def seconds(*words):
    """Return the processor time of a Python program that prints something."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", *words], capture_output=True, text=True, env=os.environ
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0 and len(done.stdout) > 150, done.stderr
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.parametrize(("line", "limit"), [("train --help", 0.3), (PRINT, 0.5)])
def test_starts_at_once(line, limit):
    """Count processor time; on a slow machine, in units of a known import."""
    took = []
    # the first run may have to compile files
    while len(took) < 5 and min(took, default=limit) >= limit:
        took.append(seconds(PLAIN, line))
        if took[-1] >= limit:
            took[-1] *= min(1, 0.08 / seconds(YARDSTICK))
    assert min(took) < limit, took


def test_every_help_starts_without_heavy_imports():
    lines = [*COMMANDS, *(f"data {verb}" for verb in verbs())]
    assert seconds(PLAIN, *(f"{line} --help" for line in lines)) < 0.1 * len(lines)


# Every name that the documents and the programs they use pass

MODEL = "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024"
FILES = "--vocab-file v.json --merge-file m.txt"
MEGATRON_LM = (
    f"{MODEL} {FILES} --data-path my-gpt2_text_document --data-impl mmap --split 949,50,1 --micro-batch-size 8 "
    "--global-batch-size 16 --train-iters 5000 --lr 0.00015 --lr-decay-iters 320000 --lr-decay-style cosine "
    "--min-lr 1.0e-5 --weight-decay 1e-2 --lr-warmup-fraction .01 --clip-grad 1.0 --fp16 --save c --load c "
    "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --distributed-backend nccl "
    "--checkpoint-activations --log-interval 10 --save-interval 500 --eval-interval 100 --eval-iters 10 "
    "--local_rank 0 --local-rank=0"
)
ONEFLOW = (
    f"{MODEL} --micro-batch-size 4 --global-batch-size 8 --num-gpus-per-node 1 --num-nodes 1 --train-iters 500000 "
    "--learning-rate 0.00015 --dataset gpt_sample_dataset_text_document --split 949,50,1 --min-lr 1.0e-5 "
    "--lr-decay-style cosine --lr-decay-iters 320000 --lr-warmup-fraction 0.01 --weight-decay 1e-2 "
    "--optimizer adamw --clip-grad 1.0 --vocab-size 50257 --load checkpoint --save checkpoint --save-interval 10000 "
    "--log-interval 100 --checkpoint-activations --multihead-attention-fusion --fp16 --use-rdma "
    "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --initial-loss-scale 4294967296"
)
PREPROCESS = (
    "--input oscar-1GB.jsonl --output-prefix meg-gpt2 --vocab gpt2-vocab.json --dataset-impl mmap "
    "--tokenizer-type GPT2BPETokenizer --merge-file gpt2-merges.txt --append-eod --workers 8"
)
GENERATE = (
    f"{MODEL} {FILES} --tensor-model-parallel-size 1 --load ckpt --tokenizer-type GPT2BPETokenizer --fp16 "
    "--micro-batch-size 2 --out-seq-length 1024 --temperature 1.0 --genfile unconditional_samples.json --top_p 0.9 "
    "--recompute --num-samples 0"
)


@pytest.mark.parametrize(
    ("cls", "line", "accepted"),
    [
        (TrainConfig, MEGATRON_LM, 0),
        (TrainConfig, ONEFLOW, 2),
        (PreprocessConfig, PREPROCESS, 0),
        (GenerateConfig, GENERATE, 0),
    ],
)
def test_commands_of_the_documents(cls, line, accepted):
    got = flags.parse_settings(cls, line.split(), "meshwright test")
    assert sum("is accepted" in n for n in got.notices) == accepted


# All arguments that Megatron-LM of June 2023 prints at its start, so all the flags it has.
BLOCK = Path(__file__).parents[1] / "compat" / "blocks" / "megatron-lm.txt"
DUMP = re.findall(r"^  (\w+) \.{3,} ", BLOCK.read_text(encoding="utf-8"), re.M)

# Printed there, but computed from other flags; Megatron has no such flags either.
DERIVED = """consumed_train_samples consumed_valid_samples data_parallel_size rank world_size
transformer_pipeline_model_parallel_size virtual_pipeline_model_parallel_size variable_seq_lengths""".split()

# Printed under a name that is not the flag's.
PRINTED_AS = {
    "add_position_embedding": "--no-position-embedding",
    "async_tensor_model_parallel_allreduce": "--no-async-tensor-model-parallel-allreduce",
    "barrier_with_L1_time": "--no-barrier-with-level-1-timing",
    "bert_binary_head": "--bert-no-binary-head",
    "bias_dropout_fusion": "--no-bias-dropout-fusion",
    "data_sharding": "--no-data-sharding",
    "fp8_wgrad": "--no-fp8-wgrad",
    "gradient_accumulation_fusion": "--no-gradient-accumulation-fusion",
    "masked_softmax_fusion": "--no-masked-softmax-fusion",
    "overlap_p2p_comm": "--overlap-p2p-communication",
    "perform_initialization": "--no-initialization",
    "scatter_gather_tensors_in_pipeline": "--no-scatter-gather-tensors-in-pipeline",
    "use_contiguous_buffers_in_local_ddp": "--no-contiguous-buffers-in-local-ddp",
}

# Flags of Megatron-DeepSpeed, DeepSpeed and OneFlow-GPT beyond those.
OTHERS = """
    --ffn-hidden-size --glu-activation --position-embedding-type --embed-layernorm --recompute-activations
    --eval-only --skip-train --skip-train-iteration-range --kill-switch-path --kill-switch-file
    --override-lr-scheduler --use-checkpoint-lr-scheduler --override-opt_param-scheduler
    --use-checkpoint-opt_param-scheduler --codecarbon-dir --use-bnb-optimizer --universal-checkpoint --cpu-optimizer
    --train-tokens --no-bias-gelu-fusion --disable-bias-linear --no-query-key-layer-scaling --pad-vocab-size-to
    --tokenizer-name-or-path --checkpoint-activations --local_rank --checkpoint-num-layers --batch-size --warmup
    --model-parallel-size --deepspeed --deepspeed_config --zero-stage --deepspeed-activation-checkpointing
    --partition-activations --contigious-checkpointing --checkpoint-in-cpu --synchronize-each-layer
    --profile-backward --zero-reduce-scatter --zero-contigious-gradients --zero-reduce-bucket-size
    --zero-allgather-bucket-size --remote-device --use-pin-memory --scattered-embeddings --split-transformers
    --memory-centric-tiled-linear --tile-factor --num-accumulation-steps --node-ips --ctrl-port --num-gpus-per-node
    --num-nodes --log --metric-print-format --save-last --save-init --use-external-dataset --dataset
    --profile-transformer-layer --no-scale-tril-softmax-dropout-fusion --multihead-attention-fusion --learning-rate
    --use-rdma --no-log-learnig-rate-to-tensorboard --no-log-loss-scale-to-tensorboard --log-memory-to-tensorboard
""".split()


def test_every_name_of_the_argument_dump_is_known():
    assert len(DUMP) == 225 and len(set(DUMP)) == 225
    syntax = syntax_of(TrainConfig)
    for name in [n for n in DUMP if n not in DERIVED]:
        spelled = [PRINTED_AS.get(name), fields.spelling(name), "--" + name.replace("_", "-")]
        flag = next((s for s in spelled if s in syntax.options), spelled[0] or spelled[2])
        known = flag in syntax.options
        assert known or not answer_unknown(flag, syntax).text.startswith("unknown"), name


@pytest.mark.parametrize("flag", OTHERS)
def test_flags_of_the_other_programs_are_known(flag):
    syntax = syntax_of(TrainConfig)
    assert flag in syntax.options or not answer_unknown(flag, syntax).text.startswith("unknown")


# Flags for one start

ONE_START = {
    "local_rank": 1,
    "data_changed": "ok",
    "override_opt_param_scheduler": True,
    "save_overwrite": True,
    "trust_pickle": True,
    "finetune": True,
    "no_load_optim": True,
    "use_checkpoint_args": True,
    "weights": "ema",
}


@pytest.mark.promise("What allows code to run, and every other flag for one start")
def test_no_file_or_shell_gives_a_flag_for_one_start(tmp_path, monkeypatch):
    assert {*schema.flags_with(TrainConfig, "once", True)} == {*ONE_START}
    for name, value in ONE_START.items():
        path = tmp_path / f"{name}.toml"
        path.write_text(f"{name} = {json.dumps(value)}\n")
        typed = fields.spelling(name) + ("" if value is True else f"={value}")
        why = "it is for one start, so neither a file nor a variable can set it; "
        why += "give it with the start itself, or leave it out there"
        for cls in (TrainConfig, GenerateConfig, ConvertConfig):
            if name not in fields.config_fields(cls):
                continue
            assert refusal("--config", str(path), cls=cls) == f"{name} in {path}: {why}"
            assert flags.to_dict(parse("--config", str(path), typed, cls=cls).config)[name] == value
            with monkeypatch.context() as shell:
                shell.setenv(f"MESHWRIGHT_{name.upper()}", str(value))
                assert refusal(cls=cls) == f"MESHWRIGHT_{name.upper()}: {why}"
    # as --print-config writes them
    path.write_text("trust_pickle = false\n[checkpoint]\nweights = 'plain'\n")
    assert not parse("--config", str(path)).config.checkpoint.trust_pickle
    path.write_text("[checkpoint]\noverride-lr-scheduler = true\n")
    assert refusal("--config", str(path)).startswith(
        f"override-lr-scheduler in {path}: it is for one start"
    )
    assert parse(values={"trust_pickle": True}).config.checkpoint.trust_pickle  # Python
