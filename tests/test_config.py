"""Config: what it accepts, that it is a value, and that equal ones compile once."""

import copy
import doctest
import pickle

import numpy as np
import pytest

import jax_ep
from jax_ep import testing


def test_example():
    """The worked example of the docstring."""
    (example,) = doctest.DocTestFinder(recurse=False).find(jax_ep.Config, "Config", globs={})
    assert example.examples and doctest.DocTestRunner().run(example).failed == 0


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("num_sms", 0, ValueError),
        ("num_sms", -4, ValueError),
        ("num_sms", 2.0, TypeError),
        ("num_sms", True, TypeError),
        ("setup_timeout_s", 0, ValueError),
        ("first_call_timeout_s", float("inf"), ValueError),
        ("timeout_s", float("nan"), ValueError),
        ("timeout_s", "1", TypeError),
        ("staging_bytes", 0, ValueError),
        ("staging_bytes", 1.5, TypeError),
        ("max_pending", 0, ValueError),
        ("max_pending", 65, ValueError),
        ("max_pending", 2.0, TypeError),
        ("staging", "never", ValueError),
        ("copies", "bulk", ValueError),
        ("debug_checks", 1, TypeError),
        ("command_buffers", 0, TypeError),
        ("command_buffers", "auto", TypeError),
        ("ranks_per_node", 0, ValueError),
        ("ranks_per_node", -2, ValueError),
        ("ranks_per_node", 2.0, TypeError),
        ("ranks_per_node", True, TypeError),
        ("transport", "ucx", ValueError),
        ("nvshmem_bytes", 0, ValueError),
        ("nvshmem_qps", 65, ValueError),
        ("nvshmem_qps", 0, ValueError),
        ("nvshmem_qp_depth", 64, ValueError),
        ("nvshmem_qp_depth", 1000, ValueError),
        ("nvshmem_qp_depth", 1 << 16, ValueError),
        ("nvshmem_service_level", 16, ValueError),
        ("nvshmem_service_level", False, TypeError),
        ("nvshmem_traffic_class", -1, ValueError),
        ("nvshmem_hcas", "mlx5_0", TypeError),
        ("nvshmem_hcas", ("mlx5_0,mlx5_1",), ValueError),
    ],
)
def test_mistakes_name_the_knob(name, value, error):
    with pytest.raises(error, match=rf"Config: .*{name}"):
        jax_ep.Config(**{name: value})


def test_equal_configs_are_one_value():
    """B50: hash, equality, pickle, copy and deepcopy go by value."""
    config = jax_ep.Config(num_sms=8, timeout_s=1)
    for other in (jax_ep.Config(num_sms=8, timeout_s=1.0), pickle.loads(pickle.dumps(config)), copy.deepcopy(config)):
        assert other == config and hash(other) == hash(config)
    assert config != jax_ep.Config(num_sms=9, timeout_s=1)


def test_equal_configs_compile_once(make_mesh):
    """B50: ten steps with a fresh but equal config trace and compile once; another config compiles apart."""
    import jax

    traced = []

    def step(x, idx, config):
        traced.append(config)
        send = lambda x, idx: jax_ep.dispatch(x, idx, num_experts=2, axis_name="ep", config=config).counts
        return testing.on_ranks(send, make_mesh(2), jit=False)(x, idx)

    step = jax.jit(step, static_argnums=2)
    x, idx = np.zeros((2, 4, 4), np.float32), np.zeros((2, 4, 1), np.int32)
    for _ in range(10):
        step(x, idx, jax_ep.Config(num_sms=4))
    assert len(traced) == step._cache_size() == 1
    step(x, idx, jax_ep.Config(num_sms=5))
    assert len(traced) == step._cache_size() == 2
