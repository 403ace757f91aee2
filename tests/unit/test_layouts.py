"""What a driver may do with the layout that it finds beside the data."""

from __future__ import annotations

import pytest

from stm_backends.drivers.layouts import Layout, is_outdated, require_usable
from stm_backends.errors import ConfigurationError

OURS = Layout(version=3, readable_since=2)


def test_the_same_layout_is_not_outdated() -> None:
    assert not is_outdated(OURS, OURS)


def test_an_older_layout_is_outdated() -> None:
    assert is_outdated(Layout(2, 1), OURS)


def test_a_newer_layout_that_old_code_can_use_is_used() -> None:
    assert not is_outdated(Layout(version=9, readable_since=3), OURS)


def test_a_newer_layout_that_old_code_cannot_use_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="upgrade stm-backends"):
        is_outdated(Layout(version=9, readable_since=4), OURS)


def test_a_layout_too_old_to_be_used_without_migration_is_refused() -> None:
    require_usable(Layout(2, 1), OURS, oldest=2)
    with pytest.raises(ConfigurationError, match="create=True"):
        require_usable(Layout(1, 1), OURS, oldest=2)
