"""Tokens as points on the unit sphere: equiangular tokens, metastable clusters, several heads."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import rank_collapse as rc
from experiments.theorems import prescribed_networks
from experiments.theorems.cases import compute_cases
from experiments.theorems.outcomes import DRAW, Curve, Panel, Theorem
from rank_collapse.runs import seeds

EQUIANGULAR = {8: (1.0,), 32: (1.0, 4.0), 64: (9.0,)}  # {tokens: β}
TIMES = np.arange(1, 7)
SMALL_GAIN = 0.005
GAINS = (0.08, 0.04, 0.02)
BETAS = (4, 9, 16, 25, 36, 49, 64, 100)


def equiangular_flow(times: np.ndarray, n: int, beta: float, steps: int = 400) -> np.ndarray:
    """Integrates γ' = 2 e^{βγ} (1 − γ)((n − 1)γ + 1)/(e^β + (n − 1) e^{βγ}) from γ = 0.

    Args:
        times: Whole numbers, in units of the flow, ascending.
        n, beta: Tokens and inverse temperature.
        steps: Steps of the classical Runge-Kutta method in each unit of time.

    Returns:
        γ at the times.

    Source: Geshkovski et al. 2023, arXiv 2312.10794.
    """

    def slope(c):
        weight = np.exp(beta * (c - 1))
        return 2 * weight * (1 - c) * ((n - 1) * c + 1) / (1 + (n - 1) * weight)

    cosine, step, values = 0.0, 1 / steps, []
    for index in range(1, int(times[-1]) * steps + 1):
        a = slope(cosine)
        b = slope(cosine + step / 2 * a)
        c = slope(cosine + step / 2 * b)
        cosine += step / 6 * (a + 2 * b + 2 * c + slope(cosine + step * c))
        if index % steps == 0 and index // steps in times:
            values.append(cosine)
    return np.array(values)


def pass_equiangular(
    beta: float | jax.Array,
    gain: float | jax.Array,
    *,
    n: int,
    depth: int,
    times: np.ndarray = TIMES,
) -> jax.Array:
    """Measures the mean token cosine at some times of n orthonormal tokens, [t].

    Args:
        beta: Inverse temperature.
        gain: Gain of a layer.
        n: Tokens.
        depth: Layers, as many as the last time needs; with those of the smallest gain one program
            serves all gains.
        times: Whole numbers, in units of the flow, ascending.
    """
    layers_per_time = jnp.round(1 / gain).astype(int)
    config = prescribed_networks.make_sphere(depth, n, beta, 1 / layers_per_time)
    params = prescribed_networks.make_params(config)
    states = prescribed_networks.pass_states(params, jnp.eye(n), config)[layers_per_time * times]
    return rc.profile(states, measures="token_cosine")["token_cosine"]


def equiangular_curves(seed: int) -> list[Curve]:
    """Compares the common cosine of orthonormal tokens with the flow, and its error by the gain."""
    curves, depth = [], round(TIMES[-1] / SMALL_GAIN)
    for n, betas in EQUIANGULAR.items():
        measure = partial(pass_equiangular, gain=SMALL_GAIN, n=n, depth=depth)
        measured = compute_cases(measure, betas)
        for beta, cosines in zip(betas, measured, strict=True):
            flow = equiangular_flow(TIMES, n, beta)
            curves.append(Curve(f"{n} tokens, β {beta:g}", TIMES, flow, cosines, tolerance=0.02))
    gains, time = np.array(GAINS), TIMES[:1]
    depth = round(time[-1] / min(GAINS))
    measure = partial(pass_equiangular, 1.0, n=8, depth=depth, times=time)
    errors = np.abs(compute_cases(measure, gains) - equiangular_flow(time, 8, 1.0))[:, 0]
    first_order = errors[-1] * gains / gains[-1]
    name = "8 tokens, β 1: error, first order in a"
    curves.append(Curve(name, gains, first_order, errors, tolerance=0.1, panel=1))
    return curves


def mode_growth(beta: float, most: int = 24) -> np.ndarray:
    """Computes the rates k² I_k(β)/(β I_0(β)) of the modes k = 1 .. most on the circle."""
    angles = np.linspace(0, 2 * np.pi, 4096, endpoint=False)
    bessel = np.fft.rfft(np.exp(beta * (np.cos(angles) - 1))).real
    modes = np.arange(1, most + 1)
    return modes**2 * bessel[1 : most + 1] / (beta * bessel[0])


def pass_modes(
    beta: float | jax.Array, *, n: int = 256, time: float = 1.0, depth: int = 200, most: int = 24
) -> jax.Array:
    """Measures the rates of all modes at once, from small waves on uniform tokens.

    Args:
        beta: Inverse temperature.
        n: Tokens.
        time: Time for which modes grow.
        depth: Layers.
        most: The last mode.
    """
    angles, modes = np.linspace(0, 2 * np.pi, n, endpoint=False), np.arange(1, most + 1)
    # Phases of Newman keep the sum of all waves small.
    waves = np.sin(np.outer(angles, modes) + np.pi * modes**2 / most).sum(axis=-1)
    start = angles + 1e-6 * waves
    config = prescribed_networks.make_sphere(depth, 2, beta, time / depth)
    tokens = jnp.stack([jnp.cos(start), jnp.sin(start)], axis=-1)
    states = prescribed_networks.pass_states(
        prescribed_networks.make_params(config), tokens, config, depth
    )
    moved = jnp.arctan2(states[..., 1], states[..., 0]) - angles[None]
    moved = (moved + np.pi) % (2 * np.pi) - np.pi
    sizes = jnp.abs(jnp.fft.rfft(moved, axis=-1))[:, 1 : most + 1]
    return jnp.log(sizes[1] / sizes[0]) / time


def metastable_curves(seed: int) -> list[Curve]:
    """Compares growth of modes with its formula, and the fastest mode with √(2β)."""
    rates = dict(zip(BETAS, compute_cases(pass_modes, BETAS), strict=True))
    modes = np.arange(1, 25)
    curves = [Curve(f"β {b}", modes[:10], mode_growth(b)[:10], rates[b][:10]) for b in (4, 16)]
    fastest = [1 + np.argmax(rates[beta]) for beta in BETAS]
    exact = [1 + np.argmax(mode_growth(beta)) for beta in BETAS]
    curves.append(Curve("fastest mode of the formula", BETAS, exact, fastest, tolerance=0, panel=1))
    roots = np.sqrt(2 * np.array(BETAS))
    curves.append(Curve("√(2β)", BETAS, roots, fastest, tolerance=0.15, panel=1))
    return curves


def multi_head_energy(states: jax.Array, matrices: jax.Array, beta: float | jax.Array) -> jax.Array:
    """Computes Σ_ij exp(β⟨x_i, M_h x_j⟩)/(2βn²) of each head and state, [l, h]."""
    scores = beta * jnp.einsum("lnd,hde,lme->lhnm", states, matrices, states)
    return jnp.mean(jnp.exp(scores), axis=(-2, -1)) / (2 * beta)


def exponential_weights(scores: jax.Array, context: object) -> jax.Array:
    """Computes e^{scores}/n, attention weights that are not divided by their row's sum."""
    return jnp.exp(scores) / scores.shape[-1]


