"""Who may import whom, as the design says it; read from the source, so that no path is missed."""

from __future__ import annotations

import ast
import graphlib
import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

import stm_backends
from tests.support.command_line import without_coverage

ROOT = Path(stm_backends.__file__).parent.parent
DRIVER_PACKAGES = {"stm_backends_redis", "stm_backends_dynamo", "stm_backends_mongo", "stm_backends_postgres"}
CLIENTS = {"redis", "valkey", "boto3", "aioboto3", "aiobotocore", "pymongo", "motor", "psycopg", "asyncpg"}


def modules_of(package: str) -> dict[str, Path]:
    """Return the modules of a package by their dotted names."""
    found: dict[str, Path] = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = {
    name: path
    for package in ("stm_backends", *sorted(DRIVER_PACKAGES))
    for name, path in modules_of(package).items()
}


def is_for_types_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def imports_of(name: str) -> set[str]:
    """Return what a module imports at run time, at its top or later, as dotted names."""
    found: set[str] = set()
    waiting: list[ast.AST] = [ast.parse(MODULES[name].read_text("utf-8"))]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name} imports by a relative path"
            module = node.module or ""
            submodules = {f"{module}.{alias.name}" for alias in node.names} & MODULES.keys()
            found |= submodules
            if submodules != {f"{module}.{alias.name}" for alias in node.names}:
                found.add(module)
        inner = node.orelse if is_for_types_only(node) else ast.iter_child_nodes(node)
        # No expression holds a statement, and most of a tree is expressions.
        waiting += [one for one in inner if not isinstance(one, ast.expr)]
    return found


IMPORTS = {name: imports_of(name) for name in MODULES}


def ours(name: str) -> set[str]:
    """Return the names, within the core, of the core's modules that one of them imports."""
    return {
        one.removeprefix("stm_backends.")
        for one in IMPORTS[f"stm_backends.{name}"]
        if is_within(one, "stm_backends")
    }


def reach(name: str) -> set[str]:
    """Return every module that importing one brings along, itself included."""
    found: set[str] = set()
    waiting = [name]
    while waiting:
        one = waiting.pop()
        if one not in found:
            found.add(one)
            waiting += IMPORTS.get(one, ())
    return found


def is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


CORE = sorted(name for name in MODULES if is_within(name, "stm_backends"))


def test_the_source_was_found() -> None:
    assert {
        "stm_backends.drivers.contract",
        "stm_backends.drivers.sqlite",
        "stm_backends.backend",
        *DRIVER_PACKAGES,
    } <= MODULES.keys()
    assert "asyncio" in IMPORTS["stm_backends.memory.tasks"]
    assert "stm_backends.errors" in IMPORTS["stm_backends.types"]
    # Within a function, and behind a name that is a module.
    assert "importlib.metadata" in IMPORTS["stm_backends.drivers.plugins"]
    assert "stm_backends.records.keys" in IMPORTS["stm_backends.records.directory"]


def breaches(names: Iterable[str], is_forbidden: Callable[[str], bool]) -> list[str]:
    """Return who imports what it must not."""
    return [f"{name} imports {one}" for name in names for one in sorted(IMPORTS[name]) if is_forbidden(one)]


def outside(package: str) -> list[str]:
    return [name for name in MODULES if not is_within(name, package)]


def top(name: str) -> str:
    return name.partition(".")[0]


def test_the_core_imports_no_driver_package_and_no_client_library() -> None:
    assert not breaches(CORE, lambda one: top(one) in DRIVER_PACKAGES | CLIENTS)


def test_only_its_own_command_imports_the_conformance_suite() -> None:
    suite, command = "stm_backends.testing", "stm_backends.cli.conformance"
    others = [module for module in outside(suite) if module != command]
    assert not breaches(others, lambda one: is_within(one, suite))


def test_only_the_command_line_imports_the_command_line() -> None:
    command = "stm_backends.cli"
    assert not breaches(outside(command), lambda one: is_within(one, command))


