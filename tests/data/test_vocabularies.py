"""SentencePiece, tiktoken and WordPiece: ids of the original, run folders, text as it comes."""

import base64
import io
import json
import random
import shutil
import sys
from types import SimpleNamespace

import pytest
import sentencepiece
import tiktoken
import tiktoken.load
import tiktoken.registry

from helpers import named, refused, train_on_texts
from meshwright.__main__ import main
from meshwright.base.errors import BAD_DATA, UNAVAILABLE, USAGE
from meshwright.checkpoint.huggingface import writer as huggingface_writer
from meshwright.config.schema import TokenizerFlags as Flags
from meshwright.data import tokenizers, vocabularies
from meshwright.data.tokenizers import build_tokenizer, find_saved, save_tokenizer
from meshwright.generation.text import TokenText

TEXT = "It's the year 2024:  don't panic.\n\n  Indented\tλόγος 你好，世界 🙂 naïve </s> x=1;\r\n the theme of the thesis"
PATTERN = r"""(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
WORDS = "[PAD] [UNK] [CLS] [SEP] [MASK] the ##me ##s of un ##want ##ed ' . , ! don t 你 好 naive 2024".split()


def random_texts(count):
    draw = random.Random(1)
    letters = [
        *"the me of's  \n\t12345.,!▁",
        *TEXT,
        "\u3000",
        "\u200b",
        "e\u0301",
        "ﬁ",
        "\x00",
        "\U0010ffff",
        "<s>",
        "한",
    ]
    return ["".join(draw.choices(letters, k=draw.randrange(60))) for _ in range(count)]


def train_sentencepiece(path, kind, **more):
    content = io.BytesIO()
    lines = [TEXT.replace("\n", " "), "the other theme, then", "你好 世界 你们 好的"] * 20
    fixed = dict(
        vocab_size=340, byte_fallback=True, minloglevel=2, num_threads=1, hard_vocab_limit=False
    )
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=content, model_type=kind, **fixed | more
    )
    path.write_bytes(content.getvalue())
    return path


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A folder as Chinese models of Llama's kind ship it: a model and two JSON files."""
    folder = tmp_path_factory.mktemp("llama")
    plain = dict(normalization_rule_name="identity", remove_extra_whitespaces=False)
    train_sentencepiece(folder / "tokenizer.model", "bpe", **plain)
    size = sentencepiece.SentencePieceProcessor(
        model_file=str(folder / "tokenizer.model")
    ).get_piece_size()
    (folder / "added_tokens.json").write_text(json.dumps({"<|im_end|>": size}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"legacy": False}))
    return folder


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiktoken") / "tiny.tiktoken"
    tokens = [bytes([n]) for n in range(256)] + [
        b"th",
        b"the",
        b" the",
        "你".encode()[:2],
        "你".encode(),
    ]
    path.write_bytes(
        b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens))
    )
    special = {"<|endoftext|>": 300, "<|im_end|>": 301}
    path.with_name("encoding.json").write_text(
        json.dumps({"pattern": PATTERN, "special_tokens": special})
    )
    return path


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    path = tmp_path_factory.mktemp("bert") / "vocab.txt"
    path.write_text("\n".join(WORDS) + "\n")
    return path


def stream(tokenizer, ids):
    text = TokenText(tokenizer)
    return "".join([*(text.push(i) for i in ids), text.flush()])


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize(
    "rules",
    [
        {},  # NFKC, one space for many
        dict(
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
        ),
        dict(byte_fallback=False, vocab_size=100),
    ],
)
def test_sentencepiece_has_its_library_s_ids_and_text(tmp_path, kind, rules):
    path = train_sentencepiece(tmp_path / "tokenizer.model", kind, **rules)
    original, ours = sentencepiece.SentencePieceProcessor(model_file=str(path)), named(path)
    assert (ours.size, ours.eod, ours.name) == (
        original.get_piece_size(),
        2,
        "SentencePieceTokenizer",
    )
    for text in [TEXT, "", " ", "\n", *random_texts(200)]:
        ids = ours.encode(text)
        assert ids == original.encode(text) and ours.eod not in ids
        assert ours.decode(ids) == stream(ours, ids) == original.decode(ids)


