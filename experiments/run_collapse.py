"""Rank collapse with depth: residual of the tokens, layer by layer, at initialisation.

Reproduces the residual figures of Dong, Cordonnier and Loukas (2021) on one network without any
checkpoint: relative residual by layer of pure attention (san), with MLPs (san_mlp), with skips
(san_skip) and of the full Transformer, for any norm placement. Draws what the paper could not: the
residual to any depth, in logarithms, beside the 3^L law and the theorems' bound.

    python -m experiments.run_collapse
    python -m experiments.run_collapse --depth=32 --num_seeds=64 --norm=none,post,pre
    python -m experiments.run_collapse --weight_scale=0.25,0.5,1,2 --skip_gain=0,0.5,1

Half a minute on two cores at the defaults, nearly all of it compiling. Expect the ratio of san and
san_mlp at 0 after three layers, that of san_skip at 0.04 and of transformer at 0.13 after twelve
(more with smaller weights: --weight_scale), and a local rate of 3.00 for san.
"""

import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from jax.sharding import NamedSharding, PartitionSpec

import rank_collapse as rc
from experiments.collapse.results import ENTRY, Results, figures_of, rows_of, summary_of
from experiments.shell import cli
from experiments.shell.progress import Progress
from rank_collapse.measures import residuals
from rank_collapse.network import embedding, layers
from rank_collapse.network.config import INITS, MASKS, NORM_PLACEMENTS
from rank_collapse.runs import seeds
from rank_collapse.text import words
from rank_collapse.theory import bounds, logdomain

VARIANTS = {
    "san": rc.san,
    "san_mlp": rc.san_mlp,
    "san_skip": rc.san_skip,
    "transformer": rc.transformer,
}
DTYPES = {"float32": jnp.float32, "float64": jnp.float64, "bfloat16": jnp.bfloat16}

FLAGS = cli.make_flags("collapse", num_seeds=8)


def _define(kind, name, default, text, *choices):
    getattr(flags, f"DEFINE_{kind}")(name, default, *choices, text, flag_values=FLAGS)


_define("list", "variants", list(VARIANTS), f"Networks, out of {', '.join(VARIANTS)}.")
_define("list", "norm", ["none"], f"Norm placements, out of {', '.join(NORM_PLACEMENTS)}.")
_define("enum", "norm_kind", "layer", "Kind of norm.", layers.NORM_KINDS)
_define("integer", "depth", 12, "Layers; every smaller depth is measured on the way.")
_define("integer", "num_heads", 4, "Heads.")
_define("integer", "d_model", 64, "Width of the tokens.")
_define("integer", "d_ff", None, "Width of the MLP (default 4 d_model).")
_define("enum", "mlp", "gelu", "MLP of san_mlp and transformer.", layers.MLP_KINDS[1:])
_define("boolean", "san_mlp_skip", False, "Keep the MLP's own skip in san_mlp, as published.")
_define("enum", "mask", "none", "Attention mask.", MASKS)
_define("integer", "window", 2, "Reach of --mask=local.")
_define("enum", "init", "lecun", "Initialisation.", INITS)
_define("list", "weight_scale", ["1"], "Multiplies every weight; a list is a sweep.")
_define("list", "skip_gain", ["1"], "Multiplies the skips; a list is a sweep.")
_define("float", "bias_scale", 0.0, "Standard deviation of the biases.")
_define("enum", "inputs", "text", "Tokens.", ("text", "gaussian"))
_define("string", "text_file", None, "UTF-8 text (default: one that comes with the package).")
_define("integer", "num_tokens", 64, "Tokens; fewer where the text is shorter.")
_define("enum", "positions", "sinusoidal", "Positions of text.", embedding.POSITION_KINDS)
_define("enum", "dtype", "float32", "Arithmetic of the forward pass.", list(DTYPES))
_define("integer", "seed_chunk", 16, "Seeds in memory at a time; does not change results.")


def main(options: flags.FlagValues) -> None:
    if options.seed_chunk < 1:
        raise ValueError(f"seed_chunk={options.seed_chunk} is not a positive integer")
    ids, source = read_tokens(options)
    sweep = sweep_of(options)
    networks = {norm: configs_of(options, norm, options.variants) for norm in options.norm}
    mesh = cli.mesh(options)
    with cli.open_run(options, "collapse", extra=source, execution=("seed_chunk",)) as run:
        if run.summary is None:
            total = len(networks) * len(sweep) * options.num_seeds
            with Progress(total, "collapse", log=run.log) as progress, precision(options):
                results = measure_all(options, networks, sweep, ids, mesh, run, progress)
            run.write_rows(rows_of(results))
            for name, figure in figures_of(results).items():
                run.save_figure(figure, name)
            run.finish(summary_of(results))
        print(f"written to {run.path}")


def precision(options: flags.FlagValues) -> Any:
    """float64 where asked for: JAX computes in float32 otherwise."""
    return jax.enable_x64(options.dtype == "float64" or jax.config.jax_enable_x64)


