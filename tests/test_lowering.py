"""How calls become CUDA custom calls, read in the lowered text: no GPU and no extension is needed.

The set-up behind a lowering is replaced by its answers; it is tested in test_bootstrap.py.
"""

import collections
import functools
import logging
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lowered_calls import IDX, W, X, calls, layer, lowered, numbers_of

import jax_ep
from jax_ep import bootstrap, lowering, testing, tuning


def test_results_stand_behind_a_barrier(make_mesh, usable):
    """XLA of jax 0.11.2 ran a call twice whose results a scan keeps and others use; it does not look past this."""
    lines = lowered(make_mesh(2)).splitlines()
    results = [
        found[1] for line in lines if (found := re.search(r"(%\w+)(?::\d+)? = stablehlo.custom_call @jax_ep_", line))
    ]
    assert len(results) == len(set(results)) > 3
    for line in lines:
        used = set(re.findall(r"%\w+", line.split(" = ", 1)[-1]))
        assert used.isdisjoint(results) or "stablehlo.optimization_barrier" in line, line


def test_operands_and_results(make_mesh, usable):
    """The targets take and give what primitives.py states; combine has its partial sums as one more result."""
    by_target = {}
    for target, operands, results, attributes in calls(lowered(make_mesh(2))):
        by_target.setdefault(target, []).append((operands, results))
        assert "has_side_effect = true" not in attributes
    handle = ["4x2xi32", "4x2xi32", "4x2xi32", "8x2xi32", "8xi32", "3xi32", "2xi32", "2xi32"]
    assert by_target["jax_ep_dispatch"] == [
        (
            ["4x16xf32", "0x0xui8", "4x2xi32", "4x2xf32", "1xi32"],
            [
                "16x16xf32",
                "0x0xui8",
                "16xf32",
                "8x2xi32",
                "8xi32",
                "2xi32",
                "2xi32",
                "8xi32",
                *["4x2xi32"] * 3,
                "3xi32",
            ],
        )
    ]
    again = ["4x16xf32", "0x0xui8", "0x2xf32", *handle]
    assert (again, ["16x16xf32", "0x0xui8", "0xf32"]) in by_target["jax_ep_redispatch"]
    forward = ["16x16xf32", "16xf32", "0xf32", "4x16xf32", *handle]
    backward = ["16x16xf32", "0xf32", "16xf32", "0x16xf32", *handle]
    assert (forward, ["4x16xf32", "0x2xf32", "8x64xui8"]) in by_target["jax_ep_combine"]
    assert (backward, ["4x16xf32", "4x2xf32", "8x64xui8"]) in by_target["jax_ep_combine"]


def test_token_layout_has_no_partial_sums(make_mesh, usable):
    for target, _, results, _ in calls(lowered(make_mesh(2), layout="token")):
        if target == "jax_ep_combine":
            assert results[2] == "0x64xui8"
            break
    else:
        pytest.fail("no combine in the program")


def test_batched_layout(make_mesh, usable):
    """Rows are flat, numbered over all local experts; combine has partial sums as in layout "expert"."""
    found = calls(lowered(make_mesh(2), layout="batched", capacity=6, window=1))
    assert {re.search(r"layout = (\d+) : i64", attributes)[1] for *_, attributes in found} == {"2"}
    operands, results = next((o, r) for target, o, r, _ in found if target == "jax_ep_dispatch")
    assert operands[-1] == "1xi32" and results[0] == "12x16xf32" and results[2] == "12xf32"
    operands, results = next((o, r) for target, o, r, _ in found if target == "jax_ep_combine")
    assert operands[0] == "12x16xf32" and results[2] == "8x64xui8"