def test_another_programs_model_is_no_vocabulary(tmp_path):
    (tmp_path / "vectors.model").write_bytes(b"\x80\x04\x95 a pickle of another library")
    assert find_saved(tmp_path) is None
    train_sentencepiece(tmp_path / "words.model", "bpe", byte_fallback=True, vocab_size=400)
    assert find_saved(tmp_path) == tmp_path and build_tokenizer(Flags(), tmp_path).size == 400
    (tmp_path / "words.model").write_text("AA== 0\nAQ== 1\n")
    assert find_saved(tmp_path) == tmp_path


def test_pieces_of_a_llama_folder(llama, tmp_path):
    ours = named(llama)
    assert build_tokenizer(Flags(), find_saved(llama)).encode(TEXT) == ours.encode(TEXT)
    assert (
        ours.size == max(ours.special.values()) + 1 and ours.decode([ours.size - 1]) == "<|im_end|>"
    )
    ids = ours.encode("🙂")
    # bytes, of which none is a character
    assert b"".join(ours.decode_bytes([i]) for i in ids) == "🙂".encode()
    # A continuation keeps its space; a text at the beginning or after another's end has none.
    the = ours.encode("the")
    assert [ours.decode(ids) for ids in (the, [*the, *the], [ours.eod, *the])] == [
        "the",
        "the the",
        "</s>the",
    ]
    text = TokenText(ours, before=the)
    assert text.push(*the) == " the"


def test_special_tokens_of_a_llama_folder_in_a_dialogue(llama, tmp_path):
    ours = named(llama)
    end, the = ours.size - 1, ours.encode("the")
    assert end not in ours.encode("a<|im_end|>")
    assert ours.encode_special("the</s><|im_end|>") == [*the, ours.eod, end]
    after = ours.encode_special("<|im_end|>the")[1:]
    # "legacy": false puts no space there
    assert after != the and ours.decode([*the, *after]) == "thethe"
    (tmp_path / "tokenizer.model").write_bytes((llama / "tokenizer.model").read_bytes())
    assert named(tmp_path).encode_special("</s>the")[1:] == the


def test_tiktoken_by_file_and_by_name(ranks, tmp_path, monkeypatch):
    loaded = tiktoken.load.load_tiktoken_bpe(str(ranks))
    special = {"<|endoftext|>": 300, "<|im_end|>": 301}
    parts = dict(name="tiny_base", pat_str=PATTERN, mergeable_ranks=loaded, special_tokens=special)
    tiktoken.list_encoding_names()
    monkeypatch.setitem(tiktoken.registry.ENCODING_CONSTRUCTORS, "tiny_base", lambda: parts)
    original = tiktoken.get_encoding("tiny_base")
    monkeypatch.chdir(tmp_path)
    for ours in (named(ranks), named(ranks.parent), named("tiny_base")):
        assert (ours.size, ours.eod, ours.name) == (302, 300, "TikTokenizer")
        for text in [TEXT, *random_texts(200)]:
            ids = ours.encode(text)
            assert ids == original.encode_ordinary(text) and ours.decode(ids) == text == stream(
                ours, ids
            )
        assert ours.encode_special("the<|im_end|>") == [257, 301] != ours.encode("the<|im_end|>")
        assert ours.decode([299, 301]) == "<|im_end|>"  # 299 is free
    save_tokenizer(named("tiny_base"), tmp_path / "kept")
    assert tokenizers.is_same(named(ranks), tmp_path / "kept")
    monkeypatch.setattr(vocabularies, "LONG_SPACE", 10)
    assert ours.decode(ours.encode("x" + " " * 35 + "y")) == "x" + " " * 35 + "y"
    del tiktoken.registry.ENCODINGS["tiny_base"]


def test_a_name_of_tiktoken_without_a_network_is_refused_in_a_sentence(monkeypatch):
    """The reason is the innermost one: requests wraps it in a line of 300 characters."""

    def fetch(name):
        try:
            raise OSError("[Errno -3] Temporary failure in name resolution")
        except OSError as error:
            raise OSError(
                f"HTTPSConnectionPool(host='x', port=443): Max retries exceeded ... ({error})"
            ) from None

    monkeypatch.setattr(tiktoken, "get_encoding", fetch)
    words = (
        r"^--tokenizer cl100k_base: .* cannot download it \(\[Errno -3\] Temporary failure in name resolution\); "
        "set TIKTOKEN_CACHE_DIR .*, or give the file cl100k_base.tiktoken"
    )
    refused(UNAVAILABLE, words, lambda: named("cl100k_base"))


