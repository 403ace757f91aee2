"""Conversations to list, move, copy and erase."""
