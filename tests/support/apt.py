"""Programs from Debian's or Ubuntu's archive, unpacked into the user's cache without root."""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from pathlib import Path
from typing import NamedTuple


class NotAtHand(Exception):
    """apt is missing, or its archive does not provide the package; the message says which."""


class Program(NamedTuple):
    """A program, and where it finds the libraries that came with it."""

    path: Path
    environment: dict[str, str]


def find(
    name: str, package: str, *libraries: str, copy_to: Path | None = None, path: str | None = None
) -> Program:
    """Return an installed program, or the one of a package, fetched once together with its libraries'.

    `path` is where to look for an installed one, instead of `PATH`. `copy_to` receives a copy of what was
    fetched, for programs that run as a user who cannot read the cache. Raises `NotAtHand`.
    """
    installed = shutil.which(name, path=path) or shutil.which(name, path="/usr/sbin")
    if installed:
        return Program(Path(installed), {})
    apt, dpkg = shutil.which("apt-get"), shutil.which("dpkg")
    if apt is None or dpkg is None:
        raise NotAtHand(f"no {name} here, and no apt to fetch it with: apt-get install {package}")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stm-backends-tests"
    kept = cache / f"apt-{package}"
    if not kept.exists():
        # Unpacked beside and then renamed: other processes may do the same at once.
        beside = cache / f"apt-{package}-{uuid.uuid4().hex}"
        beside.mkdir(parents=True)
        try:
            _run([apt, "download", "-qq", package, *libraries], beside, f"apt cannot fetch {package}")
            for archive in beside.glob("*.deb"):
                _run([dpkg, "-x", archive, beside], beside, f"{archive.name} cannot be unpacked")
                archive.unlink()
            beside.rename(kept)
        except OSError:
            assert kept.exists()
        finally:
            shutil.rmtree(beside, ignore_errors=True)
    if copy_to is not None:
        kept = Path(shutil.copytree(kept, copy_to / kept.name, symlinks=True, dirs_exist_ok=True))
    found = next((path for path in kept.glob(f"usr/*bin/{name}") if path.exists()), None)
    if found is None:
        raise NotAtHand(f"the package {package} does not bring {name}")
    folders = [str(path.parent) for path in kept.glob("usr/lib/**/*.so*")]
    return Program(found, {"LD_LIBRARY_PATH": os.pathsep.join(sorted(set(folders)))})


def _run(command: list[str | Path], folder: Path, problem: str) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotAtHand(f"{problem}: {done.stderr.strip()[-300:]}")
