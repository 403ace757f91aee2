"""How pytest-xdist distributes the tests: a server that is slow to start is started by one worker only."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from xdist.scheduler import LoadScopeScheduling

if TYPE_CHECKING:
    from xdist.workermanage import WorkerController

_SLOW_TO_START = re.compile(r"tests/services/(mongo|dynamo)/|\[(mongo|dynamo)\b|/test_(ring)\.py")
_WHOLE_FILES = re.compile(
    r"(tests/(?:services/\w+/test_(?:cluster|newer|pgbouncer|access|standby)|chaos/test_runs"
    r"|cli/test_sealed|packaging/test_chat_page|conformance/test_(?:broken_drivers|example))\.py)::"
)


class ByServer(LoadScopeScheduling):
    """Give all tests on MongoDB to one worker, all on DynamoDB to one, and any other test to a free worker.

    Redis and PostgreSQL start within a second, so each worker has its own. Files whose tests share further
    servers, or a package or a run that takes seconds, stay together, and so do runs of faults, of which two
    at once would miss deadlines. The largest groups run first. `--dist loadgroup` would need the group in
    each test's name, where pytest 9.2 no longer puts it.
    """

    def _split_scope(self, nodeid: str) -> str:
        if found := _SLOW_TO_START.search(nodeid):
            return next(filter(None, found.groups()))
        if found := _WHOLE_FILES.match(nodeid):
            return found[1]
        return nodeid

    def mark_test_complete(self, node: WorkerController, item_index: int, duration: float = 0) -> None:
        """Forget a group that is done; after each test, pytest-xdist 3.8 would count all of them."""
        test = self.registered_collections[node][item_index]
        group = self._split_scope(test)
        tests = self.assigned_work[node][group]
        tests[test] = True
        if all(tests.values()):
            del self.assigned_work[node][group]
        self._reschedule(node)

    def remove_node(self, node: WorkerController) -> str | None:
        """Give the others what a crashed worker has left; returns the test that it ran.

        pytest-xdist 3.8 would also hand out its finished groups again. A worker that gets such a group has
        nothing to report, is given nothing more, and the run never ends. The test itself would run again,
        and crash one worker after another.
        """
        groups = self.assigned_work.pop(node)
        crashed, *left = [
            (name, test) for name, tests in groups.items() for test, done in tests.items() if not done
        ] or [("", None)]
        for name, test in left:
            self.workqueue.setdefault(name, {})[test] = False
        for other in self.assigned_work:
            self._reschedule(other)
        return crashed[1]
