"""A conversation of messages that many processes share: its history, and a model's view of it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, cast

from stm_backends.drivers.checks import require_count, require_integer
from stm_backends.drivers.contract import Driver
from stm_backends.errors import ConfigurationError, InvalidState, MessageNotFound
from stm_backends.memory.defaults import CONVERSATION_TOKENS, speaking
from stm_backends.memory.shared.base import SharedBase
from stm_backends.memory.shared.editing import Editing
from stm_backends.memory.shared.folds import GIVEN, WRITER
from stm_backends.memory.shared.reading import Numbered, read_all_units, read_units_page, require_revision
from stm_backends.memory.shared.snapshot import Snapshot
from stm_backends.memory.speech import said_by, waits_for_answer
from stm_backends.memory.units import messages_of, removed, replaced, seal_messages, usage_of
from stm_backends.messages import SHAPES, Message, Shape, as_shape, begins_turn, checked, shape_of, window
from stm_backends.plain_json import decode_json, encode_json
from stm_backends.protocols import ConfigLike, Summarizer
from stm_backends.records.body import Transcript, digest
from stm_backends.records.keys import require_dialogue
from stm_backends.records.limits import characters_in
from stm_backends.records.usage import Usage, total
from stm_backends.telemetry.observer import observed
from stm_backends.types import MemoryKey, ShortTermMemoryConfig, StoredTurn, as_turn_id

_UNLIMITED: Final = 2**62


@dataclass(frozen=True, slots=True)
class HistoryMessage:
    """One message of a whole conversation. `number` counts from 0 and never changes; `at` is its time.

    `id` consists of the id of the `add` call and the place of the message in it. `begins` is true if a turn
    begins with it, `cut` if the answer was cut off here, `summarized` if the summary covers it, and
    `retained` if it is still in the record. `usage` is what the caller gave for the answer that ends with it.

    Both messages of a turn that was stored as one have the same number.
    """

    number: int
    id: str
    message: Message
    at: float
    begins: bool
    cut: bool = False
    usage: Mapping[str, Any] | None = None
    summarized: bool = False
    retained: bool = True


@dataclass(frozen=True, slots=True)
class Branch:
    """The messages that an edit has removed from the view: the numbers `first` to `newest`.

    The edit ended this `revision`, under which `Conversation.history` still returns them.
    """

    revision: int
    first: int
    newest: int


@dataclass(frozen=True, slots=True)
class History:
    """Messages of one conversation as of one moment, oldest first.

    `oldest` and `newest` are the numbers of the oldest and the newest message of the conversation; without
    messages, `newest` is less than `oldest`. `missing` has the requested numbers without a message, because
    it has expired. `open` is true while the conversation waits for an answer: the last message is the user's,
    or a result, or calls a tool. `revision` counts the edits so far, and `branches` has the messages that
    they removed from the view, oldest edit first.
    """

    messages: tuple[HistoryMessage, ...]
    oldest: int
    newest: int
    missing: tuple[int, ...] = ()
    open: bool = False
    revision: int = 0
    branches: tuple[Branch, ...] = ()


class Conversation(SharedBase):
    """A conversation of messages, shared by every process that opens the same key.

    A message is JSON in the provider's format, and is returned unchanged. Recent messages are kept in full in
    the record, as many as `config.budget` shows, or `max_tokens` without a configuration; older ones move to
    pages, and a summary covers them. `shape` is the message format or its name; by default, the format of
    each message is recognized. The other arguments are those of `DistributedShortTermMemory`, whose turns the
    conversation may also have.
    """

    _adding = "add"

    def __init__(
        self,
        driver: Driver,
        key: MemoryKey,
        config: ConfigLike | None = None,
        *,
        summarizer: Summarizer | None = None,
        shape: Shape | str | None = None,
        max_tokens: int | None = None,
        **shared: Any,
    ) -> None:
        settings: dict[str, Any] = {"config": config, "summarizer": summarizer, "max_tokens": max_tokens}
        self._like_this = partial(Conversation, driver, shape=shape, **settings, **shared)
        given = GIVEN if config is not None or max_tokens is not None else 1 if summarizer is None else WRITER
        if max_tokens is None:
            max_tokens = CONVERSATION_TOKENS
        elif config is not None:
            raise ConfigurationError("give max_tokens or a configuration with a budget, not both")
        require_count("max_tokens", max_tokens)
        config, summarizer = speaking(config, summarizer, max_tokens)
        super().__init__(driver, key, config, summarizer=summarizer, given=given, **shared)
        if self._config.strategy == "none":
            raise ConfigurationError("a conversation needs strategy='rolling_summary' or 'truncation'")
        self._shape = None if shape is None else as_shape(shape, ())
        if self._shape is not None:
            self._maintenance.shape = self._shape
        self._editing = Editing(self._maintenance)
        self._key = key

    @observed
    async def add(
        self,
        *messages: Message,
        id: str | None = None,  # noqa: A002 -- what providers call it
        cut: bool = False,
        usage: Mapping[str, Any] | None = None,
    ) -> None:
        """Add messages at the end, all or none, in one round trip. Without messages, this is a no-op.

        Adding the same `id` again has no effect, as with `DistributedShortTermMemory.add_turn`. Add a user's
        message before the model runs, so that it is stored whatever happens then. `cut` marks an answer that
        was cut off with these messages, or that continues: the next messages under the same `id` replace
        them, unless others were added in between. `usage` is JSON in the provider's format, which is stored
        with the last message; its numbers are summed, see `usage`.

        Raises `InvalidState`, naming the problem and its place, for an invalid message, `LimitReached`,
        `TooLarge`, and `OutcomeUnknown` if the messages were perhaps stored.
        """
        said = [checked(message, f"messages[{place}]") for place, message in enumerate(messages)]
        if not said:
            return
        answer = as_turn_id(id)
        entry = messages_of(
            f"{answer}~{digest(encode_json(said).decode('utf-8', 'surrogatepass'))}" if cut else answer,
            said,
            at=self._shared.clock(),
            begins=self._begins(said),
            cut=answer if cut else "",
            usage=None if usage is None else checked(usage, "usage"),
        )
        with self._guard.reporting(self._whose, "add"):
            for message in said:
                self._guard.require("turn_characters", partial(characters_in, message))
            added = await self._add(entry, seal_messages(self._codec, entry), given=id is not None)
        if added.is_new:
            self._noted(len(said), begins=added.begins)

    def _begins(self, said: Sequence[Message]) -> list[int] | None:
        """Return where turns begin, if other processes cannot know it. Raises `InvalidState`."""
        shape = self._shape
        if shape is None:
            for message in said:
                shape_of(message).role(message)
            return None
        begins = [place for place, message in enumerate(said) if begins_turn(message, shape)]
        return None if shape in SHAPES.values() else begins

    @observed
    async def messages(self, *, max_tokens: int | None = None) -> list[Message]:
        """Return messages for the model, in one round trip: the summary, then recent messages unchanged.

        They take at most `max_tokens` by the configured estimator; see `messages.window`. The default is the
        amount that is kept in full: the `max_tokens` that the conversation was opened with, or the
        `total_max_tokens` of its configuration. A smaller value shows less. A larger value shows no more,
        because messages that the summary covers are never included. The messages are new objects.
        """
        snapshot = await self._shared.load("messages")
        self._maintenance.notice(snapshot)
        found = window_of(snapshot, self._config, shape=self._shape, max_tokens=max_tokens)
        return [_copy(message) for message in found]

    @observed
    async def history(
        self,
        *,
        before: int | None = None,
        after: int | None = None,
        at: int | None = None,
        limit: int = 50,
        revision: int | None = None,
    ) -> History:
        """Return up to `limit` messages of the whole conversation by their numbers, oldest first.

        Returns the messages before, after or around a number; by default the newest. Reads the record and one
        or two pages, however long the conversation is. Each result is as of one moment, so that continuing at
        the number of a message neither skips nor repeats any. With the `revision` of a `Branch`, the messages
        are those before that edit. Raises `MessageNotFound` for an unknown revision.
        """
        page = await read_units_page(
            self._shared, before=before, after=after, at=at, limit=limit, revision=revision
        )
        transcript = page.snapshot.body.transcript or Transcript("")
        is_past = revision not in (None, transcript.rev)
        return History(
            tuple(message for one in page.units for message in self._shown(one)),
            page.oldest,
            page.newest,
            page.missing,
            not is_past and waits_for_answer(page.snapshot.turns, self._shape),
            transcript.rev,
            tuple(Branch(one.rev, one.first, one.end - 1) for one in transcript.branches),
        )

    @observed
    async def usage(self) -> Usage:
        """Return the usage of all answers, by day and in total, in one round trip.

        This is the sum of the `usage` that was given to `add`. Each answer counts once, however often it was
        sent. Of an answer with checkpoints, the usage of the one that replaced the others counts.
        """
        snapshot = await self._shared.load("usage")
        self._maintenance.notice(snapshot)
        return total([snapshot.usage])

    async def each_message(
        self, *, after: int | None = None, revision: int | None = None
    ) -> AsyncGenerator[HistoryMessage]:
        """Yield all messages of the conversation after a number, oldest first, in memory of a few pages.

        Each message is yielded once. Messages that are added meanwhile are included, unless an edit comes
        first; messages that it removes from the view are still included. `revision` works as in `history`.
        """
        async for one in read_all_units(self._shared, after=after, revision=revision):
            for message in self._shown(one):
                yield message

    @observed
    async def rewind(self, to: int, *, revision: int | None = None) -> None:
        """Continue after the message with this number: all later messages leave the view, for every process.

        To regenerate an answer, rewind to the question before it. To edit a question, rewind to the message
        before it, and add the new question; -1 is before the first message. Messages that have left the view
        stay readable as a `Branch` until the conversation is erased. Their ids stay in use: adding one again
        has no effect.

        The edit is done as a whole or not at all. If others edit at the same time, one of them wins, and the
        others get `EditConflict`; so does a call with the `revision` of an earlier `history`. Messages that
        others add at the same time may stay, as the next ones. Raises `MessageNotFound` if the message does
        not exist, `Unavailable`, and `OutcomeUnknown` if the edit was perhaps done.
        """
        require_integer("to", to, least=-1)
        require_revision(revision)
        await self._editing.rewind(to, revision=revision)

    @observed
    async def replace(self, number: int, message: Message, *, revision: int | None = None) -> None:
        """Replace the message with this number; its former content is deleted.

        This works wherever the message is stored. If the summary covers it, the background writes the summary
        again, from the last one before the message. The message keeps its id and its time. Copies in other
        conversations, and messages that have left the view before, stay unchanged. Concurrent edits and
        `revision` work as for `rewind`. Raises the same errors, and `InvalidState` for an invalid message, or
        for the number of a turn that was stored as one.
        """
        require_integer("number", number, least=0)
        require_revision(revision)
        said = checked(message, "message")
        told = self._begins([said])

        def change(unit: StoredTurn) -> StoredTurn:
            if unit.said is None:
                raise InvalidState("the number is that of a turn that was stored as one, not of a message")
            if unit.removed:
                raise MessageNotFound("the message with this number was removed")
            return replaced(unit, said, begins=None if told is None else bool(told))

        with self._guard.reporting(self._whose, "replace"):
            self._guard.require("turn_characters", partial(characters_in, said))
            await self._editing.change(number, number + 1, change, operation="replace", revision=revision)

    @observed
    async def remove(self, first: int, last: int | None = None, *, revision: int | None = None) -> None:
        """Remove a message, or all messages from one number to another; their content is deleted.

        The others keep their numbers. A call of a tool and its results are removed together, because models
        are not shown one without the other. Otherwise, this works like `replace`. Removing messages that were
        removed before is a no-op.
        """
        require_integer("first", first, least=0)
        last = first if last is None else last
        require_integer("last", last, least=first)
        require_revision(revision)

        def change(unit: StoredTurn) -> StoredTurn:
            return unit if unit.removed else removed(unit)

        await self._editing.change(first, last + 1, change, operation="remove", revision=revision)

    @observed
    async def fork(self, id: str, *, to: int | None = None) -> Conversation:  # noqa: A002 -- as `backend.conversation`
        """Copy the messages up to a number, by default all, into a new conversation of the user; return it.

        The two conversations are independent: each has the messages with their numbers and ids, the summary
        and the settings. The copy has no branches. It is created as a whole or not at all; a process that
        ends early may leave an empty conversation and pages, which `purge` removes after a day. Raises
        `SessionExists`, and changes nothing, if a conversation with this id exists, and the errors of
        `rewind`.
        """
        if to is not None:
            require_integer("to", to, least=0)
        owner = (self._key.tenant_id, self._key.user_id)
        require_dialogue(MemoryKey(*owner, id))
        made = self._like_this(MemoryKey(*owner, id))
        listing = self._directory.listed(owner, self._config.record_ttl_s)
        await self._editing.fork(made._maintenance, to, of=self._key.session_id, listing=listing)  # noqa: SLF001 -- the same class
        return made

    @observed
    async def summarize_again(self, *, since: int = 0) -> None:
        """Write the summary again, from the last one before the number `since`; by default all of it.

        The present summary is discarded at once, and the background writes the next one in portions. Until
        then, a model is shown the summary so far and the recent messages. `flush` waits for it. Messages that
        a limit on the transcript has dropped are not in it, because they are no longer stored. A no-op if no
        summary covers the message. Raises the errors of `rewind`.
        """
        require_integer("since", since, least=0)
        await self._editing.summarize_again(since)

    def _shown(self, one: Numbered) -> list[HistoryMessage]:
        """Return the messages of a unit, in new objects."""
        number, stored, summarized, retained = one
        return [
            HistoryMessage(
                number,
                stored.id,
                _copy(message),
                stored.turn.ts,
                stored.begins and place == 0,
                "cut" in stored.extra,
                usage_of(stored),
                summarized,
                retained,
            )
            for place, message in enumerate(said_by(stored, self._shape))
        ]


def _copy(message: Message) -> Message:
    """Return a message that the caller may change: this process shows the same one again."""
    return cast("Message", decode_json(encode_json(message)))


def window_of(
    snapshot: Snapshot,
    config: ShortTermMemoryConfig,
    *,
    shape: Shape | None = None,
    max_tokens: int | None = None,
) -> list[Message]:
    """Return the messages that a model is shown of a conversation at one instant; see `messages`."""
    budget, units, body = config.budget, snapshot.turns, snapshot.body
    shape = shape or as_shape(None, [one.said.message for one in units if one.said and not one.removed])
    said = [*body.lead] if body.asked is None else [*body.lead, body.asked]
    said += [message for unit in units for message in said_by(unit, shape)]
    return window(
        body.summary if budget.summary_max_tokens else "",
        said,
        max_tokens=max_tokens if max_tokens is not None else budget.total_max_tokens or _UNLIMITED,
        estimate=config.estimate,
        shape=shape,
    )
