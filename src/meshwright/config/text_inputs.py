"""The flags of `preprocess`, and those by which other commands find their text too."""

from __future__ import annotations

import codecs
import dataclasses
from dataclasses import dataclass
from typing import Literal

from meshwright.config.fields import flag, read_forms, spelling
from meshwright.config.grammar import InputShard
from meshwright.config.problem import Problem, missing, stated
from meshwright.config.schema import TokenizerFlags

SEPARATOR = "<|endoftext|>"


def text_codec(name: str) -> str:
    """Return Python's name of an encoding of text, "" for another word."""
    try:
        # raises for codecs of other things, such as hex and punycode
        b"a".decode(name, "backslashreplace")
        return codecs.lookup(name).name
    except (LookupError, ValueError):
        return ""


@dataclass(frozen=True, kw_only=True)
class TextInputs:
    """Text to read."""

    input: list[str] = flag(
        [],
        "text, also compressed: folders, plain files, HTML, JSON lines, tables, archives; - for standard input; "
        "hf://org/name[/config][:split], a data set of the Hugging Face Hub; s3://bucket/folder, also a pattern",
        value="PATH",
        docs="data evaluation storage",
    )
    include: list[str] = flag(
        [],
        "patterns of the files to read in folders and archives, whatever their suffix",
        value="NAME",
    )
    exclude: list[str] = flag([], "patterns of files and folders to leave out", value="NAME")
    json_keys: list[str] = flag(
        ["text"],
        "keys or columns whose text is read from JSON lines and tables",
        "--json-key",
        value="NAME",
        docs="data",
    )
    table: str | None = flag(
        None, "table of an SQLite database (none: its only one)", value="NAME", docs="data"
    )
    document_separator: str = flag(
        SEPARATOR, "line between the documents of a plain text; '' for a blank line", value="WORDS"
    )
    encoding: str = flag(
        "",
        "encoding of text that is not UTF-8, such as gb18030, big5, shift_jis or latin-1",
        value="WORDS",
        docs="data",
    )
    on_error: Literal["stop", "skip", "replace"] = flag(
        "stop",
        "on a bad line: stop; skip and count it; or put U+FFFD for bytes that are not UTF-8 and stop at other mistakes",
        docs="data",
    )

    def words(self) -> list[str]:
        """Return these flags as words of a command, without those that have their defaults."""
        out = []
        for field in dataclasses.fields(TextInputs):
            value = getattr(self, field.name)
            if value == getattr(TextInputs(), field.name):
                continue
            name = spelling(field.name)
            if isinstance(value, str):
                out.append(f"{name}={value}")  # only after `=` may a value begin with a hyphen
            else:
                out += [name, *value]
        return out

    def input_problems(self) -> list[Problem]:
        """Return what is wrong with these settings."""
        out = []
        if not self.input:
            out.append(missing("input", "files or folders of text"))
        if not self.json_keys:
            out.append(Problem(("json_keys",), "{json_keys} names no key; give at least one"))
        if set("\r\n") & set(self.document_separator):
            out.append(
                Problem(("document_separator",), "{document_separator} must be a single line")
            )
        if self.encoding and not text_codec(self.encoding):
            text = f"{stated(self, 'encoding')} is not known; name one such as gb18030 or latin-1"
            out.append(Problem(("encoding",), text))
        return out


@dataclass(frozen=True, kw_only=True)
class Preprocess(TextInputs):
    """Text to .bin/.idx."""

    output_prefix: str | None = flag(
        None,
        "prefix of the output files <prefix>_<key>_document.bin and .idx",
        value="PREFIX",
        docs="data",
    )
    document_length: int | None = flag(
        None,
        "cut longer documents, at ends of paragraphs or lines, into documents of at most so many characters "
        "(none: keep them whole)",
        bound=">0",
        docs="data tutorial",
    )
    shard: InputShard | None = flag(
        None,
        "I/N: write the I-th of N parts of the input, as <prefix>-I-of-N, one on each machine; `data merge` joins them",
        value="FORM",
        docs="data",
    )
    append_eod: bool = flag(False, "append the end-of-document token to each document", docs="data")
    dataset_impl: Literal["mmap", "lazy", "cached"] = flag(
        "mmap", "output format; lazy and cached are written as mmap"
    )
    overwrite: bool = flag(
        False, "replace token files that were made from other inputs or settings"
    )
    workers: int | None = flag(
        None, "worker processes (none: one per core)", bound=">0", docs="data"
    )
    log_interval: int = flag(1000, "documents between progress lines", bound=">0", docs="tutorial")
    split_sentences: bool = flag(
        False,
        "split documents into sentences and write <prefix>_<key>_sentence.bin and .idx",
        docs="data",
    )
    sentence_splitter: Literal["rules", "punkt"] = flag(
        "rules",
        "with --split-sentences: rules need no download; punkt is NLTK's model, as in Megatron",
        docs="data",
    )
    keep_newlines: bool = flag(
        False, "with --split-sentences, keep the white space between sentences"
    )
    lang: str = flag("english", "language for --split-sentences", value="FORM", docs="data")

    def __post_init__(self) -> None:
        read_forms(self)


@dataclass(frozen=True)
class PreprocessConfig:
    """Settings of `meshwright preprocess`."""

    preprocess: Preprocess = Preprocess()
    tokenizer: TokenizerFlags = TokenizerFlags()

    def problems(self) -> list[Problem]:
        p = self.preprocess
        out = p.input_problems()
        if not p.output_prefix:
            out.append(missing("output_prefix", "where to write"))
        # The name of a folder alone would give files whose names begin with "_".
        elif p.output_prefix.endswith("/"):
            text = f"{stated(p, 'output_prefix')} ends in /; give the beginning of the files' names too"
            out.append(Problem(("output_prefix",), text))
        # Texts of several keys belong together by their numbers, which cutting one would shift.
        if p.document_length is not None and len(set(p.json_keys)) != 1:
            out.append(
                Problem(("document_length",), "{document_length} needs a single one of {json_keys}")
            )
        # What follows is about sentences alone.
        if p.split_sentences:
            return out
        needing = {
            "keep_newlines": p.keep_newlines,
            "lang": p.lang != type(p).lang,
            "sentence_splitter": p.sentence_splitter != type(p).sentence_splitter,
        }
        needs = "needs {split_sentences=True}"
        return out + [
            Problem((name,), f"{{{name}}} {needs}")
            for name, is_given in needing.items()
            if is_given
        ]
