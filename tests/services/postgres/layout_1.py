"""Layout 1, as the first releases of the driver set it up and used it.

A store in this layout is upgraded in `test_layouts.py`, while these statements go on.
"""

LOAD = """
    SELECT version, CASE WHEN seq IS NULL OR seq = first THEN body END AS body, next - first AS length, size,
        entry
    FROM {schema}.stm_record
    LEFT JOIN {schema}.stm_entry ON record = id AND seq >= first AND seq < next
    WHERE scope = $1 AND name = $2 AND (expires IS NULL OR expires > statement_timestamp())
    ORDER BY seq"""

FOLD = """
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

DELETE = """
    DELETE FROM {schema}.stm_record WHERE scope = $1 AND name = $2 AND ($3::text IS NULL OR version = $3)
    RETURNING expires IS NULL OR expires > clock_timestamp() AS alive"""

SCAN = """
    SELECT name FROM {schema}.stm_record
    WHERE scope = $1 AND name > $2 AND (expires IS NULL OR expires > statement_timestamp())
    ORDER BY name LIMIT $3"""

APPEND = """
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
    ), purged AS (
        DELETE FROM {schema}.stm_record WHERE id = ANY (ARRAY(
            SELECT id FROM {schema}.stm_record
            WHERE expires <= statement_timestamp() AND id <> (SELECT id FROM record)
            ORDER BY expires LIMIT 32 FOR UPDATE SKIP LOCKED
        ))
    )
    SELECT (SELECT length FROM record) AS length, CASE WHEN NOT EXISTS (SELECT FROM record) THEN
        (SELECT size FROM {schema}.stm_record WHERE scope = $1 AND name = $2)
    END AS size"""

STORE = """
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
    ), purged AS (
        DELETE FROM {schema}.stm_record WHERE id = ANY (ARRAY(
            SELECT id FROM {schema}.stm_record
            WHERE expires <= statement_timestamp() AND id <> (SELECT id FROM record)
            ORDER BY expires LIMIT 32 FOR UPDATE SKIP LOCKED
        ))
    )
    SELECT EXISTS (SELECT FROM record) AS stored"""

LOOK = """
    SELECT found IS NOT NULL AS there, obj_description(found, 'pg_class') AS comment,
        relrowsecurity AS secured, relrowsecurity AND row_security_active(found) AS active,
        current_setting('stm.tenant', true) AS tenant, current_setting('server_encoding') AS encoding
    FROM to_regclass($1) AS found LEFT JOIN pg_class ON pg_class.oid = found"""

SETUP = """SELECT pg_advisory_xact_lock(7566445);
DO $$ BEGIN
    IF to_regnamespace('{schema}') IS NULL THEN CREATE SCHEMA {schema}; END IF;
END $$;
CREATE TABLE IF NOT EXISTS {schema}.stm_record (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    scope   text COLLATE "C" NOT NULL,
    name    text COLLATE "C" NOT NULL,
    version text NOT NULL,
    body    bytea,
    expires timestamptz,
    first   bigint NOT NULL,
    next    bigint NOT NULL,
    size    bigint NOT NULL,
    CONSTRAINT stm_record_key UNIQUE (scope, name)
);
CREATE INDEX IF NOT EXISTS stm_record_expires ON {schema}.stm_record (expires) WHERE expires IS NOT NULL;
CREATE TABLE IF NOT EXISTS {schema}.stm_entry (
    record bigint NOT NULL REFERENCES {schema}.stm_record (id) ON DELETE CASCADE,
    seq     bigint NOT NULL,
    entry   bytea NOT NULL,
    PRIMARY KEY (record, seq)
);
COMMENT ON TABLE {schema}.stm_record IS 'stm-backends, schema 1';
"""

SETUP_BY_ROLE = """SELECT pg_advisory_xact_lock(7566445);
DO $$ BEGIN
    IF to_regnamespace('{schema}') IS NULL THEN CREATE SCHEMA {schema}; END IF;
END $$;
CREATE TABLE IF NOT EXISTS {schema}.stm_record (
    tenant  text COLLATE "C" NOT NULL DEFAULT CURRENT_USER,
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    scope   text COLLATE "C" NOT NULL,
    name    text COLLATE "C" NOT NULL,
    version text NOT NULL,
    body    bytea,
    expires timestamptz,
    first   bigint NOT NULL,
    next    bigint NOT NULL,
    size    bigint NOT NULL,
    CONSTRAINT stm_record_key UNIQUE (tenant, scope, name)
);
CREATE INDEX IF NOT EXISTS stm_record_expires ON {schema}.stm_record (expires) WHERE expires IS NOT NULL;
CREATE TABLE IF NOT EXISTS {schema}.stm_entry (
    tenant  text COLLATE "C" NOT NULL DEFAULT CURRENT_USER,
    record bigint NOT NULL REFERENCES {schema}.stm_record (id) ON DELETE CASCADE,
    seq     bigint NOT NULL,
    entry   bytea NOT NULL,
    PRIMARY KEY (tenant, record, seq)
);
ALTER TABLE {schema}.stm_record ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY;
DROP POLICY IF EXISTS stm_tenant ON {schema}.stm_record;
CREATE POLICY stm_tenant ON {schema}.stm_record USING (tenant = CURRENT_USER);
ALTER TABLE {schema}.stm_entry ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY;
DROP POLICY IF EXISTS stm_tenant ON {schema}.stm_entry;
CREATE POLICY stm_tenant ON {schema}.stm_entry USING (tenant = CURRENT_USER);
COMMENT ON TABLE {schema}.stm_record IS 'stm-backends, schema 1';
"""

SETUP_BY_SETTING = """SELECT pg_advisory_xact_lock(7566445);
DO $$ BEGIN
    IF to_regnamespace('{schema}') IS NULL THEN CREATE SCHEMA {schema}; END IF;
END $$;
CREATE TABLE IF NOT EXISTS {schema}.stm_record (
    tenant  text COLLATE "C" NOT NULL DEFAULT current_setting('stm.tenant'),
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    scope   text COLLATE "C" NOT NULL,
    name    text COLLATE "C" NOT NULL,
    version text NOT NULL,
    body    bytea,
    expires timestamptz,
    first   bigint NOT NULL,
    next    bigint NOT NULL,
    size    bigint NOT NULL,
    CONSTRAINT stm_record_key UNIQUE (tenant, scope, name)
);
CREATE INDEX IF NOT EXISTS stm_record_expires ON {schema}.stm_record (expires) WHERE expires IS NOT NULL;
CREATE TABLE IF NOT EXISTS {schema}.stm_entry (
    tenant  text COLLATE "C" NOT NULL DEFAULT current_setting('stm.tenant'),
    record bigint NOT NULL REFERENCES {schema}.stm_record (id) ON DELETE CASCADE,
    seq     bigint NOT NULL,
    entry   bytea NOT NULL,
    PRIMARY KEY (tenant, record, seq)
);
ALTER TABLE {schema}.stm_record ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY;
DROP POLICY IF EXISTS stm_tenant ON {schema}.stm_record;
CREATE POLICY stm_tenant ON {schema}.stm_record USING (tenant = current_setting('stm.tenant'));
ALTER TABLE {schema}.stm_entry ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY;
DROP POLICY IF EXISTS stm_tenant ON {schema}.stm_entry;
CREATE POLICY stm_tenant ON {schema}.stm_entry USING (tenant = current_setting('stm.tenant'));
COMMENT ON TABLE {schema}.stm_record IS 'stm-backends, schema 1';
"""
