"""Tokenizers: ids, bytes, run folders, padding, and errors."""

import base64
import importlib.util
import json
import os
import shutil
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers

from helpers import named, refused
from meshwright.__main__ import main
from meshwright.base.errors import BAD_DATA, UNAVAILABLE, USAGE, UserError
from meshwright.config.schema import TokenizerFlags as Flags
from meshwright.data import tokenizers
from meshwright.data.tokenizers import build_tokenizer, resolve_tokenizer, save_tokenizer
from meshwright.model import counts

TEXT = "It's the year 2024: don't panic.\n\n  Indented\tλόγος 你好 🙂 naïve  <|endoftext|> x=1;\r\n"
GPT2 = Path(os.environ.get("GPT2_VOCABULARY", Path(__file__).parents[3] / "shared" / "gpt2"))


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bpe")
    tokenizers.train_bpe([TEXT, "the theme of the thesis, the other then " * 20], 300, folder)
    return folder


def flags(folder):
    return Flags(vocab_file=str(folder / "vocab.json"), merge_file=str(folder / "merges.txt"))


def library(folder):
    made = Library(models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt")))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


def tokenizer_json(folder, specials=("<|endoftext|>",)):
    made = library(folder)
    made.add_special_tokens(list(specials))
    made.enable_truncation(5)  # left over from fine-tuning; it must not cut documents
    made.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def changed(folder, **parts):
    """Return a tokenizer.json with other parts, and its model with other settings."""
    path = tokenizer_json(folder)
    content = json.loads(path.read_text())
    content["model"] |= parts.pop("model", {})
    path.write_text(json.dumps(content | parts))
    return path


GROWS = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
LONG_MAP = base64.b64encode(bytes(4) + b"a" * 400).decode()
CRASHES = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}


@pytest.mark.promise(
    "One that encodes a text differently each time, makes it much longer or fails is refused"
)
@pytest.mark.parametrize(
    ("parts", "words"),
    [
        (
            {"model": {"dropout": 0.1}},
            "dropout 0.1 gives a text other tokens each time; set dropout to null",
        ),
        (
            {"normalizer": {"type": "Sequence", "normalizers": [GROWS] * 8}},
            "up to 256 times as long",
        ),
        ({"decoder": {"type": "Sequence", "decoders": [GROWS] * 8}}, "up to 256 times as long"),
        (
            {"normalizer": {"type": "Prepend", "prepend": "a" * 999}},
            "its normalizer makes a text up to 1e",
        ),
        (
            {"normalizer": {"type": "Replace", "pattern": {"Regex": "b*"}, "content": "a" * 200}},
            "up to 201 times",
        ),
        (
            {"normalizer": {"type": "Precompiled", "precompiled_charsmap": LONG_MAP}},
            "times as long",
        ),
        (
            {"normalizer": {"type": "Precompiled", "precompiled_charsmap": ""}},
            "not a tokenizer.json: Precompiled",
        ),
        ({"model": {"continuing_subword_prefix": "ééé"}}, "is not a tokenizer.json: range end"),
        ({"normalizer": {"type": "Sequence"}}, "is not a tokenizer.json"),
    ],
)
def test_a_hostile_tokenizer_json_is_refused(bpe, tmp_path, capfd, parts, words):
    shutil.copytree(bpe, tmp_path / "t")
    refused(BAD_DATA, words, lambda: tokenizers.HuggingFace(changed(tmp_path / "t", **parts)))
    assert capfd.readouterr().err == ""


@pytest.mark.promise(
    "One that encodes a text differently each time, makes it much longer or fails is refused"
)
def test_a_tokenizer_that_panics_is_explained(bpe, tmp_path):
    """A panic is a BaseException, which no `except Exception` would catch."""
    shutil.copytree(bpe, tmp_path / "t")
    t = tokenizers.HuggingFace(changed(tmp_path / "t", pre_tokenizer=CRASHES))
    for act in (t.encode, t.encode_special):
        refused(BAD_DATA, "the tokenizer fails: .*retry-limit", lambda act=act: act("a" * 40 + "b"))
    strip = {"type": "Strip", "content": "t", "start": 99, "stop": 99}
    t = tokenizers.HuggingFace(changed(tmp_path / "t", decoder=strip))
    refused(BAD_DATA, "the tokenizer fails: ", lambda: t.decode(t.encode("t")))


