"""Run the command line: `python -m stm_backends` is `stm-backends`."""

import runpy

if __name__ == "__main__":
    # By name, because nothing outside the command line imports it; a pod's process then starts from there.
    runpy.run_module("stm_backends.cli", run_name="__main__", alter_sys=True)
