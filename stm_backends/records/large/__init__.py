"""Values of any size on any driver."""
