"""Which conversation a call belongs to. In doubt none, and the call has no memory: it fails closed."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Collection, Mapping
from typing import Final, cast

from stm_backends.telemetry.observer import SILENT, KeyPart, Observer
from stm_backends.types import MemoryIsolation, MemoryKey

logger = logging.getLogger("stm_backends")

DEFAULT_TENANT: Final = "default"
DEFAULT_USER: Final = "anonymous"


def resolve_memory_key(
    tool_context: Mapping[str, object] | None,
    isolation: MemoryIsolation | None = None,
    explicit: MemoryKey | None = None,
    *,
    observer: Observer = SILENT,
) -> MemoryKey | None:
    """Return the key of one call's conversation, or `None`: no memory for this call.

    As `KeyResolver.resolve`, but nothing is remembered from call to call: where a call without a session
    is allowed, each such call is a conversation of its own.
    """
    return KeyResolver(isolation, observer=observer).resolve(tool_context, explicit)


class KeyResolver:
    """Finds the key of each call's conversation where `isolation` says that the ids are.

    Make one for each client, connection or job: without `require_explicit_key`, its calls that name no
    session share one conversation. A resolver that serves several people never lets two users that are
    named meet there, but it cannot tell those apart who are not. `observer` hears of calls without a key.
    """

    def __init__(self, isolation: MemoryIsolation | None = None, *, observer: Observer = SILENT) -> None:
        self._isolation = isolation or MemoryIsolation()
        self._observer = observer
        self._ephemeral: MemoryKey | None = None

    def resolve(
        self, tool_context: Mapping[str, object] | None, explicit: MemoryKey | None = None
    ) -> MemoryKey | None:
        """Return the key of a call's conversation, or `None`: no memory for this call.

        `explicit` decides if it is given, and `InvalidKey` is raised if it has a blank part. Otherwise the
        ids are looked up in `tool_context`, along dotted paths, and white space around them is dropped. A
        tenant or a user that is missing is `default` or `anonymous`; one that is blank means no key, as
        does an object that has no text of its own. A call without a session has no key either, or an
        ephemeral one if `require_explicit_key` is off.
        """
        if explicit is not None:
            return _checked(explicit)
        paths, context = self._isolation, tool_context or {}
        tenant = _part(context, paths.tenant_key, missing=DEFAULT_TENANT)
        user = _part(context, paths.user_key, missing=DEFAULT_USER)
        session = _part(context, paths.session_key, missing="")
        if tenant and user and session:
            return MemoryKey(tenant, user, session)
        if tenant and user and not paths.require_explicit_key:
            return self._ephemeral_for(tenant, user)
        part: KeyPart = "session" if tenant and user else "user" if tenant else "tenant"
        path = {"tenant": paths.tenant_key, "user": paths.user_key, "session": paths.session_key}[part]
        logger.warning("no memory for this call: its tool context has no usable %s", path)
        self._observer.key_unresolved(part)
        return None

    def _ephemeral_for(self, tenant: str, user: str) -> MemoryKey:
        """Return the key of the conversation that lasts as long as this object and this user stay."""
        key = self._ephemeral
        if key is None or (key.tenant_id, key.user_id) != (tenant, user):
            key = self._ephemeral = MemoryKey(tenant, user, secrets.token_hex(16))
        return key


def _checked(explicit: object) -> MemoryKey:
    """Return our own key with the parts of any framework's, whose composites may not be injective."""
    parts = ("tenant_id", "user_id", "session_id")
    key = MemoryKey(*(cast("str", getattr(explicit, part, "")) for part in parts))
    key.composite()
    return key


def _part(context: Mapping[str, object], path: str, *, missing: str) -> str:
    value: object = context
    for step in path.split("."):
        value = _found(value, step)
    return missing if value is None else _text(value)


def _found(value: object, step: str) -> object:
    return cast("Mapping[str, object]", value).get(step) if isinstance(value, Mapping) else None


def _text(value: object) -> str:
    """Return the text of an id, blank for what cannot be one.

    A path that ends too early leads to a collection, with whatever secrets are in it. An object without a
    text of its own is shown by its address, which another user's object has as soon as this one is gone.
    """
    kind = type(value)
    nameless = kind.__str__ is object.__str__ and kind.__repr__ is object.__repr__
    collection = issubclass(kind, Collection) and not issubclass(kind, str)
    return "" if collection or nameless or callable(value) else str(value).strip()
