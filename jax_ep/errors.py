"""Errors that a run can end with. Static mistakes are plain ValueError, TypeError or NotImplementedError.

A handler's error text begins with the name of one of these classes ("PeerTimeout: dispatch call 17: ...");
`jax_ep.check()` raises the class itself, with what is known in the attributes.
"""

from __future__ import annotations


class EpError(RuntimeError):
    """Base of all run-time errors of jax_ep.

    Attributes (None where unknown): `op` ("dispatch", "redispatch" along a handle, "combine"; halves have the name of
    the whole), `rank` (who reports), `peer` (whom it waited for; `rank` itself where the fault is its own), `call`
    (number of the call in its group and size class, from 1), `phase` of the protocol.
    """

    def __init__(
        self,
        message: str = "",
        *,
        op: str | None = None,
        rank: int | None = None,
        peer: int | None = None,
        call: int | None = None,
        phase: str | None = None,
    ):
        super().__init__(message)
        self.op = op
        self.rank = rank
        self.peer = peer
        self.call = call
        self.phase = phase


class PeerTimeout(EpError):
    """A peer did not come within `Config.timeout_s`, or in a group's first call `Config.first_call_timeout_s`.

    The process stays usable; `jax_ep.reset()` repairs the group.
    """


class PeerLost(EpError):
    """A peer claimed our buffers and never finished: only a restart of the process is safe."""


class MismatchError(EpError):
    """Two ranks met in one call with different operation, shapes, dtype or settings."""


class InvalidIdError(EpError):
    """An id in topk_idx is outside [-1, num_experts): found under `Config.debug_checks`; the group stays usable.

    Example:
      Two ranks, of which rank 1 has an id that no expert has.

      >>> import jax, jax.numpy as jnp, jax_ep
      >>> from jax.sharding import Mesh, PartitionSpec as P
      >>> config = jax_ep.Config(debug_checks=True)
      >>> def count(x, topk_idx):
      ...     recv = jax_ep.dispatch(x, topk_idx, num_experts=4, axis_name="ep", config=config)
      ...     return recv.num_invalid[None]
      >>> mesh = Mesh(jax.devices()[:2], ("ep",))
      >>> run = jax.jit(jax.shard_map(count, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")))
      >>> out = jax.block_until_ready(run(jnp.ones((4, 4)), jnp.array([[0], [1], [4], [2]])))
      >>> out.tolist()
      [0, 1]
      >>> try:
      ...     jax_ep.check()
      ... except jax_ep.errors.InvalidIdError as error:
      ...     print(error.op, error.rank)
      dispatch 1
      >>> jax_ep.reset()
      >>> jax_ep.check()
    """


class PeerFailed(EpError):
    """A peer reported that its own part of this call failed."""


class SetupTimeout(EpError):
    """A peer's set-up record or memory did not appear within `Config.setup_timeout_s`."""


class SetupError(EpError):
    """Buffers, peers or kernels could not be set up; the text says why and what to change."""
