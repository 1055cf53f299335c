"""Measurements layer by layer against the same measurements of the network in memory."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rank_collapse as rc
from experiments.trained.chains import ChainPass
from rank_collapse import pretrained
from rank_collapse.network import surgery
from rank_collapse.network.measured import influence
from rank_collapse.network.measured.heads import measure_heads
from rank_collapse.network.measured.influence import InfluencePass
from rank_collapse.network.measured.states import ProfilePass
from rank_collapse.network.passes import LayerMeasure, States
from rank_collapse.paths import next_token
from rank_collapse.paths.contributions import LengthPass, path_contributions
from rank_collapse.pretrained import AblationSpec, Group, InMemory, streaming
from rank_collapse.pretrained.predictions import LensPass, next_tokens, targets_of
from rank_collapse.theory.reports import BoundPass, bound_report
from tests.oracles import draws
from tests.oracles.path_examples import (
    chain_effects,
    heads_in_memory,
    over_batch,
    profile_in_memory,
)
from tests.support.closeness import assert_close, near
from tests.support.folders import GOLDEN
from tests.support.marks import full_but

FAMILIES = full_but(
    ["llama-grouped", "albert-groups", "t5-gated", "gpt2-head", "bert-untied"], "llama-grouped"
)
MEASURES = ("residual_ratio", "token_cosine")
TOLERANCE = 2e-5
SAN = AblationSpec("SAN")
STATES = {"whole": Group((("states", States()),))}


def batch(config, n=7):
    rng = np.random.default_rng(0)
    ids = rng.integers(3, config.embedding.vocab_size, (3, n))
    mask = np.arange(n)[None] < np.array([n, n - 2, n - 1])[:, None]
    return {"x": ids, "mask": mask}


def largest_gap(values, expected):
    """Computes the largest difference of two trees, relative to the largest entry of an array."""

    def compute_gap(a, b):
        a, b = (np.asarray(c, np.float64) for c in (a, b))
        assert a.shape == b.shape
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        return np.max(np.where(same, 0, np.abs(a - b))) / np.max(
            np.abs(b[np.isfinite(b)]), initial=1e-30
        )

    return max(jax.tree.leaves(jax.tree.map(compute_gap, values, expected)), default=0.0)


def drop_chance(profile):
    """Drops the spikes in residuals of mere rounding, where they are chance."""
    measures = {name: profile[name] for name in MEASURES}
    return measures, profile.rounding, profile.spiked & ~profile.rounding


@pytest.mark.parametrize("name", FAMILIES)
def test_streamed_is_what_the_network_in_memory_gives(name):
    config, params = pretrained.load(GOLDEN / name)
    inputs = batch(config)
    source = pretrained.open_checkpoint(GOLDEN / name)
    passes = (
        ("profile", ProfilePass(MEASURES)),
        ("lengths", LengthPass()),
        ("chains", ChainPass(2)),
        ("attention", LayerMeasure(measure_heads)),
        ("influence", InfluencePass()),
    )
    groups = {
        "whole": Group(passes),
        "SAN": Group((("profile", ProfilePass(MEASURES)),), SAN, last=1),
    }
    streamed = pretrained.stream(source, inputs, groups, chunk=2)

    def measure_in_memory(measure, cut="Transformer", count=None, **static):
        ablated = surgery.ablate(config, params, cut)
        arguments = {k: v[:count] for k, v in inputs.items()}
        return over_batch(measure, ablated[1], ablated[0], arguments, **static)

    expected = {
        "profile": measure_in_memory(profile_in_memory, measures=MEASURES),
        "lengths": measure_in_memory(path_contributions),
        "chains": measure_in_memory(chain_effects, num_paths=2),
        "attention": measure_in_memory(heads_in_memory),
        "influence": measure_in_memory(influence.layer_influence),
    }
    gaps = {key: largest_gap(streamed["whole"][key], expected[key]) for key in expected}
    san = measure_in_memory(profile_in_memory, "SAN", 1, measures=MEASURES)
    gaps["SAN"] = largest_gap(drop_chance(streamed["SAN"]["profile"]), drop_chance(san))
    print(name, gaps)
    assert max(gaps.values()) < TOLERANCE, gaps


@pytest.mark.full
@pytest.mark.parametrize("kind", full_but(["mask", "bias"], "mask"))
def test_bounds_are_refused_where_rows_differ_as_in_memory(kind):
    """Each text has its own [n, n] mask or bias, of which the config says nothing."""
    config, params = pretrained.load(GOLDEN / "bert")
    source, n = pretrained.open_checkpoint(GOLDEN / "bert"), 5
    array = np.tril(np.ones((n, n), bool)) if kind == "mask" else np.ones((1, n, n), np.float32)
    inputs = {"x": batch(config, n)["x"][:1], kind: array[None]}
    group = {"SAN": Group((("bounds", BoundPass()),), SAN)}
    report = pretrained.stream(source, inputs, group)["SAN"]["bounds"]
    config, params = surgery.ablate(config, params, "SAN")
    expected = bound_report(params, inputs["x"][0], config, **{kind: array})
    assert report.not_covered == expected.not_covered and "rows" in report.not_covered[0]
    for name in ("mean_head", "mean_layer", "diameter_layer", "diameter"):
        assert np.isnan(getattr(report, name).log10_rhs).all(), name
    padded = {"x": inputs["x"], "mask": np.arange(n)[None] < n - 1}
    covered = pretrained.stream(source, padded, group)["SAN"]["bounds"]
    assert not any(reason.startswith("rows") for reason in covered.not_covered)
    assert np.isfinite(covered.mean_layer.log10_rhs).all()


@pytest.mark.full
def test_next_tokens_of_a_language_model():
    folder = GOLDEN / "llama-grouped"
    config, _ = pretrained.load(folder)
    source, inputs = pretrained.open_checkpoint(folder), batch(config)
    passes = ("sums", LengthPass()), ("states", States())
    streamed = pretrained.stream(source, inputs, {"all": Group(passes)})["all"]
    targets, keep = targets_of(inputs["x"], inputs["mask"])
    assert not keep[:, -1].any() and keep[0, :-1].all() and keep[1].sum() == 4
    table = source.unembedding.table.read(0, config.embedding.vocab_size)

    def compute_loss(output, i):
        logits = output @ jnp.asarray(table).T
        losses = jax.nn.logsumexp(logits, axis=-1) - logits[jnp.arange(7), targets[i]]
        return jnp.sum(jnp.where(keep[i], losses, 0)) / keep[i].sum()

    output = jnp.asarray(streamed["sums"].output)
    predictions = next_tokens(source.unembedding, output[:, None], jnp.eye(1), targets)
    ours, _ = jax.vmap(next_token.measure_agreement)(predictions, jnp.asarray(keep))
    expected = [compute_loss(output[i], i) for i in range(3)]
    np.testing.assert_allclose(ours[:, 0], expected, rtol=1e-5)


@pytest.mark.full
def test_a_head_with_a_scale_and_a_bias():
    rng = np.random.default_rng(0)
    table, bias, output = (
        rng.standard_normal(s).astype(np.float32) for s in ((9, 4), 9, (1, 6, 4))
    )
    targets, _ = targets_of(rng.integers(9, size=(1, 6)))
    scaled = pretrained.Unembedding(0.3 * table, 0.3 * bias)
    head = pretrained.Unembedding(table, bias, scale=0.3)
    predictions, expected = (
        next_tokens(one, output[:, None], jnp.eye(1), targets) for one in (head, scaled)
    )
    assert largest_gap(predictions, expected) < 1e-6


@pytest.mark.full
def test_texts_of_different_lengths_are_filled_up_and_masked():
    """Each text is measured as it is alone; the caller's mask stays."""
    config, params = pretrained.load(GOLDEN / "bert")
    source, passes = pretrained.InMemory(params, config), (("profile", ProfilePass(MEASURES)),)
    texts = [[5, 8, 13, 21, 3], np.array([7, 2]), (9, 4, 4)]
    segments = [[0] * len(text[:-1]) + [1] for text in texts]
    streamed = pretrained.stream(source, {"x": texts, "segments": segments}, {"": Group(passes)})
    for i, (text, segment) in enumerate(zip(texts, segments, strict=True)):
        inputs = {"x": np.array([text]), "segments": np.array([segment])}
        expected = over_batch(profile_in_memory, params, config, inputs, measures=MEASURES)
        text_profile = jax.tree.map(lambda a, i=i: a[i : i + 1], streamed[""]["profile"])
        near(text_profile, expected, rtol=1e-4)
    masked = {"x": texts, "mask": np.arange(5) < np.array([[5], [2], [2]])}
    streamed = pretrained.stream(source, masked, {"": Group(passes)})[""]["profile"]
    shorter = pretrained.stream(source, {"x": [*texts[:2], texts[2][:2]]}, {"": Group(passes)})
    near(streamed, shorter[""]["profile"], rtol=1e-4)


