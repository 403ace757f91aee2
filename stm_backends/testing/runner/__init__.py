"""Run the checks by pytest, and report what they found."""