def test_the_published_files_need_no_pattern(ranks, tmp_path, monkeypatch):
    bare = tmp_path / "tokenizer.model"  # Llama 3 calls its ranks so
    bare.write_bytes(ranks.read_bytes())
    refused(
        BAD_DATA,
        "no pattern, and is none of the published files; .*encoding.json",
        lambda: named(bare),
    )
    encoding = vocabularies.PUBLISHED[
        "82e9d31979e92ab929cd544440f129d9ecd797b69e327f80f17e1c50d5551b55"
    ]
    assert (
        encoding.special_tokens["<|eot_id|>"] == 128009
        and max(encoding.special_tokens.values()) == 128255
    )
    known = vocabularies.Encoding(PATTERN, {"<|endoftext|>": 261}, "NFC")
    monkeypatch.setitem(
        vocabularies.PUBLISHED, vocabularies.hashlib.sha256(bare.read_bytes()).hexdigest(), known
    )
    assert named(bare).encode("e\u0301") == list("é".encode()) and named(tmp_path).size == 262
    save_tokenizer(named(bare), tmp_path / "kept")
    monkeypatch.undo()
    assert build_tokenizer(Flags(), tmp_path / "kept").encode("e\u0301") == list("é".encode())


# As Megatron writes its patterns.
V1 = r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
V2 = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
MEGATRON_WORDS = "<unk> <s> </s> <mask> <pad> <cls> <sep>".split()


def write_rank_list(path, tokens):
    entries = [
        {
            "rank": n,
            "token_bytes": base64.b64encode(token).decode(),
            "token_str": token.decode(errors="replace"),
        }
        for n, token in enumerate(tokens)
    ]
    path.write_text(json.dumps(entries))
    return str(path)


@pytest.mark.flag("tiktoken_pattern", "tiktoken_num_special_tokens", "tiktoken_special_tokens")
@pytest.mark.parametrize(
    ("name", "given", "words"),
    [
        ("v1", {}, []),
        (
            "v2",
            {"vocab_size": 280, "tiktoken_num_special_tokens": 20},
            [*MEGATRON_WORDS, "<|endoftext|>"],
        ),
    ],
)
def test_megatron_s_list_of_ranks(ranks, tmp_path, name, given, words):
    tokens = list(tiktoken.load.load_tiktoken_bpe(str(ranks)))
    path = write_rank_list(tmp_path / "vocab.json", tokens)
    flags = Flags(
        tokenizer_type="TikTokenizer",
        tokenizer_model=path,
        tiktoken_pattern=name,
        tiktoken_special_tokens=words,
        **given,
    )
    first = given.get("tiktoken_num_special_tokens", 1000)
    kept = tokens[: given.get("vocab_size", first + len(tokens)) - first]
    special = words or MEGATRON_WORDS
    special = [*special, *(f"<SPECIAL_{n}>" for n in range(len(special), first))]
    original = tiktoken.Encoding(
        "megatron",
        pat_str={"v1": V1, "v2": V2}[name],
        mergeable_ranks={token: first + n for n, token in enumerate(kept)},
        special_tokens={word: n for n, word in enumerate(special)},
    )
    ours = build_tokenizer(flags)
    save_tokenizer(ours, tmp_path / "tokenizer")
    for mine in (ours, build_tokenizer(Flags(), tmp_path / "tokenizer")):
        # the eod is </s>, whatever else there is
        assert (mine.size, mine.eod) == (first + len(kept), 2)
        for text in [TEXT, "a<SPECIAL_9></s>", *random_texts(100)]:
            assert (
                mine.encode(text) == original.encode_ordinary(text)
                and mine.decode(mine.encode(text)) == text
            )
            assert mine.encode_special(text) == original.encode(text, allowed_special="all")
    assert tokenizers.is_same(ours, tmp_path / "tokenizer")


