"""`meshwright data inspect`: the contents of token files, counted in constant memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.base.errors import BAD_DATA, bad_data
from meshwright.base.files import writing
from meshwright.base.progress import progress_bar
from meshwright.config.problem import SettingsError
from meshwright.data.files.indexed import FileColumn, Index, Indexed, Ints
from meshwright.data.tokenizers import Tokenizer

# Lengths below this are counted in a table; longer documents fill a corpus, so they are few.
SHORT = 1 << 22
QUANTILES = (0.0, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)


def document_lengths(indexed: Indexed) -> tuple[Ints, Ints]:
    """Return the lengths that occur, ascending, and the number of documents of each."""
    documents = len(indexed.doc_idx) - 1
    table = np.zeros(SHORT, np.int64)  # by length
    long: list[Ints] = [np.zeros(0, np.int64)]
    previous = 0
    with open(f"{indexed.prefix}.idx", "rb") as idx:
        for ends in Index(indexed.prefix, idx).document_ends():
            if not len(ends):
                continue
            lengths = np.diff(ends, prepend=previous)
            is_short = lengths < SHORT
            table += np.bincount(lengths[is_short], minlength=SHORT)
            long.append(lengths[~is_short])
            previous = int(ends[-1])
    long_lengths, long_counts = np.unique(np.concatenate(long), return_counts=True)
    # The blocks of ends leave out the documents without a token.
    table[0] = documents - table.sum() - long_counts.sum()
    short_lengths = np.flatnonzero(table)
    lengths = np.concatenate([short_lengths, long_lengths])
    return lengths, np.concatenate([table[short_lengths], long_counts])


def describe_lengths(lengths: Ints, counts: Ints) -> dict[str, Any]:
    """Return the mean, quantiles, which are lengths that occur, and a histogram by powers of two.

    Its rows are (first, last, documents) for lengths 0, 1, 2-3, 4-7 and so on.
    """
    if not len(lengths):
        return {
            "mean_length": 0.0,
            "quantiles": {f"{share:g}": 0 for share in QUANTILES},
            "histogram": [],
        }
    quantiles = np.quantile(lengths, QUANTILES, weights=counts, method="inverted_cdf")
    named = zip(QUANTILES, quantiles.astype(np.int64).tolist(), strict=True)
    # The exponent of frexp is the number of bits: 1 for 1, 2 for 2-3, 3 for 4-7.
    bits = np.frexp(lengths)[1]
    table = np.bincount(bits, weights=counts).astype(np.int64).tolist()
    rows = []
    for n in range(int(bits[0]), len(table)):
        beyond = 1 << n
        rows.append((beyond >> 1, beyond - 1, table[n]))
    return {
        "mean_length": float(np.average(lengths, weights=counts)),
        "quantiles": {f"{share:g}": length for share, length in named},
        "histogram": rows,
    }


def token_counts(indexed: Indexed) -> Ints:
    """Return how often each id occurs."""
    counts = np.zeros(0, np.int64)
    prefix = indexed.prefix
    with (
        open(f"{prefix}.bin", "rb") as file,
        progress_bar("counting tokens", indexed.tokens.nbytes) as advance,
    ):
        for _, ids in FileColumn(file, indexed.dtype, len(indexed.tokens)).blocks():
            low = int(ids.min())
            high = int(ids.max())
            # The table of counts has a place for each id up to the highest.
            if low < 0 or high >= 1 << 26:
                wrong = f"{prefix}.bin has id {low if low < 0 else high}, which no vocabulary has"
                raise bad_data(f"{wrong}; `meshwright data verify {prefix}` says where")
            block_counts = np.bincount(ids, minlength=len(counts))
            block_counts[: len(counts)] += counts
            counts = block_counts
            advance(ids.nbytes)
    return counts


def summary(indexed: Indexed, top: int, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Return all facts about a pair of files, as JSON can hold them."""
    lengths, documents_of = document_lengths(indexed)
    out: dict[str, Any] = dict(
        prefix=indexed.prefix,
        format=indexed.format,
        dtype=indexed.dtype.name,
        documents=len(indexed.doc_idx) - 1,
        sequences=len(indexed),
        tokens=len(indexed.tokens),
        bytes=indexed.tokens.nbytes,
        **describe_lengths(lengths, documents_of),
    )
    if not top:
        return out

    counts = token_counts(indexed)
    most_frequent = []
    for i in np.argsort(-counts, kind="stable")[:top].tolist():
        if not counts[i]:
            break  # fewer tokens than `top` occur at all
        token: dict[str, Any] = {"id": i, "count": int(counts[i])}
        if tokenizer:
            token["text"] = decode_ids(tokenizer, [i])
        most_frequent.append(token)
    out["distinct_tokens"] = int(np.count_nonzero(counts))
    out["most_frequent"] = most_frequent
    return out


