"""Different conversations, users and tenants never share a key, in either direction."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from stm_backends.drivers.contract import MAX_KEY_BYTES
from stm_backends.errors import InvalidKey
from stm_backends.records import keys
from stm_backends.records.keys import OTHER_BLOBS, blob_key, blob_owner, parse_composite
from stm_backends.types import MemoryKey

# The characters that escaping is about come up often, and every other now and then.
tricky = st.text(st.sampled_from("a:%3A25kv6B1\0 \ud800\udfff\U0001f600/*'"), min_size=1, max_size=12)
texts = tricky | st.text(st.characters(codec=None), min_size=1, max_size=20)
parts = texts.filter(str.strip)
memory_keys = st.builds(MemoryKey, parts, parts, parts)


# Composites


def test_a_plain_key_is_its_parts_joined() -> None:
    assert MemoryKey("acme", "u123", "chat_001").composite() == "acme:u123:chat_001"


@given(parts.filter(lambda text: not set(text) & set(":%")), parts, parts)
def test_parts_without_colon_and_percent_are_not_escaped(tenant: str, user: str, session: str) -> None:
    user, session = (text.replace(":", "").replace("%", "") for text in (user, session))
    assume(user.strip() and session.strip() and (tenant, user) != ("kv", "v1"))
    assert MemoryKey(tenant, user, session).composite() == f"{tenant}:{user}:{session}"


@given(memory_keys)
@example(MemoryKey("kv", "v1", "s"))
@example(MemoryKey("%6Bv", "v1", "s"))
@example(MemoryKey("a:b", "%3A", "%25"))
def test_a_composite_is_read_back_as_the_key_that_wrote_it(key: MemoryKey) -> None:
    assert parse_composite(key.composite()) == key


@given(memory_keys, memory_keys)
@example(MemoryKey("a:b", "c", "d"), MemoryKey("a", "b:c", "d"))
@example(MemoryKey("a", "b", "c%3Ad"), MemoryKey("a", "b", "c:d"))
@example(MemoryKey("kv", "v1", "s"), MemoryKey("%6Bv", "v1", "s"))
def test_different_keys_never_share_a_composite_or_a_place(one: MemoryKey, other: MemoryKey) -> None:
    assume(one != other)
    assert one.composite() != other.composite()
    assert keys.memory_key(one) != keys.memory_key(other)
    assert blob_key(one.composite()) != blob_key(other.composite())


@given(texts)
@example("a:b:%6b")
@example("a:b:%61")
@example("a:b:%253A")
@example("kv:v1:s")
def test_only_what_composite_writes_is_read(text: str) -> None:
    try:
        key = parse_composite(text)
    except InvalidKey:
        return
    assert key.composite() == text


@pytest.mark.parametrize(
    "text",
    ["", "a", "a:b", "a:b:c:d", ":b:c", "a: :c", "a:b:", "a:b:%", "a:b:%3a", "a:b:%61", "kv:v1:s", "a:b:%6B"],
)
def test_a_string_that_is_not_a_composite_raises(text: str) -> None:
    with pytest.raises(InvalidKey):
        parse_composite(text)


@pytest.mark.parametrize("text", ["aunt:mary", "aunt:mary:%ff", "aunt:mary:phones:home"])
def test_a_refusal_does_not_show_whose_key_it_was(text: str) -> None:
    with pytest.raises(InvalidKey) as caught:
        parse_composite(text)
    assert "mary" not in str(caught.value)


@pytest.mark.parametrize("blank", ["", " ", "\t\n", None, 3, b"x"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_part_that_is_blank_or_no_text_makes_no_key(blank: Any, place: int) -> None:
    given = ["a", "b", "c"]
    given[place] = blank
    with pytest.raises(InvalidKey):
        MemoryKey(*given).composite()


@given(memory_keys)
@example(MemoryKey("kv", "v1", "s"))
@example(MemoryKey("kv", "v1", "a:b"))
def test_no_conversation_reaches_the_reserved_keyspace(key: MemoryKey) -> None:
    assert not key.composite().startswith(keys.RESERVED_PREFIX)
    assert blob_key(key.composite()).scope == keys.scope(key.tenant_id, key.user_id, "blob")


# Scopes and names


@given(texts | st.just(""))
@example("")
@example("%")
@example("%00")
@example("\0")
@example("\ud83d\ude00")
def test_a_name_gives_back_the_text_it_was_made_of(text: str) -> None:
    escaped = keys.name(text)
    assert keys.unname(escaped) == text
    assert escaped
    assert "\0" not in escaped
    escaped.encode()


@given(texts | st.just(""), texts | st.just(""))
@example("%3A", ":")
@example("", "%")
@example("\ud83d\ude00", "\U0001f600")
def test_different_texts_have_different_names(one: str, other: str) -> None:
    assume(one != other)
    assert keys.name(one) != keys.name(other)


owners = st.tuples(parts, parts)


@given(owners, owners)
@example(("a:b", "c"), ("a", "b:c"))
@example(("a%", "3Ab"), ("a", "%3Ab"))
def test_different_owners_never_share_a_scope_of_any_kind(
    one: tuple[str, str], other: tuple[str, str]
) -> None:
    assume(one != other)
    mine, theirs = (
        {keys.scope(*owner, kind) for kind in keys.KINDS} | {keys.directory_scope(owner[0])}
        for owner in (one, other)
    )
    shared = {keys.directory_scope(one[0])} if one[0] == other[0] else set[str]()
    assert mine & theirs == shared
    assert len(mine) == len(keys.KINDS) + 1
    assert OTHER_BLOBS not in mine


@given(owners)
def test_the_scopes_of_a_tenant_share_a_prefix_of_its_own(owner: tuple[str, str]) -> None:
    tenant = keys.directory_scope(owner[0]).removesuffix(":users").removesuffix(":")
    for kind in keys.KINDS:
        assert keys.scope(*owner, kind).startswith(f"{tenant}:")
    assert ":" not in tenant
    assert not OTHER_BLOBS.startswith(f"{tenant}:")


@given(memory_keys)
def test_what_reaches_a_driver_keeps_to_its_terms(key: MemoryKey) -> None:
    for place in (
        keys.memory_key(key),
        keys.directory_key(key.tenant_id, key.user_id),
        blob_key(key.composite()),
    ):
        for part in place:
            assert 0 < len(part.encode()) <= MAX_KEY_BYTES
            assert "\0" not in part


def test_a_part_may_take_a_thousand_bytes_and_no_more() -> None:
    assert keys.name("x" * MAX_KEY_BYTES)
    for text in ("x" * (MAX_KEY_BYTES + 1), "日" * 334, "\0" * 334):
        with pytest.raises(InvalidKey):
            keys.name(text)
        with pytest.raises(InvalidKey):
            keys.directory_scope(text)


@pytest.mark.parametrize(("tenant", "user"), [("", "u"), (" ", "u"), ("t", ""), (None, "u"), ("t", 3)])
def test_a_scope_without_an_owner_is_refused(tenant: Any, user: Any) -> None:
    with pytest.raises(InvalidKey):
        keys.scope(tenant, user, "memory")


# Saved states


@given(texts | st.just(""), texts | st.just(""))
@example("kv:v1:a:b:c", "a:b:c")
@example("a:b:c", "a:b:c:")
@example("kv:v1:a:b:", "kv:v1:a:b")
def test_different_strings_never_share_a_saved_state(one: str, other: str) -> None:
    assume(one != other)
    assert blob_key(one) != blob_key(other)


@pytest.mark.parametrize(
    ("text", "owner"),
    [
        ("acme:u:s", ("acme", "u")),
        ("a%3Ab:u:s", ("a:b", "u")),
        ("kv:v1:acme:u:s", ("acme", "u")),
        ("kv:v1:acme:u:session:task", ("acme", "u")),
        ("kv:v1:acme:u:s:session:ns:key", ("acme", "u")),
        ("kv:v1:acme:u:s:task:t:ns:key", ("acme", "u")),
        ("kv:v1:acme:50%:s:session:ns:key", ("acme", "50%")),
        ("kv:v1:a%3Ab:u:s:pins", ("a:b", "u")),
        # Of the tenant `a` and its user `b`, or of `a:b`, or of a user `b:c`.
        ("kv:v1:a:b:c:s:session:ns:key", None),
        ("kv:v1:a:b:c:s:task:t:ns:key", None),
        ("kv:v1:a:b:session:session:session:ns:key", None),
        # Of the tenant `a:b` in a composite, or of one that PenguiFlow writes so.
        ("kv:v1:a%3Ab:u:s:session:ns:key", None),
        ("kv:v1:acme:u:", ("acme", "u")),
        ("kv:v1:acme:u", None),
        ("kv:v1::u:s", None),
        ("kv:v1:acme: :s", None),
        ("kv:v1:", None),
        ("acme:u", None),
        ("acme:u:s:t", None),
        ("acme:u:%61", None),
        ("", None),
    ],
)
def test_a_saved_state_belongs_to_whom_its_key_names(text: str, owner: tuple[str, str] | None) -> None:
    assert blob_owner(text) == owner
    assert blob_key(text).scope == (OTHER_BLOBS if owner is None else keys.scope(*owner, "blob"))


@given(texts | st.just(""), owners)
def test_saved_states_never_share_a_key_with_conversations(text: str, owner: tuple[str, str]) -> None:
    others = {keys.scope(*owner, kind) for kind in keys.KINDS if kind != "blob"}
    assert blob_key(text).scope not in others | {keys.directory_scope(owner[0])}


def test_short_keys_over_the_tricky_characters_are_all_different() -> None:
    alphabet = ("a", ":", "%", "%3A", "kv", "v1", "\0")
    made = [MemoryKey(*three) for three in product(alphabet, repeat=3)]
    for place in (keys.memory_key, MemoryKey.composite):
        assert len({place(key) for key in made}) == len(made)