@pytest.mark.full
def test_one_program_serves_all_layers(monkeypatch):
    source, traced, counts = pretrained.open_checkpoint(GOLDEN / "llama-grouped"), [], []
    assemble_layer = streaming.assemble_layer

    def count_assembly(*arguments):
        traced.append(arguments)
        return assemble_layer(*arguments)

    monkeypatch.setattr(streaming, "assemble_layer", count_assembly)
    jax.clear_caches()  # of other tests
    groups = {"all": Group((("lengths", LengthPass()), ("chains", ChainPass(2))))}
    pretrained.stream(
        source, batch(source.config), groups, chunk=2, done=lambda _: counts.append(len(traced))
    )
    assert len(counts) == source.config.depth > 1
    assert counts[0] >= len(groups) and len(set(counts)) == 1


@pytest.mark.full
@pytest.mark.parametrize("family", full_but(["bert", "albert"], "albert"))
def test_an_ablation_is_the_one_published_for_the_family(family):
    config = rc.TransformerConfig(
        depth=2, num_heads=1, d_model=4, attention_skip=True, mlp="gelu", mlp_skip=True
    )
    params = draws.parameters(config, bias_scale=0.0)
    inputs = {"x": np.random.default_rng(0).normal(size=(1, 3, 4)).astype(np.float32)}
    profile = (("profile", ProfilePass(MEASURES)),)
    family_config = config.replace(family=family, skip_gain=0.7)
    variants = surgery.list_ablations(family)
    groups = {"/".join(variant): Group(profile, AblationSpec(*variant)) for variant in variants}
    streamed = pretrained.stream(InMemory(params, family_config), inputs, groups)
    for name, reading in variants:  # several of them share a program
        cut_config, cut = surgery.ablate(family_config, params, name, reading)
        with jax.disable_jit():  # few operations, which all variants share
            single = profile_in_memory(cut, inputs["x"][0], cut_config, measures=MEASURES)
        expected = jax.tree.map(lambda a: a[None], single)
        assert largest_gap(streamed[f"{name}/{reading}"]["profile"], expected) < TOLERANCE