def test_only_the_command_line_imports_the_page_and_only_serving_needs_its_extra() -> None:
    page = "stm_backends.inspect"
    others = [name for name in outside(page) if not is_within(name, "stm_backends.cli")]
    assert not breaches(others, lambda one: is_within(one, page))
    served = {f"{page}.app", f"{page}.serving"}
    quiet = [name for name in MODULES if is_within(name, page) and name not in served]
    assert not breaches(quiet, lambda one: one in served or top(one) in {"starlette", "uvicorn"})


@pytest.mark.parametrize("part", ["sync", "telemetry.opentelemetry"])
def test_nothing_else_imports_what_only_programs_use(part: str) -> None:
    package = f"stm_backends.{part}"
    assert not breaches(outside(package), lambda one: is_within(one, package))


def test_nothing_else_imports_what_joins_memories_to_agents() -> None:
    joints = {"stm_backends.agents", "stm_backends.integrations"}

    def is_joint(name: str) -> bool:
        return any(is_within(name, joint) for joint in joints)

    assert not breaches([name for name in MODULES if not is_joint(name)], is_joint)
    # What fits any agent knows of none.
    own = [name for name in MODULES if is_within(name, "stm_backends.agents")]
    assert not breaches(own, lambda one: is_within(one, "stm_backends.integrations"))


def test_a_framework_is_imported_by_its_own_module_alone() -> None:
    frameworks = {
        "openai": {"openai"},
        "openai_agents": {"agents"},
        "langchain": {"langchain_core"},
        "claude_agent_sdk": {"claude_agent_sdk"},
        "google_adk": {"google"},
        "langgraph": {"langgraph"},
        "pydantic_ai": {"pydantic_ai"},
        "agent_framework": {"agent_framework"},
        "strands": {"strands"},
        "llama_index": {"llama_index"},
    }
    for module, brought in frameworks.items():
        own = f"stm_backends.integrations.{module}"
        assert brought <= {top(one) for name in MODULES if is_within(name, own) for one in IMPORTS[name]}
        assert not breaches(outside(own), lambda one, brought=brought: top(one) in brought)
        assert not breaches(
            [own], lambda one, own=own: one in {f"stm_backends.integrations.{m}" for m in frameworks}
        )


@pytest.mark.parametrize(
    ("module", "library", "package"),
    [
        ("openai", "openai", "openai"),
        ("openai_agents", "agents", "openai-agents"),
        ("langchain", "langchain_core", "langchain-core"),
        ("claude_agent_sdk", "claude_agent_sdk", "claude-agent-sdk"),
        ("google_adk", "google", "google-adk"),
        ("langgraph", "langgraph", "langgraph"),
        ("pydantic_ai", "pydantic_ai", "pydantic-ai-slim"),
        ("agent_framework", "agent_framework", "agent-framework-core"),
        ("strands", "strands", "strands-agents"),
        ("llama_index", "llama_index", "llama-index-core"),
    ],
)
def test_a_module_without_its_extra_says_how_to_install_it(module: str, library: str, package: str) -> None:
    program = f"""
import sys
from stm_backends import MissingExtra
sys.modules[{library!r}] = None
try:
    import stm_backends.integrations.{module}
except MissingExtra as error:
    print(error.name, error)
"""
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert ran.stdout.startswith(library)
    assert f"the extra stm-backends[{module.replace('_', '-')}]" in ran.stdout
    assert "pip install " in ran.stdout
    assert f'"{package}>=' in ran.stdout


def test_a_module_that_the_framework_itself_lacks_is_no_matter_of_the_extra() -> None:
    program = """
import sys
sys.modules["pydantic"] = None
try:
    import stm_backends.integrations.openai
except ImportError as error:
    print(type(error).__name__, error.name)
"""
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert ran.stdout.split() == ["ModuleNotFoundError", "pydantic"]


