"""The checks of the driver profile, by subject."""
