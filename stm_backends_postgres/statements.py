"""The SQL of the PostgreSQL driver, and the reasons why each operation is atomic.

Each operation is one statement, and a statement outside a transaction is a transaction. All parts of a
read see one snapshot. A write first locks the record's row, and then decides by the newest version of the
row, not by the version when the statement began:

- `INSERT ... ON CONFLICT DO UPDATE` waits for the row, and reads its newest version in `SET` and `WHERE`.
- `SELECT ... FOR UPDATE` waits for the row, and returns its newest version.
- `SELECT ... FOR UPDATE SKIP LOCKED` returns the newest version of rows that no other transaction has locked.

Other parts of the same statement see the snapshot from before the wait. Therefore everything that must be
exact (the version, the bounds of the tail, its size) is in the record's row, and the locked row assigns the
sequence numbers of the entries. The snapshot can miss only garbage: entries below the bounds, which no
statement reads and which the next fold or deletion removes.

No statement removes more than `STEP_ENTRIES` entries at once. If there are more, its answer says so, and
`SWEEP` and `PURGE` remove the rest in steps.

Writes decide expiry by `clock_timestamp()`, once, after the lock was taken: `now()` is the time at which the
statement began to wait. Reads do not wait; they use `statement_timestamp()`, which works with an index.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, TypeAlias

from stm_backends.drivers.layouts import Layout

RowSecurity: TypeAlias = Literal["off", "role", "setting"]

RECORD: Final = "stm_record"
ENTRY: Final = "stm_entry"
LAYOUT: Final = "stm_layout"
OURS: Final = Layout(version=3, readable_since=1)
OLDEST: Final = 1
"""The oldest layout that these statements can use; see `_SETUP` for the layouts."""

COLUMNS: Final = frozenset({"id", "scope", "name", "version", "body", "expires", "first", "next", "size"})
"""The columns that a table of records has in every layout."""

STEP_ENTRIES: Final = 1_000
"""Maximum number of entries that one statement removes."""

DUE_S: Final = 15 * 60
"""The number of seconds that `due` is rounded down to; see `_STEP_3`."""

STEP_RECORDS: Final = 64
"""Maximum number of small records that one statement removes."""

STEP_BYTES: Final = 16 * 1024 * 1024
"""Maximum size in bytes of the entries that a purge removes at once; a single entry may be larger."""

# Removes entries below the bounds of the tail, at most one step; the numbers have no gaps. `unswept` is the
# record if more entries are left.
_SWEPT: Final = """lowest AS MATERIALIZED (
        SELECT min(seq) + {entries} AS upto FROM {schema}.stm_entry WHERE record = (SELECT id FROM {whose})
    ), swept AS (
        DELETE FROM {schema}.stm_entry
        WHERE record = (SELECT id FROM {whose}) AND seq < (SELECT least(upto, (SELECT {below})) FROM lowest)
    )"""
_UNSWEPT: Final = (
    "(SELECT CASE WHEN upto < (SELECT {below}) THEN (SELECT id FROM {whose}) END FROM lowest) AS unswept"
)

# Ends a record that is too large to be removed in one step: from then on it counts as expired, even if the
# clock is set back, and it is the next one that a purge removes.
_END: Final = "SET version = '', body = NULL, expires = '-infinity', first = r.next, size = 0"

# Only the first row of a record has the body. An array of entries would need only one row, but asyncpg has to
# look up that type on each connection. `place` counts the loads, from 1; each has its own number of newest
# entries, $3. Among several, a load of more than $4 bytes has neither the body nor entries: counted are the
# bytes of the record or, by the average entry, of its newest entries.
#
# LATERAL with OFFSET 0 keeps the entries a separate query with bounds that are known before it reads. In a
# plain join of several records, the index finds all entries of a record, and the bounds only filter them.
# `(SELECT $1)` hides the number of loads from the planner, which would otherwise plan each statement for two
# again.
LOAD: Final = """
    SELECT {place} AS place, version,
        CASE WHEN {whole} AND (seq IS NULL OR seq = {start}) THEN body END AS body,
        next - first AS length, size, entry
    FROM {wanted}
    LEFT JOIN LATERAL (
        SELECT seq, entry FROM {schema}.stm_entry
        WHERE record = id AND seq >= {start} AND seq < next AND {whole} OFFSET 0
    ) AS entered ON TRUE
    WHERE {which}(expires IS NULL OR expires > statement_timestamp())
    ORDER BY place, seq"""
_ONE: Final = {
    "place": "1",
    "wanted": "{schema}.stm_record",
    "which": "scope = $1 AND name = $2 AND ",
    "whole": "TRUE",
    "start": "greatest(first, next - $3::bigint)",
}
_MANY: Final = {
    "place": "wanted.place",
    "wanted": "unnest((SELECT $1::text[]), $2::text[], $3::bigint[])"
    " WITH ORDINALITY AS wanted (in_scope, named, newest, place)"
    " JOIN {schema}.stm_record ON scope = in_scope AND name = named",
    "which": "",
    "whole": "CASE WHEN newest < next - first THEN size * newest / (next - first) ELSE size END <= $4",
    "start": "greatest(first, next - newest)",
}

# An append to a record that probably exists. It neither inserts a record nor sweeps. No row means that
# nothing was done because the record is absent, expired or full, or will expire soon; then `APPEND` decides.
# The update judges expiry before it waits for the row; $6 is more seconds than the server lets it wait.
EXTEND: Final = """
    WITH record AS (
        UPDATE {schema}.stm_record
        SET next = next + 1, size = size + octet_length($3::bytea),
            expires = clock_timestamp() + make_interval(secs => $4)
        WHERE scope = $1 AND name = $2 AND size + octet_length($3::bytea) <= $5
            AND (expires IS NULL OR expires > clock_timestamp() + make_interval(secs => $6))
        RETURNING id, next - 1 AS seq, next - first AS length
    ), entered AS (
        INSERT INTO {schema}.stm_entry (record, seq, entry) SELECT id, seq, $3::bytea FROM record
    )
    SELECT length, NULL::bigint AS unswept FROM record"""

# An expired record is replaced in its row: the tail begins after the numbers that were in use. If the entry
# does not fit, no row is returned and nothing is written; `size` is then the size of the record, for the
# error.
APPEND: Final = """
    WITH record AS (
        INSERT INTO {schema}.stm_record AS r (scope, name, version, expires, first, next, size)
        VALUES ($1, $2, $3, clock_timestamp() + make_interval(secs => $5), 1, 2, octet_length($4::bytea))
        ON CONFLICT ON CONSTRAINT stm_record_key DO UPDATE
        SET (version, body, expires, first, next, size) = (
            SELECT
                CASE WHEN alive THEN r.version ELSE excluded.version END,
                CASE WHEN alive THEN r.body END,
                now + make_interval(secs => $5),
                CASE WHEN alive THEN r.first ELSE r.next END,
                r.next + 1,
                excluded.size + CASE WHEN alive THEN r.size ELSE 0 END
            FROM (
                SELECT now, r.expires IS NULL OR r.expires > now AS alive FROM clock_timestamp() AS now
            ) AS judged
        )
        WHERE r.size + excluded.size <= $6 OR r.expires <= clock_timestamp()
        RETURNING id, next - 1 AS seq, next - first AS length
    ), entered AS (
        INSERT INTO {schema}.stm_entry (record, seq, entry) SELECT id, seq, $4 FROM record
    ), {swept}
    SELECT (SELECT length FROM record) AS length, CASE WHEN NOT EXISTS (SELECT FROM record) THEN
        (SELECT size FROM {schema}.stm_record WHERE scope = $1 AND name = $2)
    END AS size, {unswept}"""

# Several appends, perhaps more than one to a record. First come the columns of the records: keys, the version
# of a new record, its time to live, the number of its entries, and their bytes. Then come all entries, and
# the columns of each: its start in $7, its length, the number of its record, and the number of entries of the
# same record that precede it here. Columns of numbers are text, which costs asyncpg less than arrays. The
# answer has a row for each added entry, with its place.
#
# No append may hold up the others. A row that another transaction has locked is skipped, as is one that has
# expired or has no room for all its entries, which is judged after locking. Only a record that another
# transaction is creating is waited for. All statements create records in key order, so no two wait for each
# other.
#
# LATERAL, `= ANY` and the subquery bind each row to its index: a plan made while the tables were small would
# join all rows, and be kept while they grow. `(SELECT $1)` hides the number of rows: a plan for few would be
# estimated to cost less than the kept one, so each such statement would be planned again.
APPEND_MANY: Final = """
    WITH wanted AS MATERIALIZED (
        SELECT number, in_scope, named, initial, seconds::float8 AS secs, entries::bigint AS entries,
            bytes::bigint AS bytes, id
        FROM unnest(
            (SELECT $1::text[]), $2::text[], $3::text[], string_to_array($4::text, ' ', '-'),
            string_to_array($5::text, ' '), string_to_array($6::text, ' ')
        ) WITH ORDINALITY AS given (in_scope, named, initial, seconds, entries, bytes, number)
        LEFT JOIN LATERAL (
            SELECT id FROM {schema}.stm_record WHERE scope = in_scope AND name = named FOR UPDATE SKIP LOCKED
        ) AS locked ON TRUE
    ), extended AS (
        UPDATE {schema}.stm_record AS r
        SET next = next + entries, size = size + bytes,
            expires = clock_timestamp() + make_interval(secs => secs)
        FROM wanted
        WHERE r.id = wanted.id AND r.id = ANY (ARRAY(SELECT id FROM wanted)) AND size + bytes <= $12
            AND (expires IS NULL OR expires > clock_timestamp())
        RETURNING r.id, number, next - entries AS seq, next - entries - first AS before
    ), created AS (
        INSERT INTO {schema}.stm_record (scope, name, version, expires, first, next, size)
        SELECT in_scope, named, initial, clock_timestamp() + make_interval(secs => secs),
            1, 1 + entries, bytes
        FROM wanted
        WHERE id IS NULL AND bytes <= $12
            AND (SELECT id FROM {schema}.stm_record WHERE scope = in_scope AND name = named) IS NULL
        ORDER BY in_scope COLLATE "C", named COLLATE "C"
        ON CONFLICT ON CONSTRAINT stm_record_key DO NOTHING
        RETURNING id, scope, name
    ), record AS (
        SELECT id, number, seq, before FROM extended
        UNION ALL
        SELECT created.id, number, 1, 0 FROM created JOIN wanted ON scope = in_scope AND name = named
    ), added AS MATERIALIZED (
        SELECT id, seq + rank::bigint AS seq, before + rank::bigint + 1 AS length, place,
            start::integer AS start, bytes::integer AS bytes
        FROM record JOIN unnest(
            string_to_array((SELECT $8::text), ' '), string_to_array($9::text, ' '),
            string_to_array($10::text, ' '), string_to_array($11::text, ' ')
        ) WITH ORDINALITY AS given (start, bytes, number, rank, place) ON record.number = given.number::bigint
    ), entered AS (
        INSERT INTO {schema}.stm_entry (record, seq, entry)
        SELECT id, seq, substring($7::bytea FROM start FOR bytes) FROM added
    )
    SELECT place, length, NULL::bigint AS unswept FROM added"""

# `replace` without a version: $6 says whether any record may be replaced, or only an expired one. A live
# record that already carries the new version is written unchanged.
STORE: Final = """
    WITH record AS (
        INSERT INTO {schema}.stm_record AS r (scope, name, version, body, expires, first, next, size)
        VALUES ($1, $2, $3, $4::bytea, clock_timestamp() + make_interval(secs => $5), 1, 1, octet_length($4))
        ON CONFLICT ON CONSTRAINT stm_record_key DO UPDATE
        SET (version, body, expires, first, size) = (
            SELECT
                excluded.version,
                CASE WHEN done THEN r.body ELSE excluded.body END,
                CASE WHEN done OR (alive AND $7) THEN r.expires ELSE now + make_interval(secs => $5) END,
                CASE WHEN done THEN r.first ELSE r.next END,
                CASE WHEN done THEN r.size ELSE excluded.size END
            FROM (
                SELECT now, alive, alive AND r.version = excluded.version AS done FROM (
                    SELECT now, r.expires IS NULL OR r.expires > now AS alive FROM clock_timestamp() AS now
                ) AS judged
            ) AS decided
        )
        WHERE $6 OR r.version = excluded.version OR r.expires <= clock_timestamp()
        RETURNING id, first
    ), {swept}
    SELECT EXISTS (SELECT FROM record) AS stored, {unswept}"""

# `replace` with a version. The caller has read the entries to drop, so they are in the snapshot. If there are
# fewer, the record had fewer when this statement began, which is a lost race. No row means that the record
# does not exist. Otherwise `may` says whether the condition holds, and `size` is the size the record would
# have.
FOLD: Final = """
    WITH found AS (
        SELECT id, version, body, expires, first, size
        FROM {schema}.stm_record WHERE scope = $1 AND name = $2 FOR UPDATE
    ), judged AS MATERIALIZED (
        SELECT *, clock_timestamp() AS now FROM found
    ), alive AS (
        SELECT id, version, expires, now, first + $6 AS first, size - coalesce(octet_length(body), 0) AS rest
        FROM judged WHERE expires IS NULL OR expires > now
    ), going AS (
        SELECT count(*) AS entries, coalesce(sum(octet_length(entry)), 0) AS size
        FROM {schema}.stm_entry JOIN judged ON record = id AND seq >= first AND seq < first + $6
    ), plan AS MATERIALIZED (
        SELECT id, alive.version, alive.first, rest - going.size + octet_length($4::bytea) AS size,
            CASE WHEN $7 THEN expires ELSE now + make_interval(secs => $5) END AS expires,
            alive.version = $8 AND going.entries = $6 AS may
        FROM alive, going
    ), written AS (
        UPDATE {schema}.stm_record AS r
        SET version = $3, body = $4, first = plan.first, size = plan.size, expires = plan.expires
        FROM plan WHERE r.id = plan.id AND plan.version <> $3 AND plan.may AND plan.size <= $9
        RETURNING r.id, r.first
    ), {swept}
    SELECT version = $3 OR EXISTS (SELECT FROM written) AS stored, may, size, {unswept} FROM plan"""

# `replace` that rewrites $6 entries. $9 has all of them, with their starts in $10 and lengths in $11, because
# asyncpg has to look up an array of `bytea` on each connection. A rewrite that committed after the snapshot
# has changed sizes. So the version in the snapshot must be the expected one, too; otherwise the record had
# another version when this statement began, which is a lost race. `FOLD` relies on its caller, which has read
# the version and so has a later snapshot.
REWRITE: Final = """
    WITH found AS (
        SELECT id, version, body, expires, first, size
        FROM {schema}.stm_record WHERE scope = $1 AND name = $2 FOR UPDATE
    ), judged AS MATERIALIZED (
        SELECT *, clock_timestamp() AS now FROM found
    ), alive AS (
        SELECT id, version, expires, now, first, size - coalesce(octet_length(body), 0) AS rest
        FROM judged WHERE expires IS NULL OR expires > now
    ), going AS (
        SELECT count(*) AS entries, coalesce(sum(octet_length(entry)), 0) AS size
        FROM {schema}.stm_entry JOIN judged ON record = id AND seq >= first AND seq < first + $6
    ), plan AS MATERIALIZED (
        SELECT id, alive.version, alive.first,
            rest - going.size + octet_length($9::bytea) + octet_length($4::bytea) AS size,
            CASE WHEN $7 THEN expires ELSE now + make_interval(secs => $5) END AS expires,
            alive.version = $8 AND going.entries = $6
                AND (SELECT version FROM {schema}.stm_record AS seen WHERE seen.id = alive.id) = $8 AS may
        FROM alive, going
    ), written AS (
        UPDATE {schema}.stm_record AS r
        SET version = $3, body = $4, size = plan.size, expires = plan.expires
        FROM plan WHERE r.id = plan.id AND plan.version <> $3 AND plan.may AND plan.size <= $12
        RETURNING r.id, r.first
    ), rewritten AS (
        UPDATE {schema}.stm_entry
        SET entry = substring($9 FROM given.start::integer FOR given.length::integer)
        FROM unnest($10::text[], $11::text[]) WITH ORDINALITY AS given (start, length, place)
        WHERE record = (SELECT id FROM written) AND seq = (SELECT first FROM written) + given.place - 1
    )
    SELECT version = $3 OR EXISTS (SELECT FROM written) AS stored, may, size, NULL::bigint AS unswept
    FROM plan"""

# The entries are deleted with the record by a foreign key, whose own query sees what the snapshot may miss. A
# record of more than one step is ended instead, and its rows are left to `PURGE`.
#
# If the record does not exist, this deletion may be a retry of one that a standby does not have yet. A commit
# waits for the standby only if it has written something: here a message in the log, which nobody reads.
DELETE: Final = """
    WITH found AS (
        SELECT id, next, size, expires FROM {schema}.stm_record
        WHERE scope = $1 AND name = $2 AND ($3::text IS NULL OR version = $3) FOR UPDATE
    ), judged AS MATERIALIZED (
        SELECT id, expires, size > {bytes} OR coalesce(
            next > {entries} + (SELECT min(seq) FROM {schema}.stm_entry WHERE record = found.id), false
        ) AS large FROM found
    ), ended AS (
        UPDATE {schema}.stm_record AS r {end} FROM judged WHERE r.id = judged.id AND large
    ), gone AS (
        DELETE FROM {schema}.stm_record AS r USING judged WHERE r.id = judged.id AND NOT large
    )
    SELECT expires IS NULL OR expires > clock_timestamp() AS alive, large AS unfinished FROM judged
    UNION ALL
    SELECT pg_logical_emit_message(true, 'stm', '') IS NULL, false
    WHERE current_setting('synchronous_standby_names') <> '' AND NOT EXISTS (SELECT FROM found)"""

SCAN: Final = """
    SELECT name FROM {schema}.stm_record
    WHERE scope = $1 AND name > $2 AND (expires IS NULL OR expires > statement_timestamp())
    ORDER BY name LIMIT $3"""

# One search in the key index. Row security leaves only the scopes of the role's tenant.
NEXT_SCOPE: Final = "SELECT scope FROM {schema}.stm_record WHERE scope > $1 ORDER BY scope LIMIT 1"

SCAN_EXPIRED: Final = """
    SELECT name FROM {schema}.stm_record
    WHERE scope = $1 AND name > $2 AND expires <= statement_timestamp()
    ORDER BY name LIMIT $3"""

# One step: an expired record, or the oldest entries of a larger one; the record's row is removed last. No row
# means that no record has expired, or others are removing them. It never waits for a lock, so it cannot
# deadlock. The index has `due`, which is at most `DUE_S` before `expires`. With that number as $1, every row
# found in the index has expired; with less, some of the newest have not, and are skipped.
PURGE: Final = """
    WITH due AS MATERIALIZED (
        SELECT id FROM {schema}.stm_record
        WHERE {due} <= statement_timestamp() - make_interval(secs => $1) AND expires <= statement_timestamp()
        ORDER BY {due} LIMIT 1 FOR UPDATE SKIP LOCKED
    ), step AS MATERIALIZED (
        SELECT max(seq) AS last,
            max(seq) FILTER (WHERE place = 1 OR (place <= {entries} AND bytes <= {bytes})) AS upto
        FROM (
            SELECT seq, row_number() OVER oldest AS place, sum(octet_length(entry)) OVER oldest AS bytes
            FROM {schema}.stm_entry WHERE record = (SELECT id FROM due)
            WINDOW oldest AS (ORDER BY seq ROWS UNBOUNDED PRECEDING)
            ORDER BY seq LIMIT {entries} + 1
        ) AS found
    ), swept AS (
        DELETE FROM {schema}.stm_entry
        WHERE record = (SELECT id FROM due) AND seq <= (SELECT upto FROM step)
    ), ended AS (
        UPDATE {schema}.stm_record AS r {end} FROM due, step
        WHERE r.id = due.id AND last > upto AND r.expires > '-infinity'
    ), purged AS (
        DELETE FROM {schema}.stm_record AS r USING due, step
        WHERE r.id = due.id AND last IS NOT DISTINCT FROM upto
        RETURNING r.id
    )
    SELECT (SELECT count(*) FROM purged) AS purged FROM due"""

# The same for several small records: together at most as many entries and bytes as one step removes. `next`
# is greater than the number of a record's entries, including those below its tail. The cascade removes the
# entries. A purge on demand uses this; the task that follows writes takes one record at a time.
PURGE_SMALL: Final = """
    WITH due AS MATERIALIZED (
        SELECT id, next, size FROM {schema}.stm_record
        WHERE {due} <= statement_timestamp() AND expires <= statement_timestamp()
            AND next <= {entries} AND size <= {bytes}
        ORDER BY {due} LIMIT $1 FOR UPDATE SKIP LOCKED
    ), step AS (
        SELECT id, sum(next) OVER by_id AS entries, sum(size) OVER by_id AS bytes FROM due
        WINDOW by_id AS (ORDER BY id ROWS UNBOUNDED PRECEDING)
    ), purged AS (
        DELETE FROM {schema}.stm_record AS r USING step
        WHERE r.id = step.id AND entries <= {entries} AND bytes <= {bytes}
        RETURNING r.id
    )
    SELECT count(*) AS purged FROM purged"""

COUNT_EXPIRED: Final = """
    SELECT count(*) AS expired FROM {schema}.stm_record
    WHERE {due} <= statement_timestamp() AND expires <= statement_timestamp()"""

# One step for a record that is in use. It needs no lock, because `first` only increases.
SWEEP: Final = """
    WITH record AS (
        SELECT id, first FROM {schema}.stm_record WHERE id = $1
    ), {swept}
    SELECT {unswept}"""

SAMPLES: Final[Mapping[str, object]] = {"int4": 1, "int8": 2, "bool": True, "text": "a", "bytea": b"a"}
"""The value of each type that `LOOK` returns, unless the connection has custom codecs."""

# The check of `open`; changes nothing.
LOOK: Final = """
    SELECT 1::int4 AS int4, 2::int8 AS int8, true AS bool, 'a'::text AS text, 'a'::bytea AS bytea,
        found IS NOT NULL AS there, to_regclass($2) IS NOT NULL AS numbered,
        pg_class.relrowsecurity AS secured, entries.relrowsecurity AS entries_secured,
        row_security_active(found) AND row_security_active(entries.oid) AS active,
        current_setting('stm.tenant', true) AS tenant, current_setting('server_encoding') AS encoding,
        current_setting('transaction_isolation') AS isolation, pg_is_in_recovery() AS standby,
        (SELECT string_agg(attname, ' ') FROM pg_attribute WHERE attrelid = found AND attnum > 0) AS columns
    FROM to_regclass($1) AS found LEFT JOIN pg_class ON pg_class.oid = found
    LEFT JOIN pg_class AS entries ON entries.oid = to_regclass($3)"""

# Uses the index, because `enable_seqscan` is off.
NUMBERS: Final = "SELECT version, readable_since FROM {schema}.stm_layout WHERE one"

# The lock runs one setup at a time, because IF NOT EXISTS fails if two sessions create a table concurrently.
# Its number is the letters `stm`. Sent together, the statements are one transaction. CREATE SCHEMA is skipped
# for an existing schema, because even IF NOT EXISTS needs the permission to create it.
#
# First come the tables of layout 1, then a step for each later layout. So new and old tables take the same
# path, and running the script again changes nothing. Processes of layout 1 need the comment to open the
# tables. The layout reveals nothing about the data, so every role may read it.
_SETUP: Final = """\
SELECT pg_advisory_xact_lock(7566445);
DO $$ BEGIN
    IF to_regnamespace('{schema}') IS NULL THEN CREATE SCHEMA {schema}; END IF;