def test_a_list_of_ranks_that_megatron_would_not_take(ranks, tmp_path):
    tokens = list(tiktoken.load.load_tiktoken_bpe(str(ranks)))
    path = write_rank_list(tmp_path / "vocab.json", tokens)
    words = r"give --tokenizer-type TikTokenizer --tokenizer-model .*vocab.json --tiktoken-pattern v1 or v2"
    refused(BAD_DATA, words, lambda: named(path))
    for given, words in (
        (
            dict(vocab_size=2000),
            r"--vocab-size 2000, but .* gives 1256 to 1261 ids: 1000 special .* and 261 ranks",
        ),
        (dict(tiktoken_special_tokens=["<s>"]), "lacks <unk> </s>"),
        (dict(tiktoken_num_special_tokens=5), "7 words; each may be given once, and there are 5"),
        (dict(tiktoken_special_tokens=[*MEGATRON_WORDS, "<s>"]), "8 words; each may be given once"),
    ):
        flags = Flags(tokenizer_type="TikTokenizer", tokenizer_model=path, **given)
        refused(USAGE, words, lambda flags=flags: build_tokenizer(flags))
    flags = Flags(tokenizer_type="TikTokenizer", tokenizer_model=path)
    for wrong in (tokens[1:], [*tokens, b"th"], []):
        write_rank_list(tmp_path / "vocab.json", wrong)
        refused(
            BAD_DATA,
            "is not a list of ranks as Megatron's TikTokenizer has it",
            lambda: build_tokenizer(flags),
        )


def test_llama2_s_texts_begin_with_bos(llama, tmp_path):
    """As in Megatron-LM, whose class tokenizes with `bos=True`."""
    path = llama / "tokenizer.model"
    original = sentencepiece.SentencePieceProcessor(model_file=str(path))
    ours = build_tokenizer(Flags(tokenizer_type="Llama2Tokenizer", tokenizer_model=str(path)))
    assert (ours.name, ours.eod) == ("Llama2Tokenizer", original.eos_id())
    for text in [TEXT, "", "\n", *random_texts(100)]:
        ids = ours.encode(text)
        assert ids == [original.bos_id(), *original.encode(text)]
        assert ours.decode(ids) == stream(ours, ids) == original.decode(ids)
    the = ours.encode("the")[1:]
    assert ours.encode_special("<s>the")[:1] == [original.bos_id()]
    assert ours.encode_special("the</s>the")[: len(the) + 2] == [original.bos_id(), *the, ours.eod]
    assert ours.encode_inside("the") == the
    train_sentencepiece(tmp_path / "tokenizer.model", "bpe", bos_id=-1)
    flags = Flags(
        tokenizer_type="Llama2Tokenizer", tokenizer_model=str(tmp_path / "tokenizer.model")
    )
    refused(BAD_DATA, "has no BOS, .*; give SentencePieceTokenizer", lambda: build_tokenizer(flags))


def test_wordpiece(bert, tmp_path):
    ours = named(bert)
    assert (ours.size, ours.eod, ours.name) == (len(WORDS), 3, "BertWordPieceLowerCase")

    def tokens(text):
        return " ".join(WORDS[i] for i in ours.encode(text))

    assert tokens("The\tTHEMES of\u00a0unwanted\x07, 你好! [SEP]") == (
        "the the ##me ##s of un ##want ##ed , 你 好 ! [UNK] [UNK] [UNK]"
    )
    assert tokens("NAÏVE don't 2024x " + "s" * 201) == "naive don ' t [UNK] [UNK]"
    looked_for = ours._split.cache_info().misses
    # too long for that
    assert tokens("s" * 2_000) == "[UNK]" and ours._split.cache_info().misses == looked_for
    ids = ours.encode("The themes, unwanted! 你好 the")
    assert ours.decode(ids) == stream(ours, ids) == "the themes, unwanted!你好the"
    assert ours.encode_special("[CLS] the[SEP]") == [2, 5, 3]
    cased = build_tokenizer(Flags(tokenizer_type="BertWordPieceCase", vocab_file=str(bert)))
    assert [WORDS[i] for i in cased.encode("The the")] == ["[UNK]", "the"]
    (tmp_path / "vocab.txt").write_text("\n".join([*WORDS, "The"]))
    assert named(tmp_path).name == "BertWordPieceCase"  # as it has capitals
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": true}')
    assert named(tmp_path).name == "BertWordPieceLowerCase"


