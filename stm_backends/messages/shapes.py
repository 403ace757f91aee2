"""The description of one provider's messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from stm_backends.messages.parts import Message, Part, Role


class Call(NamedTuple):
    """A call of a tool; `arguments` are JSON, usually the text as the model wrote it."""

    id: str
    name: str
    arguments: str


class Result(NamedTuple):
    """The result of the tool's call with this id."""

    id: str
    text: str


class Media(NamedTuple):
    """An image, a recording or a file, and a reference to it: its address, id, name or kind."""

    kind: str
    reference: str


def _no_answer(call: Part, text: str) -> None:
    del call, text


@dataclass(frozen=True, slots=True)
class Shape:
    """One provider's messages, as a few functions, which never change a message.

    - `role`: the role of a message. Raises `InvalidState` if it has none.
    - `parts`: the parts of a message, in the order in which a model reads them.
    - `says`: a new message with a text.
    - `block`: a text as one of the blocks of a message's content.
    - `answers`: a new message with the result of a call; `None` if impossible; then the call is removed.

    `runs`: messages of the assistant in a row are one answer; its calls are answered after the last of them.
    `joins`: the place of the blocks, if the provider requires user and assistant to alternate, the user
    first, without blank texts. Messages in a row are joined there; text of neither takes the user's role.
    """

    name: str
    role: Callable[[Message], Role]
    parts: Callable[[Message], Iterable[Part]]
    says: Callable[[Role, str], Message]
    block: Callable[[str], Any]
    answers: Callable[[Part, str], Message | None] = _no_answer
    runs: bool = False
    joins: str = ""

    def text(self, message: Message) -> str:
        """Return the text of a message, without results of tools, reasoning and media."""
        parts = [*self.parts(message)]
        results = [part.path for part in parts if part.kind == "result"]
        said = (part for part in parts if part.kind == "text" and not any(map(part.within, results)))
        return "\n".join(part.text for part in said)

    def calls(self, message: Message) -> list[Call]:
        """Return the calls of tools in a message."""
        return [Call(part.id, part.name, part.text) for part in self.parts(message) if part.kind == "call"]

    def results(self, message: Message) -> list[Result]:
        """Return the results of tools in a message."""
        parts = [*self.parts(message)]
        return [
            Result(result.id, "\n".join(one.text for one in parts if _tells(one) and one.within(result.path)))
            for result in parts
            if result.kind == "result"
        ]

    def media(self, message: Message) -> list[Media]:
        """Return the images, recordings and files in a message."""
        return [Media(part.name, part.text) for part in self.parts(message) if part.kind == "media"]


def _tells(part: Part) -> bool:
    return part.kind in ("text", "other")
