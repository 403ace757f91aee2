"""The command line: `stm-backends`, or `python -m stm_backends`."""

from __future__ import annotations

import importlib.util
import sys


def main() -> None:
    """Run the command line; says how to install what it needs if that is missing."""
    missing = [name for name in ("typer", "rich") if importlib.util.find_spec(name) is None]
    if missing:
        sys.stderr.write(
            f"The command line needs {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} "
            "not installed:\n"
            '  pip install "stm-backends[cli]"\n'
        )
        raise SystemExit(2)
    # Late, so that the library's users need neither.
    from stm_backends.cli.app import app  # noqa: PLC0415 -- as above

    app(prog_name="stm-backends")
