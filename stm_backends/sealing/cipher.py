r"""The sealed form of one value: encrypted, and bound to the place where it is stored.

```
stm/2 sealed <key id>\n<commitment: 16 bytes><nonce: 12 bytes><AES-256-GCM ciphertext and tag>
```

The key of a record and the commitment to it are derived from a data key by HKDF-SHA256 (RFC 5869), with the
scope and the name of the record as its info. The associated data are the first line, the commitment, the
scope, the name and the slot: `entry`, or `body` with its version. Each part is preceded by its length, so
that no two places have the same associated data. A value that was altered or moved is `Corrupt`.

A record without a body gets one when its entries are resealed: empty text, sealed for the slot `absent` with
its version, whose first word `sealed` is then written as `absent`. It is read as no body.
"""

from __future__ import annotations

import hmac
import os
from functools import lru_cache
from typing import Final

from stm_backends.drivers.contract import Key
from stm_backends.errors import Corrupt, KeyMismatch
from stm_backends.extras import missing_extra
from stm_backends.sealing.keys import KEY_BYTES, MAX_KEY_ID, is_key_id

try:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF
except ModuleNotFoundError as error:
    raise missing_extra("encryption", error) from error

MAGIC: Final = b"stm/2 sealed "
"""The beginning of every sealed value."""

_ABSENT: Final = b"stm/2 absent "
"""The beginning of the sealed form of an absent body. It is as long as `MAGIC`."""

ENTRY: Final = b"entry"
"""The slot of an entry. That of a body is `body_slot(version)`."""

_COMMITMENT = 16
_NONCE = 12
_TAG = 16

OVERHEAD: Final = len(MAGIC) + MAX_KEY_ID + 1 + _COMMITMENT + _NONCE + _TAG
"""Maximum number of bytes that sealing adds to a value."""


class Cipher:
    """Seals and opens the values of one record with the key that is derived for it from one data key."""

    def __init__(self, data_key: bytes, key_id: str, key: Key) -> None:
        self.data_key = data_key
        place = joined(key.scope.encode(), key.name.encode())
        derived = HKDF(SHA256(), KEY_BYTES + _COMMITMENT, salt=None, info=b"stm/2" + place).derive(data_key)
        self._aead = AESGCM(derived[:KEY_BYTES])
        self._head = MAGIC + key_id.encode("ascii") + b"\n" + derived[KEY_BYTES:]
        self._bound = joined(self._head) + place

    def seal(self, slot: bytes, value: bytes) -> bytes:
        """Return the sealed form of a value for a slot of the record."""
        nonce = os.urandom(_NONCE)
        return self._head + nonce + self._aead.encrypt(nonce, value, self._bound + slot)

    def open(self, slot: bytes, sealed: bytes) -> bytes:
        """Return the value.

        Raises `KeyMismatch` if it is not committed to this key, and `Corrupt` if it was altered or was sealed
        for another slot.
        """
        start = len(self._head)
        if not hmac.compare_digest(sealed[:start], self._head):
            raise KeyMismatch(
                "a sealed value was altered, moved from another place, or sealed with another key of this id"
            )
        try:
            nonce, data = sealed[start : start + _NONCE], sealed[start + _NONCE :]
            return self._aead.decrypt(nonce, data, self._bound + slot)
        except (InvalidTag, ValueError):
            pass  # the error is raised outside, so that no exception of the client is shown with it
        raise Corrupt("a sealed value was altered, or moved from another place")


def body_slot(version: str) -> bytes:
    """Return the slot of a body: it is bound to its version."""
    return b"body" + joined(version.encode())


def absent_slot(version: str) -> bytes:
    """Return the slot of a body that a record does not have: it is bound to its version, too."""
    return b"absent" + joined(version.encode())


def absent_body(sealed: bytes) -> bytes:
    """Return the stored form of an absent body, from the value that was sealed for `absent_slot`."""
    return _ABSENT + sealed[len(MAGIC) :]


def slot_and_value(version: str, body: bytes) -> tuple[bytes, bytes]:
    """Return the slot of a stored body, present or absent, and its value as `open` takes it."""
    if body.startswith(_ABSENT):
        return absent_slot(version), MAGIC + body[len(_ABSENT) :]
    return body_slot(version), body


def check_of(data_key: bytes) -> str:
    """Return text that is equal for equal data keys, and says nothing else about them."""
    return HKDF(SHA256(), _COMMITMENT, salt=None, info=b"stm/2 check").derive(data_key).hex()


def key_id_of(sealed: bytes) -> str | None:
    """Return the id of the key that a value was sealed with; `None` if the value is not sealed."""
    if not sealed.startswith(MAGIC):
        return None
    end = sealed.find(b"\n", len(MAGIC), len(MAGIC) + MAX_KEY_ID + 1)
    return _key_id(sealed[len(MAGIC) : max(end, 0)])


@lru_cache(1_024)
def _key_id(key_id: bytes) -> str:
    text = key_id.decode("ascii", "replace")
    if not is_key_id(text):
        raise Corrupt("the first line of a sealed value was altered")
    return text


def joined(*parts: bytes) -> bytes:
    """Join parts so that no other parts give the same bytes: each is preceded by its length."""
    return b"".join(len(part).to_bytes(4, "big") + part for part in parts)
