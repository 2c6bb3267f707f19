"""The tokenizer that flags or a folder name; those of GPT-2's two files and of a tokenizer.json.

tiktoken encodes with GPT-2's two files; it is several times faster than the `tokenizers` library
and gives the same ids as long as every merge has an id of its own, in merge order. No tokenizer
here looks for special tokens inside a text: the letters of <|endoftext|> there are plain text.

`--tokenizer` names one in a word: a folder, a file, or a name on the Hugging Face Hub. A run keeps
its tokenizer: `save_tokenizer` copies the files into the run's `tokenizer/` folder with their
hashes, and `resolve_tokenizer` reads that folder when the flags name no files.
"""

from __future__ import annotations

import base64
import functools
import glob
import hashlib
import importlib.util
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from meshwright.base import files, hub
from meshwright.base.console import no_stderr, notice
from meshwright.base.errors import BAD_DATA, UserError, bad_data
from meshwright.base.hints import near_path
from meshwright.config.fields import spelling
from meshwright.config.grammar import prefix_of
from meshwright.config.problem import SettingsError
from meshwright.config.schema import TokenizerFlags
from meshwright.data import vocabularies
from meshwright.data.vocabularies import (
    CHAT_CONFIG,
    END_OF_TEXT,
    MODEL,
    WORDS,
    Llama2,
    SentencePiece,
    TikToken,
    WordPiece,
)
from meshwright.data.vocabularies import Tokenizer as Tokenizer

GPT2_FILES = ("vocab.json", "merges.txt")
DEFAULT_TYPE = TokenizerFlags().tokenizer_type
CHAT_TEMPLATE = "chat_template.jinja"  # where Hugging Face keeps a chat template
MOST_GROWTH = 128  # by the steps of a tokenizer.json; T5's come to 99
WAYS = "with a folder that `meshwright train-tokenizer` made, a Hugging Face folder or name such as gpt2, or byte"
CONVERT = (
    "where transformers is installed, AutoTokenizer.from_pretrained(ITS_FOLDER_OR_NAME).save_pretrained(DIR) writes a "
    "tokenizer.json: give --tokenizer DIR"
)
OWN_NAMES = {  # of the types, by Megatron's other names for them
    "PretrainedFromHF": "HuggingFaceTokenizer",
    "HFTokenizer": "HuggingFaceTokenizer",
    "GPTSentencePieceTokenizer": SentencePiece.name,
}
# ends the name of the folder beside token files that keeps their tokenizer
KEPT_BESIDE = ".tokenizer"