@pytest.mark.full
def test_what_differs_between_layers_is_that_of_each_layer():
    """Gains, learned and given, temperatures, windows, positions, and rows that layers share."""
    config = rc.transformer(
        3,
        2,
        8,
        norm_placement="pre",
        layer_map=(0, 1, 0),
        learned_branch_gain=(0.5, 1.5, 2.0),
        learned_per_feature=True,
        skip_gain=(1.0, 0.7, 0.9),
        temperature=(1.0, 2.0, 0.5),
        position="rotary",
        rotary_layers=(True, False, True),
        windows=(0, 1, 2),
        local_theta=7.0,
        first_norm=False,
    )
    params = draws.parameters(config)
    x = np.random.default_rng(1).normal(size=(3, 5, 8)).astype(np.float32)
    inputs = {"x": x, "mask": np.arange(5) < np.array([[5], [3], [4]])}
    streamed = pretrained.stream(InMemory(params, config), inputs, STATES, chunk=2)["whole"]
    for i in range(3):
        hidden = rc.apply(params, x[i], config, mask=inputs["mask"][i]).hidden
        exists = inputs["mask"][i]
        assert largest_gap(streamed["states"][i][:, exists], hidden[:, exists]) < TOLERANCE


def test_a_lens_reads_states_after_the_final_norm_with_its_bias():
    """By a LayerNorm of each state itself, and with the statistics of the last state."""
    config = rc.transformer(1, 1, 4, norm_placement="pre", final_norm=True)
    params = draws.parameters(config)
    inputs = {"x": np.random.default_rng(0).normal(size=(1, 3, 4)).astype(np.float32)}
    group = {"": Group((("lens", LensPass()), ("states", States())))}
    streamed = pretrained.stream(InMemory(params, config), inputs, group)[""]
    states = np.asarray(streamed["states"], np.float64)
    gain, bias = (np.asarray(a) for a in (params.final_norm.gain, params.final_norm.bias))
    centred = states - states.mean(axis=-1, keepdims=True)
    scale = 1 / np.sqrt(np.square(centred).mean(axis=-1, keepdims=True) + config.norm_eps)
    for lens, scales in zip(streamed["lens"][0], (scale[0], scale[0, -1:]), strict=True):
        assert_close(lens, centred[0] * scales * gain + bias, rtol=1e-4, atol=1e-5)


