"""Generating text with a trained model: the modes and their files, the cache, and refusals."""

import functools
import io
import json
import re
import runpy
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from three_sentences import BEAR, CAT, DOG, LENGTH, SENTENCES, SHAPE, learn

from helpers import flip_bit
from meshwright.__main__ import main
from meshwright.data import tokenizers

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def generate(program):
    """A function of flags that returns the status, standard output and standard error."""
    return functools.partial(program, "generate")


@pytest.fixture
def samples(generate, tmp_path):
    """A function of flags that returns the rows of --num-samples, by default 12."""

    def call(*argv, n=12):
        path = tmp_path / "samples.json"
        status, out, err = generate("--num-samples", n, "--genfile", path, *argv)
        assert status == 0, err
        return [
            json.loads(line)
            for line in path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
        ]

    return call


def texts(rows):
    return [r["text"] for r in rows]


# The choice of tokens


@pytest.mark.flag("greedy")
def test_greedy(generate, samples):
    """The model continues its text; without a prompt it writes the likeliest sentence."""
    assert generate("--greedy", "--prompt", "the c")[:2] == (0, f"{CAT}\n")
    assert generate("--greedy", "--prompt", "a d")[:2] == (0, f"{DOG}\n")
    assert set(texts(samples("--greedy", n=3))) == {CAT}


@pytest.mark.flag("temperature")
def test_temperature(samples):
    usual = texts(samples(n=60))
    known = [usual.count(s) for s in SENTENCES]
    assert known[0] == max(known) and min(known) > 0 and sum(known) > 30
    assert set(texts(samples("--temperature", "0.01"))) == {CAT}
    assert not set(texts(samples("--temperature", "50"))) & set(SENTENCES)


@pytest.mark.flag("top_k top_p min_p")
@pytest.mark.parametrize(
    ("all_three", "fewer", "count", "one"),
    [
        ("--top_k=3", "--top-k=2", 2, "--top_k=1"),
        ("--top_p=0.95", "--top-p=0.7", 2, "--top_p=0.1"),
        ("--min_p=0.1", "--min-p=0.9", 1, "--min_p=0.9"),
    ],
)
def test_filters(samples, all_three, fewer, count, one):
    """There are three beginnings, of about 6, 3 and 2 elevenths; a filter leaves the likeliest."""
    assert {text[0] for text in texts(samples(all_three, n=40))} == {"t", "a", "e"}
    assert len({text[0] for text in texts(samples(fewer, n=40))}) == count
    assert set(texts(samples(one, n=3))) == {CAT}


@pytest.mark.flag("repetition_penalty")
def test_repetition_penalty(generate):
    """A strong one forbids a letter that the text has; 1 changes nothing."""
    plain = generate("--greedy", "--prompt", "the c")[1]
    assert generate("--greedy", "--prompt", "the c", "--repetition_penalty", "1")[1] == plain
    text = generate(
        "--greedy", "--prompt", "the c", "--repetition-penalty", "1000", "--max-new-tokens=4"
    )[1]
    assert text != plain and len(set(text[:-1])) == len(text) - 1 - "the c".count("e") + 1


def test_seed(samples):
    assert samples("--seed", "1") == samples("--seed", "1") != samples("--seed", "2")


@pytest.mark.flag("recompute")
@pytest.mark.parametrize("flag", ["--micro-batch-size=5", "--recompute"])
def test_samples_depend_on_no_batch_and_no_cache(samples, flag):
    assert samples(flag) == samples("--micro-batch-size=99")


# Lengths


@pytest.mark.flag("out_seq_length")
def test_out_seq_length(generate, samples):
    assert generate("--greedy", "--out-seq-length", "4", "--prompt", "the")[1] == "the cat\n"
    for row in samples("--out-seq-length", "6", n=5):
        assert (row["length"], row["finished"]) == (6, False)  # cut short is not finished


def test_seq_length_may_be_filled_exactly(samples, generate, tmp_path):
    """An end-of-document token and nine new ones; or a prompt one token below the length."""
    full = samples("--seq-length", "10", "--greedy", n=1)
    assert full == [{"text": CAT[:9], "length": 9, "finished": False}]
    assert generate("--greedy", "--seq-length", "10", "--prompt", CAT[:9])[1] == f"{CAT[:10]}\n"
    status, _, err = generate("--greedy", "--seq-length", "10", "--prompt", CAT[:10])
    assert status == 2 and "10 tokens" in err and "reads 10" in err


# Files