def decode_ids(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Return the text of ids, which must be the tokenizer's."""
    for i in ids:
        if not 0 <= i < tokenizer.size:
            last = tokenizer.size - 1
            raise bad_data(
                f"id {i} is none of the tokenizer's 0 ... {last}; the data was made with another one"
            )
    return tokenizer.decode(ids)


def format_summary(facts: dict[str, Any]) -> list[str]:
    """Return the lines that `data inspect` prints."""
    documents = facts["documents"]
    tokens = facts["tokens"]

    # What the files hold.
    out = [
        f"{facts['prefix']}: {documents:,} documents, {facts['sequences']:,} sequences, {tokens:,} "
        f"tokens ({facts['dtype']}, {facts['bytes']:,} bytes, {facts['format']} format)"
    ]
    if "tokenizer" in facts:
        out.append(f"tokenizer: {facts['tokenizer']}, in {facts['tokenizer_folder']}")

    # The lengths of documents, with bars of up to 40 characters.
    quantiles = [f"{float(share):.0%} {value:,}" for share, value in facts["quantiles"].items()]
    out += [
        "",
        f"document length in tokens: mean {facts['mean_length']:,.1f}; percentiles:",
        "  " + "  ".join(quantiles),
        "",
    ]
    bars = facts["histogram"]
    most = max((count for *_, count in bars), default=1)
    for first, last, count in bars:
        length = f"{first:,}" if first == last else f"{first:,}-{last:,}"
        share = count / max(documents, 1)
        bar = "#" * round(40 * count / most)
        out.append(f"  {length:>21} {count:>14,} {share:>7.2%} {bar}")

    # The most frequent tokens, if they were counted.
    if "most_frequent" in facts:
        out += ["", f"most frequent of {facts['distinct_tokens']:,} distinct tokens"]
        for token in facts["most_frequent"]:
            count = token["count"]
            share = count / max(tokens, 1)
            line = f"  {token['id']:>8} {count:>16,} {share:>7.2%}"
            if "text" in token:
                line += f"  {token['text']!r}"
            out.append(line)
    return out


def draw_histogram(facts: dict[str, Any], path: Path) -> None:
    """Draw the histogram; the name's ending chooses the format."""
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise SettingsError(f"{{picture={path}}}: the name must end with .png, .svg or .pdf")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.add_subplot()
    bars = facts["histogram"]
    places = range(len(bars))
    axes.bar(places, [count for *_, count in bars], width=0.9)
    names = [f"{first:,}" if first == last else f"{first:,}-\n{last:,}" for first, last, _ in bars]
    axes.set_xticks(places, names, fontsize=7)
    title = Path(facts["prefix"]).name
    axes.set(xlabel="tokens of a document", ylabel="documents", title=title)
    with writing(path, "--picture"):
        figure.savefig(path)


def describe_document(indexed: Indexed, number: int, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Return a document's place, its ids, and its text if there is a tokenizer."""
    documents = len(indexed.doc_idx) - 1
    if number >= documents:
        have = f"{documents:,} documents, 0 to {documents - 1}"
        raise SettingsError(f"{{document={number}}}: {indexed.prefix} has {have}", BAD_DATA)
    first, end = indexed.doc_idx[number : number + 2].tolist()
    ids = indexed.document(number).tolist()
    out = dict(
        document=number,
        first_sequence=first,
        sequences=end - first,
        first_token=indexed.tokens_of(0, first),
        tokens=len(ids),
    )
    return out | ({"text": decode_ids(tokenizer, ids)} if tokenizer else {"ids": ids})
