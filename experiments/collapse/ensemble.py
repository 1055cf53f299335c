"""Seeds, norm placements and swept values of run_collapse, in chunks that a run resumes from."""

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from jax.sharding import Mesh

import rank_collapse as rc
from experiments.collapse.measure import make_draw, make_measure, part_of
from experiments.collapse.results import Results
from experiments.shell import inputs, memory
from experiments.shell.memory_budget import MemoryBudget, seeds_done
from experiments.shell.progress import Progress
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.parameters import TransformerParams
from rank_collapse.runs import seeds
from rank_collapse.runs.folder import RunFolder
from rank_collapse.theory.logdomain import log_residual_profile


class Programs:
    """The compiled programs of a run, made when the first is needed, all at once.

    XLA compiles one program on one core; several norm placements are compiled side by side.
    """

    def __init__(self, options, networks, ids, mesh, progress):
        self.options, self.mesh, self.progress = options, mesh, progress
        self.networks = networks
        at_once = seeds.seeds_at_once(mesh)
        # Random numbers are slow to optimise, and drawn once.
        self.draw = seeds.spread(make_draw(options, ids), mesh, at_once=at_once, level=0)
        self.measures = {
            norm: seeds.spread(make_measure(configs, options), mesh, at_once=at_once)
            for norm, configs in networks.items()
        }
        self.size = 0  # seeds they are compiled for

    def compiled_for(self, size: int, budget: MemoryBudget) -> int:
        """Seeds that are computed at a time, `size` or as many as fit the memory."""
        if not self.size:
            jitted = self.draw, self.measures

            def needed(size):
                self.draw, self.measures = jitted
                return self.compile(size)

            self.size = budget.fit(needed, self.options.num_seeds, size)
        return self.size

    def compile(self, size: int) -> int:
        """Compiles all, for this many seeds; swept values are traced.

        Returns:
            Bytes that the largest program takes, on all devices.
        """
        keys = seeds.lay_out(seeds.seed_keys(0, size), self.mesh)
        one = jnp.asarray(1.0)
        drawn = jax.eval_shape(self.draw, keys, one)
        sharding = seeds.seed_sharding(self.mesh)
        drawn = jax.tree.map(lambda a: a.update(sharding=sharding), drawn)
        pool = ThreadPoolExecutor()
        try:
            with self.progress.aside("compiling"):
                lowered = {norm: call.lower(drawn, one) for norm, call in self.measures.items()}
                draw = pool.submit(self.draw.lower(keys, one).compile)
                measures = {norm: pool.submit(low.compile) for norm, low in lowered.items()}
                self.draw = draw.result()
                self.measures = {norm: future.result() for norm, future in measures.items()}
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # Ctrl-C does not wait for XLA
        needed = [memory.program_bytes(call) for call in (self.draw, *self.measures.values())]
        return max(needed) * self.mesh.size

    def __call__(self, norm: str, scale: float, gain: float, first: int, count: int):
        """Measures of seeds first .. first + count − 1 as numpy arrays; `size` are computed."""
        keys = seeds.lay_out(seeds.seed_keys(self.options.seed, count, first), self.mesh, self.size)
        drawn = self.draw(keys, jnp.asarray(scale))
        out = seeds.to_host(self.measures[norm](drawn, jnp.asarray(gain)), count)
        networks = self.networks[norm]
        if not any(undecided(out[variant]).size for variant in networks):
            return out
        x, params = seeds.to_host(drawn, count)
        for variant, config in networks.items():
            own = part_of(params, config), x, config.replace(skip_gain=gain)
            with self.progress.aside("residuals in float64"):
                out[variant] = recompute_in_float64(out[variant], *own)
            if self.options.certify:
                with self.progress.aside("residuals in ball arithmetic"):
                    out[variant], lines = prove(out[variant], *own)
                for seed, line in lines.items():
                    self.progress.say(f"{variant} (norm={norm}), seed {first + seed}: {line}")
        return out


def undecided(measures: dict[str, np.ndarray]) -> np.ndarray:
    """Seeds whose residuals rounding decides in some layer, but for those whose states overflow.

    Args:
        measures: {measure: [s, L + 1]}.
    """
    profile = measures["log10_residual"]
    lost = np.isnan(profile) | (profile == np.inf)
    return np.flatnonzero(lost.any(axis=1) & np.isfinite(measures["ratio"]).all(axis=1))


@jax.jit
def _log_profiles(params, x, config):
    return jax.vmap(lambda p, x: log_residual_profile(p, x, config))(params, x)


def recompute_in_float64(
    measures: dict[str, np.ndarray],
    params: TransformerParams,
    x: np.ndarray,
    config: TransformerConfig,
    batch: int = 4,
) -> dict[str, np.ndarray]:
    """The measures of one variant; residuals that rounding decides in float32 from float64.

    Args:
        measures: {measure: [s, L + 1]}.
        params: Of the variant, with a leading seed axis.
        x: Its inputs [s, n, d].
        config: The variant.
        batch: Seeds at a time, for which the pass is compiled once.
    """  # fmt: skip
    profile, lost = np.array(measures["log10_residual"]), undecided(measures)
    if profile.dtype == np.float64 or not lost.size:
        return measures
    profile[profile == np.inf] = np.nan

    def wide(a):
        return np.asarray(a, np.float64) if np.issubdtype(np.asarray(a).dtype, np.floating) else a

    for start in range(0, len(lost), batch):
        chosen = lost[start : start + batch]
        filled = np.resize(chosen, batch)  # the last batch with repeats
        some = jax.tree.map(lambda a, i=filled: wide(a[i]), (params, x))
        with jax.enable_x64(True):
            found = np.asarray(_log_profiles(*some, jax.tree.map(wide, config)))[: len(chosen)]
        better = np.isnan(found).sum(axis=1) <= np.isnan(profile[chosen]).sum(axis=1)
        profile[chosen[better]] = found[better]
    return measures | {"log10_residual": profile}


