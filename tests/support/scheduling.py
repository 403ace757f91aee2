"""Which worker of pytest-xdist runs which test, so that a server that is slow to start is started once."""

from __future__ import annotations

import re

from xdist.scheduler import LoadScopeScheduling

_SLOW_TO_START = re.compile(r"tests/services/(mongo|dynamo)/|\[(mongo|dynamo)\b|/test_(ring)\.py")
_WHOLE_FILES = re.compile(r"(tests/services/\w+/test_(?:cluster|newer|pgbouncer|access)\.py)::")


class ByServer(LoadScopeScheduling):
    """Gives all tests on MongoDB to one worker, and all on DynamoDB; any other test to whoever is free.

    A Redis and a PostgreSQL are up in a second, so each worker may have its own. Files whose tests share
    servers of their own stay together. `--dist loadgroup` would need the names of tests to carry their
    group, which they have not done since pytest 9.2.
    """

    def _split_scope(self, nodeid: str) -> str:
        if found := _SLOW_TO_START.search(nodeid):
            return next(filter(None, found.groups()))
        if found := _WHOLE_FILES.match(nodeid):
            return found[1]
        return nodeid
