"""The commands and scripts of the Redis driver, and the reasons why each operation is atomic.

A record is one list: version, measure, body, and then the tail, oldest entry first. The measure is the text
`LENGTH SIZE BODY`: the number of entries, their bytes, and the bytes of the body (-1 without a body). Reading
a record is one command. Everything else is a script, during which a server runs nothing else.

A scope has one more key, its index: a sorted set with equal scores, which Redis keeps in byte order. A member
is `name NUL expiry`; the expiry is in milliseconds of the server's clock, or empty. No name contains NUL, so
members sort like names, and a listing reads no record.

Scripts use only keys that they declare. Two more rules matter while a slot of a cluster moves. The old server
refuses each command on a key that it no longer has, even in the middle of a script, so scripts read before
they write, and a refused script has changed nothing. And a key that is rewritten is never empty in between,
and a key that has become empty is not read again.
"""

from __future__ import annotations

from hashlib import sha1
from typing import Final, NamedTuple, cast

INDEX_LOOKED_THROUGH: Final = 1_000
"""Maximum size of an index that is scanned when an entry that never expires is removed."""

CORRUPT: Final = "STMCORRUPT"
"""The first word of a script's error about an unreadable record."""


class Statement(NamedTuple):
    """The beginning of a command: with the digest of a script, or in full with its text."""

    command: tuple[str, ...]
    in_full: tuple[str, ...]


def _script(text: str) -> Statement:
    digest = sha1(text.encode(), usedforsecurity=False).hexdigest()
    return Statement(("EVALSHA", digest), ("EVAL", text))


# Sent on opening. Neither names a key, and every user may send HELLO. A script is refused while a server
# loads its data, and for a user without permission to run scripts.
HELLO: Final = ("HELLO",)
GREET: Final = ("EVAL", "return 1", 0)


def is_node_of_cluster(facts: object) -> bool:
    """Return whether the answer to `HELLO` comes from a cluster node; `False` for an error."""
    if isinstance(facts, list):
        listed = cast("list[object]", facts)
        facts = dict(zip(listed[::2], listed[1::2], strict=False))
    return isinstance(facts, dict) and cast("dict[object, object]", facts).get(b"mode") == b"cluster"


# Arguments: record, first, last. One command on one key: a snapshot, in which an expired record is absent.
LOAD: Final = Statement(("LRANGE",), ("LRANGE",))

_MEASURE: Final = """
local function measure(head)
  local length, size, body = string.match(head[2] or '', '^(%d+) (%d+) (-?%d+)$')
  if not length or redis.call('LLEN', KEYS[1]) ~= length + 3 then return nil end
  return tonumber(length), tonumber(size), tonumber(body)
end
"""
# KEYS: record. ARGV: maximum bytes, number of newest entries. Returns the record with only these entries, or
# only version and measure if that exceeds the maximum. Stops reading entries when it is exceeded. A script
# costs the server more than LOAD, so it reads no whole record that is known to be small.
LOAD_SMALL: Final = _script(
    f"""{_MEASURE}
local head, most = redis.call('LRANGE', KEYS[1], 0, 1), tonumber(ARGV[1])
if not head[1] then return head end
local length, size, body = measure(head)
if not length then return redis.error_reply('{CORRUPT}') end
local count = math.min(length, tonumber(ARGV[2]))
local sum, step = math.max(body, 0), math.max(1, math.floor(65536 * length / (size + 1)))
if sum > most or (count == length and sum + size > most) then return head end
if count == length then return redis.call('LRANGE', KEYS[1], 0, -1) end
local found = redis.call('LRANGE', KEYS[1], 0, 2)
for from = 3 + length - count, 2 + length, step do
  for _, entry in ipairs(redis.call('LRANGE', KEYS[1], from, math.min(from + step - 1, 2 + length))) do
    found[#found + 1], sum = entry, sum + #entry
  end
  if sum > most then return head end
end
return found
"""
)

HEAD_ALONE: Final = 2
"""The number of elements that LOAD_SMALL returns for a large record. A whole record has at least three."""

