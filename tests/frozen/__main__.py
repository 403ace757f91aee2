"""`python -m tests.frozen` keeps what the present version stores and names, in the folder of its release."""

from __future__ import annotations

import asyncio

from tests.frozen import names, stored

(stored.RELEASE / "stored").mkdir(exist_ok=True)
asyncio.run(stored.keep(stored.RELEASE / "stored"))
names.keep(stored.RELEASE)
