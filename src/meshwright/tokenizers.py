"""Text to token ids and back: one small interface over four kinds of tokenizer.

GPT-2's two files are encoded by tiktoken, which is several times faster than the `tokenizers` library and gives the
same ids as long as every merge has an id of its own, in merge order; other vocabularies go to `tokenizers`. No
tokenizer here looks for special tokens inside a text: a document that contains the letters of <|endoftext|> is plain
text, and the end-of-document id is only ever appended as an id.

A run keeps its tokenizer: `save` copies the files into the run's `tokenizer/` folder with their hashes, and `build`
reads that folder when the flags name no files, so that generation needs no vocabulary flags.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import re
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy.typing as npt

from meshwright.errors import BAD_DATA, UserError
from meshwright.files import replacing
from meshwright.settings import schema as config

END_OF_TEXT = "<|endoftext|>"
EOD_NAMES = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>", "<|eos|>", "[EOS]")
GPT2_PATTERN = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
LONG_SPACE = 500_000  # characters
HUGGING_FACE = ("HuggingFaceTokenizer", "PretrainedFromHF", "HFTokenizer")
BESIDE_WEIGHTS = (("vocab.json", "merges.txt"), ("tokenizer.json",))  # in a folder of Hugging Face


class Tokenizer(Protocol):
    name: str
    size: int  # true vocabulary size: ids are 0 ... size - 1
    eod: int  # end of document, also where generation stops
    files: dict[str, Path]  # what `save` copies, by the name it gets in the run folder

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def decode_bytes(self, ids: Sequence[int]) -> bytes: ...


class _Bytewise:
    """A tokenizer whose tokens are bytes, which may be a part of a character."""

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        raise NotImplementedError

    def decode(self, ids: Sequence[int]) -> str:
        return self.decode_bytes(ids).decode("utf-8", errors="replace")


class GPT2BPE(_Bytewise):
    """GPT-2's byte-level BPE from vocab.json and merges.txt."""

    name = "GPT2BPETokenizer"

    def __init__(self, vocab_file: Path, merge_file: Path) -> None:
        self.files = {"vocab.json": vocab_file, "merges.txt": merge_file}
        if not _read(vocab_file).startswith("{") and _read(merge_file).startswith("{"):
            raise UserError(
                f"--vocab-file {vocab_file} and --merge-file {merge_file} are swapped: the vocabulary is the JSON one",
                BAD_DATA,
            )
        vocab = _read_vocab(vocab_file)
        merges = _read_merges(merge_file)
        self.size = len(vocab)
        self.eod = vocab.get(END_OF_TEXT, -1)
        if self.eod < 0:
            raise UserError(f"{vocab_file} has no {END_OF_TEXT}: it is not a GPT-2 vocabulary", BAD_DATA)
        symbols = _byte_symbols()
        missing = [s for s in symbols if s not in vocab]
        if missing:
            raise UserError(f"{vocab_file} is not a byte-level BPE: {len(missing)} of the 256 bytes missing", BAD_DATA)
        if not merges and self.size > 257:
            raise UserError(
                f"{merge_file} has no merges, {vocab_file} has {self.size} tokens: they do not belong together",
                BAD_DATA,
            )
        for left, right in merges:
            if left + right not in vocab:
                raise UserError(
                    f"{merge_file} merges {left!r} and {right!r}, but {left + right!r} is not in {vocab_file}: "
                    "the two files do not belong together",
                    BAD_DATA,
                )
        self._bytes = _token_bytes(vocab, symbols)
        # Built at their first use: training needs the sizes alone.
        self._slow = functools.cache(lambda: self._tokenizers(vocab, merges))
        self._fast = functools.cache(lambda: self._tiktoken(vocab, merges))
        self.gigatoken = functools.cache(lambda: self._gigatoken(vocab, merges))

    def _tiktoken(self, vocab: dict[str, int], merges: list[tuple[str, str]]) -> Callable[[str], list[int]] | None:
        try:
            import tiktoken
        except ImportError:
            return None
        ids = self._ranked(vocab, merges)
        if ids is None:
            return None
        encoding = tiktoken.Encoding(
            self.name,
            pat_str=GPT2_PATTERN,
            mergeable_ranks={self._bytes[i]: i for i in ids},
            special_tokens={END_OF_TEXT: self.eod},
        )
        return encoding.encode_ordinary

    @staticmethod
    def _ranked(vocab: dict[str, int], merges: list[tuple[str, str]]) -> list[int] | None:
        """All ids but the end of document's; None if they are not in the order of the merges, whose ranks some libraries take
        them for."""
        merged = [vocab[left + right] for left, right in merges]
        if any(a >= b for a, b in zip(merged, merged[1:], strict=False)):
            return None
        return [vocab[symbol] for symbol in _byte_symbols()] + merged

    def _gigatoken(
        self, vocab: dict[str, int], merges: list[tuple[str, str]]
    ) -> Callable[[str], npt.NDArray[Any]] | None:
        """Several times faster than tiktoken. Nothing in a text is special to it, for it is given no special token."""
        try:
            from gigatoken.gigatoken_rs import BPETokenizer
        except ImportError:
            return None
        ids = self._ranked(vocab, merges)
        if ids is None:
            return None
        with tempfile.NamedTemporaryFile(suffix=".tiktoken") as file:
            file.write(b"".join(b"%s %d\n" % (base64.b64encode(self._bytes[i]), i) for i in sorted(ids)))
            file.flush()
            return BPETokenizer.from_tiktoken(file.name, "gpt2", {}).encode

    def _tokenizers(self, vocab: dict[str, int], merges: list[tuple[str, str]]) -> Callable[[str], list[int]]:
        from tokenizers import Tokenizer as Library
        from tokenizers import models, pre_tokenizers

        library = Library(models.BPE(vocab=vocab, merges=merges))
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        return lambda text: list(library.encode(text).ids)

    def encode(self, text: str) -> list[int]:
        fast = self._fast()
        return self._slow()(text) if fast is None or _has_long_space(text) else fast(text)

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        return b"".join(self._bytes[i] for i in ids)


