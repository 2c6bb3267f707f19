"""Folders of checkpoints have one owner at a time; a new run moves an old one's aside."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from meshwright.base import files
from meshwright.base.console import remark
from meshwright.base.errors import IO, LOCKED, UnfitFile, UserError
from meshwright.checkpoint import mirror
from meshwright.checkpoint.steps import listing, make_aside
from meshwright.config.problem import SettingsError, plain

PATIENCE = 0.5  # seconds: a killed owner may still be dying, a new one still writing its name


@contextlib.contextmanager
def lock_folder(root: str | Path, remedy: str = "change {save}") -> Iterator[None]:
    """Hold an exclusive lock on the folder; the kernel releases it when this process dies.

    `remedy` says how the user chooses another folder, with settings in braces.
    A folder that stands for an address is leased there too. A folder in which nothing was written
    is left as it was: absent, or without a lock.
    """
    root = Path(root)
    path = root / ".lock"
    absent = [parent for parent in (path, root, *root.parents) if not parent.exists()]
    with contextlib.ExitStack() as stack:
        try:
            root.mkdir(parents=True, exist_ok=True)
            has_locks = stack.enter_context(files.lock(path, PATIENCE, stays=True))
        except BlockingIOError as error:
            raise in_use(root, error, remedy) from None
        except UnfitFile as error:  # its reason says what to do
            raise UserError(f"cannot lock {error.filename}: {error.strerror}", IO) from error
        except OSError as error:
            why = plain(error.strerror or error)
            raise SettingsError(f"cannot lock {plain(root)}: {why}; {remedy}", IO) from error
        if not has_locks:
            remark(
                f"WARNING: the file system of {root} has no locks: a second run there would not be noticed"
            )
        stack.enter_context(mirror.leased(root, has_locks))
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                if path in absent and os.listdir(root) == [path.name]:
                    path.unlink()
                    for parent in absent[1:]:
                        parent.rmdir()


def require_unlocked(root: str | Path, remedy: str) -> None:
    """Refuse a folder that another run owns before anything slow begins; `lock_folder` decides."""
    path = Path(root) / ".lock"
    try:
        if path.is_file():
            os.close(files.open_locked(path, PATIENCE)[0])
    except BlockingIOError as error:
        raise in_use(Path(root), error, remedy) from None
    except OSError:
        return


def in_use(root: Path, error: BlockingIOError, remedy: str) -> UserError:
    user = plain(error.strerror)
    return SettingsError(
        f"{plain(root)} is in use by {user}: wait for it, end it, or {remedy}", LOCKED
    )


def move_aside(root: str | Path, others: Sequence[str] = ()) -> Path:
    """Move every checkpoint, and other names, into a new folder `replaced-N`.

    The caller holds the lock.
    """
    root = Path(root)
    aside = make_aside(root)
    # Trackers move first: none may outlive its step.
    for name in (*sorted(listing(root), key=lambda name: name.startswith("iter_")), *others):
        (root / name).rename(aside / name)
    files.sync(root)
    return aside
