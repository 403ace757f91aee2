"""The page for authors of backends explains every trait of a driver, with its default."""

from __future__ import annotations

import re
from dataclasses import MISSING, fields
from pathlib import Path

from stm_backends.drivers.contract import NO_LIMIT, Traits

PAGE = Path(__file__).parents[2] / "docs/how-to/writing-a-backend.md"

TABLE = PAGE.read_text("utf-8").partition("| trait | default | meaning |\n")[2].partition("\n\n")[0]

ROWS = re.findall(r"^\| `(\w+)` \| (.+?) \| .+ \|$", TABLE, re.MULTILINE)


def shown(default: object) -> str:
    if default is MISSING:
        return "required"
    return "no limit" if default == NO_LIMIT else f"`{default!r}`"


def test_the_table_of_traits_has_every_field_with_its_default() -> None:
    assert [(each.name, shown(each.default)) for each in fields(Traits)] == ROWS
