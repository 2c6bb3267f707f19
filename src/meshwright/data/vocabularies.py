"""Vocabularies of other programs: SentencePiece's models, tiktoken's encodings, BERT's WordPiece.

Each gives the ids of the program that it comes from. None looks for special tokens inside a text;
`special` holds them, for the templates of dialogues.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import json
import re
import string
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from meshwright.base.errors import UNAVAILABLE, UserError, bad_data, first_line
from meshwright.base.files import read_small
from meshwright.base.hints import near_path
from meshwright.config.problem import SettingsError
from meshwright.config.schema import TokenizerFlags

END_OF_TEXT = "<|endoftext|>"
EOD_NAMES = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>", "<|eos|>", "[EOS]")
CHAT_CONFIG = "tokenizer_config.json"  # where Hugging Face keeps special tokens and a chat template
ADDED_TOKENS = "added_tokens.json"
MODEL = "tokenizer.model"
RANKS = "ranks.tiktoken"
ENCODING = "encoding.json"
WORDS = "vocab.txt"
LONG_SPACE = 500_000  # characters
SPACE = "\u2581"  # SentencePiece's
LONGEST_WORD = 200  # characters that WordPiece looks for in its vocabulary
CHINESE = re.compile(
    r"[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002a6df\U0002a700-\U0002ceaf\U0002f800-\U0002fa1f]"
)
SHIELD = "\ufdd1"  # no character, for use within a program; see Tokenizer.shield
FILE_LIMIT = 128 << 20  # bytes of a file
MOST_BRACKETS = 4_000_000  # in JSON, as each makes an object
# protobuf: normalizer_spec (3) with add_dummy_prefix (3) false
NO_DUMMY_PREFIX = b"\x1a\x02\x18\x00"


class Tokenizer(ABC):
    """Text to ids and back. Tokens are bytes, perhaps only part of a character.

    Fields:
        size: true size of the vocabulary: ids are 0 ... size - 1.
        eod: id of the end of document, where generation stops too.
        files: files that a run keeps, by their names in its folder.
        made: contents of further such files.
        special: ids of the special tokens by their text.
    """

    name: str
    size: int
    eod: int
    files: Mapping[str, Path] = {}
    made: Mapping[str, bytes] = {}
    special: Mapping[str, int] = {}
    _bytes: list[bytes]  # of each id

    @abstractmethod
    def encode(self, text: str) -> list[int]: ...

    def encode_next(self, text: str) -> list[int]:
        """Encode a text that follows a special token."""
        return self.encode(text)

    def encode_inside(self, text: str) -> list[int]:
        """Encode a text within another, without the BOS of one that stands for itself."""
        return self.encode(text)

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        return b"".join(self._bytes[i] for i in ids)

    def decode(self, ids: Sequence[int]) -> str:
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    @functools.cached_property
    def _special_words(self) -> re.Pattern[str]:
        """A pattern of the special tokens that are not shielded."""
        words = "|".join(re.escape(word) for word in sorted(self.special, key=len, reverse=True))
        return re.compile(f"(?<!{SHIELD})({words})" if words else "(?!)()")

    def shield(self, text: str) -> str:
        """Mark special tokens in a text as plain letters for encode_special."""
        return self._special_words.sub(
            lambda word: "".join(SHIELD + letter for letter in word[0]), text
        )

    def encode_special(self, text: str) -> list[int]:
        """Encode a text in which special tokens are themselves, except shielded ones."""
        ids: list[int] = []
        for number, part in enumerate(self._special_words.split(text)):
            if number % 2:
                ids.append(self.special[part])
            elif part := part.replace(SHIELD, ""):
                ids += self.encode_next(part) if number else self.encode(part)
        return ids

    def as_library(self) -> Any:
        """Return a tokenizer of the `tokenizers` library that gives the same ids, or None."""
        return None

    def add_special(self, library: Any) -> Any:
        """Return the `tokenizers` library's tokenizer with the special tokens, or None if it gives
        them other ids.
        """
        from tokenizers import AddedToken

        words = sorted(self.special, key=self.special.__getitem__)
        library.add_special_tokens([AddedToken(word, normalized=False) for word in words])
        if any(library.token_to_id(word) != self.special[word] for word in words):
            return None
        return library


class SentencePiece(Tokenizer):
    """A unigram or BPE model of SentencePiece, with the tokens that a Hugging Face folder adds."""

    name = "SentencePieceTokenizer"

    def __init__(self, path: Path) -> None:
        self.files = {MODEL: path}
        added_file = path.with_name(ADDED_TOKENS)
        if added_file.is_file():
            self.files[ADDED_TOKENS] = added_file
        self._path = path
        self._content = read_bytes(path)
        self._model = model = _load_model(path, self._content)

        # The ids: first the model's pieces, then what the folder adds.
        ids = list(range(model.get_piece_size()))
        pieces = model.id_to_piece(ids)
        added = _read_added_tokens(path.parent)
        self.size = max([len(ids), *(i + 1 for i in added.values())])
        require_dense(path, len(ids), self.size)
        self.special = {pieces[i]: i for i in ids if model.is_control(i)} | added
        end = model.eos_id()
        self.eod = find_end(path, self.special, end if end >= 0 else None)

        # The bytes of each; some ids above the model's are free.
        texts = [piece.replace(SPACE, " ").encode() for piece in pieces]
        texts += [b""] * (self.size - len(ids))
        for i in ids:
            if model.is_byte(i):  # <0x0A>
                texts[i] = bytes.fromhex(pieces[i][3:5])
        unknown = model.unk_id()
        texts[unknown] = model.decode([unknown]).encode()
        for word, i in self.special.items():
            texts[i] = word.encode()
        self._bytes = texts

        # Decoding drops the space that the model puts before a text, or that it would remove.
        beginning = model.normalize("a")
        self._drops_space = beginning != "a" or model.normalize(" a") == beginning
        self._special_ids = set(self.special.values())

    @functools.cached_property
    def _without_prefix(self) -> Any:
        return _load_model(self._path, self._content + NO_DUMMY_PREFIX)

    def encode(self, text: str) -> list[int]:
        return list(self._model.encode(text))

    def encode_next(self, text: str) -> list[int]:
        is_legacy = read_chat_config(self._path.parent).get("legacy") is not False
        return self.encode(text) if is_legacy else list(self._without_prefix.encode(text))

    def as_library(self) -> Any:
        """Return one for a BPE that takes each character as it is, as Llama's do.

        It merges as SentencePiece does, which takes the pair of the highest score.
        """
        from tokenizers import Tokenizer as Library
        from tokenizers import decoders, models, normalizers

        model = self._model
        ids = list(range(model.get_piece_size()))
        pieces = model.id_to_piece(ids)

        # In a BPE the scores are 0, -1, -2, ...: the order of the merges.
        normal = [
            i for i in ids if not (model.is_control(i) or model.is_unknown(i) or model.is_byte(i))
        ]
        is_bpe = [model.get_score(i) for i in normal] == [float(-n) for n in range(len(normal))]
        # Each character as it is: these are ones that a normaliser would change.
        letters = "a  \ufb01 e\u0301 \uff21\u3000\u200b\t\n b "
        normalized = model.normalize(letters)
        prefix = SPACE if normalized.startswith(SPACE) else ""
        is_as_it_is = normalized == prefix + letters.replace(" ", SPACE)
        if not is_bpe or not is_as_it_is or any(map(model.is_unused, ids)):
            return None

        # A merge for each way to put a piece together from two others, in the order of the pieces.
        known = {pieces[i] for i in normal}
        merges = []
        for i in normal:
            halves = ((pieces[i][:n], pieces[i][n:]) for n in range(1, len(pieces[i])))
            merges += [(a, b) for a, b in halves if a in known and b in known]
        vocab = {piece: i for i, piece in enumerate(pieces)}
        bpe = models.BPE(
            vocab=vocab,
            merges=merges,
            unk_token=pieces[model.unk_id()],
            fuse_unk=True,
            byte_fallback=any(map(model.is_byte, ids)),
        )
        library = Library(bpe)

        # The space before a text, if the model puts one there, is removed in decoding.
        library.normalizer = normalizers.Replace(" ", SPACE)
        steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        if prefix:
            library.normalizer = normalizers.Sequence(
                [normalizers.Prepend(SPACE), library.normalizer]
            )
            steps.append(decoders.Strip(" ", 1, 0))
        library.decoder = decoders.Sequence(steps)
        return self.add_special(library)

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        # The model puts a space before a text and behind a special token.
        parts = []
        is_first = self._drops_space
        for i in ids:
            part = self._bytes[i]
            parts.append(part[1:] if is_first and part.startswith(b" ") else part)
            is_first = self._drops_space and i in self._special_ids
        return b"".join(parts)


class Llama2(SentencePiece):
    """A model of SentencePiece whose texts begin with BOS: Megatron-LM's Llama2Tokenizer.

    BOS is no part of the text that ids stand for.
    """

    name = "Llama2Tokenizer"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.bos = self._model.bos_id()
        if self.bos < 0:
            raise bad_data(
                f"{path} has no BOS, which {self.name} puts before each text; give {SentencePiece.name}"
            )
        self._bytes[self.bos] = b""

    def as_library(self) -> Any:
        from tokenizers.processors import TemplateProcessing

        if (library := super().as_library()) is not None:
            word = library.id_to_token(self.bos)
            library.post_processor = TemplateProcessing(
                single=[word, "$A"], special_tokens=[(word, self.bos)]
            )
        return library

    def encode(self, text: str) -> list[int]:
        return [self.bos, *super().encode(text)]

    def encode_inside(self, text: str) -> list[int]:
        return super().encode(text)

    def encode_next(self, text: str) -> list[int]:
        return [i for i in super().encode_next(text) if i != self.bos]


@dataclass(frozen=True)
class Encoding:
    """What a tiktoken encoding has beside its ranks, as encoding.json says it."""

    pattern: str
    special_tokens: Mapping[str, int]
    normalization: Literal["NFC", "NFD", "NFKC", "NFKD"] | None = None  # applied to the text first
    end: str | None = None  # the end of document, if it is not the first of the usual ones

    def as_json(self) -> bytes:
        stated = {name: value for name, value in asdict(self).items() if name != "end" or value}
        return json.dumps(stated, indent=1, ensure_ascii=False).encode()


def _count_from(first: int, words: Iterable[str]) -> dict[str, int]:
    return {word: i for i, word in enumerate(words, start=first)}


R50K = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
CL100K = (
    r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|"""
    r"""\s++$|\s*[\r\n]|\s+(?!\S)|\s"""
)
O200K = "|".join(
    [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ]
)
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
FILL_IN = _count_from(100257, [END_OF_TEXT, "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"])
LLAMA3_WORDS = (
    "begin_of_text",
    "end_of_text",
    "reserved_special_token_0",
    "reserved_special_token_1",
    "finetune_right_pad_id",
    "step_id",
    "start_header_id",
    "end_header_id",
    "eom_id",
    "eot_id",
    "python_tag",
    *(f"reserved_special_token_{n}" for n in range(2, 247)),
)
QWEN_WORDS = [END_OF_TEXT, "<|im_start|>", "<|im_end|>", *(f"<|extra_{n}|>" for n in range(205))]
# The published files of ranks, by SHA-256: a file says nothing of its pattern.
PUBLISHED = {
    "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930": Encoding(
        R50K, {END_OF_TEXT: 50256}
    ),
    # p50k
    "94b5ca7dff4d00767bc256fdd1b27e5b17361d7b8a5f968547f9f23eb70d2069": Encoding(
        R50K, {END_OF_TEXT: 50256}
    ),
    "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7": Encoding(
        CL100K, FILL_IN | {"<|endofprompt|>": 100276}
    ),
    "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d": Encoding(
        O200K, {END_OF_TEXT: 199999, "<|endofprompt|>": 200018}
    ),
    "82e9d31979e92ab929cd544440f129d9ecd797b69e327f80f17e1c50d5551b55": Encoding(
        LLAMA3, _count_from(128000, [f"<|{word}|>" for word in LLAMA3_WORDS])
    ),
    "b2b1b8dfb5cc5f024bafc373121c6aba3f66f9a5a0269e243470a1de16a33186": Encoding(
        LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}"), _count_from(151643, QWEN_WORDS), "NFC"
    ),
}