# The time that decides expiry in a script. As in Redis, a record is still alive in its last millisecond.
_NOW: Final = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
"""
# Gives an index a time to live again if all its entries, passed here, expire.
_SETTLE: Final = """
local function settle(index, entries)
  local last = 0
  for _, entry in ipairs(entries) do
    local ends = tonumber(string.match(entry, '%z(%d+)$'))
    if not ends then return end
    last = math.max(last, ends)
  end
  if last > 0 and redis.call('PTTL', index) == -1 then
    redis.call('PEXPIREAT', index, string.format('%.0f', last + 1000))
  end
end
"""
# For the only kind of write that may remove the last entry that never expires. A larger index is left to the
# next listing that reads all of it.
_ANY_LEFT: Final = f"""{_SETTLE}
local function left(old)
  if not old[1] or string.sub(old[1], -1) ~= '\\0' then return end
  local entries = redis.call('ZRANGEBYLEX', KEYS[2], '-', '+', 'LIMIT', 0, {INDEX_LOOKED_THROUGH} + 1)
  if #entries <= {INDEX_LOOKED_THROUGH} then settle(KEYS[2], entries) end
end
"""
# Replaces a name's entry in the index; adds before it removes, see above. The index itself expires a second
# after the last of its records, unless one of them never expires. A write that creates a record checks four
# other entries and removes those that have expired. On average, at most a quarter of all entries have
# expired.
_ENTER: Final = f"""{_NOW}{_ANY_LEFT}
local function expiry(ttl)
  return ttl == '' and '' or string.format('%.0f', now + ttl)
end
local function enter(name, expires)
  local entry = name .. '\\0' .. expires
  if redis.call('ZSCORE', KEYS[2], entry) then return end
  local life = redis.call('PTTL', KEYS[2])
  local old = redis.call('ZRANGEBYLEX', KEYS[2], '[' .. name .. '\\0', '(' .. name .. '\\1')
  redis.call('ZADD', KEYS[2], 0, entry)
  if #old > 0 then
    redis.call('ZREM', KEYS[2], unpack(old))
  else
    for _, other in ipairs(redis.call('ZRANDMEMBER', KEYS[2], 4)) do
      local ends = tonumber(string.match(other, '%z(%d+)$'))
      if ends and ends < now then redis.call('ZREM', KEYS[2], other) end
    end
  end
  if expires == '' then
    redis.call('PERSIST', KEYS[2])
  elseif life == -2 or (life >= 0 and now + life < expires + 1000) then
    redis.call('PEXPIREAT', KEYS[2], string.format('%.0f', expires + 1000))
  elseif life == -1 then
    left(old)
  end
end
local function expire(expires)
  if expires == '' then redis.call('PERSIST', KEYS[1]) else redis.call('PEXPIREAT', KEYS[1], expires) end
end
"""

# KEYS: record, index. ARGV: name, initial version, ttl in ms or '', maximum bytes of a record, entry.
# Returns the new length, or minus the size of a record that would be too large.
APPEND: Final = _script(
    f"""{_MEASURE}{_ENTER}
local name, initial_version, ttl, limit, entry = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), ARGV[5]
local head = redis.call('LRANGE', KEYS[1], 0, 1)
local length, size, body = 0, 0, -1
if head[1] then length, size, body = measure(head) end
if not length then return redis.error_reply('{CORRUPT}') end
length, size = length + 1, size + #entry
if size + math.max(body, 0) > limit then return -(size + math.max(body, 0)) end
local measured, expires = string.format('%d %d %d', length, size, body), expiry(ttl)
enter(name, expires)
if head[1] then
  redis.call('RPUSH', KEYS[1], entry)
  redis.call('LSET', KEYS[1], 1, measured)
else
  redis.call('RPUSH', KEYS[1], initial_version, measured, '', entry)
