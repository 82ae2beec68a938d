"""Config.debug_checks: invalid ids become errors, results stay the same, and nothing is exchanged where ranks differ.

Programs of ranks that differ need several processes: tests/multi/test_mismatch.py.
"""

import dataclasses
import doctest

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exchange_cases import ExchangeCases, Sizes
from jax import lax

import jax_ep
from jax_ep import debug_checks, errors, testing

CONFIG = jax_ep.Config(debug_checks=True)
NUM_EXPERTS = 8


@pytest.fixture(autouse=True)
def _no_failures():
    jax_ep.reset()
    yield
    jax_ep.reset()


def test_example():
    """The worked example of the docstring."""
    (example,) = doctest.DocTestFinder().find(errors.InvalidIdError, "InvalidIdError", globs={})
    assert example.examples and doctest.DocTestRunner().run(example).failed == 0


def _inputs(num_ranks=4, num_tokens=6, num_topk=3):
    idx = testing.routing(
        "uniform", num_ranks=num_ranks, num_tokens=num_tokens, num_topk=num_topk, num_experts=NUM_EXPERTS
    )
    return testing.random_rows((num_ranks, num_tokens, 8)), idx


def _layer(x, idx, **options):
    recv = jax_ep.dispatch(x, idx, num_experts=NUM_EXPERTS, axis_name="ep", config=CONFIG, **options)
    return jax_ep.combine(recv.x, recv.handle)


def _raises(match):
    with pytest.raises(errors.InvalidIdError, match=match) as caught:
        jax_ep.check()
    return caught.value


@pytest.mark.parametrize("layout", ["expert", "token", "batched"])
def test_results_are_the_same(layout):
    """Every operation and gradient of the common cases, valid and invalid ids, against the oracle."""
    sizes = Sizes(3, 9, layout=layout, expert_alignment=4 if layout == "expert" else 1, config=CONFIG)
    cases = ExchangeCases()
    cases.run(sizes, cases.routing("masked", sizes))
    jax_ep.check()
    cases.run(sizes, cases.routing("invalid", sizes))
    _raises("outside")


@pytest.mark.parametrize("bad", [NUM_EXPERTS, 2**31 - 1, -2, -(2**31)])
def test_an_invalid_id_is_named(make_mesh, caplog, bad):
    """B08: one entry of one rank; that rank says which, once, whatever happens afterwards, until reset."""
    x, idx = _inputs()
    program = testing.on_ranks(_layer, make_mesh(4))
    jax.block_until_ready(program(x, idx))
    jax_ep.check()
    idx[2, 4, 1] = bad
    for _ in range(3):
        jax.block_until_ready(program(x, idx))
    error = _raises(rf"got 1 ids of 18 in topk_idx of rank 2 .* \[-1, 8\), the first is {bad} \(token 4, k 1\)")
    assert (error.op, error.rank, error.peer) == ("dispatch", 2, None)
    assert [r.levelname for r in caplog.records if "InvalidIdError" in r.message] == ["ERROR"]
    jax_ep.reset()
    jax_ep.check()


def test_without_the_setting_ids_are_only_counted(make_mesh):
    x, idx = _inputs()
    idx[0, 0, 0] = NUM_EXPERTS
    count = lambda x, idx: jax_ep.dispatch(x, idx, num_experts=NUM_EXPERTS, axis_name="ep").num_invalid
    assert testing.on_ranks(count, make_mesh(4))(x, idx).tolist() == [1, 0, 0, 0]
    jax_ep.check()


def _in_scan(x, idx):
    return lax.scan(lambda x, _: (jax.checkpoint(_layer)(x, idx), None), x, None, length=3)[0]


def _in_gradient(x, idx):
    return jax.grad(lambda x: (jax.checkpoint(_layer)(x, idx) ** 2).sum())(x)


def _in_windows(x, idx):
    return jax_ep.windowed(
        lambda _, recv: recv.x, (), x, idx, None, num_experts=NUM_EXPERTS, axis_name="ep", capacity=16, config=CONFIG
    )


def _in_halves(x, idx):
    recv = jax_ep.dispatch_done(jax_ep.dispatch_start(x, idx, num_experts=NUM_EXPERTS, axis_name="ep", config=CONFIG))
    return jax_ep.combine_done(jax_ep.combine_start(recv.x, recv.handle))


def _with_map(x, idx):
    # 16 physical experts, so that 8 is an id, but no logical one.
    expert_map = jnp.stack([jnp.arange(NUM_EXPERTS), NUM_EXPERTS + jnp.arange(NUM_EXPERTS)], 1)
    return _layer(x, idx, expert_map=expert_map, num_physical_experts=2 * NUM_EXPERTS)


@pytest.mark.parametrize("program", [_in_scan, _in_gradient, _in_windows, _in_halves, _with_map])
def test_inside_other_programs(make_mesh, program):
    x, idx = _inputs()
    run = testing.on_ranks(program, make_mesh(4))
    jax.block_until_ready(run(x, idx))
    jax_ep.check()
    idx[3, 0, 2] = NUM_EXPERTS
    jax.block_until_ready(run(x, idx))
    assert _raises(r"the first is 8 \(token 0, k 2\)").rank == 3


