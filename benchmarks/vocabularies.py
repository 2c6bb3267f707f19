"""Compare the ids of vocabularies with those of the programs that they come from.

    python benchmarks/vocabularies.py TEXT FILE_OR_NAME ... [--bert FOLDER]

TEXT has a JSON object with "text" per line. A FILE is a model of SentencePiece, ranks of tiktoken
or a vocab.txt; FOLDER holds Google's BERT (tokenization.py, which imports `six` and `absl`). Beside
the text, 10,000 random strings of all scripts are compared.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import random
import sys
import time
import types
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from meshwright.config.schema import TokenizerFlags
from meshwright.data.tokenizers import build_tokenizer
from meshwright.data.vocabularies import TikToken, WordPiece

WORDS = (
    "<s> </s> <|endoftext|> [SEP] ##a \u2581 <0x0A> don't e\u0301 \ufb01 \uff12\uff13 the".split()
)
SPACES = " \t\n\r\u00a0\u3000\u200b\u2028\x0b\x0c\x85"
RANGES = (
    (32, 127),
    (0xA0, 0x600),
    (0x4E00, 0x9FFF),
    (0x1F300, 0x1F700),
    (0, 0xD800),
    (0xE000, 0x110000),
)


def random_texts(count: int) -> Iterator[str]:
    """Yield strings of up to 59 words and characters from some of the ranges of Unicode."""
    draw = random.Random(1)
    kinds: list[Callable[[], str]] = [lambda: draw.choice(WORDS), lambda: draw.choice(SPACES)]
    kinds += [lambda first=first, end=end: chr(draw.randrange(first, end)) for first, end in RANGES]
    for _ in range(count):
        some = draw.sample(kinds, draw.randrange(1, len(kinds) + 1))
        yield "".join(draw.choice(some)() for _ in range(draw.randrange(60)))


def original(
    name: str, ours: Any, bert: Path | None
) -> tuple[Callable[[str], Any], Callable[[Any], str] | None]:
    """Return the original's encoder and, if decoding brings back a text, its decoder."""
    if isinstance(ours, TikToken):
        import tiktoken

        if not Path(name).exists():
            library, form = tiktoken.get_encoding(name), None
        else:
            settings = json.loads(ours.made["encoding.json"])
            ranks, form = tiktoken.load.load_tiktoken_bpe(name), settings["normalization"]
            library = tiktoken.Encoding(
                name, pat_str=settings["pattern"], mergeable_ranks=ranks, special_tokens={}
            )
        prepare = (lambda text: unicodedata.normalize(form, text)) if form else str
        return lambda text: library.encode_ordinary(prepare(text)), library.decode
    if isinstance(ours, WordPiece):
        if bert is None:
            raise SystemExit(f"{name}: give --bert FOLDER")
        google = load_bert(bert).FullTokenizer(
            name, do_lower_case=ours.name == "BertWordPieceLowerCase"
        )
        return lambda text: google.convert_tokens_to_ids(google.tokenize(text)), None
    import sentencepiece

    model = sentencepiece.SentencePieceProcessor(model_file=name)
    return model.encode, model.decode


@functools.cache
def load_bert(folder: Path) -> Any:
    """Import Google's tokenization.py, which opens the file by TensorFlow."""
    files = types.SimpleNamespace(GFile=lambda path, mode: open(path, mode, encoding="utf-8"))
    stub = types.SimpleNamespace(gfile=files)
    for name in ("tensorflow", "tensorflow.compat"):
        sys.modules[name] = types.ModuleType(name)
    vars(sys.modules["tensorflow.compat"])["v1"] = sys.modules["tensorflow.compat.v1"] = stub  # type: ignore[assignment]
    spec = importlib.util.spec_from_file_location("tokenization", folder / "tokenization.py")
    assert spec and spec.loader
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    vars(program)["FLAGS"] = types.SimpleNamespace(preserve_unused_tokens=False)
    return program


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path)
    parser.add_argument("names", nargs="+")
    parser.add_argument("--bert", type=Path)
    options = parser.parse_args()
    documents = [
        json.loads(line)["text"] for line in options.text.read_text(encoding="utf-8").splitlines()
    ]
    size = sum(len(text.encode()) for text in documents)
    print(f"{len(documents):,} documents, {size:,} bytes; 10,000 random strings")
    texts, failed = [*documents, *random_texts(10_000)], False
    for name in options.names:
        ours = build_tokenizer(TokenizerFlags(tokenizer=name))
        encode, decode = original(name, ours, options.bert)
        ids = wrong_ids = wrong_texts = 0
        start = time.perf_counter()
        for text in texts:
            mine, theirs = ours.encode(text), list(encode(text))
            ids += len(mine)
            wrong_ids += mine != theirs
            wrong_texts += decode is not None and ours.decode(mine) != decode(theirs)
        failed |= bool(wrong_ids or wrong_texts)
        print(
            f"{name}: {ours.name}, {ours.size:,} ids; {ids:,} tokens, texts with other ids {wrong_ids}, "
            f"decoded otherwise {wrong_texts if decode else '-'}; {time.perf_counter() - start:.0f} s",
            flush=True,
        )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
