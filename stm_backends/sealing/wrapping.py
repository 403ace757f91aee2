"""Wrapping of data keys, i.e. encryption under a key that is used for nothing else."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping
from typing import Final, Protocol

from stm_backends.drivers.checks import require_seconds
from stm_backends.drivers.contract import DEFAULT_DEADLINE_S, Key
from stm_backends.errors import ConfigurationError, KeyMismatch, Unavailable
from stm_backends.sealing.cipher import Cipher, key_id_of
from stm_backends.sealing.keys import Owner, StaticKeys

_SLOT: Final = b"data key"


class Wrapping(Protocol):
    """Wraps and unwraps data keys. An outage raises `Unavailable`, and an unreadable key `KeyMismatch`."""

    async def wrap(self, secret: bytes, owner: Owner, key_id: str) -> bytes:
        """Return the wrapped form of a data key, bound to its owner and its id."""
        ...

    async def unwrap(self, wrapped: bytes, owner: Owner, key_id: str) -> bytes:
        """Return the data key."""
        ...

    def is_current(self, wrapped: bytes) -> bool:
        """Say whether `wrap` would use the same key; if not, `EnvelopeKeys.rewrap` wraps it again."""
        ...


class LocalWrapping:
    """Wraps data keys under keys that the process holds, as `StaticKeys` takes them."""

    def __init__(self, keys: Mapping[str, bytes], *, primary: str) -> None:
        self._keys = StaticKeys(keys, primary=primary)
        self._primary = primary

    async def wrap(self, secret: bytes, owner: Owner, key_id: str) -> bytes:
        """Return the data key, sealed under the primary key."""
        key = await self._keys.primary(owner)
        return _cipher(key.secret, key.id, owner, key_id).seal(_SLOT, secret)

    async def unwrap(self, wrapped: bytes, owner: Owner, key_id: str) -> bytes:
        """Return the data key. Raises `KeyMismatch` for one of another owner or another id."""
        key = await self._keys.key(owner, key_id_of(wrapped) or "")
        return _cipher(key.secret, key.id, owner, key_id).open(_SLOT, wrapped)

    def is_current(self, wrapped: bytes) -> bool:
        """Say whether the primary key wraps it."""
        return key_id_of(wrapped) == self._primary


class KmsWrapping:
    """Wraps data keys with AWS KMS, or a service with the same `encrypt` and `decrypt`.

    `client` is a KMS client of boto3, whose calls are made in a thread, or of aiobotocore. `key` is the id,
    ARN or alias of the KMS key. The tenant, the user and the data key's id are the encryption context, so
    they appear in the service's log of calls. A call that takes longer than `deadline_s` is an outage.
    """

    def __init__(self, client: object, *, key: str, deadline_s: float = DEFAULT_DEADLINE_S) -> None:
        require_seconds("deadline_s", deadline_s)
        if not all(callable(getattr(client, name, None)) for name in ("encrypt", "decrypt")):
            raise ConfigurationError("client must be a KMS client, with encrypt and decrypt")
        self._client = client
        self._key = key
        self._deadline_s = deadline_s

    async def wrap(self, secret: bytes, owner: Owner, key_id: str) -> bytes:
        """Return the data key as encrypted by the service."""
        return await self._call("encrypt", "CiphertextBlob", owner, key_id, Plaintext=secret)

    async def unwrap(self, wrapped: bytes, owner: Owner, key_id: str) -> bytes:
        """Return the data key. Raises `KeyMismatch` if the service cannot decrypt it for this owner."""
        return await self._call("decrypt", "Plaintext", owner, key_id, CiphertextBlob=wrapped)

    def is_current(self, wrapped: bytes) -> bool:
        """Return `True`: the service rotates a key under the same id, and unwraps older data keys, too."""
        del wrapped
        return True

    async def _call(self, method: str, answer: str, owner: Owner, key_id: str, **values: bytes) -> bytes:
        context = {"tenant": owner.tenant, "user": owner.user, "data-key": key_id}
        context = {name: value for name, value in context.items() if value}  # KMS takes no empty values
        call = getattr(self._client, method)
        try:
            async with asyncio.timeout(self._deadline_s):
                found = await asyncio.to_thread(call, KeyId=self._key, EncryptionContext=context, **values)
                found = await found if inspect.isawaitable(found) else found
        except Exception as error:
            # Errors of botocore carry the service's answer.
            response: dict[str, dict[str, str]] = getattr(error, "response", {})
            code = response.get("Error", {}).get("Code", "")
            if code in _UNREADABLE:
                raise KeyMismatch("the key service cannot unwrap a data key") from error
            raise Unavailable(f"the key service failed: {code or type(error).__name__}") from error
        return found[answer]


_UNREADABLE: Final = frozenset({"InvalidCiphertextException", "IncorrectKeyException", "NotFoundException"})


def _cipher(secret: bytes, wrapping_id: str, owner: Owner, key_id: str) -> Cipher:
    # The record's key of the format has room for both: the owner is the scope, the data key's id the name.
    return Cipher(secret, wrapping_id, Key(f"{len(owner.tenant)}:{owner.tenant}{owner.user}", key_id))
