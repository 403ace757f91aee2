"""The catalogue of a user's conversations: a card for each, and an index by last activity."""
