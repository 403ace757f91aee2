"""Conversation memory in an LMDB environment: a folder that many processes of one machine share."""