@pytest.mark.parametrize(
    ("quantize", "code", "side", "side_bytes"),
    [("fp8", 1, "16x1xf32", 4), ("fp8_ue8m0", 2, "16x1xf8E8M0FNU", 1), ("fp8_wire", 1, "16x1xf32", 4)],
)
def test_quantised_calls(make_mesh, usable, quantize, code, side, side_bytes):
    """Rows go in as they are and come out narrow, with their scales; backward passes know nothing of it."""

    def step(x, idx):
        def loss(x):
            recv = jax_ep.dispatch(x, idx, num_experts=4, axis_name="ep", quantize=quantize)
            rows = recv.x if quantize == "fp8_wire" else recv.x.dequantize()
            return jnp.sum(jax_ep.combine(rows, recv.handle, quantize="fp8_wire"))

        return jax.value_and_grad(loss)(x)

    program = testing.on_ranks(step, make_mesh(2))
    x = np.zeros((2, 4, 128), np.float32)
    found = calls(program.trace(x, IDX).lower(lowering_platforms=("cuda",)).as_text())
    numbers = lambda text: {name: int(n) for name, n in re.findall(r"(\w+) = (-?\d+) : i64", text)}
    ((operands, results, attributes),) = [c[1:] for c in found if c[0] == "jax_ep_dispatch"]
    assert operands[:2] == ["4x128xf32", "0x0xui8"] and results[:2] == ["16x128xf8E4M3FN", side]
    expected = dict(quantize=code, row_bytes=128, side_bytes=side_bytes, dtype=2)
    assert expected.items() <= numbers(attributes).items()
    combines = [numbers(c[3]) for c in found if c[0] == "jax_ep_combine"]
    assert sorted((n["quantize"], n["row_bytes"]) for n in combines) == [(0, 512), (3, 512)]
    ((results, attributes),) = [c[2:] for c in found if c[0] == "jax_ep_redispatch"]
    assert results[:2] == ["16x128xf32", "0x0xui8"] and numbers(attributes)["quantize"] == 0


def test_opaque_rows(make_mesh, usable):
    """Bytes and their side array, of a type that nothing sums."""

    def step(x, idx):
        pair = jax_ep.Quantized(x, x[:, :3])
        return jax_ep.dispatch(pair, idx, num_experts=4, axis_name="ep").x

    text = testing.on_ranks(step, make_mesh(2)).trace(X.astype(np.uint8), IDX).lower(lowering_platforms=("cuda",))
    ((_, operands, results, attributes),) = calls(text.as_text())
    assert operands[:2] == ["4x16xui8", "4x3xui8"] and results[:2] == ["16x16xui8", "16x3xui8"]
    numbers = {name: int(n) for name, n in re.findall(r"(\w+) = (-?\d+) : i64", attributes)}
    assert dict(quantize=0, row_bytes=16, side_bytes=3, dtype=3).items() <= numbers.items()


def test_attributes(make_mesh, usable):
    """Every attribute of the handlers, i64, and the group's members; the config of the call reaches them."""
    config = jax_ep.Config(num_sms=9, timeout_s=1.5, first_call_timeout_s=2, setup_timeout_s=3, staging="always")
    mesh = make_mesh(2, 2, axis_names=("dp", "ep"))
    program = jax.shard_map(
        lambda x, idx: (
            jax_ep.dispatch(x[0], idx[0], num_experts=4, axis_name="ep", expert_alignment=8, config=config).x
        ),
        mesh=mesh,
        in_specs=jax.sharding.PartitionSpec("ep"),
        out_specs=jax.sharding.PartitionSpec("ep"),
    )
    text = jax.jit(program).trace(X, IDX).lower(lowering_platforms=("cuda",)).as_text()
    ((_, _, _, attributes),) = calls(text)
    numbers = {name: int(n) for name, n in re.findall(r"(\w+) = (-?\d+) : i64", attributes)}
    assert numbers == dict(
        num_ranks=2, num_experts=4, num_topk=2, num_tokens=4, num_rows=32, row_bytes=64, side_bytes=0, dtype=2,
        quantize=0, layout=0, expert_alignment=8, zero_tail=1, num_sms=9, num_slots=0, num_nodes=1, num_carriers=0,
        chunk_tokens=0, put_delay_ns=0, staging_bytes=16 << 20, force_staged=1, force_vector=0,
        setup_timeout_ns=3 * 10**9, first_timeout_ns=2 * 10**9, timeout_ns=15 * 10**8,
    )  # fmt: skip
    members = [(d.process_index, d.local_hardware_id) for d in mesh.devices.flat]
    (groups,) = re.findall(r"groups = dense<\[([\d, ]*)\]> : tensor<8xi64>", attributes)
    assert [int(n) for n in groups.split(",")] == [n for member in members for n in member]
    assert re.search(r'key = "[0-9a-f]{32}"', attributes)
    (prepared,) = [c for c in usable if len(c) == 2]
    assert prepared[1] == config
    ((key, _, *shape_and_limits),) = [c for c in usable if len(c) == 9]  # the arena is bound while lowering
    assert f'key = "{key}"' in attributes and shape_and_limits == [2, 8, 1 << 20, 0, 1, 9, 3.0]


