"""Observers of memories and drivers: counters, durations and traces."""