END $$;
CREATE TABLE IF NOT EXISTS {schema}.stm_layout (
    one     boolean PRIMARY KEY DEFAULT true CHECK (one),
    version integer NOT NULL,
    readable_since integer NOT NULL
);
GRANT SELECT ON {schema}.stm_layout TO PUBLIC;
DO $$ BEGIN
    IF to_regclass('{schema}.stm_record') IS NULL THEN DELETE FROM {schema}.stm_layout; END IF;
END $$;
CREATE TABLE IF NOT EXISTS {schema}.stm_record (
    {tenant}id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    scope   text COLLATE "C" NOT NULL,
    name    text COLLATE "C" NOT NULL,
    version text NOT NULL,
    body    bytea,
    expires timestamptz,
    first   bigint NOT NULL,
    next    bigint NOT NULL,
    size    bigint NOT NULL,
    CONSTRAINT stm_record_key UNIQUE ({of_tenant}scope, name)
);
CREATE TABLE IF NOT EXISTS {schema}.stm_entry (
    {tenant}record bigint NOT NULL REFERENCES {schema}.stm_record (id) ON DELETE CASCADE,
    seq     bigint NOT NULL,
    entry   bytea NOT NULL,
    PRIMARY KEY ({of_tenant}record, seq)
);
{policies}COMMENT ON TABLE {schema}.stm_record IS 'stm-backends, schema 1';
INSERT INTO {schema}.stm_layout (version, readable_since) VALUES (1, 1) ON CONFLICT DO NOTHING;
{step_2}{step_3}"""

# FORCE, because otherwise the policies would not bind the owner of the tables. Nothing binds a superuser.
# Existing policies are not changed.
_POLICY: Final = """\
DO $$ BEGIN
    IF NOT EXISTS (
        SELECT FROM pg_policy WHERE polrelid = '{schema}.{table}'::regclass AND polname = 'stm_tenant'
    ) THEN
        ALTER TABLE {schema}.{table} ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY;
        CREATE POLICY stm_tenant ON {schema}.{table} USING (tenant = {whose});
    END IF;
