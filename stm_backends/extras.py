"""The error for a missing library that an extra would install."""

from __future__ import annotations

import re

from stm_backends.errors import MissingExtra


def install_command(distribution: str, *extras: str) -> str:
    """Return the command that installs the requirements of an installed distribution's extras.

    It names the libraries rather than the distribution: the libraries are on the package index even if the
    distribution was installed from a clone or a wheel.
    """
    from importlib.metadata import PackageNotFoundError, requires  # noqa: PLC0415 -- slow, and rarely needed

    try:
        required = [*filter(None, map(_EXTRA_REQUIREMENT.fullmatch, requires(distribution) or ()))]
    except PackageNotFoundError:
        required = []
    asked = {normalized(extra) for extra in extras}
    needed = [one["library"] for one in required if normalized(one["extra"]) in asked]
    quoted = (f'"{one}"' for one in needed or [f"{distribution}[{','.join(extras)}]"])
    return f"pip install {' '.join(quoted)}"


def missing_extra(extra: str, error: ModuleNotFoundError) -> Exception:
    """Return the error for a failed import: `MissingExtra` if the extra would have provided the module.

    If an installed library lacks the module, the extra does not matter, and that error is returned unchanged.
    """
    module = (error.name or "").partition(".")[0]
    if module != _BROUGHT[extra]:
        return error
    missing = MissingExtra(
        f"this needs the module {module!r} of the extra stm-backends[{extra}], which is not installed: "
        f"{install_command('stm-backends', extra)}"
    )
    missing.name = module
    return missing


def normalized(name: str) -> str:
    """Return the name of a distribution or an extra as installers compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


_EXTRA_REQUIREMENT = re.compile(r"(?P<library>[^;\s]+)\s*;\s*extra\s*==\s*['\"](?P<extra>[^'\"]+)['\"]")
"""A requirement of an extra without further conditions, as built distributions state it."""

_BROUGHT = {
    "openai": "openai",
    "openai-agents": "agents",
    "langchain": "langchain_core",
    "langgraph": "langgraph",
    "claude-agent-sdk": "claude_agent_sdk",
    "google-adk": "google",
    "pydantic-ai": "pydantic_ai",
    "agent-framework": "agent_framework",
    "strands": "strands",
    "llama-index": "llama_index",
    "otel": "opentelemetry",
    "encryption": "cryptography",
    "inspect": "starlette",
}
"""The module that each extra provides."""