@pytest.mark.parametrize("order", [("dp", "ep"), ("ep", "dp")])
def test_beside_automatic_axes_and_other_groups(make_mesh, order):
    """Each group exchanges its own lines; an axis that shard_map leaves automatic does not repeat them."""
    x, idx = _inputs(num_ranks=2)
    mesh = make_mesh(2, 2, axis_names=order)
    spec = jax.sharding.PartitionSpec("ep")
    for names in ({"ep"}, {"ep", "dp"}):
        run = jax.jit(
            jax.shard_map(
                lambda x, idx: _layer(x[0], idx[0])[None],
                mesh=mesh,
                in_specs=spec,
                out_specs=spec,
                axis_names=names,
            )
        )
        out = np.asarray(run(x, idx))
        oracle = testing.oracle_dispatch(x, idx, num_experts=NUM_EXPERTS)
        testing.same_bits(out, testing.oracle_combine(oracle, oracle.x))
        jax_ep.check()
        bad = idx.copy()
        bad[1, 1, 1] = -7
        jax.block_until_ready(run(x, bad))
        assert _raises("the first is -7").rank == 1
        jax_ep.reset()


def test_many_calls_in_flight(make_mesh):
    """Callbacks of several ranks and steps at a time: none waits for another."""
    x, idx = _inputs()
    program = testing.on_ranks(_layer, make_mesh(4))
    jax.block_until_ready([program(x, idx) for _ in range(50)])
    jax_ep.check()


def test_lines_that_differ():
    """What is said of them: who, with whom, and in what they differ."""
    line = lambda **facts: " ".join(f"{k}={v}" for k, v in facts.items()).encode().ljust(64)
    table = [line(op="dispatch", num_tokens=8, layout="expert")] * 2 + [
        line(op="combine", num_tokens=4, layout="expert")
    ]
    table = np.stack([np.frombuffer(text, np.uint8) for text in table])
    debug_checks._report_calls("dispatch", 1, table[:2])
    assert not debug_checks.failures()
    debug_checks._report_calls("dispatch", 1, table)
    with pytest.raises(errors.MismatchError) as caught:
        jax_ep.check()
    assert "rank 1 has op=dispatch, num_tokens=8, but rank 2 has op=combine, num_tokens=4;" in str(caught.value)
    assert (caught.value.rank, caught.value.peer) == (1, 2)


def test_lines_fit_and_name_what_must_be_equal(monkeypatch, make_mesh):
    """The longest line that there can be is not cut, and all operations send one of the same length."""
    seen = {}
    facts = debug_checks._facts

    def record(op, operands, spec, quantize):
        found = facts(op, operands, spec, quantize)
        seen[op] = found
        return found

    monkeypatch.setattr(debug_checks, "_facts", record)
    x, idx = _inputs(num_ranks=2)

    def program(x, idx, w):
        def loss(x, w):
            recv = jax_ep.dispatch(x, idx, w, num_experts=NUM_EXPERTS, axis_name="ep", config=CONFIG)
            return (jax_ep.combine(recv.x, recv.handle, weights=recv.weights) ** 2).sum()

        return jax.grad(loss, (0, 1))(x, w)

    testing.on_ranks(program, make_mesh(2)).lower(x, idx, idx.astype(np.float32))
    assert set(seen) == {"dispatch", "redispatch", "combine"}
    for op, found in seen.items():
        assert found["num_tokens"] == 6 and found["num_topk"] == 3 and found["num_experts"] == 8, op
        longest = {name: 2**31 - 1 if isinstance(value, int) else value for name, value in found.items()}
        line = " ".join(f"{k}={v}" for k, v in (longest | dict(dtype="float8_e4m3b11fnuz")).items())
        assert len(line) < debug_checks._LINE_BYTES
    assert seen["dispatch"]["operands"] == "x,topk_idx,weights"


def test_nothing_is_safe_to_go_on_with(make_mesh):
    """What a call gives whose ranks differ: NaN rows, sizes of 0, and a handle that moves nothing."""
    x, idx = _inputs(num_ranks=2)

    def program(x, idx):
        recv = jax_ep.dispatch(x, idx, num_experts=NUM_EXPERTS, axis_name="ep")
        h = recv.handle
        types = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (recv.x, recv.x[:0, :0], recv.x[:0, 0])]
        types += [h.slot_meta, h.slot_token, h.group_sizes, h.counts, h.stats, h.topk_idx, h.slot, h.dst_row]
        rows, _, _, *routing = debug_checks._nothing("dispatch", [*types, h.recv_offsets])
        meta, token, sizes, counts, stats, idx, slot, dst_row, offsets = routing
        handle = dataclasses.replace(
            h, topk_idx=idx, slot=slot, dst_row=dst_row, slot_meta=meta, slot_token=token, recv_offsets=offsets,
            group_sizes=sizes, counts=counts, stats=stats,
        )  # fmt: skip
        return rows, sizes, counts, stats, jax_ep.combine(rows, handle)

    rows, *sizes, out = testing.on_ranks(program, make_mesh(2), check_vma=False)(x, idx)
    assert np.isnan(rows).all() and not any(np.any(a) for a in sizes)
    assert not np.any(out)
