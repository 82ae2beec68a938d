"""`import jax_ep`: what it offers, and that it starts nothing."""

import subprocess
import sys

import pytest

import jax_ep

SCRIPT = """
import jax, jax_ep
from jax._src import xla_bridge
assert not xla_bridge._backends, xla_bridge._backends
jax_ep.check()
jax_ep.reset()
assert set(jax_ep.debug.stats()) >= {"calls", "staged_calls", "setup_ms"}
"""


@pytest.mark.multiprocess
def test_import_starts_no_backend():
    """The first computation belongs to the user, who may still want to set platforms or jax.distributed."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


DOCUMENTED = (
    jax_ep.dispatch,
    jax_ep.combine,
    jax_ep.make_mesh,
    jax_ep.quantize,
    jax_ep.routing_layout,
    jax_ep.windowed,
)


def test_public_names():
    """Functions are functions, although modules have their names."""
    assert all(callable(f) for f in (*DOCUMENTED, jax_ep.check, jax_ep.reset))
    for name in ("Config", "Handle", "Quantized", "Recv", "RoutingLayout"):
        assert isinstance(getattr(jax_ep, name), type)
    for name in ("PeerTimeout", "PeerLost", "MismatchError", "PeerFailed", "SetupTimeout", "SetupError"):
        assert issubclass(getattr(jax_ep.errors, name), jax_ep.errors.EpError)
    for function in DOCUMENTED:
        for section in ("Example:", "Args:", "Returns:", "Raises:", "Notes:", "Source:"):
            assert section in function.__doc__
