"""What each process of `jax_ep.cli.launch` runs: initialise `jax.distributed`, then become the script.

Arguments: coordinator num_processes process_id local_device_id|- (script.py | -m module) args...
"""

from __future__ import annotations

import faulthandler
import os
import runpy
import signal
import sys
import traceback

from jax_ep.cli.launch import end_with_parent


def main() -> None:
    """Starts the rank and runs the script in it."""
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
    try:
        _become(command)
    except SystemExit as end:
        if end.code:
            if not isinstance(end.code, int):
                print(end.code, file=sys.stderr)
            _leave(end.code if isinstance(end.code, int) else 1)
    except BaseException:
        traceback.print_exc()
        _leave(1)


def _become(command: list[str]) -> None:
    if command[0] == "-m":
        sys.argv = command[1:]
        sys.path.insert(0, os.getcwd())  # as python -m does
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = command
        sys.path.insert(0, os.path.dirname(os.path.abspath(command[0])))
        runpy.run_path(command[0], run_name="__main__")


def _leave(status: int) -> None:
    """Ends at once: the regular way out waits minutes at a barrier for ranks that may hang on this one."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