def test_the_only_dependency_is_pluggy() -> None:
    extras = {
        # The command `conformance` runs the suite by pytest, once it has seen that it is there.
        "stm_backends.cli": {"typer", "rich", "click", "pytest"},
        "stm_backends.testing": {"pytest", "pytest_asyncio", "hypothesis"},
        "stm_backends.telemetry.opentelemetry": {"opentelemetry"},
        "stm_backends.integrations": {
            *("openai", "agents", "langchain_core", "claude_agent_sdk", "google", "langgraph"),
            *("pydantic_ai", "pydantic", "agent_framework", "strands", "llama_index"),
        },
        "stm_backends.sealing": {"cryptography"},
        "stm_backends.inspect": {"starlette", "uvicorn"},
    }
    base = sys.stdlib_module_names | {"stm_backends", "pluggy"}
    for package, more in extras.items():
        names = [name for name in CORE if is_within(name, package)]
        assert not breaches(names, lambda one, known=base | more: top(one) not in known)
    names = [name for name in CORE if not any(is_within(name, package) for package in extras)]
    assert not breaches(names, lambda one: top(one) not in base)


LAYERS = (
    (
        "types",
        "protocols",
        "errors",
        "extras",
        "logs",
        "races",
        "handed_in",
        "guarded",
        "tokens",
        "cutting",
        "plain_json",
    ),
    ("drivers",),
    ("drivers.sqlite",),
    ("records",),
    ("records.large", "telemetry", "sealing", "catalogue", "messages", "work"),
    ("memory", "history"),
    ("memory.local", "memory.shared"),
    ("admin",),
    ("tiers",),
    ("", "backend"),
    ("agents", "inspect", "sync", "testing.workbench", "integrations.blocking", "integrations.whose"),
    (
        "integrations",
        "integrations.langgraph",
        "cli.replay",
        "testing.driver_checks",
        "testing.memory_checks",
    ),
    ("testing",),
    ("testing.runner",),
    ("cli", "__main__"),
)
"""The rooms of the core, from the bottom up: folders, and the modules of the front door by themselves.

So are those that the folders of integrations share.
"""

LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}


def room_of(name: str) -> str:
    """Return the folder that a module of the core lies in, or its own name if it lies in none."""
    own = name.removeprefix("stm_backends").removeprefix(".")
    return own if own in LEVEL else own.rpartition(".")[0]


BETWEEN_ROOMS = {
    (room_of(name), room_of(one))
    for name in CORE
    for one in IMPORTS[name] & set(CORE)
    if room_of(name) != room_of(one)
}


def test_every_module_of_the_core_lies_in_a_room_of_the_list() -> None:
    assert {room_of(name) for name in CORE} == LEVEL.keys()


def test_a_room_imports_only_rooms_below_it() -> None:
    assert not [pair for pair in sorted(BETWEEN_ROOMS) if LEVEL[pair[0]] < LEVEL[pair[1]]]


def test_no_chain_of_imports_leads_through_more_than_ten_rooms() -> None:
    # Raises CycleError where rooms import each other.
    below = {room: {b for a, b in BETWEEN_ROOMS if a == room} for room in LEVEL}
    longest: dict[str, int] = {}
    for room in graphlib.TopologicalSorter(below).static_order():
        longest[room] = 1 + max((longest[one] for one in below[room]), default=0)
    assert max(longest.values()) <= 10


