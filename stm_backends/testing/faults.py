"""Faults on purpose, for tests of a driver and of what is built on it.

`Proxy` stands between clients and a server, and cuts, stalls, delays or loses what passes.
"""

from stm_backends.testing.workbench.proxy import Direction, Fault, LostAnswer, Proxy

__all__ = ["Direction", "Fault", "LostAnswer", "Proxy"]
