"""Finds backends by their names and URLs, and explains why one cannot be used.

The backends of this library are listed in `shipped`. Any other package that provides a backend names a module
in the entry-point group `stm_backends`, under the backend's name. That module implements one hook:

```python
@hookimpl
def stm_backend() -> BackendPlugin:
    return BackendPlugin(name="acme", url_schemes=("acme", "acmes"), requires=("acme",), open=open_driver)
```

The module is imported when its backend is opened, or when all backends are listed. It imports no client
library at its top, so that a missing one is found by `requires`, and the error gives the command that
installs it. The names and URL schemes of the shipped backends cannot be taken by another package: entry
points are not read for them, and `diagnose` names the packages that claim one. Messages show a URL's scheme
and never the rest of it.
"""

from __future__ import annotations

import difflib
import functools
import importlib.util
import inspect
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, TypeVar, cast
from urllib.parse import quote

import pluggy

from stm_backends.drivers.contract import CONTRACT, Driver
from stm_backends.drivers.shipped import BY_SCHEME, SHIPPED, Shipped
from stm_backends.errors import AmbiguousBackend, ConfigurationError, MissingExtra, UnknownBackend
from stm_backends.extras import install_command, normalized

if TYPE_CHECKING:
    from email.message import Message
    from importlib.metadata import EntryPoint

GROUP: Final = "stm_backends"

logger = logging.getLogger("stm_backends")

_INSTALL: Final = "pip install "

_T = TypeVar("_T")

_hookspec = pluggy.HookspecMarker(GROUP)
hookimpl = pluggy.HookimplMarker(GROUP)
"""Marks the function that implements the `stm_backend` hook."""


@dataclass(frozen=True, kw_only=True)
class BackendPlugin:
    """Describes the backend that a package provides.

    `name` equals the name of the entry point. If the distribution has an extra of that name, it installs
    `requires`, the top-level modules of the client library. If the options have a `client`, which may be of
    another library, these modules are missed only if `open` fails to import them. `open` is called as
    `open(url, create=..., **options)`, with a URL of one of `url_schemes` or `None`, and returns a driver
    that is not opened yet. It imports the client library, and raises `ConfigurationError` for settings that
    cannot work.

    `schema` is called as `schema(url, **options)`, with the arguments of `open` except `create`. It returns
    the work of `create=True` as text for the datastore's own client, for deployments where an application may
    not do this work. It uses neither the datastore nor the client library. A `url` of `None` means the
    defaults. The text contains no secret of a URL. `schema=None` means that nothing needs to be set up.

    `contract` is the version of the driver contract that the driver was written for; 1 is the first. A driver
    of an earlier contract than this library's is used without the later additions, which is logged, and
    reported by `diagnose`. A driver of a later contract is refused.
    """

    name: str
    url_schemes: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()
    open: Callable[..., Driver]
    schema: Callable[..., str] | None = None
    contract: int = 1


class Hooks:
    """The hooks that a backend's module may implement."""

    @_hookspec(firstresult=True)
    def stm_backend(self) -> BackendPlugin | None:
        """Describe the backend of this module."""


State: TypeAlias = Literal["ready", "missing extra", "newer contract", "broken", "ambiguous"]

ADDED: Final[Mapping[int, Sequence[str]]] = {}
"""Additions of each version of the driver contract, in the words of a driver that lacks them."""

