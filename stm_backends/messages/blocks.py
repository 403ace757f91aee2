"""The content of a message: texts and blocks, as providers name them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, TypeAlias, cast

from stm_backends.errors import InvalidState
from stm_backends.messages.parts import Part, Path, Role

# The names of blocks of content. No two providers use one name for different things.

_TEXTS: Final = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
THOUGHTS: Final = frozenset(("thinking", "redacted_thinking", "reasoning"))
MEDIA: Final = {
    **dict.fromkeys(("image", "image_url", "input_image", "image-url"), "image"),
    **dict.fromkeys(("audio", "input_audio", "audio_url", "audio-url"), "audio"),
    **dict.fromkeys(("video", "video_url", "video-url"), "video"),
    **dict.fromkeys(("file", "input_file", "document", "document-url", "container_upload"), "file"),
    **dict.fromkeys(("binary", "uploaded-file"), "file"),
}

_ROLES: Final[Mapping[str, Role]] = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human", "humanmessagechunk"), "user"),
    **dict.fromkeys(("assistant", "ai", "aimessagechunk", "model", "response"), "assistant"),
    **dict.fromkeys(("tool", "function"), "tool"),
}

_Read: TypeAlias = Callable[[Mapping[str, Any], Path], Iterator[Part]]


# Stored JSON may have any type: unexpected values count as empty.


def text_in(value: object) -> str:
    """Return a text, and `""` for anything else."""
    return value if isinstance(value, str) else ""


def object_in(value: object) -> Mapping[str, Any]:
    """Return an object, and an empty one for anything else."""
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}


def list_in(value: object) -> list[Any]:
    """Return a list, and an empty one for anything else."""
    return cast("list[Any]", value) if isinstance(value, list) else []


def role_called(called: object, shape: str) -> Role:
    """Return the role with this name at providers. Raises `InvalidState` for anything else."""
    if (role := _ROLES.get(text_in(called).lower())) is None:
        usual = dict.fromkeys(_ROLES.values())
        others = ", ".join(sorted(_ROLES.keys() - usual))
        raise InvalidState(
            f"a message has no role that the shape {shape!r} has; expected {', '.join(usual)}; also {others}"
        )
    return role


def parts_in(content: object, path: Path, read: _Read) -> Iterator[Part]:
    """Yield the parts of a text, of a block, or of a list of these."""
    if isinstance(content, str):
        yield Part("text", path, content, path)
    elif isinstance(content, Mapping):
        yield from read(cast("Mapping[str, Any]", content), path)
    elif isinstance(content, list):
        for index, block in enumerate(cast("list[object]", content)):
            yield from parts_in(block, (*path, index), read)
    elif content is not None:
        yield Part("other", path, content)


def typed_block(block: Mapping[str, Any], path: Path) -> Iterator[Part]:
    """Yield the parts of a block that says its type."""
    kind = text_in(block.get("type"))
    source = object_in(block.get("source"))
    if isinstance(text := block.get(_TEXTS.get(kind, "")), str):
        yield Part("text", path, text, (*path, _TEXTS[kind]))
    elif kind == "document" and isinstance(text := source.get("data"), str) and source.get("type") == "text":
        yield Part("text", path, text, (*path, "source", "data"))
    elif kind in MEDIA:
        yield medium(block, path, MEDIA[kind])
    elif kind in THOUGHTS:
        yield Part("thought", path, block)
    elif kind == "tool_use":
        yield call_in(block, path, ("input",), block.get("id"), block.get("name"))
    elif kind == "tool_result":
        yield Part("result", path, id=text_in(block.get("tool_use_id")))
        yield from parts_in(block.get("content"), (*path, "content"), typed_block)
    elif kind == "search_result":
        yield from parts_in(block.get("content"), (*path, "content"), typed_block)
    else:
        yield Part("other", path, block)


def call_in(node: Mapping[str, Any], path: Path, at: Path, call_id: object, name: object) -> Part:
    """Return a call whose arguments are at a path within it."""
    arguments: Any = node
    for step in at:
        arguments = object_in(arguments).get(str(step))
    arguments = "" if arguments is None else arguments
    return Part("call", path, arguments, (*path, *at), text_in(call_id), text_in(name))


_LOCATIONS: Final = ("url", "image_url", "file_url", "file_uri", "fileUri", "file_id", "file_name", "id")
_NAMES: Final = ("filename", "title", "display_name", "displayName", "name")
_KINDS: Final = ("media_type", "mime_type", "mimeType", "format")
_LONGEST: Final = 200
"""Maximum number of characters of a reference that are shown."""


def medium(block: Mapping[str, Any], path: Path, kind: str) -> Part:
    """Return a medium with the best reference to it that the block has, which is never its content."""
    known: dict[str, str] = {}
    waiting: list[Mapping[str, Any]] = [block]
    for node in waiting:
        waiting += filter(None, map(object_in, node.values()))
        known |= {name: value for name, value in node.items() if isinstance(value, str) and name not in known}
    inline = next((value for value in known.values() if value.startswith("data:")), "")
    types = [known[name] for name in _KINDS if name in known] + [inline[5:].partition(";")[0]]
    named = [known[name] for name in (*_LOCATIONS, *_NAMES) if name in known]
    reference = next((one for one in (*named, *types) if one and not one.startswith("data:")), kind)
    kind = next((one for one in ("image", "audio", "video") if types[0].startswith(one)), kind)
    return Part("media", path, reference[:_LONGEST], name=kind)