@pytest.mark.flag("num_samples genfile")
def test_num_samples_and_genfile(generate, tmp_path):
    path = tmp_path / "samples.json"
    path.write_text("old\n" * 100)
    for n in (1, 9):
        status, out, _ = generate("--num-samples", n, "--genfile", path, "--micro-batch-size", "4")
        rows = [
            json.loads(line)
            for line in path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
        ]
        assert (
            status == 0
            and len(rows) == n
            and all(set(r) == {"text", "length", "finished"} for r in rows)
        )
        assert len(re.findall(r"^Avg s/batch: \d+\.\d+$", out, re.M)) == -(-n // 4)
    status, _, err = generate("--num-samples", "2")
    assert status == 2 and "--genfile" in err


@pytest.mark.flag("sample_input_file")
def test_sample_input_file(generate, tmp_path):
    """Every line is a prompt: an empty one, "stop", and a last one without a newline."""
    path = tmp_path / "prompts.txt"
    path.write_bytes("the cat\r\n\na dog\nstop\nein Bä".encode())
    assert generate("--greedy", "--sample-input-file", path)[0] == 0
    blocks = (tmp_path / "prompts.txt.out").read_text(encoding="utf-8").split("\nContext:")[1:]
    assert [b.split("\n\nMegatron-LM:")[0] for b in blocks] == [
        "the cat",
        "",
        "a dog",
        "stop",
        "ein Bä",
    ]
    answers = [b.split("\n\nMegatron-LM:")[1] for b in blocks]
    assert [answers[i] for i in (0, 1, 2, 4)] == [" sat.\n", f"{CAT}\n", " ran.\n", "r.\n"]


@pytest.mark.flag("sample_output_file")
def test_sample_output_file(generate, tmp_path):
    path, out = tmp_path / "p", tmp_path / "answers"
    path.write_text("the ca\nthe c\na\n")
    contents = set()
    for size in (1, 3):  # prompts of different lengths in one batch: each as if alone
        assert (
            generate(
                "--sample-input-file", path, "--sample-output-file", out, "--micro-batch-size", size
            )[0]
            == 0
        )
        contents.add(out.read_text(encoding="utf-8"))
    assert len(contents) == 1 and not (tmp_path / "p.out").exists()
    status, _, err = generate("--sample-input-file", path, "--sample-output-file", path)
    assert status == 2 and "is the input file" in err and path.read_text() == "the ca\nthe c\na\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file"),
        (b"", "is empty"),
        (b"good\n\xff\n", "byte 5 is not UTF-8"),
        (
            b"a\n" + b"x" * LENGTH + b"\nb\n" + b"y" * 99,
            f", prompt 2 has {LENGTH} tokens; the model reads {LENGTH}, give a shorter one\n",
        ),
    ],
)
def test_bad_input_files_are_refused(generate, tmp_path, content, message):
    path = tmp_path / "p"
    if content is not None:
        path.write_bytes(content)
    status, _, err = generate("--sample-input-file", path)
    assert status == 65 and message in err and "Traceback" not in err
    assert not (tmp_path / "p.out").exists()


# A dialogue


@pytest.mark.flag("prompt")
def test_nothing_but_the_text_is_on_standard_output(generate):
    status, out, err = generate("--greedy", "--prompt", "ein B")
    assert (status, out) == (0, f"{BEAR}\n") and "loading checkpoint" in err
    assert generate("--greedy", "--prompt", "")[1] == f"{CAT}\n"


