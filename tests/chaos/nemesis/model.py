"""What happens to the model that writes the summaries, for all pods at once."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final

from tests.chaos.history import Writer
from tests.chaos.stands import Fault
from tests.chaos.turns import HOWS, Model

NAMES: Final = {f"model-{how}": how for how in HOWS if how != "well"}
"""What the model becomes by a fault of this name."""


def faults(model: Model, writer: Writer) -> Mapping[str, Fault]:
    """Return what may happen to the model, by name."""
    return {name: partial(_changed, model, writer, how) for name, how in NAMES.items()}


@asynccontextmanager
async def _changed(
    model: Model, writer: Writer, how: str, chance: random.Random, seconds: float
) -> AsyncIterator[dict[str, Any]]:
    become(model, writer, how)
    try:
        yield {}
    finally:
        become(model, writer, "well")


def become(model: Model, writer: Writer, how: str) -> None:
    """Change the model, and note it."""
    model.become(how)
    writer.info("model", how=how)
