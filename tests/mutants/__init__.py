"""Drivers, stores and memories that are broken on purpose, each in one way in which real ones are.

The suite must reject every one of them, by the check named beside it; that is how it is known to bite.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from stm_backends.drivers.in_memory import MemoryDriver
from tests.mutants.appends import (
    AppendChangesTheVersion,
    AppendIgnoresRepeats,
    AppendKeepsTheTtl,
    AppendNeverEndsALife,
    CutsWhatIsTooLarge,
    EmptyIsNone,
    LoadInTwoReads,
    ReadThenWriteAppend,
    RetryDoublesAnEntry,
    TextNotBytes,
    VersionInAReadOfItsOwn,
    WritesBeforeItRefuses,
)
from tests.mutants.faults import (
    ClearsDamageAway,
    ClosesTheCallersClient,
    DamageIsNoData,
    ErrorNamesTheConversation,
    OutageIsEmpty,
    ReadsBeforeItWrites,
    StaysBroken,
    WritesBehind,
)
from tests.mutants.keys import (
    CaselessKeys,
    DeleteByPattern,
    DeleteIgnoresExpect,
    JoinedKeys,
    NormalizedKeys,
    ScanByOffset,
    ScanEndsWithItsFirstPage,
    ScanIncludesItsStart,
    ScanInUtf16Order,
    ShortenedKeys,
    TrimmedScopes,
)
from tests.mutants.lives import (
    ClosesEverybodysStore,
    DatesEveryEnd,
    DeleteCountsTheExpired,
    ExpiredComesBack,
    ExpiredIsListed,
    ExpiredIsVisible,
    HasOneLife,
    OutageIsNoData,
    PurgesByName,
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
    IgnoresTheBudget,
    IgnoresTurnIds,
    KeepsTheCallersTurn,
    NoneIsSome,
    OneForEverybody,
    ShowsOneTooMany,
    StoresBeforeItRefuses,
    SummarizesAnew,
    SummaryBeforeAll,
    TrustsCallbacks,
    WaitsForCallbacks,
    WaitsForEver,
)
from tests.mutants.pods import (
    BackgroundOfItsOwn,
    ClearsWhatIsPending,
    CopyOfItsOwn,
    EveryPodSummarizes,
    FailureLosesItsRace,
    ForgetsTurnIds,
    LeaseForEver,
    OrdersByClock,
    OutageIsAnEmptyMemory,
    Pod,
    ReadsBeforeItAdds,
    RetryDoublesATurn,
    StartsAnewOverWhatItCannotRead,
    TrimsWithoutTheLease,
)
from tests.mutants.replaces import (
    ABodyMakesPresent,
    AbsentIsIgnored,
    AnyKeepsTheTail,
    CompareThenSwap,
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
    ReplaceAppliesItsTokenTwice,
    ReplaceForgetsItsToken,
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


class Caught(NamedTuple):
    """The check that rejects a mutant, with the values of its parameters if it has any."""

    check: str
    given: Mapping[str, Any] = MappingProxyType({})


DRIVERS: Final[dict[type[MemoryDriver], Caught]] = {
    ReadThenWriteAppend: Caught("test_appends_at_the_same_time_are_all_there_each_writers_in_order"),
    AppendChangesTheVersion: Caught("test_an_append_does_not_change_the_version"),
    AppendKeepsTheTtl: Caught("test_an_append_sets_the_time_to_live_anew"),
    AppendNeverEndsALife: Caught("test_an_append_without_a_time_to_live_makes_the_record_last"),
    AppendIgnoresRepeats: Caught("test_the_same_entry_twice_stands_there_twice"),
    RetryDoublesAnEntry: Caught("test_a_cancelled_append_is_wholly_there_or_not_at_all"),
    LastWriterWinsFold: Caught("test_replace_with_a_version_stores_only_over_that_version"),
    CompareThenSwap: Caught("test_of_writers_that_expect_the_same_version_exactly_one_wins"),
    LeaseWithoutExclusion: Caught("test_of_those_who_want_a_lease_exactly_one_gets_it"),
    AbsentIsIgnored: Caught("test_replace_absent_stores_only_where_nothing_is"),
    ABodyMakesPresent: Caught("test_a_record_that_only_has_a_tail_is_not_absent"),
    AnyKeepsTheTail: Caught("test_replace_any_replaces_what_is_there_and_empties_the_tail"),
    FoldClearsTheTail: Caught("test_a_fold_removes_exactly_the_oldest_entries"),
    FoldDropsTheNewest: Caught("test_a_fold_removes_exactly_the_oldest_entries"),
    FoldOverwritesAppends: Caught("test_folds_never_lose_an_append_and_loads_never_see_half_a_fold"),
    FoldInTwoSteps: Caught("test_a_cancelled_fold_is_wholly_there_or_not_at_all"),
    DropIsClamped: Caught("test_a_drop_larger_than_the_tail_is_a_lost_race_and_changes_nothing"),
    ReplaceForgetsItsToken: Caught("test_a_write_that_is_sent_twice_is_true_twice_and_done_once"),
    ReplaceAppliesItsTokenTwice: Caught(
        "test_a_blob_that_is_saved_twice_with_one_token_keeps_what_came_after"
    ),
    CounterVersions: Caught("test_a_new_record_is_not_mistaken_for_the_expired_one"),
    KeepIsForEver: Caught("test_keep_never_lengthens_and_never_ends_a_life"),
    RefusalRenewsTheTtl: Caught("test_a_refused_write_does_not_change_the_time_to_live"),
    DatesEveryEnd: Caught("test_a_time_to_live_past_every_calendar_is_a_very_long_one"),
    ExpiredIsVisible: Caught("test_an_expired_record_is_absent_in_load"),
    ExpiredIsListed: Caught("test_an_expired_record_is_absent_in_scan"),
    ExpiredIsInTheWay: Caught("test_an_expired_record_is_absent_in_replace_absent"),
    ExpiredComesBack: Caught("test_an_expired_record_is_absent_in_append"),
    PurgesByName: Caught("test_removing_the_expired_spares_the_record_that_took_its_place"),
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
    TextNotBytes: Caught("test_what_went_in_comes_out_byte_for_byte"),
    EmptyIsNone: Caught("test_an_empty_body_is_a_body_and_an_empty_entry_an_entry"),
    CutsWhatIsTooLarge: Caught("test_the_largest_entry_fits_and_one_byte_more_is_too_large"),
    WritesBeforeItRefuses: Caught("test_a_full_record_refuses_what_it_cannot_hold_and_a_fold_makes_room"),
    LoadInTwoReads: Caught("test_a_load_is_a_snapshot_while_another_instance_appends_and_folds"),
    VersionInAReadOfItsOwn: Caught("test_a_load_is_a_snapshot_while_another_instance_appends_and_folds"),
    OutageIsNoData: Caught("test_a_closed_driver_raises_and_never_answers"),
    ClosesEverybodysStore: Caught("test_closing_one_instance_leaves_the_others_and_the_data"),
    HasOneLife: Caught("test_opening_and_closing_twice_is_harmless"),
    OutageIsEmpty: Caught("test_during_an_outage_every_operation_is_a_typed_error_in_time"),
    ErrorNamesTheConversation: Caught("test_during_an_outage_every_operation_is_a_typed_error_in_time"),
    StaysBroken: Caught("test_after_an_outage_the_same_driver_works_and_nothing_is_lost"),
    DamageIsNoData: Caught("test_a_damaged_record_is_corrupt_and_reading_it_changes_nothing"),
    ClearsDamageAway: Caught("test_a_damaged_record_is_corrupt_and_reading_it_changes_nothing"),
    ClosesTheCallersClient: Caught("test_a_client_that_was_handed_in_stays_open"),
    ReadsBeforeItWrites: Caught("test_one_operation_is_one_round_trip"),
    WritesBehind: Caught("test_what_was_acknowledged_is_in_the_datastore_and_not_in_the_driver"),
}
"""On one store, with one clause of the waist broken."""

STORES: Final[dict[type[JsonStore], Caught]] = {
    Merges: Caught("test_a_save_replaces_the_whole_state_and_never_merges"),
    AppendsLists: Caught("test_a_save_replaces_the_whole_state_and_never_merges"),
    KeepsTheObject: Caught("test_changing_a_state_after_saving_or_loading_it_changes_nothing_that_is_stored"),
    HandsOutItsCache: Caught(
        "test_changing_a_state_after_saving_or_loading_it_changes_nothing_that_is_stored"
    ),
    WritesLater: Caught("test_what_one_instance_saves_another_loads_at_once"),
    OutageIsNoState: Caught("test_an_outage_is_an_error_and_never_no_state"),
    DamageIsNoState: Caught("test_a_damaged_state_is_an_error_and_never_no_state"),
    MissingIsEmpty: Caught("test_a_key_that_was_never_saved_is_none"),
    CaselessStateKeys: Caught("test_keys_are_any_string_and_never_collide"),
    CutStateKeys: Caught("test_keys_are_any_string_and_never_collide"),
    KeysArePaths: Caught("test_keys_are_any_string_and_never_collide"),
    NumbersAreFloats: Caught(
        "test_a_state_comes_back_equal_to_the_last_type_and_character", {"what": "large integers"}
    ),
    TextThroughUtf8: Caught(
        "test_a_state_comes_back_equal_to_the_last_type_and_character", {"what": "half a character"}
    ),
    NotANumberIsNull: Caught(
        "test_a_state_comes_back_equal_to_the_last_type_and_character", {"what": "not quite numbers"}
    ),
    AnythingIsText: Caught(
        "test_a_state_that_is_not_json_is_refused_whole_or_comes_back_equal", {"state": {"x": b"bytes"}}
    ),
    DeletesThenWrites: Caught("test_a_state_is_never_seen_half_saved"),
    WritesFieldByField: Caught("test_of_saves_at_the_same_time_one_stands_whole"),
    ComparesThenSaves: Caught("test_of_conditional_saves_at_the_same_time_exactly_one_wins"),
    PlainSavesKeepTheVersion: Caught("test_a_plain_save_makes_every_version_that_was_loaded_old"),
}
"""On one shelf, with one promise to a memory broken."""

MEMORIES: Final[dict[type[Broken], Caught]] = {
    OneForEverybody: Caught("test_conversations_with_keys_that_look_alike_share_nothing"),
    AddWaitsForTheSummary: Caught("test_adding_never_waits_for_a_summary"),
    ForgetsWhileItSummarizes: Caught("test_nothing_is_forgotten_while_a_summary_is_being_written"),
    IgnoresTheBudget: Caught(
        "test_what_the_model_sees_is_within_the_budget", {"policy": "truncate_oldest", "total": 40}
    ),
    StoresBeforeItRefuses: Caught("test_error_refuses_a_turn_before_anything_is_stored"),
    WaitsForCallbacks: Caught("test_a_slow_callback_delays_nobody"),
    TrustsCallbacks: Caught("test_a_callback_that_raises_or_is_not_awaitable_harms_nobody"),
    IgnoresTurnIds: Caught("test_adding_the_same_turn_id_again_changes_nothing"),
    KeepsTheCallersTurn: Caught("test_a_changed_turn_object_does_not_change_what_is_stored"),
    FoldsWithoutBound: Caught("test_what_one_call_of_the_summarizer_does_not_cover_follows_in_others"),
    GivesUp: Caught("test_failures_are_retried_without_a_new_turn"),
    BelievesNonsense: Caught("test_a_summarizer_that_answers_nonsense_erases_nothing", {"nonsense": None}),
    SummarizesAnew: Caught("test_the_summarizer_gets_the_previous_summary_and_the_turns"),
    WaitsForEver: Caught("test_a_summarizer_that_hangs_is_timed_out"),
    FlushHasNoDeadline: Caught("test_flush_returns_at_its_deadline"),
    FlushSitsOutItsTime: Caught("test_flush_returns_when_the_memory_becomes_degraded"),
    BlanksTheSummary: Caught("test_a_summary_of_which_the_budget_leaves_nothing_erases_nothing"),
    DropsWhatIsLarge: Caught(
        "test_a_turn_larger_than_the_budget_is_shown_in_part",
        {"policy": "truncate_oldest", "strategy": "truncation"},
    ),
    SummaryBeforeAll: Caught("test_a_summary_as_large_as_the_budget_leaves_the_turns_to_be_seen"),
    ShowsOneTooMany: Caught("test_truncation_shows_the_last_turns_in_order"),
    NoneIsSome: Caught("test_none_stores_nothing_and_shows_nothing"),
}
"""In one process."""

PODS: Final[dict[type[Pod], Caught]] = {
    CopyOfItsOwn: Caught("test_what_one_pod_adds_every_other_shows_at_once"),
    OrdersByClock: Caught("test_turns_added_by_pods_at_the_same_time_are_all_there_each_pods_in_order"),
    ForgetsTurnIds: Caught("test_a_turn_id_that_two_pods_add_stands_once"),
    RetryDoublesATurn: Caught(
        "test_adding_and_reading_are_one_round_trip_each_for_a_conversation_of_any_age"
    ),
    ReadsBeforeItAdds: Caught(
        "test_adding_and_reading_are_one_round_trip_each_for_a_conversation_of_any_age"
    ),
    OutageIsAnEmptyMemory: Caught("test_an_outage_is_an_error_and_never_an_empty_memory"),
    StartsAnewOverWhatItCannotRead: Caught(
        "test_what_a_later_version_has_written_is_refused_and_never_overwritten"
    ),
    TrimsWithoutTheLease: Caught("test_no_turn_is_dropped_under_a_summary_that_another_pod_is_writing"),
    FailureLosesItsRace: Caught(
        "test_a_summarizer_that_fails_is_called_once_an_interval_whichever_pod_calls"
    ),
    BackgroundOfItsOwn: Caught("test_many_memory_objects_of_one_process_have_one_background"),
    EveryPodSummarizes: Caught("test_one_pod_summarizes_at_a_time"),
    LeaseForEver: Caught("test_a_pod_that_is_killed_while_it_summarizes_is_replaced_and_nothing_is_lost"),
    ClearsWhatIsPending: Caught("test_turns_that_another_pod_adds_during_a_summary_survive_it"),
}
"""Shared by pods."""
