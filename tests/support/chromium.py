"""A headless Chromium from the archive of Debian or Ubuntu, driven by Playwright."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tests.support import apt

if TYPE_CHECKING:
    from playwright.sync_api import Browser

PATIENCE_MS = 60_000
"""How long an expectation waits for the fact before it ends a test that hangs."""


@contextmanager
def running() -> Iterator[Browser]:
    """Yield a browser. Raises `apt.NotAtHand` where there is none and apt has none."""
    from playwright.sync_api import expect, sync_playwright  # noqa: PLC0415 -- most tests need none

    program = apt.find_with_all("chromium", "chromium")
    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=program.path,
            # Its sandbox needs rights that containers do not give; it loads nothing but pages of the tests.
            args=["--no-sandbox", "--disable-dev-shm-usage"],
            env={**os.environ, **program.environment},
        )
        yield browser
        browser.close()