_OLDER: Final = (
    "the backend %r was written for version %d of the driver contract. This library has version %d, and does "
    "without: %s"
)


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The state of one installed backend. `reason` explains the problem and its remedy.

    For a ready driver, it names the additions that are not used if the driver is of an earlier contract, and
    those of its URL schemes that open a shipped backend. `install` is the command that installs missing
    parts; `reason` ends with it. `contract` is the version of the driver contract that the driver was written
    for, 0 if it is not known.
    """

    name: str
    distribution: str
    version: str
    schemes: tuple[str, ...] = ()
    state: State = "ready"
    reason: str = ""
    contract: int = 0

    @property
    def install(self) -> str:
        _, found, what = self.reason.partition(_INSTALL)
        return f"{found}{what}" if self.state in ("missing extra", "newer contract") else ""


def open_driver(name_or_url: str, *, url: str | None = None, create: bool = False, **options: Any) -> Driver:
    """Return the driver of a backend, not opened yet, given the backend's name or its URL.

    Raises `UnknownBackend`, `AmbiguousBackend` and `MissingExtra`, and `ConfigurationError` for an unknown
    option, a backend of a later driver contract, or a broken one. The additions that a driver of an earlier
    contract lacks are logged once.
    """
    if not isinstance(create, bool):  # pyright: ignore[reportUnnecessaryIsInstance] -- a user gives it
        raise ConfigurationError(f"create must be True or False, not {type(create).__name__}")
    entry_point, plugin, url = _resolve(name_or_url, url)
    if options.get("client") is None:
        _require_client(entry_point, plugin)
    if plugin.contract < CONTRACT:
        logger.warning(_OLDER, *_without(plugin))
    return _call(entry_point, plugin, plugin.open, url, create=create, **options)


def schema(name_or_url: str, *, url: str | None = None, **options: Any) -> str | None:
    """Return the setup that opening a backend with `create=True` would do; `None` if none is needed.

    The text is in the datastore's own language. Neither the datastore nor the client library is needed.
    Raises as `open_driver` does, except for `MissingExtra`.
    """
    entry_point, plugin, url = _resolve(name_or_url, url)
    if plugin.schema is None:
        return None
    return _call(entry_point, plugin, plugin.schema, url, **options)


def diagnose() -> list[Diagnosis]:
    """Return the state of every installed backend: ready, or the problem and its remedy."""
    claims = _claims()
    found: list[Diagnosis] = []
    for name in sorted({*SHIPPED, *claims}):
        others = sorted(claims.get(name, ()), key=_origin)
        if name in SHIPPED:
            found.append(_diagnose(SHIPPED[name], others=()))
        found += [_diagnose(one, others=others) for one in others]
    return found


def scheme_of(url: str) -> str:
    """Return a URL's scheme in lower case; `""` if it has none."""
    match = re.match(r"([A-Za-z][A-Za-z0-9+.\-]*):", url)
    return match[1].lower() if match else ""


def _require_text(name_or_url: object, url: object) -> None:
    """Raise `ConfigurationError` for anything but a string, and say what to write instead."""
    for what, value in (("a backend", name_or_url), ("url", url)):
        if isinstance(value, os.PathLike):
            path = os.fsdecode(cast("os.PathLike[str]", value))
            raise UnknownBackend(f"a path is not a backend; for the SQLite database in it write {_at(path)}")
        if not isinstance(value, str) and not (value is None and what == "url"):
            raise ConfigurationError(
                f"{what} is given as a string: a name such as 'memory', or a URL such as "
                f"'sqlite:///conversations.db'; not {type(value).__name__}"
            )
        if value and (value[0] in _QUOTATION_MARKS or value.strip() != value):
            around = "quotation marks" if value.strip() == value else "white space"
            raise UnknownBackend(f"{what} is given with {around} around it; leave that out")


_QUOTATION_MARKS: Final = "\"'`\u201c\u2018\u00ab"


def _is_windows_path(text: str) -> bool:
    return re.match(r"[A-Za-z]:[\\/](?!/)", text) is not None


def _at(path: str) -> str:
    """Return the URL of the SQLite database at a path, as text to copy."""
    return repr(f"sqlite:///{quote(path)}")


_Provider: TypeAlias = "EntryPoint | Shipped"

_Claims: TypeAlias = "dict[str, list[EntryPoint]]"
"""The entry points of other packages by backend name. All callers share the mapping: do not change it."""

_NAME = re.compile(r"[A-Za-z0-9_+.\-]{1,60}")

DATABASE_FILE = re.compile(r"([A-Za-z]:)?[\w./\\+ -]{1,200}\.(db3?|sqlite3?)", re.IGNORECASE)
"""Text that looks like the path of a database, and cannot be the secret part of a URL."""

_HOST_AND_PORT = re.compile(r"[\w.\-]+:\d{2,5}(/\w*)?|\[[\da-fA-F:]+\]:\d{2,5}(/\w*)?")


