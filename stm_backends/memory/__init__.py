"""What a memory decides and shows, and the memories themselves."""
