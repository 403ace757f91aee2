"""How tests of the command line call it in their own process."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import typer.main
import typer.testing


@pytest.fixture(scope="session", autouse=True)
def _the_command_is_made_once() -> Iterator[None]:
    """Typer's runner makes it from its functions in each call, which takes longer than most commands."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.testing, "_get_command", functools.cache(typer.main.get_command))
        yield