class GPT2BPE(Tokenizer):
    """GPT-2's byte-level BPE from vocab.json and merges.txt."""

    name = "GPT2BPETokenizer"

    def __init__(self, vocab_file: Path, merge_file: Path) -> None:
        self.files = {"vocab.json": vocab_file, "merges.txt": merge_file}
        is_json = vocabularies.read_text(vocab_file).startswith("{")
        if not is_json and vocabularies.read_text(merge_file).startswith("{"):
            raise SettingsError(
                f"{{vocab_file={vocab_file}}} and {{merge_file={merge_file}}} are swapped; "
                "the vocabulary is the JSON file",
                BAD_DATA,
            )
        vocab = _read_vocab(vocab_file)
        merges = _read_merges(merge_file)
        self.size = len(vocab)
        self.eod = vocab.get(END_OF_TEXT, -1)
        if self.eod < 0:
            raise bad_data(f"{vocab_file} has no {END_OF_TEXT}; it is not a GPT-2 vocabulary")
        self.special = {END_OF_TEXT: self.eod}

        # The two files belong together, and have each byte.
        symbols = vocabularies.byte_symbols()
        if missing := len(symbols.keys() - vocab.keys()):
            raise bad_data(
                f"{vocab_file} is not a byte-level BPE: {missing} of the 256 bytes are missing"
            )
        if not merges and self.size > 257:
            raise bad_data(
                f"{merge_file} has no merges, {vocab_file} has {self.size} tokens; they do not belong together"
            )
        for left, right in merges:
            if left + right not in vocab:
                problem = f"{merge_file} merges {left!r} and {right!r}, but {left + right!r} is not in {vocab_file}"
                raise bad_data(f"{problem}; the two files do not belong together")
        self._vocab = vocab
        self._merges = merges
        self._bytes = _token_bytes(vocab, symbols)

    # The encoders are built on first use: training needs only the sizes.

    @functools.cached_property
    def tiktoken(self) -> Callable[[str], list[int]] | None:
        """tiktoken's encoder; None where it is not installed or would give other ids."""
        try:
            import tiktoken
        except ImportError:
            return None
        if not self._ranked_ids:
            return None
        encoding = tiktoken.Encoding(
            self.name,
            pat_str=vocabularies.R50K,
            mergeable_ranks={self._bytes[i]: i for i in self._ranked_ids},
            special_tokens={END_OF_TEXT: self.eod},
        )
        return encoding.encode_ordinary

    @functools.cached_property
    def gigatoken(self) -> Callable[[str], npt.NDArray[Any]] | None:
        """gigatoken's encoder, without special tokens; it is faster than tiktoken's."""
        try:
            from gigatoken.gigatoken_rs import BPETokenizer
        except ImportError:
            return None
        if not self._ranked_ids:
            return None
        # It reads ranks from a file alone.
        with tempfile.NamedTemporaryFile(suffix=".tiktoken") as file:
            for i in sorted(self._ranked_ids):
                file.write(vocabularies.rank_line(self._bytes[i], i))
            file.flush()
            return BPETokenizer.from_tiktoken(file.name, "gpt2", {}).encode

    @functools.cached_property
    def _ranked_ids(self) -> list[int]:
        """All ids except the end of document; none unless they are merge ranks, in order."""
        merged = [self._vocab[left + right] for left, right in self._merges]
        if merged != sorted(set(merged)):
            return []
        of_bytes = [self._vocab[symbol] for symbol in vocabularies.byte_symbols()]
        return of_bytes + merged

    def _make_library(self) -> Any:
        from tokenizers import Tokenizer as Library
        from tokenizers import decoders, models, pre_tokenizers

        library = Library(models.BPE(vocab=self._vocab, merges=self._merges))
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        library.decoder = decoders.ByteLevel()
        return library

    _library = functools.cached_property(_make_library)

    def as_library(self) -> Any:
        return self.add_special(self._make_library())

    def encode(self, text: str) -> list[int]:
        if self.tiktoken is None or vocabularies.has_long_space(text):
            return list(self._library.encode(text).ids)
        return self.tiktoken(text)


class HuggingFace(Tokenizer):
    """Any tokenizer.json, read by the `tokenizers` library."""

    name = "HuggingFaceTokenizer"

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer as Library

        path = path / "tokenizer.json" if path.is_dir() else path
        self.files = {"tokenizer.json": path}

        # The library's tokenizer, of the plain text alone and in full length.
        settings = vocabularies.read_json(path)
        try:
            decoder = (settings.get("decoder") or {}).get("type")
            require_steady(path, settings)
            # A panic writes lines of its own.
            with no_stderr(), vocabularies.explain_failures(f"{path} is not a tokenizer.json"):
                self._library = Library.from_str(vocabularies.read_text(path))
        except UserError:
            raise
        except Exception as error:
            raise bad_data(f"{path} is not a tokenizer.json: {error}") from None
        self._path = path
        # Special tokens inside a text are plain text.
        self._library.encode_special_tokens = True
        self._library.no_truncation()
        self._library.no_padding()

        # Its vocabulary.
        vocab = self._library.get_vocab()
        self.size = max(vocab.values(), default=-1) + 1
        vocabularies.require_dense(path, len(vocab), self.size)
        self.eod = vocabularies.find_end(path, vocab)
        added = self._library.get_added_tokens_decoder()
        self.special = {token.content: i for i, token in added.items() if token.special}
        # Only a byte-level vocabulary gives the bytes of a token that is half a character.
        self._bytes = (
            _token_bytes(vocab, vocabularies.byte_symbols()) if decoder == "ByteLevel" else []
        )

    def encode(self, text: str) -> list[int]:
        with vocabularies.explain_failures(f"{self._path}: the tokenizer fails"):
            return list(self._library.encode(text, add_special_tokens=False).ids)

    def encode_special(self, text: str) -> list[int]:
        if vocabularies.SHIELD in text:
            return super().encode_special(text)
        with vocabularies.explain_failures(f"{self._path}: the tokenizer fails"):
            return list(self._with_special.encode(text, add_special_tokens=False).ids)

    def as_library(self) -> Any:
        return type(self._library).from_str(vocabularies.read_text(self._path))

    @functools.cached_property
    def _with_special(self) -> Any:
        """The library's tokenizer that takes special tokens inside a text for themselves."""
        return type(self._library).from_str(self._library.to_str())

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        if self._bytes:
            return super().decode_bytes(ids)
        with vocabularies.explain_failures(f"{self._path}: the tokenizer fails"):
            return self._library.decode(list(ids), skip_special_tokens=False).encode("utf-8")


