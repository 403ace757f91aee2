"""Encryption of everything that a backend stores: a driver around the driver, and the sources of its keys.

`driver` seals values on writing and opens them on reading. `cipher` is the format, one value at a time.
`keys` has the protocol of a source of keys and the keys of one process; `data_keys` has keys per tenant or
user that are stored wrapped, and `wrapping` wraps them. `marks` refuses wrong keys before a write, and
`stale` finds keys that were erased meanwhile. It needs the extra `encryption`.
"""
