"""Lenses and path sums, against the Jacobian by jax.jacfwd."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rank_collapse as rc
from experiments.lens import influence
from experiments.trained import opened_networks
from rank_collapse import pretrained
from tests.oracles.jacobians import jacobian_by_hand
from tests.support.closeness import assert_close
from tests.support.refusals import is_refused

N, LAYER = 6, 0
IDS = np.array([3, 7, 1, 12, 5, 9])

SETTINGS = opened_networks.UNTRAINED["llama"] | {"initializer_range": 0.5}


@pytest.fixture(scope="module")
def llama():
    return pretrained.random_like(SETTINGS, jax.random.key(0))


@pytest.fixture(scope="module")
def jacobian(llama):
    return jacobian_by_hand(llama[1], llama[0], IDS, LAYER)


@pytest.fixture(scope="module")
def transport_frozen(llama):
    """Carries v along the frozen paths of all attentions after a layer, in one program."""
    config, params = llama
    fn = influence.name_states(params, config)
    options = {"layer": LAYER, "branches": "attention", "first_position": 0, "freeze": True}
    return jax.jit(lambda ids, v: influence.transport(fn, ids, v, **options))


def test_parts_are_compared_as_vectors():
    draw = np.random.default_rng(0)
    frozen, exact = draw.normal(size=(2, 1, 1, 3, 2, 4))
    got = influence.compare_kinds(jnp.asarray(frozen), jnp.asarray(exact))
    for kind, parts in {"frozen": frozen, "exact": exact}.items():
        parts = parts.reshape(3, 8)
        total = parts.sum(0)
        np.testing.assert_allclose(
            got[f"share_{kind}"][0, 0], parts @ total / (total @ total), rtol=1e-5
        )
        sizes = np.linalg.norm(parts, axis=1) / np.linalg.norm(total)
        np.testing.assert_allclose(got[f"size_{kind}"][0, 0], sizes, rtol=1e-5)
    a, b = frozen.sum(2).ravel(), exact.sum(2).ravel()
    norms = np.linalg.norm(a), np.linalg.norm(b)
    np.testing.assert_allclose(got["cosine"][0, 0], a @ b / norms[0] / norms[1], rtol=1e-5)
    np.testing.assert_allclose(got["size_ratio"][0, 0], norms[0] / norms[1], rtol=1e-5)


def test_a_direction_that_is_missing_has_no_number():
    nothing = jnp.zeros((1, 1, 2, 3, 4))
    assert all(np.isnan(a).all() for a in influence.compare_kinds(nothing, nothing).values())


def test_exact_parts_are_the_jacobian_and_padding_changes_nothing(
    llama, jacobian, transport_frozen
):
    """Sizes of frozen over exact, and cosines, against jacfwd and path sums of the layers left."""
    config, params = llama
    ids, sources = IDS, np.array([2, 1])  # one text twice, each with a probe of its own
    rows = np.random.default_rng(1).normal(size=(2, 2, config.d_model)).astype(np.float32)
    rows[0, 1] = 0  # no next token
    inputs = {"x": np.stack([ids, ids]), "mask": None}
    probe = influence.Probe(sources, rows[:, 0], rows[:, 1])
    got = influence.measure_texts(params, config, inputs, probe, LAYER)
    states = np.asarray(rc.apply(params, ids, config).hidden[LAYER + 1])
    for text, source in enumerate(sources):
        directions = {"random": rows[text, 0], "state": states[source], "next": rows[text, 1]}
        for direction in [*directions][: 2 + text]:
            v = directions[direction]
            exact = jacobian[:, :, source] @ v
            placed = np.zeros((N, config.d_model), np.float32)
            placed[source] = v
            frozen = np.asarray(transport_frozen(ids, placed).by_position).sum(0)
            for position, chosen in {"same": [source], "later": range(source + 1, N)}.items():
                a, b = frozen[chosen].ravel(), exact[chosen].ravel()
                norms = np.linalg.norm(a), np.linalg.norm(b)
                name = f"{direction}/{position}"
                cosine = a @ b / norms[0] / norms[1]
                np.testing.assert_allclose(got[f"cosine/{name}"][text], cosine, rtol=1e-4)
                ratio = got[f"size_ratio/{name}"][text]
                np.testing.assert_allclose(ratio, norms[0] / norms[1], rtol=1e-4)
                for kind in influence.KINDS:
                    share = got[f"share_{kind}/{name}"]
                    assert share.shape == (2, config.depth - LAYER)
                    assert_close(share[text].sum(), 1, atol=1e-5)
    # one attention at least leads to another token
    assert got["size_exact/random/later"][0, 0] < 1e-6 < got["size_exact/random/same"][0, 0]
    assert np.isnan(got["cosine/next/same"][0])

    padded = {"x": np.array([[*ids, 0, 0]] * 2), "mask": np.arange(8)[None].repeat(2, 0) < N}
    again = influence.measure_texts(params, config, padded, probe, LAYER)
    for name, values in got.items():
        np.testing.assert_allclose(again[name], values, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.full
def test_the_frozen_sum_along_the_states_is_the_network(llama, transport_frozen):
    """Without biases, all frozen paths from the states after a layer give the last state."""
    config, params = llama
    ids = np.arange(1, 9)
    hidden = rc.apply(params, ids, config).hidden
    moved = transport_frozen(ids, hidden[LAYER + 1])
    np.testing.assert_allclose(moved.arriving, hidden[-1], rtol=1e-4, atol=1e-5)


def test_ranks_are_those_of_the_jacobian(llama, jacobian):
    config, params = llama
    inputs = {"x": IDS[None], "mask": np.ones((1, N), bool)}
    ranks = influence.measure_ranks(params, config, inputs, [1], [N], LAYER)
    want = [rc.effective_rank(jacobian[1 + m, :, 1]) for m in (0, 1, 2, 4)]
    np.testing.assert_allclose(ranks[0, :4], want, rtol=1e-3)
    assert np.isnan(ranks[0, 4:]).all()  # beyond the text


def test_draws_do_not_depend_on_how_many_texts_there_are(llama):
    source = pretrained.open_random(SETTINGS, jax.random.key(0))
    ids, counts = np.arange(100).reshape(5, 20) % SETTINGS["vocab_size"], [20, 8, 4, 2, 13]
    whole = influence.draw_probe(source, ids, counts, 3)
    few = influence.draw_probe(source, ids[:2], counts[:2], 3)
    for a, b in zip(whole, few, strict=True):
        np.testing.assert_array_equal(a[:2], b)
    for position, count in zip(whole.source, counts, strict=True):
        assert count // 4 <= position < max(count // 4 + 1, count // 2) < count
    next_ids = [row[place + 1] for row, place in zip(ids, whole.source, strict=True)]
    np.testing.assert_array_equal(whole.next, source.unembedding.table.rows(next_ids))
    assert len({*whole.random.ravel().tolist()}) == whole.random.size
    other = influence.draw_probe(source, None, counts, 4)
    assert not np.any(other.next) and np.all(other.random != whole.random)
    with pytest.raises(ValueError, match="text 1 has fewer than 2 tokens"):
        influence.draw_probe(source, ids[:2], [3, 1], 0)


@pytest.mark.parametrize(
    ("depth", "start", "layer"), [(30, 0.13, 4), (30, 0.8, 24), (4, 0.8, 2), (12, 0.13, 2)]
)
def test_a_layer_follows_the_state(depth, start, layer):
    assert influence.choose_layer(depth, start) == layer
    with pytest.raises(ValueError, match="one layer"):
        influence.choose_layer(1, start)


def test_the_layer_of_a_share_has_a_later_reader():
    layers = [influence.choose_layer(12, share) for share in (0.0, 0.13, 0.5, 0.79, 0.9, 1.0)]
    assert layers == [0, 2, 6, 9, 10, 10] and influence.choose_layer(2, 1.0) == 0
    is_refused("a network of one layer", influence.choose_layer, 1, 0.5)


def test_texts_have_as_many_states_as_tokens_that_exist(monkeypatch):
    mask = np.array([[True, True, False], [True, True, True]])
    counts = influence.count_tokens(None, None, {"x": np.zeros((2, 3)), "mask": mask})
    assert counts.tolist() == [2, 3]
    monkeypatch.setattr(
        influence.rc,
        "apply",
        lambda params, x, config: SimpleNamespace(output=x[:: params["stride"]] * config),
    )
    spectra = {"x": np.zeros((4, 6, 5), np.float32), "mask": None}
    assert influence.count_tokens({"stride": 2}, 3.0, spectra).tolist() == [3] * 4


def test_the_head_is_that_for_next_or_masked_tokens_if_it_is_as_wide_as_the_states():
    def make_head(width):
        return SimpleNamespace(table=SimpleNamespace(shape=(40, width)))

    def read(head, masked=None):
        masked = masked and SimpleNamespace(unembedding=masked)
        config = SimpleNamespace(d_model=8)
        return influence.read_head(
            SimpleNamespace(unembedding=head, masked_head=masked, config=config)
        )

    wide, other, narrow = make_head(8), make_head(8), make_head(4)
    assert read(wide) is wide and read(wide, other) is wide and read(None, other) is other
    assert read(None) is read(narrow) is read(None, narrow) is read(narrow, other) is None


@pytest.mark.parametrize("has_mask", [True, False])
def test_ranks_of_each_text_end_with_its_tokens(monkeypatch, has_mask):
    """A token at the distance of the count does not exist."""

    def transport_ranks(fn, x, *, layer, source, distances, longest, branches):
        assert (layer, longest, branches) == (3, 0, influence.BRANCHES)
        params, config, mask = fn
        assert config == "config" and (mask is not None) is has_mask
        values = jnp.asarray(distances) + 100 * source + 1000 * x[0] + params["w"]
        return jnp.stack([jnp.zeros(len(distances)), values])

    monkeypatch.setattr(influence, "transport_ranks", transport_ranks)
    monkeypatch.setattr(influence, "name_states", lambda p, c, mask: (p, c, mask))
    inputs = {"x": np.array([[1.0] * 9, [2.0] * 9]), "mask": np.ones((2, 9), bool)}
    inputs["mask"] = inputs["mask"] if has_mask else None
    ranks = influence.measure_ranks({"w": 0.5}, "config", inputs, [2, 1], [6, 9], 3)
    nan = np.nan
    expected = [[1200.5, 1201.5, 1202.5, nan, nan, nan], [2100.5, 2101.5, 2102.5, 2104.5, nan, nan]]
    assert_close(ranks, expected)