# Megatron's patterns, and the special tokens that it puts before the ranks.
MEGATRON_PATTERNS = {
    "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "v2": O200K.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "").replace(r"\p{N}{1,3}", r"\p{N}"),
}
MEGATRON_WORDS = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
MEGATRON_SIZE = 1 << 17


def rank_line(token: bytes, rank: int) -> bytes:
    """Return a line of a file of ranks, as tiktoken reads it."""
    return b"%s %d\n" % (base64.b64encode(token), rank)


class TikToken(Tokenizer):
    """An encoding of tiktoken: ranks of bytes, a pattern that splits a text, special tokens."""

    name = "TikTokenizer"

    def __init__(
        self, origin: str, ranks: Mapping[bytes, int], encoding: Encoding, path: Path | None = None
    ) -> None:
        import tiktoken

        self.files = {} if path is None else {RANKS: path}
        self.made = {ENCODING: encoding.as_json()}
        if path is None:
            ordered = sorted(ranks.items(), key=lambda item: item[1])
            self.made[RANKS] = b"".join(rank_line(token, rank) for token, rank in ordered)
        self.special = encoding.special_tokens
        self._normalization = encoding.normalization
        # Ids that neither a rank nor a special token has are free.
        tokens = [*ranks.items(), *((word.encode(), i) for word, i in self.special.items())]
        self.size = max(i for _, i in tokens) + 1
        self._origin = path or origin
        require_dense(self._origin, len(tokens), self.size)
        end = self.special[encoding.end] if encoding.end else None
        self.eod = find_end(self._origin, self.special, end)
        self._bytes = [b""] * self.size
        for token, i in tokens:
            self._bytes[i] = token
        try:
            library = tiktoken.Encoding(
                origin,
                pat_str=encoding.pattern,
                mergeable_ranks=dict(ranks),
                special_tokens=dict(self.special),
            )
        except Exception as error:  # a pattern that is none, a byte that is missing, an id twice
            raise bad_data(f"{self._origin}: tiktoken refuses it: {error}") from None
        self._library = library
        self._ranks = ranks
        self._pattern = encoding.pattern

    def as_library(self) -> Any:
        from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
        from tokenizers import Tokenizer as Library

        if (pattern := _without_possessive_counts(self._pattern)) is None:
            return None
        # The library writes bytes as letters.
        letters = {byte: letter for letter, byte in byte_symbols().items()}
        names = {token: "".join(letters[byte] for byte in token) for token in self._ranks}

        # A merge for each way to put a token together from two others, in the order of the ranks.
        merges = []
        for token in sorted(self._ranks, key=self._ranks.__getitem__):
            halves = ((token[:i], token[i:]) for i in range(1, len(token)))
            merges += [(names[a], names[b]) for a, b in halves if a in names and b in names]
        vocab = {name: self._ranks[token] for token, name in names.items()} | dict(self.special)
        library = Library(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
        if self._normalization:
            library.normalizer = getattr(normalizers, self._normalization)()
        # tiktoken passes over what its pattern does not match.
        split = pre_tokenizers.Split(Regex(pattern), behavior="removed", invert=True)
        library.pre_tokenizer = pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        library.decoder = decoders.ByteLevel()
        return self.add_special(library)

    def encode(self, text: str) -> list[int]:
        if self._normalization:
            text = unicodedata.normalize(self._normalization, text)
        # A long run of white space, which would overflow tiktoken's stack, is cut.
        parts = [text]
        if has_long_space(text):
            parts = re.split(rf"(\s{{{LONG_SPACE}}})", text)
        with explain_failures(f"{self._origin}: the tokenizer fails"):
            return [i for part in parts for i in self._library.encode_ordinary(part)]


def _without_possessive_counts(pattern: str) -> str | None:
    """Return an equal pattern for the library, to which {1,3}+ is a repetition, or None.

    Where an alternative of the whole pattern ends, nothing is left to give characters back to, so
    the + may go. Within a group something may follow.
    """
    # A class or an escape is one part, so that the brackets within it do not count.
    depth = 0
    parts = list[str]()
    for match in re.finditer(
        r"\\[xuUpP]\{[^}]*\}|\\.|\[(?:\\.|[^\]\\])*\]|(\{\d*,?\d*\})([+?])|.", pattern, re.DOTALL
    ):
        part = match[0]
        count = match[1]
        suffix = match[2]
        depth += (part == "(") - (part == ")")
        if count and (suffix == "+" or "," not in count):
            following = pattern[match.end() :][:1]
            if depth or suffix == "?" or following not in ("", "|"):
                return None
            part = count
        parts.append(part)
    return "".join(parts)


class WordPiece(Tokenizer):
    """BERT's WordPiece, by the rules of its own program: vocab.txt has a token a line.

    A text loses its white space, so decoding puts a space between words, but none before `.,!?` or
    beside a Chinese or Japanese character.
    """

    def __init__(self, path: Path, lower_case: bool | None = None) -> None:
        self.files = {WORDS: path}
        tokens = [line.strip() for line in read_text(path).removesuffix("\n").split("\n")]
        self._vocab = {token: i for i, token in enumerate(tokens)}
        if "[UNK]" not in self._vocab:
            raise bad_data(f"{path} is not a vocabulary of BERT: it has no [UNK]")
        # [CLS], [MASK] and the like; <s> of other programs.
        marks = {
            token: i
            for token, i in self._vocab.items()
            if re.fullmatch(r"\[[A-Z]+\]|<[a-z]+>", token)
        }
        self.special = marks | _read_added_tokens(path.parent)
        self.size = max([len(tokens), *(i + 1 for i in self.special.values())])
        require_dense(path, len(tokens), self.size)
        self.eod = find_end(path, self.special, self._vocab.get("[SEP]"))
        # Whether texts become lower case: as asked, as the folder says, or as the tokens look.
        if lower_case is None:
            words = self._vocab.keys() - marks.keys()
            has_capitals = any(word != word.lower() for word in words)
            config = read_chat_config(path.parent)
            lower_case = bool(config.get("do_lower_case", not has_capitals))
        self.name = "BertWordPieceLowerCase" if lower_case else "BertWordPieceCase"
        self._lower_case = lower_case
        self._words = tokens + [""] * (self.size - len(tokens))
        for token, i in self.special.items():
            self._words[i] = token
        self._split = functools.lru_cache(maxsize=1 << 20)(self._split_word)

    def encode(self, text: str) -> list[int]:
        text = text.translate(_CLEANED)
        # NFD takes accents apart from their letters, so that they can be left out.
        if self._lower_case:
            text = unicodedata.normalize("NFD", text.lower()).translate(_UNMARKED)
        ids: list[int] = []
        for word in text.translate(_PUNCTUATED).split():
            if len(word) > LONGEST_WORD:
                ids.append(self._vocab["[UNK]"])
            else:
                ids += self._split(word)
        return ids

    def as_library(self) -> Any:
        from tokenizers import Tokenizer as Library
        from tokenizers import decoders, models, normalizers, pre_tokenizers

        vocab = {word: i for i, word in enumerate(self._words) if word}
        library = Library(
            models.WordPiece(vocab=vocab, unk_token="[UNK]", max_input_chars_per_word=LONGEST_WORD)
        )
        library.normalizer = normalizers.BertNormalizer(
            lowercase=self._lower_case, strip_accents=self._lower_case
        )
        library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        library.decoder = decoders.WordPiece(cleanup=False)
        return self.add_special(library)

    def _split_word(self, word: str) -> tuple[int, ...]:
        """Return the longest tokens one after the other, or [UNK] if one is missing."""
        ids: list[int] = []
        begin = 0
        while begin < len(word):
            prefix = "##" if begin else ""
            # Find the longest token that the rest of the word begins with.
            for end in range(len(word), begin, -1):
                i = self._vocab.get(prefix + word[begin:end])
                if i is not None:
                    break
            else:
                return (self._vocab["[UNK]"],)
            ids.append(i)
            begin = end
        return tuple(ids)

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        text = ""
        for i in ids:
            word = self._words[i]
            if not text or not word:
                text += word
            elif word.startswith("##"):
                text += word[2:]
            elif word[0] in ".,!?" or _is_wide(text[-1]) or _is_wide(word[0]):
                text += word
            else:
                text += " " + word
        return text.encode()


class _Characters(dict[int, str]):
    """A table for `str.translate` that is filled as characters come."""

    def __init__(self, rule: Callable[[str], str]) -> None:
        self._rule = rule

    def __missing__(self, key: int) -> str:
        self[key] = value = self._rule(chr(key))
        return value


def _clean(character: str) -> str:
    """Return a space for white space, nothing for control characters, spaces around Chinese."""
    category = unicodedata.category(character)
    if character in "\t\n\r" or category == "Zs":
        return " "
    if character == "\ufffd" or category in ("Cc", "Cf"):
        return ""
    return f" {character} " if CHINESE.match(character) else character


def _punctuate(character: str) -> str:
    """Return punctuation with spaces around it; all symbols of ASCII count as such, as in BERT."""
    if character in string.punctuation or unicodedata.category(character).startswith("P"):
        return f" {character} "
    return character


def _unmark(character: str) -> str:
    return "" if unicodedata.category(character) == "Mn" else character


_CLEANED = _Characters(_clean)
_UNMARKED = _Characters(_unmark)
_PUNCTUATED = _Characters(_punctuate)


def _is_wide(character: str) -> bool:
    """Return whether this is a character of a language that puts no space between words."""
    # Hangul syllables are wide too, but Korean puts spaces between words.
    return unicodedata.east_asian_width(character) in "WF" and not "\uac00" <= character <= "\ud7a3"


def load_ranks(path: Path) -> TikToken:
    """Return the encoding of a file of ranks: encoding.json beside it, or a published one."""
    ranks: dict[bytes, int] = {}
    content = read_bytes(path)
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            token, rank = line.split() if line else (b"", -1)
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError:
            raise bad_data(
                f"{path}:{number} is not a token in base64 and its rank, as tiktoken writes them"
            ) from None
    ranks.pop(b"", None)  # of blank lines

    # The pattern and the special tokens, which the file lacks.
    beside = path.with_name(ENCODING)
    if beside.is_file():
        encoding: Encoding | None = _read_encoding(beside)
    else:
        encoding = PUBLISHED.get(hashlib.sha256(content).hexdigest())
    if encoding is None:
        raise bad_data(
            f"{path} has ranks, but no pattern, and is none of the published files; write it beside them, {beside}: "
            '{"pattern": "REGULAR EXPRESSION", "special_tokens": {"<|endoftext|>": ID}}'
        )
    if not beside.is_file() and (added := _read_added_tokens(path.parent)):
        encoding = replace(encoding, special_tokens={**encoding.special_tokens, **added})
    return TikToken(path.name, ranks, encoding, path)


def _read_encoding(path: Path) -> Encoding:
    content = read_json(path)
    try:
        tokens = {str(word): int(i) for word, i in content["special_tokens"].items()}
        encoding = Encoding(
            str(content["pattern"]), tokens, content.get("normalization"), content.get("end")
        )
    except (AttributeError, KeyError, TypeError, ValueError):
        raise bad_data(
            f"{path} is damaged: it needs a pattern, and special_tokens with their ids"
        ) from None
    is_form = encoding.normalization in (None, "NFC", "NFD", "NFKC", "NFKD")
    if not is_form or encoding.end not in (None, *tokens) or min(tokens.values(), default=0) < 0:
        raise bad_data(
            f"{path} is damaged: normalization {encoding.normalization!r}, special tokens {tokens}"
        )
    return encoding


def load_rank_list(path: Path, t: TokenizerFlags) -> TikToken:
    """Return the encoding of Megatron's JSON list of ranks, which follow the special tokens."""
    listed = read_json(path)
    first = t.tiktoken_num_special_tokens
    try:
        tokens = [base64.b64decode(entry["token_bytes"], validate=True) for entry in listed]
        is_ordered = [entry["rank"] for entry in listed] == list(range(len(tokens)))
    except (KeyError, TypeError, ValueError):
        tokens = []
        is_ordered = False
    count = len(tokens)
    has_bytes = tokens[:256] == [bytes([n]) for n in range(256)]
    if not is_ordered or not has_bytes or len(set(tokens)) < count:
        form = '[{"rank": 0, "token_bytes": "AA==", "token_str": ...}, ...], the 256 bytes first'
        raise bad_data(f"{path} is not a list of ranks as Megatron's TikTokenizer has it: {form}")
    # The special tokens, and how many ids there are in all.
    words = list(t.tiktoken_special_tokens or MEGATRON_WORDS)
    if missing := [word for word in MEGATRON_WORDS[:3] if word not in words]:
        raise SettingsError(
            f"{{tiktoken_special_tokens}} lacks {' '.join(missing)}, which Megatron needs"
        )
    if len(set(words)) < len(words) or len(words) > first:
        raise SettingsError(
            f"{{tiktoken_special_tokens}}: {len(words)} words; each may be given once, and there are {first} "
            "({tiktoken_num_special_tokens})"
        )
    size = t.vocab_size or min(MEGATRON_SIZE, first + count)
    if not first + 256 <= size <= first + count:
        most = f"{first} special tokens and {count} ranks"
        raise SettingsError(
            f"{{vocab_size={size}}}, but {path} gives {first + 256} to {first + count} ids: {most}"
        )
    # Megatron's names for the special tokens that have none of their own.
    words += [f"<SPECIAL_{n}>" for n in range(len(words), first)]
    special = _count_from(0, words)
    ranks = {token: first + n for n, token in enumerate(tokens[: size - first])}
    encoding = Encoding(MEGATRON_PATTERNS[t.tiktoken_pattern], special, end="</s>")
    return TikToken(str(path), ranks, encoding)


def is_encoding_name(name: str) -> bool:
    """Return whether tiktoken knows an encoding of this name; gpt2 is the Hugging Face Hub's."""
    if not re.fullmatch(r"\w+", name, re.ASCII) or name == "gpt2":
        return False
    import tiktoken

    return name in tiktoken.list_encoding_names()


def load_encoding(name: str) -> TikToken:
    """Return tiktoken's encoding of this name, from its cache or downloaded."""
    import tiktoken

    try:
        encoding = tiktoken.get_encoding(name)
    except (OSError, ValueError) as error:  # no network, no space, a damaged download
        cause: BaseException = error
        # requests and urllib3 wrap the reason in lines of their own
        while cause.__context__ is not None:
            cause = cause.__context__
        raise SettingsError(
            f"{{tokenizer={name}}}: tiktoken does not have it in its cache and cannot download it "
            f"({first_line(cause)}); set TIKTOKEN_CACHE_DIR to a cache that has it, or give the file "
            f"{name}.tiktoken",
            UNAVAILABLE,
        ) from None
    return TikToken(
        name, encoding._mergeable_ranks, Encoding(encoding._pat_str, encoding._special_tokens)
    )


def is_model_file(path: Path) -> bool:
    """Whether a file *.model, a name that others use too, is of SentencePiece or tiktoken."""
    try:
        with open(path, "rb") as file:
            begin = file.read(1000)
    except OSError:
        return True  # said where it is read
    # SentencePiece's first field is a piece, whose first field is its text; both have the tag 0x0A.
    if begin[:1] == begin[2:3] == b"\n":
        return True
    return re.match(rb"[A-Za-z0-9+/=]+ \d+\s", begin) is not None


def load_model_file(path: Path) -> SentencePiece | TikToken:
    """Return the tokenizer of a file *.model: a model of SentencePiece, or ranks of tiktoken."""
    is_text = all(33 <= byte <= 126 or byte in b" \r\n" for byte in read_bytes(path)[:100])
    return load_ranks(path) if is_text else SentencePiece(path)


def _load_model(path: Path, content: bytes) -> Any:
    try:
        from sentencepiece import SentencePieceProcessor
    except ImportError:
        raise UserError(
            f"{path} needs the package sentencepiece: pip install 'meshwright[sentencepiece]'"
        ) from None
    try:
        model = SentencePieceProcessor(model_proto=content)
        if content and 0 <= model.unk_id() < model.get_piece_size():
            return model
    except RuntimeError:
        pass
    raise bad_data(f"{path} is not a model of SentencePiece")


def find_end(origin: object, special: Mapping[str, int], own: int | None = None) -> int:
    """Return the end of document: the vocabulary's own, a usual one, or that of the settings."""
    folder = origin.parent if isinstance(origin, Path) else None
    names = [*EOD_NAMES, *([read_eos_token(folder)] if folder else [])]
    ids = [special[name] for name in names if name in special]
    if own is None and not ids:
        usual = ", ".join(EOD_NAMES)
        raise bad_data(
            f"{origin} has none of the usual end-of-document tokens: {usual}; nor does {CHAT_CONFIG} name one"
        )
    return ids[0] if own is None else own


def require_dense(origin: object, tokens: int, size: int) -> None:
    # With so many free ids, the table of all ids would be too large.
    if size > 4 * tokens + 1000:
        raise bad_data(f"{origin} has {tokens:,} tokens, but an id of {size - 1:,}")


def _read_added_tokens(folder: Path) -> dict[str, int]:
    """Return the tokens that a Hugging Face folder adds to its vocabulary, with their ids."""
    path = folder / ADDED_TOKENS
    listed = read_json(path) if path.is_file() else {}
    decoder = read_chat_config(folder).get("added_tokens_decoder") or {}
    try:
        return dict(listed) | {token["content"]: int(i) for i, token in decoder.items()}
    except (AttributeError, KeyError, TypeError, ValueError):
        raise bad_data(
            f"the added tokens in {folder} ({ADDED_TOKENS}, {CHAT_CONFIG}) are damaged"
        ) from None


def read_chat_config(folder: Path) -> dict[str, Any]:
    """Return a folder's tokenizer_config.json, or nothing if it has none."""
    path = folder / CHAT_CONFIG
    config = read_json(path) if path.is_file() else {}
    return config if isinstance(config, dict) else {}


def read_eos_token(folder: Path) -> str:
    """Return the end of a text that a folder's tokenizer_config.json names, or ""."""
    token = read_chat_config(folder).get("eos_token")
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else ""


def byte_symbols() -> dict[str, int]:
    """Return the byte of each printable character in GPT-2's files, in the order of their ids."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    symbols = {chr(byte): byte for byte in printable}
    # The others get the characters from 256 on.
    others = [byte for byte in range(256) if byte not in printable]
    for n, byte in enumerate(others):
        symbols[chr(256 + n)] = byte
    return symbols


def has_long_space(text: str) -> bool:
    """Return whether a run of white space may overflow tiktoken's stack (at a million)."""
    if len(text) <= LONG_SPACE:
        return False
    return any(len(run[0]) > LONG_SPACE for run in re.finditer(r"\s+", text))


@contextlib.contextmanager
def explain_failures(what: str) -> Iterator[None]:
    """Raise UserError where a library that encodes or decodes fails.

    The one in Rust raises plain Exception, and for what its authors held impossible a
    PanicException, which is a BaseException.
    """
    try:
        yield
    except BaseException as error:
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        raise bad_data(f"{what}: {error}; name another one") from None


def read_text(path: Path) -> str:
    try:
        return read_bytes(path).decode().replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise bad_data(f"{path} cannot be read: {error}") from None


def read_bytes(path: Path) -> bytes:
    """Return a file of a vocabulary; of a run's folder, none that a link leads out of."""
    folder = path.parent if (path.parent / "meta.json").is_file() else None
    try:
        return read_small(path, FILE_LIMIT, folder)
    except OSError as error:
        hint = near_path(str(path)) if isinstance(error, FileNotFoundError) else ""
        raise bad_data(f"{path} cannot be read: {error.strerror}{hint}") from None


def read_json(path: Path) -> Any:
    text = read_text(path)
    if (brackets := text.count("[") + text.count("{")) > MOST_BRACKETS:
        raise bad_data(
            f"{path} has {brackets:,} lists and objects; at most {MOST_BRACKETS:,} are read"
        )
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise bad_data(f"{path} is not JSON: {error}") from None
