"""A local, read-only page that shows what is stored, and the same page of one conversation as a file.

Only `app` and `serving` need the extra `inspect`.
"""
