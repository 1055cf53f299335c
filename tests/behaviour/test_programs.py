"""A second call with equal shapes compiles nothing, outside of jit and with other floats inside.

Every entry point, vmapped over seeds, also lowers for GPUs and TPUs on a machine that has neither:
one trace and one lowering for three platforms. The program may hold no LAPACK routine, no other
custom call of a CPU, no call back into Python, and no float64.
"""

import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import rank_collapse as rc
from experiments import run_convex_hull as convex_hull
from experiments.stability import dependency
from experiments.train import sorting
from experiments.train.path_sizes import branch_sizes, predicted_sizes
from rank_collapse.theory.expectation import collapse_law
from rank_collapse.training import Hyper, Recipe, init_state, train_epoch
from tests.oracles import draws
from tests.oracles.entry_points import entry_points, make_tokens_point
from tests.support.marks import full_but

SAN = rc.san_skip(2, 2, 4)
PATHS = np.array([[0, 1], [2, 1]])
READ_OUT = (np.ones((4, 2), np.float32), np.zeros(2, np.float32))


def make_trace_call(measure):
    def call(seed):
        params, config = draws.parameters(SAN, seed), SAN.replace(skip_gain=1.0 + seed)
        return measure(params, rc.apply(params, draws.tokens(3, 4, seed), config), config)

    return call


CALLS = {
    "branch_shares": make_trace_call(dependency.branch_shares),
    "branch_sizes": make_trace_call(branch_sizes),
    "dependency": lambda seed: dependency.dependency(np.array([0.5, 0.1 * seed], np.float32)),
    "predicted_sizes": lambda seed: predicted_sizes(0.3 + 0.1 * seed, 3, 2),
    "collapse_law": lambda seed: collapse_law(0.1 * seed, 4, jnp.ones(3) + seed, jnp.ones(3)),
    "path_set_logits": lambda seed: rc.paths.path_set_logits(
        draws.parameters(SAN, seed), draws.tokens(3, 4, seed), SAN, (PATHS + seed) % 3, READ_OUT
    ),
    "monitored": lambda seed: rc.monitored(
        draws.parameters(SAN, seed), draws.tokens(3, 4, seed), SAN
    ),
}


@pytest.mark.parametrize("name", full_but(CALLS, "branch_shares", "monitored"))
def test_a_second_call_compiles_nothing(name, caplog):
    jax.block_until_ready(CALLS[name](0))
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        jax.block_until_ready(CALLS[name](1))
        again = [m for m in caplog.messages if m.startswith("Compiling")]
        assert not again
        jax.jit(lambda a: a + name.count("a"))(0.0)
    assert any(m.startswith("Compiling") for m in caplog.messages)  # it would have been seen


SWEPT = {  # measures of a network whose gains and temperature are swept
    "apply": lambda p, x, c: rc.apply(p, x, c).output,
    "path_contributions": lambda p, x, c: (
        rc.path_contributions(p, x, c, head_gain=jnp.full((3, 2), c.temperature)).by_length
    ),
    "path_set_states": lambda p, x, c: rc.paths.path_set_states(
        p, x, c, jnp.array([[[0, 1, 2], [2, 1, 1]]]) % (1 + c.temperature).astype(int)
    ),
    "log_residual_profile": rc.log_residual_profile,
    "bound_report": lambda p, x, c: rc.bound_report(p, x, c).layer.tightness,
}
GAINS = jnp.array([0.0, 0.5, 1.0])


@pytest.mark.parametrize("name", full_but(SWEPT, "apply", "path_contributions"))
def test_swept_floats_are_one_program_and_vmap_changes_no_number(name):
    config, x, traces = rc.san_skip(3, 2, 8), draws.tokens(5, 8), []
    seeds = [draws.parameters(config, seed) for seed in range(3)]

    @jax.jit
    def measure(params, gain):
        traces.append(1)
        swept = {"skip_gain": gain, "branch_gain": 1 - gain / 2, "temperature": 1 + gain}
        return SWEPT[name](params, x, config.replace(**swept))

    single_runs = np.stack([measure(seeds[1], gain) for gain in GAINS])
    assert len(traces) == 1 and len(np.unique(single_runs, axis=0)) == 3
    by_gain = jax.vmap(measure, (None, 0))(seeds[1], GAINS)
    np.testing.assert_allclose(by_gain, single_runs, rtol=1e-4, atol=1e-4)
    by_seed = jax.vmap(measure, (0, None))(jax.tree.map(lambda *a: jnp.stack(a), *seeds), GAINS[1])
    np.testing.assert_allclose(by_seed[1], single_runs[1], rtol=1e-4, atol=1e-4)


