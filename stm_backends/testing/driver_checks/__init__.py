"""The checks of the driver profile, by what they are about."""