def num_sms_attributes(make_mesh, **kwargs):
    return {
        (target, int(re.search(r"num_sms = (\d+) : i64", attributes)[1]))
        for target, _, _, attributes in calls(lowered(make_mesh(2), **kwargs))
    }


def test_default_num_sms(make_mesh, usable, monkeypatch):
    """The model is asked about every call's own sizes; Config.num_sms goes first; 0 in another machine's program."""
    placement, seen = tuning.Placement(132, 1, 1), []

    def spy(given, **facts):
        seen.append((given, facts))
        return 17 if facts["op"] == "dispatch" else 19

    mode = dict(mode="throughput")
    assert {n for _, n in num_sms_attributes(make_mesh, **mode)} == {0}
    monkeypatch.setattr(bootstrap, "placement", lambda groups, config=None: placement)
    monkeypatch.setattr(tuning, "default_num_sms", spy)
    by_target = {("jax_ep_dispatch", 17), ("jax_ep_redispatch", 17), ("jax_ep_combine", 19)}
    assert num_sms_attributes(make_mesh, **mode) == by_target
    for given, facts in seen:
        sizes = dict(layout="expert", num_ranks=2, num_experts=4, num_topk=2, num_tokens=4, row_bytes=64)
        assert given == placement and {name: n for name, n in facts.items() if name != "op"} == sizes
    assert {n for _, n in num_sms_attributes(make_mesh, config=jax_ep.Config(num_sms=9), **mode)} == {9}


LATENCY_TARGETS = {f"jax_ep_{op}_latency" for op in ("dispatch", "redispatch", "combine")}


@pytest.mark.parametrize("layout", ["expert", "token"])
def test_latency_mode(make_mesh, usable, layout):
    """Targets of their own with the operands and results of throughput mode, except combine's partial sums."""

    def public(mode):
        found = sorted(c[:3] for c in calls(lowered(make_mesh(2), layout=layout, mode=mode)))
        return [(t.removesuffix("_latency"), o, r[:2] if "combine" in t else r) for t, o, r in found]

    assert public("latency") == public("throughput")
    found = calls(lowered(make_mesh(2), layout=layout, mode="latency"))
    assert {target for target, *_ in found} == LATENCY_TARGETS
    for target, _, results, attributes in found:
        assert "has_side_effect = true" not in attributes and numbers_of(attributes)["num_slots"] == 2
        assert target != "jax_ep_combine_latency" or len(results) == 2
    assert {c[2:6] for c in usable if len(c) == 9} == {(2, 8, 1 << 20, 0), (2, 8, 2 << 20, 2)}


def test_latency_num_sms(make_mesh, usable, monkeypatch):
    """By the model of latency mode, from the tokens of a rank; Config.num_sms goes first."""
    seen = []
    monkeypatch.setattr(bootstrap, "placement", lambda groups, config=None: tuning.Placement(132, 1, 1))
    monkeypatch.setattr(tuning, "latency_num_sms", lambda *a, **sizes: seen.append((*a, sizes)) or 7)
    assert num_sms_attributes(make_mesh, mode="latency") == {(target, 7) for target in LATENCY_TARGETS}
    assert all(s == (tuning.Placement(132, 1, 1), dict(num_ranks=2, num_tokens=4)) for s in seen)
    config = jax_ep.Config(num_sms=9)
    assert {n for _, n in num_sms_attributes(make_mesh, mode="latency", config=config)} == {9}


