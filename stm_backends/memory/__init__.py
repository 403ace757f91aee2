"""The decisions and the view of a memory, and the memories themselves."""
