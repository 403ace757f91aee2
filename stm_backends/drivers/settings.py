"""The base class for a driver's settings: declared once, given as a URL, as keyword arguments, or as both.

```python
@dataclass(frozen=True, kw_only=True)
class AcmeSettings(Settings):
    backend: ClassVar = "acme"
    url_schemes: ClassVar = ("acme",)

    host: str = setting("localhost", query=False, connection=True)
    pool_size: int = setting(10, connection=True)
    prefix: str = "stm:"

    @classmethod
    def before_query(cls, parts: SplitResult) -> dict[str, Any]:
        return {"host": parts.hostname} if parts.hostname else {}


AcmeSettings.from_url("acme://db.example/?pool_size=5", prefix="mine:")
```
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from types import NoneType, UnionType
from typing import Any, ClassVar, Final, Literal, Self, TypeVar, Union, get_args, get_origin, get_type_hints
from urllib.parse import SplitResult, parse_qsl, urlsplit

from stm_backends.drivers.checks import require_count, require_known, require_seconds
from stm_backends.drivers.contract import DEFAULT_DEADLINE_S
from stm_backends.errors import ConfigurationError

T = TypeVar("T")

MIB: Final = 1024 * 1024


def setting(default: T, *, query: bool = True, connection: bool = False, secret: bool = False) -> T:
    """Declare a setting and how it may be given; a field without this takes the defaults shown here.

    `query=False` keeps it out of a URL's query. `connection=True` marks it as a setting of the client, which
    is refused together with a client that the caller hands in. `secret=True` keeps it out of the repr.
    """
    return field(default=default, repr=not secret, metadata={"query": query, "connection": connection})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Validated, immutable settings of one driver; derive a frozen, keyword-only dataclass from it.

    Each field has a default and an annotation that can be resolved at run time, which its value is checked
    against. Fields of type `str`, `bool`, `int`, `float` or a `Literal` of strings (or one of these and
    `None`) can be given in the query of a URL; `setting` can forbid that. Further checks belong in
    `__post_init__`, which calls this one first.

    `deadline_s` is the time limit of one operation. `max_entry_bytes` limits an entry and a body; it is
    itself at most `largest_entry`, if there is such a limit.

    `elsewhere` has parameters that hosts and other clients put into such URLs and that this driver does not
    take, each with the advice on it.
    """

    backend: ClassVar[str]
    url_schemes: ClassVar[tuple[str, ...]] = ()
    largest_entry: ClassVar[int | None] = None
    elsewhere: ClassVar[Mapping[str, str]] = {}

    deadline_s: float = DEFAULT_DEADLINE_S
    max_entry_bytes: int = 16 * MIB

    def __post_init__(self) -> None:
        for name, kind in _kinds(type(self)).items():
            value = getattr(self, name)
            if not _admits(kind, value):
                # Never the value: in a URL it may be the end of a password with an unescaped '?' or '&'.
                other = "another text" if _words(kind) and isinstance(value, str) else type(value).__name__
                raise ConfigurationError(f"{name} must be {_described(kind)}, not {other}")
        require_seconds("deadline_s", self.deadline_s)
        require_count("max_entry_bytes", self.max_entry_bytes, most=self.largest_entry)

    @classmethod
    def from_url(cls, url: str | None, /, **options: Any) -> Self:
        """Return the settings that a URL and keyword arguments give, validated: the one call for `open`.

        With `url=None`, only the options count. `client=...` among the options means that the caller hands in
        a client: the settings of a connection are then refused, wherever they are given. Raises
        `ConfigurationError` for an unknown setting (with a near miss), for one that the URL and the options
        give differently, and for a value that cannot work. No message shows a value, or a part of the URL
        that is not the name of a setting.
        """
        return cls.from_options(**merged(cls.read_url(url) if url else {}, options))

    @classmethod
    def from_options(cls, /, **options: Any) -> Self:
        """Return the settings that keyword arguments give, validated; see `from_url`."""
        declared = _declared(cls)
        connection = {name for name, metadata in declared.items() if metadata.get("connection")}
        require_known(options, {*declared, *(("client",) if connection else ())}, backend=cls.backend)
        if options.pop("client", None) is not None and (refused := sorted(connection & options.keys())):
            raise ConfigurationError(
                "client=... brings its own connection; leave out the settings that configure one, in the URL "
                f"or the options: {', '.join(refused)}"
            )
        return cls(**options)

    @classmethod
    def read_url(cls, url: str) -> dict[str, Any]:
        """Return the settings in a URL: those of `before_query`, and those in the query.

        Override it for URLs that `urllib.parse.urlsplit` does not understand.
        """
        try:
            parts = urlsplit(url)
        except ValueError:
            raise ConfigurationError(
                f"the host of the {cls.backend} URL is invalid: only an IPv6 address is in brackets; replace "
                "a placeholder such as [YOUR-PASSWORD], and percent-encode special characters in a user name "
                "or password"
            ) from None
        if parts.scheme not in cls.url_schemes:
            schemes = ", ".join(f"{scheme}://" for scheme in cls.url_schemes)
            raise ConfigurationError(f"a {cls.backend} URL begins with {schemes}")
        if parts.fragment:
            raise ConfigurationError(f"a {cls.backend} URL has no fragment; write '#' as %23")
        return {**cls.before_query(parts), **cls.read_query(parts.query)}

    @classmethod
    def before_query(cls, parts: SplitResult) -> dict[str, Any]:
        """Return the settings that stand before a URL's query: user, password, host, port and path.

        Each driver overrides it. Raises `ConfigurationError` for a part that the driver has no use for.
        """
        if parts.netloc or parts.path.strip("/"):
            raise ConfigurationError(f"a {cls.backend} URL has no host and no path")
        return {}

    @classmethod
    def read_query(cls, query: str) -> dict[str, Any]:
        """Return the settings in a URL's query, each as its field's type.

        Raises `ConfigurationError` for one that is unknown, given twice or not of its type.
        """
        parsers = query_parsers(cls)
        given: dict[str, Any] = {}
        for name, text in parse_qsl(query, keep_blank_values=True):
            if name in cls.elsewhere:
                raise ConfigurationError(f"{name} cannot be given here: {cls.elsewhere[name]}")
            require_known([name], parsers, backend=cls.backend, shown=name in _declared(cls))
            if name in given:
                raise ConfigurationError(f"the URL sets {name} twice")
            try:
                given[name] = parsers[name](text)
            except ValueError:
                expected = "true or false" if parsers[name] is _truth else "a number"
                raise ConfigurationError(f"{name} in the URL is not {expected}") from None
        return given


