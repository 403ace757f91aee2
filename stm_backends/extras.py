"""What is said when the library that a module is for is not installed."""

from __future__ import annotations

from stm_backends.errors import MissingExtra


def missing_extra(extra: str, error: ModuleNotFoundError) -> Exception:
    """Return what to raise for an import that failed: `MissingExtra` if the extra would have brought it.

    A module that one of the installed libraries lacks is no matter of the extra; that error is returned as
    it is.
    """
    module = (error.name or "").partition(".")[0]
    if module != _BROUGHT[extra]:
        return error
    missing = MissingExtra(
        f'this needs the module {module!r}, which is not installed: pip install "stm-backends[{extra}]"'
    )
    missing.name = module
    return missing


_BROUGHT = {
    "openai": "openai",
    "openai-agents": "agents",
    "langchain": "langchain_core",
    "otel": "opentelemetry",
    "encryption": "cryptography",
}
"""The module that each extra is there for."""
