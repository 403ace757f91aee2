"""What a process says of itself: its memory, its descriptors and connections, and Python's blocks."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import resource
import sys
from pathlib import Path
from typing import Final

_LIBC: Final = ctypes.CDLL(None)


class _Allocations(ctypes.Structure):
    """The `struct mallinfo2` of glibc, which has it since 2.33."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def of_this_process() -> dict[str, int]:
    """Return figures that take no time to have."""
    links = list[str]()
    for one in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one that listed them, for example
            links.append(str(one.readlink()))
    resident, shared = map(int, Path("/proc/self/statm").read_text(encoding="ascii").split()[1:3])
    return {
        # Without the pages of files: the kernel drops those of libraries, and reads them again, as it likes.
        "memory": (resident - shared) * resource.getpagesize(),
        "descriptors": len(links),
        "connections": sum(link.startswith("socket:") for link in links),
        "blocks": sys.getallocatedblocks(),
    }


def without_garbage() -> dict[str, int]:
    """Return the figures once what is not in use was given back, and how much malloc has given out.

    Python takes objects of more than 512 bytes from malloc, as C libraries do. Smaller ones are its blocks.
    """
    gc.collect()
    _LIBC.malloc_trim(0)
    _LIBC.mallinfo2.restype = _Allocations
    now = _LIBC.mallinfo2()
    return {**of_this_process(), "allocated": now.uordblks + now.hblkhd}
