"""Everything that depends on the version of JAX, or reaches below its public interface."""

from __future__ import annotations

import math

import jax
from jax import lax
from jax._src import config as _jax_config
from jax._src import core as _core
from jax._src.interpreters import partial_eval as _partial_eval
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec

NamedAxisEffect = _core.NamedAxisEffect


def varying_axes(x) -> frozenset[str]:
    """Manual mesh axes over which `x` (an array or an aval) varies; empty when vma is not tracked."""
    aval = x if isinstance(x, _core.AbstractValue) else jax.typeof(x)
    if hasattr(aval, "mat"):  # jax >= 0.10
        return frozenset(aval.mat.varying)
    return frozenset(aval.vma)


def vary_together(arrays, axes: tuple[str, ...]):
    """Marks all arrays of a pytree as varying over `axes` and over every axis that one of them varies over."""
    if not _jax_config._check_vma.value:
        return arrays
    union = frozenset(axes).union(*(varying_axes(a) for a in jax.tree.leaves(arrays)))

    def vary(a):
        missing = tuple(sorted(union - varying_axes(a)))
        if not missing:
            return a
        return lax.pcast(a, missing, to="varying") if hasattr(lax, "pcast") else lax.pvary(a, missing)

    return jax.tree.map(vary, arrays)


def axis_size(axis_names: tuple[str, ...]) -> int | None:
    """Number of ranks over the axes, or None when one of them is not bound here."""
    try:
        return math.prod(lax.axis_size(name) for name in axis_names)
    except NameError:
        return None


def result_aval(like, shape: tuple[int, ...], dtype):
    """Abstract value of a result that varies like the operand `like`."""
    sharding = NamedSharding(like.sharding.mesh, PartitionSpec(*[None] * len(shape)))
    return like.update(shape=shape, dtype=jax.numpy.dtype(dtype), weak_type=False, sharding=sharding)


def explicit_axes(x) -> tuple[str, ...]:
    """Mesh axes of type Explicit over which `x` is sharded here (a shard_map that left them out)."""
    names = []
    for entry in jax.typeof(x).sharding.spec:
        names += [] if entry is None else [entry] if isinstance(entry, str) else list(entry)
    return tuple(names)


def lower_fun_unchecked(fun):
    """`mlir.lower_fun` for a body that mixes constants with varying values.

    The types of the results are fixed by the primitive's abstract evaluation, so the body itself is traced
    without tracking which values vary.
    """
    rule = mlir.lower_fun(fun, multiple_results=True)

    def strip(aval):
        if hasattr(aval, "mat"):
            return aval.update(manual_axis_type=_core.empty_mat)
        return aval.update(vma=frozenset())

    def lowered(ctx, *args, **params):
        with _jax_config._check_vma(False):
            return rule(ctx.replace(avals_in=[strip(a) for a in ctx.avals_in]), *args, **params)

    return lowered


def keep_halves_together(start_p, done_p, whole_p) -> None:
    """Makes JAX neither drop nor repeat one of two primitives, start and done, without the other.

    A done is kept even where its results are unused, and with it its start: a barrier may need the start's result.
    What `jax.checkpoint` recomputes is the whole exchange in one primitive, and the start's result is saved (one of the
    barriers around it may be recomputed alone).
    """

    def keep(used_outs, *args):
        eqn = args[-1]  # jax 0.12 says before it which operands are alive
        return [True] * len(eqn.invars), eqn

    def residuals(invars, inst_in):
        return [x for x, is_there in zip(invars, inst_in, strict=True) if isinstance(x, _core.Var) and not is_there]

    def recompute(saveable, unks_in, inst_in, eqn):
        outs = [False] * len(eqn.outvars)
        if any(unks_in):
            unknown = [True] * len(eqn.outvars)
            return None, eqn, unknown, unknown, residuals(eqn.invars, inst_in)
        policy = _partial_eval.ensure_enum(saveable(eqn.primitive, *[x.aval for x in eqn.invars], **eqn.params))
        if eqn.primitive is start_p or not isinstance(policy, _partial_eval.RecomputeType):
            return eqn, None, outs, outs, []
        whole = eqn.replace(primitive=whole_p, invars=eqn.invars[1:])
        return eqn, whole, outs, [True] * len(outs), residuals(whole.invars, inst_in[1:])

    _partial_eval.dce_rules[done_p] = keep
    for primitive in (start_p, done_p):
        _partial_eval.partial_eval_jaxpr_custom_rules[primitive] = recompute


def vary_with_handle(arrays: tuple, handle):
    """`vary_together` over arrays and the arrays of a handle; returns the arrays, then the handle."""
    return vary_together((*arrays, handle), handle.spec.axis_name)
