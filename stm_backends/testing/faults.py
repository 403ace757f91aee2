"""Deliberate faults, for tests of a driver and of software built on it.

`Proxy` stands between clients and a server, and cuts, stalls, delays, holds or loses their traffic.
"""

from stm_backends.testing.workbench.proxy import Direction, Fault, HeldAnswer, LostAnswer, Proxy

__all__ = ["Direction", "Fault", "HeldAnswer", "LostAnswer", "Proxy"]
