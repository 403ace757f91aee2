"""The driver for this datastore: not part of this release yet."""
