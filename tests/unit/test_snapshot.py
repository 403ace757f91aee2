"""A snapshot that continues an earlier one equals one that is read from scratch."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from stm_backends.drivers.contract import ANY, KEEP, Key, Record
from stm_backends.drivers.in_memory import MemoryDriver
from stm_backends.memory.shared.recent import Recent
from stm_backends.memory.shared.record import SharedConversation
from stm_backends.memory.shared.snapshot import Snapshot
from stm_backends.memory.view import shown_text, shown_weight
from stm_backends.records.body import Body, Forgotten, Lease
from stm_backends.records.codec import Codec
from stm_backends.tokens import weigh
from stm_backends.types import ConversationTurn, ShortTermMemoryConfig, StoredTurn, TrajectoryDigest

KEY = Key("acme:u1:memory", "chat")
CODEC = Codec()
NAMES = st.sampled_from("abcdef")


class Counting(Codec):
    """A codec that counts what it decodes."""

    turns = bodies = 0

    def open_turn(self, entry: bytes) -> StoredTurn:
        self.turns += 1
        return super().open_turn(entry)

    def open_body(self, data: bytes | None) -> Body:
        self.bodies += 1
        return super().open_body(data)


def stored(name: str) -> StoredTurn:
    return StoredTurn(name, ConversationTurn(f"question {name}", "answer"))


def entry(name: str) -> bytes:
    return CODEC.seal_turn(stored(name))


def record(version: str, *names: str, body: Body | None = None) -> Record:
    return Record(version, body and CODEC.seal_body(body), tuple(map(entry, names)))


BODIES = st.builds(
    lambda summary, gone, leased: Body(
        summary,
        forgotten=Forgotten().adding(gone, now=1.0, keep_for=10.0),
        lease=Lease(1.0, 2.0) if leased else None,
    ),
    st.sampled_from(["", "so far"]),
    st.lists(NAMES, unique=True),
    st.booleans(),
)
RECORDS = st.none() | st.builds(
    lambda body, names: (body, names), st.none() | BODIES, st.lists(NAMES, max_size=8)
)


@given(st.lists(RECORDS, max_size=6))
def test_any_sequence_of_records_reads_the_same_with_and_without_the_last(
    contents: list[tuple[Body | None, list[str]] | None],
) -> None:
    """Also where the tail of one version is replaced, as after a failover that lost writes."""
    last = Snapshot()
    for content in contents:
        found = None if content is None else record(f"v{content[0]}", *content[1], body=content[0])
        last = Snapshot.of(found, CODEC, last=last)
        assert last == Snapshot.of(found, CODEC)


CHANGES = st.lists(
    st.tuples(
        st.sampled_from(
            ["load", "append", "their append", "fold", "their fold", "lease", "clear", "erase", "forget"]
        ),
        NAMES,
        st.integers(1, 4),
    ),
    max_size=25,
)


@settings(max_examples=300)
@given(CHANGES)
def test_what_a_process_has_seen_is_the_beginning_of_the_record(changes: list[tuple[str, str, int]]) -> None:
    asyncio.run(_change(changes))


async def _change(changes: list[tuple[str, str, int]]) -> None:
    driver = MemoryDriver()
    await driver.open()
    ours, theirs = (
        SharedConversation(driver, KEY, CODEC, lambda: 1.0, Recent(most=2).note) for _ in range(2)
    )
    for number, (change, name, count) in enumerate(changes):
        who = theirs if change.startswith("their") else ours
        match change.removeprefix("their "):
            case "load":
                assert await who.load("test") == Snapshot.of(await driver.load(KEY), CODEC)
            case "append":
                await who.append(stored(name), entry(name), ttl=None)
            case "fold":
                seen = who.seen
                drop = seen.entries_of(min(count, len(seen.turns)))
                gone = [one.id for one in seen.turns[:count]]
                body = replace(
                    seen.body,
                    summary=seen.body.summary + name,
                    lease=None,
                    forgotten=seen.body.forgotten.adding(
                        gone, now=1.0, keep_for=10.0, copies=seen.copies(drop)
                    ),
                )
                if seen.version is not None:
                    await who.replace(seen, body, drop=drop)
            case "lease":
                if who.seen.version is not None:
                    await who.replace(who.seen, replace(who.seen.body, lease=Lease(1.0, 9.0)), drop=0)
            case "clear":
                await driver.replace(
                    # No version is ever used twice, as the driver contract demands.
                    KEY,
                    CODEC.seal_body(Body(name)),
                    version=f"v{number}",
                    expect=ANY,
                    ttl=KEEP,
                )
            case "erase":
                await driver.delete(KEY)
            case _:
                who.forget()
        now = await driver.load(KEY)
        for process in (ours, theirs):
            known = process.seen
            if now is not None and known.version == now.version:
                cut = replace(now, tail=now.tail[: len(known.tail)])
                assert known == Snapshot.of(cut, CODEC)


def test_only_new_entries_are_decoded() -> None:
    codec = Counting()
    last = Snapshot.of(record("v", "a", "b", body=Body("so far")), codec)
    assert (codec.turns, codec.bodies) == (2, 1)
    last = Snapshot.of(record("v", "a", "b", "c", body=Body("so far")), codec, last=last)
    assert (codec.turns, codec.bodies) == (3, 1)
    # Another process has taken the lease, and then folded a turn.
    last = Snapshot.of(record("w", "a", "b", "c", body=Body(lease=Lease(1.0, 2.0))), codec, last=last)
    Snapshot.of(record("x", "b", "c", "d", body=Body("more")), codec, last=last)
    assert (codec.turns, codec.bodies) == (4, 3)


def test_a_fold_of_this_process_leaves_nothing_to_decode_but_new_entries() -> None:
    codec = Counting()
    last = Snapshot.of(record("v", "a", "b", "c"), codec)
    folded = Body("so far", forgotten=Forgotten().adding(["a"], now=1.0, keep_for=10.0))
    last = last.after("w", folded, 1)
    assert last == Snapshot.of(record("w", "b", "c", body=folded), CODEC)
    codec.turns = 0
    Snapshot.of(record("w", "b", "c", "d", body=folded), codec, last=last)
    assert (codec.turns, codec.bodies) == (1, 1)


TEXTS = st.text(max_size=30)


@given(
    TEXTS,
    TEXTS,
    st.none() | st.builds(TrajectoryDigest, st.lists(TEXTS, max_size=3), TEXTS, st.none() | TEXTS),
    st.booleans(),
)
def test_no_turn_is_shown_with_more_weight_than_counted(
    user: str, assistant: str, digest: TrajectoryDigest | None, with_digest: bool
) -> None:
    turn = ConversationTurn(user, assistant, digest)
    shown = shown_text(turn, ShortTermMemoryConfig(include_trajectory_digest=with_digest))
    assert weigh(shown) <= shown_weight(turn)


# What a process keeps of the conversations that it used


def conversation(recent: Recent, name: str, text: str) -> SharedConversation:
    """Return a conversation that this process has loaded."""
    key = Key("acme:u1:memory", name)
    shared = recent.get(key) or SharedConversation(MemoryDriver(), key, CODEC, lambda: 1.0, recent.note)
    turn = StoredTurn(name, ConversationTurn(text, ""))
    shared.seen = Snapshot.of(Record("v", None, (CODEC.seal_turn(turn),)), CODEC)
    recent.note(shared)
    return shared


def test_a_process_keeps_the_conversations_that_it_used_last() -> None:
    recent = Recent(most=2)
    one, two = conversation(recent, "one", "x"), conversation(recent, "two", "x")
    recent.note(one)
    conversation(recent, "three", "x")
    assert recent.get(two.key) is None
    assert two.seen == Snapshot()
    assert recent.get(one.key) is one
    assert one.seen != Snapshot()


def test_the_conversations_that_are_kept_take_a_bounded_number_of_bytes() -> None:
    recent = Recent(most_bytes=105_000)
    for number in range(50):
        conversation(recent, str(number), "x" * 10_000)
        assert recent.size <= 105_000
    assert len(recent) == 4
    for _ in range(50):
        conversation(recent, "small", "x")
    assert len(recent) == 5
    conversation(recent, "large", "x" * 90_000)
    assert len(recent) == 1
