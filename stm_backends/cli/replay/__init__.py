"""The command `replay`: conversations on several processes, verified by reading them back."""
