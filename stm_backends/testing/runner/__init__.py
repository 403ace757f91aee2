"""Run the checks with pytest, and report their findings."""
