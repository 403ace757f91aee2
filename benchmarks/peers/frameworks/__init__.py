"""What frameworks have for storing sessions, beside our integrations, through the same interfaces."""
