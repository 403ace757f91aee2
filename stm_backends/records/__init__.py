"""Records on a driver: names, bytes, leases, directories and saved states."""
