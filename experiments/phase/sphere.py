"""Tokens on the sphere over time and inverse temperature: run_phase --figure=geshkovski."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from experiments.phase.diagrams import Diagram, values_of_axes
from experiments.shell.options import Flags
from experiments.shell.statements import STATEMENTS, row_of
from rank_collapse.theory import sphere

COSINE, STEP = 0.999, 0.1  # of a pair that has met; of time, as published
MOST = 1e4  # time
LATEST = STATEMENTS["clusters"].claimed[1]  # over the law's time
MEASURES = {"together": "share of pairs that have met", "clusters": "clusters / tokens"}
LABELS = MEASURES | {"beta": r"$\beta$"}


def sphere_of(options: Flags) -> Diagram:
    """Time across, β upwards; tokens start uniformly on the sphere, Q = K = V = I.

    Measured are "together" and "clusters" [y, x, s], and "meeting" [y, s], when half of the pairs
    have met, or -1.

    Args:
        options: The flags; n and d are --num_tokens and --d_model.

    Raises:
        ValueError: Times or inverse temperatures below 0, times less than a step apart, or above
            `MOST`.
    """
    if options.x_range[0] < 0 or options.y_range[0] < 0:
        raise ValueError(
            f"--x_range={options.x_range} and --y_range={options.y_range}: a time or β is negative"
        )
    times, betas = values_of_axes(options)
    if times[1] - times[0] < STEP or times[-1] > MOST:
        limits = f"less than a step of {STEP} apart, or above {MOST:g}"
        raise ValueError(f"--x_range={options.x_range} --num_x={options.num_x}: times are {limits}")
    n, steps = options.num_tokens, np.rint(times / STEP).astype(int)
    last = int(steps[-1])

    def of_one_seed(key, beta):
        x = jax.random.normal(key, (n, options.d_model))
        x = x / jnp.linalg.norm(x, axis=1, keepdims=True)
        path = sphere.trajectory(x, beta, last, STEP)
        together = jax.vmap(lambda x: (jnp.sum(x @ x.T > COSINE) - n) / (n * (n - 1)))(path)
        return {
            "together": together[steps],
            "clusters": jax.vmap(sphere.num_clusters)(path[steps]) / n,
            "meeting": jnp.where(together[-1] >= 0.5, STEP * jnp.argmax(together >= 0.5), -1),
        }

    @functools.cache
    def cosines():  # of tokens that start at right angles, [y, steps of time]
        law = jax.vmap(lambda beta: sphere.equiangular_cosine(0.0, beta, n, last, STEP))
        return np.asarray(law(jnp.asarray(betas)))

    def claims(results):
        return [row_of("clusters", *row) for row in late(betas, results["meeting"], cosines())]

    return Diagram(
        options,
        ("time", times),
        ("beta", betas),
        LABELS,
        {f"beta={beta:.6g}": float(beta) for beta in betas},
        of_one_seed,
        lambda found: (
            {n: found[n].swapaxes(1, 2) for n in MEASURES} | {"meeting": found["meeting"]}
        ),
        lambda: (cosines()[:, steps], COSINE, f"theory: cosine {COSINE:g}"),
        "pairs that have met",
        claims,
    )


def late(
    betas: np.ndarray, meetings: np.ndarray, cosines: np.ndarray
) -> Iterator[tuple[str, np.ndarray]]:
    """(β, time at which half of the pairs have met over that of the law [s]).

    Of the β whose law leaves the draws time to be too late. One that has not met at the end
    counts as meeting then, which is too late.

    Args:
        betas: [y].
        meetings: Times [y, s], -1 of a draw that has not met.
        cosines: Of the law, [y, steps of time].
    """
    end = STEP * (cosines.shape[1] - 1)
    for beta, times, law in zip(betas, meetings, cosines, strict=True):
        expected = STEP * np.argmax(law > COSINE)
        if law[-1] > COSINE and LATEST * expected <= end:
            yield f"β={beta:.3g}", np.where(times < 0, end, times) / expected
