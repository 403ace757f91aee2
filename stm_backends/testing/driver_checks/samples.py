"""Keys and bytes that drivers get wrong."""

from __future__ import annotations

from typing import Final

from stm_backends.drivers.contract import MAX_KEY_BYTES, Key

NAMES: Final = (
    " ",
    "!",
    "a",
    "A",
    "a ",
    "aa",
    "ab",
    "a:b",
    "a::b",
    "a%3Ab",
    "a*",
    "a?",
    "a[b]",
    "a_b",
    "a%",
    "a%b",
    "a#b",
    "a{b}",
    "{a}b",
    "a/b",
    "../a",
    "a\\b",
    "a'b",
    'a"b',
    "a;b--",
    "$a",
    "a.b",
    "a\nb",
    "a\tb",
    "é",
    "e\u0301",
    "ß",
    "ss",
    "\u200b",
    "\uffff",
    "\U0001f600",
    "\U0010ffff",
    "x" * MAX_KEY_BYTES,
    "x" * (MAX_KEY_BYTES - 1),
    "\U0001f600" * (MAX_KEY_BYTES // 4),
)
"""Names with a special meaning in patterns, paths, statements, collations or normal forms."""

BESIDE: Final = (
    *("a", "A", "a ", "aa", "ab", "a0", "a:b", "a::b", "a/b", "a\\b", "a#b", "a.b", "a-b", "a_b", "a b"),
    *("a%3Ab", "a*", "{a}b", "\u0101", "a\u0301"),
)
"""Names that begin with the first one, or match it as a pattern, a path or a prefix."""

SHIFTED: Final = (
    (Key("a", "b:c"), Key("a:b", "c")),
    (Key("a:", "b"), Key("a", ":b")),
    (Key("ab", "c"), Key("a", "bc")),
    (Key("a#b", "c"), Key("a", "b#c")),
    (Key("a/b", "c"), Key("a", "b/c")),
    (Key("a%3Ab", "c"), Key("a:b", "c")),
    (Key("a\\", ":b"), Key("a", "\\:b")),
    (Key("{a}", "b"), Key("a", "b")),
)
"""Pairs of keys that collide if scope and name are joined carelessly."""

VALUES: Final = (
    b"",
    b"\0",
    b"a\0b\0",
    b"\xff\xfe\x80",
    b"\r\n",
    b" a ",
    "é".encode(),
    bytes(range(256)) * 40,
)
"""Bytes that are not text, or lose something when treated as text."""
