"""A package, so that no other one of this name comes first in a worker process."""