@pytest.mark.flag("interactive dialogue")
def test_interactive(generate):
    typed = "\n   \ndon't stop\n" + "x" * (LENGTH // 2) + "\nthe cat\n stop \nthe dog\n"
    status, out, err = generate("--interactive", "--greedy", "--dialogue=megatron", typed=typed)
    assert status == 0 and out.count("\nContext prompt (stop to exit) >>> ") == 6
    assert out.count("Prompt should not be empty!\n") == 2
    assert "Context: don't stop\n" in out
    assert (
        f"\nContext length {LENGTH // 2} \nPlease give smaller context (half of the sequence length)!\n"
        in out
    )
    assert "\nContext: the cat\n\nMegatron-LM:  sat.\n" in out
    assert "the dog" not in out and "Press Enter" not in out and "\033" not in out


def test_interactive_in_a_terminal(generate, monkeypatch):
    class Terminal(io.TextIOWrapper):
        def isatty(self):
            return True

    monkeypatch.setattr(io, "TextIOWrapper", Terminal)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    status, out, _ = generate("--greedy", "--dialogue=megatron", typed="a dog\n\nthe cat\n")
    assert (
        status == 0
        and out.count("\nPress Enter to continue >>>") == 2
        and out.count("\033[2J\033[H") == 2
    )


def test_bare_ids(tmp_path, capsys, monkeypatch):
    """A model of mock data reads and writes numbers; a typing mistake does not end the dialogue."""
    monkeypatch.setattr("meshwright.training.run.write_report", lambda folder: None)
    flags = "--mock-data --vocab-size=20 --micro-batch-size=1 --lr=1e-3 --train-iters=1 --eval-iters=0 --device=cpu"
    assert main(["train", *SHAPE, *flags.split(), "--save", str(tmp_path / "r")]) == 0
    capsys.readouterr()
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\n99\n1 2\n"))
    assert main(["generate", str(tmp_path / "r"), "--device=cpu"]) == 2
    flags = capsys.readouterr().err.split("bare ids, ")[1].split()
    assert (
        main(["generate", str(tmp_path / "r"), "--device=cpu", "--out-seq-length=5", *flags]) == 0
    )
    out, err = capsys.readouterr()
    assert "integers separated by white space" in err and "id 99 is not in 0 ... " in err
    assert re.fullmatch(r"\d+( \d+)*\n", out)
    prompted = ["generate", str(tmp_path / "r"), "--device=cpu", "--prompt=1 2", *flags]
    assert main(prompted) == 0
    assert re.fullmatch(r"1 2( \d+)*\n", capsys.readouterr().out)


@pytest.mark.parametrize("typed", ["", " \n\n"])
def test_an_input_without_a_prompt_is_refused(generate, typed):
    status, out, err = generate(typed=typed)
    assert (status, out) == (2, "") and "standard input holds no prompt; give --prompt TEXT" in err
    assert generate(typed="/quit\n")[0] == 0


# Characters


# What is refused


def test_contradicting_flags_are_listed_together(generate):
    status, _, err = generate(
        "--num-layers=3", "--hidden-size=64", "--seq-length=99", "--num-attention-heads=4"
    )
    assert status == 65 and "--num-layers 3, the checkpoint has 2" in err
    assert "--hidden-size 64, the checkpoint has 32" in err
    assert f"--seq-length 99, the checkpoint has {LENGTH} positions" in err and "heads" not in err


def test_missing_tokenizer(generate, run, tmp_path):
    shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("tokenizer"))
    status, _, err = generate("--prompt", "a", load=tmp_path / "run")
    assert status == 2 and "--tokenizer DIR" in err and "NullTokenizer" in err
    assert generate(
        "--greedy", "--prompt=a d", "--tokenizer-type=ByteTokenizer", load=tmp_path / "run"
    )[1] == (f"{DOG}\n")
    status, _, err = generate(
        "--tokenizer-type=NullTokenizer", "--vocab-size=9", load=tmp_path / "run"
    )
    assert (
        status == 65
        and "the vocabulary has 10 ids" in err
        and "end-of-document id, the checkpoint 257" in err
    )


def test_another_vocabulary_of_the_same_size(generate, run, tmp_path):
    """It is refused: the same ids would mean other text."""
    tokenizers.train_bpe([" ".join(SENTENCES)] * 3, 270, tmp_path)
    named = [f"--vocab-file={tmp_path}/vocab.json", f"--merge-file={tmp_path}/merges.txt"]
    shutil.copytree(run, tmp_path / "run")
    tokenizers.save_tokenizer(
        tokenizers.GPT2BPE(tmp_path / "vocab.json", tmp_path / "merges.txt"),
        tmp_path / "run" / "tokenizer",
    )
    vocab = json.loads((tmp_path / "vocab.json").read_text())
    a, b = list(vocab)[:2]
    (tmp_path / "vocab.json").write_text(json.dumps(vocab | {a: vocab[b], b: vocab[a]}))
    status, _, err = generate("--prompt", "a", *named, load=tmp_path / "run")
    assert status == 65 and "the same ids would mean other text" in err


def test_reaching_the_sequence_length_is_noted(generate):
    _, _, err = generate(
        "--greedy", "--prompt", "a d", "--out-seq-length", "999", "--seq-length", "8"
    )
    assert "the text ends at the model's sequence length, 8 tokens" in err
    assert "ends" not in generate("--greedy", "--prompt", "a d", "--out-seq-length", "2")[2]


