"""What checks work with."""