def test_an_ablation_may_be_0_or_infinite_where_the_network_is_not():
    """Attention alone loses what tiny weights make of it, and the full network does not."""
    config = rc.transformer(1, 1, 4, norm_placement="none")
    params = draws.parameters(config, bias_scale=0.0)
    tiny = params.layers.attention.replace(w_v=1e-30 * params.layers.attention.w_v)
    tiny = tiny.replace(w_o=1e-30 * tiny.w_o)
    params = params.replace(layers=params.layers.replace(attention=tiny))
    inputs = {"x": np.random.default_rng(0).normal(size=(1, 3, 4)).astype(np.float32)}
    groups = STATES | {"alone": Group((("states", States()),), SAN)}
    streamed = pretrained.stream(InMemory(params, config), inputs, groups)
    assert not streamed["alone"]["states"][0, 1].any() and streamed["whole"]["states"].all()


def test_groups_are_cut_into_chunks_of_one_size():
    """A last example beyond the end is the end; the last chunk repeats its last example."""
    source = SimpleNamespace(config=rc.transformer(2, 2, 8))
    group = Group((("states", States()),), first=1, last=9)
    for chunk, expected in ((3, [([1, 2, 3], 3), ([4, 4, 4], 1)]), (8, [([1, 2, 3, 4], 4)])):
        parts = streaming._split_groups(source, {"some": group}, 5, chunk)
        assert [(part.rows.tolist(), part.count) for part in parts] == expected


def test_ablations_share_a_program_only_where_skips_alone_differ():
    whole = {"attention_skip": True, "mlp": "gelu", "mlp_skip": True, "norm_placement": "pre"}
    group = Group((("states", States()),), SAN)
    shared, gains = streaming._shared_program(group, rc.TransformerConfig(**whole))
    assert shared == AblationSpec("SAN+skip", SAN.reading) and gains.attention == 0
    for changes in (
        {"attention_skip": False},
        {"mlp": "none", "mlp_skip": False},
        {"mlp_skip": False},
        {"parallel": True},
    ):
        config = rc.TransformerConfig(**whole | changes)
        assert streaming._shared_program(group, config) == (SAN, None), changes
    more = Group((("states", States()), ("sums", LengthPass())), SAN)  # not of states alone
    assert streaming._shared_program(more, rc.TransformerConfig(**whole)) == (SAN, None)
