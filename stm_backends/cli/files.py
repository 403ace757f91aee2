"""Files that commands read and write; `-` is standard input or output.

A file that cannot be read or opened for writing raises `ConfigurationError`, one that cannot be written
afterwards raises `NotWritten`. Both name it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Final, TextIO

from stm_backends.errors import ConfigurationError, StmError

_TEMPORARY: Final = ".stm-"
"""Prefix of the names of temporary files."""


class NotWritten(StmError):
    """A file could not be written after it was opened, for example because the disk is full."""


def is_standard(path: Path | None) -> bool:
    """Return whether this means standard input or output."""
    return path is None or str(path) == "-"


@contextlib.contextmanager
def reading(path: Path) -> Generator[TextIO]:
    """Open a file for reading."""
    if is_standard(path):
        with _named("standard input"):
            yield sys.stdin
        return
    with _named(path), path.open(encoding="utf-8") as lines:
        yield lines


@contextlib.contextmanager
def writing(path: Path | None) -> Generator[TextIO]:
    """Open a file for writing that replaces the existing one in one step when the block ends.

    A new file can be read by its owner only; an existing one keeps its permissions. A symbolic link to a file
    is refused, because somebody else may have put it there. If the block raises, an existing file is
    unchanged and no temporary file remains.
    """
    if path is None or is_standard(path):
        yield sys.stdout
        return
    with _named(path):
        target = path.resolve()
        beside: Path | None = None
        if path.is_symlink() and (target.is_file() or not target.exists()):
            raise ConfigurationError(f"{path} is a symbolic link; name the file that it leads to")
        if target.exists() and not target.is_file():
            # Devices and pipes are written directly; a directory raises an error that says so.
            out = target.open("w", encoding="utf-8")
        else:
            if target.exists() and not os.access(target, os.W_OK):
                raise PermissionError(errno.EACCES, "Permission denied")
            beside = target.with_name(f"{_TEMPORARY}{secrets.token_hex(8)}.tmp")
            out = open(beside, "x", encoding="utf-8", opener=_private)  # noqa: SIM115 -- closed below
    with _named(path, NotWritten):
        try:
            with out:
                yield out
            if beside is not None:
                if target.exists():
                    shutil.copymode(target, beside)
                beside.replace(target)
        except BaseException:
            if beside is not None:
                beside.unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def creating(path: Path) -> Generator[TextIO]:
    """Create a file that only its owner can read, and open it for writing; an existing file is refused.

    The name is taken at once, so that no other process can take it before the block ends. If the block
    raises, no file remains. Standard output, devices and pipes are written as by `writing`.
    """
    if is_standard(path) or (path.exists() and not path.is_file() and not path.is_dir()):
        with writing(path) as out:
            yield out
        return
    with _named(path):
        try:
            out = open(path, "x", encoding="utf-8", opener=_private)  # noqa: SIM115 -- closed below
        except FileExistsError:
            raise ConfigurationError(
                f"{path} exists already, and is not overwritten; name a new file"
            ) from None
    with _named(path, NotWritten):
        try:
            with out:
                yield out
        except BaseException:
            path.unlink(missing_ok=True)
            raise


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _is_another(name: str, path: Path) -> bool:
    """Say whether a name is neither that of the file nor of a temporary file next to it."""
    return not Path(name).name.startswith(_TEMPORARY) and Path(name).resolve() != path.resolve()


@contextlib.contextmanager
def _named(what: object, kind: type[StmError] = ConfigurationError) -> Generator[None]:
    try:
        yield
    except BrokenPipeError:
        # Of standard output: nobody reads it any longer. The caller ends the command.
        raise
    except OSError as error:
        if isinstance(what, Path) and isinstance(error.filename, str) and _is_another(error.filename, what):
            # The block used another file.
            what = error.filename
        raise kind(f"{what}: {error.strerror or type(error).__name__}") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{what}: not UTF-8") from error
