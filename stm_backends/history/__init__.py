"""Histories that agent frameworks keep, item by item."""
