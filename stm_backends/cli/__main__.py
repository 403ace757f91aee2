"""Run the command line as a module."""

from stm_backends.cli import main

# A pod's process imports this module, too.
if __name__ == "__main__":
    main()
