"""Programs from Debian's or Ubuntu's archive, unpacked into the user's cache without root."""

from __future__ import annotations

import os
import shlex
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


def find(name: str, package: str, *libraries: str, path: str | None = None) -> Program:
    """Return an installed program, or the one of a package, fetched once together with its libraries'.

    `path` is where to look for an installed one, instead of `PATH`. Raises `NotAtHand`.
    """
    installed = shutil.which(name, path=path) or shutil.which(name, path="/usr/sbin")
    if installed:
        return Program(Path(installed), {})
    kept = _unpacked(f"apt-{package}", [package, *libraries])
    folders = [str(path.parent) for path in kept.glob("usr/lib/**/*.so*")]
    return Program(_program(kept, name), {"LD_LIBRARY_PATH": os.pathsep.join(sorted(set(folders)))})


def find_with_all(name: str, package: str) -> Program:
    """Return the same with all that the package needs and this machine lacks. Raises `NotAtHand`."""
    installed = shutil.which(name)
    if installed:
        return Program(Path(installed), {})
    kept = _unpacked(f"apt-{package}", [package, *_lacking(package)])
    folders = {str(path.parent) for path in kept.glob("usr/lib/**/*.so*")}
    environment = {"LD_LIBRARY_PATH": os.pathsep.join(sorted(folders))}
    if (kept / "etc" / "fonts").exists():
        environment["FONTCONFIG_PATH"] = str(kept / "etc" / "fonts")
    # What stands in the path of programs is a script that looks for it where it would be installed.
    inner = kept / "usr" / "lib" / package / name
    return Program(inner if inner.exists() else _program(kept, name), environment)


def _lacking(package: str) -> list[str]:
    """Return what an installation of a package would bring besides it."""
    if (apt := shutil.which("apt-get")) is None:
        raise NotAtHand(f"no apt to fetch {package} with")
    command = [apt, "install", "--simulate", "--no-install-recommends", package]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotAtHand(f"apt knows no {package}: {done.stderr.strip()[-300:]}")
    steps = (line.split() for line in done.stdout.splitlines())
    return [step[1] for step in steps if step[:1] == ["Inst"] and step[1] != package]


def find_in_debian(release: str, name: str, package: str, *libraries: str, copy_to: Path) -> Program:
    """Return a program of another release of Debian, which runs on that release's C library.

    `libraries` are the packages that it needs beside libc6. `copy_to` receives a copy, for programs that run
    as a user who cannot read the cache. Raises `NotAtHand`.
    """
    cached = _unpacked(f"apt-{release}-{package}", ["libc6", package, *libraries], release)
    kept = shutil.copytree(cached, copy_to / cached.name, symlinks=True)
    loader = next(kept.glob("usr/lib/*/ld-linux-*.so.*"))
    # A program starts on the loader that it names, which is this machine's, so the other one is asked to.
    command = [loader, "--library-path", loader.parent, _program(kept, name)]
    launcher = kept / name
    launcher.write_text(f'#!/bin/sh\nexec {shlex.join(map(str, command))} "$@"\n')
    launcher.chmod(0o755)
    return Program(launcher, {})


def _program(kept: Path, name: str) -> Path:
    found = next((path for path in kept.glob(f"usr/*bin/{name}") if path.exists()), None)
    if found is None:
        raise NotAtHand(f"the packages in {kept.name} do not bring {name}")
    return found


def _unpacked(name: str, packages: list[str], release: str | None = None) -> Path:
    """Return a folder of the user's cache with these packages, of this system's release or of another."""
    apt, dpkg = shutil.which("apt-get"), shutil.which("dpkg")
    if apt is None or dpkg is None:
        raise NotAtHand(f"no apt to fetch {packages[0]} with")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stm-backends-tests"
    kept = cache / name
    if not kept.exists():
        # Unpacked beside and then renamed: other processes may do the same at once.
        beside = cache / f"{name}-{uuid.uuid4().hex}"
        beside.mkdir(parents=True)
        try:
            options = _lists_of(release, apt, beside / "lists") if release else []
            _run([apt, *options, "download", "-qq", *packages], beside, f"apt cannot fetch {packages[0]}")
            for archive in beside.glob("*.deb"):
                _run([dpkg, "-x", archive, beside], beside, f"{archive.name} cannot be unpacked")
                archive.unlink()
            shutil.rmtree(beside / "lists", ignore_errors=True)
            beside.rename(kept)
        except OSError:
            assert kept.exists()
        finally:
            shutil.rmtree(beside, ignore_errors=True)
    return kept


def _lists_of(release: str, apt: str, folder: Path) -> list[str | Path]:
    """Fetch what a release of Debian offers, beside this system's own lists; returns the options for apt."""
    keys = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
    if not keys.exists():
        raise NotAtHand(f"no {keys} to check {release} with")
    for name in ("state/lists/partial", "cache/archives/partial"):
        (folder / name).mkdir(parents=True)
    (folder / "sources.list").write_text(
        f"deb [signed-by={keys}] http://deb.debian.org/debian {release} main\n"
    )
    (folder / "status").touch()
    places = {
        "Dir::Etc::SourceList": "sources.list",
        "Dir::Etc::SourceParts": "no-parts",
        "Dir::State": "state",
        "Dir::State::status": "status",
        "Dir::Cache": "cache",
    }
    options = [f"-o{name}={folder / place}" for name, place in places.items()]
    _run([apt, *options, "update", "-qq"], folder, f"apt cannot fetch the lists of {release}")
    return [*options]


def _run(command: list[str | Path], folder: Path, problem: str) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotAtHand(f"{problem}: {done.stderr.strip()[-300:]}")