def _resolve(name_or_url: str, url: str | None) -> tuple[_Provider, BackendPlugin, str | None]:
    """Return the plugin of a backend, given its name or its URL, and the URL if there is one."""
    _require_text(name_or_url, url)
    if ":" in name_or_url and not _is_windows_path(name_or_url):
        if url is not None:
            raise ConfigurationError(
                "the URL is given twice: give a backend's name and url=..., or a URL alone"
            )
        entry_point, plugin = _by_scheme(name_or_url)
        _require_contract(entry_point, plugin)
        return entry_point, plugin, name_or_url
    entry_point, plugin = _by_name(name_or_url)
    _require_contract(entry_point, plugin)
    if url is not None and "://" in url and scheme_of(url) not in plugin.url_schemes:
        known = ", ".join(f"{scheme}://" for scheme in plugin.url_schemes) or "no scheme"
        raise ConfigurationError(f"the backend {plugin.name!r} takes only URLs of {known}")
    return entry_point, plugin, url


def _require_contract(entry_point: _Provider, plugin: BackendPlugin) -> None:
    if plugin.contract > CONTRACT:
        raise ConfigurationError(
            f"the backend {plugin.name!r} of {_whose(entry_point)} needs version {plugin.contract} of the "
            f"driver contract, and this library has version {CONTRACT}: {_INSTALL}--upgrade stm-backends"
        )


def _without(plugin: BackendPlugin) -> tuple[object, ...]:
    """Return the arguments of the message `_OLDER`."""
    added = [what for version in range(plugin.contract + 1, CONTRACT + 1) for what in ADDED.get(version, ())]
    return plugin.name, plugin.contract, CONTRACT, "; ".join(added) or "nothing"


def _call(
    entry_point: _Provider,
    plugin: BackendPlugin,
    function: Callable[..., _T],
    url: str | None,
    /,
    **options: Any,
) -> _T:
    """Call a function of a plugin; an option that it does not take is a `ConfigurationError`."""
    try:
        inspect.signature(function).bind(url, **options)
    except TypeError as error:
        raise ConfigurationError(
            f"the backend {plugin.name!r} does not take these options: {error}"
        ) from None
    try:
        return function(url, **options)
    except ImportError as error:
        raise _import_failure(entry_point, plugin, error) from error


def _claims() -> _Claims:
    """Return the current claimants of each name: a package that is installed meanwhile is found."""
    return _claims_in(tuple(_state_of(place) for place in sys.path))


def _state_of(place: str) -> tuple[object, ...]:
    """Return a value that changes once a package is installed in a place of `sys.path`, or removed."""
    try:
        found = Path(place).stat()
    except OSError:
        return (place,)
    return place, found.st_dev, found.st_ino, found.st_mtime_ns


# Programs open backends often, and it takes 5 ms to read what 200 packages provide.
@functools.lru_cache(maxsize=1)
def _claims_in(path: tuple[tuple[object, ...], ...]) -> _Claims:
    del path  # it is that of this process
    from importlib.metadata import entry_points  # noqa: PLC0415 -- costs half as much as all of this library

    claims: _Claims = {}
    for entry_point in entry_points(group=GROUP):
        if entry_point.name in SHIPPED and entry_point.value == SHIPPED[entry_point.name].value:
            continue
        same = claims.setdefault(entry_point.name, [])
        if all(_origin(other) != _origin(entry_point) for other in same):
            same.append(entry_point)
    return claims


def _by_name(name: str) -> tuple[_Provider, BackendPlugin]:
    if name in SHIPPED:
        return SHIPPED[name], _load(SHIPPED[name])
    claims = _claims()
    if name not in claims:
        known = {*SHIPPED, *claims}
        raise _unknown("backend", name, shown=bool(_NAME.fullmatch(name)), names=known, known=known)
    return _only(claims, name)


def _only(claims: _Claims, name: str) -> tuple[_Provider, BackendPlugin]:
    if len(claims[name]) > 1:
        raise AmbiguousBackend(_ambiguity(name, claims[name]))
    (entry_point,) = claims[name]
    return entry_point, _load(entry_point)


