"""Admin's profile against its definition, worked out on stored branch outputs."""

import draws
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import is_refused

import rank_collapse as rc

B, N, M, L, D = 3, 5, 4, 2, 8
MASK = np.arange(N) < np.array([5, 3, 4])[:, None]


def network(**fields):
    return rc.design(rc.transformer(L, 2, D, mlp="tanh", d_ff=7, **fields), "admin")


def draw(config):
    params = draws.parameters(config, weight_scale=1.5)
    rng = np.random.default_rng(1)
    x = jnp.asarray(0.7 * rng.standard_normal((B, N, D)) + 0.2, float)
    memory = jnp.asarray(rng.standard_normal((B, M, D)), float)
    return params, x, {"memory": memory} if config.cross_attention else {}


def by_definition(params, x, config, mask=None, **inputs):
    """ω one after the other: a forward pass each, Var by numpy of what its trace holds."""
    kinds = [k for k in ("attention", "cross", "mlp") if k != "cross" or config.cross_attention]
    omega = {kind: np.ones(L) for kind in ("attention", "cross", "mlp")}
    exists = np.ones((B, N), bool) if mask is None else mask
    run = jax.jit(
        lambda gains: jax.vmap(
            lambda x, more: rc.apply(params, x, config.replace(skip_gain=gains), **more)
        )(x, inputs | ({} if mask is None else {"mask": mask}))
    )
    r = 1.0
    for l in range(L):
        for kind in kinds:
            omega[kind][l] = r
            trace = run(rc.Gains(**omega))
            layers = jax.tree.map(lambda a, l=l: np.asarray(a, np.float64)[:, l], trace.layers)
            before_mlp = layers.after_cross if config.cross_attention else layers.after_attention
            residual, branch = {
                "attention": (np.asarray(trace.hidden, np.float64)[:, l], layers.attention_branch),
                "cross": (layers.after_attention, layers.cross_branch),
                "mlp": (before_mlp, layers.mlp_branch),
            }[kind]
            learned = np.asarray(getattr(params.layers, f"{kind}_gains").skip, np.float64)[l]
            r = np.sqrt(np.var((r * learned * residual)[exists]) + np.var(branch[exists]))
    return {kind: omega[kind] for kind in kinds}


@pytest.mark.parametrize("kind", ["padded encoder", "decoder"])
def test_the_profile_is_as_defined(kind):
    config = network(cross_attention=kind == "decoder")
    params, x, inputs = draw(config)
    mask = MASK if kind == "padded encoder" else None
    if mask is not None:
        x = jnp.where(mask[..., None], x, 50.0)  # tokens that do not exist do not count
    found = rc.admin_profile(params, x, config, mask=mask, **inputs).skip_gain
    for name, expected in by_definition(params, x, config, mask, **inputs).items():
        np.testing.assert_allclose(getattr(found, name), expected, rtol=1e-5)
    assert found.attention[0] == 1 and found.mlp[1] > found.mlp[0]


def test_until_it_is_profiled_the_output_says_so_and_then_it_folds():
    config = network()
    params, x, _ = draw(config)
    one = jax.tree.map(jnp.ones_like, params.layers.attention_gains)
    params = params.replace(layers=params.layers.replace(attention_gains=one, mlp_gains=one))
    apply = jax.jit(rc.apply)
    assert np.isnan(apply(params, x[0], config).output).all()
    profiled = rc.admin_profile(params, x, config, mask=MASK)
    # The first ω is 1: it folds though no embedding comes before it.
    folded, plain = rc.fold_gains(params, profiled)
    expected = apply(params, x[0], profiled).output
    np.testing.assert_allclose(apply(folded, x[0], plain).output, expected, rtol=1e-5, atol=2e-6)


def test_bad_batches_and_networks_are_refused_in_one_line():
    config = network()
    params, x, _ = draw(config)
    nothing = jax.tree.map(jnp.zeros_like, params)
    embedded = network(embedding=rc.EmbeddingConfig(vocab_size=7, d_embed=D))
    infinite = params.layers.mlp.w_out.at[1, 0, 0].set(jnp.inf)
    broken_mlp = draws.changed(params, mlp={"w_out": infinite})
    broken_attention = draws.changed(params, attention={"b_o": jnp.full((L, D), jnp.nan)})
    ids = np.full((B, N), 7)
    for call, mask, message in (
        ((broken_mlp, x, config), MASK, "not finite in the MLP sublayer of layer 1"),
        ((broken_attention, x, config), MASK, "not finite in the attention sublayer of layer 0"),
        ((params, x.at[1, 2, 3].set(jnp.nan), config), MASK, "not finite in the attention subl"),
        ((nothing, 0 * x, config), MASK, "ω = 0 is not positive: nothing varies in the attention"),
        ((params, x, config.replace(norm_placement="pre")), MASK, "'post', not 'pre'"),
        ((params, x, config.replace(mlp_skip=False)), MASK, "skips, but mlp_skip=False"),
        ((params, x[0], config), None, r"x of shape \(5, 8\) is not token ids"),
        ((params, x, config), MASK[:2], r"mask of shape \(2, 5\) is not of 3 examples"),
        ((draws.parameters(embedded), ids, embedded), MASK, "token id 7 is not below vocab_size=7"),
    ):
        is_refused(message, rc.admin_profile, *call, mask=mask)
