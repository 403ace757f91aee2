"""Mutants: drivers, stores, graphs and memories with one deliberate fault each, as real ones have.

The conformance suite must reject each mutant by the check named beside it (`tests/contract/test_mutants.py`).
Mutants are part of the tests, not of the wheel.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from stm_backends.drivers.in_memory import MemoryDriver
from stm_backends.drivers.sqlite.driver import SqliteDriver
from stm_backends.errors import KeyMismatch
from stm_backends.sealing.driver import SealedDriver
from stm_backends.sealing.keys import Sealing, StaticKeys
from stm_backends.tiers.backend_graph import BackendGraph
from tests.mutants.appends import (
    AppendChangesTheVersion,
    AppendIgnoresRepeats,
    AppendIgnoresTtlNone,
    AppendKeepsTheTtl,
    CutsWhatIsTooLarge,
    EmptiesWhatIsLarge,
    EmptyIsNone,
    LoadInTwoReads,
    ReadThenWriteAppend,
    RetryDoublesAnEntry,
    TextNotBytes,
    VersionInASeparateRead,
    WritesBeforeItRefuses,
)
from tests.mutants.expiry import (
    CannotBeReopened,
    ClosesTheSharedStore,
    DatesEveryEnd,
    DeleteCountsTheExpired,
    EndsAtAPageOfExpiredNames,
    EntriesKeepTheirLease,
    ExpiredComesBack,
    ExpiredIsListed,
    ExpiredIsVisible,
    LeavesTheRest,
    ListsToTheEnd,
    OutageIsNoData,
    PurgesByName,
    RenewsNoWholeSeconds,
    SeesNoChangeOfTheTtl,
)
from tests.mutants.faults import (
    ClearsDamageAway,
    ClosesTheCallersClient,
    DamageIsNoData,
    ErrorNamesTheConversation,
    FoldsDamageAway,
    MarksAsDeleted,
    OutageIsEmpty,
    ReadsBeforeItWrites,
    ReadsFromAReplica,
    SavesBesideDamage,
    SkipsWhatIsMissing,
    StaysBroken,
    WritesBehind,
    WritesOverDamage,
)
from tests.mutants.graphs import (
    AddsMerge,
    AddsRemoveFirst,
    CaselessIds,
    ChangesWriteEdgesBack,
    ClearKeepsEdges,
    DropsEdgesItHasNotSeen,
    EdgesMakeVertices,
    EdgesWithoutDirection,
    FindsAnyWord,
    FindsSuperseded,
    FirstEdgeStays,
    HandsOutItsVertices,
    KeepsOldWords,
    ListsEveryLabel,
    ListsTheFirstPage,
    NumbersBecomeFloats,
    OneGraphForAll,
    OneStampPerVertex,
    OutageIsNoVertex,
    OutageWritesElsewhere,
    OwnCopyPerInstance,
    PlainGraph,
    PropertiesAreText,
    ReadsThenWrites,
    RemovalLeavesEdges,
    RemovesNothing,
    ShowsAHundredEdges,
    TracesLeaveTheRun,
    UpdatesMergeObjects,
    UpdatesReplace,
    UpdatesWriteAllBack,
)
from tests.mutants.homes import (
    ChecksItsProcessAlone,
    ClosesForItsParent,
    ClosesWhatAnotherOpens,
    ClosesWhatWasOpenedMeanwhile,
    LeavesTheCallersClientUnguarded,
    OpensForItsChildren,
    SharesItsConnections,
    StaysWithItsFirstLoop,
    WorksWithoutBeingOpenedAgain,
)
from tests.mutants.keys import (
    CaselessKeys,
    DeleteByPattern,
    DeleteIgnoresExpect,
    JoinedKeys,
    NormalizedKeys,
    RepeatsItsPosition,
    ScanByOffset,
    ScanEndsWithItsFirstPage,
    ScanIncludesItsStart,
    ScanInUtf16Order,
    ShortenedKeys,
    TrimmedScopes,
    WipesByPrefix,
)
from tests.mutants.memories import (
    AddWaitsForTheSummary,
    BelievesNonsense,
    BlanksTheSummary,
    Broken,
    DropsWhatIsLarge,
    FlushHasNoDeadline,
    FlushSitsOutItsTime,
    FoldsWithoutBound,
    ForgetsWhileItSummarizes,
    GivesUp,
    HidesArtifacts,
    IgnoresTheBudget,
    IgnoresTurnIds,
    KeepsTheCallersTurn,
    LosesTheEndOfASummary,
    NoneIsSome,
    RepeatsAfterAPanic,
    SharedByAllConversations,
    ShowsOneTooMany,
    StoresBeforeItRefuses,
    SummarizesFromScratch,
    SummaryBeforeAll,
    TrustsCallbacks,
    TrustsTheEstimator,
    WaitsForCallbacks,
    WaitsForEver,
)
from tests.mutants.messages import (
    ErrorsNameKeys,
    ErrorsOfConflictsShowText,
    LogsConflicts,
    LogsEntries,
    LogsKeys,
    WarnsOfEachWrite,
)
from tests.mutants.network import (
    ClosesNothing,
    CountsTimeAfterItsQueue,
    KeepsDeadConnections,
    LateIsUndone,
    LeaksAFailedOpening,
    LeaksConnections,
    LeaksConnectionsOfErrors,
    LossIsALostRace,
    NoDeadline,
    OpensTwice,
    QueuesWhatFailed,
    RetriesAppends,
    RetriesDeletes,
    UnavailableAfterUnknown,
)
from tests.mutants.newest import (
    CountsAfterItHasRead,
    CountsNothing,
    CutsShortTails,
    EmptiesTheNewestThatAreLarge,
    IgnoresLast,
    LeavesOutTheBody,
    LeavesOutWhatIsLarge,
    LooksAtTheNumberLast,
    NoEntriesIsAll,
    ReturnsOneMore,
    ReturnsTheNewestFirst,
    ReturnsTheOldest,
    SharesAnAnswer,
    ShowsTheNewestOfTheExpired,
    TakesNegativeNumbers,
)
from tests.mutants.optional import (
    ErasesTooMuch,
    FindsNothingToDelete,
    FindsScopesInUtf16Order,
    FindsScopesWithoutRecords,
    FindsTheScopeItWasGiven,
    ListsAScopesNeighbours,
    ListsWhatWillExpire,
    PurgesAStepTooFew,
    PurgesAStepTooMuch,
    PurgesByListedNames,
    PurgesInTwoTransactions,
    PurgesWhatWillExpire,
    PurgesWithoutRemoving,
    SaysNothingOfWhatRemains,
)
from tests.mutants.pods import (
    ClearsWhatIsPending,
    CommitsBeforeItArchives,
    ConfirmsTheVersionAlone,
    CountsOneTooFew,
    DropsWhatItHasLoaded,
    EveryPodSummarizes,
    FailureLosesItsRace,
    FlushGivesUpWhileDegraded,
    ForgetsTurnIds,
    IgnoresRevisions,
    LeaseForEver,
    LeavesNoMark,
    MakesALostKeyAgain,
    MarksNoGap,
    MovesNothingMeanwhile,
    OrdersByClock,
    OutageIsAnEmptyMemory,
    OverwritesWhatItCannotRead,
    OwnBackgroundPerObject,
    OwnCopyPerPod,
    Pod,
    ReadsBeforeItAdds,
    RemembersAnErasedKey,
    RetryDoublesATurn,
    RewritesPagesBlindly,
    SealsBesideOtherKeys,
    TrimsWithoutTheLease,
)
from tests.mutants.replaces import (
    ABodyMakesPresent,
    AbsentIsIgnored,
    AnyKeepsTheTail,
    AppliesItsOwnVersion,
    CaselessVersions,
    CompareThenSwap,
    ConflictIsALostRace,
    CounterVersions,
    DropIsClamped,
    ExpiredIsInTheWay,
    FoldClearsTheTail,
    FoldDropsTheNewest,
    FoldInTwoSteps,
    FoldOverwritesAppends,
    KeepIsForEver,
    LastWriterWinsFold,
    LeaseWithoutExclusion,
    RefusalRenewsTheTtl,
    RefusalSetsATimeToLive,
    ReplaceAppliesItsTokenTwice,
    ReplaceForgetsItsToken,
)
from tests.mutants.rewrites import (
    RewriteAppendsTheRest,
    RewriteCountsWhatItReplaces,
    RewriteForgetsItsToken,
    RewriteIgnoresTheSize,
    RewriteIgnoresTheVersion,
    RewriteInTwoSteps,
    RewriteOverwritesAppends,
    RewriteShiftsAppends,
    RewritesTheNewest,
)
from tests.mutants.sealing import (
    AcceptsClearText,
    ForgetsTheAssociatedData,
    ForgetsWhatMayBeStored,
    IgnoresTheCommitment,
    LooksAtCreatedRecordsOnly,
    MakesAKeyForALostOne,
    MarksNoTenant,
    MarksWithoutLooking,
    OneKeyForAllRecords,
    OverwritesTheMark,
    ResealDropsEntries,
    ResealInventsABody,
    ResealMakesPermanent,
    ResealsWithoutTheVersion,
    ReusesItsNonce,
    SealsWithAnErasedKey,
)
from tests.mutants.sizes import (
    BodiesInFullRecords,
    BodiesOfAnySize,
    FullOneByteEarly,
    OldBodiesTakeRoom,
    RewritesWithinARequest,
    SmallEntriesAreFree,
)
from tests.mutants.stepping import (
    ComparesTheNumberOfEntries,
    CountsTheWritesOfAKey,
    CountsTheWritesOfALife,
    TakesTheTimeBeforeItsTurn,
    TrustsItsLock,
)
from tests.mutants.stores import (
    AnythingIsText,
    AppendsLists,
    CaselessStateKeys,
    ComparesThenSaves,
    CutStateKeys,
    DamageIsNoState,
    DeletesThenWrites,
    HandsOutItsCache,
    JsonStore,
    KeepsTheObject,
    KeysArePaths,
    Merges,
    MissingIsEmpty,
    NotANumberIsNull,
    NumbersAreFloats,
    OutageIsNoState,
    PlainSavesKeepTheVersion,
    TextThroughUtf8,
    WritesFieldByField,
    WritesLater,
)
from tests.mutants.waiting import (
    ComparesBeforeItLocks,
    ComparesThenDeletes,
    DrawsBeforeItLocks,
    DropsItsQueue,
    FailsBesideWhatIsCancelled,
    FailsTogether,
    FollowsTheClientsClock,
    JudgesExpiryBeforeItWaits,
    KeepsALockForEachRecord,
    KeepsATaskForEachRecord,
    KeepsTheLockAfterAnError,
    ReadsAnOldSnapshotAfterARefusal,
    SendsWhatWaitsAgain,
    SharesItsWait,
    StaysInATransaction,
    WaitsWithoutADeadline,
    WritesWhatItGaveUp,
)
from tests.support.networked import NetworkedDriver
from tests.support.optimistic import OptimisticDriver


class Caught(NamedTuple):
    """The check that rejects a mutant, with the values of its parameters if it has any."""

    check: str
    given: Mapping[str, Any] = MappingProxyType({})


DRIVERS: Final[dict[type[MemoryDriver], Caught]] = {
    LeavesTheCallersClientUnguarded: Caught("test_a_driver_on_a_client_of_the_caller_is_refused_elsewhere"),
    ClosesWhatAnotherOpens: Caught("test_an_opening_that_is_cancelled_does_not_close_what_another_opens"),
    ClosesWhatWasOpenedMeanwhile: Caught("test_a_driver_that_is_opened_while_it_closes_is_open"),
    StaysWithItsFirstLoop: Caught("test_a_driver_whose_event_loop_has_ended_can_be_opened_again"),
    WorksWithoutBeingOpenedAgain: Caught("test_a_driver_whose_event_loop_has_ended_can_be_opened_again"),
    ReadThenWriteAppend: Caught("test_concurrent_appends_are_all_stored_in_each_writers_order"),
    AppendChangesTheVersion: Caught("test_an_append_does_not_change_the_version"),
    AppendKeepsTheTtl: Caught("test_an_append_resets_the_time_to_live"),
    AppendIgnoresTtlNone: Caught("test_an_append_without_a_time_to_live_makes_the_record_permanent"),
    AppendIgnoresRepeats: Caught("test_the_same_entry_appended_twice_is_stored_twice"),
    RetryDoublesAnEntry: Caught("test_a_cancelled_append_is_applied_completely_or_not_at_all"),
    LastWriterWinsFold: Caught("test_replace_with_a_version_stores_only_over_that_version"),
    CompareThenSwap: Caught("test_of_writers_that_expect_the_same_version_exactly_one_wins"),
    LeaseWithoutExclusion: Caught("test_of_concurrent_requests_for_a_lease_exactly_one_succeeds"),
    AbsentIsIgnored: Caught("test_replace_absent_only_creates_a_record"),
    ABodyMakesPresent: Caught("test_a_record_that_only_has_a_tail_is_not_absent"),
    AnyKeepsTheTail: Caught("test_replace_any_overwrites_the_body_and_empties_the_tail"),
    FoldClearsTheTail: Caught("test_a_fold_removes_exactly_the_oldest_entries"),
    FoldDropsTheNewest: Caught("test_a_fold_removes_exactly_the_oldest_entries"),
    FoldOverwritesAppends: Caught("test_folds_never_lose_an_append_and_loads_never_see_half_a_fold"),
    FoldInTwoSteps: Caught("test_a_cancelled_fold_is_applied_completely_or_not_at_all"),
    DropIsClamped: Caught("test_a_drop_larger_than_the_tail_is_a_lost_race_and_changes_nothing"),
    ReplaceForgetsItsToken: Caught("test_a_retried_replace_returns_true_and_is_applied_once"),
    ReplaceAppliesItsTokenTwice: Caught("test_a_retried_save_keeps_entries_appended_since"),
    RewriteIgnoresTheVersion: Caught("test_a_rewrite_over_another_version_changes_nothing"),
    RewritesTheNewest: Caught("test_a_rewrite_replaces_exactly_the_oldest_entries"),
    RewriteShiftsAppends: Caught("test_a_rewrite_keeps_entries_appended_since_it_read"),
    RewriteOverwritesAppends: Caught("test_rewrites_never_lose_an_entry_and_are_never_seen_in_part"),
    RewriteInTwoSteps: Caught("test_a_cancelled_rewrite_is_applied_completely_or_not_at_all"),
    RewriteAppendsTheRest: Caught("test_a_rewrite_longer_than_the_tail_changes_nothing"),
    RewriteIgnoresTheSize: Caught("test_a_rewrite_that_makes_a_record_too_large_is_refused"),
    RewriteCountsWhatItReplaces: Caught("test_rewritten_entries_may_be_of_any_size"),
    RewriteForgetsItsToken: Caught("test_a_retried_rewrite_returns_true_and_is_applied_once"),
    IgnoresLast: Caught("test_a_load_of_the_newest_entries_has_these_in_order"),
    ReturnsTheOldest: Caught("test_a_load_of_the_newest_entries_has_these_in_order"),
    ReturnsOneMore: Caught("test_a_load_of_the_newest_entries_has_these_in_order"),
    ReturnsTheNewestFirst: Caught("test_a_load_of_the_newest_entries_has_these_in_order"),
    CountsNothing: Caught("test_a_load_of_the_newest_entries_has_these_in_order"),
    CutsShortTails: Caught("test_a_load_of_more_entries_than_there_are_has_all"),
    LeavesOutTheBody: Caught("test_a_load_of_no_entries_has_the_body_alone"),
    NoEntriesIsAll: Caught("test_a_load_of_no_entries_has_the_body_alone"),
    LeavesOutWhatIsLarge: Caught("test_the_newest_entries_may_be_many_and_of_any_size"),
    SharesAnAnswer: Caught("test_loads_at_once_have_as_many_entries_as_each_asked_for"),
    EmptiesTheNewestThatAreLarge: Caught("test_newest_entries_of_any_size_loaded_at_once_are_whole"),
    CountsAfterItHasRead: Caught("test_a_load_of_the_newest_entries_is_a_snapshot"),
    ShowsTheNewestOfTheExpired: Caught("test_an_expired_record_is_absent_in_a_load_of_the_newest"),
    TakesNegativeNumbers: Caught("test_a_load_of_a_negative_number_of_entries_is_refused"),
    LooksAtTheNumberLast: Caught("test_a_load_of_a_negative_number_of_entries_is_refused"),
    CounterVersions: Caught("test_a_new_record_is_not_mistaken_for_the_expired_one"),
    KeepIsForEver: Caught("test_keep_leaves_the_time_to_live_unchanged"),
    RefusalRenewsTheTtl: Caught("test_a_refused_write_does_not_change_the_time_to_live"),
    DatesEveryEnd: Caught("test_a_time_to_live_beyond_every_calendar_is_accepted"),
    ExpiredIsVisible: Caught("test_an_expired_record_is_absent_in_load"),
    ExpiredIsListed: Caught("test_an_expired_record_is_absent_in_scan"),
    ExpiredIsInTheWay: Caught("test_an_expired_record_is_absent_in_replace_absent"),
    ExpiredComesBack: Caught("test_an_expired_record_is_absent_in_append"),
    ListsToTheEnd: Caught("test_all_operations_agree_on_the_moment_of_expiry"),
    LeavesTheRest: Caught("test_a_record_of_many_entries_is_removed_as_a_whole"),
    PurgesByName: Caught("test_removing_an_expired_record_leaves_its_successor"),
    DeleteCountsTheExpired: Caught("test_an_expired_record_is_absent_in_delete"),
    DeleteIgnoresExpect: Caught("test_a_delete_with_a_version_removes_only_that_version"),
    DeleteByPattern: Caught("test_a_delete_touches_no_other_record"),
    JoinedKeys: Caught("test_scope_and_name_are_joined_injectively"),
    CaselessKeys: Caught("test_keys_never_collide_and_never_act_as_patterns"),
    NormalizedKeys: Caught("test_keys_never_collide_and_never_act_as_patterns"),
    ShortenedKeys: Caught("test_keys_never_collide_and_never_act_as_patterns"),
    TrimmedScopes: Caught("test_scopes_never_collide_and_never_act_as_patterns"),
    ScanByOffset: Caught("test_deleting_what_was_listed_does_not_hide_what_follows"),
    ScanIncludesItsStart: Caught("test_a_scan_begins_after_any_name_even_one_that_is_not_there"),
    ScanEndsWithItsFirstPage: Caught("test_a_scan_lists_names_in_the_order_of_their_utf8_bytes"),
    ScanInUtf16Order: Caught("test_a_scan_lists_names_in_the_order_of_their_utf8_bytes"),
    TextNotBytes: Caught("test_bytes_are_returned_unchanged"),
    EmptyIsNone: Caught("test_empty_bodies_and_empty_entries_are_stored"),
    CutsWhatIsTooLarge: Caught("test_the_largest_entry_fits_and_one_byte_more_is_too_large"),
    WritesBeforeItRefuses: Caught("test_a_full_record_refuses_what_it_cannot_hold_and_a_fold_makes_room"),
    LoadInTwoReads: Caught("test_a_load_is_a_snapshot_while_another_instance_appends_and_folds"),
    EmptiesWhatIsLarge: Caught("test_records_of_any_size_that_are_loaded_at_once_are_whole"),
    VersionInASeparateRead: Caught("test_a_load_is_a_snapshot_while_another_instance_appends_and_folds"),
    OutageIsNoData: Caught("test_a_closed_driver_raises_and_never_answers"),
    ClosesTheSharedStore: Caught("test_closing_one_instance_leaves_the_others_and_the_data"),
    CannotBeReopened: Caught("test_opening_and_closing_twice_is_harmless"),
    OutageIsEmpty: Caught("test_during_an_outage_every_operation_raises_a_typed_error_in_time"),
    ErrorNamesTheConversation: Caught("test_during_an_outage_every_operation_raises_a_typed_error_in_time"),
    StaysBroken: Caught("test_after_an_outage_the_same_driver_works_and_nothing_is_lost"),
    DamageIsNoData: Caught("test_a_damaged_record_raises_corrupt_and_reading_it_changes_nothing"),
    ClearsDamageAway: Caught("test_a_damaged_record_raises_corrupt_and_reading_it_changes_nothing"),
    ClosesTheCallersClient: Caught("test_a_client_passed_in_stays_open"),
    ReadsBeforeItWrites: Caught("test_one_operation_is_one_round_trip"),
    WritesBehind: Caught("test_acknowledged_writes_are_in_the_datastore_not_in_the_driver"),
    WritesOverDamage: Caught("test_no_write_makes_a_damaged_record_look_healthy"),
    SavesBesideDamage: Caught("test_no_write_makes_a_damaged_record_look_healthy"),
    FoldsDamageAway: Caught("test_no_write_makes_a_damaged_record_look_healthy"),
    CaselessVersions: Caught("test_versions_that_differ_in_one_letter_are_different"),
    AppliesItsOwnVersion: Caught("test_a_write_that_expects_its_own_version_changes_nothing"),
    BodiesOfAnySize: Caught("test_the_largest_body_fits_and_one_byte_more_is_too_large"),
    BodiesInFullRecords: Caught("test_a_record_is_full_with_exactly_max_record_bytes"),
    SmallEntriesAreFree: Caught("test_a_record_is_full_with_exactly_max_record_bytes"),
    FullOneByteEarly: Caught("test_a_record_is_full_with_exactly_max_record_bytes"),
    OldBodiesTakeRoom: Caught("test_a_record_is_full_with_exactly_max_record_bytes"),
    JudgesExpiryBeforeItWaits: Caught("test_a_write_that_had_to_wait_does_not_bring_back_what_has_expired"),
    ComparesBeforeItLocks: Caught("test_of_writers_that_wait_for_a_record_exactly_one_wins"),
    DrawsBeforeItLocks: Caught("test_no_entry_appears_before_one_that_a_load_has_seen"),
    WaitsWithoutADeadline: Caught("test_a_write_that_waits_past_its_deadline_raises_and_is_not_done_later"),
    WritesWhatItGaveUp: Caught("test_a_write_that_waits_past_its_deadline_raises_and_is_not_done_later"),
    SendsWhatWaitsAgain: Caught("test_an_append_that_waits_long_for_a_lock_is_stored_once"),
    SharesItsWait: Caught("test_cancelling_a_write_that_waits_leaves_the_others_waiting"),
    FailsBesideWhatIsCancelled: Caught("test_cancelling_a_write_that_waits_leaves_the_others_waiting"),
    DropsItsQueue: Caught("test_closing_ends_each_running_operation_with_a_result_or_an_error"),
    FailsTogether: Caught("test_of_many_writes_at_once_each_succeeds_or_fails_for_itself"),
    StaysInATransaction: Caught("test_no_operation_leaves_a_transaction_or_a_lock_behind"),
    KeepsTheLockAfterAnError: Caught("test_no_operation_leaves_a_transaction_or_a_lock_behind"),
    ReadsAnOldSnapshotAfterARefusal: Caught("test_no_operation_leaves_a_transaction_or_a_lock_behind"),
    LogsKeys: Caught("test_no_message_names_a_key_or_stored_text_and_none_comes_with_each_write"),
    LogsEntries: Caught("test_no_message_names_a_key_or_stored_text_and_none_comes_with_each_write"),
    ErrorsNameKeys: Caught("test_no_message_names_a_key_or_stored_text_and_none_comes_with_each_write"),
    WarnsOfEachWrite: Caught("test_no_message_names_a_key_or_stored_text_and_none_comes_with_each_write"),
    ListsWhatWillExpire: Caught("test_scan_expired_lists_names_of_expired_records_alone"),
    ListsAScopesNeighbours: Caught("test_scan_expired_lists_names_of_expired_records_alone"),
    FindsNothingToDelete: Caught("test_a_delete_removes_an_expired_record_that_scan_expired_lists"),
    SaysNothingOfWhatRemains: Caught("test_finish_erasure_says_what_remains_and_keeps_other_records"),
    ErasesTooMuch: Caught("test_finish_erasure_says_what_remains_and_keeps_other_records"),
    PurgesAStepTooMuch: Caught("test_a_purge_removes_what_has_expired_and_no_more_than_its_limit"),
    PurgesWhatWillExpire: Caught("test_a_purge_removes_what_has_expired_and_no_more_than_its_limit"),
    PurgesAStepTooFew: Caught("test_a_purge_removes_what_has_expired_and_no_more_than_its_limit"),
    PurgesWithoutRemoving: Caught("test_a_purge_removes_what_has_expired_and_no_more_than_its_limit"),
    PurgesByListedNames: Caught("test_a_purge_keeps_a_record_that_is_created_anew_meanwhile"),
    FindsScopesInUtf16Order: Caught("test_next_scope_finds_each_scope_in_the_order_of_their_utf8_bytes"),
    FindsTheScopeItWasGiven: Caught("test_next_scope_finds_each_scope_in_the_order_of_their_utf8_bytes"),
    FindsScopesWithoutRecords: Caught("test_next_scope_finds_each_scope_in_the_order_of_their_utf8_bytes"),
    WipesByPrefix: Caught("test_a_delete_leaves_what_other_records_hold"),
    MarksAsDeleted: Caught("test_nothing_is_stored_of_a_record_that_was_deleted"),
    RepeatsItsPosition: Caught("test_a_scan_lists_names_in_the_order_of_their_utf8_bytes"),
    EndsAtAPageOfExpiredNames: Caught("test_a_listing_goes_on_after_pages_of_expired_names"),
    SeesNoChangeOfTheTtl: Caught("test_the_same_time_to_live_set_again_begins_anew"),
    RenewsNoWholeSeconds: Caught("test_the_same_time_to_live_of_some_seconds_begins_anew"),
    EntriesKeepTheirLease: Caught("test_the_same_time_to_live_set_again_begins_anew"),
    RefusalSetsATimeToLive: Caught("test_a_refused_write_with_a_time_to_live_changes_none"),
    ConflictIsALostRace: Caught("test_each_fold_of_the_only_folder_succeeds_beside_appends"),
    ComparesThenDeletes: Caught("test_of_a_write_and_a_delete_of_one_version_exactly_one_wins"),
    RewritesWithinARequest: Caught("test_a_full_record_can_be_rewritten_at_its_size"),
    SkipsWhatIsMissing: Caught("test_a_record_of_which_a_part_was_removed_raises_corrupt"),
    ReadsFromAReplica: Caught("test_every_instance_reads_what_was_written_while_replicas_lag"),
    KeepsATaskForEachRecord: Caught("test_operations_leave_no_task_thread_or_connection_behind"),
    KeepsALockForEachRecord: Caught("test_many_records_leave_no_object_behind"),
    LogsConflicts: Caught("test_no_message_of_a_race_names_a_key_or_stored_text"),
    ErrorsOfConflictsShowText: Caught("test_no_message_of_a_race_names_a_key_or_stored_text"),
}
"""Drivers that break one clause of the driver contract."""

FILES: Final[dict[type[SqliteDriver], Caught]] = {
    FollowsTheClientsClock: Caught("test_a_wrong_clock_of_a_client_changes_no_expiry"),
    PurgesInTwoTransactions: Caught("test_a_purge_keeps_a_record_that_is_created_anew_meanwhile"),
}
"""The same, on a file that processes share."""

NETWORKED: Final[dict[type[NetworkedDriver], Caught]] = {
    UnavailableAfterUnknown: Caught("test_an_append_that_loses_its_answer_is_never_called_undone"),
    RetriesAppends: Caught("test_an_append_that_loses_its_answer_is_not_stored_twice"),
    LossIsALostRace: Caught("test_a_replace_that_loses_its_answer_can_be_retried"),
    RetriesDeletes: Caught("test_a_delete_that_loses_its_answer_tells_the_truth"),
    LateIsUndone: Caught("test_what_was_refused_in_an_outage_does_not_appear_later", {"fault": "stalled"}),
    QueuesWhatFailed: Caught("test_what_was_refused_in_an_outage_does_not_appear_later", {"fault": "cut"}),
    NoDeadline: Caught("test_every_operation_ends_in_time_while_the_network_is_silent", {"fault": "stalled"}),
    CountsTimeAfterItsQueue: Caught("test_writers_of_one_record_end_in_time_however_many_wait"),
    LeaksAFailedOpening: Caught("test_an_opening_that_meets_a_stall_leaves_nothing_behind"),
    KeepsDeadConnections: Caught("test_connections_that_died_unnoticed_are_replaced"),
    LeaksConnections: Caught("test_failed_operations_and_close_leave_no_connection_open"),
    LeaksConnectionsOfErrors: Caught("test_failed_operations_and_close_leave_no_connection_open"),
    OpensTwice: Caught("test_failed_operations_and_close_leave_no_connection_open"),
    ClosesNothing: Caught("test_failed_operations_and_close_leave_no_connection_open"),
    SharesItsConnections: Caught("test_the_event_loop_of_another_thread_is_refused_undisturbed"),
    ChecksItsProcessAlone: Caught("test_the_event_loop_of_another_thread_is_refused_undisturbed"),
    OpensForItsChildren: Caught("test_a_forked_process_is_refused_and_disturbs_nothing"),
    ClosesForItsParent: Caught("test_a_forked_process_is_refused_and_disturbs_nothing"),
}
"""Drivers that mistake what a network did to their requests."""

OPTIMISTIC: Final[dict[type[OptimisticDriver], Caught]] = {
    ComparesTheNumberOfEntries: Caught(
        "test_of_two_writes_that_are_paused_between_their_requests_exactly_one_wins"
    ),
    TrustsItsLock: Caught("test_an_append_while_another_write_is_paused_is_not_lost"),
    CountsTheWritesOfAKey: Caught("test_a_paused_write_does_not_bring_back_a_record_that_was_deleted"),
    CountsTheWritesOfALife: Caught("test_a_paused_write_does_not_bring_back_a_record_that_has_expired"),
    TakesTheTimeBeforeItsTurn: Caught(
        "test_a_write_that_queues_behind_another_judges_expiry_when_its_turn_comes"
    ),
}
"""Drivers that read, compare and write, and are wrong about what may happen in between."""

STORES: Final[dict[type[JsonStore], Caught]] = {
    Merges: Caught("test_a_save_replaces_the_whole_state_and_never_merges"),
    AppendsLists: Caught("test_a_save_replaces_the_whole_state_and_never_merges"),
    KeepsTheObject: Caught("test_changing_a_saved_or_loaded_object_does_not_change_the_store"),
    HandsOutItsCache: Caught("test_changing_a_saved_or_loaded_object_does_not_change_the_store"),
    WritesLater: Caught("test_what_one_instance_saves_another_loads_at_once"),
    OutageIsNoState: Caught("test_an_outage_raises_and_never_returns_none"),
    DamageIsNoState: Caught("test_a_damaged_state_raises_and_is_never_none"),
    MissingIsEmpty: Caught("test_a_key_that_was_never_saved_is_none"),
    CaselessStateKeys: Caught("test_keys_are_any_string_and_never_collide"),
    CutStateKeys: Caught("test_keys_are_any_string_and_never_collide"),
    KeysArePaths: Caught("test_keys_are_any_string_and_never_collide"),
    NumbersAreFloats: Caught(
        "test_a_state_comes_back_equal_in_every_type_and_character", {"what": "large integers"}
    ),
    TextThroughUtf8: Caught(
        "test_a_state_comes_back_equal_in_every_type_and_character", {"what": "half a character"}
    ),
    NotANumberIsNull: Caught(
        "test_a_state_comes_back_equal_in_every_type_and_character", {"what": "not quite numbers"}
    ),
    AnythingIsText: Caught(
        "test_a_state_that_is_not_json_is_refused_whole_or_comes_back_equal", {"state": {"x": b"bytes"}}
    ),
    DeletesThenWrites: Caught("test_a_state_is_never_seen_half_saved"),
    WritesFieldByField: Caught("test_of_concurrent_saves_one_is_stored_whole"),
    ComparesThenSaves: Caught("test_of_concurrent_conditional_saves_exactly_one_wins"),
    PlainSavesKeepTheVersion: Caught("test_a_plain_save_invalidates_every_loaded_version"),
}
"""Stores that break one promise to a memory."""

GRAPHS: Final[dict[type[PlainGraph], Caught]] = {
    OwnCopyPerInstance: Caught("test_a_vertex_is_returned_by_every_instance_and_a_missing_one_is_none"),
    AddsMerge: Caught("test_adding_a_vertex_again_replaces_its_properties_and_keeps_its_edges"),
    AddsRemoveFirst: Caught("test_adding_a_vertex_again_replaces_its_properties_and_keeps_its_edges"),
    UpdatesReplace: Caught("test_an_update_merges_properties_and_keeps_the_others"),
    UpdatesMergeObjects: Caught("test_an_update_merges_properties_and_keeps_the_others"),
    NumbersBecomeFloats: Caught(
        "test_properties_come_back_equal_in_every_type_and_character", {"what": "large integers"}
    ),
    PropertiesAreText: Caught("test_properties_that_are_not_json_are_refused_whole"),
    HandsOutItsVertices: Caught("test_changing_an_object_afterwards_does_not_change_the_graph"),
    CaselessIds: Caught("test_ids_are_any_text_and_never_collide"),
    EdgesWithoutDirection: Caught("test_an_edge_leads_from_its_source_to_its_target"),
    FirstEdgeStays: Caught("test_adding_an_edge_again_replaces_its_properties"),
    EdgesMakeVertices: Caught("test_an_edge_may_come_before_its_vertices_and_is_shown_once_they_exist"),
    ShowsAHundredEdges: Caught("test_a_vertex_with_many_edges_shows_each_of_them_once"),
    TracesLeaveTheRun: Caught("test_a_trace_has_the_vertices_of_a_run_and_the_edges_between_them"),
    ClearKeepsEdges: Caught("test_clear_removes_every_vertex_and_every_edge"),
    OneGraphForAll: Caught("test_a_graph_shows_and_clears_nothing_of_another"),
    ReadsThenWrites: Caught("test_concurrent_changes_of_a_vertex_all_take_effect"),
    UpdatesWriteAllBack: Caught("test_concurrent_updates_of_other_properties_all_stay"),
    ChangesWriteEdgesBack: Caught("test_an_edge_added_during_changes_of_its_vertices_stays"),
    RemovesNothing: Caught("test_a_change_returns_what_is_stored_and_none_removes_the_vertex"),
    RemovalLeavesEdges: Caught("test_removing_a_vertex_removes_its_edges_for_good"),
    ListsTheFirstPage: Caught("test_a_listing_has_each_vertex_of_a_label_once_over_many_pages"),
    ListsEveryLabel: Caught("test_a_listing_has_each_vertex_of_a_label_once_over_many_pages"),
    OutageIsNoVertex: Caught("test_an_outage_raises_and_is_never_an_empty_answer"),
    OutageWritesElsewhere: Caught("test_an_outage_raises_and_is_never_an_empty_answer"),
}
"""Graphs that break one promise to the long-term memory."""

BACKEND_GRAPHS: Final[dict[type[BackendGraph], Caught]] = {
    FindsAnyWord: Caught("test_a_search_finds_by_words_what_is_stored_now"),
    FindsSuperseded: Caught("test_a_search_finds_by_words_what_is_stored_now"),
    KeepsOldWords: Caught("test_a_search_finds_by_words_what_is_stored_now"),
    DropsEdgesItHasNotSeen: Caught("test_no_edge_is_dropped_for_those_that_a_former_server_shows"),
    OneStampPerVertex: Caught("test_concurrent_writes_leave_no_vertex_without_its_words"),
}
"""Our graph with a broken index."""

MEMORIES: Final[dict[type[Broken], Caught]] = {
    SharedByAllConversations: Caught("test_conversations_with_keys_that_look_alike_share_nothing"),
    AddWaitsForTheSummary: Caught("test_adding_never_waits_for_a_summary"),
    ForgetsWhileItSummarizes: Caught("test_nothing_is_forgotten_while_a_summary_is_being_written"),
    IgnoresTheBudget: Caught(
        "test_what_the_model_sees_is_within_the_budget", {"policy": "truncate_oldest", "total": 60}
    ),
    StoresBeforeItRefuses: Caught("test_the_policy_error_refuses_a_turn_before_anything_is_stored"),
    WaitsForCallbacks: Caught("test_a_slow_callback_does_not_delay_adding"),
    TrustsCallbacks: Caught("test_a_callback_that_raises_or_is_not_awaitable_does_no_harm"),
    IgnoresTurnIds: Caught("test_adding_the_same_turn_id_again_changes_nothing"),
    KeepsTheCallersTurn: Caught("test_a_changed_turn_object_does_not_change_what_is_stored"),
    FoldsWithoutBound: Caught("test_turns_beyond_one_call_of_the_summarizer_follow_in_others"),
    GivesUp: Caught("test_failures_are_retried_without_a_new_turn"),
    BelievesNonsense: Caught("test_an_invalid_summary_erases_nothing", {"nonsense": None}),
    RepeatsAfterAPanic: Caught("test_a_panic_of_the_summarizer_is_a_failed_attempt"),
    TrustsTheEstimator: Caught(
        "test_an_estimator_that_fails_for_a_text_disables_nothing", {"failure": "nothing"}
    ),
    SummarizesFromScratch: Caught("test_the_summarizer_gets_the_previous_summary_and_the_turns"),
    WaitsForEver: Caught("test_a_summarizer_that_hangs_is_timed_out"),
    FlushHasNoDeadline: Caught("test_flush_returns_at_its_deadline"),
    FlushSitsOutItsTime: Caught("test_flush_returns_when_the_memory_becomes_degraded"),
    BlanksTheSummary: Caught("test_a_summary_cut_to_nothing_by_the_budget_erases_nothing"),
    LosesTheEndOfASummary: Caught("test_a_summary_over_its_budget_is_cut_and_keeps_its_closing_tag"),
    HidesArtifacts: Caught("test_the_patch_has_the_specified_shape"),
    DropsWhatIsLarge: Caught(
        "test_a_turn_larger_than_the_budget_is_shown_in_part",
        {"policy": "truncate_oldest", "strategy": "rolling_summary"},
    ),
    SummaryBeforeAll: Caught("test_a_summary_as_large_as_the_budget_does_not_hide_the_turns"),
    ShowsOneTooMany: Caught("test_truncation_shows_the_last_turns_in_order"),
    NoneIsSome: Caught("test_none_stores_nothing_and_shows_nothing"),
}
"""Memories of one process."""

PODS: Final[dict[type[Pod], Caught]] = {
    OwnCopyPerPod: Caught("test_what_one_pod_adds_every_other_shows_at_once"),
    OrdersByClock: Caught("test_concurrent_turns_are_all_stored_in_each_pods_order"),
    ForgetsTurnIds: Caught("test_a_turn_id_added_by_two_pods_is_stored_once"),
    RetryDoublesATurn: Caught("test_adding_a_turn_and_reading_take_one_round_trip_each"),
    ReadsBeforeItAdds: Caught("test_adding_a_turn_and_reading_take_one_round_trip_each"),
    OutageIsAnEmptyMemory: Caught("test_an_outage_raises_and_never_shows_an_empty_memory"),
    OverwritesWhatItCannotRead: Caught("test_data_of_a_later_version_raises_and_is_never_overwritten"),
    FlushGivesUpWhileDegraded: Caught("test_flush_waits_for_the_attempt_that_another_pod_makes"),
    TrimsWithoutTheLease: Caught("test_no_turn_is_dropped_under_a_summary_that_another_pod_is_writing"),
    FailureLosesItsRace: Caught("test_all_pods_together_call_a_failing_summarizer_once_an_interval"),
    OwnBackgroundPerObject: Caught("test_memory_objects_of_one_process_share_one_background"),
    EveryPodSummarizes: Caught("test_one_pod_summarizes_at_a_time"),
    LeaseForEver: Caught("test_another_pod_takes_over_from_one_killed_while_it_summarizes"),
    ClearsWhatIsPending: Caught("test_turns_that_another_pod_adds_during_a_summary_survive_it"),
    SealsBesideOtherKeys: Caught(
        "test_a_process_with_other_keys_is_refused_and_changes_nothing", {"other": "other bytes"}
    ),
    LeavesNoMark: Caught(
        "test_a_process_with_other_keys_is_refused_and_changes_nothing", {"other": "no keys"}
    ),
    MakesALostKeyAgain: Caught("test_no_key_is_made_for_a_user_whose_key_was_lost"),
    RemembersAnErasedKey: Caught("test_turns_added_after_an_erasure_are_readable_in_every_process"),
    ConfirmsTheVersionAlone: Caught(
        "test_no_turn_is_dropped_for_those_that_a_former_server_shows", {"strategy": "rolling_summary"}
    ),
    DropsWhatItHasLoaded: Caught(
        "test_no_turn_is_dropped_for_those_that_a_former_server_shows", {"strategy": "truncation"}
    ),
    CommitsBeforeItArchives: Caught(
        "test_a_process_killed_within_a_fold_takes_no_turn_with_it", {"operation": "append", "kind": "page"}
    ),
    MarksNoGap: Caught("test_turns_of_an_outage_of_the_model_are_summarized_afterwards"),
    MovesNothingMeanwhile: Caught("test_a_long_tail_moves_while_a_summary_is_being_written"),
    CountsOneTooFew: Caught("test_every_turn_can_be_read_after_it_has_left_the_record"),
    IgnoresRevisions: Caught("test_a_copy_that_comes_late_does_not_undo_a_change"),
    RewritesPagesBlindly: Caught("test_rewriting_a_full_page_keeps_what_comes_meanwhile"),
}
"""Memories that pods share."""

_OTHER_BYTES: Final[Mapping[str, Any]] = {
    "other": Sealing(StaticKeys({"k1": bytes(32)}, primary="k1")),
    "error": KeyMismatch,
    "marked": True,
}
"""A process that has other bytes for the id of a key."""

SEALS: Final[dict[type[SealedDriver], Caught]] = {
    ForgetsTheAssociatedData: Caught("test_an_older_body_under_a_newer_version_is_corrupt"),
    OneKeyForAllRecords: Caught("test_values_of_another_record_or_another_slot_are_corrupt"),
    ReusesItsNonce: Caught("test_no_two_values_of_a_record_have_the_same_nonce"),
    IgnoresTheCommitment: Caught("test_every_altered_bit_of_a_stored_record_is_found"),
    AcceptsClearText: Caught("test_clear_values_are_corrupt_unless_accepted"),
    ResealsWithoutTheVersion: Caught("test_a_fold_during_resealing_wins_and_the_rest_is_resealed"),
    ResealDropsEntries: Caught(
        "test_resealing_changes_the_key_of_all_values_and_no_value", {"body": b"summary"}
    ),
    ResealMakesPermanent: Caught("test_resealing_keeps_the_time_to_live"),
    ResealInventsABody: Caught("test_resealing_changes_the_key_of_all_values_and_no_value", {"body": None}),
    SealsWithAnErasedKey: Caught("test_an_append_that_creates_a_record_after_an_erasure_is_readable"),
    LooksAtCreatedRecordsOnly: Caught("test_an_append_to_a_record_made_after_an_erasure_is_readable"),
    ForgetsWhatMayBeStored: Caught(
        "test_a_write_whose_answer_was_lost_after_an_erasure_is_readable", {"operation": "append"}
    ),
    MarksNoTenant: Caught("test_a_tenant_sealed_before_there_were_marks_is_marked_when_it_is_met"),
    OverwritesTheMark: Caught("test_a_process_with_other_keys_writes_nothing", _OTHER_BYTES),
    MarksWithoutLooking: Caught(
        "test_a_process_with_other_keys_writes_nothing", {**_OTHER_BYTES, "marked": False}
    ),
    MakesAKeyForALostOne: Caught("test_no_data_key_is_made_for_a_user_whose_key_was_lost"),
}
"""Drivers that seal, each rejected by a test of `tests/unit/test_sealing.py`, `test_resealing.py` or
`test_erased_keys.py`, or of `tests/contract/test_wrong_keys.py`."""