def _by_scheme(url: str) -> tuple[_Provider, BackendPlugin]:
    scheme = scheme_of(url)
    if scheme in BY_SCHEME:
        return BY_SCHEME[scheme], _load(BY_SCHEME[scheme])
    claims = _claims()
    # The backend with the name of the scheme comes first; the others are imported only if it does not match.
    if scheme in claims:
        entry_point, plugin = _only(claims, scheme)
        if scheme in plugin.url_schemes:
            return entry_point, plugin
    found: list[tuple[_Provider, BackendPlugin]] = []
    schemes: set[str] = {*BY_SCHEME}
    broken: list[str] = []
    for entry_point in (one for name in claims for one in claims[name]):
        try:
            plugin = _load(entry_point)
        except ConfigurationError:
            broken.append(entry_point.name)
            continue
        schemes.update(plugin.url_schemes)
        if scheme in plugin.url_schemes:
            found.append((entry_point, plugin))
    if not found:
        # Without "//" the word before a colon may be a user's name.
        shown = bool(scheme) and ("://" in url or "@" not in url)
        asked = url if _HOST_AND_PORT.fullmatch(url) else scheme or url
        error = _unknown("URL scheme", asked, shown=shown, names={*SHIPPED, *claims}, known=schemes)
        if broken:
            error.add_note(f"Could not be asked: {', '.join(broken)}; `stm-backends drivers` says why.")
        raise error
    if len(found) > 1:
        raise AmbiguousBackend(_ambiguity(f"{scheme}://", [entry_point for entry_point, _ in found]))
    return found[0]


def _load(entry_point: _Provider) -> BackendPlugin:
    """Import a backend's module and call its hook; any failure is a `ConfigurationError`."""
    # Each plugin has its own manager, so that a failing plugin does not affect the others.
    manager = pluggy.PluginManager(GROUP)
    manager.add_hookspecs(Hooks)
    try:
        manager.register(entry_point.load(), entry_point.name)
        manager.check_pending()
        plugin = cast("object", manager.hook.stm_backend())
    except (Exception, SystemExit) as error:
        raise ConfigurationError(_broken(entry_point, f"{type(error).__name__}: {error}")) from error
    if not isinstance(plugin, BackendPlugin):
        raise ConfigurationError(_broken(entry_point, "its stm_backend hook does not return a BackendPlugin"))
    if plugin.name != entry_point.name:
        raise ConfigurationError(_broken(entry_point, f"its plugin calls itself {plugin.name!r}"))
    contract = cast("object", plugin.contract)
    if not isinstance(contract, int) or isinstance(contract, bool) or contract < 1:
        raise ConfigurationError(_broken(entry_point, "its plugin's `contract` is not a number from 1 on"))
    return plugin


def _require_client(entry_point: _Provider, plugin: BackendPlugin) -> None:
    for module in plugin.requires:
        try:
            missing = importlib.util.find_spec(module) is None
        except ValueError:
            # The module was imported already and has no spec.
            missing = False
        if missing:
            raise _missing(entry_point, plugin, module)


def _import_failure(entry_point: _Provider, plugin: BackendPlugin, error: ImportError) -> ConfigurationError:
    module = error.name or ""
    if isinstance(error, ModuleNotFoundError) and module.partition(".")[0] in plugin.requires:
        return _missing(entry_point, plugin, module)
    return ConfigurationError(_broken(entry_point, f"{type(error).__name__}: {error}"))


def _diagnose(entry_point: _Provider, *, others: Sequence[_Provider]) -> Diagnosis:
    """Return the state of a backend. `others` are the packages that claim its name, itself included."""
    schemes: tuple[str, ...] = ()
    state: State = "ready"
    reason = ""
    contract = 0
    try:
        plugin = _load(entry_point)
        schemes, contract = plugin.url_schemes, plugin.contract
        _require_contract(entry_point, plugin)
        reason = _OLDER % _without(plugin) if contract < CONTRACT else ""
        reason = "; ".join(filter(None, (reason, _taken_schemes(entry_point, plugin))))
        _require_client(entry_point, plugin)
    except MissingExtra as error:
        state, reason = "missing extra", str(error)
    except ConfigurationError as error:
        state, reason = "newer contract" if contract > CONTRACT else "broken", str(error)
    if others and entry_point.name in SHIPPED:
        state, reason = "ambiguous", _taken_name(entry_point)
    elif len(others) > 1:
        state, reason = "ambiguous", _ambiguity(entry_point.name, others)
    distribution, version, _ = _origin(entry_point)
    return Diagnosis(
        name=entry_point.name,
        distribution=distribution,
        version=version,
        schemes=schemes,
        state=state,
        reason=reason,
        contract=contract,
    )


