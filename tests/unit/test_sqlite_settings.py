"""What a SQLite URL says, and what it cannot say."""

import contextlib
import sqlite3
from pathlib import Path

import pytest

from stm_backends.drivers.plugins import open_driver as open_by_name
from stm_backends.drivers.plugins import schema
from stm_backends.drivers.sqlite import SqliteSettings, open_driver
from stm_backends.errors import ConfigurationError


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("sqlite:///rel.db", "rel.db"),
        ("sqlite:///dir/rel.db", "dir/rel.db"),
        ("sqlite:////srv/abs.db", "/srv/abs.db"),
        ("sqlite:///with%20space%23%3F%25.db", "with space#?%.db"),
        ("sqlite:///gr%C3%BC%C3%9Fe.db", "grüße.db"),
        ("sqlite:///file:odd.db", "file:odd.db"),
    ],
)
def test_a_path_is_read_as_sqlalchemy_reads_it(url, path):
    assert SqliteSettings.from_url(url) == SqliteSettings(path=path)


def test_settings_follow_the_path_as_parameters():
    settings = SqliteSettings.from_url(
        "sqlite:///a.db?synchronous=full&deadline_s=2.5&max_entry_bytes=10&max_record_bytes=20"
    )
    assert settings == SqliteSettings(
        path="a.db", synchronous="full", deadline_s=2.5, max_entry_bytes=10, max_record_bytes=20
    )


def test_a_setting_that_the_url_and_the_options_give_differently_is_refused():
    with pytest.raises(ConfigurationError, match="give synchronous differently"):
        SqliteSettings.from_url("sqlite:///a.db?synchronous=full", synchronous="normal")
    settings = SqliteSettings.from_url("sqlite:///a.db?deadline_s=1", deadline_s=1.0, synchronous="full")
    assert settings == SqliteSettings(path="a.db", deadline_s=1.0, synchronous="full")


def test_a_file_that_is_given_twice_is_refused():
    with pytest.raises(ConfigurationError, match="give path differently"):
        open_driver("sqlite:///x.db", path="y.db")


@pytest.mark.parametrize(("text", "value"), [("true", True), ("True", True), ("false", False)])
def test_whether_the_file_must_exist_can_be_said_in_the_url(text, value):
    assert SqliteSettings.from_url(f"sqlite:///a.db?must_exist={text}").must_exist is value


def test_a_path_object_names_a_file_too():
    assert SqliteSettings.from_options(path=Path("dir") / "a.db").path == "dir/a.db"


@pytest.mark.parametrize(
    "options",
    [
        {"deadline_s": "5"},
        {"deadline_s": -1},
        {"deadline_s": float("inf")},
        {"deadline_s": None},
        {"max_entry_bytes": "5"},
        {"max_entry_bytes": 0},
        {"max_record_bytes": 1.5},
        {"clock": 5},
        {"must_exist": "yes"},
        {"path": 5},
    ],
    ids=repr,
)
def test_an_option_of_another_type_is_refused_by_its_name(options):
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        open_driver(None, **{"path": "a.db", **options})


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("sqlite://", "use the backend 'memory'"),
        ("sqlite:///", "use the backend 'memory'"),
        ("sqlite:orders.db", "write sqlite:///orders.db"),
        ("SQLite:orders.db", "write sqlite:///orders.db"),
        ("sqlite:/srv/orders.db", "write sqlite:////srv/orders.db"),
        ("sqlite:with space.db", "write sqlite:///with%20space.db"),
        ("sqlite:////", "names a directory"),
        ("sqlite:////srv/", "names a directory"),
        ("x.db", "write sqlite:///x.db"),
        ("/srv/x.db", "write sqlite:////srv/x.db"),
        ("sqlite:///a.db?must_exist=maybe", "not true or false"),
        ("sqlite:///:memory:", "use the backend 'memory'"),
        ("sqlite://rel.db", "sqlite:///file.db is a relative path"),
        ("sqlite://host/rel.db", "has no host"),
        ("sqlite:///a.db#b", "%23"),
        ("sqlite:///a%00.db", "NUL"),
        ("mysql:///a.db", "begins with sqlite://"),
        ("sqlite:///a.db?synchronus=full", "did you mean 'synchronous'"),
        ("sqlite:///a.db?path=b", "no setting 'path'"),
        ("sqlite:///a.db?synchronous=off", "'normal' or 'full'"),
        ("sqlite:///a.db?synchronous=", "'normal' or 'full'"),
        ("sqlite:///a.db?deadline_s=soon", "not a number"),
        ("sqlite:///a.db?deadline_s=nan", "positive"),
        ("sqlite:///a.db?deadline_s=0", "positive"),
        ("sqlite:///a.db?deadline_s=1&deadline_s=2", "twice"),
        ("sqlite:///a.db?max_entry_bytes=0", "max_entry_bytes must be an integer between"),
        ("sqlite:///a.db?max_record_bytes=1000000000", "max_record_bytes must be an integer between"),
    ],
)
def test_what_cannot_work_is_refused_with_a_remedy(url, says):
    with pytest.raises(ConfigurationError) as caught:
        SqliteSettings.from_url(url)
    assert says in str(caught.value)


def test_an_unknown_option_is_refused_with_a_near_miss():
    with pytest.raises(ConfigurationError, match="did you mean 'deadline_s'"):
        open_driver("sqlite:///a.db", deadline=1)


def test_a_file_can_be_named_by_an_option():
    assert open_driver(None, path="a.db", synchronous="full").traits.durability.endswith("and a power cut")
    with pytest.raises(ConfigurationError, match="needs a file"):
        open_driver(None)


def test_the_traits_say_what_the_settings_mean():
    traits = open_driver("sqlite:///a.db?max_entry_bytes=10&max_record_bytes=20&deadline_s=2").traits
    assert (traits.reach, traits.clock) == ("host", "host")
    assert (traits.max_entry, traits.max_record, traits.deadline) == (10, 20, 2.0)
    assert "power cut may lose the last transactions" in traits.durability


# The schema


def tables(path):
    """Return what is set up in a file, however its text is laid out."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        rows = connection.execute("SELECT type, name, sql FROM sqlite_master").fetchall()
        (mode,) = connection.execute("PRAGMA journal_mode").fetchone()
        versions = connection.execute("SELECT name, value FROM stm_meta").fetchall()
    return {(kind, name, " ".join((sql or "").split())) for kind, name, sql in rows}, mode, versions


async def test_the_schema_sets_up_what_opening_a_new_file_does(tmp_path):
    by_hand, by_opening = tmp_path / "by_hand.db", tmp_path / "by_opening.db"
    with contextlib.closing(sqlite3.connect(by_hand)) as connection:
        connection.executescript(schema("sqlite"))
    driver = open_by_name("sqlite", path=by_opening)
    await driver.open()
    await driver.close()

    assert tables(by_hand) == tables(by_opening)


def test_the_schema_refuses_what_opening_would_and_makes_no_file(tmp_path):
    schema(f"sqlite:///{tmp_path}/a.db")
    schema("sqlite", path=tmp_path / "a.db")
    for url, options in ((f"sqlite:///{tmp_path}/a.db?synchronous=often", {}), ("sqlite", {"pth": "a.db"})):
        with pytest.raises(ConfigurationError):
            schema(url, **options)
    assert list(tmp_path.iterdir()) == []