class Bytes(Tokenizer):
    """The 256 bytes, and an end of document that decodes to nothing."""

    name = "ByteTokenizer"
    size = 257
    eod = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        return bytes(i for i in ids if i != self.eod)


class Null(Tokenizer):
    """Text that consists of ids, integers separated by white space."""

    name = "NullTokenizer"

    def __init__(self, vocab_size: int) -> None:
        self.size = vocab_size + 1
        self.eod = vocab_size

    def encode(self, text: str) -> list[int]:
        # The error names the first word that is not an integer, or the first id that is too large.
        try:
            ids = [int(word) for word in text.split()]
        except ValueError as error:
            raise bad_data(
                f"NullTokenizer reads integers separated by white space: {error}"
            ) from None
        if wrong := [i for i in ids if not 0 <= i < self.size]:
            raise SettingsError(
                f"NullTokenizer: id {wrong[0]} is not in 0 ... {self.size - 1} ({{vocab_size}})",
                BAD_DATA,
            )
        return ids

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        return " ".join(map(str, ids)).encode()


class FileKind(NamedTuple):
    """A type whose tokenizer one file holds: the flag for it, what it is, its name in a run."""

    flag: str
    what: str
    kept: str
    load: Callable[[Path], Tokenizer]


_JSON = "a tokenizer.json, or the folder holding it"
_PIECES = "a model of SentencePiece, such as tokenizer.model"
_RANKS = "a file of ranks as tiktoken writes them, or Megatron's list of them (.json)"
_WORDS = "a vocab.txt, which has a token a line"
FILE_KINDS = {
    HuggingFace.name: FileKind("tokenizer_model", _JSON, "tokenizer.json", HuggingFace),
    SentencePiece.name: FileKind("tokenizer_model", _PIECES, MODEL, SentencePiece),
    Llama2.name: FileKind("tokenizer_model", _PIECES, MODEL, Llama2),
    TikToken.name: FileKind("tokenizer_model", _RANKS, vocabularies.RANKS, vocabularies.load_ranks),
    "BertWordPieceLowerCase": FileKind(
        "vocab_file", _WORDS, WORDS, lambda path: WordPiece(path, lower_case=True)
    ),
    "BertWordPieceCase": FileKind(
        "vocab_file", _WORDS, WORDS, lambda path: WordPiece(path, lower_case=False)
    ),
}
FILES = (
    *GPT2_FILES,
    *(k.kept for k in FILE_KINDS.values()),
    vocabularies.ADDED_TOKENS,
    vocabularies.ENCODING,
)


def fastest_encoder(tokenizer: Tokenizer) -> Callable[[str], Sequence[int] | npt.NDArray[Any]]:
    """Return the fastest encoder: with gigatoken if it is installed; most return arrays."""
    if isinstance(tokenizer, Bytes):
        return lambda text: np.frombuffer(text.encode("utf-8"), np.uint8)
    if isinstance(tokenizer, GPT2BPE) and tokenizer.gigatoken:
        return tokenizer.gigatoken
    return tokenizer.encode


def require_steady(path: Path, settings: Mapping[str, Any]) -> None:
    """Refuse a tokenizer.json that encodes a text differently each time, or lets it grow."""
    model = settings.get("model")
    if isinstance(model, dict) and model.get("dropout"):
        raise bad_data(
            f"{path}: BPE with dropout {model['dropout']} gives a text other tokens each time; set dropout to null"
        )
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        if (growth := _growth(settings.get(part))) > MOST_GROWTH:
            raise bad_data(
                f"{path}: its {part} makes a text up to {growth:.3g} times as long; name another tokenizer"
            )


def _growth(step: Any) -> float:
    """Return how many times as long a step of a tokenizer.json may make a text."""
    if not isinstance(step, dict):
        return 1
    kind = step.get("type")
    content = str(step.get("content", "")).encode()
    # The growths of successive steps multiply.
    if kind == "Sequence":
        parts: list[Any] = next(
            step[name] for name in ("normalizers", "pretokenizers", "decoders") if name in step
        )
        return math.prod(map(_growth, parts))
    if kind == "Replace":
        pattern = step["pattern"]
        literal = str(pattern.get("String", "")).encode()
        # An empty match adds the content between letters, which stay.
        is_empty = re.fullmatch(pattern.get("Regex", ""), "") is not None and not literal
        return max(1, is_empty + len(content) / max(1, len(literal)))
    if kind == "Prepend":
        return 1 + len(str(step.get("prepend", "")).encode())
    if kind == "Precompiled":
        # SentencePiece's: the size of a trie, the trie, and strings that end with a zero.
        charsmap = base64.b64decode(str(step.get("precompiled_charsmap", "")))
        trie_size = int.from_bytes(charsmap[:4], "little")
        strings = charsmap[4 + trie_size :].split(b"\0")
        return max(1, *map(len, strings))
    # Its symbols for bytes have up to two bytes in UTF-8.
    return 2 if kind == "ByteLevel" else 1


