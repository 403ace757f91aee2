"""Conversation memory in etcd 3.4 and later, by the JSON gateway that each of its servers has."""
