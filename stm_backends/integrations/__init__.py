"""Integrations with other libraries: one module and one extra for each. None is imported here."""
