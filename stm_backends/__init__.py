"""Conversation memory for agents that run on many machines."""

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
    TokenEstimator,
    TrajectoryDigest,
    default_token_estimator,
)

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
    "__version__",
    "default_token_estimator",
    "open_backend",
    "open_memory",
    "open_sqlite",
]

__version__: str


def __getattr__(name: str) -> str:
    if name == "__version__":
        from importlib.metadata import version  # noqa: PLC0415 -- costs half as much as all of this library

        return version("stm-backends")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
