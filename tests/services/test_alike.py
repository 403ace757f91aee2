"""The drivers share their names: settings, modules and errors mean the same in each package."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from pathlib import Path
from types import ModuleType
from typing import get_type_hints

import pytest

from stm_backends import BackendOptions
from stm_backends.drivers.contract import DEFAULT_DEADLINE_S
from stm_backends.drivers.plugins import open_driver
from tests.support.places import EACH

NAMES = {"redis": "Redis", "postgres": "Postgres", "mongo": "Mongo", "dynamo": "Dynamo"}
FILES = ("plugin", "settings", "statements", "driver", "errors", "memory", "opening")
TESTS = ("conformance", "errors", "settings", "statements", "faults", "access")
"""The tests of each driver beside those of this folder, by the same names; some have more."""

pytestmark = pytest.mark.parametrize("datastore", EACH)


def package(datastore: str) -> ModuleType:
    return importlib.import_module(f"stm_backends_{datastore}")


def settings_of(datastore: str) -> type:
    return getattr(package(datastore), f"{NAMES[datastore]}Settings")


def parameters(function: object) -> list[tuple[str, object, object]]:
    return [(one.name, one.kind, one.default) for one in inspect.signature(function).parameters.values()]


def test_each_has_the_same_files_and_public_names(datastore: str) -> None:
    brought, name = package(datastore), NAMES[datastore]
    folder = Path(brought.__file__).parent
    assert {f"{file}.py" for file in FILES} | {"README.md", "py.typed"} <= {
        file.name for file in folder.iterdir()
    }
    kinds = ("Driver", "Options", "Settings", "ShortTermMemory", "StateStore")
    functions = {"open_driver", f"open_{datastore}"}
    assert set(brought.__all__) == {*(f"{name}{kind}" for kind in kinds), *functions}
    for public in brought.__all__:
        assert getattr(brought, public).__module__.startswith(brought.__name__)


def test_each_is_tested_in_files_of_the_same_names(datastore: str) -> None:
    folder = Path(__file__).parent / datastore
    assert {"conftest.py", *(f"test_{name}.py" for name in TESTS)} <= {file.name for file in folder.iterdir()}


def test_the_named_classes_are_made_in_the_same_way(datastore: str) -> None:
    model = importlib.import_module("stm_backends_redis")
    brought, name = package(datastore), NAMES[datastore]
    for kind in ("ShortTermMemory", "StateStore"):
        mine, one = getattr(brought, f"{name}{kind}"), getattr(model, f"Redis{kind}")
        assert parameters(mine) == parameters(one)


def test_settings_of_the_same_meaning_have_the_same_name_and_default(datastore: str) -> None:
    settings = settings_of(datastore)
    fields = {field.name: field for field in dataclasses.fields(settings)}
    assert all(field.kw_only for field in fields.values())
    assert fields["deadline_s"].default == DEFAULT_DEADLINE_S
    assert "max_entry_bytes" in fields
    assert settings.__dataclass_params__.frozen
    for way in (settings.from_url, settings.from_options):
        assert inspect.getdoc(way).startswith("Return the settings that")


def test_the_traits_say_what_the_settings_do(datastore: str) -> None:
    driver = open_driver(datastore, deadline_s=1.25, max_entry_bytes=1000)
    assert (driver.name, driver.traits.reach) == (datastore, "network")
    assert (driver.traits.deadline, driver.traits.max_entry) == (1.25, 1000)
    assert driver.traits.durability[0].islower()
    assert not driver.traits.durability.endswith(".")


def test_the_typed_options_are_the_settings(datastore: str) -> None:
    options = get_type_hints(getattr(package(datastore), f"{NAMES[datastore]}Options"))
    kinds = get_type_hints(settings_of(datastore))
    apart = {*get_type_hints(BackendOptions), "client", "clock"}
    names = {field.name for field in dataclasses.fields(settings_of(datastore))}
    if datastore == "mongo":
        settings = importlib.import_module("stm_backends_mongo.settings")
        theirs = {*settings.CLIENT_OPTIONS, "username", "password"}
        assert theirs <= options.keys()
        # The URL is an argument, and the options of PyMongo are given by their names.
        apart, names = apart | theirs, names - {"url", "client_options"}
    assert {name: kind for name, kind in options.items() if name not in apart} == {
        name: kinds[name] for name in names
    }
