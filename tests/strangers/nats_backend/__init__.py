"""Conversation memory in a stream of NATS JetStream: one message for each record."""
