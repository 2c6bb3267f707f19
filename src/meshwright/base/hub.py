"""Files of the Hugging Face Hub: from its cache, shared with other programs, or downloaded."""

from __future__ import annotations

import re
from pathlib import Path

from meshwright.base.console import notice
from meshwright.base.errors import UNAVAILABLE, UserError, bad_data, first_line

ELSE = "or name a folder that `meshwright train-tokenizer` made, or byte, which needs no files"


def is_name(name: str) -> bool:
    """Return whether this can be the name of a repository: NAME or ORGANISATION/NAME."""
    return bool(re.fullmatch(r"(\w[\w.-]{0,95}/)?\w[\w.-]{0,95}", name, re.ASCII))


def find_folder(name: str, *files: str, is_needed: bool = True, near: str = "") -> Path | None:
    """Return the folder of the cache with these files of a repository, or None if it lacks one.

    What is not in the cache is downloaded; that may fail in silence if it is not `is_needed`.
    `near` asks whether a path with a similar name was meant.
    """
    from huggingface_hub import constants, try_to_load_from_cache

    cached = [try_to_load_from_cache(name, file) for file in files]
    # The cache also notes which files a repository does not have.
    if any(path is not None and not isinstance(path, str) for path in cached):  # known not to exist
        return None
    lacking = [file for file, path in zip(files, cached, strict=True) if path is None]
    # A download may take long, so it is announced before it begins.
    if lacking and is_needed:
        here = f"no such folder or file here{near} " if near else ""
        asking = f"asking {constants.ENDPOINT}/{name} for {', '.join(lacking)}, kept in {constants.HF_HUB_CACHE}"
        notice(f"{name}: {here}{asking}")
    try:
        pairs = zip(files, cached, strict=True)
        paths = [
            Path(path) if isinstance(path, str) else _download(name, file, near)
            for file, path in pairs
        ]
    except UserError:
        if is_needed:
            raise
        return None
    return paths[0].parent if paths[0] and all(paths) else None


def _download(name: str, file: str, near: str) -> Path | None:
    """Return the downloaded file, or None if the repository has none of this name."""
    import logging

    from huggingface_hub import constants, errors, hf_hub_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    # The files are small, and our own line has been printed.
    disable_progress_bars()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # no line for each of its attempts
    where = f"--tokenizer {name}: no such folder or file here{near or ','} and"
    try:
        require_address(constants.ENDPOINT)
        return Path(hf_hub_download(name, file))
    except errors.RepositoryNotFoundError as error:
        # The Hub says of a gated repository that it exists.
        is_gated = isinstance(error, errors.GatedRepoError)
        what = (
            "requires you to accept its terms" if is_gated else "has no such name, or it is private"
        )
        raise bad_data(
            f"{where} {constants.ENDPOINT} {what}; log in with `hf auth login`, {ELSE}"
        ) from None
    except errors.LocalEntryNotFoundError as error:
        reason = error.__cause__ or error
    except errors.EntryNotFoundError:
        return None
    except (OSError, RuntimeError) as error:
        reason = error
    message = f"{where} {constants.ENDPOINT} is not reachable ({first_line(reason)}); try again with a network, {ELSE}"
    raise UserError(message, UNAVAILABLE)


def require_address(endpoint: str) -> None:
    """Raise OSError without a network, which the library would try for half a minute."""
    import socket
    import urllib.parse
    import urllib.request

    host = urllib.parse.urlsplit(endpoint).hostname
    if host and not urllib.request.getproxies():
        socket.getaddrinfo(host, None)