def read_tokens(options: flags.FlagValues) -> tuple[np.ndarray | None, dict[str, str]]:
    """Token ids of the text, or None for Gaussian tokens; and what identifies the input."""
    if options.inputs == "gaussian":
        if options.text_file:
            raise ValueError("--text_file and --inputs=gaussian exclude each other")
        if options.num_tokens < 2:
            raise ValueError(f"num_tokens={options.num_tokens} is fewer than 2")
        return None, {}
    content = words.read_text(options.text_file) if options.text_file else words.default_text()
    ids, _ = words.token_ids(content, options.num_tokens)
    if len(ids) < options.num_tokens:
        print(f"the text has {len(ids)} tokens, fewer than num_tokens={options.num_tokens}")
    return ids, {"text_sha256": cli.content_hash(content.encode())}


def sweep_of(options: flags.FlagValues) -> list[tuple[float, float]]:
    """All pairs (weight scale, skip gain) of the two lists."""
    lists = []
    for name in ("weight_scale", "skip_gain"):
        try:
            values = [float(v) for v in options[name].value]
        except ValueError as error:
            raise ValueError(f"--{name}={','.join(options[name].value)}: {error}") from error
        bad = [v for v in values if not np.isfinite(v)]
        if bad or not values or len(set(values)) < len(values):
            raise ValueError(f"--{name} needs different finite numbers, not {options[name].value}")
        lists.append(values)
    if not np.isfinite(options.bias_scale):
        raise ValueError(f"--bias_scale={options.bias_scale} is not finite")
    return [(scale, gain) for scale in lists[0] for gain in lists[1]]


def configs_of(
    options: flags.FlagValues, norm: str, variants: Sequence[str]
) -> dict[str, rc.TransformerConfig]:
    """The configuration of every variant.

    Raises:
        ValueError: Unknown variant or norm; sizes that do not fit.
    """
    unknown = [v for v in variants if v not in VARIANTS]
    if unknown or not variants:
        raise ValueError(f"variant {''.join(unknown[:1])!r} is not one of {', '.join(VARIANTS)}")
    fields = {name: options[name].value for name in ("d_ff", "mask", "window", "init")}
    fields |= {"norm_placement": norm, "norm": options.norm_kind}
    configs = {}
    for variant in variants:
        own = {}
        if variant in ("san_mlp", "transformer"):
            own["mlp"] = options.mlp
        if variant == "san_mlp":
            own["mlp_skip"] = options.san_mlp_skip
        configs[variant] = VARIANTS[variant](
            options.depth, options.num_heads, options.d_model, **fields, **own
        )
    return configs


def input_tokens(key: Any, ids: np.ndarray | None, options: flags.FlagValues) -> jax.Array:
    """X^0 [n, d] of one seed: Gaussian, or LayerNorm(random embedding of the text + positions)."""
    if ids is None:
        return jax.random.normal(key, (options.num_tokens, options.d_model))
    config = embedding.EmbeddingConfig(
        vocab_size=int(ids.max()) + 1,
        d_embed=options.d_model,
        positions=options.positions,
        num_positions=len(ids),
        # Tables are drawn from normal(0, 0.02); sines are as large as 1, so tokens must be too.
        scale=50.0 if options.positions == "sinusoidal" else 1.0,
    )
    params = embedding.init_embedding(key, config, options.d_model)
    return embedding.embed(params, jnp.asarray(ids), config)


def make_draw(options: flags.FlagValues, ids: np.ndarray | None):
    """draw(key, weight_scale) of one seed: tokens, and parameters that hold every variant's.

    Apart from the measures, since they do not depend on the variant or the norm, and random
    numbers take longest to compile.
    """
    chosen = configs_of(options, "post", options.variants)
    whole = next((c for c in chosen.values() if c.mlp != "none"), next(iter(chosen.values())))

    def draw(key, weight_scale):
        key_tokens, key_params = jax.random.split(key)
        x = input_tokens(key_tokens, ids, options)
        return x, rc.init(key_params, whole, weight_scale, options.bias_scale)

    return draw


def part_of(params: rc.TransformerParams, config: rc.TransformerConfig) -> rc.TransformerParams:
    """The parameters of a whole Transformer that a variant has: what `init` draws for it."""
    absent = {} if config.mlp != "none" else {"mlp": None, "mlp_norm": None}
    if config.norm_placement == "none":
        absent |= {"attention_norm": None, "mlp_norm": None}
    return params.replace(layers=params.layers.replace(**absent))


def make_measure(configs: dict[str, rc.TransformerConfig], options: flags.FlagValues):
    """measure((tokens, parameters), skip_gain) of one seed: every variant on the same draw."""
    dtype = DTYPES[options.dtype]

    def measure(drawn, skip_gain):
        x, params = drawn
        return {
            variant: measure_one(part_of(params, c), x, c.replace(skip_gain=skip_gain), dtype)
            for variant, c in configs.items()
        }

    return measure


