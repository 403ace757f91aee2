"""What the driver says to PostgreSQL, and why each operation is atomic.

Each operation is one statement, and a statement outside of a transaction is a transaction. A read sees
one snapshot, in all its parts. A write takes the lock of the record's row first and judges what the row
says *then*, whatever stood there when the statement began:

- `INSERT ... ON CONFLICT DO UPDATE` waits for the row, and reads its newest version in `SET` and `WHERE`.
- `SELECT ... FOR UPDATE` waits for the row, and returns its newest version.

Other parts of the same statement see the snapshot from before the wait. That is why everything that must
be right (the version, the bounds of the tail, its size) stands in the record's row, and why the row with
the lock hands out the numbers under which entries are stored. What the snapshot misses is garbage at
worst: entries outside the bounds, which nobody reads and which the next fold or deletion takes away.

Expiry is judged by `clock_timestamp()`, once, after the lock was taken: `now()` is the time at which the
statement began to wait. Reads do not wait; they use `statement_timestamp()`, which an index can be asked.
"""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

RowSecurity: TypeAlias = Literal["off", "role", "setting"]

RECORD: Final = "stm_record"
ENTRY: Final = "stm_entry"
COMMENT: Final = "stm-backends, schema 1"
"""What the comment on the table of records says, by which its version is known."""

# The body comes with the first row alone. An array of entries would be one row, but is a type that asyncpg
# has to ask the server about on each connection.
LOAD: Final = """
    SELECT version, CASE WHEN seq IS NULL OR seq = first THEN body END AS body, next - first AS length, size,
        entry
    FROM {schema}.stm_record
    LEFT JOIN {schema}.stm_entry ON record = id AND seq >= first AND seq < next
    WHERE scope = $1 AND name = $2 AND (expires IS NULL OR expires > statement_timestamp())
    ORDER BY seq"""

# An expired record is born anew in its old row: the tail begins after the numbers that were in use. Where
# nothing fits, no row is returned and nothing written; `size` is then what the record has, for the error.
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
    ), swept AS (
        DELETE FROM {schema}.stm_entry
        WHERE record = (SELECT id FROM record WHERE length = 1) AND seq < (SELECT seq FROM record)
    ){purge}
    SELECT (SELECT length FROM record) AS length, CASE WHEN NOT EXISTS (SELECT FROM record) THEN
        (SELECT size FROM {schema}.stm_record WHERE scope = $1 AND name = $2)
    END AS size"""

# `replace` without a version: $6 says whether any record may be replaced, or only one that has expired. A
# record that is alive and carries the new version already is written as it was.
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
    ), swept AS (
        DELETE FROM {schema}.stm_entry
        WHERE record = (SELECT id FROM record) AND seq < (SELECT first FROM record)
    ){purge}
    SELECT EXISTS (SELECT FROM record) AS stored"""