class HuggingFace(_Bytewise):
    """Any tokenizer.json, through the `tokenizers` library."""

    name = "HuggingFaceTokenizer"

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer as Library

        path = path / "tokenizer.json" if path.is_dir() else path
        self.files = {"tokenizer.json": path}
        text = _read(path)
        try:
            self._library = Library.from_str(text)
            decoder = (json.loads(text).get("decoder") or {}).get("type")
        except Exception as error:  # the library raises plain Exception
            raise UserError(f"{path} is not a tokenizer.json: {error}", BAD_DATA) from None
        self._library.encode_special_tokens = True  # their letters in a text stay letters
        self._library.no_truncation()
        self._library.no_padding()
        vocab = self._library.get_vocab()
        self.size = max(vocab.values()) + 1
        if self.size > 4 * len(vocab) + 1000:  # a table of all ids is made
            raise UserError(f"{path}: {len(vocab):,} tokens, but an id of {self.size - 1:,}", BAD_DATA)
        found = [vocab[name] for name in EOD_NAMES if name in vocab]
        if not found:
            raise UserError(f"{path} has none of the usual end-of-document tokens: {', '.join(EOD_NAMES)}", BAD_DATA)
        self.eod = found[0]
        # Only a byte-level vocabulary says which bytes a token is, even where it is half a character.
        self._bytes = _token_bytes(vocab, _byte_symbols()) if decoder == "ByteLevel" else None

    def encode(self, text: str) -> list[int]:
        return list(self._library.encode(text, add_special_tokens=False).ids)

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        if self._bytes is not None:
            return b"".join(self._bytes[i] for i in ids)
        return self._library.decode(list(ids), skip_special_tokens=False).encode("utf-8")


class Bytes(_Bytewise):
    """The 256 bytes and an end of document, which decodes to nothing."""

    name = "ByteTokenizer"
    size = 257
    eod = 256

    def __init__(self) -> None:
        self.files: dict[str, Path] = {}

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        return bytes(i for i in ids if i != self.eod)


