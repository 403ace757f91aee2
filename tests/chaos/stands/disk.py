"""A file system of a stand's own, which can be full."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from pathlib import Path


class Disk:
    """A `tmpfs` at `folder`, or a plain folder where nothing may be mounted: that one is never full.

    What a server has written outlives the server, as on any file system, for as long as it is mounted.
    """

    def __init__(self, folder: Path, megabytes: int) -> None:
        self.folder = folder
        self._size = megabytes * 1024 * 1024
        self.can_fill = False

    def open(self) -> None:
        """Mount it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        mode = f"size={self._size},mode=0755"
        self.can_fill = _mount("-t", "tmpfs", "-o", mode, "stm-chaos", str(self.folder))

    def close(self) -> None:
        """Unmount and remove it; a second call is a no-op."""
        if self.can_fill:
            # Lazily: a server that was killed a moment ago may still hold a file.
            subprocess.run(["umount", "--lazy", self.folder], check=True)  # noqa: S607 -- wherever it is
            self.can_fill = False
        shutil.rmtree(self.folder, ignore_errors=True)

    def fill(self) -> int:
        """Leave no room; return how many bytes were free."""
        for _ in range(200):
            state = os.statvfs(self.folder)
            used = (state.f_blocks - state.f_bfree) * state.f_frsize
            # Refused if the servers have written more in the meantime.
            if self._resize(used):
                return state.f_bavail * state.f_frsize
            time.sleep(0.01)
        raise RuntimeError("the file system could not be made as small as what is in it")

    def free(self) -> None:
        """Make room again."""
        assert self._resize(self._size)

    def _resize(self, size: int) -> bool:
        return _mount("-o", f"remount,size={size}", str(self.folder))


def _mount(*options: str) -> bool:
    with contextlib.suppress(OSError):
        return not subprocess.run(["mount", *options], check=False, capture_output=True).returncode  # noqa: S607
    return False
