"""How backends are found: by name or URL, with a clear error, and unaffected by a broken plugin."""

from __future__ import annotations

import importlib.metadata
import itertools
import os
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from stm_backends.drivers import plugins
from stm_backends.drivers.contract import CONTRACT
from stm_backends.drivers.in_memory import MemoryDriver
from stm_backends.drivers.plugins import diagnose, open_driver, schema
from stm_backends.drivers.shipped import BY_SCHEME, SHIPPED, Shipped
from stm_backends.errors import AmbiguousBackend, ConfigurationError, MissingExtra, UnknownBackend

HIDDEN = "hunter2"

GOOD = """
    from stm_backends.drivers.plugins import BackendPlugin, hookimpl
    from stm_backends.drivers.in_memory import MemoryDriver

    OPENED = []

    def open_driver(url, *, create=False, size=1):
        OPENED.append((url, create, size))
        return MemoryDriver()

    @hookimpl
    def stm_backend():
        return BackendPlugin(name={name!r}, url_schemes={schemes!r}, requires={requires!r}, open=open_driver)
"""

Install = Callable[..., str]

_numbers = itertools.count()


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Install a distribution that brings one backend; returns its module's name."""
    monkeypatch.syspath_prepend(tmp_path)

    def install(
        name: str,
        source: str = GOOD,
        *,
        distribution: str = "acme-stm",
        schemes: tuple[str, ...] = (),
        requires: tuple[str, ...] = (),
        extras: tuple[str, ...] = (),
        needs: tuple[str, ...] = (),
    ) -> str:
        # Modules stay imported, so no two tests share a name.
        module = f"acme_module_{next(_numbers)}"
        # `source` is a template only where it asks for these.
        text = textwrap.dedent(source)
        if "{name" in text:
            text = text.format(name=name, schemes=schemes, requires=requires)
        (tmp_path / f"{module}.py").write_text(text)
        info = tmp_path / f"{distribution.replace('-', '_')}-1.5.dist-info"
        info.mkdir(exist_ok=True)
        fields = (*(f"Provides-Extra: {one}" for one in extras), *(f"Requires-Dist: {one}" for one in needs))
        provided = "".join(f"{field}\n" for field in fields)
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.5\n{provided}"
        )
        with (info / "entry_points.txt").open("a") as file:
            file.write(f"[stm_backends]\n{name} = {module}\n")
        return module

    return install


def refused(error: type[Exception], *args: object, **options: object) -> str:
    """Return the message with which opening is refused."""
    with pytest.raises(error) as caught:
        open_driver(*args, **options)  # type: ignore[arg-type]
    assert type(caught.value) is error
    return str(caught.value)


@pytest.mark.parametrize("asked", ["memory", "memory://", "MEMORY://"])
def test_a_backend_opens_by_its_name_or_a_url_of_its_scheme(asked: str) -> None:
    assert isinstance(open_driver(asked), MemoryDriver)


def test_a_backend_may_claim_other_schemes_than_its_name(install: Install) -> None:
    module = install("acme", schemes=("acme", "acmes"))
    open_driver("acmes://host/1", create=True, size=3)
    assert sys.modules[module].OPENED == [("acmes://host/1", True, 3)]


def test_a_name_and_a_url_reach_the_driver(install: Install) -> None:
    module = install("acme", schemes=("acme",))
    open_driver("acme", url="acme://host")
    open_driver("acme", url="a/path")
    open_driver("acme")
    assert [url for url, _, _ in sys.modules[module].OPENED] == ["acme://host", "a/path", None]


def test_opening_by_name_imports_no_other_backend(install: Install) -> None:
    other = install("other")
    open_driver("memory")
    open_driver("memory://")
    assert other not in sys.modules


def test_a_package_that_is_installed_after_an_opening_is_found(install: Install, tmp_path: Path) -> None:
    os.utime(tmp_path, (1, 1))  # so that the change is seen however soon it comes
    refused(UnknownBackend, "acme")
    install("acme")
    assert isinstance(open_driver("acme"), MemoryDriver)


