"""The database file and the two files that SQLite keeps beside it: identity, and who may read them."""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path

logger = logging.getLogger("stm_backends")


def paths(path: Path) -> tuple[str, ...]:
    """Return the paths of a database file, and of those that SQLite keeps beside it while it is open."""
    return str(path), f"{path}-wal", f"{path}-shm"


def identity(path: str) -> tuple[int, int] | None:
    """Return the identity of the file at a path; `None` if there is none."""
    try:
        found = os.stat(path)  # noqa: PTH116 -- in every operation, and Path.stat takes longer
    except OSError:
        return None
    return found.st_dev, found.st_ino


def create_private(path: Path) -> None:
    """Create an empty database file that only its owner can use, unless there is a file already.

    SQLite gives the files beside it, journals included, the permissions of the database file. If the file
    cannot be created, SQLite reports why when it opens it.
    """
    with contextlib.suppress(OSError, RuntimeError):  # the latter for links in a circle
        where = path.resolve()  # a symbolic link may lead to where no file is yet
        if where.exists():
            return
        # Closing a file removes the locks that this process has on it through other connections. So the file
        # is closed before it gets its name.
        created, beside = tempfile.mkstemp(prefix=".stm-", suffix=".tmp", dir=where.parent)
        os.close(created)
        try:
            os.link(beside, where)
        except FileExistsError:
            pass  # another process was first
        except OSError:  # a file system without hard links
            os.close(os.open(where, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
        finally:
            Path(beside).unlink()


def warn_if_shared(paths: Iterable[str]) -> None:
    """Log a warning if other users of the host may read or change one of the files."""
    for path in paths:
        with contextlib.suppress(OSError):
            mode = Path(path).stat().st_mode
            if os.name == "posix" and mode & (stat.S_IRWXG | stat.S_IRWXO):
                logger.warning(
                    "sqlite: other users of this host may use the database file, or a file beside it "
                    "(mode %04o); run chmod 600 on all of them, or set private=False if this is intended",
                    stat.S_IMODE(mode),
                )
                return