def missing_speed(tokenizer: Tokenizer) -> str | None:
    """Return what gigatoken would bring, if it is not installed and would be used."""
    if not isinstance(tokenizer, GPT2BPE) or importlib.util.find_spec("gigatoken"):
        return None
    return "gigatoken is not installed; `pip install 'gigatoken==0.10.*'` makes this about eight times as fast"


def is_named(t: TokenizerFlags) -> bool:
    return bool(t.tokenizer or t.vocab_file or t.merge_file or t.tokenizer_model)


def find_saved(*folders: Path | None) -> Path | None:
    """Return the first tokenizer folder: `tokenizer/` of a run, or a Hugging Face folder itself."""
    for folder in filter(None, folders):
        of_run = folder / "tokenizer"
        if of_run.is_dir():
            return of_run
        if _has_files(folder, "tokenizer.json") or _has_files(folder, *GPT2_FILES):
            return folder
        if _find_model(folder):
            return folder
    return None


def _find_model(folder: Path) -> Path | None:
    """Return a model of SentencePiece, ranks of tiktoken, or BERT's or GPT-2's vocabulary."""
    patterns = (MODEL, "spiece.model", "tiktoken.model", "*.tiktoken", WORDS, "gpt2-vocab.json")
    for pattern in patterns:
        for path in sorted(folder.glob(pattern)):
            return path
    # Other programs have files *.model too.
    for path in sorted(folder.glob("*.model")):
        if vocabularies.is_model_file(path):
            return path
    return None


def resolve_tokenizer(t: TokenizerFlags, saved: Path | None = None) -> Tokenizer | None:
    """Return the tokenizer that the flags name (not if the default type), or `saved`'s, or None."""
    if saved is None and not is_named(t) and t.tokenizer_type == DEFAULT_TYPE:
        return None
    return build_tokenizer(t, saved)


def build_tokenizer(t: TokenizerFlags, saved: Path | None = None) -> Tokenizer:
    """Return the tokenizer of `resolve_tokenizer`; raise UserError if there is none."""
    # Files that the flags name take precedence over saved ones.
    tokenizer = _build(t) if saved is None or is_named(t) else _build_saved(t, saved)
    ids = tokenizer.size - (tokenizer.name == Null.name)  # without the end of document that it adds
    if t.vocab_size not in (None, ids, tokenizer.size):
        where = ", ".join(map(str, tokenizer.files.values())) or tokenizer.name
        raise SettingsError(
            f"{{vocab_size={t.vocab_size}}}, but {where} has {ids} ids; leave it out"
        )
    return tokenizer


def missing_error(folder: Path, size: int | None = None) -> UserError:
    """Make the error for a checkpoint with no vocabulary beside it."""
    return SettingsError(
        f"{folder} holds no vocabulary; name it with {{tokenizer=DIR}}, FILE or NAME or, for a model "
        f"of bare ids, {{tokenizer_type=NullTokenizer}} {{vocab_size={size - 1 if size else 'N'}}}"
    )


def require_same(tokenizer: Tokenizer, saved: Path) -> None:
    """Raise UserError if the checkpoint was trained with other vocabulary files."""
    if not is_same(tokenizer, saved):
        raise UserError(
            f"the vocabulary files differ from those in {saved}, with which this checkpoint was trained: the same ids "
            "would mean other text; leave out the vocabulary flags",
            BAD_DATA,
            everywhere=True,
        )


