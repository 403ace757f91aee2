"""The memory of a conversation in this process."""
