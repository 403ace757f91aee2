"""What a SQLite URL says, and what it cannot say."""

import pytest

from stm_backends.errors import ConfigurationError
from stm_backends.sqlite import SqliteSettings, open_driver


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


def test_keyword_arguments_win_over_parameters():
    assert SqliteSettings.from_url("sqlite:///a.db?deadline_s=1", deadline_s=2.0).deadline_s == 2.0


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("sqlite://", "use the backend 'memory'"),
        ("sqlite:///", "use the backend 'memory'"),
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
        ("sqlite:///a.db?max_entry_bytes=0", "max_entry_bytes is between"),
        ("sqlite:///a.db?max_record_bytes=1000000000", "max_record_bytes is between"),
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
    assert "power cut may take the last transactions" in traits.durability
