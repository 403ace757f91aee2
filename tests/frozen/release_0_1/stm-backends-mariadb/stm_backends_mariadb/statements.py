"""The tables, and every statement that the driver sends."""

# VARBINARY compares bytes. A text column compares by its collation: `a` = `A`, and `a` = `a `.
SCHEMA = (
    """
CREATE TABLE IF NOT EXISTS stm_record (
    id BIGINT UNSIGNED NOT NULL AUTO_INCREMENT PRIMARY KEY,
    scope VARBINARY(1000) NOT NULL,
    name VARBINARY(1000) NOT NULL,
    version VARBINARY(64) NOT NULL,
    body LONGBLOB NULL,
    expires DATETIME(6) NULL,
    first BIGINT UNSIGNED NOT NULL,
    next BIGINT UNSIGNED NOT NULL,
    size BIGINT UNSIGNED NOT NULL,
    UNIQUE KEY stm_record_key (scope, name),
    KEY stm_record_expires (expires)
) ENGINE=InnoDB""",
    """
CREATE TABLE IF NOT EXISTS stm_entry (
    record BIGINT UNSIGNED NOT NULL,
    seq BIGINT UNSIGNED NOT NULL,
    entry LONGBLOB NOT NULL,
    PRIMARY KEY (record, seq),
    FOREIGN KEY (record) REFERENCES stm_record (id) ON DELETE CASCADE
) ENGINE=InnoDB""",
)

SESSION = """
SET tx_isolation = 'READ-COMMITTED', sql_mode = 'STRICT_ALL_TABLES',
    innodb_lock_wait_timeout = {seconds}, idle_transaction_timeout = {seconds}"""

READY = """
SELECT @@max_allowed_packet, (SELECT COUNT(*) FROM stm_record WHERE id = 0),
    (SELECT COUNT(*) FROM stm_entry WHERE record = 0)"""

ALIVE = "(expires IS NULL OR expires > UTC_TIMESTAMP(6))"

# One statement reads one snapshot. Only the first row carries the body.
LOAD = f"""
SELECT version, IF(seq IS NULL OR seq = first, body, NULL), next - first, size, entry
FROM stm_record LEFT JOIN stm_entry ON record = id AND seq >= first
WHERE scope = %s AND name = %s AND {ALIVE}
ORDER BY seq"""

SCAN = f"""
SELECT name FROM stm_record WHERE scope = %s AND name > %s AND {ALIVE} ORDER BY name LIMIT %s"""

LOCK = "SELECT id FROM stm_record WHERE scope = %s AND name = %s FOR UPDATE"

# Expired from the start, so it exists for no reader. If another writer creates the row, this waits for it.
CREATE = """
INSERT INTO stm_record (scope, name, version, expires, first, next, size)
VALUES (%s, %s, '', '1970-01-01', 0, 0, 0) ON DUPLICATE KEY UPDATE id = id"""

# Sent after the lock was granted: UTC_TIMESTAMP is the time at which its statement began.
FIND = f"""
SELECT id, version, {ALIVE}, first, next, size, COALESCE(LENGTH(body), 0)
FROM stm_record WHERE scope = %s AND name = %s"""

END = "UTC_TIMESTAMP(6) + INTERVAL %s MICROSECOND"  # NULL if the number is NULL: the record does not expire

ADD = "INSERT INTO stm_entry (record, seq, entry) VALUES (%s, %s, %s)"

APPENDED = f"""
UPDATE stm_record
SET version = %s, body = IF(%s, body, NULL), first = %s, next = %s, size = %s, expires = {END}
WHERE id = %s"""

DROP = "DELETE FROM stm_entry WHERE record = %s AND seq < %s"

# How many entries the tail has, their bytes, and the bytes of those that stay.
TAIL = """
SELECT COUNT(*), CAST(COALESCE(SUM(LENGTH(entry)), 0) AS UNSIGNED),
    CAST(COALESCE(SUM(IF(seq < %s, 0, LENGTH(entry))), 0) AS UNSIGNED)
FROM stm_entry WHERE record = %s AND seq >= %s"""

REPLACED = f"""
UPDATE stm_record SET version = %s, body = %s, first = %s, size = %s, expires = IF(%s, expires, {END})
WHERE id = %s"""

DELETE = "DELETE FROM stm_record WHERE id = %s"

PURGE = "DELETE FROM stm_record WHERE expires <= UTC_TIMESTAMP(6) ORDER BY expires LIMIT 10"