def test_auto_asks_about_each_call(make_mesh, usable, monkeypatch):
    """mode="auto": by the sizes of the call and the bytes of its slots; "throughput" and "latency" are not asked."""
    seen = []

    def prefers(placement, **sizes):
        seen.append(sizes)
        return sizes["num_topk"] == 2

    monkeypatch.setattr(tuning, "prefers_latency", prefers)
    assert not LATENCY_TARGETS & {target for target, *_ in calls(lowered(make_mesh(2)))}  # another machine's program
    monkeypatch.setattr(bootstrap, "placement", lambda groups, config=None: tuning.Placement(132, 1, 1))
    for mode in ("throughput", "latency"):
        lowered(make_mesh(2), mode=mode)
    assert not seen
    assert {target for target, *_ in calls(lowered(make_mesh(2)))} == LATENCY_TARGETS
    sizes = dict(num_ranks=2, num_experts=4, num_topk=2, num_tokens=4, row_bytes=64, slots_bytes=2 << 20)
    assert {s["op"] for s in seen} == {"dispatch", "combine"} and all(
        {**s, "op": None} == sizes | {"op": None} for s in seen
    )
    monkeypatch.setattr(tuning, "prefers_latency", lambda *a, **sizes: False)
    assert not LATENCY_TARGETS & {target for target, *_ in calls(lowered(make_mesh(2)))}


def test_too_many_experts_for_latency_mode(make_mesh, usable, monkeypatch, caplog):
    """ "auto" takes the throughput kernels; "latency" too, with one logged line, except where "cuda" was asked for."""
    module = SimpleNamespace(max_experts=lambda ranks: 10**6, max_latency_experts=lambda ranks: 3)
    monkeypatch.setattr(lowering._ffi, "available", lambda: "")
    monkeypatch.setattr(lowering._ffi, "module", lambda: module)
    monkeypatch.setattr(bootstrap, "placement", lambda groups, config=None: tuning.Placement(132, 1, 1))
    with caplog.at_level(logging.WARNING, logger="jax_ep"):
        assert not LATENCY_TARGETS & {target for target, *_ in calls(lowered(make_mesh(2)))} and not caplog.records
        assert not LATENCY_TARGETS & {target for target, *_ in calls(lowered(make_mesh(2), mode="latency"))}
    (message,) = [r.getMessage() for r in caplog.records]
    assert message.startswith('using mode="throughput": num_experts is 4') and "at most 3 over 2 ranks" in message
    with pytest.raises(ValueError, match=r'mode="latency" was asked for, but num_experts is 4.*use mode="auto"'):
        lowered(make_mesh(2), mode="latency", implementation="cuda")


def split_layer(x, idx, w, wrap=lambda f: f, **kwargs):
    """Forward and backward of a layer in halves, with something else in between; the sum itself is not a result."""

    def loss(x, w):
        recv = jax_ep.dispatch(x, idx, w, num_experts=4, axis_name="ep", **kwargs)
        pending = jax_ep.dispatch_start(x * 2, idx, w, num_experts=4, axis_name="ep", **kwargs)
        pending, shared = jax.lax.optimization_barrier((pending, recv.x))
        pending, shared = jax.lax.optimization_barrier((pending, jnp.tanh(shared)))
        recv = jax_ep.dispatch_done(pending)
        pending = jax_ep.dispatch_start(x, handle=recv.handle)
        back = jax_ep.combine_start(shared + recv.x, recv.handle, weights=recv.weights)
        back, more = jax.lax.optimization_barrier((back, jnp.tanh(x)))
        again = jax_ep.dispatch_done(pending)
        return jnp.sum(jax_ep.combine_done(back)) + jnp.sum(again.x) + jnp.sum(more**2)

    return jax.grad(wrap(loss), (0, 1))(x, w)


def split_calls(mesh, layer=split_layer, **kwargs):
    program = testing.on_ranks(lambda *a: layer(*a, **kwargs), mesh)
    return calls(program.trace(X, IDX, W).lower(lowering_platforms=("cuda",)).as_text())