def test_several_damaged_steps_give_way(generate, run, tmp_path):
    """The newest has a bad manifest, the next one a flipped bit, the third is complete."""
    shutil.copytree(run, tmp_path / "run")
    (whole,) = (tmp_path / "run").glob("iter_*")
    for name in ("iter_0009998", "iter_0009999"):
        shutil.copytree(whole, tmp_path / "run" / name)
    (tmp_path / "run/iter_0009999/manifest.json").write_text("{}")
    weights = tmp_path / "run/iter_0009998/rank_00000.safetensors"
    flip_bit(weights, 8 * weights.stat().st_size - 70)
    status, out, err = generate("--prompt", "a", "--verify=full", load=tmp_path / "run")
    assert status == 0 and out == generate("--prompt", "a", load=run)[1]
    assert "skipping iter_0009999, it is damaged" in err and "skipping iter_0009998" in err
    for path in (whole / "rank_00000.safetensors", weights):
        path.unlink()
    status, _, err = generate("--prompt", "a", load=tmp_path / "run")
    assert status == 65 and whole.name in err and "iter_0009998" in err


def test_flags_without_effect_are_noted(generate, run):
    """Only those of the command line: a run's config.toml holds a whole training."""
    _, _, err = generate("--prompt", "a", "--train-iters=7")
    assert "note: --train-iters has no effect on this command" in err
    status, _, err = generate("--prompt", "a", "--config", str(run / "config.toml"))
    assert status == 0 and "has no effect" not in err


def test_dry_run_writes_nothing(generate, tmp_path):
    status, out, _ = generate("--dry-run", "--num-samples=2", "--genfile", tmp_path / "x", *SHAPE)
    assert status == 0 and not (tmp_path / "x").exists() and "nothing was loaded" in out


# The documents' commands

UNCONDITIONAL = """tools/generate_samples_gpt.py --tensor-model-parallel-size 1 --num-layers 24 --hidden-size 1024
    --load $CHECKPOINT_PATH --num-attention-heads 16 --max-position-embeddings 1024
    --tokenizer-type GPT2BPETokenizer --fp16 --micro-batch-size 2 --seq-length 1024 --out-seq-length 1024
    --temperature 1.0 --vocab-file $VOCAB_FILE --merge-file $MERGE_FILE --genfile unconditional_samples.json
    --num-samples 2 --top_p 0.9 --recompute"""
SMALLER = {"24": "2", "1024": str(LENGTH), "16": "4"}


def documents_command(text, **variables):
    """Return a command of the documents, with smaller sizes, as argv."""
    for name, value in variables.items():
        text = text.replace(f"${name}", value)
    words = shlex.split(text)
    return [
        "32" if before == "--hidden-size" else SMALLER.get(word, word)
        for before, word in zip(["", *words], words, strict=False)
    ]


def test_documents_commands(tmp_path, monkeypatch, capsys):
    """Write two samples into a file; then, with --num-samples 0, hold a dialogue on two ranks."""
    (tmp_path / "data").mkdir()
    tokenizers.train_bpe(SENTENCES * 9, 280, tmp_path / "data")
    vocabulary = {"VOCAB_FILE": "data/vocab.json", "MERGE_FILE": "data/merges.txt"}
    monkeypatch.chdir(tmp_path)
    learn(tmp_path, 20, "--vocab-file=data/vocab.json", "--merge-file=data/merges.txt")
    capsys.readouterr()

    def script(text):
        argv = documents_command(text, CHECKPOINT_PATH="run", **vocabulary)
        monkeypatch.setattr(sys, "argv", argv)
        monkeypatch.setattr(sys, "path", list(sys.path))
        with pytest.raises(SystemExit) as left:
            runpy.run_path(str(ROOT / argv[0]), run_name="__main__")
        return left.value.code, *capsys.readouterr()

    status, out, _ = script(UNCONDITIONAL)
    rows = [
        json.loads(line) for line in Path("unconditional_samples.json").read_text().splitlines()
    ]
    assert status == 0 and len(rows) == 2 and "Avg s/batch: " in out

    Path("unconditional_samples.json").write_text("kept")
    for name, value in {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(sys, "stdin", io.StringIO("the cat\nstop\n"))
    status, out, _ = script(UNCONDITIONAL.replace("--num-samples 2", "--num-samples 0"))
    assert status == 0 and "\nContext: the cat\n\nMegatron-LM: " in out
    assert Path("unconditional_samples.json").read_text() == "kept"
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(sys, "stdin", io.StringIO("the cat\n"))
    status, out, err = script(UNCONDITIONAL.replace("--num-samples 2", "--num-samples 0"))
    assert (status, out) == (0, "") and "nothing to do" in err


def test_a_terminal_sees_nothing_of_the_loading(program, monkeypatch):
    """A pipe has Megatron's lines."""
    assert "checkpoint version" in program("generate", "--prompt=a", "--max-new-tokens=1")[2]
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert "checkpoint" not in program("generate", "--prompt=a", "--max-new-tokens=1")[2]
