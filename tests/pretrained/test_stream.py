"""Measurements layer by layer against the same measurements of the network in memory."""

from pathlib import Path

import jax
import numpy as np
import pytest

from rank_collapse import pretrained
from rank_collapse.measures import attention_profile, influence, profiles
from rank_collapse.measures.attention_profile import AttentionPass
from rank_collapse.measures.influence import InfluencePass
from rank_collapse.measures.profiles import ProfilePass
from rank_collapse.network import surgery
from rank_collapse.paths.contributions import LengthPass, path_contributions
from rank_collapse.paths.effects import ChainPass, chain_effects
from rank_collapse.pretrained import Job

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
FAMILIES = ("llama-grouped", "albert-groups", "t5-gated", "gpt2-head", "bert-untied")
MEASURES = ("residual_ratio", "token_cosine")
TOLERANCE = 2e-5


def batch(config, n=7):
    rng = np.random.default_rng(0)
    ids = rng.integers(3, config.embedding.vocab_size, (3, n))
    mask = np.arange(n)[None] < np.array([n, n - 2, n - 1])[:, None]
    return {"x": ids, "mask": mask}


def worst(found, expected):
    """Largest difference of two trees beside the largest entry of each array."""
    jax.tree.map(lambda a, b: None, found, expected)

    def gap(a, b):
        a, b = (np.asarray(c, np.float64) for c in (a, b))
        assert a.shape == b.shape
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        return np.max(np.where(same, 0, np.abs(a - b))) / np.max(
            np.abs(b[np.isfinite(b)]), initial=1e-30
        )

    return max(jax.tree.leaves(jax.tree.map(gap, found, expected)), default=0.0)


@pytest.mark.parametrize("name", FAMILIES)
def test_streamed_is_what_the_network_in_memory_gives(name):
    config, params = pretrained.load(GOLDEN / name)
    inputs = batch(config)
    source = pretrained.open_checkpoint(GOLDEN / name)
    family = source.family.model_type
    every = (
        ("profile", ProfilePass(MEASURES)), ("lengths", LengthPass(source.biased)),
        ("chains", ChainPass(2)), ("attention", AttentionPass()), ("influence", InfluencePass()),
    )  # fmt: skip
    jobs = {
        "whole": Job(every),
        "SAN": Job((("profile", ProfilePass(MEASURES)),), "SAN", last=1),
    }
    found = pretrained.stream(source, inputs, jobs, chunk=2)

    def measured(measure, cut="Transformer", count=None, **static):
        own = surgery.variant(config, params, cut, "published", family)
        given = {k: v[:count] for k, v in inputs.items()}
        return profiles.measure_batch(measure, own[1], own[0], given, chunk=2, **static)

    expected = {
        "profile": measured(profiles.network_profile, measures=MEASURES),
        "lengths": measured(path_contributions),
        "chains": measured(chain_effects, num_paths=2),
        "attention": measured(attention_profile.attention_profile),
        "influence": measured(influence.layer_influence),
    }
    gaps = {what: worst(found["whole"][what], expected[what]) for what in expected}
    gaps["SAN"] = worst(
        found["SAN"]["profile"], measured(profiles.network_profile, "SAN", 1, measures=MEASURES)
    )
    print(name, gaps)
    assert max(gaps.values()) < TOLERANCE, gaps