def _build(t: TokenizerFlags) -> Tokenizer:
    if t.tokenizer is not None:
        return _build_named(t.tokenizer, t)
    # The default type needs two files; each way to name too few of them has its own advice.
    if t.tokenizer_type == "GPT2BPETokenizer":
        if t.tokenizer_model and not (t.vocab_file or t.merge_file):
            raise SettingsError(
                f"{{tokenizer_model={t.tokenizer_model}}} needs {{tokenizer_type=HuggingFaceTokenizer}}; the default, "
                "GPT2BPETokenizer, takes {vocab_file} and {merge_file}"
            )
        if t.vocab_file and t.merge_file:
            return GPT2BPE(Path(t.vocab_file), Path(t.merge_file))
        if not (t.vocab_file or t.merge_file):
            raise SettingsError(f"a tokenizer is needed: {{tokenizer}} {WAYS}")
        missing = "{merge_file}" if t.vocab_file else "{vocab_file}"
        raise SettingsError(
            f"GPT2BPETokenizer needs {missing} too; or give {{tokenizer}} and the folder of both files"
        )
    # Types that need one file come first, then those that need none.
    kind = OWN_NAMES.get(t.tokenizer_type, t.tokenizer_type)
    if kind in FILE_KINDS:
        flag, what, _, load = FILE_KINDS[kind]
        if not (name := getattr(t, flag)):
            raise SettingsError(f"{t.tokenizer_type} needs {{{flag}}}: {what}")
        is_list = (kind, Path(name).suffix) == (TikToken.name, ".json")
        return vocabularies.load_rank_list(Path(name), t) if is_list else load(Path(name))
    if t.tokenizer_type == "ByteTokenizer":
        return Bytes()
    if t.tokenizer_type == "NullTokenizer":
        if not t.vocab_size:
            raise SettingsError("NullTokenizer needs {vocab_size}: how many ids there are")
        return Null(t.vocab_size)
    raise AssertionError(t.tokenizer_type)


def _build_named(name: str, t: TokenizerFlags) -> Tokenizer:
    """Return the tokenizer of --tokenizer: what a path holds, `byte`, or one of the Hub."""
    fields = ("vocab_file", "merge_file", "tokenizer_model", "tokenizer_type")
    others = {n: value for n in fields if (value := getattr(t, n)) and value != DEFAULT_TYPE}
    if others:
        flags = ", ".join(f"{spelling(n)} {value}" for n, value in others.items())
        raise SettingsError(
            f"{{tokenizer={name}}} and {flags} both name a tokenizer; give only one of them"
        )
    # An existing path takes precedence over names of tiktoken's encodings and of the Hub.
    path = Path(os.path.expanduser(name))  # unlike Path.expanduser, for unknown users too
    if name == "byte":
        return Bytes()
    if path.is_dir():
        return _build_folder(path)
    if kept := _find_kept(str(path)):
        return _build_saved(TokenizerFlags(), kept)
    if not path.exists() and vocabularies.is_encoding_name(name):
        return vocabularies.load_encoding(name)
    # A missing file is not looked for on the Hub.
    is_file_name = path.suffix in (".json", ".txt", ".model", ".tiktoken")
    if path.exists() or is_file_name or not hub.is_name(name):
        return _build_file(path)
    return _build_folder(_find_on_hub(name))


def _find_kept(prefix: str) -> Path | None:
    """Return the tokenizer beside token files, named by their prefix or by --output-prefix."""
    if kept := find_of_data([prefix_of(prefix)]):
        return kept
    # A command with several keys has written several pairs.
    prefixes = []
    for level in ("document", "sentence"):
        pattern = f"{glob.escape(prefix)}_*_{level}{KEPT_BESIDE}"
        prefixes += [path.removesuffix(KEPT_BESIDE) for path in sorted(glob.glob(pattern))]
    kept = find_of_data(prefixes)
    if kept:
        notice(f"--tokenizer {prefix}: the one in {kept}, which preprocess kept")
    return kept


def _find_on_hub(name: str) -> Path:
    """Return the folder of the Hub's cache with the vocabulary of a repository."""
    if folder := hub.find_folder(name, "tokenizer.json", near=near_path(name)):
        # tiktoken, which is faster, reads GPT-2's own files
        if _splits_as_gpt2(folder / "tokenizer.json"):
            hub.find_folder(name, *GPT2_FILES, is_needed=False)
        return folder
    # Older repositories have no tokenizer.json.
    for names in (GPT2_FILES, (MODEL,), (WORDS,)):
        if folder := hub.find_folder(name, *names):
            for beside in (CHAT_CONFIG, vocabularies.ADDED_TOKENS):  # special tokens, lower case
                hub.find_folder(name, beside, is_needed=False)
            return folder
    raise bad_data(f"{name} on the Hugging Face Hub has no tokenizer.json; {CONVERT}")


