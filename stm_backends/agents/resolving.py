"""Find the conversation that a call belongs to. Fails closed: in doubt, the call has no memory."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from typing import cast

from stm_backends.records.identity import DEFAULT_TENANT, DEFAULT_USER, part_of
from stm_backends.telemetry.guarded import guarded
from stm_backends.telemetry.observer import SILENT, KeyPart, Observer
from stm_backends.types import MemoryIsolation, MemoryKey

logger = logging.getLogger("stm_backends")


def resolve_memory_key(
    tool_context: Mapping[str, object] | None,
    isolation: MemoryIsolation | None = None,
    explicit: MemoryKey | None = None,
    *,
    require_tenant: bool = False,
    require_user: bool = False,
    observer: Observer = SILENT,
) -> MemoryKey | None:
    """Return the key of one call's conversation, or `None` if the call has no memory.

    Like `KeyResolver.resolve`, but stateless: if calls without a session are allowed, each one is a separate
    conversation.
    """
    resolver = KeyResolver(
        isolation, require_tenant=require_tenant, require_user=require_user, observer=observer
    )
    return resolver.resolve(tool_context, explicit)


class KeyResolver:
    """Finds the key of each call's conversation in the places that `isolation` names.

    Create one for each client, connection or job: with `require_explicit_key=False`, all its calls without a
    session share one conversation. If a resolver serves several users, named users never share a
    conversation, but anonymous ones do. With `require_tenant` or `require_user`, calls without one have no
    memory. `observer` is notified of calls without a key.
    """

    def __init__(
        self,
        isolation: MemoryIsolation | None = None,
        *,
        require_tenant: bool = False,
        require_user: bool = False,
        observer: Observer = SILENT,
    ) -> None:
        self._isolation = isolation or MemoryIsolation()
        self._tenant = "" if require_tenant else DEFAULT_TENANT
        self._user = "" if require_user else DEFAULT_USER
        self._observer = guarded(observer)
        self._ephemeral: MemoryKey | None = None

    def resolve(
        self, tool_context: Mapping[str, object] | None, explicit: MemoryKey | None = None
    ) -> MemoryKey | None:
        """Return the key of a call's conversation, or `None` if the call has no memory.

        If `explicit` is given, it is used; a blank part raises `InvalidKey`. Otherwise the ids are looked up
        in `tool_context` along dotted paths. A missing tenant becomes `default`, a missing user `anonymous`,
        unless they are required. An id that is blank or begins or ends with white space, or an object without
        a text representation, means no key. A call without a session has no key, or an ephemeral one with
        `require_explicit_key=False`.
        """
        if explicit is not None:
            return _checked(explicit)
        paths, context = self._isolation, tool_context or {}
        tenant = _part(context, paths.tenant_key, missing=self._tenant)
        user = _part(context, paths.user_key, missing=self._user)
        session = _part(context, paths.session_key, missing="")
        if tenant and user and session:
            return MemoryKey(tenant, user, session)
        if tenant and user and not paths.require_explicit_key:
            return self._ephemeral_for(tenant, user)
        part: KeyPart = "session" if tenant and user else "user" if tenant else "tenant"
        path = {"tenant": paths.tenant_key, "user": paths.user_key, "session": paths.session_key}[part]
        logger.warning("no memory for this call: no usable %s in its tool context", path)
        self._observer.key_unresolved(part)
        return None

    def _ephemeral_for(self, tenant: str, user: str) -> MemoryKey:
        """Return the ephemeral key of a user, which is replaced when the user changes."""
        key = self._ephemeral
        if key is None or (key.tenant_id, key.user_id) != (tenant, user):
            key = self._ephemeral = MemoryKey(tenant, user, secrets.token_hex(16))
        return key


def _checked(explicit: object) -> MemoryKey:
    """Return a `MemoryKey` with the parts of another framework's key, whose composite may be ambiguous."""
    parts = ("tenant_id", "user_id", "session_id")
    key = MemoryKey(*(cast("str", getattr(explicit, part, "")) for part in parts))
    key.composite()
    return key


def _part(context: Mapping[str, object], path: str, *, missing: str) -> str:
    """Return the id at a path; blank if it begins or ends with white space.

    White space is not removed: `"acme\u00a0"` may be another tenant than `acme`.
    """
    text = part_of(context, path, missing=missing)
    return text if text == text.strip() else ""
