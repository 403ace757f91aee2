"""The memory of a conversation that many processes share."""
