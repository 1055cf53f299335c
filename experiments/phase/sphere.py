"""Tokens on the sphere over time and inverse temperature: run_phase --figure=geshkovski."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from experiments.shell.flag_values import Flags
from experiments.shell.statements import STATEMENTS
from rank_collapse.theory import sphere

COSINE, STEP = 0.999, 0.1  # of a pair that has met; of time, as published
MOST = 1e4  # time
LATEST = STATEMENTS["clusters"].claimed[1]  # over the law's time
LABELS = {"together": "share of pairs that have met", "clusters": "clusters / tokens"}


@dataclass(frozen=True)
class Sphere:
    """Time across, β upwards; tokens start uniformly on the sphere, Q = K = V = I.

    Attributes:
        options: The flags; n and d are --num_tokens and --d_model.
        x, y: (name, values) of both axes.
    """

    options: Flags
    x: tuple[str, np.ndarray]
    y: tuple[str, np.ndarray]
    labels: Mapping[str, str]

    @property
    def shape(self) -> tuple[int]:
        """Of the cells: values of β."""
        return (len(self.y[1]),)

    @property
    def cells(self) -> dict[str, float]:
        """{name: β}."""
        return {f"beta={beta:.6g}": float(beta) for beta in self.y[1]}

    @property
    def steps(self) -> np.ndarray:
        """Steps of time of the values across."""
        return np.rint(self.x[1] / STEP).astype(int)

    @property
    def measure(self) -> Callable:
        """measure(key, β): "together" and "clusters" [t], "meeting" []; of one draw."""
        n, d = self.options.num_tokens, self.options.d_model

        def measure(key, beta):
            x = jax.random.normal(key, (n, d))
            x = x / jnp.linalg.norm(x, axis=1, keepdims=True)
            path = sphere.trajectory(x, beta, int(self.steps[-1]), STEP)

            def share(x):
                return (jnp.sum(x @ x.T > COSINE) - n) / (n * (n - 1))

            together = jax.vmap(share)(path)
            shown = path[self.steps]
            return {
                "together": together[self.steps],
                "clusters": jax.vmap(sphere.num_clusters)(shown) / n,
                "meeting": jnp.where(together[-1] >= 0.5, STEP * jnp.argmax(together >= 0.5), -1),
            }

        return measure

    def tables(self, results: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """{measure: [y, x, s]}."""
        return {name: results[name].swapaxes(1, 2) for name in self.labels}

    @functools.cached_property
    def law(self) -> np.ndarray:
        """The cosine of tokens that start at right angles, [y, steps of time]."""

        def of(beta):
            return sphere.equiangular_cosine(
                0.0, beta, self.options.num_tokens, int(self.steps[-1]), STEP
            )

        return np.asarray(jax.vmap(of)(jnp.asarray(self.y[1])))

    @property
    def theory(self) -> tuple[np.ndarray, float, str]:
        """(cosine [y, x], the cosine at which tokens have met, name)."""
        return self.law[:, self.steps], COSINE, f"theory: cosine {COSINE:g}"

    def meetings(self, results: Mapping[str, np.ndarray]) -> dict[str, list[float]]:
        """{β: time at which half of the pairs have met over that of the law, by draw}.

        Of the β whose law leaves the draws time to be too late. One that has not met at the end
        counts as meeting then, which is too late.
        """
        found, end = {}, STEP * self.steps[-1]
        for beta, own, law in zip(self.y[1], results["meeting"], self.law, strict=True):
            expected = STEP * np.argmax(law > COSINE)
            if law[-1] > COSINE and LATEST * expected <= end:
                found[f"β={beta:.3g}"] = (np.where(own < 0, end, own) / expected).tolist()
        return found


def sphere_of(options: Flags) -> Sphere:
    """The axes of the flags.

    Raises:
        ValueError: Times or inverse temperatures below 0, times less than a step apart, or above
            `MOST`.
    """
    for name, flag in (("time", "x"), ("β", "y")):
        if options[f"{flag}_range"].value[0] < 0:
            raise ValueError(f"--{flag}_range={options[f'{flag}_range'].value}: {name} is negative")
    times = np.linspace(*options.x_range, options.num_x)
    if times[1] - times[0] < STEP:
        raise ValueError(f"--num_x={options.num_x}: times are less than a step of {STEP} apart")
    if times[-1] > MOST:
        raise ValueError(f"--x_range={options.x_range}: times are above {MOST:g}")
    y = "beta", np.linspace(*options.y_range, options.num_y)
    return Sphere(options, ("time", times), y, LABELS)