END $$;
"""

# `current_setting` raises if the setting is missing, so a connection without a tenant is refused instead of
# finding an empty store.
_WHOSE: Final = {"role": "CURRENT_USER", "setting": "current_setting('stm.tenant')"}

# With row security, the tenant becomes part of the foreign key of an entry and of the index of expired
# records. Otherwise a deletion would search the entries of all tenants, and a tenant could insert entries for
# another's record and so hold its lock. NOT VALID skips the check of existing entries. From `tenant =
# CURRENT_USER`, which compares a text and a `name`, the planner does not conclude that the rows of one tenant
# are in index order; from two texts it does.
_STEP_2: Final = """\
-- From layout 1 to layout 2, which layout 1 can still use.
DO $$ BEGIN
    IF (SELECT version < 2 FROM {schema}.stm_layout) THEN
        IF EXISTS (
            SELECT FROM pg_attribute WHERE attrelid = '{schema}.stm_record'::regclass AND attname = 'tenant'
        ) AND to_regclass('{schema}.stm_record_owner') IS NULL THEN
            ALTER TABLE {schema}.stm_record ADD CONSTRAINT stm_record_owner UNIQUE (tenant, id);
            ALTER TABLE {schema}.stm_entry DROP CONSTRAINT stm_entry_record_fkey,
                ADD CONSTRAINT stm_entry_record_fkey FOREIGN KEY (tenant, record)
                REFERENCES {schema}.stm_record (tenant, id) ON DELETE CASCADE NOT VALID;
            IF EXISTS (
                SELECT FROM pg_policy WHERE polrelid = '{schema}.stm_record'::regclass
                AND pg_get_expr(polqual, polrelid) = '(tenant = CURRENT_USER)'
            ) THEN
                ALTER POLICY stm_tenant ON {schema}.stm_record USING (tenant = CURRENT_USER::text);
                ALTER POLICY stm_tenant ON {schema}.stm_entry USING (tenant = CURRENT_USER::text);
            END IF;
        END IF;
        UPDATE {schema}.stm_layout SET version = 2;
    END IF;
