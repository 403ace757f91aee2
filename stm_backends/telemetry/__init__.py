"""What memories and drivers report."""
