"""Bugs of a driver on NATS JetStream, each as a change of its text, and the check that finds it.

The command alone finds those of `BUGS`, by a URL. The author of the driver put most of them into it.
"""

from __future__ import annotations

from pathlib import Path

from tests.support.bugs import Bug, install


def installed(folder: Path, bug: Bug | None = None) -> Path:
    """Return a folder from which a copy of the driver can be imported, as if it was installed."""
    return install("nats", folder, bug)


FEW = (
    "a-cancelled-call-closes-the-connection",
    "a-close-waits-for-nothing",
    "a-late-answer-is-undone",
    "the-time-is-taken-before-the-read",
)
"""What an earlier suite let pass, or found by chance."""

_JUDGED_EARLIER = {
    '    name = "nats"\n': '    name = "nats"\n    _at = None\n',
    "stored.expires > self._clock()": "stored.expires > (self._at or self._clock())",
}

_FRESH = "(await last_of(link, stream, subject)).sequence"

BUGS = (
    Bug(
        "a-delete-ignores-the-version",
        "test_a_delete_with_a_version_removes_only_that_version",
        {"matches = expect is ANY or stored.record.version == expect": "matches = True"},
    ),
    Bug(
        "a-delete-is-stored-without-a-condition",
        "test_of_two_writes_that_are_paused_between_their_requests_exactly_one_wins",
        {
            "message, sequence=found.sequence)": (
                f"message, sequence={_FRESH} if message == GONE else found.sequence)"
            )
        },
    ),
    Bug(
        "writes-are-stored-without-a-condition",
        "test_an_append_while_another_write_is_paused_is_not_lost",
        {"message, sequence=found.sequence)": f"message, sequence={_FRESH})"},
    ),
    Bug(
        "a-delete-leaves-what-has-expired",
        "test_a_delete_removes_an_expired_record_that_scan_expired_lists",
        {"return False, GONE if found.sequence else None": "return False, None"},
    ),
    Bug(
        "the-same-time-to-live-is-not-renewed",
        "test_the_same_time_to_live_set_again_begins_anew",
        {
            "record, inf if ttl is None else now + ttl)": (
                "record, inf if ttl is None else "
                "stored.expires if stored and now < stored.expires <= now + ttl else now + ttl)"
            )
        },
    ),
    Bug(
        "an-append-without-a-time-to-live-keeps-the-end",
        "test_an_append_without_a_time_to_live_makes_the_record_permanent",
        {
            "record, inf if ttl is None else now + ttl)": (
                "record, (stored.expires if stored else inf) if ttl is None else now + ttl)"
            )
        },
    ),
    Bug(
        "a-replace-without-a-time-to-live-keeps-the-end",
        "test_a_replace_without_a_time_to_live_makes_the_record_permanent",
        {
            "kept if ttl is KEEP else inf if ttl is None else now + ttl": (
                "kept if ttl in (KEEP, None) else now + ttl"
            )
        },
    ),
    Bug(
        "what-is-kept-never-expires",
        "test_keep_leaves_the_time_to_live_unchanged",
        {"kept = stored.expires if stored else inf": "kept = inf"},
    ),
    Bug(
        "a-record-expires-a-second-late",
        "test_an_expired_record_is_absent_in_load",
        {
            '"expires": None if expires == inf else expires,': (
                '"expires": None if expires == inf else float(int(expires) + 2),'
            )
        },
    ),
    Bug(
        "a-refused-write-sets-a-time-to-live",
        "test_a_refused_write_with_a_time_to_live_changes_none",
        {
            "len(stored.record.tail) < going:\n                    return False, None": (
                "len(stored.record.tail) < going:\n"
                "                    touched = stored and isinstance(ttl, (int, float))\n"
                '                    return False, self._message("replace", stored.record, now + ttl) '
                "if touched else None"
            )
        },
    ),
    Bug(
        "a-listing-ends-at-a-page-of-expired-names",
        "test_a_listing_goes_on_after_pages_of_expired_names",
        {"if len(subjects) > limit else None)": "if len(subjects) > limit and listed else None)"},
    ),
    Bug(
        "a-listing-has-expired-names",
        "test_an_expired_record_is_absent_in_scan",
        {"if self._lives(what) is living": "if self._lives(what) is not None"},
    ),
    Bug(
        "a-page-begins-with-the-last-name-of-the-one-before",
        "test_a_scan_begins_after_any_name_even_one_that_is_not_there",
        {"if subject > beginning]": "if subject >= beginning]"},
    ),
    Bug(
        "names-are-cut",
        "test_keys_never_collide_and_never_act_as_patterns",
        {"key.name.encode().hex()": "key.name.encode()[:120].hex()"},
    ),
    Bug(
        "a-conflict-is-a-lost-race",
        "test_each_fold_of_the_only_folder_succeeds_beside_appends",
        {
            '                    async with before(clock.half, "other writers changed': (
                '                    if operation == "replace":\n                        return False\n'
                '                    async with before(clock.half, "other writers changed'
            )
        },
    ),
    Bug(
        "a-conflict-is-logged-with-the-key",
        "test_no_message_of_a_race_names_a_key_or_stored_text",
        {
            '                    async with before(clock.half, "other writers changed': (
                '                    __import__("logging").getLogger("nats").warning("conflict on %s", key)\n'
                '                    async with before(clock.half, "other writers changed'
            )
        },
    ),
    Bug(
        "an-error-names-the-key",
        "test_writers_of_one_record_end_in_time_however_many_wait",
        {
            '"other writers of this process were first for too long"': (
                'f"other writers of {key} were first for too long"'
            )
        },
    ),
    Bug(
        "a-fold-drops-what-was-appended-since",
        "test_a_fold_removes_exactly_the_oldest_entries",
        {"(*rewrite, *stored.record.tail[going:])": "(*rewrite,)"},
    ),
    Bug(
        "a-write-is-sent-again",
        "test_an_append_that_loses_its_answer_is_not_stored_twice",
        {
            "        except OutcomeUnknown:\n            self._retire(link)\n            raise\n": (
                "        except OutcomeUnknown:\n            self._retire(link)\n            return False\n"
            )
        },
    ),
    Bug(
        "a-lost-connection-is-undone",
        "test_an_append_that_loses_its_answer_is_never_called_undone",
        {'raise OutcomeUnknown("the connection was lost': 'raise Unavailable("the connection was lost'},
    ),
    Bug(
        "a-late-answer-is-undone",
        "test_an_append_whose_answer_comes_too_late_is_never_called_undone",
        {
            'raise OutcomeUnknown("no answer within the deadline")': (
                'raise Unavailable("no answer within the deadline")'
            )
        },
    ),
    Bug(
        "dead-connections-are-kept",
        "test_connections_that_died_unnoticed_are_replaced",
        {
            "            except (TimeoutError, LinkLost) as error:\n                self._retire(link)\n": (
                "            except (TimeoutError, LinkLost) as error:\n"
            )
        },
    ),
    Bug(
        "replaced-connections-are-not-closed",
        "test_failed_operations_and_close_leave_no_connection_open",
        {
            "            link.when_idle(lambda: self._close_soon(link))\n": (
                '            vars(self).setdefault("_left", []).append(link)\n'
            )
        },
    ),
    Bug(
        "an-opening-that-fails-leaves-its-connection",
        "test_an_opening_that_meets_a_stall_leaves_nothing_behind",
        {
            "            except BaseException:\n                self._close_soon(link)\n"
            "                raise\n": (
                '            except BaseException:\n                vars(self)["_left"] = link\n'
                "                raise\n"
            )
        },
    ),
    Bug(
        "the-deadline-begins-after-the-queue",
        "test_writers_of_one_record_end_in_time_however_many_wait",
        {
            "            async with self._turn(key, clock):\n": '            async with before(None, ""):\n',
            "        return await self._run(operation, work)\n\n    @asynccontextmanager\n": (
                "        async with self._turns.setdefault(key, asyncio.Lock()):\n"
                "            return await self._run(operation, work)\n\n    @asynccontextmanager\n"
            ),
        },
    ),
    Bug(
        "the-time-is-taken-before-the-queue",
        "test_a_write_that_queues_behind_another_judges_expiry_when_its_turn_comes",
        {
            **_JUDGED_EARLIER,
            "            clock = Clock(self.traits.deadline)\n            async with self._turn": (
                "            clock, began = Clock(self.traits.deadline), self._clock()\n"
                "            async with self._turn"
            ),
            "                        answer, message = decide(found)\n": (
                "                        self._at = began\n"
                "                        answer, message = decide(found)\n"
                "                        self._at = None\n"
            ),
        },
    ),
    Bug(
        "the-time-is-taken-before-the-read",
        "test_a_write_whose_read_is_answered_late_judges_expiry_after_the_answer",
        {
            **_JUDGED_EARLIER,
            "                        found = await self._find(key)\n"
            "                        answer, message = decide(found)\n": (
                "                        began = self._clock()\n"
                "                        found = await self._find(key)\n"
                "                        self._at = began\n"
                "                        answer, message = decide(found)\n"
                "                        self._at = None\n"
            ),
        },
    ),
    Bug(
        "a-cancelled-call-closes-the-connection",
        "test_cancelling_a_call_leaves_the_others_their_connection",
        {
            "            return await future\n        finally:\n            future.cancel()\n": (
                "            return await future\n        except asyncio.CancelledError:\n"
                "            self.lose()\n            raise\n        finally:\n            future.cancel()\n"
            )
        },
    ),
    Bug(
        "a-close-waits-for-nothing",
        "test_no_operation_goes_on_once_its_driver_is_closed",
        {
            "            await self._limit.drain()  # each ends with its result, or at its deadline with an "
            "error\n": ""
        },
    ),
    Bug(
        "each-record-keeps-a-task",
        "test_operations_leave_no_task_thread_or_connection_behind",
        {
            "            clock = Clock(self.traits.deadline)\n": (
                "            clock = Clock(self.traits.deadline)\n"
                '            if key not in vars(self).setdefault("_tasks", {}):\n'
                "                self._tasks[key] = asyncio.ensure_future(asyncio.Event().wait())\n"
            )
        },
    ),
    Bug(
        "each-record-keeps-a-lock",
        "test_many_records_leave_no_object_behind",
        {"WeakValueDictionary[Key, asyncio.Lock] = WeakValueDictionary()": "dict[Key, asyncio.Lock] = {}"},
        quick=False,
    ),
)

BUGS_OF_MEANS = (
    Bug(
        "each-error-is-no-record",
        "test_an_error_of_the_server_is_never_an_empty_answer",
        {"if code_of(answer) == NO_MESSAGE:": "if code_of(answer):"},
    ),
    Bug(
        "a-closed-driver-leaves-its-subscription",
        "test_a_closed_driver_leaves_nothing_on_a_client_passed_in",
        {"await self._subscription.unsubscribe()": "pass"},
    ),
    Bug(
        "the-marker-of-a-delete-stays",
        "test_nothing_is_stored_of_a_record_that_was_deleted",
        {"if sequence and message == GONE:": "if sequence and not message:"},
    ),
    Bug(
        "values-have-no-checksum",
        "test_a_record_of_which_a_part_was_removed_raises_corrupt",
        {"if int(data[:8], 16) != zlib.crc32(data[8:]):": "if not data:"},
    ),
)
"""Those that take a means that only a test class has: `refusal`, `handed_in`, `stored` and `cut`."""
