"""Conversation memory for agents that run on many machines.

A public name is imported from its module when it is first used, so that `import stm_backends` takes no time.
"""

import typing

if typing.TYPE_CHECKING:
    from stm_backends.admin.importing import OnConflict
    from stm_backends.admin.sessions import Sessions
    from stm_backends.backend import Backend, open_backend
    from stm_backends.errors import (
        AmbiguousBackend,
        ConfigurationError,
        Corrupt,
        Denied,
        EditConflict,
        InvalidKey,
        InvalidState,
        KeyErased,
        KeyMismatch,
        LimitReached,
        MemoryBudgetExceeded,
        MessageNotFound,
        MissingExtra,
        OutcomeUnknown,
        SealMismatch,
        SessionExists,
        SessionNotFound,
        StmError,
        StorageError,
        TooLarge,
        Unavailable,
        UnknownBackend,
    )
    from stm_backends.history.log import ItemLog, LogState
    from stm_backends.memory.local.memory import DefaultShortTermMemory
    from stm_backends.memory.shared.conversation import Branch, Conversation, History, HistoryMessage
    from stm_backends.memory.shared.memory import DistributedShortTermMemory
    from stm_backends.memory.shared.reading import TranscriptPage, TranscriptTurn
    from stm_backends.memory.shared.router import MemoryRouter
    from stm_backends.memory.summarizers import ExtractiveSummarizer
    from stm_backends.opening import BackendOptions, open_memory, open_sqlite
    from stm_backends.protocols import (
        ConfigLike,
        ShortTermMemory,
        ShortTermMemoryArtifacts,
        ShortTermMemoryPersistence,
        ShortTermMemorySerializable,
        Summarizer,
        SupportsMemoryState,
    )
    from stm_backends.records.codec import Transform
    from stm_backends.records.limits import Limits
    from stm_backends.records.state_store import StateStore, TenantStates
    from stm_backends.records.usage import Usage
    from stm_backends.sealing.data_keys import EnvelopeKeys
    from stm_backends.sealing.keys import Sealing, StaticKeys
    from stm_backends.types import (
        ConversationTurn,
        MemoryBudget,
        MemoryHealth,
        MemoryIsolation,
        MemoryKey,
        OverflowPolicy,
        ShortTermMemoryConfig,
        Strategy,
        Summaries,
        TokenEstimator,
        TrajectoryDigest,
        default_token_estimator,
    )
    from stm_backends.work.worker import Worker

__all__ = [
    "AmbiguousBackend",
    "Backend",
    "BackendOptions",
    "Branch",
    "ConfigLike",
    "ConfigurationError",
    "Conversation",
    "ConversationTurn",
    "Corrupt",
    "DefaultShortTermMemory",
    "Denied",
    "DistributedShortTermMemory",
    "EditConflict",
    "EnvelopeKeys",
    "ExtractiveSummarizer",
    "History",
    "HistoryMessage",
    "InvalidKey",
    "InvalidState",
    "ItemLog",
    "KeyErased",
    "KeyMismatch",
    "LimitReached",
    "Limits",
    "LogState",
    "MemoryBudget",
    "MemoryBudgetExceeded",
    "MemoryHealth",
    "MemoryIsolation",
    "MemoryKey",
    "MemoryRouter",
    "MessageNotFound",
    "MissingExtra",
    "OnConflict",
    "OutcomeUnknown",
    "OverflowPolicy",
    "SealMismatch",
    "Sealing",
    "SessionExists",
    "SessionNotFound",
    "Sessions",
    "ShortTermMemory",
    "ShortTermMemoryArtifacts",
    "ShortTermMemoryConfig",
    "ShortTermMemoryPersistence",
    "ShortTermMemorySerializable",
    "StateStore",
    "StaticKeys",
    "StmError",
    "StorageError",
    "Strategy",
    "Summaries",
    "Summarizer",
    "SupportsMemoryState",
    "TenantStates",
    "TokenEstimator",
    "TooLarge",
    "TrajectoryDigest",
    "TranscriptPage",
    "TranscriptTurn",
    "Transform",
    "Unavailable",
    "UnknownBackend",
    "Usage",
    "Worker",
    "__version__",
    "default_token_estimator",
    "open_backend",
    "open_memory",
    "open_sqlite",
]

__version__: str

_HOMES = {
    "AmbiguousBackend": "errors",
    "Backend": "backend",
    "BackendOptions": "opening",
    "Branch": "memory.shared.conversation",
    "ConfigLike": "protocols",
    "ConfigurationError": "errors",
    "Conversation": "memory.shared.conversation",
    "ConversationTurn": "types",
    "Corrupt": "errors",
    "DefaultShortTermMemory": "memory.local.memory",
    "Denied": "errors",
    "DistributedShortTermMemory": "memory.shared.memory",
    "EditConflict": "errors",
    "EnvelopeKeys": "sealing.data_keys",
    "ExtractiveSummarizer": "memory.summarizers",
    "History": "memory.shared.conversation",
    "HistoryMessage": "memory.shared.conversation",
    "InvalidKey": "errors",
    "InvalidState": "errors",
    "ItemLog": "history.log",
    "KeyErased": "errors",
    "KeyMismatch": "errors",
    "LimitReached": "errors",
    "Limits": "records.limits",
    "LogState": "history.log",
    "MemoryBudget": "types",
    "MemoryBudgetExceeded": "errors",
    "MemoryHealth": "types",
    "MemoryIsolation": "types",
    "MemoryKey": "types",
    "MemoryRouter": "memory.shared.router",
    "MessageNotFound": "errors",
    "MissingExtra": "errors",
    "OnConflict": "admin.importing",
    "OutcomeUnknown": "errors",
    "OverflowPolicy": "types",
    "SealMismatch": "errors",
    "Sealing": "sealing.keys",
    "SessionExists": "errors",
    "SessionNotFound": "errors",
    "Sessions": "admin.sessions",
    "ShortTermMemory": "protocols",
    "ShortTermMemoryArtifacts": "protocols",
    "ShortTermMemoryConfig": "types",
    "ShortTermMemoryPersistence": "protocols",
    "ShortTermMemorySerializable": "protocols",
    "StateStore": "records.state_store",
    "StaticKeys": "sealing.keys",
    "StmError": "errors",
    "StorageError": "errors",
    "Strategy": "types",
    "Summaries": "types",
    "Summarizer": "protocols",
    "SupportsMemoryState": "protocols",
    "TenantStates": "records.state_store",
    "TokenEstimator": "types",
    "TooLarge": "errors",
    "TrajectoryDigest": "types",
    "TranscriptPage": "memory.shared.reading",
    "TranscriptTurn": "memory.shared.reading",
    "Transform": "records.codec",
    "Unavailable": "errors",
    "UnknownBackend": "errors",
    "Usage": "records.usage",
    "Worker": "work.worker",
    "default_token_estimator": "types",
    "open_backend": "backend",
    "open_memory": "opening",
    "open_sqlite": "opening",
}
"""The module of each public name."""

if not typing.TYPE_CHECKING:  # so that checkers report a name that does not exist

    def __getattr__(name: str) -> object:
        if name == "__version__":
            from importlib.metadata import version  # noqa: PLC0415 -- slow, and rarely needed

            return version("stm-backends")
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module  # noqa: PLC0415 -- checkers would call it unused at the top

        found = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
        globals()[name] = found
        return found

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