def test_halves(make_mesh, usable):
    """A start takes what the whole call takes and gives a ticket, its done takes the ticket too and gives the rest."""
    found = split_calls(make_mesh(2), config=jax_ep.Config(max_pending=3))
    by_target = {target: rest for target, *rest in found}
    whole = {target: rest for target, *rest in calls(lowered(make_mesh(2)))}
    for op in ("dispatch", "redispatch", "combine"):
        start, done = (by_target[f"jax_ep_{op}_{half}"] for half in ("start", "done"))
        assert start[1] == ["2xi32"] and done[0] == ["2xi32", *start[0]]
        if op == "dispatch":
            assert start[0] == whole["jax_ep_dispatch"][0] and done[1] == whole["jax_ep_dispatch"][1]
        assert len(done[1]) == {"dispatch": 12, "redispatch": 3, "combine": 2}[op]
        assert all("has_side_effect = true" in attributes for *_, attributes in (start, done))
        texts = [attributes.split("mhlo.backend_config = {")[1].split("}")[0] for *_, attributes in (start, done)]
        assert texts[0] == texts[1] and numbers_of(texts[0])["num_slots"] == 6
    assert {c[4:6] for c in usable if len(c) == 9} == {(1 << 20, 0), (2 << 20, 6)}


def test_halves_share_no_arena_with_fused_calls(make_mesh, usable):
    """Fused calls in an arena of two slots wait for no credit, which a start in between would need."""
    config = jax_ep.Config(max_pending=1)
    keys = {}
    for halved in (split_layer, lambda *args, **kwargs: split_layer(*args, **kwargs, mode="latency")):
        for target, *_, attributes in split_calls(make_mesh(2), halved, config=config):
            keys.setdefault(target.rpartition("_")[2], set()).add(re.search(r'key = "(\w+)"', attributes)[1])
    assert keys["start"] == keys["done"] and not keys["start"] & keys["latency"]


def test_no_half_is_alone(make_mesh, usable):
    """Nothing that JAX drops or recomputes leaves a start without its done; neither does a second done exist."""
    remat = lambda policy: lambda *args: split_layer(*args, wrap=functools.partial(jax.checkpoint, policy=policy))
    layers = {
        "plain": split_layer,
        "checkpoint": remat(None),
        "names": remat(jax.checkpoint_policies.save_only_these_names("jax_ep_handle")),
    }
    for name, halved in layers.items():
        count = collections.Counter(target for target, *_ in split_calls(make_mesh(2), halved))
        halves = {target: n for target, n in count.items() if target.endswith(("start", "done"))}
        assert set(halves.values()) == {1} and len(halves) == 6, (name, count)


def test_halves_beside_automatic_axes(make_mesh, usable):
    """XLA splits no call with side effects: the error names the axes and the remedy; pure JAX has no such limit."""
    mesh = make_mesh(2, 2, axis_names=("tp", "ep"))
    spec = jax.sharding.PartitionSpec("ep")

    def lower(axis_names, platform="cuda", mesh=mesh):
        send = lambda x, i: jax_ep.dispatch_done(jax_ep.dispatch_start(x, i, num_experts=4, axis_name="ep")).x
        program = jax.shard_map(send, mesh=mesh, in_specs=spec, out_specs=spec, axis_names=axis_names)
        args = X.reshape(-1, 16), IDX.reshape(-1, 2)
        return calls(jax.jit(program).trace(*args).lower(lowering_platforms=(platform,)).as_text())

    with pytest.raises(NotImplementedError, match=r"jax_ep_dispatch_start: .*'tp' automatic.*names, or use dispatch"):
        lower({"ep"})
    assert len(lower({"ep", "tp"})) == 2 and not lower({"ep"}, "cpu")
    assert len(lower({"ep"}, mesh=make_mesh(1, 2, axis_names=("tp", "ep")))) == 2  # an axis of one device is no matter


def test_too_many_experts_for_halves(make_mesh, usable, monkeypatch, caplog):
    """Both halves fall back together, with one logged line, or raise where "cuda" was asked for."""
    module = SimpleNamespace(max_experts=lambda ranks: 10**6, max_latency_experts=lambda ranks: 3)
    monkeypatch.setattr(lowering._ffi, "available", lambda: "")
    monkeypatch.setattr(lowering._ffi, "module", lambda: module)
    with caplog.at_level(logging.WARNING, logger="jax_ep"):
        assert not [c for c in split_calls(make_mesh(2)) if c[0].endswith(("start", "done"))]
    (message,) = [r.getMessage() for r in caplog.records]
    assert message.startswith("using the pure-JAX implementation: num_experts is 4, and the kernels of latency mode")
    with pytest.raises(ValueError, match=r'implementation="cuda" was asked for, but num_experts is 4.*latency mode'):
        split_calls(make_mesh(2), implementation="cuda")