def test_what_is_installed_is_read_again_only_when_it_changes(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("acme", schemes=("acme",))
    open_driver("acme")
    monkeypatch.delattr(importlib.metadata, "entry_points")
    assert isinstance(open_driver("acme://host"), MemoryDriver)


@pytest.fixture
def nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading what is installed raises."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("what is installed was read")

    monkeypatch.setattr(importlib.metadata, "entry_points", refuse)
    monkeypatch.setattr(plugins, "_claims", refuse)


@pytest.mark.usefixtures("nothing_is_read")
def test_a_shipped_backend_is_found_without_reading_what_is_installed() -> None:
    for asked in ("memory", "memory://", "sqlite:///x.db"):
        open_driver(asked)
    open_driver("sqlite", url="sqlite:///x.db")
    for name in ("sqlite", "postgres"):
        assert schema(name)
    with pytest.raises(AssertionError, match="what is installed was read"):
        open_driver("acme://host")


@pytest.mark.parametrize("scheme", [scheme for scheme in BY_SCHEME if scheme not in ("memory", "sqlite")])
def test_a_url_imports_the_plugin_of_its_scheme_alone(scheme: str) -> None:
    program = f"""
import importlib.metadata, sys
def refuse(*_, **__):
    raise AssertionError("what is installed was read")
importlib.metadata.entry_points = refuse
from stm_backends.drivers.plugins import schema
try:
    schema("{scheme}://127.0.0.1/stm")
except ValueError:
    pass  # of the settings, which is soon enough
ours = [name for name in sys.modules if name.startswith("stm_backends")]
print(*(name for name in ours if name.endswith((".plugin", ".in_memory"))))
"""
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert ran.stdout.split() == [BY_SCHEME[scheme].value]


@pytest.mark.parametrize("one", SHIPPED.values(), ids=SHIPPED)
def test_the_table_of_shipped_backends_says_what_their_plugins_say(one: Shipped) -> None:
    plugin = one.load().stm_backend()
    assert (plugin.name, plugin.url_schemes) == (one.name, one.schemes)


def test_the_table_of_shipped_backends_is_that_of_the_entry_points() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["entry-points"]["stm_backends"] == {one.name: one.value for one in SHIPPED.values()}


def test_an_unknown_name_is_answered_with_the_names_there_are_and_a_near_miss() -> None:
    message = refused(UnknownBackend, "memroy")
    assert "'memroy'" in message
    assert "Did you mean 'memory'?" in message
    installed = message.partition("Installed: ")[2].split(", ")
    assert {"memory", "sqlite"} <= set(installed)
    assert installed == sorted(installed)


def test_a_name_in_other_letters_is_a_near_miss_and_any_other_is_none() -> None:
    assert "Did you mean 'sqlite'?" in refused(UnknownBackend, "SQLite")
    assert "Did you mean" not in refused(UnknownBackend, "xyzzy")
    assert "Did you mean" not in refused(UnknownBackend, "")


@pytest.mark.parametrize("text", ["localhost:6379", "db.example.com:5432/0", "10.0.0.7:27017", "[::1]:6379"])
def test_a_host_and_a_port_are_told_to_lack_a_scheme(text: str) -> None:
    assert "a host and a port are not a URL: write the scheme" in refused(UnknownBackend, text)


@pytest.mark.parametrize(
    ("text", "around"),
    [
        (f'"redis://u:{HIDDEN}@h/0"', "quotation marks"),
        ("'memory'", "quotation marks"),
        (f"redis://u:{HIDDEN}@h/0 ", "white space"),
        (f"redis://u:{HIDDEN}@h/0\r\n", "white space"),
        (" memory", "white space"),
    ],
)
def test_what_a_file_of_variables_puts_around_a_url_is_named(text: str, around: str) -> None:
    assert f"is given with {around} around it; leave that out" in refused(UnknownBackend, text)
    assert around in refused(UnknownBackend, "memory", url=text)


def test_a_mistyped_scheme_gets_a_near_miss_and_no_part_of_the_url_is_shown() -> None:
    message = refused(UnknownBackend, f"sqllite://someone:{HIDDEN}@host/db")
    assert "Did you mean 'sqlite'?" in message
    assert HIDDEN not in message
    assert "someone" not in message


@pytest.mark.parametrize(
    "text",
    [
        f"someone:{HIDDEN}@host",
        f"{HIDDEN}@host",
        f"sqlite//:{HIDDEN}@host",
        f"://{HIDDEN}@host",
        f"re dis://{HIDDEN}@host",
        f"sqllite:/someone:{HIDDEN}@host",
        f"someone:{HIDDEN}@host/x.db",
    ],
)
def test_what_may_be_a_mistyped_url_is_never_shown(text: str) -> None:
    message = refused(UnknownBackend, text)
    assert HIDDEN not in message
    assert "someone" not in message
    assert "host" not in message


def test_a_near_miss_of_a_scheme_comes_from_the_plugins_own_schemes(install: Install) -> None:
    install("acme", schemes=("zetadb", "zetadb+tls"))
    assert "Did you mean 'zetadb'?" in refused(UnknownBackend, "zetabd://host")
    assert "Did you mean 'zetadb+tls'?" in refused(UnknownBackend, "zetadb+tsl://host")
    assert "Did you mean 'acme'?" in refused(UnknownBackend, "acmes")


def test_a_near_miss_may_lack_its_client_library(install: Install) -> None:
    install("acme", schemes=("zetadb",), requires=("no_such_client",))
    assert "Did you mean 'zetadb'?" in refused(UnknownBackend, "zeta-db://host")


def test_a_url_beside_a_url_is_refused() -> None:
    message = refused(ConfigurationError, "memory://", url=f"memory://{HIDDEN}")
    assert "twice" in message
    assert HIDDEN not in message


def test_a_url_of_another_backend_is_refused_by_name() -> None:
    message = refused(ConfigurationError, "memory", url=f"sqlite://{HIDDEN}")
    assert "memory://" in message
    assert HIDDEN not in message


def test_an_option_that_the_backend_does_not_have_is_refused(install: Install) -> None:
    install("acme")
    assert "'sise'" in refused(ConfigurationError, "acme", sise=3)


# Two packages claim one name


@pytest.mark.parametrize(("one", "two", "asked"), [("acme", "acme", "acme"), ("one", "two", "shared://host")])
def test_two_packages_with_one_name_or_scheme_are_both_named(
    install: Install, one: str, two: str, asked: str
) -> None:
    install(one, distribution="acme-stm", schemes=("shared",))
    install(two, distribution="umbrella-stm", schemes=("shared",))
    message = refused(AmbiguousBackend, asked)
    assert "acme-stm 1.5" in message
    assert "umbrella-stm 1.5" in message


def test_a_package_that_claims_a_built_in_name_does_not_replace_it(install: Install) -> None:
    module = install("memory", distribution="umbrella-stm", schemes=("memory", "umbrella"))
    for asked in ("memory", "memory://"):
        assert isinstance(open_driver(asked), MemoryDriver)
    assert module not in sys.modules
    shipped, claiming = (one for one in diagnose() if one.name == "memory")
    assert (shipped.distribution, shipped.state, shipped.reason) == ("stm-backends", "ready", "")
    assert (claiming.distribution, claiming.state) == ("umbrella-stm", "ambiguous")
    assert "the name 'memory' opens the backend of stm-backends, and not that of umbrella-stm 1.5" in (
        claiming.reason
    )
    # A scheme that is the package's alone opens its backend.
    open_driver("umbrella://host")
    assert sys.modules[module].OPENED == [("umbrella://host", False, 1)]


def test_a_package_that_claims_a_built_in_scheme_does_not_take_it(install: Install) -> None:
    module = install("pirate", schemes=("memory", "postgresql", "pirate"))
    assert isinstance(open_driver("memory://"), MemoryDriver)
    assert module not in sys.modules
    open_driver("pirate", url="memory://hold")
    assert sys.modules[module].OPENED == [("memory://hold", False, 1)]
    (pirate,) = (one for one in diagnose() if one.name == "pirate")
    assert pirate.state == "ready"
    assert pirate.reason == (
        "memory:// opens the backend 'memory', postgresql:// opens the backend 'postgres' of stm-backends; "
        "open 'pirate' by its name"
    )


def test_the_same_distribution_twice_on_the_path_is_one(
    install: Install, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("acme")
    install("acme")
    again = tmp_path_factory.mktemp("again")
    info = again / "acme_stm-1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-stm\nVersion: 1.5\n")
    (info / "entry_points.txt").write_text("[stm_backends]\nsolo = nowhere\n")
    monkeypatch.syspath_prepend(again)
    # The first on the path shadows the second, as it does for an import.
    refused(UnknownBackend, "acme")


# The client library is not installed


def test_a_missing_client_library_is_answered_with_the_line_that_installs_it(install: Install) -> None:
    install(
        "acme",
        distribution="stm-backends-fake",
        schemes=("acme",),
        requires=("no_such_client",),
        extras=("other", "Acme"),
    )
    for asked in ("acme", "acme://host"):
        message = refused(MissingExtra, asked)
        assert 'pip install "stm-backends-fake[acme]"' in message
        assert "'no_such_client'" in message


def test_the_line_that_installs_names_what_the_extra_requires(install: Install) -> None:
    install(
        "acme",
        requires=("no_such_client",),
        extras=("acme-cloud", "acme"),
        needs=(
            "pluggy>=1.5",
            "of-another; extra == 'acme-cloud'",
            "acme-client[fast]>=2,<3 ; extra == 'acme'",
            'acme-proto!=1.4; extra == "acme"',
            "winacme; sys_platform == 'win32' and extra == 'acme'",
        ),
    )
    message = refused(MissingExtra, "acme")
    assert "the extra acme-stm[acme]" in message
    assert message.endswith(': pip install "acme-client[fast]>=2,<3" "acme-proto!=1.4"')


def test_a_client_handed_in_needs_its_own_library_only(install: Install) -> None:
    taking = GOOD.replace("size=1", "size=1, client=None")
    importing = taking.replace("OPENED.append", "import no_such_client; OPENED.append")
    install("acme", taking, requires=("no_such_client",))
    install("other", importing, requires=("no_such_client",))
    assert isinstance(open_driver("acme", client=object()), MemoryDriver)
    refused(MissingExtra, "acme", client=None)
    refused(MissingExtra, "other", client=object())


def test_an_extra_that_the_distribution_does_not_have_is_not_suggested(install: Install) -> None:
    install("lmdb", requires=("no_such_client",), extras=("other",))
    with pytest.raises(MissingExtra) as caught:
        open_driver("lmdb")
    assert "acme-stm" not in str(caught.value)
    assert str(caught.value).endswith("its package often has the same name: pip install no_such_client")
    # It is an ImportError, which names the module.
    assert caught.value.name == "no_such_client"


def test_a_client_library_that_lacks_a_part_is_a_missing_extra(install: Install) -> None:
    # As a folder of the same name in the working directory makes it look.
    source = GOOD.replace("OPENED.append", "import sqlite3.no_such_part; OPENED.append")
    install("acme", source, requires=("sqlite3",), extras=("acme",))
    assert 'pip install "acme-stm[acme]"' in refused(MissingExtra, "acme")


def test_a_client_library_without_a_spec_is_there(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    # As a stand-in that somebody's tests put into `sys.modules`.
    monkeypatch.setitem(sys.modules, "acme_client", ModuleType("acme_client"))
    install("acme", requires=("acme_client",))
    assert isinstance(open_driver("acme"), MemoryDriver)


def test_another_missing_module_is_the_plugins_own_fault(install: Install) -> None:
    source = GOOD.replace("OPENED.append", "import no_such_helper; OPENED.append")
    install("acme", source, requires=("sqlite3",))
    with pytest.raises(ConfigurationError) as caught:
        open_driver("acme")
    assert type(caught.value) is ConfigurationError
    assert "broken" in str(caught.value)
    assert "no_such_helper" in str(caught.value)
    assert "pip install" not in str(caught.value)
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_a_name_missing_in_an_installed_client_library_is_shown_as_it_is(install: Install) -> None:
    source = GOOD.replace("OPENED.append", "from sqlite3 import no_such_name; OPENED.append")
    install("acme", source, requires=("sqlite3",))
    assert "no_such_name" in refused(ConfigurationError, "acme")


# What setting up would do

WITH_SCHEMA = GOOD.replace("open=open_driver)", "open=open_driver, schema=schema)").replace(
    "@hookimpl",
    """def schema(url, *, create=False, size=1):
        return " ".join(("CREATE", str(url), str(size)))

    @hookimpl""",
)


def test_a_schema_is_asked_for_as_a_driver_is_and_needs_no_client_library(install: Install) -> None:
    module = install("acme", WITH_SCHEMA, schemes=("acme",), requires=("no_such_client",))
    assert schema("acme") == "CREATE None 1"
    assert schema("acme", url="acme://host", size=3) == "CREATE acme://host 3"
    assert schema("acme://host") == "CREATE acme://host 1"
    assert sys.modules[module].OPENED == []


def test_a_backend_with_nothing_to_set_up_has_no_schema(install: Install) -> None:
    install("acme")
    assert schema("acme") is None
    assert schema("memory") is None


def test_a_schema_that_cannot_be_told_is_refused_as_a_driver_is(install: Install) -> None:
    install("acme", WITH_SCHEMA, schemes=("acme",))
    for error, message, asked, options in (
        (UnknownBackend, "Did you mean 'acme'?", "acne", {}),
        (ConfigurationError, "acme://", "acme", {"url": f"sqlite://{HIDDEN}"}),
        (ConfigurationError, "'sise'", "acme", {"sise": 3}),
    ):
        with pytest.raises(error) as caught:
            schema(asked, **options)
        assert message in str(caught.value)
        assert HIDDEN not in str(caught.value)


# The version of the contract that a driver was written for

OF_CONTRACT = GOOD.replace("open=open_driver)", "open=open_driver, contract=VERSION)")


def test_the_own_backends_are_of_the_present_contract() -> None:
    mine = [one for one in diagnose() if one.distribution == "stm-backends"]
    assert {one.contract for one in mine} == {CONTRACT}
    assert len(mine) >= 6


def test_a_plugin_that_names_no_contract_is_of_the_first(install: Install) -> None:
    install("acme")
    (acme,) = (one for one in diagnose() if one.name == "acme")
    assert (acme.contract, acme.state, acme.reason) == (1, "ready", "")


def test_a_driver_of_an_earlier_contract_opens_and_what_it_lacks_is_said(
    install: Install, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(plugins, "CONTRACT", 3)
    monkeypatch.setattr(plugins, "ADDED", {2: ["a method `rename`"], 3: ["`load` by number", "a trait"]})
    install("acme", OF_CONTRACT.replace("VERSION", "1"), schemes=("acme",))
    install("later", OF_CONTRACT.replace("VERSION", "3"), distribution="later-stm")
    for asked in ("acme", "acme://host"):
        assert isinstance(open_driver(asked), MemoryDriver)
    assert isinstance(open_driver("later"), MemoryDriver)
    found = {one.name: one for one in diagnose()}
    assert (found["acme"].state, found["acme"].contract) == ("ready", 1)
    assert found["acme"].reason.endswith("does without: a method `rename`; `load` by number; a trait")
    assert found["later"].reason == ""
    assert [one.getMessage() for one in caplog.records] == [found["acme"].reason]


def test_a_driver_of_a_later_contract_is_refused_with_what_to_install(install: Install) -> None:
    install("acme", OF_CONTRACT.replace("VERSION", str(CONTRACT + 1)), schemes=("acme",))
    for asked in ("acme", "acme://host"):
        message = refused(ConfigurationError, asked)
        assert f"'acme' of acme-stm 1.5 needs version {CONTRACT + 1} of the driver contract" in message
        assert message.endswith(f"has version {CONTRACT}: pip install --upgrade stm-backends")
    with pytest.raises(ConfigurationError):
        schema("acme")
    (acme,) = (one for one in diagnose() if one.name == "acme")
    assert (acme.state, acme.reason, acme.schemes) == ("newer contract", message, ("acme",))
    assert acme.install == "pip install --upgrade stm-backends"


@pytest.mark.parametrize("version", ["0", "-1", "True", "'1'", "1.0", "None"])
def test_a_contract_that_is_no_version_is_a_broken_plugin(install: Install, version: str) -> None:
    install("acme", OF_CONTRACT.replace("VERSION", version))
    assert "its plugin's `contract` is not a number from 1 on" in refused(ConfigurationError, "acme")
    (acme,) = (one for one in diagnose() if one.name == "acme")
    assert (acme.state, acme.contract) == ("broken", 0)


# A plugin that is broken

BROKEN = {
    "raises when imported": ("raise RuntimeError('boom')", "boom"),
    "exits when imported": ("raise SystemExit(3)", "SystemExit"),
    "is not Python": ("def (", "SyntaxError"),
    "needs a module at its top": ("import no_such_client", "no_such_client"),
    "answers no hook": ("", "return a BackendPlugin"),
    "answers something else": (
        """
        from stm_backends.drivers.plugins import hookimpl
        @hookimpl
        def stm_backend():
            return 42
        """,
        "return a BackendPlugin",
    ),
    "misspells the hook": (
        """
        from stm_backends.drivers.plugins import hookimpl
        @hookimpl
        def stm_backends():
            return None
        """,
        "stm_backends",
    ),
    "raises in the hook": (
        """
        from stm_backends.drivers.plugins import hookimpl
        @hookimpl
        def stm_backend():
            raise OSError('boom')
        """,
        "boom",
    ),
    "calls itself something else": (GOOD.replace("{name!r}", "'other{name}'"), "'otheracme'"),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_plugin_says_what_is_wrong_with_it_and_breaks_nobody_else(
    install: Install, how: str
) -> None:
    source, trace = BROKEN[how]
    install("acme", source)
    install("fine", schemes=("fine", "alsofine"), distribution="fine-stm")
    message = refused(ConfigurationError, "acme")
    assert "acme-stm 1.5" in message
    assert trace in message
    assert trace in refused(ConfigurationError, "acme://host")
    assert isinstance(open_driver("alsofine://host"), MemoryDriver)
    states = {diagnosis.name: diagnosis for diagnosis in diagnose()}
    assert states["acme"].state == "broken"
    assert trace in states["acme"].reason
    assert states["fine"].state == "ready"
    assert states["memory"].state == "ready"


def test_a_scheme_that_a_broken_plugin_may_have_claimed_is_answered_with_a_note(install: Install) -> None:
    install("acme", "import no_such_helper")
    with pytest.raises(UnknownBackend) as caught:
        open_driver("acmes://host")
    assert "acme" in caught.value.__notes__[0]
    with pytest.raises(UnknownBackend) as caught:
        open_driver("acmes")
    assert not hasattr(caught.value, "__notes__")


def test_a_half_removed_package_breaks_nobody_else(install: Install, tmp_path: Path) -> None:
    install("acme")
    (tmp_path / "acme_stm-1.5.dist-info" / "METADATA").unlink()
    assert isinstance(open_driver("memory"), MemoryDriver)
    assert {diagnosis.name for diagnosis in diagnose()} >= {"acme", "memory"}


def test_the_diagnosis_tells_the_states_apart(install: Install) -> None:
    install("acme", schemes=("acme",), requires=("no_such_client",), extras=("acme",))
    install("double", distribution="one-stm")
    install("double", distribution="two-stm")
    found = {(diagnosis.name, diagnosis.distribution): diagnosis for diagnosis in diagnose()}
    acme = found["acme", "acme-stm"]
    assert (acme.state, acme.version, acme.schemes) == ("missing extra", "1.5", ("acme",))
    assert 'pip install "acme-stm[acme]"' in acme.reason
    for distribution in ("one-stm", "two-stm"):
        assert found["double", distribution].state == "ambiguous"
        assert "one-stm" in found["double", distribution].reason
        assert "two-stm" in found["double", distribution].reason
    memory = found["memory", "stm-backends"]
    assert (memory.state, memory.schemes, memory.reason) == ("ready", ("memory",), "")


def test_the_scheme_of_a_url_is_what_stands_before_the_colon() -> None:
    assert plugins.scheme_of("MongoDB+SRV://h") == "mongodb+srv"
    assert plugins.scheme_of("no scheme") == ""
    assert plugins.scheme_of("1x://h") == ""


@pytest.mark.parametrize(
    ("given", "write"),
    [
        (Path("x.db"), "sqlite:///x.db"),
        (Path("/srv/a b.db"), "sqlite:////srv/a%20b.db"),
        ("x.db", "sqlite:///x.db"),
        ("./data/x.sqlite3", "sqlite:///./data/x.sqlite3"),
        ("/srv/x.db", "sqlite:////srv/x.db"),
    ],
)
def test_a_path_is_answered_with_the_url_to_write(given: Any, write: str) -> None:
    with pytest.raises(UnknownBackend) as caught:
        open_driver(given)
    assert repr(write) in str(caught.value)


def test_a_windows_path_is_not_taken_for_a_url() -> None:
    assert "a path is not a backend" in refused(UnknownBackend, r"C:\data\x.db")


@pytest.mark.parametrize("given", [None, 7, b"memory", {}, MemoryDriver()])
def test_what_is_no_text_is_answered_with_what_to_write(given: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"sqlite:///conversations\.db"):
        open_driver(given)


def test_a_url_beside_a_name_is_text_and_a_url() -> None:
    with pytest.raises(ConfigurationError, match=r"sqlite:///x\.db"):
        open_driver("sqlite", url="x.db")
    with pytest.raises(ConfigurationError, match=r"sqlite:///x\.db"):
        open_driver("sqlite", url=Path("x.db"))  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="url is given as a string"):
        open_driver("sqlite", url=7)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="give path differently"):
        open_driver("sqlite", url="sqlite:///x.db", path="y.db")
