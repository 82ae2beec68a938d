"""Commands of `python -m jax_ep`: doctor, launch, topology, bench."""

from __future__ import annotations

import importlib
import sys

COMMANDS = {
    "doctor": "what is installed, which devices are there, and whether the CUDA path can be used",
    "launch": "run a script on several local ranks, each with jax.distributed initialised",
    "topology": "which rank is where, how pairs of ranks are linked, and how fast they are",
    "bench": "time dispatch and combine against what XLA offers",
}


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns its exit status."""
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in COMMANDS:
        return importlib.import_module(f"jax_ep.cli.{argv[0]}").main(argv[1:])
    print("usage: python -m jax_ep COMMAND [--help]\n")
    print("\n".join(f"  {name:9} {text}" for name, text in COMMANDS.items()))
    return 0 if argv and argv[0] in ("-h", "--help") else 2