def _build_folder(folder: Path) -> Tokenizer:
    """Return the tokenizer of a run, a run's `tokenizer/`, or a folder of tokenizer files."""
    if saved := folder if (folder / "meta.json").is_file() else find_saved(folder):
        return _build_saved(TokenizerFlags(), saved)
    wanted = "tokenizer.json, nor vocab.json and merges.txt, *.model, *.tiktoken, vocab.txt or a run's tokenizer/"
    raise SettingsError(
        f"{{tokenizer={folder}}} holds no {wanted}; name {WAYS.removeprefix('with ')}", BAD_DATA
    )


def _build_file(path: Path) -> Tokenizer:
    """Return the tokenizer of a file, or of a vocabulary with its merges beside it."""
    if path.is_file() and ".model" in path.suffixes:  # Mistral has tokenizer.model.v3
        return vocabularies.load_model_file(path)
    if path.is_file() and path.suffix == ".tiktoken":
        return vocabularies.load_ranks(path)
    if path.is_file() and path.name.endswith(WORDS):
        return WordPiece(path)
    vocab = path.with_name(path.name.replace("merges.txt", "vocab.json"))
    if not path.exists():
        raise SettingsError(
            f"{{tokenizer={path}}} does not exist; name {WAYS.removeprefix('with ')}", BAD_DATA
        )
    # A .json may be a tokenizer.json, Megatron's list of ranks, or a vocabulary that needs merges.
    content = vocabularies.read_json(vocab)
    if isinstance(content, dict) and isinstance(content.get("model"), dict):
        return HuggingFace(path)
    if isinstance(content, list):
        way = f"--tokenizer-type {TikToken.name} --tokenizer-model {path} --tiktoken-pattern"
        raise bad_data(
            f"{path} is a list, as Megatron's ranks are, and does not state its pattern: give {way} v1 or v2"
        )
    merges = vocab.with_name(vocab.name.replace("vocab.json", "merges.txt"))
    if merges == vocab:
        raise SettingsError(
            f"{vocab} is not a tokenizer.json; give its merges too: {{vocab_file={vocab}}} {{merge_file=FILE}}",
            BAD_DATA,
        )
    if not merges.is_file():
        raise bad_data(f"{vocab} is not a tokenizer.json, and no {merges.name} is beside it")
    return GPT2BPE(vocab, merges)


def _has_files(folder: Path, *names: str) -> bool:
    return all((folder / name).is_file() for name in names)


def _splits_as_gpt2(path: Path) -> bool:
    """Return whether a tokenizer.json splits text as GPT-2 does."""
    try:
        settings = vocabularies.read_json(path)
        added = {token["content"] for token in settings.get("added_tokens", [])}
        split = settings["pre_tokenizer"]
        splits = (split["type"], split["add_prefix_space"], split.get("use_regex", True))
        is_plain = settings.get("normalizer") is None and added <= {END_OF_TEXT}
        return is_plain and splits == ("ByteLevel", False, True)
    except (AttributeError, KeyError, TypeError, UserError):
        return False


def _build_saved(t: TokenizerFlags, folder: Path) -> Tokenizer:
    pair = folder / "vocab.json", folder / "merges.txt"
    asked = OWN_NAMES.get(t.tokenizer_type, t.tokenizer_type)
    if not (folder / "meta.json").is_file():  # a Hugging Face folder
        if asked not in (DEFAULT_TYPE, HuggingFace.name) or find_saved(folder) != folder:
            return _build(t)
        path = folder / "tokenizer.json"
        if _has_files(folder, *GPT2_FILES) and (not path.is_file() or _splits_as_gpt2(path)):
            return GPT2BPE(*pair)
        return HuggingFace(folder) if path.is_file() else _build_file(_find_model(folder) or path)
    # We wrote this folder: its meta.json has the type and the files' hashes.
    meta = _read_meta(folder)
    kind = meta["type"]
    # The default type may not be what the user wishes, so only another one is compared.
    if asked not in (kind, DEFAULT_TYPE):
        raise SettingsError(
            f"{{tokenizer_type={t.tokenizer_type}}}, but {folder} holds a {kind}; leave it out"
        )
    # The files that meta.json names, unchanged. A name of another kind could lead anywhere.
    for name, expected in meta["sha256"].items():
        if name not in FILES:
            raise bad_data(f"{folder / 'meta.json'} names {name!r}, which is not a tokenizer file")
        if _sha256(folder / name, folder) != expected:
            raise bad_data(
                f"{folder / name} is not the file that meta.json beside it describes: its SHA-256 differs"
            )

    if kind == GPT2BPE.name:
        return GPT2BPE(*pair)
    if kind in FILE_KINDS:
        return FILE_KINDS[kind].load(folder / FILE_KINDS[kind].kept)
    return _build(TokenizerFlags(tokenizer_type=kind, vocab_size=meta["vocab_size"] - 1))


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Copy the tokenizer into `folder`, meta.json last, so that it never names a missing file.

    A chat template beside it is copied too. It is no part of the tokenizer: anyone may change it.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    files.own_folder(folder)
    sources = dict(tokenizer.files)
    for source in tokenizer.files.values():
        for name in (CHAT_TEMPLATE, CHAT_CONFIG):
            beside = source.parent / name
            if beside.is_file():
                sources[name] = beside
    for name, source in sources.items():
        target = folder / name
        if not target.exists() or _sha256(target) != _sha256(source):
            with files.replacing(target) as file:
                file.write(vocabularies.read_bytes(source))
    for name, content in tokenizer.made.items():
        with files.replacing(folder / name) as file:
            file.write(content)
    with files.replacing(folder / "meta.json") as file:
        file.write(json.dumps(_meta(tokenizer), indent=1).encode() + b"\n")


