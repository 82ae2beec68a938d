"""jax_ep/group.py: which device is which rank. Pure functions of the mesh, on 8 virtual CPU devices.

Covers: one axis, several axes as one in any order, strided subsets, one group and groups of one, partial-manual
shard_map, set_mesh, agreement with lax.axis_index, errors (abstract mesh, outside shard_map, unknown and repeated
axis), arena keys.
"""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ep import group


def make_mesh(shape, names, order=slice(None)):
    devices = np.array(jax.devices())[order][: np.prod(shape)]
    return Mesh(devices.reshape(shape), names, axis_types=(AxisType.Auto,) * len(names))


def ordinals(groups):
    assert {process for one in groups for process, _ in one} == {0}
    return [[device for _, device in one] for one in groups]


def test_one_axis():
    mesh = make_mesh((2, 4), ("dp", "ep"))
    assert ordinals(group.mesh_groups(mesh, "ep")) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert ordinals(group.mesh_groups(mesh, ("ep",))) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_strided_axis():
    mesh = make_mesh((2, 2, 2), ("dp", "ep", "tp"))
    assert ordinals(group.mesh_groups(mesh, "ep")) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert ordinals(group.mesh_groups(mesh, "dp")) == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_several_axes_count_major_first():
    mesh = make_mesh((2, 2, 2), ("a", "b", "c"))
    assert ordinals(group.mesh_groups(mesh, ("a", "c"))) == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert ordinals(group.mesh_groups(mesh, ("c", "a"))) == [[0, 4, 1, 5], [2, 6, 3, 7]]
    assert ordinals(group.mesh_groups(mesh, ("a", "b", "c"))) == [list(range(8))]


def test_subset_of_devices_in_another_order():
    mesh = make_mesh((2, 2), ("dp", "ep"), order=[7, 1, 0, 4])
    assert ordinals(group.mesh_groups(mesh, "ep")) == [[7, 1], [0, 4]]


def test_groups_of_one():
    assert ordinals(group.mesh_groups(make_mesh((8, 1), ("dp", "ep")), "ep")) == [[i] for i in range(8)]


def test_members_are_positions_within_a_process():
    # Device ids of several processes are 0, 1, 2048, 2049, and what one process sees of another's hardware id is
    # no ordinal there: members count each process's devices by id.
    client = types.SimpleNamespace()
    devices = [
        types.SimpleNamespace(id=id, process_index=process, client=client, local_hardware_id=-1)
        for id, process in [(2049, 1), (0, 0), (2048, 1), (1, 0)]
    ]
    client.devices = lambda: devices
    assert [group.member(d) for d in devices] == [(1, 1), (0, 0), (1, 0), (0, 1)]
    assert group.member(types.SimpleNamespace(id=5, process_index=0)) == (0, 5)  # of a topology description
    groups = (((0, 1), (2, 0)), ((2, 3), (0, 0)))
    assert group.processes(groups) == (0, 2)
    assert group.local_devices(groups, 2) == (0, 3)
    assert group.local_devices(groups, 1) == ()
    np.testing.assert_array_equal(group.flat_groups(groups), [0, 1, 2, 0, 2, 3, 0, 0])
    assert group.flat_groups(groups).dtype == np.int64


# A primitive whose lowering rule records what jax_ep's own rules will see.
seen = []
probe_p = Primitive("group_probe")
probe_p.def_abstract_eval(lambda x, axis_name: x)


def _probe_lowering(ctx, x, axis_name):
    seen.append(group.lowering_groups(ctx.module_context.axis_context, axis_name))
    return [x]


mlir.register_lowering(probe_p, _probe_lowering)


def lowered_groups(body, mesh, x=None, *, axis_names=frozenset(), in_specs=P(), out_specs=P(), **kwargs):
    seen.clear()
    x = jnp.zeros(8) if x is None else x
    f = jax.shard_map(
        body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=axis_names, check_vma=False, **kwargs
    )
    jax.jit(f).lower(x)
    (found,) = seen
    return found


