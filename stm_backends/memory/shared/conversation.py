"""A conversation of messages that many processes share: what was said, and what a model is shown of it."""

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

    `id` is that of the call of `add`, and the place of the message in it. A turn begins with it if it
    `begins`. `cut` says that the answer was cut off here. `usage` is what the caller said of the answer that
    ends with it. `summarized` says that the summary covers it, and `retained` that it is still in the record.

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
    """What an edit has taken out of the view: the messages from `first` to `newest`, by their numbers.

    It ended this `revision`, under which `Conversation.history` still has them.
    """

    revision: int
    first: int
    newest: int


@dataclass(frozen=True, slots=True)
class History:
    """Messages of one conversation as of one moment, oldest first.

    `oldest` and `newest` are the numbers of the oldest and the newest message of the conversation; without
    messages, `newest` is less than `oldest`. `missing` has those of the numbers asked for that have no
    message, because it has expired. `open` says that the conversation waits for an answer: the last message
    is the user's, or a result, or calls a tool. `revision` counts the edits before, and `branches` has what
    they have taken out of the view, the oldest edit first.
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

    A message is JSON as the provider has it, and comes back as it was. The recent ones are kept in full in
    the record, as many as `config.budget` shows, or of `max_tokens` without a configuration; the others go to
    pages, and a summary covers them. `shape` says how messages are understood, or names that; by default each
    is recognized. The other arguments are those of `DistributedShortTermMemory`, whose turns the conversation
    may have, too.
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
            raise ConfigurationError("give max_tokens or a configuration, whose budget says it")
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

        Adding the same `id` again has no effect, as with `DistributedShortTermMemory.add_turn`. A user's
        message is added before the model runs, so that it is there whatever happens then. `cut` says that
        the answer was cut off with these messages, or goes on: what is added next under the same `id` takes
        their place, unless something was added in between. `usage` is JSON that is kept with the last one, as
        the provider has it; its numbers are summed, see `usage`.

        Raises `InvalidState`, naming what is wrong where, for what is no message, `LimitReached`, `TooLarge`,
        and `OutcomeUnknown` if the messages were perhaps stored.
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
        """Return messages for the model, in one round trip: the summary, then recent messages as they were.

        They take at most `max_tokens` by the configured estimator; see `messages.window`. By default, that is
        as much as is kept in full: the `max_tokens` that the conversation was opened with, or
        `total_max_tokens` of its configuration. Less shows less; more shows no more, because messages that
        the summary covers are not among them, however much room there is. They are new objects.
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

        Those before a number, after one, or around one; by default the newest. However long the conversation
        is, the record and one or two pages are read. A page is as of one moment, so that reading the next one
        by the number of a message misses none and repeats none. With the `revision` of a `Branch`, they are
        as they were before that edit; `MessageNotFound` if there is no such branch.
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
        """Return what all answers took, by day and in total, in one round trip.

        That is the sum of what `add` was given as `usage`, each answer once, however often it was sent; of an
        answer with checkpoints, what came with the one that took the place of the others.
        """
        snapshot = await self._shared.load("usage")
        self._maintenance.notice(snapshot)
        return total([snapshot.usage])

    async def each_message(
        self, *, after: int | None = None, revision: int | None = None
    ) -> AsyncGenerator[HistoryMessage]:
        """Yield all messages of the conversation after a number, oldest first, in memory of a few pages.

        Each comes once. Messages that are added meanwhile come, too, unless an edit comes first: what it
        takes out of the view is still among them. `revision` is that of `history`.
        """
        async for one in read_all_units(self._shared, after=after, revision=revision):
            for message in self._shown(one):
                yield message

    @observed
    async def rewind(self, to: int, *, revision: int | None = None) -> None:
        """Continue after the message with this number: all that follow leave the view, for every process.

        To have an answer written anew, go to the question before it. To edit a question, go to the message
        before that, and add the new one; -1 is before the first message. What follows is next. The messages
        that have left stay readable as a `Branch` until the conversation is erased. Their ids are not free
        again: adding one has no effect.

        Nothing changes unless all does. If others edit at the same time, one of them wins, and the others get
        `EditConflict`; so they do with the `revision` of an earlier `history`. What others add at the same
        time may stay, as what is said next. Raises `MessageNotFound` if there is no such message,
        `Unavailable`, and `OutcomeUnknown` if it was perhaps done.
        """
        require_integer("to", to, least=-1)
        require_revision(revision)
        await self._editing.rewind(to, revision=revision)

    @observed
    async def replace(self, number: int, message: Message, *, revision: int | None = None) -> None:
        """Let another message have this number; what it was before is not stored any more.

        That is so wherever the message is. If the summary covers it, that is written anew by the background,
        from the last one before it. The message keeps its id and its time. What was copied into another
        conversation, or has left the view before, stays as it was. Of two who edit at once, and with
        `revision`, as for `rewind`. Raises what that raises, and `InvalidState` for what is no message, or
        for the number of a turn that was stored as one.
        """
        require_integer("number", number, least=0)
        require_revision(revision)
        said = checked(message, "message")
        told = self._begins([said])

        def change(unit: StoredTurn) -> StoredTurn:
            if unit.said is None:
                raise InvalidState("the number is that of a turn that was stored as one, which is no message")
            if unit.removed:
                raise MessageNotFound("the message of this number was removed")
            return replaced(unit, said, begins=None if told is None else bool(told))

        with self._guard.reporting(self._whose, "replace"):
            self._guard.require("turn_characters", partial(characters_in, said))
            await self._editing.change(number, number + 1, change, operation="replace", revision=revision)

    @observed
    async def remove(self, first: int, last: int | None = None, *, revision: int | None = None) -> None:
        """Remove a message, or all from one number to another; what they said is not stored any more.

        The others keep their numbers. A call of a tool and its results are removed together, because models
        are not shown one without the other. The rest is as for `replace`. A no-op for what was removed
        before.
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

        Both go on by themselves: each has the messages with their numbers and ids, the summary and the
        settings, and the copy has no branches. It is there as a whole, or not at all; a process that ends
        before may leave an empty conversation, and pages, which `purge` removes after a day. Raises
        `SessionExists`, and changes nothing, if there is a conversation under this id, and what `rewind`
        raises.
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
        """Have the summary written anew, from the last one before the number `since`; by default all of it.

        The present one is discarded at once, and the background writes the next one in portions; until then a
        model is shown what is summarized so far and the recent messages. `flush` waits for it. What a limit
        on the transcript has dropped is not in it any more, because nothing has those messages. A no-op if no
        summary covers the message. Raises what `rewind` raises.
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