def measure_one(
    params: rc.TransformerParams, x: jax.Array, config: rc.TransformerConfig, dtype: Any
) -> dict[str, jax.Array]:
    """Measures by layer [L + 1] of one network on one input."""
    low = jax.tree.map(lambda a: a.astype(dtype), (params, x))
    hidden = rc.apply(*low, config).hidden
    hidden = hidden.astype(jnp.promote_types(dtype, jnp.float32))
    size = jax.vmap(lambda h: residuals.composite_norm(residuals.residual(h)))(hidden)
    out = {
        "ratio": jax.vmap(residuals.residual_ratio)(hidden),
        "plain_log10_residual": jnp.log10(size),
    }
    if bounds.not_covered(config):
        return out | {"log10_residual": logdomain.log_residual_profile(params, x, config)}
    return out | bound_profiles(bounds.bound_report(params, x, config), config.qk_width)


def bound_profiles(report: bounds.BoundReport, width: int) -> dict[str, jax.Array]:
    """Bounds by layer: of the stack so far, from the input; and from the measured layer before.

    `admissible` is 1 where the technical lemma's condition holds: the theorems' bound of layer l
    needs it in all layers up to l.
    """
    num_heads = report.beta.shape[-1]
    depth = jnp.arange(report.log10_residual.shape[0])
    worst = jnp.max(report.beta, axis=1) * report.lipschitz
    prefix = [jax.lax.cummax(jnp.append(a[:1], a)) for a in (worst, jnp.max(report.gamma, axis=1))]
    stack = bounds.log10_theorem(report.log10_residual[0], *prefix, num_heads, width, depth)
    layer = report.layer.log10_rhs + jnp.log10(report.lipschitz)
    return {
        "log10_residual": report.log10_residual,
        "log10_bound": stack,
        "log10_layer_bound": jnp.append(report.log10_residual[:1], layer),
        "admissible": jnp.append(True, jnp.all(report.admissible, axis=1)).astype(stack.dtype),
    }


class Programs:
    """The compiled programs of a run, made when the first is needed, all at once.

    XLA compiles one program on one core; several norm placements are compiled side by side.
    """

    def __init__(self, options, networks, ids, mesh, progress):
        self.options, self.mesh, self.progress = options, mesh, progress
        self.draw = seeds.over_seeds(make_draw(options, ids), mesh)
        self.measures = {
            norm: seeds.over_seeds(make_measure(configs, options), mesh)
            for norm, configs in networks.items()
        }
        self.compiled = False

    def compile(self, keys: jax.Array) -> None:
        """Compiles all, for this many seeds; swept values are traced."""
        one = jnp.asarray(1.0)
        drawn = jax.eval_shape(self.draw, keys, one)
        sharding = NamedSharding(self.mesh, PartitionSpec(seeds.AXIS))
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
        self.compiled = True

    def __call__(self, norm: str, scale: float, gain: float, first: int, count: int, size: int):
        """Measures of seeds first .. first + count − 1 as numpy arrays; `size` are computed."""
        keys = seeds.seed_keys(self.options.seed, count, first)
        keys = seeds.shard_seeds(seeds.pad_seeds(keys, size), self.mesh)
        if not self.compiled:
            self.compile(keys)
        out = self.measures[norm](self.draw(keys, jnp.asarray(scale)), jnp.asarray(gain))
        return seeds.to_host(seeds.trim_seeds(out, count))


def measure_all(options, networks, sweep, ids, mesh, run, progress) -> Results:
    """All measures of all settings, resuming from the run; one compilation per norm placement."""
    programs = Programs(options, networks, ids, mesh, progress)
    size = seeds.padded_size(min(options.seed_chunk, options.num_seeds), mesh)
    results = {}
    for norm, (scale, gain) in itertools.product(networks, sweep):
        part = f"{norm}/weight_scale={scale!r}/skip_gain={gain!r}"
        found = run.part(part) or {}
        done = len(next(iter(found.values()))) if found else 0
        progress.skip(done)
        while done < options.num_seeds:
            count = min(size, options.num_seeds - done)
            out = programs(norm, scale, gain, done, count, size)
            new = {f"{v}/{m}": values for v, group in out.items() for m, values in group.items()}
            check_finite(new, norm, scale, gain, done)
            found = {k: np.concatenate([found[k], a]) if found else a for k, a in new.items()}
            run.save_arrays({f"{part}/{name}": values for name, values in found.items()})
            done += count
            progress.advance(count)
        results[norm, scale, gain] = found
    return results


def check_finite(new: dict[str, np.ndarray], norm: str, scale: float, gain: float, first: int):
    """Names the first variant, seed and layer whose measures are no numbers.

    Raises:
        ValueError: There is one.
    """
    for name, values in new.items():
        bad = np.argwhere(np.isnan(values))
        if len(bad) and not name.endswith("log10_bound"):
            seed, layer = bad[0]
            raise ValueError(
                f"{name.split('/')[0]} (norm={norm}, weight_scale={scale:g}, skip_gain={gain:g}), "
                f"seed {first + seed}: NaN or overflow in the weights or hidden states of layer "
                f"{layer}; a smaller --weight_scale, --norm=post or --dtype=float64 may hold it"
            )


__all__ = ["ENTRY", "FLAGS", "main"]

if __name__ == "__main__":
    cli.run(main, FLAGS)