@pytest.mark.parametrize("axis_name", [("ep",), ("dp",), ("ep", "dp"), ("dp", "tp"), ("tp", "ep", "dp")])
def test_ranks_are_those_of_axis_index(axis_name):
    mesh = make_mesh((2, 2, 2), ("dp", "ep", "tp"))
    groups = lowered_groups(lambda x: probe_p.bind(x, axis_name=axis_name), mesh)
    index = jax.jit(
        jax.shard_map(
            lambda: lax.axis_index(axis_name).reshape(1, 1, 1), mesh=mesh, in_specs=(), out_specs=P("dp", "ep", "tp")
        )
    )()
    for device, rank in zip(mesh.devices.flat, np.asarray(index).flat, strict=True):
        ranks = [one.index(group.member(device)) for one in groups if group.member(device) in one]
        assert ranks == [rank]


def test_partial_manual_mesh_has_all_groups():
    mesh = make_mesh((2, 4), ("dp", "ep"))
    found = lowered_groups(lambda x: probe_p.bind(x, axis_name=("ep",)), mesh, axis_names={"ep"})
    assert ordinals(found) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_current_mesh_serves_without_argument():
    mesh = make_mesh((2, 4), ("dp", "ep"))
    seen.clear()
    with jax.set_mesh(mesh):
        f = jax.shard_map(lambda x: probe_p.bind(x, axis_name="ep"), in_specs=P(), out_specs=P(), check_vma=False)
        jax.jit(f).lower(jnp.zeros(8))
    assert ordinals(seen[0]) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_nested_shard_map_under_current_mesh():
    mesh = make_mesh((2, 4), ("dp", "ep"))

    def outer(x):
        inner = jax.shard_map(
            lambda y: probe_p.bind(y, axis_name="ep"),
            in_specs=P(),
            out_specs=P(),
            axis_names={"ep"},
            check_vma=False,
        )
        return inner(x)

    with jax.set_mesh(mesh):
        found = lowered_groups(outer, None, axis_names={"dp"})
    assert ordinals(found) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_abstract_mesh_is_refused():
    mesh = make_mesh((8,), ("ep",))
    x = jax.device_put(jnp.zeros(8), NamedSharding(mesh, P("ep")))
    with pytest.raises(ValueError, match=r"axis 'ep' needs to know its devices.*jax\.set_mesh"):
        lowered_groups(
            lambda x: probe_p.bind(x, axis_name="ep"), mesh.abstract_mesh, x, in_specs=P("ep"), out_specs=P("ep")
        )
    with pytest.raises(ValueError, match="axis 'ep'.*AbstractMesh.*concrete"):
        group.mesh_groups(mesh.abstract_mesh, "ep")


def test_outside_shard_map_is_refused():
    with pytest.raises(ValueError, match=r"axis 'ep' is used outside jax\.shard_map"):
        jax.jit(lambda x: probe_p.bind(x, axis_name="ep")).lower(jnp.zeros(8))


def test_unknown_and_repeated_axes_are_refused():
    mesh = make_mesh((2, 4), ("dp", "ep"))
    with pytest.raises(ValueError, match=r"'expert' is not an axis of the mesh; got axes \('dp', 'ep'\)"):
        group.mesh_groups(mesh, "expert")
    for axes in (("ep", "ep"), ()):
        with pytest.raises(ValueError, match="distinct mesh axes"):
            group.mesh_groups(mesh, axes)


def test_arena_key_names_placement_and_size_class():
    one, two = (((0, 0), (0, 1)),), (((0, 1), (0, 0)),)
    key = group.arena_key(one, (512, 1 << 24, 0), protocol=1)
    assert len(key) == 32 and int(key, 16) >= 0
    assert key == group.arena_key([[[0, 0], [0, np.int64(1)]]], (np.int32(512), 1 << 24, 0), protocol=1)
    others = {
        group.arena_key(two, (512, 1 << 24, 0), protocol=1),
        group.arena_key((((0, 0),), ((0, 1),)), (512, 1 << 24, 0), protocol=1),
        group.arena_key(one, (1024, 1 << 24, 0), protocol=1),
        group.arena_key(one, (512, 1 << 25, 0), protocol=1),
        group.arena_key(one, (512, 1 << 24, 2), protocol=1),
        group.arena_key(one, (512, 1 << 24, 0), protocol=2),
    }
    assert len(others) == 6 and key not in others
