"""The requests that the driver makes of JetStream, each with its answer."""

from __future__ import annotations

import asyncio
import json
from base64 import b64decode
from typing import Any, NamedTuple

from nats.aio.msg import Msg

from stm_backends import ConfigurationError, OutcomeUnknown, Unavailable
from tests.strangers.nats_backend.layout import GONE
from tests.strangers.nats_backend.link import Link, LinkLost
from tests.strangers.nats_backend.settings import HEAD, NatsSettings

NO_MESSAGE, NO_STREAM, NO_SEQUENCE, OTHER_SEQUENCE = 10037, 10059, 10043, 10071

NOT_DONE = frozenset(
    {10002, 10008, 10023, 10025, 10028, 10039, 10047, 10054, 10059, 10060, 10076, 10077, 10109, 10122}
)
"""Errors that the server raises of a message that it has not stored: limits, no space, no leader."""

MISSING = "the stream does not exist; make it with create=True"


class Found(NamedTuple):
    """The last message of a subject: its sequence, or 0 if there is none, and its data unless it is gone."""

    sequence: int
    data: bytes | None


def configuration(settings: NatsSettings) -> dict[str, Any]:
    """Return the configuration of the stream: the last message of each subject is kept forever."""
    return {
        "name": settings.stream,
        "description": "records of stm-backends",
        "subjects": [f"{settings.stream}.*.*"],
        "retention": "limits",
        "storage": "file",
        "discard": "old",
        "max_msgs_per_subject": 1,
        "max_msgs": -1,
        "max_bytes": -1,
        "max_age": 0,
        "max_msg_size": -1,
        "max_consumers": -1,
        "num_replicas": settings.replicas,
        "allow_direct": False,
        "deny_delete": False,
    }


async def ask(link: Link, verb: str, **request: object) -> dict[str, Any]:
    """Make a request of the API; the answer may be an error."""
    payload = json.dumps(request).encode() if request else b""
    message = await link.request(f"$JS.API.{verb}", payload)
    return json.loads(message.data)


def code_of(answer: dict[str, Any]) -> int:
    """Return the number of the error in an answer; 0 if it is none."""
    error = answer.get("error")
    return 0 if error is None else int(error.get("err_code") or -1)


def require_done(answer: dict[str, Any]) -> dict[str, Any]:
    """Return an answer that is no error. Messages have the number alone: descriptions may show subjects."""
    code = code_of(answer)
    if code == NO_STREAM:
        raise Unavailable(MISSING)
    if code:
        kind = Unavailable if code in NOT_DONE else OutcomeUnknown
        raise kind(f"JetStream refused it with error {code}")
    return answer


async def prepare(link: Link, settings: NatsSettings, *, create: bool) -> None:
    """See to it that the stream exists and keeps what the driver relies on."""
    if link.client.max_payload < settings.max_record_bytes + HEAD:
        raise ConfigurationError(
            f"the server takes messages of {link.client.max_payload:,} bytes: raise its max_payload, or set "
            f"max_record_bytes to {link.client.max_payload - HEAD:,} at most"
        )
    answer = await ask(link, f"STREAM.INFO.{settings.stream}")
    if code_of(answer) == NO_STREAM and create:
        answer = await ask(link, f"STREAM.CREATE.{settings.stream}", **configuration(settings))
    try:
        found = require_done(answer)["config"]
    except OutcomeUnknown as error:
        raise ConfigurationError(f"the stream could not be made: {error}") from None
    wanted = configuration(settings)
    needed = ("subjects", "max_msgs_per_subject", "max_age", "max_msgs", "max_bytes", "retention")
    if wrong := [name for name in needed if found.get(name) != wanted[name]]:
        raise ConfigurationError(f"the stream is of another kind: {', '.join(wrong)} of its configuration")
    if found.get("mirror") or found.get("sealed") or found.get("deny_delete"):
        raise ConfigurationError("the stream is a mirror, is sealed, or permits no deletes")


async def last_of(link: Link, stream: str, subject: str) -> Found:
    """Return the last message of a subject. The stream's leader answers, never a replica or a mirror."""
    return found_in(await ask(link, f"STREAM.MSG.GET.{stream}", last_by_subj=subject))


async def last_of_each(link: Link, stream: str, subjects: list[str]) -> list[Found]:
    """Return the last message of each subject; the requests are under way at once."""
    sent: list[asyncio.Future[Msg]] = []
    try:
        for subject in subjects:
            payload = json.dumps({"last_by_subj": subject}).encode()
            sent.append(await link.send(f"$JS.API.STREAM.MSG.GET.{stream}", payload))
        return [found_in(json.loads((await answer).data)) for answer in sent]
    finally:
        for answer in sent:
            answer.cancel()


def found_in(answer: dict[str, Any]) -> Found:
    """Return the message in an answer."""
    if code_of(answer) == NO_MESSAGE:
        return Found(0, None)
    message = require_done(answer)["message"]
    data = b64decode(message.get("data", ""), validate=True)
    return Found(message["seq"], None if data == GONE else data)


async def next_of(link: Link, stream: str, sequence: int) -> tuple[str, Found] | None:
    """Return the first message from a sequence on, and its subject."""
    answer = await ask(link, f"STREAM.MSG.GET.{stream}", seq=sequence, next_by_subj=f"{stream}.*.*")
    found = found_in(answer)
    return (answer["message"]["subject"], found) if found.sequence else None


async def put(link: Link, stream: str, subject: str, data: bytes, *, sequence: int) -> int:
    """Store a message if the last one of its subject has this sequence; returns its own, or 0 if not."""
    headers = {"Nats-Expected-Stream": stream, "Nats-Expected-Last-Subject-Sequence": str(sequence)}
    try:
        answer = json.loads((await link.request(subject, data, headers)).data)
    except LinkLost:
        raise OutcomeUnknown("the connection was lost before the answer came") from None
    if code_of(answer) == OTHER_SEQUENCE:
        return 0
    return int(require_done(answer)["seq"])


async def remove(link: Link, stream: str, sequence: int) -> bool:
    """Remove a message, and overwrite its bytes; returns whether it was there.

    The server does not do this in one step with the comparison of a message that is being stored. So only a
    message without content may be removed, or one that has expired.
    """
    answer = await ask(link, f"STREAM.MSG.DELETE.{stream}", seq=sequence)
    if code_of(answer) in (NO_SEQUENCE, NO_MESSAGE, 10057):
        return False
    require_done(answer)
    return True


async def subjects_of(link: Link, stream: str, prefix: str) -> list[str]:
    """Return all subjects with a prefix that have a message, in their order."""
    found: list[str] = []
    while True:
        # Each page begins with the last subject of the one before. If it is another one, what precedes it
        # has changed, and the pages do not fit together.
        start = max(0, len(found) - 1)
        answer = await ask(link, f"STREAM.INFO.{stream}", subjects_filter=prefix + "*", offset=start)
        require_done(answer)
        page = sorted(answer["state"].get("subjects") or ())
        if found and page[:1] != found[-1:]:
            found = []
            continue
        found += page[1:] if found else page
        if len(found) >= answer.get("total", 0):
            return found