end
expire(expires)
return length
"""
)

# Adds up the bytes of a record's elements, some at a time.
_BYTES: Final = """\
local function bytes(first, last, step)
  local sum = 0
  for from = first, last, step do
    for _, entry in ipairs(redis.call('LRANGE', KEYS[1], from, math.min(from + step - 1, last))) do
      sum = sum + #entry
    end
  end
  return sum
end
"""

# KEYS: record, index. ARGV: name, version, 'any' or 'absent' or 'is', expected version, drop, ttl in ms or ''
# or 'keep', maximum bytes of a record, body, whether WAIT follows. Returns 1, or 0 for a lost race, or minus
# the size of a record that would be too large.
#
# Only an answer above 0 means that there is a write for WAIT to wait for. Since Redis 7.2, it waits for the
# last write of its own connection. So if this write was already done, perhaps on another connection, the
# version is overwritten with itself.
#
# The remaining bytes are counted on the smaller side of the cut, and in chunks: a server copies one large
# answer to a script many times over.
#
# The new head overwrites the last three elements of the old head and the dropped entries; the elements before
# it are trimmed. The list is never empty, so it keeps its time to live.
REPLACE: Final = _script(
    f"""{_MEASURE}{_ENTER}
local name, version, condition, expected = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local drop, ttl, limit, body = tonumber(ARGV[5]), ARGV[6], tonumber(ARGV[7]), ARGV[8]
local awaited = ARGV[9] == '1'
local head = redis.call('LRANGE', KEYS[1], 0, 1)
local length, size = 0, 0
if head[1] then length, size = measure(head) end
if not length then return redis.error_reply('{CORRUPT}') end
if head[1] == version then
  if awaited then redis.call('LSET', KEYS[1], 0, version) end
  return 1
end
if condition == 'absent' and head[1] then return 0 end
if condition == 'is' and (head[1] ~= expected or drop > length) then return 0 end
{_BYTES}local cut = drop
if condition == 'any' then
  length, size, cut = 0, 0, 0
elseif drop > 0 then
  local step = math.max(1, math.floor(65536 * length / (size + 1)))
  length = length - drop
  if drop <= length then
    size = size - bytes(3, 2 + drop, step)
  else
    size = bytes(3 + drop, 2 + drop + length, step)
  end