END $$;
"""

# An append moves `expires`. If an index had that column, each append would add an entry to every index of the
# table, and leave one to be removed. `due` is the same for a quarter of an hour, so the new row is stored
# next to the old one, in the space that the fill factor keeps free (a HOT update). The server calculates it,
# also for processes of earlier layouts.
_STEP_3: Final = """\
-- From layout 2 to layout 3, which earlier layouts can still use. It rewrites stm_record.
DO $$ BEGIN
    IF (SELECT version < 3 FROM {schema}.stm_layout) THEN
        DROP INDEX IF EXISTS {schema}.stm_record_expires;
        ALTER TABLE {schema}.stm_record SET (fillfactor = {fill}), ADD COLUMN IF NOT EXISTS due timestamptz
            GENERATED ALWAYS AS (date_bin('{due_s} seconds', expires, '2000-01-01 00:00:00+00')) STORED;
        IF EXISTS (
            SELECT FROM pg_attribute WHERE attrelid = '{schema}.stm_record'::regclass AND attname = 'tenant'
        ) THEN
            CREATE INDEX IF NOT EXISTS stm_record_due ON {schema}.stm_record (tenant, due)
                WHERE due IS NOT NULL;
        ELSE
            CREATE INDEX IF NOT EXISTS stm_record_due ON {schema}.stm_record (due) WHERE due IS NOT NULL;
        END IF;
        UPDATE {schema}.stm_layout SET version = 3;
    END IF;