@pytest.mark.parametrize("target", ["/dev/zero", "a pipe", "a hole"])
def test_tokenizer_files_are_regular_and_bounded(tmp_path, target):
    path = tmp_path / "tokenizer.json"
    if target == "a pipe":
        os.mkfifo(path)
    elif target == "a hole":
        path.touch()
        os.truncate(path, 30 << 30)
    else:
        path.symlink_to(target)
    words = "more than 134,217,728 bytes" if target == "a hole" else "not a regular file"
    refused(BAD_DATA, f"cannot be read: {words}", lambda: tokenizers.HuggingFace(path))


def test_missing_speed_is_named_where_it_would_help(bpe, monkeypatch):
    t = build_tokenizer(flags(bpe))
    assert (tokenizers.missing_speed(t) is None) == (
        importlib.util.find_spec("gigatoken") is not None
    )
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    assert (
        "`pip install 'gigatoken==0.10.*'` makes this about eight times as fast"
        in tokenizers.missing_speed(t)
    )
    assert tokenizers.missing_speed(build_tokenizer(Flags(tokenizer_type="ByteTokenizer"))) is None


@pytest.mark.flag("vocab_file merge_file")
def test_trained_bpe_equals_the_library_and_ends_with_eod(bpe):
    t = build_tokenizer(flags(bpe))
    assert (t.size, t.eod, t.name) == (300, 299, "GPT2BPETokenizer")
    assert t.tiktoken is not None  # tiktoken, not the fallback
    for text in (TEXT, "", " ", "thethe\x00\ufffd", "a" * 3000, "\u2028 \u00a0 \x85"):
        ids = t.encode(text)
        assert ids == library(bpe).encode(text).ids
        assert t.decode(ids) == text
    assert len(t.encode("the theme")) < len("the theme")
    assert t.eod not in t.encode(TEXT)
    assert t.decode([t.eod]) == "<|endoftext|>"


def test_half_a_character_decodes_to_bytes_and_a_replacement_mark(bpe):
    t = build_tokenizer(flags(bpe))
    one = t.encode("\u0416")[:1]  # first of two bytes: never merged in this vocabulary
    assert t.decode_bytes(one) == b"\xd0"
    assert t.decode(one) == "\ufffd"


def test_without_tiktoken_or_with_unordered_ids_the_library_encodes(bpe, tmp_path, monkeypatch):
    expected = build_tokenizer(flags(bpe)).encode(TEXT)
    vocab = json.loads((bpe / "vocab.json").read_text())
    shifted = {token: (i + 1) % 300 for token, i in vocab.items()}  # <|endoftext|> first
    turned = {token: 299 - i for token, i in vocab.items()}  # merges in falling order
    for changed, fast in ((shifted, True), (turned, False)):
        (tmp_path / "vocab.json").write_text(json.dumps(changed))
        (tmp_path / "merges.txt").write_bytes((bpe / "merges.txt").read_bytes())
        t = build_tokenizer(flags(tmp_path))
        assert (t.tiktoken is not None) == fast
        assert t.encode(TEXT) == library(tmp_path).encode(TEXT).ids
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    without = build_tokenizer(flags(bpe))
    assert without.tiktoken is None
    assert without.encode(TEXT) == expected


def test_white_space_that_overflows_tiktokens_stack(bpe):
    t = build_tokenizer(flags(bpe))
    text = "x" + " " * 1_100_000 + "y"
    assert t.decode(t.encode(text)) == text


@pytest.mark.skipif(
    not (GPT2 / "gpt2-vocab.json").exists(), reason="needs GPT-2's two files, see GPT2_VOCABULARY"
)
def test_gpt2_ids():
    t = build_tokenizer(
        Flags(vocab_file=str(GPT2 / "gpt2-vocab.json"), merge_file=str(GPT2 / "gpt2-merges.txt"))
    )
    assert t.tiktoken is not None
    assert (t.size, t.eod) == (50257, 50256)
    assert t.encode("Hello world") == [15496, 995]
    assert t.encode("<|endoftext|>") == [27, 91, 437, 1659, 5239, 91, 29]
    assert t.decode(t.encode(TEXT)) == TEXT
    assert t.encode(TEXT * 50) == t._library.encode(TEXT * 50).ids