NORMALISATIONS = {"no softmax": exponential_weights, "softmax": None}
ENERGY_GAIN = 0.01


def pass_energies(
    key: jax.Array,
    *,
    normalise: Callable | None,
    heads: int = 4,
    beta: float | jax.Array = 1.0,
    n: int = 16,
    d: int = 6,
    depth: int = 300,
) -> jax.Array:
    """Computes the energy of each head and state, [l, h], for random symmetric M_h.

    Args:
        key: Random key for the tokens on the sphere and for M_h, the score and value matrix of head
            h.
        normalise: As in the configuration; None for softmax.
        heads, beta, n, d, depth: H, β, tokens, width, layers.
    """
    key_m, key_x = jax.random.split(key)
    m = jax.random.normal(key_m, (heads, d, d)) / jnp.sqrt(d)
    m = (m + jnp.swapaxes(m, 1, 2)) / 2
    config = prescribed_networks.make_sphere(
        depth, d, beta, ENERGY_GAIN, num_heads=heads, normalise=normalise
    )
    x = prescribed_networks.draw_sphere(key_x, n, d)
    states = prescribed_networks.pass_states(
        prescribed_networks.make_params(config, m, m), x, config
    )
    return multi_head_energy(states, m, beta)


def least_increment(energies: jax.Array | np.ndarray) -> jax.Array | np.ndarray:
    """Computes the least increment of a layer over E(0), of the energy of all heads.

    Args:
        energies: By head and state, [..., l, h].

    Returns:
        [...]; a NumPy array of NumPy arrays.
    """
    total = energies.sum(axis=-1)
    return (total[..., 1:] - total[..., :-1]).min(axis=-1) / total[..., 0]