def prove(
    measures: dict[str, np.ndarray],
    params: TransformerParams,
    x: np.ndarray,
    config: TransformerConfig,
    max_seconds: float = 60.0,
) -> tuple[dict[str, np.ndarray], dict[int, str]]:
    """The measures of one variant, undecided residuals by `rank_collapse.exact_profile`.

    Args:
        measures, params, x, config: As for `recompute_in_float64`.
        max_seconds: No attempt is begun whose estimate for a seed is above.

    Returns:
        The measures, and what became of each seed that was undecided.
    """  # fmt: skip
    profile, lines = np.array(measures["log10_residual"]), {}
    for seed in undecided(measures).tolist():
        own = jax.tree.map(lambda a, seed=seed: a[seed], (params, x))
        try:
            found = rc.exact_profile(*own, config, max_seconds=max_seconds)
        except ValueError as error:
            lines[seed] = f"not proved: {error}"
            continue
        proved = ~np.isnan(found.profile)
        profile[seed, proved] = found.profile[proved]
        lines[seed] = f"proved to layer {proved.sum() - 1} with {found.digits} digits"
        if not proved.all():
            lines[seed] += f"; twice as many would take about {found.more_seconds:.2g} s"
    return measures | {"log10_residual": profile}, lines


def measure_all(
    options: flags.FlagValues,
    networks: dict[str, dict[str, TransformerConfig]],
    sweep: list[tuple[float, float]],
    ids: np.ndarray | None,
    mesh: Mesh,
    run: RunFolder,
) -> Results:
    """All measures of all settings, resuming from the run; one compilation per norm placement.

    Args:
        options: The flags.
        networks: {norm: {variant: configuration}}.
        sweep: Pairs (weight scale, skip gain).
        ids: Token ids of the text; None for Gaussian tokens.
        mesh: Of the devices that share the seeds.
        run: Holds what was measured before; gets each chunk of seeds.

    Raises:
        ValueError: A measure that is no number, see `check_finite`.
    """
    total = len(networks) * len(sweep) * options.num_seeds
    progress = Progress(total, "collapse", log=run.log)
    with progress, inputs.precision(options), MemoryBudget(options, mesh, run.log) as budget:
        programs = options.program(
            "measures", lambda: Programs(options, networks, ids, mesh, progress)
        )
        programs.progress = progress
        size = seeds.padded_size(min(options.seed_chunk, options.num_seeds), mesh)
        return {
            (norm, *swept): measure_setting(programs, norm, *swept, size, budget, run)
            for norm, swept in itertools.product(networks, sweep)
        }


def measure_setting(
    programs: Programs,
    norm: str,
    scale: float,
    gain: float,
    size: int,
    budget: MemoryBudget,
    run: RunFolder,
) -> dict[str, np.ndarray]:
    """All seeds of one setting, `size` at a time if they fit: {"variant/measure": [s, L + 1]}."""
    num_seeds, progress = programs.options.num_seeds, programs.progress
    part = f"{norm}/weight_scale={scale!r}/skip_gain={gain!r}"
    found = run.part(part) or {}
    done = seeds_done(found, num_seeds, run.path, part, (programs.options.depth + 1,))
    progress.skip(done)
    while done < num_seeds:
        count = min(programs.compiled_for(size, budget), num_seeds - done)
        out = programs(norm, scale, gain, done, count)
        new = {f"{v}/{m}": values for v, group in out.items() for m, values in group.items()}
        setting = f"norm={norm}, weight_scale={scale:g}, skip_gain={gain:g}"
        for line in gaps(new, setting, done):
            progress.say(line)
        found = {k: np.concatenate([found[k], a]) if found else a for k, a in new.items()}
        run.save_arrays({f"{part}/{name}": values for name, values in found.items()})
        done += count
        progress.advance(count)
    return found


def gaps(new: dict[str, np.ndarray], setting: str, first: int) -> Iterator[str]:
    """Why curves have gaps: one line for each variant whose residuals are not known to the end.

    Args:
        new: {"variant/measure": [s, L + 1]}.
        setting: Of the sweep, as the line names it.
        first: Number of the first seed.
    """
    reasons = {
        "ratio": "the hidden states overflow",
        "log10_residual": "rounding decides it (--certify proves more), or states overflow",
    }
    for name, values in new.items():
        variant, measure = name.split("/")
        unknown = np.isnan(values)
        if measure not in reasons or not unknown.any():
            continue
        seeds, layers = np.flatnonzero(unknown.any(axis=1)), np.argmax(unknown, axis=1)
        yield (
            f"{variant} ({setting}): no {measure} in {len(seeds)} of {len(values)} seeds, "
            f"first in seed {first + seeds[0]} from layer {layers[seeds[0]]}: {reasons[measure]}"
        )
