"""Where other libraries meet this one: a module for each, behind an extra for each. None is imported here."""