class Null:
    """Text that is already ids: integers between white space."""

    name = "NullTokenizer"

    def __init__(self, vocab_size: int) -> None:
        self.files: dict[str, Path] = {}
        self.size = vocab_size + 1
        self.eod = vocab_size

    def encode(self, text: str) -> list[int]:
        try:
            ids = [int(word) for word in text.split()]
        except ValueError as error:
            raise UserError(f"NullTokenizer reads integers between spaces: {error}", BAD_DATA) from None
        wrong = [i for i in ids if not 0 <= i < self.size]
        if wrong:
            raise UserError(f"NullTokenizer: id {wrong[0]} is not in 0 ... {self.size - 1} (--vocab-size)", BAD_DATA)
        return ids

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        return self.decode(ids).encode()

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(str(i) for i in ids)


def fastest(tokenizer: Tokenizer) -> Callable[[str], Sequence[int] | npt.NDArray[Any]]:
    """Text to the same ids as `encode`, perhaps as an array, at the speed of the `fast` extra's library if that is there."""
    fast = tokenizer.gigatoken() if isinstance(tokenizer, GPT2BPE) else None
    return fast or tokenizer.encode


def build(t: config.Tokenizer, folder: Path | None = None) -> Tokenizer:
    """The tokenizer that the flags name, or, if they name no files, the one saved in a run's `folder`."""
    tokenizer = _build(t, folder)
    ids = tokenizer.size - (tokenizer.name == Null.name)  # which adds an end of document
    if t.vocab_size not in (None, ids):
        where = ", ".join(map(str, tokenizer.files.values())) or tokenizer.name
        raise UserError(f"--vocab-size {t.vocab_size}, but {where} has {ids} ids: leave the flag out")
    return tokenizer


def kept_by(*folders: Path | None) -> Path | None:
    """What `build` can take beside a checkpoint: tokenizer/ of a run, or a folder of Hugging Face itself."""
    for folder in folders:
        if folder is not None and (folder / "tokenizer").is_dir():
            return folder / "tokenizer"
        if folder is not None and any(all((folder / name).is_file() for name in names) for names in BESIDE_WEIGHTS):
            return folder
    return None


def unnamed(folder: Path, size: int | None = None) -> UserError:
    """For a checkpoint that has no vocabulary beside it."""
    told = size - 1 if size else "N"
    return UserError(
        f"{folder} holds no vocabulary, so it must be named: --vocab-file and --merge-file, --tokenizer-model, or, for a "
        f"model of bare ids, --tokenizer-type NullTokenizer --vocab-size {told}"
    )


def require_same(tokenizer: Tokenizer, kept: Path) -> None:
    if not is_same(tokenizer, kept):
        raise UserError(
            f"the vocabulary's files are not those in {kept}, which this checkpoint was trained with: the same ids would "
            "mean other text. Leave the vocabulary flags out to take the run's own",
            BAD_DATA,
            everywhere=True,
        )


def _build(t: config.Tokenizer, folder: Path | None) -> Tokenizer:
    files_given = t.vocab_file or t.merge_file or t.tokenizer_model
    if folder is not None and not files_given:
        if (folder / "meta.json").is_file():
            return _build_saved(t, folder)
        if t.tokenizer_type in ("GPT2BPETokenizer", *HUGGING_FACE) and kept_by(folder) == folder:
            return GPT2BPE(folder / "vocab.json", folder / "merges.txt") if is_gpt2(folder) else HuggingFace(folder)
    if t.tokenizer_type == "GPT2BPETokenizer":
        if t.tokenizer_model and not (t.vocab_file or t.merge_file):
            raise UserError(
                f"--tokenizer-model {t.tokenizer_model} is read by --tokenizer-type HuggingFaceTokenizer, which is missing: "
                "GPT2BPETokenizer, the default, takes --vocab-file and --merge-file"
            )
        if not t.vocab_file or not t.merge_file:
            lacking = [f for f, given in (("--vocab-file", t.vocab_file), ("--merge-file", t.merge_file)) if not given]
            raise UserError(
                f"GPT2BPETokenizer needs {' and '.join(lacking)}: `meshwright train-tokenizer` makes both files; "
                "--tokenizer-type ByteTokenizer needs none"
            )
        return GPT2BPE(Path(t.vocab_file), Path(t.merge_file))
    if t.tokenizer_type in HUGGING_FACE:
        if not t.tokenizer_model:
            raise UserError(f"{t.tokenizer_type} needs --tokenizer-model: a tokenizer.json, or the folder holding it")
        return HuggingFace(Path(t.tokenizer_model))
    if t.tokenizer_type == "ByteTokenizer":
        return Bytes()
    if t.tokenizer_type == "NullTokenizer":
        if not t.vocab_size:
            raise UserError("NullTokenizer needs --vocab-size: how many ids there are")
        return Null(t.vocab_size)
    raise UserError(f"--tokenizer-type {t.tokenizer_type}: not yet")


