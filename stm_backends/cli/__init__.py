"""The command line: `stm-backends`, or `python -m stm_backends`."""

from __future__ import annotations

import importlib.util
import sys

from stm_backends.extras import install_command


def main() -> None:
    """Run the command line. Prints the install command if its dependencies are missing."""
    missing = [name for name in ("typer", "rich") if importlib.util.find_spec(name) is None]
    if missing:
        sys.stderr.write(
            f"The command line needs {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} "
            "not installed:\n"
            f"  {install_command('stm-backends', 'cli')}\n"
        )
        raise SystemExit(2)
    try:
        # Imported here, because the library itself needs neither.
        from stm_backends.cli.app import app  # noqa: PLC0415 -- as above

        app(prog_name="stm-backends")
    except KeyboardInterrupt:  # during the imports; commands handle it themselves
        sys.stderr.write("Interrupted.\n")
        raise SystemExit(130) from None