@pytest.mark.flag("tokenizer_model")
@pytest.mark.parametrize("name", ["HuggingFaceTokenizer", "PretrainedFromHF", "HFTokenizer"])
def test_tokenizer_json_of_a_file_or_folder(bpe, name):
    path = tokenizer_json(bpe)
    reference = build_tokenizer(flags(bpe))
    for given in (path, bpe):
        t = build_tokenizer(Flags(tokenizer_type=name, tokenizer_model=str(given)))
        assert (t.size, t.eod) == (300, 299)
        ids = t.encode(TEXT)
        # complete, and <|endoftext|> in a text stays plain text
        assert ids == reference.encode(TEXT)
        assert t.decode(ids) == TEXT
        assert t.decode_bytes(t.encode("\u0416")[:1]) == b"\xd0"


def test_tokenizer_json_without_byte_level(tmp_path):
    made = Library(models.WordLevel({"hello": 0, "world": 1, "</s>": 2, "?": 3}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    t = build_tokenizer(Flags(tokenizer_type="HFTokenizer", tokenizer_model=str(tmp_path)))
    assert (t.size, t.eod, t.encode("hello world")) == (4, 2, [0, 1])
    assert t.decode_bytes([0, 1]) == b"hello world"


@pytest.mark.flag("tokenizer_type")
def test_bytes_and_null():
    b = build_tokenizer(Flags(tokenizer_type="ByteTokenizer"))
    assert (b.size, b.eod, b.encode("aé")) == (257, 256, [97, 195, 169])
    assert b.decode([*b.encode(TEXT), 256]) == TEXT
    assert b.decode([195]) == "\ufffd"
    n = build_tokenizer(Flags(tokenizer_type="NullTokenizer", vocab_size=10))
    assert (n.size, n.eod, n.encode(" 3 10\n7 ")) == (11, 10, [3, 10, 7])
    assert n.decode([3, 10]) == "3 10"
    refused(BAD_DATA, "invalid literal", lambda: n.encode("3 x"))
    refused(BAD_DATA, "id 11 is not in 0 ... 10", lambda: n.encode("11"))


def test_merges_need_no_line_of_a_version(bpe, tmp_path):
    version, *lines = (bpe / "merges.txt").read_text().splitlines(keepends=True)
    assert version.startswith("#version") and len(lines) > 1
    (tmp_path / "vocab.json").write_bytes((bpe / "vocab.json").read_bytes())
    (tmp_path / "merges.txt").write_text("".join(lines))
    first = lines[0].replace(" ", "").strip().replace("Ġ", " ")  # what the first merge makes
    assert len(build_tokenizer(flags(bpe)).encode(first)) == 1
    assert build_tokenizer(flags(tmp_path)).encode(first) == build_tokenizer(flags(bpe)).encode(
        first
    )


@pytest.mark.promise("A damaged one is refused")
def test_a_changed_file_in_a_run_folder_is_refused(bpe, tmp_path):
    save_tokenizer(build_tokenizer(flags(bpe)), tmp_path)
    contradiction = Flags(tokenizer_type="ByteTokenizer")
    refused(USAGE, "holds a GPT2BPETokenizer", lambda: build_tokenizer(contradiction, tmp_path))
    merges = tmp_path / "merges.txt"
    merges.write_text(merges.read_text().replace("\n", "\r\n"))
    refused(BAD_DATA, "SHA-256 differs", lambda: build_tokenizer(Flags(), tmp_path))
    merges.unlink()
    refused(BAD_DATA, "cannot be read", lambda: build_tokenizer(Flags(), tmp_path))
    (tmp_path / "meta.json").write_text(
        '{"type": "GPT2BPETokenizer", "vocab_size": 3, "sha256": {"../x": "0"}}'
    )
    refused(BAD_DATA, "names '../x'", lambda: build_tokenizer(Flags(), tmp_path))
    (tmp_path / "meta.json").write_text("{}")
    refused(BAD_DATA, "damaged", lambda: build_tokenizer(Flags(), tmp_path))


def test_resolve_finds_what_flags_or_folders_name(bpe, tmp_path):
    assert resolve_tokenizer(Flags()) is None and tokenizers.find_saved(None, tmp_path) is None
    assert resolve_tokenizer(Flags(tokenizer_type="ByteTokenizer")).size == 257
    refused(
        USAGE,
        "needs --tokenizer-model",
        lambda: resolve_tokenizer(Flags(tokenizer_type="HFTokenizer")),
    )
    save_tokenizer(build_tokenizer(Flags(tokenizer_type="ByteTokenizer")), tmp_path / "tokenizer")
    assert (
        tokenizers.find_saved(None, tmp_path, bpe) == tmp_path / "tokenizer"
        and tokenizers.find_saved(bpe) == bpe
    )
    assert resolve_tokenizer(Flags(), tmp_path / "tokenizer").size == 257
    assert resolve_tokenizer(flags(bpe), tmp_path / "tokenizer").size == 300  # flags come first
    refused(
        BAD_DATA,
        "vocabulary files differ",
        lambda: tokenizers.require_same(build_tokenizer(flags(bpe)), tmp_path / "tokenizer"),
    )


@pytest.mark.promise("Vocabularies are data", "A damaged one is refused")
def test_missing_flags_and_broken_files(bpe, tmp_path):
    ways = "a tokenizer is needed: --tokenizer with a folder that `meshwright train-tokenizer` .* gpt2, or byte"
    refused(USAGE, ways, lambda: build_tokenizer(Flags(), tmp_path))
    refused(
        USAGE,
        "needs --merge-file too; or give --tokenizer",
        lambda: build_tokenizer(Flags(vocab_file="x")),
    )
    swapped = Flags(vocab_file=str(bpe / "merges.txt"), merge_file=str(bpe / "vocab.json"))
    refused(
        BAD_DATA,
        "--vocab-file .*merges.txt and --merge-file .*vocab.json are swapped",
        lambda: build_tokenizer(swapped),
    )
    refused(
        USAGE, "--tokenizer-model", lambda: build_tokenizer(Flags(tokenizer_type="HFTokenizer"))
    )
    refused(USAGE, "--vocab-size", lambda: build_tokenizer(Flags(tokenizer_type="NullTokenizer")))
    vocab, merges = tmp_path / "vocab.json", tmp_path / "merges.txt"
    good = json.loads((bpe / "vocab.json").read_text())
    merges.write_bytes((bpe / "merges.txt").read_bytes())
    refused(BAD_DATA, "cannot be read: No such file", lambda: build_tokenizer(flags(tmp_path)))
    for content, words in (
        ("{", "not JSON"),
        ("[1]", "not a vocabulary"),
        (json.dumps({**good, "more": 7}), "ids are not 0"),
        (json.dumps({t: i for t, i in good.items() if i < 299}), "has no <|endoftext|>"),
        (json.dumps({"a": 0, "<|endoftext|>": 1}), "255 of the 256 bytes"),
        (json.dumps({t + "x" * (i == 280): i for t, i in good.items()}), "do not belong together"),
    ):
        vocab.write_text(content)
        refused(BAD_DATA, words, lambda: build_tokenizer(flags(tmp_path)))
    vocab.write_text(json.dumps(good))
    merges.write_text("#version: 0.2\na b c\n")
    refused(BAD_DATA, r"merges.txt:2: 'a b c'", lambda: build_tokenizer(flags(tmp_path)))
    path = tokenizer_json(bpe)
    content = path.read_text().replace("<|endoftext|>", "<|other|>")
    path.write_text(content)
    hugging = Flags(tokenizer_type="HFTokenizer", tokenizer_model=str(path))
    refused(BAD_DATA, "none of the usual end-of-document", lambda: build_tokenizer(hugging))
    for token in ("<|other|>", {"content": "<|other|>"}):
        path.with_name("tokenizer_config.json").write_text(json.dumps({"eos_token": token}))
        assert build_tokenizer(hugging).decode([build_tokenizer(hugging).eod]) == "<|other|>"
    path.write_text(Library(models.BPE()).to_str())  # an empty vocabulary
    refused(BAD_DATA, "none of the usual end-of-document", lambda: build_tokenizer(hugging))
    path.write_text("{}")
    refused(BAD_DATA, "is not a tokenizer.json", lambda: build_tokenizer(hugging))


def test_the_home_of_a_user_who_does_not_exist():
    with pytest.raises(UserError, match="~no-such-user/vocab.json"):
        named("~no-such-user/vocab.json")


@pytest.mark.flag("tokenizer")
def test_one_argument_names_any_folder_or_file(bpe, tmp_path, monkeypatch):
    expected = build_tokenizer(flags(bpe)).encode(TEXT)
    plain = [tmp_path / name for name in ("trained", "megatron", "json", "run/tokenizer")]
    for folder in plain:
        folder.mkdir(parents=True)
    for name in ("vocab.json", "merges.txt"):
        content = (bpe / name).read_bytes()
        (tmp_path / "trained" / name).write_bytes(content)
        (tmp_path / "megatron" / f"gpt2-{name}").write_bytes(content)
    save_tokenizer(build_tokenizer(flags(bpe)), tmp_path / "run" / "tokenizer")
    (tmp_path / "json" / "tokenizer.json").write_bytes(tokenizer_json(bpe).read_bytes())
    files = [
        "trained/vocab.json",
        "trained/merges.txt",
        "megatron/gpt2-vocab.json",
        "megatron/gpt2-merges.txt",
    ]
    for name in ["trained", "megatron", "run", "run/tokenizer", *files]:
        t = named(tmp_path / name)
        assert (t.name, t.size, t.encode(TEXT)) == ("GPT2BPETokenizer", 300, expected)
    for name in ("json", "json/tokenizer.json"):
        t = named(tmp_path / name)
        assert (t.name, t.encode(TEXT)) == ("HuggingFaceTokenizer", expected)
    monkeypatch.chdir(tmp_path)
    assert named("trained").size == 300 and named("byte").size == 257
    save_tokenizer(named("byte"), tmp_path / "bytes" / "tokenizer")
    assert named("bytes").name == named("bytes/tokenizer").name == "ByteTokenizer"
    # flags come first
    assert resolve_tokenizer(Flags(tokenizer="byte"), tmp_path / "run" / "tokenizer").size == 257


def test_token_files_name_the_tokenizer_that_is_kept_beside_them(
    bpe, tmp_path, monkeypatch, capsys
):
    """Each prefix is accepted, that of the pair and that of the command; the Hub is not asked."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tokenizers, "_find_on_hub", lambda name: pytest.fail("asked the Hub"))
    for name in ("my.out_text_document", "my.out_title_sentence"):
        tokenizers.keep_beside(build_tokenizer(flags(bpe)), name)
        Path(f"{name}.bin").write_bytes(b"\0")
        Path(f"{name}.idx").write_bytes(b"\0")
    for name in ("my.out_text_document", "./my.out_title_sentence", "my.out_text_document.bin"):
        assert named(name).size == named("my.out_text_document.tokenizer").size == 300
    capsys.readouterr()
    assert named(tmp_path / "my.out").size == 300
    kept = tmp_path / "my.out_text_document.tokenizer"
    assert (
        capsys.readouterr().err
        == f"--tokenizer {tmp_path / 'my.out'}: the one in {kept}, which preprocess kept\n"
    )
    tokenizers.keep_beside(named("byte"), "my.out_title_sentence")
    refused(
        BAD_DATA,
        "were made with different tokenizers, my.out_text_document.tokenizer",
        lambda: named("my.out"),
    )


def test_one_argument_that_cannot_be_used(bpe, tmp_path):
    refused(
        BAD_DATA, "nope.json does not exist; name a folder", lambda: named(tmp_path / "nope.json")
    )
    refused(BAD_DATA, "holds no tokenizer.json, nor vocab.json", lambda: named(tmp_path))
    (tmp_path / "vocab.json").write_bytes((bpe / "vocab.json").read_bytes())
    refused(BAD_DATA, "no merges.txt is beside it", lambda: named(tmp_path / "vocab.json"))
    (tmp_path / "vocab.json").rename(tmp_path / "my.json")
    (tmp_path / "my.txt").touch()
    refused(
        BAD_DATA,
        "give its merges too: --vocab-file .*my.json --merge-file FILE",
        lambda: named(tmp_path / "my.json"),
    )


@pytest.fixture
def hub_server(bpe, tmp_path, monkeypatch):
    """A Hub on this machine with the repositories team/bpe and team/empty; yields requests."""
    from huggingface_hub import constants

    tokenizer_json(bpe)
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self):
            name, _, file = self.path.strip("/").partition("/resolve/main/")
            asked.append(f"{self.command} {self.path}")
            is_there = name == "team/bpe" and (bpe / file).is_file()
            content = (bpe / file).read_bytes() if is_there else b""
            self.send_response(200 if is_there else 404)
            code = "EntryNotFound" if name in ("team/bpe", "team/empty") else "RepoNotFound"
            headers = (
                {"ETag": f'"{file}"', "X-Repo-Commit": "a" * 40}
                if is_there
                else {"X-Error-Code": code}
            )
            for key, value in (headers | {"Content-Length": str(len(content))}).items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        do_GET = do_HEAD

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    template = constants.ENDPOINT + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield asked
    server.shutdown()
    server.server_close()


@pytest.mark.promise("A tokenizer named like a repository is downloaded from the Hugging Face Hub")
def test_a_name_is_downloaded_once_from_the_hub(bpe, hub_server, tmp_path, capsys):
    t = named("team/bpe")
    assert (t.name, t.encode(TEXT)) == (
        "GPT2BPETokenizer",
        build_tokenizer(flags(bpe)).encode(TEXT),
    )
    printed = capsys.readouterr().err.splitlines()
    assert len(printed) == 1 and "team/bpe" in printed[0] and str(tmp_path / "cache") in printed[0]
    asked = len(hub_server)
    assert asked and named("team/bpe").size == 300
    assert len(hub_server) == asked and not capsys.readouterr().err
    refused(
        BAD_DATA,
        "no such folder or file here, and .* has no such name",
        lambda: named("team/other"),
    )
    refused(
        BAD_DATA,
        "team/empty on the Hugging Face Hub has no tokenizer.json",
        lambda: named("team/empty"),
    )


def test_a_name_without_a_network(hub_server, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    words = "team/bpe: no such folder or file here, and .* is not reachable .*train-tokenizer.*, or byte"
    refused(UNAVAILABLE, words, lambda: named("team/bpe"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "https://hub.invalid")
    refused(UNAVAILABLE, "hub.invalid is not reachable", lambda: named("team/bpe"))
    assert not hub_server


def test_a_folder_with_a_near_name_is_suggested_before_the_hub_is_asked(
    hub_server, tmp_path, monkeypatch, capsys
):
    (tmp_path / "vocabulary").mkdir()
    monkeypatch.chdir(tmp_path)
    refused(
        BAD_DATA,
        "vocab: no such folder or file here; did you mean vocabulary. and .* no such",
        lambda: named("vocab"),
    )
    assert capsys.readouterr().err.startswith(
        "vocab: no such folder or file here; did you mean vocabulary? asking http"
    )


def test_padded_size():
    sizes = [counts.padded_size(50257, 128, tp, None) for tp in (1, 2, 4, 8)]
    assert sizes == [50304, 50432, 50688, 51200]
    assert counts.padded_size(50304, 128, 1, None) == 50304
    assert counts.padded_size(50257, 128, 2, 51200) == 51200
    refused(
        USAGE,
        "50176 is below the tokenizer's 50257",
        lambda: counts.padded_size(50257, 128, 1, 50176),
    )
    refused(
        USAGE,
        "50304 is not a multiple of 256 .* the next one is 50432",
        lambda: counts.padded_size(9, 128, 2, 50304),
    )
    line = " > padded vocab (size: 50257) with 47 dummy tokens (new size: 50304)"
    assert tokenizers.padding_line(50257, 50304) == line


def test_training_a_vocabulary_below_the_bytes_is_refused(tmp_path, capsys):
    words = f"train-tokenizer --input text --output {tmp_path}/never --vocab-size".split()
    assert main([*words, "256"]) == USAGE and "at least 257" in capsys.readouterr().err
    assert not (tmp_path / "never").exists()
    tokenizers.train_bpe(["x"], 400, tmp_path)  # nothing to merge: smaller than requested
    assert build_tokenizer(flags(tmp_path)).size == 257