# `replace` with a version. The entries to be dropped were read by whoever drops them, so they are in the
# snapshot; where fewer are, the record had fewer when this began, which is a lost race. No row: there is no
# record. Else `may` says whether the condition holds, and `size` what the record would then have.
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
    ), swept AS (
        DELETE FROM {schema}.stm_entry
        WHERE record = (SELECT id FROM written) AND seq < (SELECT first FROM written)
    )
    SELECT version = $3 OR EXISTS (SELECT FROM written) AS stored, may, size FROM plan"""

# The entries go with the record: by a foreign key, whose own query sees what the snapshot may miss.
DELETE: Final = """
    DELETE FROM {schema}.stm_record WHERE scope = $1 AND name = $2 AND ($3::text IS NULL OR version = $3)
    RETURNING expires IS NULL OR expires > clock_timestamp() AS alive"""

SCAN: Final = """
    SELECT name FROM {schema}.stm_record
    WHERE scope = $1 AND name > $2 AND (expires IS NULL OR expires > statement_timestamp())
    ORDER BY name LIMIT $3"""

# Never waits for a record in use, so it is part of no deadlock. The array is made once; a sub-select might
# be run again, and delete more than its limit.
_EXPIRED: Final = """
        DELETE FROM {schema}.stm_record WHERE id = ANY (ARRAY(
            SELECT id FROM {schema}.stm_record WHERE expires <= statement_timestamp(){others}
            ORDER BY expires LIMIT {limit} FOR UPDATE SKIP LOCKED
        ))"""

PURGE: Final = """
    WITH purged AS ({expired}
        RETURNING id
    )
    SELECT count(*) AS purged FROM purged"""

PURGED_IN_PASSING: Final = 32
"""How many expired records a writer removes that passes by."""

# What APPEND and STORE do now and then within the same round trip. Asking for the record's `id` has its
# lock taken before any other, and leaves the record itself alone.
_IN_PASSING: Final = """, purged AS ({expired}
    )"""
_OTHERS: Final = " AND id <> (SELECT id FROM record)"

# How opening sees what is there, without touching it.
LOOK: Final = """
    SELECT found IS NOT NULL AS there, obj_description(found, 'pg_class') AS comment,
        relrowsecurity AS secured, relrowsecurity AND row_security_active(found) AS active,
        current_setting('stm.tenant', true) AS tenant, current_setting('server_encoding') AS encoding
    FROM to_regclass($1) AS found LEFT JOIN pg_class ON pg_class.oid = found"""

# One at a time, because IF NOT EXISTS is no answer to two that create at once: both find nothing, and the
# second fails. The number is the letters `stm`. Sent together, the statements are one transaction. A schema
# that is there must not be asked for: even IF NOT EXISTS needs the right to create it.
_SETUP: Final = """\
SELECT pg_advisory_xact_lock(7566445);
DO $$ BEGIN
    IF to_regnamespace('{schema}') IS NULL THEN CREATE SCHEMA {schema}; END IF;
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
CREATE INDEX IF NOT EXISTS stm_record_expires ON {schema}.stm_record (expires) WHERE expires IS NOT NULL;
CREATE TABLE IF NOT EXISTS {schema}.stm_entry (
    {tenant}record bigint NOT NULL REFERENCES {schema}.stm_record (id) ON DELETE CASCADE,
    seq     bigint NOT NULL,
    entry   bytea NOT NULL,
    PRIMARY KEY ({of_tenant}record, seq)
);
{policies}COMMENT ON TABLE {schema}.stm_record IS '{comment}';
"""

# FORCE, because the policies would not bind the owner of the tables otherwise. Nothing binds a superuser.
_POLICY: Final = """\
ALTER TABLE {schema}.{table} ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY;
DROP POLICY IF EXISTS stm_tenant ON {schema}.{table};
CREATE POLICY stm_tenant ON {schema}.{table} USING (tenant = {whose});
"""

# Whoever asks without a tenant is refused: `current_setting` raises, and finds no nothing.
_WHOSE: Final = {"role": "CURRENT_USER", "setting": "current_setting('stm.tenant')"}


def setup(schema: str, row_security: RowSecurity) -> str:
    """Return what sets up the tables, as a script; running it again changes nothing.

    With row security each row belongs to a tenant, and a tenant's names are its own.
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
        .replace("{comment}", COMMENT)
        .replace("{schema}", quoted(schema))
    )


class Statements:
    """The statements on the tables of one schema; `schema` is an identifier, quoted here."""

    def __init__(self, schema: str) -> None:
        def here(statement: str, *, others: str = "", limit: object = "$1") -> str:
            expired = _EXPIRED.replace("{others}", others).replace("{limit}", str(limit))
            return statement.replace("{expired}", expired).replace("{schema}", quoted(schema))

        def passing(statement: str) -> str:
            purging = statement.replace("{purge}", _IN_PASSING)
            return here(purging, others=_OTHERS, limit=PURGED_IN_PASSING)

        self.record = f"{quoted(schema)}.{RECORD}"
        self.load = here(LOAD)
        self.append = here(APPEND.replace("{purge}", ""))
        self.append_and_purge = passing(APPEND)
        self.store = here(STORE.replace("{purge}", ""))
        self.store_and_purge = passing(STORE)
        self.fold = here(FOLD)
        self.delete = here(DELETE)
        self.scan = here(SCAN)
        self.purge = here(PURGE)


def quoted(identifier: str) -> str:
    """Return an identifier as PostgreSQL reads it, whatever is in it."""
    return '"' + identifier.replace('"', '""') + '"'
