"""Admin's profile of the branches: by its definition, and where every pass asks for it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rank_collapse as rc
from tests.oracles import draws
from tests.support.refusals import is_refused

L, H, N, D = 3, 2, 5, 8


B, M = 3, 4


MASK = np.arange(N) < np.array([5, 3, 4])[:, None]


def network(**fields):
    return rc.design(rc.transformer(L, 2, D, mlp="tanh", d_ff=7, **fields), "admin")


def draw(config):
    params = draws.parameters(config, weight_scale=1.5)
    rng = np.random.default_rng(1)
    x = jnp.asarray(0.7 * rng.standard_normal((B, N, D)) + 0.2, float)
    memory = jnp.asarray(rng.standard_normal((B, M, D)), float)
    return params, x, {"memory": memory} if config.cross_attention else {}


def compute_omegas(params, x, config, mask=None, **inputs):
    """Computes each ω by one forward pass, with variances by numpy of what its trace holds."""
    kinds = [k for k in ("attention", "cross", "mlp") if k != "cross" or config.cross_attention]
    omega = {kind: np.ones(L) for kind in ("attention", "cross", "mlp")}
    exists = np.ones((B, N), bool) if mask is None else mask
    run = jax.jit(
        lambda gains: jax.vmap(
            lambda x, extra: rc.apply(params, x, config.replace(skip_gain=gains), **extra)
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
            branch = getattr(config.branch_gain, kind) * branch
            r = np.sqrt(np.var((r * learned * residual)[exists]) + np.var(branch[exists]))
    return {kind: omega[kind] for kind in kinds}


@pytest.mark.parametrize("kind", ["padded encoder", "decoder"])
def test_the_profile_is_as_defined(kind):
    branch = rc.Gains(attention=0.6, cross=1.5, mlp=0.7)
    config = network(cross_attention=kind == "decoder").replace(branch_gain=branch)
    params, x, inputs = draw(config)
    mask = MASK if kind == "padded encoder" else None
    if mask is not None:
        x = jnp.where(mask[..., None], x, 50.0)  # tokens that do not exist do not count
    skip_gain = rc.network.admin_profile(params, x, config, mask=mask, **inputs).skip_gain
    for name, expected in compute_omegas(params, x, config, mask, **inputs).items():
        np.testing.assert_allclose(getattr(skip_gain, name), expected, rtol=1e-5)
    assert skip_gain.attention[0] == 1 and skip_gain.mlp[1] > skip_gain.mlp[0]


@pytest.mark.parametrize("learned", [True, pytest.param(False, marks=pytest.mark.full)])
def test_until_it_is_profiled_every_pass_names_the_profile(learned):
    config = rc.design(rc.transformer(L, 2, D), "admin", learned=learned)
    params, x = draws.parameters(config), draws.tokens(N, D)
    for call in (rc.apply, rc.path_contributions, rc.head_contributions):
        is_refused(r"Unprofiled\(\) .*admin_profile\(", call, params, x, config)
    profiled = rc.network.admin_profile(params, x[None], config)
    assert np.isfinite(rc.apply(params, x, profiled).output).all()


def test_encoder_decoders_are_profiled_half_by_half():
    tokens = rc.EmbeddingConfig(vocab_size=7, d_embed=D, positions="sinusoidal", norm=False)
    half = rc.transformer(2, 2, D, d_ff=7, embedding=tokens)
    both = rc.network.EncoderDecoderConfig(
        half, half.replace(mask="causal", cross_attention=True), shared_embedding=True
    )
    config = rc.design(both, "admin")
    parts = [draws.parameters(c, gain_scale=0.2) for c in (config.encoder, config.decoder)]
    parts = jax.tree.map(np.asarray, parts)  # of NumPy, as those of files are
    parts[1] = parts[1].replace(embedding=parts[1].embedding.replace(tokens=None))
    w = jnp.asarray(np.random.default_rng(3).standard_normal((D, 7)), float)
    params = rc.network.EncoderDecoderParams(*parts, w_output=w)
    ids = jnp.asarray(np.random.default_rng(4).integers(0, 7, (3, 5)))
    mask = np.arange(5) < np.array([5, 3, 4])[:, None]
    module = rc.network.encoder_decoder
    masks = {"source_mask": mask, "target_mask": mask[:, ::-1][:, :4]}
    config = module.admin_profile(params, ids, ids[:, :4], config, **masks)
    encoder_alone = rc.network.admin_profile(params.encoder, ids, config.encoder, mask=mask)
    for kind in ("attention", "mlp"):
        omegas, expected = (getattr(c.skip_gain, kind) for c in (config.encoder, encoder_alone))
        np.testing.assert_allclose(omegas, expected, rtol=1e-6)

    memory = rc.network.apply_batch(params.encoder, ids, config.encoder, mask=mask).output
    decoder_alone = rc.network.admin_profile(
        module.decoder_params(params, config),
        ids[:, :4],
        config.decoder.replace(skip_gain=both.decoder.skip_gain),
        mask=masks["target_mask"],
        memory=memory,
        memory_mask=mask.astype(int),  # 0 and 1 are a mask too
    )
    for kind in ("attention", "cross", "mlp"):
        omegas, expected = (getattr(c.skip_gain, kind) for c in (config.decoder, decoder_alone))
        np.testing.assert_allclose(omegas, expected, rtol=1e-5)


def test_bad_batches_and_networks_are_refused_in_one_line():
    config = network()
    params, x, _ = draw(config)
    zero_params = jax.tree.map(np.zeros_like, params)
    embedded = network(embedding=rc.EmbeddingConfig(vocab_size=7, d_embed=D))
    infinite = draws.with_value(params.layers.mlp.w_out, (1, 0, 0), np.inf)
    broken_mlp = draws.changed(params, mlp={"w_out": infinite})
    broken_attention = draws.changed(params, attention={"b_o": np.full((L, D), np.nan)})
    ids = np.full((B, N), 7)
    for call, mask, message in (
        ((broken_mlp, x, config), MASK, "in the MLP sublayer of layer 1 that is not finite"),
        (
            (broken_attention, x, config),
            MASK,
            "the attention sublayer of layer 0 that is not",
        ),
        (
            (params, draws.with_value(x, (1, 2, 3), np.nan), config),
            MASK,
            "in the attention sublayer of layer 0 that is",
        ),
        (
            (zero_params, 0 * x, config),
            MASK,
            "profiling gave ω = 0 in the attention",
        ),
        ((params, x, config.replace(norm_placement="pre")), MASK, "'post', not 'pre'"),
        ((params, x, config.replace(mlp_skip=False)), MASK, "skips, but mlp_skip=False"),
        ((params, x[0], config), None, r"x of shape \(5, 8\) is not token ids"),
        ((params, x, config), MASK[:2], "different lengths, .*'mask': 2"),
        ((draws.parameters(embedded), ids, embedded), MASK, "token id 7 is not below vocab_size=7"),
    ):
        is_refused(message, rc.network.admin_profile, *call, mask=mask)
    for name in ("mask", "memory_mask"):
        inputs = {name: 3 * MASK}
        message = f"{name} .*other than 0 and 1"
        is_refused(message, rc.network.admin_profile, params, x, config, **inputs)