@pytest.mark.parametrize("kind", ["llama", "llama2", "ranks", "bert"])
def test_a_run_folder_keeps_each_with_its_hash(request, tmp_path, kind):
    path, folder = request.getfixturevalue(kind.removesuffix("2")), tmp_path / "tokenizer"
    given = {
        "llama": Flags(
            tokenizer_type="GPTSentencePieceTokenizer",
            tokenizer_model=str(path / "tokenizer.model"),
        ),
        "llama2": Flags(
            tokenizer_type="Llama2Tokenizer", tokenizer_model=str(path / "tokenizer.model")
        ),
        "ranks": Flags(tokenizer_type="TikTokenizer", tokenizer_model=str(path)),
        "bert": Flags(tokenizer_type="BertWordPieceCase", vocab_file=str(path)),
    }
    ours = build_tokenizer(given[kind])
    for _ in range(2):  # a resumed run saves again
        save_tokenizer(ours, folder)
    for kept in (named(tmp_path), build_tokenizer(Flags(), folder)):
        assert (kept.name, kept.size, kept.eod, kept.encode(TEXT)) == (
            ours.name,
            ours.size,
            ours.eod,
            ours.encode(TEXT),
        )
    assert tokenizers.is_same(ours, folder)
    refused(
        USAGE,
        "leave it out",
        lambda: build_tokenizer(Flags(tokenizer_type="ByteTokenizer"), folder),
    )
    changed = folder / next(iter(ours.files))
    changed.write_bytes(changed.read_bytes() + b"\n")
    refused(BAD_DATA, "SHA-256 differs", lambda: build_tokenizer(Flags(), folder))


@pytest.mark.parametrize("kind", ["llama", "ranks"])
def test_from_text_to_a_model_that_continues_it(request, tmp_path, capsys, kind):
    given = str(request.getfixturevalue(kind))
    shape = "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --max-position-embeddings 32"
    length = "--micro-batch-size 2 --global-batch-size 2 --train-iters 1 --lr 1e-3"
    run = train_on_texts(tmp_path, [TEXT] * 8, ["--tokenizer", given], f"{shape} {length}".split())
    capsys.readouterr()
    continuing = "--prompt the --max-new-tokens 4 --device=cpu".split()
    assert main(["generate", "--load", str(run), *continuing]) == 0
    assert capsys.readouterr().out.startswith("the")


EXPORTED = SimpleNamespace(rows=10**6, require_positions=lambda: 64)


@pytest.mark.parametrize("kind", ["llama", "llama2", "bert", "cased"])
def test_an_export_for_transformers_has_the_same_ids(llama, bert, tmp_path, kind):
    transformers = pytest.importorskip("transformers")
    model, words = str(llama / "tokenizer.model"), str(bert)
    flags = {
        "llama": Flags(tokenizer_type="SentencePieceTokenizer", tokenizer_model=model),
        "llama2": Flags(tokenizer_type="Llama2Tokenizer", tokenizer_model=model),
        "bert": Flags(tokenizer_type="BertWordPieceLowerCase", vocab_file=words),
        "cased": Flags(tokenizer_type="BertWordPieceCase", vocab_file=words),
    }
    ours, notes = build_tokenizer(flags[kind]), []
    ids = huggingface_writer.write_tokenizer(tmp_path, EXPORTED, ours, notes)
    theirs, again = transformers.AutoTokenizer.from_pretrained(tmp_path), named(tmp_path)
    assert not notes and again.name == ours.name and len(theirs) == ours.size == again.size
    assert (theirs.eos_token_id, theirs.bos_token_id) == (ours.eod, ids["bos_token_id"])
    special = [word for word in ours.special if kind in ("llama", "llama2")]
    for text in [TEXT, "", *random_texts(100)]:
        if not any(word in text for word in special):
            assert theirs.encode(text) == ours.encode(text) == again.encode(text)


def test_an_export_says_what_transformers_cannot_read(tmp_path):
    """Its file is not where AutoTokenizer would take it for another tokenizer's."""
    ours, notes, out = (
        named(train_sentencepiece(tmp_path / "tokenizer.model", "unigram")),
        [],
        tmp_path / "out",
    )
    out.mkdir()
    huggingface_writer.write_tokenizer(out, EXPORTED, ours, notes)
    assert (
        len(notes) == 1
        and "tokenizer.model in its tokenizer/" in notes[0]
        and notes[0].endswith("are for Meshwright")
    )
    assert [path.name for path in out.iterdir()] == ["tokenizer"] and named(out).encode(
        TEXT
    ) == ours.encode(TEXT)