def test_equal_programs_have_equal_text(make_mesh, usable):
    """B52: nothing in the program says who lowered it or when."""
    assert lowered(make_mesh(2)) == lowered(make_mesh(2))


def test_row_major_operands_and_results(make_mesh, usable):
    """B19: every array of a call is pinned to row-major order, so XLA copies what it holds otherwise."""
    found = calls(lowered(make_mesh(2)))
    assert found
    for _, operands, results, attributes in found:
        for what, types in (("operand", operands), ("result", results)):
            (layouts,) = re.findall(rf"{what}_layouts = \[(.*?)\](?:, \w+ =|$)", attributes)
            ranks = [t.count("x") for t in types]
            expected = ["[1, 0]" if n == 2 else "0" for n in ranks]
            assert re.findall(r"dense<(.*?)> : tensor<\dxindex>", layouts) == expected and max(ranks) == 2


def test_export_for_cuda(make_mesh, usable):
    """B52: jax.export asks for each of our targets by name, and then holds the calls and no address."""
    program = testing.on_ranks(lambda *a: layer(*a), make_mesh(2))
    sharding = jax.sharding.NamedSharding(make_mesh(2), jax.sharding.PartitionSpec("ep"))
    args = [jax.device_put(a, sharding) for a in (X, IDX, W)]
    with pytest.raises(ValueError, match="jax_ep_dispatch"):
        jax.export.export(program, platforms=["cuda"])(*args)
    targets = ("jax_ep_dispatch", "jax_ep_redispatch", "jax_ep_combine")
    checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in targets]
    exported = jax.export.export(program, platforms=["cuda"], disabled_checks=checks)(*args)
    assert {target for target, *_ in calls(exported.mlir_module())} == set(targets)
    again = jax.export.export(program, platforms=["cuda"], disabled_checks=checks)(*args)
    assert again.mlir_module() == exported.mlir_module()


def test_falls_back_with_one_logged_line(make_mesh, monkeypatch, caplog):
    """implementation=None: the reference where CUDA is impossible, and the reason once, not once per call."""
    monkeypatch.setattr(bootstrap, "can_use_cuda", lambda groups, config=None, num_nodes=1: "a reason of this test")
    with caplog.at_level(logging.WARNING, logger="jax_ep"):
        assert not calls(lowered(make_mesh(2)))
    (message,) = [r.getMessage() for r in caplog.records if "a reason of this test" in r.getMessage()]
    assert message.startswith("using the pure-JAX implementation")


def test_xla_is_never_replaced(make_mesh, usable):
    assert not calls(lowered(make_mesh(2), implementation="xla")) and not usable


def test_cuda_never_falls_back(make_mesh, monkeypatch):
    """implementation="cuda": what set-up raises comes through."""

    def refuse(groups, config=None, num_nodes=1):
        raise jax_ep.errors.SetupError("a reason of this test")

    monkeypatch.setattr(bootstrap, "prepare", refuse)
    with pytest.raises(jax_ep.errors.SetupError, match="a reason of this test"):
        lowered(make_mesh(2), implementation="cuda")


def test_without_a_concrete_mesh(make_mesh, usable):
    """An abstract mesh has no devices to name: the error names the axis and the remedy."""
    abstract = make_mesh(2).abstract_mesh
    program = testing.on_ranks(lambda *a: layer(*a), abstract)
    sharding = jax.sharding.NamedSharding(make_mesh(2), jax.sharding.PartitionSpec("ep"))
    args = [jax.device_put(a, sharding) for a in (X, IDX, W)]
    with pytest.raises(ValueError, match=r"axis 'ep'.*AbstractMesh.*pass a concrete"):
        program.trace(*args).lower(lowering_platforms=("cuda",))
