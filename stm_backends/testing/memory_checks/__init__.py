"""The checks of the memory profile, by what they are about."""