def energy_curves(seed: int, *, draws: int = 8) -> list[Curve]:
    """Measures the energy along layers, and its least increment by draw, for both weights.

    With softmax some draws fall and others do not, so that eight draws decide nothing: these curves
    are only shown, and the statement "softmax energy" has the statistic over many draws.
    """
    x, keys, curves = np.arange(draws), seeds.seed_keys(seed, draws), []
    for name, normalise in NORMALISATIONS.items():
        energies = compute_cases(lambda key, fn=normalise: pass_energies(key, normalise=fn), keys)
        total = energies.sum(axis=-1)
        least = least_increment(energies)
        is_stated = normalise is not None
        name = f"all heads, {name}"
        relation = "≥" if is_stated else "none"
        curves.append(Curve(name, x, 0, least, relation, 1e-12, panel=1))
        worst = np.argmin(least)  # the draw whose energy grows least
        times = np.arange(0, total.shape[1], 25)
        label, shown = f"{name}, worst of {draws} draws", (total[worst] / total[worst, 0])[times]
        curves.append(Curve(label, ENERGY_GAIN * times, np.nan, shown, "none"))
        if is_stated:
            single = np.diff(energies, axis=1).min(axis=(1, 2)) / total[:, 0]
            name = "a single head, no softmax"
            curves.append(Curve(name, x, np.nan, single, "none", panel=1))
            heads = energies[worst] / energies[worst, 0]
            falling = np.argmin(heads[-1])
            name = "a single head of it, no softmax"
            curves.append(Curve(name, ENERGY_GAIN * times, np.nan, heads[times, falling], "none"))
    return curves


THEOREMS = (
    Theorem(
        "equiangular",
        "Geshkovski et al. 2023 (2312.10794)",
        "memory",
        "Orthonormal tokens on the sphere keep one common cosine γ, which goes to 1.",
        "γ' = 2e^{βγ}(1−γ)((n−1)γ+1)/(e^β+(n−1)e^{βγ}), γ(0) = 0",
        "Q = K = V = I, one head, n ≤ d, unit norm after each layer, branch gain a → 0",
        "`rc.apply` (post-norm, unit norm), `rc.profile` token_cosine",
        "Yes: how many layers until tokens are alike, with the branch gain as time.",
        (
            Panel("time t (layers × gain)", "mean cosine of two tokens"),
            Panel("gain a of the branch", "error of the cosine at t = 1", "xy"),
        ),
        equiangular_curves,
        terms="Tokens are unit vectors. They are orthonormal at first, so that two tokens have the "
        "cosine γ = 0. The prediction is a flow, the limit of many layers with a small gain.",
    ),
    Theorem(
        "metastable",
        "Bruno et al. 2024 (2410.23228)",
        "memory",
        "Uniform tokens first form clusters, one for each crest of the fastest-growing wave.",
        "mode k grows at the rate k² I_k(β)/(β I_0(β)); the fastest k is about √(2β)",
        "Circle (d = 2), many tokens, Q = K = V = I, small waves on uniform tokens",
        "`rc.apply` (post-norm, unit norm), Fourier modes of the angles",
        "Little: it explains why token clusters in the middle layers number more than one.",
        (
            Panel("mode k (waves on the circle)", "growth rate, per unit of time"),
            Panel("inverse temperature β", "fastest-growing mode k", "xy"),
        ),
        metastable_curves,
        terms="The tokens are spread evenly on a circle at first. Wave k is a pattern of k crests "
        "in the density of the tokens. It grows or fades with time.",
    ),
    Theorem(
        "multi_head_energy",
        "Pendharkar 2026 (2605.04279)",
        "abstract",
        "The energy, a sum over heads and pairs of tokens, never falls along multi-head attention.",
        "E = Σ_h Σ_ij exp(β⟨x_i, M_h x_j⟩)/(2βn²), E(l + 1) ≥ E(l)",
        "Symmetric M_h for scores and values, weights that are not normalised, small gain",
        "`rc.apply` with `normalise=`, energy of its states",
        "Little: no trained network has W_V W_O = W_Q W_Kᵀ.",
        (
            Panel("time t (layers × gain)", "energy E(t)/E(0)"),
            Panel(DRAW, "least increment of a layer / E(0)"),
        ),
        energy_curves,
        terms="The energy of the tokens is the sum of e^score over all heads and all pairs of "
        "tokens. Here attention leaves out the denominators of the softmax.",
    ),
)