@pytest.mark.parametrize(
    ("name", "may_import"),
    [
        ("errors", set[str]()),
        ("drivers.contract", set[str]()),
        ("handed_in", set[str]()),
        ("tokens", set[str]()),
        ("cutting", set[str]()),
        ("plain_json", {"errors"}),
        ("types", {"errors", "tokens"}),
        ("protocols", {"types"}),
        ("records.body", {"types"}),
        ("records.usage", set[str]()),
        (
            "records.codec",
            {"errors", "handed_in", "plain_json", "records.body", "records.steps", "records.usage", "types"},
        ),
        ("records.keys", {"drivers.contract", "errors", "logs", "types"}),
        ("records.large.pointers", {"drivers.checks", "errors"}),
        ("memory.view", {"cutting", "errors", "tokens", "types"}),
        (
            "memory.policy",
            {"cutting", "errors", "handed_in", "memory.view", "records.body", "tokens", "types"},
        ),
        ("memory.tasks", {"handed_in", "logs"}),
        ("memory.queues", set[str]()),
        ("telemetry.observer", {"drivers.contract", "types"}),
        (
            "telemetry.opentelemetry",
            {"drivers.contract", "drivers.wrapper", "extras", "handed_in", "telemetry.observer", "types"},
        ),
        ("sync.thread", {"errors"}),
        ("agents.resolving", {"records.identity", "telemetry.guarded", "telemetry.observer", "types"}),
        ("agents.prompt", {"protocols"}),
        ("agents.turns", {"errors", "types"}),
        ("integrations.summary_prompt", {"agents.prompt", "cutting", "memory.policy", "tokens"}),
    ],
)
def test_a_foundation_rests_only_on_what_lies_below_it(name: str, may_import: set[str]) -> None:
    assert ours(name) <= may_import


def test_policy_view_and_messages_know_no_clock_no_loop_and_no_io() -> None:
    forbidden = {"asyncio", "time", "datetime", "random", "logging", "os", "pathlib", "socket", "sqlite3"}
    pure = [name for name in CORE if is_within(name, "stm_backends.messages")]
    pure += ["stm_backends.memory.policy", "stm_backends.memory.view", "stm_backends.cutting"]
    assert not breaches(pure, lambda one: top(one) in forbidden)


def test_the_memory_in_process_knows_no_driver() -> None:
    known = reach("stm_backends.memory.local.memory")
    assert "stm_backends.memory.policy" in known
    above = ("drivers", "memory.shared", "backend", "records.state_store")
    assert not [one for one in known if any(is_within(one, f"stm_backends.{name}") for name in above)]


def test_the_policy_does_not_know_the_memories() -> None:
    memories = ("stm_backends.memory.local", "stm_backends.memory.shared")
    known = reach("stm_backends.memory.policy")
    assert not [one for one in known if any(is_within(one, memory) for memory in memories)]


DRIVER_MODULES = sorted(
    name
    for name in MODULES
    if name.partition(".")[0] in DRIVER_PACKAGES
    or name == "stm_backends.drivers.in_memory"
    or name.startswith("stm_backends.drivers.sqlite")
)


def test_a_driver_imports_the_waist_and_nothing_above_it() -> None:
    contract = ("compacts", "contract", "erasing", "plugins", "settings")
    helpers = ("bounded", "checks", "coalesced", "edge", "home", "layouts", "tasks", "tls_files", "waiting")
    waist = {
        "stm_backends.errors",
        "stm_backends.handed_in",
        *(f"stm_backends.drivers.{one}" for one in (*contract, *helpers)),
    }
    # `memory.py` and `opening.py` join a driver to the core, for programs: they are no part of the driver.
    by_hand = {f"{package}.{module}" for package in DRIVER_PACKAGES for module in ("memory", "opening")}
    for name in (one for one in DRIVER_MODULES if one not in by_hand):
        own = "stm_backends.drivers.sqlite" if name.startswith("stm_backends.drivers.sqlite") else name
        own = top(name) if top(name) in DRIVER_PACKAGES else own
        assert not breaches(
            [name],
            lambda one, own=own: (
                one.startswith("stm_backends") and not one.startswith(own) and one not in waist
            ),
        )


def test_a_driver_of_the_core_is_reached_by_its_plugin_alone() -> None:
    names = set(outside("stm_backends.testing")) - set(DRIVER_MODULES)
    assert not breaches(sorted(names), lambda one: one in DRIVER_MODULES)


