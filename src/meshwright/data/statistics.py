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
    table, long, previous = np.zeros(SHORT, np.int64), list[Ints](), 0
    with open(f"{indexed.prefix}.idx", "rb") as idx:
        for ends in Index(indexed.prefix, idx).document_ends():
            lengths = np.diff(ends, prepend=previous)
            table += np.bincount(lengths[lengths < SHORT], minlength=SHORT)
            long.append(lengths[lengths >= SHORT])
            previous = int(ends[-1]) if len(ends) else previous
    table[0] = documents - table.sum() - sum(map(len, long))
    values = np.flatnonzero(table)
    beyond, counts = np.unique(np.concatenate([np.zeros(0, np.int64), *long]), return_counts=True)
    return np.concatenate([values, beyond]), np.concatenate([table[values], counts])


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
    quantiles = np.quantile(lengths, QUANTILES, weights=counts, method="inverted_cdf").astype(
        np.int64
    )
    bits = np.frexp(lengths)[1]
    table = np.bincount(bits, weights=counts).astype(np.int64).tolist()
    rows = [((1 << n) >> 1, (1 << n) - 1, table[n]) for n in range(int(bits[0]), len(table))]
    named = {
        f"{share:g}": length for share, length in zip(QUANTILES, quantiles.tolist(), strict=True)
    }
    return {
        "mean_length": float(np.average(lengths, weights=counts)),
        "quantiles": named,
        "histogram": rows,
    }


def token_counts(indexed: Indexed) -> Ints:
    """Return how often each id occurs."""
    counts, prefix = np.zeros(0, np.int64), indexed.prefix
    with (
        open(f"{prefix}.bin", "rb") as file,
        progress_bar("counting tokens", indexed.tokens.nbytes) as advance,
    ):
        for _, ids in FileColumn(file, indexed.dtype, len(indexed.tokens)).blocks():
            low, high = int(ids.min()), int(ids.max())
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
    out: dict[str, Any] = dict(
        prefix=indexed.prefix, dtype=indexed.dtype.name, documents=len(indexed.doc_idx) - 1
    )
    out |= dict(sequences=len(indexed), tokens=len(indexed.tokens), bytes=indexed.tokens.nbytes)
    out |= describe_lengths(*document_lengths(indexed))
    if top:
        counts = token_counts(indexed)
        order = np.argsort(-counts, kind="stable")[:top]
        out["distinct_tokens"] = int(np.count_nonzero(counts))
        out["most_frequent"] = [
            {
                "id": int(i),
                "count": int(counts[i]),
                **({"text": decode_ids(tokenizer, [int(i)])} if tokenizer else {}),
            }
            for i in order
            if counts[i]
        ]
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
    out = [
        f"{facts['prefix']}: {facts['documents']:,} documents, {facts['sequences']:,} sequences, {facts['tokens']:,} "
        f"tokens ({facts['dtype']}, {facts['bytes']:,} bytes)",
        *(
            [f"tokenizer: {facts['tokenizer']}, in {facts['tokenizer_folder']}"]
            if "tokenizer" in facts
            else []
        ),
        "",
        f"document length in tokens: mean {facts['mean_length']:,.1f}; percentiles:",
        "  "
        + "  ".join(f"{float(share):.0%} {value:,}" for share, value in facts["quantiles"].items()),
        "",
    ]
    most, documents = (
        max((count for *_, count in facts["histogram"]), default=1),
        max(facts["documents"], 1),
    )
    for first, last, count in facts["histogram"]:
        length = f"{first:,}" if first == last else f"{first:,}-{last:,}"
        out.append(
            f"  {length:>21} {count:>14,} {count / documents:>7.2%} {'#' * round(40 * count / most)}"
        )
    if "most_frequent" in facts:
        out += ["", f"most frequent of {facts['distinct_tokens']:,} distinct tokens"]
        for token in facts["most_frequent"]:
            text, share = (
                f"  {token['text']!r}" if "text" in token else "",
                token["count"] / max(facts["tokens"], 1),
            )
            out.append(f"  {token['id']:>8} {token['count']:>16,} {share:>7.2%}{text}")
    return out


def draw_histogram(facts: dict[str, Any], path: Path) -> None:
    """Draw the histogram; the name's ending chooses the format."""
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise SettingsError(f"{{picture={path}}}: the name must end with .png, .svg or .pdf")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.add_subplot()
    bars = facts["histogram"]
    axes.bar(range(len(bars)), [count for *_, count in bars], width=0.9)
    names = [f"{first:,}" if first == last else f"{first:,}-\n{last:,}" for first, last, _ in bars]
    axes.set_xticks(range(len(bars)), names, fontsize=7)
    axes.set(xlabel="tokens of a document", ylabel="documents", title=Path(facts["prefix"]).name)
    with writing(path, "--picture"):
        figure.savefig(path)


def describe_document(indexed: Indexed, number: int, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Return a document's place, its ids, and its text if there is a tokenizer."""
    documents = len(indexed.doc_idx) - 1
    if number >= documents:
        have = f"{documents:,} documents, 0 to {documents - 1}"
        raise SettingsError(f"{{document={number}}}: {indexed.prefix} has {have}", BAD_DATA)
    first, end = (int(border) for border in indexed.doc_idx[number : number + 2])
    start, ids = indexed.tokens_of(0, first), indexed.document(number).tolist()
    out = dict(
        document=number,
        first_sequence=first,
        sequences=end - first,
        first_token=start,
        tokens=len(ids),
    )
    return {**out, "text": decode_ids(tokenizer, ids)} if tokenizer else {**out, "ids": ids}