END $$;
"""

_FILL: Final = 70
"""The percentage of a page of records that is filled by new rows; updated rows need the rest."""


def setup(schema: str, row_security: RowSecurity) -> str:
    """Return the script that sets up the tables or brings older ones up to date.

    Running it again changes nothing. With row security, each row belongs to a tenant, and names of different
    tenants do not collide.
    """
    tenant = of_tenant = policies = ""
    if row_security != "off":
        whose = _WHOSE[row_security]
        tenant = f'tenant  text COLLATE "C" NOT NULL DEFAULT {whose},\n    '
        of_tenant = "tenant, "
        policies = "".join(
            _POLICY.replace("{table}", table).replace("{whose}", whose) for table in (RECORD, ENTRY)
        )
    return (
        _SETUP.replace("{tenant}", tenant)
        .replace("{of_tenant}", of_tenant)
        .replace("{policies}", policies)
        .replace("{step_2}", _STEP_2)
        .replace("{step_3}", _STEP_3)
        .replace("{fill}", str(_FILL))
        .replace("{due_s}", str(DUE_S))
        .replace("{schema}", quoted(schema))
    )


class Statements:
    """The statements on the tables of one schema; `schema` is an identifier, which is quoted here."""

    def __init__(self, schema: str) -> None:
        def here(statement: str, whose: str = "", below: str = "", **parts: str) -> str:
            """Fill in the schema, the record and bound for removing entries, and other parts."""
            for name, part in parts.items():
                statement = statement.replace(f"{{{name}}}", part)
            return (
                statement.replace("{swept}", _SWEPT)
                .replace("{end}", _END)
                .replace("{unswept}", _UNSWEPT)
                .replace("{below}", below)
                .replace("{whose}", whose)
                .replace("{entries}", str(STEP_ENTRIES))
                .replace("{bytes}", str(STEP_BYTES))
                .replace("{schema}", quoted(schema))
            )

        self.record = f"{quoted(schema)}.{RECORD}"
        self.entry = f"{quoted(schema)}.{ENTRY}"
        self.layout = f"{quoted(schema)}.{LAYOUT}"
        self.load = here(LOAD, **_ONE)
        self.load_many = here(LOAD, **_MANY)
        self.extend = here(EXTEND)
        self.append = here(APPEND, "record WHERE length = 1", "seq FROM record")
        self.append_many = here(APPEND_MANY)
        self.store = here(STORE, "record", "first FROM record")
        self.fold = here(FOLD, "written", "first FROM written")
        self.rewrite = here(REWRITE)
        self.delete = here(DELETE)
        self.scan = here(SCAN)
        self.next_scope = here(NEXT_SCOPE)
        self.scan_expired = here(SCAN_EXPIRED)
        self.purge = here(PURGE, due="due")
        self.purge_undated = here(PURGE, due="expires")
        self.purge_small = here(PURGE_SMALL, due="due")
        self.purge_small_undated = here(PURGE_SMALL, due="expires")
        self.count_expired = here(COUNT_EXPIRED, due="due")
        self.count_expired_undated = here(COUNT_EXPIRED, due="expires")
        self.sweep = here(SWEEP, "record", "first FROM record")
        self.numbers = here(NUMBERS)


def quoted(identifier: str) -> str:
    """Return a quoted identifier; it may contain any character."""
    return '"' + identifier.replace('"', '""') + '"'