def test_no_two_modules_import_each_other() -> None:
    for name in MODULES:
        for one in IMPORTS[name] & MODULES.keys():
            if not is_within(one, name) and not is_within(name, one):
                assert name not in reach(one), f"{name} and {one} import each other"


def loaded_by(program: str) -> set[str]:
    """Return the modules that a new interpreter has loaded once it has run a program."""
    ran = subprocess.run(
        [sys.executable, "-c", f"import json, sys\n{program}\nprint(json.dumps(sorted(sys.modules)))"],
        # Measuring coverage would bring modules of its own.
        env=without_coverage(),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return set(json.loads(ran.stdout))


def test_importing_the_library_brings_itself_alone() -> None:
    loaded = loaded_by("import stm_backends")
    assert "asyncio" not in loaded
    more = loaded - loaded_by("import asyncio, importlib, typing")
    assert more == {"stm_backends"}


@pytest.mark.parametrize(
    ("name", "module"),
    [("MemoryKey", "types"), ("StmError", "errors"), ("Summarizer", "protocols")],
)
def test_a_name_brings_its_module_and_what_that_rests_on(name: str, module: str) -> None:
    loaded = loaded_by(f"from stm_backends import {name}")
    assert f"stm_backends.{module}" in loaded
    assert {one for one in loaded if is_within(one, "stm_backends")} <= {
        *("stm_backends", "stm_backends.errors", "stm_backends.protocols", "stm_backends.tokens"),
        "stm_backends.types",
    }
    assert "asyncio" not in loaded


NEVER_OPENED = {
    *("typer", "rich", "pytest", "hypothesis", "opentelemetry", "cryptography"),
    *("openai", "agents", "langchain_core", "google"),
    "stm_backends.telemetry.opentelemetry",
    *("stm_backends.sync", "stm_backends.cli", "stm_backends.testing", "stm_backends.agents"),
    "stm_backends.inspect",
    *("stm_backends.integrations", "stm_backends.tiers"),
    # What administers is imported when it is first used.
    *(f"stm_backends.admin.{part}" for part in ("sessions", "stats", "importing", "copying", "erasing")),
    "stm_backends.sealing.data_keys",
    # These take longer to import than most of this library.
    *("importlib.metadata", "statistics", "fractions", "decimal"),
    *CLIENTS,
}
"""What is not loaded by a program that uses a backend for conversations."""

CONVERSE = """
import asyncio, stm_backends
async def converse():
    async with stm_backends.open_backend({url!r}) as backend:
        memory = backend.memory(stm_backends.MemoryKey("acme", "u1", "s1"))
        await memory.add_turn(stm_backends.ConversationTurn("Hello", "Hi"))
        await memory.get_llm_context()
asyncio.run(converse())
"""


@pytest.mark.parametrize("scheme", ["memory", "sqlite"])
def test_a_conversation_brings_its_driver_and_nothing_that_administers(scheme: str, tmp_path: Path) -> None:
    url = {"memory": "memory://", "sqlite": f"sqlite:///{tmp_path}/x.db"}[scheme]
    loaded = loaded_by(CONVERSE.format(url=url))
    assert "stm_backends.backend" in loaded
    assert not loaded & (NEVER_OPENED | DRIVER_PACKAGES)
    own = "stm_backends.drivers.in_memory" if scheme == "memory" else "stm_backends.drivers.sqlite"
    assert {one for one in loaded if one in DRIVER_MODULES and not is_within(one, own)} == set()
    assert ("sqlite3" in loaded) == (scheme == "sqlite")


def test_what_checkers_see_is_what_is_imported() -> None:
    tree = ast.parse(MODULES["stm_backends"].read_text("utf-8"))
    (for_types,) = (node for node in tree.body if is_for_types_only(node))
    assert isinstance(for_types, ast.If)
    seen = {
        alias.name: node.module or ""
        for node in for_types.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen.keys() == set(stm_backends.__all__) - {"__version__"}
    for name, module in seen.items():
        assert getattr(stm_backends, name) is getattr(importlib.import_module(module), name)