BAD_PORT: Final = (
    "a port in the URL is not a number between 1 and 65535; percent-encode '/', '?', '#' and '@' in a user "
    "name or password"
)
"""The message about an invalid port, which may be the beginning of a password."""


def require_no_placeholder(login: str) -> None:
    """Raise `ConfigurationError` for a user and a password that were copied with a placeholder in them."""
    if re.search(r"<[^<>:@]+>", login):
        raise ConfigurationError(
            "the URL has <...> where the user or the password belongs: replace it, or write %3C for a < that "
            "is part of it"
        )


@functools.cache
def query_parsers(settings: type[Settings]) -> Mapping[str, Callable[[str], object]]:
    """Return the names of the settings that a URL's query may give, and how the text of each is parsed."""
    parsers = {name: _parser(kind) for name, kind in _kinds(settings).items()}
    declared = _declared(settings)
    return {name: parse for name, parse in parsers.items() if parse and declared[name].get("query", True)}


def merged(given: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a URL and keyword arguments together.

    Raises `ConfigurationError` for a setting that the two give differently. The message shows no value,
    because it may be a password.
    """
    for name in given.keys() & options.keys():
        if given[name] != options[name]:
            raise ConfigurationError(
                f"the URL and the options give {name} differently; leave out one of them"
            )
    return {**given, **options}


@functools.cache
def _declared(settings: type[Settings]) -> dict[str, Mapping[str, Any]]:
    """Return the metadata of each field by its name."""
    return {one.name: one.metadata for one in fields(settings)}


@functools.cache
def _kinds(settings: type[Settings]) -> dict[str, Any]:
    """Return the type of each field by its name."""
    hints = get_type_hints(settings)
    return {name: hints[name] for name in _declared(settings)}


def _admits(kind: Any, value: object) -> bool:
    """Return whether a value is of a type. Of containers, only their own type is checked."""
    if _choices(kind):
        return any(_admits(one, value) for one in _choices(kind))
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if kind in (int, float):
        return isinstance(value, (int, kind)) and not isinstance(value, bool)
    return kind is Any or isinstance(value, get_origin(kind) or kind)


def _described(kind: Any) -> str:
    """Return the words for a type in a message."""
    known: dict[Any, str] = {str: "a string", bool: "True or False", int: "an integer", float: "a number"}
    known |= {Callable: "a function", NoneType: "None"}
    described = [repr(word) for word in _words(kind)]
    for one in _choices(kind) or (kind,):
        plain = get_origin(one) or one
        if plain is not Literal:
            described.append(known.get(plain) or f"of type {plain.__name__}")
    *others, last = described
    return f"{', '.join(others)} or {last}" if others else last


def _words(kind: Any) -> list[Any]:
    """Return the values of a `Literal`, also of one within a union; nothing for any other type."""
    literals = [one for one in _choices(kind) or (kind,) if get_origin(one) is Literal]
    return [word for one in literals for word in get_args(one)]


def _parser(kind: Any) -> Callable[[str], object] | None:
    """Return the parser of a type's values from the text in a URL; `None` if a URL cannot give it."""
    if _choices(kind):
        parsers = {_parser(one) for one in _choices(kind) if one is not NoneType}
        return parsers.pop() if len(parsers) == 1 else None
    if get_origin(kind) is Literal:
        return str
    return _truth if kind is bool else kind if kind in (str, int, float) else None


def _choices(kind: Any) -> tuple[Any, ...]:
    """Return the types that a union consists of; nothing for any other type."""
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else ()


def _truth(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError
    return text.lower() == "true"