end
if size + #body > limit then return -(size + #body) end
local measured = string.format('%d %d %d', length, size, #body)
local expires = (ttl ~= 'keep' or not head[1]) and expiry(ttl == 'keep' and '' or ttl)
if expires then enter(name, expires) end
if head[1] then
  redis.call('LSET', KEYS[1], cut, version)
  redis.call('LSET', KEYS[1], cut + 1, measured)
  redis.call('LSET', KEYS[1], cut + 2, body)
  if condition == 'any' then redis.call('LTRIM', KEYS[1], 0, 2) end
  if cut > 0 then redis.call('LTRIM', KEYS[1], cut, -1) end
else
  redis.call('RPUSH', KEYS[1], version, measured, body)
end
if expires then expire(expires) end
return 1
"""
)

# KEYS: record, index. ARGV: name, version, expected version, ttl in ms or '' or 'keep', maximum bytes of a
# record, body, whether WAIT follows, and the entries that replace the oldest ones. Returns the same as
# REPLACE.
REWRITE: Final = _script(
    f"""{_MEASURE}{_ENTER}
local name, version, expected, ttl = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local limit, body, awaited, before = tonumber(ARGV[5]), ARGV[6], ARGV[7] == '1', 7
local head = redis.call('LRANGE', KEYS[1], 0, 1)
if not head[1] then return 0 end
local length, size = measure(head)
if not length then return redis.error_reply('{CORRUPT}') end
if head[1] == version then
  if awaited then redis.call('LSET', KEYS[1], 0, version) end
  return 1
end
local count = #ARGV - before
if head[1] ~= expected or count > length then return 0 end
{_BYTES}size = size - bytes(3, 2 + count, math.max(1, math.floor(65536 * length / (size + 1))))
for place = 1, count do size = size + #ARGV[before + place] end
if size + #body > limit then return -(size + #body) end
local expires = ttl ~= 'keep' and expiry(ttl)
if expires then enter(name, expires) end
redis.call('LSET', KEYS[1], 0, version)
redis.call('LSET', KEYS[1], 1, string.format('%d %d %d', length, size, #body))
redis.call('LSET', KEYS[1], 2, body)
for place = 1, count do redis.call('LSET', KEYS[1], 2 + place, ARGV[before + place]) end
if expires then expire(expires) end
return 1
"""
)

# KEYS: record, index. ARGV: name, 'any' or 'is', expected version, whether WAIT follows. Returns 1, or 0 for
# another version, or 2 if the record did not exist. A corrupt record can still be erased, unless a version is
# expected.
#
# The record may be missing because this deletion is a retry of one sent on another connection. So, as above,
# something is written for WAIT, and removed again.
DELETE: Final = _script(
    f"""{_ANY_LEFT}
local name, condition, expected, awaited = ARGV[1], ARGV[2], ARGV[3], ARGV[4] == '1'
local there = redis.call('EXISTS', KEYS[1]) == 1
if there and condition == 'is' and redis.call('LINDEX', KEYS[1], 0) ~= expected then return 0 end
local first, beyond = '[' .. name .. '\\0', '(' .. name .. '\\1'
local old = redis.call('ZRANGEBYLEX', KEYS[2], first, beyond)
if old[1] then
  local others = redis.call('ZCARD', KEYS[2]) > #old
  redis.call('ZREM', KEYS[2], unpack(old))
  if others then left(old) end
end
if not there and awaited then redis.call('RPUSH', KEYS[1], '') end
redis.call('UNLINK', KEYS[1])
return there and 1 or 2
"""
)

# KEYS: index. ARGV: after, limit. Returns '' or the start of the next page, and then the names. Expired
# entries are left out and removed, at most as many as a page holds.
SCAN: Final = _script(
    f"""{_NOW}{_SETTLE}
local limit = tonumber(ARGV[2])
local first = ARGV[1] == '' and '-' or '[' .. ARGV[1] .. '\\1'
local found = redis.call('ZRANGEBYLEX', KEYS[1], first, '+', 'LIMIT', 0, limit + 1)
local page = {{''}}
for place, entry in ipairs(found) do
  local name, ends = string.match(entry, '^(.*)%z(%d*)$')
  if not name then return redis.error_reply('{CORRUPT}') end
  local expired = ends ~= '' and tonumber(ends) < now
  if place <= limit then
    if not expired then page[#page + 1] = name end
    if place == limit and #found > limit then page[1] = name end
  end
  if expired then redis.call('ZREM', KEYS[1], entry) end
end
if first == '-' and #found <= limit and page[2] then settle(KEYS[1], found) end
return page
"""
)

# KEYS: index. ARGV: after, limit, '1' to count only. Returns how many of the next `limit` entries have
# expired, and '' or the start of the rest. Removes those entries, and gives the index a time to live again
# if all the remaining ones expire and were read.
TIDY: Final = _script(
    f"""{_NOW}{_SETTLE}
local limit, count_only = tonumber(ARGV[2]), ARGV[3] == '1'
local first = ARGV[1] == '' and '-' or '[' .. ARGV[1] .. '\\1'
local found = redis.call('ZRANGEBYLEX', KEYS[1], first, '+', 'LIMIT', 0, limit + 1)
local expired, left, rest = {{}}, {{}}, ''
for place, entry in ipairs(found) do
  local name, ends = string.match(entry, '^(.*)%z(%d*)$')
  if place > limit then break end
  if ends and ends ~= '' and tonumber(ends) < now then expired[#expired + 1] = entry
  else left[#left + 1] = entry end
  if place == limit and #found > limit then rest = name or entry end
end
if not count_only then
  for _, entry in ipairs(expired) do redis.call('ZREM', KEYS[1], entry) end
  if first == '-' and rest == '' and left[1] then settle(KEYS[1], left) end
end
return {{#expired, rest}}
"""
)
