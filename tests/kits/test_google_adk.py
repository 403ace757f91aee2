"""ADK's own tests of session services, with ours in the place of theirs, on each datastore.

Neither its wheel nor its source distribution has tests, so they come from its repository. Where that cannot
be reached, `STM_TEST_GOOGLE_ADK` names a folder with them.
"""

from __future__ import annotations

import os
import shutil
import urllib.request
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.kits.running import passed
from tests.support.places import EACH, Place

THEIRS = "tests/unittests/sessions/test_session_service.py"


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with their tests, of the installed release, which find our services in `_conformance`."""
    folder = tmp_path_factory.mktemp("google-adk")
    file = folder / THEIRS
    file.parent.mkdir(parents=True)
    for package in (file.parent, *file.parent.parents[:2]):
        (package / "__init__.py").touch()
    ours = "from our_google_adk import BACKENDS, session_service\n"
    (file.parent / "_conformance.py").write_text(ours, encoding="utf-8")
    if given := os.environ.get("STM_TEST_GOOGLE_ADK"):
        shutil.copy(Path(given) / file.name, file)
        return folder
    tag = f"v{version('google-adk')}"
    url = f"https://raw.githubusercontent.com/google/adk-python/{tag}/{THEIRS}"
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            file.write_bytes(answer.read())
    except OSError as error:
        pytest.skip(f"the tests of {tag} cannot be had: {error}")
    return folder


@pytest.mark.full
@pytest.mark.parametrize("datastore", ["memory", "sqlite", *EACH])
def test_what_adk_asks_of_its_own_services_ours_does(
    datastore: str, theirs: Path, place_on: Callable[[str], Place]
) -> None:
    url = "memory://" if datastore == "memory" else place_on(datastore).url
    options = ("-o", "asyncio_mode=auto", "--import-mode=prepend", "--rootdir", str(theirs))
    assert passed("our_google_adk", *options, THEIRS, folder=theirs, url=url) >= 16
