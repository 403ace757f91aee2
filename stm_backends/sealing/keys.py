"""The sources of data keys: the protocol, and keys that the process holds."""

from __future__ import annotations

import base64
import json
import logging
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple, Protocol, cast, runtime_checkable

from stm_backends.errors import ConfigurationError, KeyMismatch

KEY_BYTES: Final = 32
MAX_KEY_ID: Final = 32
"""Maximum number of characters of a key's id."""

_OTHERS: Final = stat.S_IWGRP | stat.S_IRWXO

logger = logging.getLogger("stm_backends")

_KEY_ID = re.compile(r"[A-Za-z0-9_.-]{1,32}")


class Owner(NamedTuple):
    """The owner of data protected by a key. Records that belong to a tenant as a whole have no user (`""`).

    Both are `""` for records that name no tenant, such as paused runs.
    """

    tenant: str
    user: str


class DataKey(NamedTuple):
    """A key of 32 bytes and the id that is stored with everything sealed with it."""

    id: str
    secret: bytes

    def __repr__(self) -> str:
        return f"DataKey({self.id!r}, <secret>)"


class KeySource(Protocol):
    """A source of data keys.

    An outage raises `Unavailable`, an unknown key `KeyMismatch`, and one that was erased `KeyErased`.
    """

    async def primary(self, owner: Owner) -> DataKey:
        """Return the key that new values of `owner` are sealed with; may create it."""
        ...

    async def key(self, owner: Owner, key_id: str) -> DataKey:
        """Return the key of that id, which an older value of `owner` was sealed with."""
        ...

    async def rewrap(self, owner: Owner) -> int:
        """Read the stored keys of `owner` again, and wrap those again that an older key wraps.

        Returns how many were. The next `primary` is as current as this call.
        """
        ...

    async def erase(self, owner: Owner) -> int:
        """Delete the keys that are only of `owner`, and of the users of a tenant; returns how many had keys.

        Nothing sealed with them can be opened afterwards.
        """
        ...


@runtime_checkable
class OpensStore(Protocol):
    """Optional methods of a `KeySource`: the backend opens and closes it with itself, each perhaps twice."""

    async def open(self) -> None: ...

    async def close(self) -> None: ...


@runtime_checkable
class OwnersKeys(Protocol):
    """An additional method of a `KeySource` with keys for each owner, which another process may erase."""

    async def reread(self, owner: Owner) -> None:
        """Read the stored keys of `owner` again; concurrent calls may share a read that began after them."""
        ...


@dataclass(frozen=True, slots=True)
class Sealing:
    """The `sealing` of `open_backend`: everything is sealed with keys from `keys`.

    `accept_clear=True` also reads values that were stored without sealing, while a datastore is migrated.
    Anyone with write access to the datastore may have written these. Without it, they are `Corrupt`. No
    tenant is marked as sealed meanwhile, so that processes without sealing can still write.
    """

    keys: KeySource = field(repr=False)
    accept_clear: bool = False

    def __post_init__(self) -> None:
        asked = ("primary", "key", "rewrap", "erase")
        if isinstance(self.keys, type) or not all(callable(getattr(self.keys, one, None)) for one in asked):
            raise ConfigurationError(
                "keys of a Sealing are StaticKeys, EnvelopeKeys or another KeySource, not "
                f"{type(self.keys).__name__}"
            )


class StaticKeys:
    """Keys that the process holds, the same for all owners.

    `keys` maps ids to 32 random bytes each. `primary` is the id of the key that new values are sealed with;
    the others open older values. To rotate, add a key on all processes, then make it primary. Raises
    `ConfigurationError` for keys of another form.
    """

    def __init__(self, keys: Mapping[str, bytes], *, primary: str) -> None:
        self._keys = {key.id: key for key in _data_keys(keys)}
        if primary not in self._keys:
            raise ConfigurationError("primary is not the id of one of the keys")
        self._primary = self._keys[primary]

    @classmethod
    def from_file(cls, path: Path) -> StaticKeys:
        """Return the keys of a JSON file, `{"primary": "k1", "keys": {"k1": "<32 bytes in Base64>"}}`.

        Raises `ConfigurationError` for a file that cannot be read, or whose keys are not valid. Messages name
        the file and the id of a key, never a key. Warns if other users of the machine may use the file.
        """
        try:
            content = json.loads(path.read_bytes())
            keys = {name: _decoded(name, key) for name, key in content["keys"].items()}
            made, shared = cls(keys, primary=content["primary"]), is_shared(path)
        except OSError as error:
            raise ConfigurationError(f"the file of keys {path}: {error.strerror}") from None
        except ConfigurationError as error:
            raise ConfigurationError(f"the file of keys {path}: {error}") from None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ConfigurationError(
                f'the file of keys {path} must be {{"primary": ID, "keys": {{ID: BASE64}}}}'
            ) from None
        if shared:
            logger.warning("other users may read or change the file of keys %s: chmod 600 it", path)
        return made

    def __repr__(self) -> str:
        return f"StaticKeys({sorted(self._keys)}, primary={self._primary.id!r})"

    async def primary(self, owner: Owner) -> DataKey:
        """Return the primary key."""
        del owner
        return self._primary

    async def key(self, owner: Owner, key_id: str) -> DataKey:
        """Return the key of that id. Raises `KeyMismatch` if the process does not have it."""
        del owner
        try:
            return self._keys[key_id]
        except KeyError:
            raise KeyMismatch(f"sealed with the key {key_id!r}, which this process does not have") from None

    async def rewrap(self, owner: Owner) -> int:
        """Do nothing: these keys are not stored."""
        del owner
        return 0

    async def erase(self, owner: Owner) -> int:
        """Delete nothing: no key belongs to one owner."""
        del owner
        return 0


def is_shared(path: Path) -> bool:
    """Say whether other users of the machine may read or change a file, or its group may change it.

    The group may read: that is how a container often gets a file of secrets.
    """
    return bool(path.stat().st_mode & _OTHERS)


def _decoded(key_id: str, text: object) -> bytes:
    """Return a key of a file."""
    # Checked first, because the messages below name the id: a file may have a key in its place.
    _require_key_id(key_id)
    try:
        key = base64.b64decode(cast("str", text), validate=True)
    except (ValueError, TypeError):
        raise ConfigurationError(f"the key {key_id!r} is not Base64") from None
    if len(key) != KEY_BYTES:
        raise ConfigurationError(f"the key {key_id!r} must be {KEY_BYTES} bytes, not {len(key)}")
    return key


def _data_keys(keys: object) -> Iterator[DataKey]:
    """Return the keys of a mapping. Messages never show their bytes."""
    if not isinstance(keys, Mapping):
        raise ConfigurationError(f"keys must map ids to {KEY_BYTES} bytes each; not {type(keys).__name__}")
    for key_id, key in cast("Mapping[object, object]", keys).items():
        _require_key_id(key_id)
        if not isinstance(key, (bytes, bytearray)) or len(key) != KEY_BYTES:
            raise ConfigurationError(f"each key must be {KEY_BYTES} bytes")
        yield DataKey(cast("str", key_id), bytes(key))


def _require_key_id(key_id: object) -> None:
    if not isinstance(key_id, str) or not is_key_id(key_id):
        raise ConfigurationError("a key's id has 1 to 32 ASCII letters, digits, '-', '_' or '.'")


def is_key_id(text: str) -> bool:
    """Say whether text can be a key's id: 1 to 32 ASCII letters, digits, `-`, `_` and `.`."""
    return _KEY_ID.fullmatch(text) is not None