def is_same(tokenizer: Tokenizer, folder: Path) -> bool:
    """Return whether `folder` keeps the same tokenizer, perhaps in another form, or keeps none."""
    if not (folder / "meta.json").is_file():
        return True
    meta = _meta(tokenizer)
    saved_meta = _read_meta(folder)
    if saved_meta["type"] == meta["type"]:
        return saved_meta == meta
    # GPT-2's two files and a tokenizer.json may hold one vocabulary.
    other = _build_saved(TokenizerFlags(), folder)
    return other.size == tokenizer.size and all(
        other.decode_bytes([i]) == tokenizer.decode_bytes([i]) for i in range(other.size)
    )


def tokenizer_folder(prefix: str) -> Path:
    """Return the folder that keeps the tokenizer of a pair of token files."""
    return Path(f"{prefix}{KEPT_BESIDE}")


def find_of_data(prefixes: Iterable[str]) -> Path | None:
    """Return the tokenizer folder of token files that are read together, or None if none has one.

    Raise UserError if they were made with several.
    """
    folders = [
        folder for folder in map(tokenizer_folder, prefixes) if _has_files(folder, "meta.json")
    ]
    if not folders:
        return None
    first, *others = folders
    for other in others:
        if _read_meta(other) == _read_meta(first):
            continue
        if not is_same(build_tokenizer(TokenizerFlags(), first), other):
            both = f"{first} ({describe_folder(first)}) and {other} ({describe_folder(other)})"
            raise SettingsError(
                f"the token files were made with different tokenizers, {both}: the same ids would mean other text; "
                f"preprocess one of them with {{tokenizer}} and the other's folder",
                BAD_DATA,
                everywhere=True,
            )
    return first


def resolve_for_data(
    t: TokenizerFlags, data: Path | None, saved: Path | None = None
) -> Tokenizer | None:
    """Return the tokenizer that the flags name, or `saved`'s, or that of the `data`, or None.

    Raise UserError if it is not the one that the token files were made with.
    """
    if data is None or (saved is None and t == TokenizerFlags()):
        return resolve_tokenizer(t, saved or data)
    # The two types that have no files are named by their type alone.
    has_flags = is_named(t) or t.tokenizer_type in (Bytes.name, Null.name)
    tokenizer = resolve_tokenizer(t, saved) if has_flags or saved else build_tokenizer(t, data)
    if tokenizer is not None:
        whose = f"{saved} keeps"
        cure = f"preprocess the text with --tokenizer {saved}"
        if has_flags:
            whose = "the flags name"
            cure = "leave out the tokenizer flags"
        require_of_data(tokenizer, data, whose, cure)
    return tokenizer


def require_of_data(tokenizer: Tokenizer, data: Path, whose: str, cure: str) -> None:
    """Raise UserError if token files, which `data` lies beside, were made with another tokenizer.

    The message begins with `whose`, such as "the flags name", and advises the `cure`.
    """
    if is_same(tokenizer, data):
        return
    raise UserError(
        f"{whose} another tokenizer ({describe_meta(_meta(tokenizer))}) than the one that the data were made with "
        f"({data}: {describe_folder(data)}): the same ids would mean other text; {cure}, or remove {data} if the "
        "data really were made with the other one",
        BAD_DATA,
        everywhere=True,
    )


