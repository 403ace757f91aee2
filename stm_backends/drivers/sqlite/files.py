"""The database file and the two files that SQLite keeps next to it: their identity and permissions."""

from __future__ import annotations

import contextlib
import logging
import os
import stat
from pathlib import Path

logger = logging.getLogger("stm_backends")


def create_private(path: Path) -> None:
    """Create an empty database file that only its owner can use, unless there is a file already.

    SQLite gives the files next to it, journals included, the permissions of the database file. If the file
    cannot be created, SQLite reports why when it opens it.
    """
    with contextlib.suppress(OSError, RuntimeError):  # the latter for links in a circle
        where = path.resolve()  # a symbolic link may lead to where no file is yet
        if where.exists():
            return
        import tempfile  # noqa: PLC0415 -- slow, and most files are there already

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


class OpenFiles:
    """The files of an open database: the file itself, and those that SQLite keeps next to it.

    SQLite follows symbolic links: the two files are next to the one that a link leads to.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._log = ""
        self._opened: dict[str, tuple[int, int]] = {}

    def note(self) -> None:
        """Remember which files were opened, just now."""
        real = os.path.realpath(self._path)
        self._log = f"{real}-wal"
        paths = (str(self._path), self._log, f"{real}-shm")
        self._opened = {path: identity for path in paths if (identity := _identity(path))}

    def forget(self) -> None:
        """Forget the files, which are no longer open."""
        self._opened = {}

    def are_in_place(self) -> bool:
        """Return whether the paths lead to the files that were opened."""
        return all(_identity(path) == opened for path, opened in self._opened.items())

    def is_log_lost(self) -> bool:
        """Return whether the path of the write-ahead log leads to another file."""
        return _identity(self._log) not in (None, self._opened.get(self._log))

    def warn_if_shared(self) -> None:
        """Log a warning if other users of the host may read or change one of the files."""
        for path in self._opened:
            with contextlib.suppress(OSError):
                mode = Path(path).stat().st_mode
                if os.name == "posix" and mode & (stat.S_IRWXG | stat.S_IRWXO):
                    logger.warning(
                        "sqlite: other users of this host may use the database file, or a file next to it "
                        "(mode %04o); run chmod 600 on all of them, or set private=False if this is intended",
                        stat.S_IMODE(mode),
                    )
                    return


def _identity(path: str) -> tuple[int, int] | None:
    """Return the identity of the file at a path; `None` if there is none."""
    try:
        found = os.stat(path)  # noqa: PTH116 -- in every operation, and Path.stat takes longer
    except OSError:
        return None
    return found.st_dev, found.st_ino
