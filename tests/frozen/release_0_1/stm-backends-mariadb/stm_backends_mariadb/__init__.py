"""Conversation memory in MariaDB."""