PLATFORMS = ("cuda", "rocm", "tpu")
SEEDS, TOKENS, WIDTH = 3, 6, 8
POST = rc.transformer(2, 2, WIDTH, d_ff=12)
LETTERS = rc.EmbeddingConfig(7, d_embed=WIDTH, positions="learned", num_positions=TOKENS)
POINTS = rc.EmbeddingConfig(d_input=2, d_embed=WIDTH)


def training(make_examples, num_outputs, embedding):
    """Makes one seed's epoch of training, which draws its data and model, as ensembles do."""
    config = POST.replace(embedding=embedding)
    recipe = Recipe(config, num_outputs, batch_size=2, num_epochs=2, shuffle=True)

    def epoch(key):
        key = jax.random.wrap_key_data(key)
        hyper = Hyper(learning_rate=jnp.float32(1e-3))
        return train_epoch(init_state(key, hyper, recipe), make_examples(key), 0, hyper, recipe)

    return epoch, (jax.ShapeDtypeStruct((2,), jnp.uint32),)


# Shapes before float64 is switched on.
PROGRAMS = {
    name: (point.fn, point.shapes)
    for name, point in entry_points(2, 2, WIDTH, TOKENS, d_ff=12).items()
} | {
    "train sort": training(lambda key: sorting.make_examples(key, 4, TOKENS, 7), 7, LETTERS),
    "train hull": training(lambda key: convex_hull.make_examples(key, 4, TOKENS), 2, POINTS),
}


def make_matrix_program(fn):
    point = make_tokens_point(fn, TOKENS, WIDTH)
    return point.fn, jax.tree.map(lambda a: a.update(dtype=jnp.float32), point.shapes)


# Names of factorisations and of top-k in programs for these platforms.
PLATFORM_CALLS = re.compile(
    r"(cu|hip)(solver|blas)\w*_ffi|Eigh|Qr|ProductOfElementaryHouseholderReflectors"
)


def lower(fn, shapes, platforms):
    seeds = jax.tree.map(lambda a: jax.ShapeDtypeStruct((SEEDS, *a.shape), a.dtype), shapes)
    return export.export(jax.jit(jax.vmap(fn)), platforms=platforms)(*seeds).mlir_module()


def find_foreign(module):
    """Finds what a program for an accelerator must not have: a CPU's custom calls, float64.

    JAX's own factorisations for TPUs hold float64 constants that are converted at once.
    """
    calls = set(re.findall(r"custom_call @(\w+)", module))
    wide = {line for line in module.splitlines() if re.search(r"\d+xf64", line)}
    constants = {line for line in wide if re.search(r"constant|convert.*f64>\) -> .*f32>", line)}
    return {c for c in calls if not PLATFORM_CALLS.fullmatch(c)} | (wide - constants)


@pytest.mark.parametrize("name", full_but(PROGRAMS, "apply", "train sort"))
def test_it_lowers_for_every_platform(name):
    """With float64 on, float32 stays float32; training draws in JAX's default type."""
    with jax.enable_x64(not name.startswith("train")):
        assert not find_foreign(lower(*PROGRAMS[name], PLATFORMS))


def test_what_belongs_to_a_cpu_is_found():
    routines = find_foreign(lower(*make_matrix_program(rc.effective_rank), ["cpu"]))
    assert any(name.startswith("lapack_") for name in routines)


def test_float64_is_found(x64):
    wide = lower(*make_matrix_program(lambda x: x.astype(jnp.float64).sum()), PLATFORMS)
    assert any(f"{WIDTH}xf64" in line for line in find_foreign(wide))


def test_a_call_back_into_python_does_not_lower_for_a_device_that_is_not_there():
    with pytest.raises(ValueError, match=r"callback|platform"):
        lower(*make_matrix_program(lambda x: jax.debug.callback(print, x) or x), ["cuda"])
