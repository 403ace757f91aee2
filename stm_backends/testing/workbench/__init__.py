"""Tools for checks."""
