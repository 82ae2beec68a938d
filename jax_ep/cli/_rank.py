"""What each process of `jax_ep.cli.launch` runs: initialise `jax.distributed`, then become the script.

Arguments: coordinator num_processes process_id local_device_id|- (script.py | -m module) args...
"""

import faulthandler
import os
import runpy
import signal
import sys

from jax_ep.cli.launch import end_with_parent


def main() -> None:
    """Never returns normally when the script calls sys.exit."""
    end_with_parent()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    coordinator, num_processes, process_id, local, *command = sys.argv[1:]
    import jax

    jax.distributed.initialize(
        coordinator,
        int(num_processes),
        int(process_id),
        local_device_ids=None if local == "-" else [int(local)],
        initialization_timeout=120,
    )
    if command[0] == "-m":
        sys.argv = command[1:]
        sys.path.insert(0, os.getcwd())  # as python -m does
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = command
        sys.path.insert(0, os.path.dirname(os.path.abspath(command[0])))
        runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    main()