def is_gpt2(folder: Path) -> bool:
    """Whether a folder of Hugging Face holds GPT-2's two files and splits a text as GPT-2 does, which these do not tell."""
    if not all((folder / name).is_file() for name in BESIDE_WEIGHTS[0]):
        return False
    if not (folder / "tokenizer.json").is_file():
        return True
    try:
        told = json.loads(_read(folder / "tokenizer.json"))
        words = {token["content"] for token in told.get("added_tokens", [])}
        split = told["pre_tokenizer"]
        return bool(
            (split["type"], split["add_prefix_space"], split.get("use_regex", True)) == ("ByteLevel", False, True)
            and told.get("normalizer") is None
            and words <= {END_OF_TEXT}
        )
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
        return False


def _build_saved(t: config.Tokenizer, folder: Path) -> Tokenizer:
    meta = _read_json(folder / "meta.json")
    try:
        kind, vocab_size, hashes = str(meta["type"]), int(meta["vocab_size"]), dict(meta["sha256"])
    except (KeyError, TypeError, ValueError):
        raise UserError(f"{folder / 'meta.json'} is damaged; name the tokenizer with its flags", BAD_DATA) from None
    asked = HuggingFace.name if t.tokenizer_type in HUGGING_FACE else t.tokenizer_type
    if asked not in (kind, config.Tokenizer().tokenizer_type):  # the default says nothing about what was asked
        raise UserError(f"--tokenizer-type {t.tokenizer_type}, but {folder} holds a {kind}: leave the flag out")
    for name, expected in hashes.items():
        if name not in ("vocab.json", "merges.txt", "tokenizer.json"):
            raise UserError(f"{folder / 'meta.json'} names {name!r}, which no tokenizer has", BAD_DATA)
        if _sha256(folder / name) != expected:
            raise UserError(f"{folder / name} is not the file this run was trained with: its SHA-256 differs", BAD_DATA)
    if kind == GPT2BPE.name:
        return GPT2BPE(folder / "vocab.json", folder / "merges.txt")
    if kind == HuggingFace.name:
        return HuggingFace(folder / "tokenizer.json")
    return _build(config.Tokenizer(tokenizer_type=kind, vocab_size=vocab_size - 1), None)  # type: ignore[arg-type]


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Copy what `build` needs into `folder`; meta.json comes last, so that it never names a file not yet there."""
    folder.mkdir(parents=True, exist_ok=True)
    sha256 = hashes(tokenizer)
    for name, source in tokenizer.files.items():
        target = folder / name
        if not target.exists() or _sha256(target) != sha256[name]:
            with replacing(target) as file:
                file.write(source.read_bytes())
    meta = {"type": tokenizer.name, "vocab_size": tokenizer.size, "sha256": sha256}
    with replacing(folder / "meta.json") as file:
        file.write(json.dumps(meta, indent=1).encode() + b"\n")


def is_same(tokenizer: Tokenizer, folder: Path) -> bool:
    """Whether `folder` keeps this very tokenizer, file for file; true if it keeps none."""
    if not (folder / "meta.json").is_file():
        return True
    meta = _read_json(folder / "meta.json")
    return bool(meta.get("sha256") == hashes(tokenizer))


def hashes(tokenizer: Tokenizer) -> dict[str, str]:
    """The SHA-256 of each of its files."""
    return {name: _sha256(source) for name, source in tokenizer.files.items()}


def padded_size(size: int, divisible_by: int, tensor_parallel: int, pad_to: int | None) -> int:
    """The smallest multiple of divisible_by * tensor_parallel that holds the vocabulary, or exactly `pad_to`."""
    multiple = divisible_by * tensor_parallel
    if pad_to is None:
        return -(-size // multiple) * multiple
    if pad_to < size:
        raise UserError(f"--pad-vocab-size-to {pad_to} is below the tokenizer's {size} ids")
    if pad_to % multiple:
        following = -(-pad_to // multiple) * multiple
        raise UserError(
            f"--pad-vocab-size-to {pad_to} is not a multiple of {multiple} (--make-vocab-size-divisible-by "
            f"{divisible_by} x tensor parallel size {tensor_parallel}); the next one is {following}"
        )
    return pad_to


def padding_line(size: int, padded: int) -> str:
    """Megatron's console line about it."""
    return f" > padded vocab (size: {size}) with {padded - size} dummy tokens (new size: {padded})"


