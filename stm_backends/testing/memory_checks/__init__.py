"""The checks of the memory profile, by subject."""
