"""`python -m jax_ep COMMAND`: see `jax_ep/cli`, one command per file."""

import sys

from jax_ep.cli import main

if __name__ == "__main__":
    sys.exit(main())