def train_bpe(texts: Iterable[str], vocab_size: int, out: Path, show_progress: bool = False) -> None:
    """Train a byte-level BPE as GPT-2's: out/vocab.json and out/merges.txt, <|endoftext|> being the last id.

    A small corpus may hold fewer merges than asked for; the vocabulary is then smaller.
    """
    from tokenizers import Tokenizer as Library
    from tokenizers import models, pre_tokenizers, trainers

    if vocab_size < 257:
        raise UserError(f"a vocabulary of {vocab_size} cannot hold the 256 bytes and {END_OF_TEXT}: at least 257")
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=show_progress
    )
    library.train_from_iterator(texts, trainer)
    out.mkdir(parents=True, exist_ok=True)
    library.model.save(str(out))
    vocab = json.loads((out / "vocab.json").read_text(encoding="utf-8"))
    vocab[END_OF_TEXT] = len(vocab)
    (out / "vocab.json").write_text(json.dumps(vocab, ensure_ascii=False), encoding="utf-8")


def _has_long_space(text: str) -> bool:
    """White space so long that tiktoken's regular expression would overflow its stack (at a million characters)."""
    return len(text) > LONG_SPACE and any(len(run[0]) > LONG_SPACE for run in re.finditer(r"\s+", text))


def _byte_symbols() -> dict[str, int]:
    """The printable character that stands for each byte in GPT-2's files; its order is the order of their ids."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


def _token_bytes(vocab: dict[str, int], symbols: dict[str, int]) -> list[bytes]:
    """The bytes of each id; a token with other characters (a special one) stands for its own text."""
    table = [b""] * (max(vocab.values()) + 1)
    for token, i in vocab.items():
        try:
            table[i] = bytes([symbols[character] for character in token])
        except KeyError:
            table[i] = token.encode("utf-8")
    return table


def _read_vocab(path: Path) -> dict[str, int]:
    vocab = _read_json(path)
    if not isinstance(vocab, dict) or not all(type(i) is int for i in vocab.values()):
        raise UserError(f"{path} is not a vocabulary: one JSON object of token: id is needed", BAD_DATA)
    if set(vocab.values()) != set(range(len(vocab))):
        raise UserError(f"{path} has {len(vocab)} tokens whose ids are not 0 ... {len(vocab) - 1}", BAD_DATA)
    return vocab


def _read_merges(path: Path) -> list[tuple[str, str]]:
    lines = _read(path).split("\n")
    first = 1 if lines[0].startswith("#version") else 0
    merges = []
    for number, line in enumerate(lines[first:], start=first + 1):
        parts = line.rstrip("\r").split(" ")
        if len(parts) == 2:
            merges.append((parts[0], parts[1]))
        elif parts != [""]:
            raise UserError(f"{path}:{number}: {line!r} is not a merge of two symbols", BAD_DATA)
    return merges


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path} does not exist (a tokenizer file; nothing is downloaded)", BAD_DATA) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}", BAD_DATA) from None


def _read_json(path: Path) -> Any:
    try:
        return json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON: {error}", BAD_DATA) from None


def _sha256(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}", BAD_DATA) from None
