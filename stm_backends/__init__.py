"""Conversation memory for agents that run on many machines."""