def keep_beside(tokenizer: Tokenizer, prefix: str) -> None:
    """Save the tokenizer beside token files, in the place of that of older ones."""
    folder = tokenizer_folder(prefix)
    if (folder / "meta.json").is_file() and _read_meta(folder) != _meta(tokenizer):
        shutil.rmtree(folder, ignore_errors=True)
    save_tokenizer(tokenizer, folder)


def describe_meta(meta: Mapping[str, Any]) -> str:
    """Return name, size and, to tell files apart, the beginning of a hash of all their hashes."""
    what = f"{meta['type']}, {meta['vocab_size']:,} ids"
    hashes = meta["sha256"]
    if not hashes:
        return what
    joined = "".join(hashes[name] for name in sorted(hashes))
    digest = hashlib.sha256(joined.encode()).hexdigest()
    return f"{what}, SHA-256 {digest[:8]}"


def describe_folder(folder: Path) -> str:
    return describe_meta(_read_meta(folder))


def _meta(tokenizer: Tokenizer) -> dict[str, Any]:
    return {"type": tokenizer.name, "vocab_size": tokenizer.size, "sha256": file_hashes(tokenizer)}


def _read_meta(folder: Path) -> dict[str, Any]:
    meta = vocabularies.read_json(folder / "meta.json")
    try:
        hashes = {str(name): str(sha256) for name, sha256 in meta["sha256"].items()}
        return {"type": str(meta["type"]), "vocab_size": int(meta["vocab_size"]), "sha256": hashes}
    except (AttributeError, KeyError, TypeError, ValueError):
        raise bad_data(
            f"{folder / 'meta.json'} is damaged; name the tokenizer with its flags"
        ) from None


def file_hashes(tokenizer: Tokenizer) -> dict[str, str]:
    made = {name: hashlib.sha256(content).hexdigest() for name, content in tokenizer.made.items()}
    return {name: _sha256(source) for name, source in tokenizer.files.items()} | made


def padding_line(size: int, padded: int) -> str:
    """Return Megatron's console line about the padding."""
    return f" > padded vocab (size: {size}) with {padded - size} dummy tokens (new size: {padded})"


def train_bpe(texts: Iterable[str], vocab_size: int, out: Path) -> None:
    """Train a byte-level BPE like GPT-2's into out/vocab.json and out/merges.txt.

    <|endoftext|> is the last id. A small corpus may give a smaller vocabulary.
    """
    from tokenizers import Tokenizer as Library
    from tokenizers import models, pre_tokenizers, trainers

    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(texts, trainer)
    out.mkdir(parents=True, exist_ok=True)
    library.model.save(str(out))
    vocab = json.loads((out / "vocab.json").read_text(encoding="utf-8"))
    vocab[END_OF_TEXT] = len(vocab)
    (out / "vocab.json").write_text(json.dumps(vocab, ensure_ascii=False), encoding="utf-8")


def _token_bytes(vocab: dict[str, int], symbols: dict[str, int]) -> list[bytes]:
    """Return the bytes of each id; a special token stands for its own text."""
    table = [b""] * (max(vocab.values()) + 1)
    for token, i in vocab.items():
        try:
            table[i] = bytes([symbols[character] for character in token])
        except KeyError:
            table[i] = token.encode("utf-8")
    return table


def _read_vocab(path: Path) -> dict[str, int]:
    vocab = vocabularies.read_json(path)
    if not isinstance(vocab, dict) or any(type(i) is not int for i in vocab.values()):
        raise bad_data(f"{path} is not a vocabulary, one JSON object of token: id")
    size = len(vocab)
    if sorted(vocab.values()) != list(range(size)):
        raise bad_data(f"{path} has {size} tokens whose ids are not 0 ... {size - 1}")
    return vocab


def _read_merges(path: Path) -> list[tuple[str, str]]:
    lines = vocabularies.read_text(path).split("\n")
    first = 1 if lines[0].startswith("#version") else 0
    merges = []
    for number, line in enumerate(lines[first:], start=first + 1):
        parts = line.rstrip("\r").split(" ")
        if len(parts) == 2:
            merges.append((parts[0], parts[1]))
        elif parts != [""]:
            raise bad_data(f"{path}:{number}: {line!r} is not a merge of two symbols")
    return merges


def _sha256(path: Path, folder: Path | None = None) -> str:
    try:
        return files.sha256(path, folder)
    except OSError as error:
        raise bad_data(f"{path} cannot be read: {error.strerror}") from None
