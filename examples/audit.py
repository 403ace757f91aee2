# pip install . && python examples/audit.py
"""Write an audit log: who was erased, purged, exported, copied or refused, as JSON lines with hashed ids."""

import asyncio
import hmac
import json
import time
from pathlib import Path

from stm_backends import ConversationTurn, MemoryKey, ShortTermMemoryConfig, open_backend
from stm_backends.telemetry.observer import Observer

HASH_KEY = b"32 random bytes from your vault."
FILE = Path("audit.jsonl")


def hashed(part: str) -> str:
    """Return what the log has instead of an id. It can be compared, but not turned back, without the key."""
    return hmac.new(HASH_KEY, part.encode("utf-8", "surrogatepass"), "sha256").hexdigest()[:12]


class Audit(Observer):
    """Appends a line for each event. To have metrics as well, derive from `Audit` and `Telemetry`."""

    def erased(self, subject, records):
        super().erased(subject, records)
        self.write("erased", subject, records=records)

    def purged(self, subject, records):
        super().purged(subject, records)
        self.write("purged", subject, records=records)

    def exported(self, subject):
        super().exported(subject)
        self.write("exported", subject)

    def imported(self, subject):
        super().imported(subject)
        self.write("imported", subject)

    def copied(self, subject, records):
        super().copied(subject, records)
        self.write("copied", subject, records=records)

    def denied(self, subject, operation):
        super().denied(subject, operation)
        self.write("denied", subject, operation=operation)

    def limit_reached(self, subject, limit):
        super().limit_reached(subject, limit)
        self.write("limit reached", subject, limit=limit)

    def write(self, event, subject, **more):
        ids = {part: hashed(text) for part, text in subject._asdict().items() if text}
        with FILE.open("a") as file:
            file.write(json.dumps({"at": time.time(), "event": event, **ids, **more}) + "\n")


observer = Audit()  # for commands: STM_BACKENDS_OBSERVER=audit:observer stm-backends erase acme:u123


async def main() -> None:
    key = MemoryKey("acme", "u123", "chat_001")
    async with open_backend("memory://", observer=observer) as backend:
        memory = backend.memory(key, ShortTermMemoryConfig(strategy="truncation", transcript=True))
        await memory.add_turn(ConversationTurn("a table for two", "Done."))
        document = await backend.sessions.export(key)
        await backend.sessions.erase_user("acme", "u123")
        await backend.sessions.import_(document)


if __name__ == "__main__":
    asyncio.run(main())
    for line in FILE.read_text().splitlines():
        print({name: value for name, value in json.loads(line).items() if name != "at"})

# {'event': 'exported', 'tenant': '7b69050a6b17', 'user': '2df8d9fb8459', 'session': '0e34fc1ff446'}
# {'event': 'erased', 'tenant': '7b69050a6b17', 'user': '2df8d9fb8459', 'records': 1}
# {'event': 'imported', 'tenant': '7b69050a6b17', 'user': '2df8d9fb8459', 'session': '0e34fc1ff446'}
