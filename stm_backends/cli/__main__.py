"""Run the command line as a module."""

from stm_backends.cli import main

# The processes of pods import this module as well.
if __name__ == "__main__":
    main()
