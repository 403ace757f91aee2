"""The keys of summaries in long-term memory."""

from __future__ import annotations

import re


def without_id(key: str) -> str:
    """Return a key without the id that tells a shared session from others under the same key."""
    return re.sub(r"^(__summary__:[^:]+):[0-9a-f]{16}", r"\1", key)