# Messages


def _origin(entry_point: _Provider) -> tuple[str, str, str]:
    """Return the distribution, its version and the module of an entry point."""
    distribution = entry_point.dist
    if distribution is None:
        return "an unknown distribution", "", entry_point.value
    # A partly removed package may have lost the file with its name and version. Reading a missing field by
    # `[...]`, as the properties `name` and `version` do, is deprecated.
    metadata = cast("Message", distribution.metadata)
    name, version = (metadata.get(field) for field in ("Name", "Version"))
    return name or "an unnamed distribution", version or "", entry_point.value


def _unknown(
    what: str, asked: str, *, shown: bool, names: Iterable[str], known: Iterable[str]
) -> UnknownBackend:
    """Return the error for an unknown backend; it does not show what may be part of a mistyped URL."""
    text = asked.lower()
    if DATABASE_FILE.fullmatch(asked):
        problem = f"a path is not a backend; for the SQLite database in it write {_at(asked)}."
    elif _HOST_AND_PORT.fullmatch(asked):
        problem = "a host and a port are not a URL: write the scheme of the datastore and '://' before them."
    else:
        problem = (
            f"no installed package provides the {what} {asked!r}."
            if shown
            else "this is neither the name nor a URL of a backend."
        )
        word = re.match(r"[\w+.\-]*", text)
        for near in difflib.get_close_matches(word[0] if word else "", sorted(known), n=1):
            problem += f" Did you mean {near!r}?"
    return UnknownBackend(f"{problem} Installed: {', '.join(sorted(names)) or 'none'}")


def _ambiguity(claimed: str, claims: Sequence[_Provider]) -> str:
    origins = " and ".join(
        f"{distribution} {version} ({module})".replace("  ", " ")
        for distribution, version, module in sorted(_origin(entry_point) for entry_point in claims)
    )
    return f"the backend {claimed!r} is claimed by {origins}; uninstall one of them"


def _taken_name(entry_point: _Provider) -> str:
    """Return why a package cannot provide a backend under the name of a shipped one."""
    return (
        f"the name {entry_point.name!r} opens the backend of stm-backends, and not that of "
        f"{_whose(entry_point)} ({entry_point.value}), which needs another name"
    )


def _taken_schemes(entry_point: _Provider, plugin: BackendPlugin) -> str:
    """Return which schemes of another package's backend open a shipped one; `""` if none does."""
    if isinstance(entry_point, Shipped):
        return ""
    taken = {scheme: BY_SCHEME[scheme].name for scheme in plugin.url_schemes if scheme in BY_SCHEME}
    if not taken:
        return ""
    told = ", ".join(f"{scheme}:// opens the backend {name!r}" for scheme, name in taken.items())
    return f"{told} of stm-backends; open {plugin.name!r} by its name"


def _broken(entry_point: _Provider, reason: str) -> str:
    module = _origin(entry_point)[2]
    return f"the backend {entry_point.name!r} of {_whose(entry_point)} is broken ({module}): {reason}"


def _whose(entry_point: _Provider) -> str:
    distribution, version, _ = _origin(entry_point)
    return f"{distribution} {version}".rstrip()


def _missing(entry_point: _Provider, plugin: BackendPlugin, module: str) -> MissingExtra:
    distribution = _origin(entry_point)[0]
    if _provides(entry_point, extra=plugin.name):
        whose = f" of the extra {distribution}[{plugin.name}]"
        hint = f": {install_command(distribution, plugin.name)}"
    else:
        whose = ""
        hint = f"; its package often has the same name: {_INSTALL}{module.partition('.')[0]}"
    error = MissingExtra(
        f"the backend {plugin.name!r} needs the module {module!r}{whose}, which is not installed{hint}"
    )
    error.name = module
    return error


def _provides(entry_point: _Provider, *, extra: str) -> bool:
    """Return whether the distribution of an entry point declares an extra; names are compared as by pip."""
    if entry_point.dist is None:
        return False
    declared = cast("Message", entry_point.dist.metadata).get_all("Provides-Extra") or ()
    return normalized(extra) in map(normalized, declared)
