"""The public names of a release, kept as a file: in every later version they stay, or warn before they go."""

from __future__ import annotations

import importlib
import inspect
import json
from pathlib import Path
from typing import Any, Final

FILE: Final = "names.json"
MODULES: Final = (
    "stm_backends",
    *(f"stm_backends.{name}" for name in ("agents", "drivers", "messages", "sync", "testing", "tiers")),
    *(f"stm_backends_{name}" for name in ("redis", "postgres", "mongo", "dynamo")),
)
"""What docs/policies.md says is public, without the modules that need a framework."""


def public(module: str) -> dict[str, Any]:
    """Return what each public name of a module has: its parameters, and the members of a class."""
    home = importlib.import_module(module)
    return {name: described(getattr(home, name)) for name in sorted(home.__all__)}


def described(one: object) -> dict[str, Any]:
    """Return the parameters that a callable takes by name, and the public members of a class."""
    told: dict[str, Any] = {}
    if callable(one) and (taken := parameters(one)) is not None:
        told["parameters"] = taken
    if isinstance(one, type):
        ours = {
            name
            for base in one.__mro__
            if base.__module__.startswith("stm_backends")
            for name in (*vars(base), *getattr(base, "__annotations__", ()))
            if not name.startswith("_")
        }
        told["members"] = {name: parameters(getattr(one, name, None)) for name in sorted(ours)}
    return told


def parameters(one: object) -> list[str] | None:
    """Return the names of the parameters of a function or a class; `None` for what has no signature of ours.

    Classes that have no `__init__` of this library differ between versions of Python.
    """
    if isinstance(one, type):
        one = getattr(one, "__init__", None)
        if not str(getattr(one, "__module__", "")).startswith("stm_backends"):
            return None
    if not callable(one):
        return None
    try:
        found = inspect.signature(one).parameters.values()
    except (TypeError, ValueError):
        return None
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    names = [each.name for each in found if each.kind not in variable and not each.name.startswith("_")]
    return [name for name in names if name != "self"]


def takes(one: object, names: list[str]) -> bool:
    """Return whether a callable still takes parameters of these names."""
    found = inspect.signature(one).parameters if callable(one) else {}
    any_name = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in found.values())
    return any_name or {*names} <= {*found}


def keep(folder: Path) -> None:
    """Write the names of the present version into a folder."""
    names = {module: public(module) for module in MODULES}
    (folder / FILE).write_text(json.dumps(names, indent=1) + "\n", "utf-8")
