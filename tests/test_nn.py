"""MoE layer against a dense single-device oracle (every expert on every token): values and gradients with respect to
the input, the router and the experts; all layouts; capacity factor, FP8, replicas; 1, 2 and 4 ranks, and a data axis;
masked tokens, idle experts and ranks, dropped rows, undefined tails; remat and scan over layers; the NNX module."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ep import balance, nn, nn_experts
from jax_ep.nn import MoE, MoEConfig, MoEParams, moe_block

TOKENS, HIDDEN, FFN, EXPERTS, TOPK = 24, 8, 12, 4, 2  # tokens over all ranks
CONFIG = MoEConfig(hidden=HIDDEN, ffn=FFN, num_experts=EXPERTS, num_topk=TOPK, axis_name="ep", layout="expert")
TOLERANCE = {"rtol": 2e-5, "atol": 2e-5}
# Compiling is most of this file's time.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
EXPERT_SPECS = MoEParams(router=P(), w_gate=P("ep"), w_up=P("ep"), w_down=P("ep"))


def make_params(seed=0, activation="swiglu"):
    keys = jax.random.split(jax.random.key(seed), 4)
    shapes = ((HIDDEN, EXPERTS), (EXPERTS, HIDDEN, FFN), (EXPERTS, HIDDEN, FFN), (EXPERTS, FFN, HIDDEN))
    router, gate, up, down = (jax.random.normal(k, s) / s[-2] ** 0.5 for k, s in zip(keys, shapes, strict=True))
    return MoEParams(router, None if activation == "gelu" else gate, up, down)


def make_tokens(seed=1):
    return jax.random.normal(jax.random.key(seed), (TOKENS, HIDDEN))


def expert_outputs(params, x):
    """[num_experts, num_tokens, hidden], straight from the definition."""
    outputs = []
    for e in range(EXPERTS):
        inner = x @ params.w_up[e]
        inner = jax.nn.gelu(inner) if params.w_gate is None else jax.nn.silu(x @ params.w_gate[e]) * inner
        outputs.append(inner @ params.w_down[e])
    return jnp.stack(outputs)


def dense_moe(params, x, config=CONFIG, keep=None):
    """(y, load-balancing loss, z-loss, load); keep [num_tokens, num_topk]: False entries contribute nothing to y,
    and tokens with keep == -1 are masked."""
    keep = np.ones((x.shape[0], config.num_topk), int) if keep is None else np.asarray(keep)
    probs = jax.nn.softmax(x @ params.router)
    order = jnp.argsort(-probs, axis=-1)[:, : config.num_topk]
    weights = jnp.take_along_axis(probs, order, axis=-1)
    if config.normalize_weights:
        weights = weights / weights.sum(-1, keepdims=True)
    outputs = expert_outputs(params, x)
    y = jnp.zeros_like(x)
    for k in range(config.num_topk):
        chosen = outputs[order[:, k], jnp.arange(x.shape[0])]
        y = y + jnp.where(keep[:, k, None] > 0, weights[:, k, None] * chosen, 0)
    is_token = keep[:, 0] >= 0
    load = jax.nn.one_hot(order, EXPERTS)[is_token].mean((0, 1))
    balance = EXPERTS * (load * probs[is_token].mean(0)).sum()
    z = jnp.square(jax.nn.logsumexp(x @ params.router, axis=-1))[is_token].mean()
    return y, balance, z, load


def objective(y, balance, z, cotangent):
    return (y * cotangent).sum() + balance + 0.5 * z


def sharded_loss(mesh, config=CONFIG, block=moe_block):
    """`loss(params, x, mask, cotangent)` -> (loss, (y, aux)) with the layer inside shard_map."""
    specs = EXPERT_SPECS if config.activation == "swiglu" else EXPERT_SPECS._replace(w_gate=None)
    tokens = P(config.token_axes)

    def loss(params, x, mask, cotangent):
        run = jax.shard_map(
            lambda params, x, mask: block(params, x, config, mask),
            mesh=mesh,
            in_specs=(specs, tokens, None if mask is None else tokens),
            out_specs=(tokens, P()),
        )
        y, aux = run(params, x, mask)
        return objective(y, aux.load_balancing_loss, aux.z_loss, cotangent), (y, aux)

    return loss


def check_against_oracle(mesh, config=CONFIG, params=None, x=None, mask=None, keep=None, num_dropped=0):
    """Values, statistics and all gradients; returns the gradients (params, x)."""
    params = make_params(activation=config.activation) if params is None else params
    x = make_tokens() if x is None else x
    cotangent = jax.random.normal(jax.random.key(5), x.shape)
    run = jit(jax.value_and_grad(sharded_loss(mesh, config), argnums=(0, 1), has_aux=True))
    (_, (y, aux)), grads = run(params, x, mask, cotangent)
    if keep is None and mask is not None:
        keep = np.broadcast_to(np.where(mask, 1, -1)[:, None], (x.shape[0], config.num_topk))

    def oracle(params, x):
        y, balance, z, load = dense_moe(params, x, config, keep)
        return objective(y, balance, z, cotangent), (y, balance, z, load)

    (_, (want_y, balance, z, load)), want = jit(jax.value_and_grad(oracle, argnums=(0, 1), has_aux=True))(params, x)
    np.testing.assert_allclose(y, want_y, **TOLERANCE)
    np.testing.assert_allclose(aux.load, load, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(aux.load_balancing_loss, balance, rtol=1e-5)
    np.testing.assert_allclose(aux.z_loss, z, rtol=1e-5)
    assert int(aux.num_dropped) == num_dropped
    for got, expected in zip(jax.tree.leaves(grads), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(got, expected, **TOLERANCE)
    return grads


@pytest.mark.parametrize("layout", nn.LAYOUTS)
@pytest.mark.parametrize("ranks", (1, 2, 4))
def test_equals_dense_layer(layout, ranks, make_mesh):
    check_against_oracle(make_mesh(ranks), dataclasses.replace(CONFIG, layout=layout))


def test_gelu_alignment_and_plain_probabilities(make_mesh):
    config = dataclasses.replace(CONFIG, activation="gelu", expert_alignment=4, normalize_weights=False)
    check_against_oracle(make_mesh(2), config)


@pytest.mark.parametrize("layout", ("expert", "token"))
def test_data_axis(layout, make_mesh):
    """Experts replicated over a second axis get the gradient of all its tokens."""
    mesh = make_mesh(2, 2, axis_names=("data", "ep"))
    check_against_oracle(mesh, dataclasses.replace(CONFIG, layout=layout, data_axes=("data",)))


@pytest.mark.parametrize("layout", nn.LAYOUTS)
def test_masked_tokens(layout, make_mesh):
    """Masked tokens get 0, send nothing and count nowhere; on rank 1 all are masked (CASES B03)."""
    mask = jnp.arange(TOKENS) % 5 != 0
    mask = mask.at[TOKENS // 2 :].set(False)
    _, g_x = check_against_oracle(make_mesh(2), dataclasses.replace(CONFIG, layout=layout), mask=mask)
    np.testing.assert_array_equal(g_x[~mask], 0)


@pytest.mark.parametrize("layout", ("expert", "token"))
@pytest.mark.parametrize("num_topk", (1, 2))
def test_idle_experts_and_ranks(layout, num_topk, make_mesh):
    """All tokens go to the experts of rank 0; the idle experts' gradients are exactly 0 (CASES B03)."""
    params, x = make_params(), make_tokens().at[:, 0].set(3.0)
    busy = jnp.arange(EXPERTS) < EXPERTS // 2
    params = params._replace(router=params.router.at[0].set(jnp.where(busy, 0.0, -9.0)))
    config = dataclasses.replace(CONFIG, layout=layout, num_topk=num_topk)
    g_params, _ = check_against_oracle(make_mesh(2), config, params, x)
    for grad in g_params[1:]:
        np.testing.assert_array_equal(grad[~busy], 0)
        assert np.all(np.any(np.asarray(grad[busy]) != 0, axis=(1, 2)))


