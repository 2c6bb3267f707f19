"""Read data sets of the Hugging Face Hub by name, as a stream, with its `datasets` library.

Nothing is downloaded as a whole. Without a network the library reads what an earlier
`datasets.load_dataset` left in its cache.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from meshwright.base import hub
from meshwright.base.console import notice
from meshwright.base.errors import IO, UNAVAILABLE, UserError, bad_data, first_line
from meshwright.data.text.rows import Row, refuse_columns, require_columns

SCHEME = "hf://"
IN_CACHE = "cache"
ADDRESS = re.compile(
    r"hf://(?:datasets/)?(?P<name>[\w.-]+/[\w.-]+)(?:/(?P<config>[^\s:\[]+))?"
    r"(?::(?P<split>[\w.-]+))?(?:\[:(?P<rows>\d+)\])?"
)


class HubSet(NamedTuple):
    """A split of a data set, and how many of its rows are read; None: all."""

    name: str
    config: str | None
    split: str
    rows: int | None


def parse(address: str) -> HubSet:
    match = ADDRESS.fullmatch(address)
    if not match:
        form = "hf://org/name[/config][:split], as hf://roneneldan/TinyStories:validation"
        raise UserError(
            f"--input {address} is not the name of a data set; write {form}, and [:1000] for the first rows"
        )
    rows = int(match["rows"]) if match["rows"] else None
    return HubSet(match["name"], match["config"], match["split"] or "train", rows)


def import_datasets(address: str) -> Any:
    try:
        import datasets
    except ImportError:
        needs = f"--input {address} needs the package datasets: pip install 'meshwright[datasets]'"
        raise UserError(needs, UNAVAILABLE) from None
    # Progress and warnings would mix with our own lines.
    datasets.disable_progress_bars()
    datasets.utils.logging.set_verbosity_error()
    return datasets


def find_revision(address: str) -> str:
    """Return the commit of a data set, IN_CACHE if the Hub cannot be asked."""
    wanted = parse(address)
    import_datasets(address)
    import huggingface_hub

    try:
        hub.require_address(huggingface_hub.constants.ENDPOINT)
        return str(huggingface_hub.dataset_info(wanted.name, timeout=20).sha)
    except huggingface_hub.errors.RepositoryNotFoundError:
        cure = "check the name, or log in with `hf auth login` if it is private"
        raise bad_data(
            f"--input {address}: the Hub has no data set {wanted.name}; {cure}"
        ) from None
    except Exception as error:  # of a network, of which the library knows many
        notice(
            f"{address}: the Hub cannot be asked ({first_line(error)}); what an earlier load_dataset kept is read"
        )
        return IN_CACHE


def read_hub_set(address: str, revision: str, keys: Sequence[str]) -> Iterator[Row]:
    """Yield the values under the keys in the rows."""
    wanted = parse(address)
    library = import_datasets(address)
    if revision == IN_CACHE:
        # Otherwise the library would try to connect for half a minute.
        library.config.HF_HUB_OFFLINE = True
    try:
        opened = library.load_dataset(
            wanted.name,
            wanted.config,
            split=wanted.split,
            streaming=True,
            revision=None if revision == IN_CACHE else revision,
        )
    # The configuration or split may not exist; the library's message names those that exist.
    except ValueError as error:
        raise bad_data(f"--input {address}: {' '.join(str(error).split())}") from None
    except Exception as error:
        script = f"python -c \"import datasets; datasets.load_dataset('{wanted.name}')\""
        cure = f"to read it without a network, put it into the cache first: {script}"
        raise UserError(
            f"--input {address} is not available ({first_line(error)}); {cure}", UNAVAILABLE
        ) from None
    # Only the wanted columns are decoded, not others, such as images.
    if opened.column_names:
        require_columns(address, refuse_columns(address, opened.column_names, keys))
        opened = opened.select_columns(list(keys))
    rows = iter(opened if wanted.rows is None else opened.take(wanted.rows))
    while True:
        # Only the library's own failures are caught, not those of whoever takes the rows.
        try:
            row = next(rows, None)
        except Exception as error:
            message = f"{address} cannot be read to its end: {first_line(error)}; start the same command again"
            raise UserError(message, IO) from None
        if row is None:
            return
        yield [row.get(key) for key in keys]
