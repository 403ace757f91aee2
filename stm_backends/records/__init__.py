"""Records on a driver: names, bytes, directories and saved states."""
