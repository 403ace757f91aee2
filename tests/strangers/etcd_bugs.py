"""Bugs that authors make on a store like etcd, each as a change of the driver's text, and what finds it.

The command alone finds them, by a URL: nothing here needs a means that only a test class has.
"""

from __future__ import annotations

from pathlib import Path

from tests.support.bugs import Bug, install


def installed(folder: Path, bug: Bug | None = None) -> Path:
    """Return a folder from which a copy of the driver can be imported, as if it was installed."""
    return install("etcd", folder, bug)


FEW = ("a-conflict-is-a-lost-race", "a-purge-removes-without-a-condition", "versions-of-a-key-are-compared")
"""What an earlier suite let pass, or found by chance."""

BUGS = (
    Bug(
        "a-delete-by-a-prefix-wipes-longer-names",
        "test_a_delete_leaves_what_other_records_hold",
        {
            'return [deleted(self.head), deleted(self.values, self.values[:-1] + b"\\1")]': (
                'return [deleted(self.head), deleted(self.values[:-1], self.values[:-1] + b"\\xff")]'
            )
        },
    ),
    Bug(
        "the-same-time-to-live-is-not-renewed",
        "test_the_same_time_to_live_set_again_begins_anew",
        {
            "after = replace(head, expires=ends(ttl, now), length": (
                "until = head.expires if ttl and now < head.expires <= now + ttl else ends(ttl, now)\n"
                "            after = replace(head, expires=until, length"
            )
        },
    ),
    Bug(
        "a-delete-is-committed-without-a-condition",
        "test_of_two_writes_that_are_paused_between_their_requests_exactly_one_wins",
        {
            "if await self._commit({place.head: stored.revision if stored else 0}, change):": (
                "met = {place.head: stored.revision if stored else 0}\n"
                '                    if await self._commit({} if operation == "delete" else met, change):'
            )
        },
    ),
    Bug(
        "a-listing-ends-at-a-page-of-expired-names",
        "test_a_listing_goes_on_after_pages_of_expired_names",
        {"if len(rows) > most else None)": "if len(rows) > most and names else None)"},
    ),
    Bug(
        "a-conflict-is-a-lost-race",
        "test_each_fold_of_the_only_folder_succeeds_beside_appends",
        {
            "                    is_sent = False\n": (
                '                    is_sent = False\n                    if operation == "replace":\n'
                "                        return False\n"
            )
        },
    ),
    Bug(
        "the-deadline-begins-after-the-queue",
        "test_writers_of_one_record_end_in_time_however_many_wait",
        {
            "            turn = self._turns.setdefault(key, asyncio.Lock())\n": "",
            " as before_commit, turn:": " as before_commit:",
            "        return await self._run(operation, unsent)\n": (
                "        turn = self._turns.setdefault(key, asyncio.Lock())\n"
                "        async with turn:\n            return await self._run(operation, unsent)\n"
            ),
        },
    ),
    Bug(
        "a-rewrite-has-more-operations-than-a-commit",
        "test_many_entries_can_be_rewritten_at_once",
        {"MOST_REWRITTEN: Final = 100": "MOST_REWRITTEN: Final = 10_000"},
        quick=False,
    ),
    Bug(
        "a-rewrite-is-larger-than-a-request",
        "test_a_full_record_can_be_rewritten_at_its_size",
        {"max_record=settings.max_record_bytes": "max_record=4 * settings.max_record_bytes"},
        quick=False,
    ),
    Bug(
        "an-error-names-the-key",
        "test_writers_of_one_record_end_in_time_however_many_wait",
        {
            'raise Unavailable("the time to begin a write has passed; nothing was written") from error': (
                'raise Unavailable(f"other writers changed {key}") from error'
            )
        },
    ),
    Bug(
        "a-conflict-is-logged-with-the-key",
        "test_no_message_of_a_race_names_a_key_or_stored_text",
        {
            "                    is_sent = False\n": (
                "                    is_sent = False\n"
                '                    __import__("logging").getLogger("etcd").warning("conflict on %s", key)\n'
            )
        },
    ),
    Bug(
        "versions-of-a-key-are-compared",
        "test_a_paused_write_does_not_bring_back_a_record_that_was_deleted",
        {
            'int(one["mod_revision"])': 'int(one["version"])',
            '"target": "MOD", "mod_revision"': '"target": "VERSION", "version"',
        },
    ),
    Bug(
        "the-time-is-taken-before-the-queue",
        "test_a_write_that_queues_behind_another_judges_expiry_when_its_turn_comes",
        {
            "            turn = self._turns.setdefault(key, asyncio.Lock())\n": (
                "            turn, began = self._turns.setdefault(key, asyncio.Lock()), time.time()\n"
            ),
            "seen, now = self._alive(place, stored, values), time.time()": (
                "seen, now = self._alive(place, stored, values, began), began"
            ),
            "values: list[Row]) -> Seen | None:": "values: list[Row], now=None) -> Seen | None:",
            "expiry(stored.value) <= time.time()": "expiry(stored.value) <= (now or time.time())",
        },
    ),
    Bug(
        "a-refused-write-sets-a-time-to-live",
        "test_a_refused_write_with_a_time_to_live_changes_none",
        {
            "                    return False, []\n                # All of it": (
                "                    touched = head and ttl not in (None, KEEP)\n"
                "                    touch = replace(head, expires=ends(ttl, now)) if touched else None\n"
                "                    return False, [put(place.head, touch.written())] if touch else []\n"
                "                # All of it"
            )
        },
    ),
    Bug(
        "each-record-keeps-a-task",
        "test_operations_leave_no_task_thread_or_connection_behind",
        {
            "        place, is_sent = self._place(key), False\n": (
                "        place, is_sent = self._place(key), False\n"
                "        if key not in vars(self).setdefault('_tasks', {}):\n"
                "            self._tasks[key] = asyncio.ensure_future(asyncio.Event().wait())\n"
            )
        },
    ),
    Bug(
        "each-record-keeps-a-lock",
        "test_many_records_leave_no_object_behind",
        {"WeakValueDictionary[Key, asyncio.Lock] = WeakValueDictionary()": "dict[Key, asyncio.Lock] = {}"},
        quick=False,
    ),
    Bug(
        "an-opening-that-fails-leaves-its-task",
        "test_an_opening_that_meets_a_stall_leaves_nothing_behind",
        {
            'await self._edge.run("open", lambda: self._range(self._heads, limit=1))': (
                "self._keeping = asyncio.ensure_future(asyncio.Event().wait())\n"
                '        await self._edge.run("open", lambda: self._range(self._heads, limit=1))\n'
                "        self._was_opened = True"
            ),
            "            self._closing = ": (
                '            if hasattr(self, "_was_opened"):\n                self._keeping.cancel()\n'
                "            self._closing = "
            ),
        },
    ),
    Bug(
        "a-commit-is-sent-again",
        "test_an_append_that_loses_its_answer_is_not_stored_twice",
        {
            '        answer = await self._post({"compare": compare, "success": change})\n': (
                '        commit = {"compare": compare, "success": change}\n'
                "        try:\n            answer = await self._post(commit)\n"
                "        except (httpx.ReadError, httpx.RemoteProtocolError):\n"
                "            answer = await self._post(commit)\n"
            )
        },
    ),
    Bug(
        "an-unknown-outcome-is-called-undone",
        "test_an_append_that_loses_its_answer_is_never_called_undone",
        {"                    is_sent = True\n": ""},
    ),
    Bug(
        "a-load-is-of-two-moments",
        "test_a_load_is_a_snapshot_while_another_instance_appends_and_folds",
        {
            "heads, *values = await self._ask(ranges)": (
                "(heads,), values = await self._ask(ranges[:1]), await self._ask(ranges[1:] or ranges)"
            )
        },
    ),
    Bug(
        "a-page-begins-with-the-last-name-of-the-one-before",
        "test_a_scan_lists_names_in_the_order_of_their_utf8_bytes",
        {'start + b"\\0" + after.encode() + b"\\0"': 'start + b"\\0" + after.encode()'},
    ),
    Bug(
        "a-purge-removes-without-a-condition",
        "test_a_purge_keeps_a_record_that_is_created_anew_meanwhile",
        {"self._commit({row.key: row.revision for row in heads}, change)": "self._commit({}, change)"},
    ),
    Bug(
        "there-is-no-deadline",
        "test_every_operation_ends_in_time_while_the_network_is_silent",
        {
            "        return await self._edge.run(operation, work)\n": "        return await work()\n",
            "asyncio.timeout_at(until)": "asyncio.timeout(None)",
            "before_commit.reschedule(until)": "before_commit.reschedule(None)",
        },
    ),
    Bug(
        "the-newest-entries-are-the-oldest",
        "test_a_load_of_the_newest_entries_has_these_in_order",
        {'"sort_order": "DESCEND", ': ""},
    ),
    Bug(
        "a-call-that-fails-keeps-its-place",
        "test_failed_operations_and_close_leave_no_connection_open",
        {
            "        async with self._limit:\n": "        await self._limit.__aenter__()\n        if True:\n",
            'response = await self._client.post("txn", content=json.dumps(transaction))\n': (
                'response = await self._client.post("txn", content=json.dumps(transaction))\n'
                "            await self._limit.__aexit__()\n"
            ),
        },
    ),
    Bug(
        "a-cancelled-write-keeps-its-turn",
        "test_a_cancelled_append_is_applied_completely_or_not_at_all",
        {
            " as before_commit, turn:\n": " as before_commit:\n                await turn.acquire()\n",
            "                    if not change:\n                        return answer\n": (
                "                    if not change:\n                        turn.release()\n"
                "                        return answer\n"
            ),
            "change):\n                        return answer\n": (
                "change):\n                        turn.release()\n                        return answer\n"
            ),
            "WeakValueDictionary[Key, asyncio.Lock] = WeakValueDictionary()": "dict[Key, asyncio.Lock] = {}",
        },
    ),
    Bug(
        "a-delete-is-two-commits",
        "test_a_paused_write_does_not_bring_back_a_record_that_was_deleted",
        {
            "change):\n                        return answer\n": (
                'change[:1] if operation == "delete" else change):\n'
                '                        if operation == "delete":\n'
                "                            await self._commit({}, change[1:])\n"
                "                        return answer\n"
            )
        },
    ),
    Bug(
        "a-record-expires-at-a-whole-second",
        "test_a_record_exists_until_it_expires",
        {"inf if ttl is None else now + ttl": "inf if ttl is None else float(int(now + ttl))"},
    ),
    Bug(
        "what-is-kept-never-expires",
        "test_keep_leaves_the_time_to_live_unchanged",
        {"kept if ttl is KEEP else": "inf if ttl is KEEP else"},
    ),
    Bug(
        "a-fold-makes-no-room",
        "test_a_record_is_full_with_exactly_max_record_bytes",
        {
            "after = replace(after, size=sum(map(len, tail), len(body)))": (
                "after = replace(after, size=len(body) + (head.size if head and tail else 0))"
            )
        },
        quick=False,
    ),
)