@pytest.mark.parametrize(
    "pattern", [PATTERN, vocabularies.R50K, vocabularies.CL100K, vocabularies.O200K]
)
def test_an_export_of_tiktoken_s_has_the_same_ids(ranks, tmp_path, pattern):
    transformers = pytest.importorskip("transformers")
    (tmp_path / "from").mkdir()
    shutil.copy(ranks, tmp_path / "from")
    encoding = json.loads(ranks.with_name("encoding.json").read_bytes())
    encoding |= {"normalization": "NFC" if pattern == PATTERN else None, "pattern": pattern}
    (tmp_path / "from/encoding.json").write_text(json.dumps(encoding))
    ours, notes, out = named(tmp_path / "from/tiny.tiktoken"), [], tmp_path / "to"
    out.mkdir()
    huggingface_writer.write_tokenizer(out, EXPORTED, ours, notes)
    theirs, again = transformers.AutoTokenizer.from_pretrained(out), named(out)
    assert not notes and (again.size, again.eod) == (ours.size, ours.eod) == (
        302,
        theirs.eos_token_id,
    )
    for text in [TEXT, "", *random_texts(100)]:
        ids = ours.encode(text)
        assert ids == again.encode(text) == theirs.encode(text, add_special_tokens=False)
        assert ours.decode(ids) == again.decode(ids)
    for digits in ("1" * 8, "the 20241.5"):
        assert theirs.tokenize(digits) and theirs.encode(
            digits, add_special_tokens=False
        ) == ours.encode(digits)


@pytest.mark.parametrize("count", ["{1,3}+", "{2}+", "{1,}+"])
def test_an_export_keeps_a_possessive_count_or_is_refused(ranks, tmp_path, count):
    """`tokenizers` takes it for a repetition; in a group, the + changes what follows."""
    shutil.copy(ranks, tmp_path)
    for pattern, is_equal in (
        (rf"\p{{L}}+|\p{{N}}{count}", True),
        (rf"(?:\p{{N}}{count}|x)\p{{N}}|\p{{L}}+", False),
    ):
        encoding = {"pattern": rf"{pattern}|[\x{{20}}+]|\s", "special_tokens": {"</s>": 300}}
        (tmp_path / "encoding.json").write_text(json.dumps(encoding))
        ours = named(tmp_path / "tiny.tiktoken")
        library = ours.as_library()
        assert (library is not None) == is_equal
        for text in ("the 1234567", "12 + 345 x1") if is_equal else ():
            assert library.encode(text).ids == ours.encode(text)


def test_what_cannot_be_read(llama, ranks, bert, tmp_path, monkeypatch):
    broken = tmp_path / "tokenizer.model"
    broken.write_bytes(b"\n\x0e")
    for name in (tmp_path, broken):
        refused(
            BAD_DATA,
            "tokenizer.model is not a model of SentencePiece",
            lambda name=name: named(name),
        )
    broken.write_text("dGhl 0\nthe one\n")
    refused(
        BAD_DATA, "tokenizer.model:2 is not a token in base64 and its rank", lambda: named(broken)
    )
    broken.unlink()
    (tmp_path / "vocab.txt").write_text("a\nb\n")
    refused(BAD_DATA, r"is not a vocabulary of BERT: it has no \[UNK\]", lambda: named(tmp_path))
    (tmp_path / "vocab.txt").write_text("a\n[UNK]\n")
    refused(BAD_DATA, "none of the usual end-of-document tokens", lambda: named(tmp_path))
    for kind, flag in (
        ("SentencePieceTokenizer", "tokenizer-model"),
        ("BertWordPieceCase", "vocab-file"),
    ):
        refused(
            USAGE, f"needs --{flag}", lambda kind=kind: build_tokenizer(Flags(tokenizer_type=kind))
        )
    copied = tmp_path / "ranks" / "tiny.tiktoken"
    copied.parent.mkdir()
    copied.write_bytes(ranks.read_bytes())
    for content, words in (
        ('{"pattern": "x"}', "it needs a pattern, and special_tokens"),
        ('{"pattern": "(", "special_tokens": {"</s>": 300}}', "tiktoken refuses it"),
        ('{"pattern": "x", "special_tokens": {}, "normalization": "x"}', "normalization 'x'"),
    ):
        copied.with_name("encoding.json").write_text(content)
        refused(BAD_DATA, words, lambda: named(copied))
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    refused(USAGE, r"pip install 'meshwright\[sentencepiece\]'", lambda: named(llama))
