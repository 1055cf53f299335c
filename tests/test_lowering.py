"""Every entry point, vmapped over seeds, lowers for GPUs and TPUs on a machine that has neither.

One trace of a function and one lowering for three platforms. No LAPACK routine and no other custom
call of a CPU may be left in it, no call back into Python, and no float64.
"""

import importlib.util
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax import export

import rank_collapse as rc
from experiments.benchmarks import absent_devices
from experiments.benchmarks.entry_points import entry_points, of_tokens
from rank_collapse.training import Hyper, Recipe, init_state, train_epoch
from rank_collapse.training.tasks import convex_hull, sorting

PLATFORMS = ("cuda", "rocm", "tpu")
SEEDS, TOKENS, WIDTH = 3, 6, 8
POST = rc.transformer(2, 2, WIDTH, d_ff=12)
LETTERS = rc.EmbeddingConfig(7, d_embed=WIDTH, positions="learned", num_positions=TOKENS)
POINTS = rc.EmbeddingConfig(d_input=2, d_embed=WIDTH)


def training(make_examples, num_outputs, embedding):
    """An epoch of one seed, data and model drawn inside, as ensembles have it."""
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


def of_matrix(fn):
    point = of_tokens(fn, TOKENS, WIDTH)
    return point.fn, jax.tree.map(lambda a: a.update(dtype=jnp.float32), point.shapes)


# Factorisations and top-k, as compilers for these platforms have them.
KNOWN = re.compile(r"(cu|hip)(solver|blas)\w*_ffi|Eigh|Qr|ProductOfElementaryHouseholderReflectors")


def lowered(fn, shapes, platforms):
    seeds = jax.tree.map(lambda a: jax.ShapeDtypeStruct((SEEDS, *a.shape), a.dtype), shapes)
    return export.export(jax.jit(jax.vmap(fn)), platforms=platforms)(*seeds).mlir_module()


def foreign(module):
    """What must not stand in a program for an accelerator: other custom calls, float64 arithmetic.

    JAX's own factorisations for TPUs hold float64 constants that are converted at once.
    """
    calls = set(re.findall(r"custom_call @(\w+)", module))
    wide = {line for line in module.splitlines() if re.search(r"\d+xf64", line)}
    constants = {line for line in wide if re.search(r"constant|convert.*f64>\) -> .*f32>", line)}
    return {c for c in calls if not KNOWN.fullmatch(c)} | (wide - constants)


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_lowers_for_every_platform(name):
    """With float64 switched on, float32 stays float32; training draws in JAX's default type."""
    with jax.enable_x64(not name.startswith("train")):
        assert not foreign(lowered(*PROGRAMS[name], PLATFORMS))


def test_what_belongs_to_a_cpu_is_found():
    routines = foreign(lowered(*of_matrix(rc.effective_rank), ["cpu"]))
    assert any(name.startswith("lapack_") for name in routines)


def test_float64_is_found(x64):
    wide = lowered(*of_matrix(lambda x: x.astype(jnp.float64).sum()), PLATFORMS)
    assert any(f"{WIDTH}xf64" in line for line in foreign(wide))


def test_a_call_back_into_python_does_not_lower_for_a_device_that_is_not_there():
    with pytest.raises(ValueError, match=r"callback|platform"):
        lowered(*of_matrix(lambda x: jax.debug.callback(print, x) or x), ["cuda"])


@pytest.mark.skipif(
    importlib.util.find_spec(absent_devices.PLUGINS["h100"][0]) is None,
    reason='the compiler for GPUs is missing: pip install "jax[cuda13]"',
)
def test_training_of_a_single_seed_compiles_for_a_gpu():
    """At the published sizes of run_sort, which XLA refuses to compile by Triton."""
    code = (
        "from experiments.benchmarks import absent_devices as a\n"
        "from rank_collapse.runs import seeds\n"
        "mesh = seeds.seed_mesh(a.topology('h100').devices[:1])\n"
        "a.epoch_of('sort', 1, mesh, 'full')[0].lower().compile()\n"
    )
    environment = os.environ | absent_devices.environment("h100")
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
