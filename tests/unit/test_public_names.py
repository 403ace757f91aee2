"""The public names of `stm_backends`, `stm_backends.drivers` and `stm_backends.tiers`, written down once."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest

PUBLIC = {
    name: names.split()
    for name, names in {
        "stm_backends": """
        AmbiguousBackend Backend BackendOptions Branch ConfigLike ConfigurationError Conversation
        ConversationTurn Corrupt
        DefaultShortTermMemory Denied History HistoryMessage
        DistributedShortTermMemory EditConflict EnvelopeKeys ExtractiveSummarizer
        InvalidKey InvalidState ItemLog
        KeyErased KeyMismatch LimitReached Limits LogState MemoryBudget
        MemoryBudgetExceeded MemoryHealth MemoryIsolation MemoryKey MemoryRouter MessageNotFound
        MissingExtra OnConflict
        OutcomeUnknown OverflowPolicy SealMismatch Sealing SessionExists SessionNotFound Sessions
        ShortTermMemory
        ShortTermMemoryArtifacts ShortTermMemoryConfig ShortTermMemoryPersistence ShortTermMemorySerializable
        StateStore StaticKeys StmError StorageError Strategy Summaries Summarizer SupportsMemoryState
        TenantStates
        TokenEstimator TooLarge Worker
        TrajectoryDigest TranscriptPage TranscriptTurn Transform Unavailable UnknownBackend Usage __version__
        default_token_estimator open_backend open_memory open_sqlite
    """,
        "stm_backends.drivers": """
        ABSENT ANY AbsentType AnyType BackendPlugin Driver Erasing KEEP KeepType Key Page Purges Record
        Remains Settings Traits WrapperDriver hookimpl new_version setting
    """,
        "stm_backends.tiers": """
        BackendGraph Embedder FleetingMemory GraphBackend InProcessGraph LongTermMemory MemoryEntry
        MemoryGarbageCollector MemoryManager MemoryTier SearchableGraph SharedGraph SharedShortTermMemory
        ShortTermMemory
        VertexExists VertexNotFound
    """,
    }.items()
}


@pytest.mark.parametrize("name", PUBLIC)
def test_the_listed_names_are_the_ones_written_down(name: str) -> None:
    assert sorted(importlib.import_module(name).__all__) == sorted(PUBLIC[name])


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_can_be_imported(name: str) -> None:
    module = importlib.import_module(name)
    assert not [public for public in PUBLIC[name] if not hasattr(module, public)]


@pytest.mark.parametrize("name", PUBLIC)
def test_what_is_not_public_has_an_underscore_or_is_a_module(name: str) -> None:
    module = importlib.import_module(name)
    found = {one for one in dir(module) if not isinstance(getattr(module, one), ModuleType)}
    assert {one for one in found if not one.startswith("_")} == set(PUBLIC[name]) - {"__version__"}