def test_capacity_drops_rows(make_mesh):
    """Rows beyond the capacity give 0, forward and backward, and are counted."""
    ranks, capacity = 2, 9
    params, x = make_params(), make_tokens()
    _, order = jax.lax.top_k(x @ params.router, TOPK)
    keep = np.zeros((TOKENS, TOPK), int)
    order = np.asarray(order)
    for rank in range(ranks):
        local = EXPERTS // ranks
        entries = [(order[t, k], t, k) for t in range(TOKENS) for k in range(TOPK) if order[t, k] // local == rank]
        for _, t, k in sorted(entries)[:capacity]:  # by (expert, source rank, token, k)
            keep[t, k] = 1
    dropped = int(np.sum(keep == 0))
    assert dropped > 0
    config = dataclasses.replace(CONFIG, capacity=capacity)
    check_against_oracle(make_mesh(ranks), config, params, x, keep=keep, num_dropped=dropped)


def test_capacity_factor():
    """Rows for 6 tokens a rank on 2 ranks, by hand; the worst case bounds them."""
    for layout, alignment, factor, want in (
        ("expert", 1, 1.25, 15),  # mean 6 * 2
        ("expert", 8, 1.25, 16),
        ("token", 1, 0.75, 9),  # mean at most 6 * 2
        ("batched", 1, 1.5, 9),  # mean 6 * 2 * 2 / 4
        ("batched", 1, 9.0, 12),  # all tokens to one expert
        ("token", 1, 9.0, 12),
    ):
        config = dataclasses.replace(CONFIG, layout=layout, expert_alignment=alignment, capacity_factor=factor)
        assert config.num_rows(6, 2) == want, (layout, alignment, factor)
    assert dataclasses.replace(CONFIG, capacity=7).num_rows(6, 2) == 7 and CONFIG.num_rows(6, 2) is None
    for layout in nn.LAYOUTS:  # without tokens: the least that dispatch takes
        assert dataclasses.replace(CONFIG, layout=layout, capacity_factor=1.5).num_rows(0, 2) == 1
    replicated = dataclasses.replace(CONFIG, layout="batched", num_physical_experts=6, capacity_factor=1.0)
    assert replicated.num_rows(6, 2) == 4
    chosen = (None, None), (7, None), (None, 1.5)  # capacity, capacity_factor: the layout that is not said
    assert [MoEConfig(8, 8, 4, capacity=c, capacity_factor=f).layout for c, f in chosen] == ["expert"] + 2 * ["batched"]


def test_capacity_drops_rows_of_each_expert(make_mesh):
    """Layout "batched": each expert keeps its first rows, by (source rank, token, k)."""
    params, x = make_params(), make_tokens()
    _, order = jax.lax.top_k(x @ params.router, TOPK)
    config = dataclasses.replace(CONFIG, layout="batched", capacity_factor=0.75)
    capacity = config.num_rows(TOKENS // 2, 2)
    kept, keep = np.zeros(EXPERTS, int), np.zeros((TOKENS, TOPK), int)
    for (t, k), e in np.ndenumerate(np.asarray(order)):
        keep[t, k], kept[e] = kept[e] < capacity, kept[e] + 1
    dropped = int(np.sum(keep == 0))
    assert dropped > 0
    check_against_oracle(make_mesh(2), config, params, x, keep=keep, num_dropped=dropped)


def test_batched_equals_expert_layout(make_mesh):
    """Same sums in the same order around the experts: both layouts agree but for the products' own rounding."""
    params, x = make_params(), make_tokens()
    args = (params, x, None, jax.random.normal(jax.random.key(5), x.shape))
    results = []
    for layout in ("expert", "batched"):
        loss = sharded_loss(make_mesh(2), dataclasses.replace(CONFIG, layout=layout))
        (_, (y, _)), grads = jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(*args)
        results.append((y, grads))
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("layout", ("expert", "batched"))
def test_fp8(layout, make_mesh):
    """FP8 rows in both directions: values and gradients within what e4m3 rounds off, straight through."""
    config = MoEConfig(
        128, FFN, EXPERTS, TOPK, axis_name="ep", layout=layout, quantize="fp8", quantize_combine="fp8_wire"
    )
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = ((128, EXPERTS), (EXPERTS, 128, FFN), (EXPERTS, 128, FFN), (EXPERTS, FFN, 128))
    params = MoEParams(*(jax.random.normal(k, s) / s[-2] ** 0.5 for k, s in zip(keys, shapes, strict=True)))
    x = jax.random.normal(jax.random.key(1), (TOKENS, 128))
    args = (params, x, None, jax.random.normal(jax.random.key(5), x.shape))
    results = []
    for c in (config, dataclasses.replace(config, quantize=None, quantize_combine=None)):
        loss = sharded_loss(make_mesh(2), c)
        (_, (y, _)), grads = jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(*args)
        results.append((y, grads))
    for got, exact in zip(*map(jax.tree.leaves, results), strict=True):
        error = np.linalg.norm(got - exact) / np.linalg.norm(exact)
        assert 1e-4 < error < 0.1


def test_gradient_of_each_weight(make_mesh):
    """d loss / d w[t, k] = <cotangent[t], expert(x[t])> wherever the expert lives, 0 at -1 (CASES B32)."""
    params, x = make_params(), make_tokens()
    cotangent = jax.random.normal(jax.random.key(5), x.shape)
    rng = np.random.default_rng(0)
    topk_idx = np.stack([rng.permutation(EXPERTS)[:TOPK] for _ in range(TOKENS)]).astype(np.int32)
    topk_idx[rng.random(topk_idx.shape) < 0.2] = -1
    weights = jax.random.uniform(jax.random.key(6), topk_idx.shape)
    outputs = np.asarray(jit(expert_outputs)(params, x))
    chosen = outputs[topk_idx, np.arange(TOKENS)[:, None]]
    want = np.where(topk_idx >= 0, np.einsum("tkh,th->tk", chosen, cotangent), 0)
    probs, log_z = jnp.full((TOKENS, EXPERTS), 1 / EXPERTS), jnp.zeros(TOKENS)

    for layout in nn.LAYOUTS:
        config = dataclasses.replace(CONFIG, layout=layout)

        def local(params, x, *routing, config=config):
            original, nn.route = nn.route, lambda *_: nn.Routing(*routing)
            try:
                return moe_block(params, x, config)[0]
            finally:
                nn.route = original

        run = jax.shard_map(local, mesh=make_mesh(2), in_specs=(EXPERT_SPECS, *[P("ep")] * 5), out_specs=P("ep"))
        grad = jit(jax.grad(lambda w, run=run: (run(params, x, topk_idx, w, probs, log_z) * cotangent).sum()))
        np.testing.assert_allclose(grad(weights), want, **TOLERANCE)


@pytest.mark.parametrize("layout", nn.LAYOUTS)
def test_bf16_router_gradient(layout, make_mesh):
    """The router works in f32 whatever the dtype of the tokens (CASES B32)."""
    x = make_tokens().astype(jnp.bfloat16)
    params, cotangent = make_params(), jax.random.normal(jax.random.key(5), x.shape)
    config = dataclasses.replace(CONFIG, layout=layout)
    (_, (y, _)), grad = jit(jax.value_and_grad(sharded_loss(make_mesh(4), config), has_aux=True))(
        params, x, None, cotangent
    )
    assert y.dtype == jnp.bfloat16 and grad.router.dtype == grad.w_up.dtype == jnp.float32

    def oracle(params):
        y, balance, z, _ = dense_moe(params, x.astype(jnp.float32))
        return objective(y, balance, z, cotangent)

    want = jit(jax.grad(oracle))(params)
    for got, expected in zip(grad, want, strict=True):
        assert np.max(np.abs(got - expected)) < 0.03 * np.max(np.abs(expected))


@pytest.mark.parametrize("layout", ("expert", "token"))
def test_undefined_tail_reaches_nothing(layout, make_mesh, monkeypatch):
    """The layer asks for no zeroed tail ("batched": does): rows past the last one may hold anything, NaN included."""

    calls = []

    def poisoned(*args, **kwargs):
        recv = original(*args, **kwargs)
        calls.append(kwargs["zero_tail"])
        rows = jnp.arange(recv.x.shape[0])[:, None]
        num_rows = jnp.sum(recv.group_sizes) if layout == "expert" else recv.handle.recv_offsets[-1]
        return dataclasses.replace(recv, x=jnp.where(rows < num_rows, recv.x, jnp.nan))

    original = nn.dispatch
    monkeypatch.setattr(nn, "dispatch", poisoned)
    check_against_oracle(make_mesh(2), dataclasses.replace(CONFIG, layout=layout))
    assert calls and not any(calls)


# Policy of jax.checkpoint, and the exchanges in forward and backward together: dispatch, redispatch, combine.
POLICIES = {
    "none": (None, (1, 1, 2)),
    "default": ({}, (2, 1, 2)),
    "everything": ({"policy": jax.checkpoint_policies.everything_saveable}, (1, 1, 2)),
    "handle": ({"policy": jax.checkpoint_policies.save_only_these_names("jax_ep_handle")}, (2, 1, 2)),
}


def scanned_loss(mesh, config, remat):
    """Three layers with residual connections under lax.scan, each rematerialised as `remat` says."""

    def layers(params, x, config, mask):
        def layer(x, params):
            y, aux = moe_block(params, x, config, mask)
            return x + y, aux

        x, aux = jax.lax.scan(remat(layer), x, params)
        return x, jax.tree.map(lambda a: a.sum(0), aux)

    specs = MoEParams(*(P(None, *spec) for spec in EXPERT_SPECS))

    def loss(params, x, cotangent):
        run = jax.shard_map(
            lambda params, x: layers(params, x, config, None), mesh=mesh, in_specs=(specs, P("ep")),
            out_specs=(P("ep"), P()),
        )  # fmt: skip
        y, aux = run(params, x)
        return objective(y, aux.load_balancing_loss, aux.z_loss, cotangent)

    return jit(jax.value_and_grad(loss, argnums=(0, 1)))


def test_remat_and_scan_over_layers(make_mesh):
    """Scanned layers: right whatever is rematerialised, with the expected number of exchanges (CASES B45)."""
    stacked = jax.tree.map(lambda *a: jnp.stack(a), *(make_params(seed) for seed in range(3)))
    x, mesh = make_tokens(), make_mesh(2)
    cotangent = jax.random.normal(jax.random.key(5), x.shape)

    def oracle(stacked, x):
        balance = z = 0.0
        for i in range(3):
            y, layer_balance, layer_z, _ = dense_moe(jax.tree.map(lambda a, i=i: a[i], stacked), x)
            x, balance, z = x + y, balance + layer_balance, z + layer_z
        return objective(x, balance, z, cotangent)

    want = jit(jax.value_and_grad(oracle, argnums=(0, 1)))(stacked, x)
    for name, (options, exchanges) in POLICIES.items():
        remat = (lambda f: f) if options is None else functools.partial(jax.checkpoint, **options)
        traced = scanned_loss(mesh, CONFIG, remat).trace(stacked, x, cotangent)
        program = str(traced.jaxpr)
        primitives = ("jax_ep_dispatch", "jax_ep_redispatch", "jax_ep_combine")
        assert tuple(program.count(f"{p}[") for p in primitives) == exchanges, name
        got = traced.lower().compile()(stacked, x, cotangent)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, err_msg=name, rtol=1e-4, atol=1e-4)


def test_repeated_gradients_with_rotating_idle_rank(make_mesh):
    """50 steps in which another half of the experts idles each time: finite, idle gradients 0 (CASES B03)."""
    params, x = make_params(), make_tokens().at[:, 0].set(3.0)
    run = jit(jax.grad(sharded_loss(make_mesh(2)), has_aux=True))
    cotangent = jnp.ones_like(x)
    for step in range(50):
        idle = (np.arange(EXPERTS) // 2) == step % 2
        router = params.router.at[0].set(jnp.where(idle, -9.0, 0.0))
        grads, _ = run(params._replace(router=router), x, None, cotangent)
        assert all(np.all(np.isfinite(g)) for g in grads)
        assert all(np.all(np.asarray(g)[idle] == 0) for g in grads[1:])


def test_expand_and_contract_are_transposes():
    """<expand(x), r> == <x, contract(r)>, and each one's gradient is the other (CASES B34)."""
    token = jnp.array([2, 0, 2, 1, -1, -1], jnp.int32)
    place = jnp.array([[1, -1], [-1, 3], [0, 2]], jnp.int32)
    x = jax.random.normal(jax.random.key(0), (3, 5))
    rows = jax.random.normal(jax.random.key(1), (6, 5))
    expanded, expand_vjp = jax.vjp(lambda x: nn_experts._expand(x, token, place), x)
    contracted, contract_vjp = jax.vjp(lambda rows: nn_experts._contract(rows, token, place), rows)
    np.testing.assert_array_equal(expanded, np.where(token[:, None] >= 0, np.asarray(x)[token], 0))
    np.testing.assert_allclose(jnp.vdot(expanded, rows), jnp.vdot(x, contracted), rtol=1e-5)
    np.testing.assert_array_equal(expand_vjp(rows)[0], contracted)
    np.testing.assert_array_equal(contract_vjp(x)[0], expanded)


def test_balanced_router_has_loss_one():
    config = dataclasses.replace(CONFIG, axis_name=(), num_topk=1)
    topk_idx = jnp.arange(8, dtype=jnp.int32)[:, None] % EXPERTS
    routing = nn.Routing(topk_idx, jnp.ones((8, 1)), jnp.full((8, EXPERTS), 1 / EXPERTS), jnp.full(8, 2.0))
    aux = nn._aux(routing, jnp.int32(3), config, None)
    np.testing.assert_allclose((aux.load_balancing_loss, aux.z_loss), (1.0, 4.0), rtol=1e-6)
    np.testing.assert_allclose(aux.load, np.full(EXPERTS, 1 / EXPERTS))
    assert int(aux.num_dropped) == 3


class TestModule:
    """`MoE`: the same numbers outside and inside the caller's shard_map; metadata; mistakes."""

    config = dataclasses.replace(CONFIG, data_axes=("data",))

    def make(self, make_mesh, **changes):
        mesh = make_mesh(2, 2, axis_names=("data", "ep"))
        return MoE(dataclasses.replace(self.config, **changes), mesh=mesh, rngs=nnx.Rngs(0)), mesh

    def test_outside_and_inside_shard_map(self, make_mesh):
        layer, mesh = self.make(make_mesh)
        x = make_tokens().reshape(4, 6, HIDDEN)
        cotangent = jax.random.normal(jax.random.key(5), x.shape)

        def loss(layer, x):
            y, aux = layer(x)
            return objective(y, aux.load_balancing_loss, aux.z_loss, cotangent)

        got_loss, got = nnx.jit(nnx.value_and_grad(loss))(layer, x)
        assert got.w_up[...].sharding.is_equivalent_to(NamedSharding(mesh, P("ep")), 3)
        params = MoEParams(*(p[...] for p in (layer.router, layer.w_gate, layer.w_up, layer.w_down)))

        def oracle(params):
            y, balance, z, _ = dense_moe(params, x.reshape(-1, HIDDEN))
            return objective(y, balance, z, cotangent.reshape(-1, HIDDEN))

        want_loss, want = jit(jax.value_and_grad(oracle))(params)
        np.testing.assert_allclose(got_loss, want_loss, rtol=1e-5)
        for name in MoEParams._fields:
            np.testing.assert_allclose(getattr(got, name)[...], getattr(want, name), **TOLERANCE)

        graphdef, state = nnx.split(layer)
        tokens = P(("data", "ep"))
        specs = (nnx.get_partition_spec(state), tokens)
        inside = jax.shard_map(
            lambda state, x: nnx.merge(graphdef, state)(x), mesh=mesh, in_specs=specs, out_specs=(tokens, P())
        )
        y, aux = jit(inside)(state, x)
        loss_inside = objective(y, aux.load_balancing_loss, aux.z_loss, cotangent)
        np.testing.assert_allclose(loss_inside, want_loss, rtol=1e-5)

    def test_sharding_metadata(self, make_mesh):
        layer, mesh = self.make(make_mesh)
        assert layer.w_down[...].sharding.is_equivalent_to(NamedSharding(mesh, P("ep")), 3)
        specs = nnx.to_pure_dict(nnx.get_partition_spec(nnx.state(layer)))
        assert specs["router"] == P(None, None) and specs["w_up"] == P("ep", None, None)
        gelu, _ = self.make(make_mesh, activation="gelu")
        assert gelu.w_gate is None
        assert jax.eval_shape(gelu, make_tokens())[0].shape == (TOKENS, HIDDEN)

    @pytest.mark.parametrize("layout", nn.LAYOUTS)
    def test_replicas(self, layout, make_mesh):
        """Copies of busy experts: the same values, and gradients summed into the logical experts."""
        layer, _ = self.make(make_mesh, layout=layout)
        copied, _ = self.make(make_mesh, layout=layout, num_physical_experts=EXPERTS + 2)
        nnx.update(copied, nnx.state(layer))
        expert_map = jnp.asarray(balance([9, 1, 5, 1], EXPERTS + 2, num_ranks=2))
        x = make_tokens()
        cotangent = jax.random.normal(jax.random.key(5), x.shape)

        def loss(layer, x, expert_map):
            y, aux = layer(x, expert_map=expert_map)
            return (y * cotangent).sum(), aux.load

        (want, want_load), want_grads = nnx.jit(nnx.value_and_grad(loss, has_aux=True))(layer, x, None)
        (got, load), grads = nnx.jit(nnx.value_and_grad(loss, has_aux=True))(copied, x, expert_map)
        np.testing.assert_allclose(got, want, rtol=1e-5)
        np.testing.assert_array_equal(load, want_load)
        for a, b in zip(*map(jax.tree.leaves, (nnx.state(grads), nnx.state(want_grads))), strict=True):
            np.testing.assert_allclose(a, b, **TOLERANCE)

    def test_mistakes(self, make_mesh):
        layer = MoE(CONFIG, rngs=nnx.Rngs(0))
        with pytest.raises(ValueError, match=r"called outside shard_map over \('ep',\) and made without a mesh"):
            layer(make_tokens())
        with pytest.raises(ValueError, match=r"mesh has axes \('ep',\), expected also \('data',\)"):
            MoE(self.config, mesh=make_mesh(2), rngs=nnx.Rngs(0))
        with pytest.raises(ValueError, match="got num_experts=4 over 3 ranks"):
            MoE(CONFIG, mesh=make_mesh(3), rngs=nnx.Rngs(0))
        with pytest.raises(ValueError, match="got activation='relu'"):
            dataclasses.replace(CONFIG, activation="relu")
        with pytest.raises(ValueError, match="got layout='sorted'"):
            dataclasses.replace(CONFIG, layout="sorted")
        with pytest.raises(ValueError, match=r"got capacity=8 and capacity_factor=1\.5, expected at most one"):
            dataclasses.replace(CONFIG, capacity=8, capacity_factor=1.5)
        with pytest.raises(ValueError, match="got expert_map inside shard_map"):
            jax.eval_shape(
                jax.shard_map(
                    lambda x: layer(x, expert_map=jnp.zeros((EXPERTS, 1), int))[0],
                    mesh=make_mesh(2), in_specs=P("ep"), out_specs=P("ep"),
                ),
                make_tokens(),
            )  # fmt: skip
        with pytest.raises(ValueError, match="got num_topk=5, expected 1 to num_experts=4"):
            dataclasses.replace(CONFIG, num_topk=5)
