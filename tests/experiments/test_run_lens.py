"""run_lens: shares, cosines and ranks against Jacobians, and the file of the Jacobian lens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xarray as xr

import rank_collapse as rc
from experiments import run_lens
from experiments.lab import cli
from experiments.paper.trained import lens, lens_file, lens_results, networks
from experiments.verdicts import STATEMENTS
from rank_collapse import pretrained
from tests.oracles.jacobians import jacobian_by_hand
from tests.support.closeness import assert_close
from tests.support.runs import result_of, rows, run

N, LAYER = 6, 0
SETTINGS = networks.UNTRAINED["llama"] | {"initializer_range": 0.5}


@pytest.fixture(scope="module")
def llama():
    return pretrained.random_like(SETTINGS, jax.random.key(0))


def test_parts_are_compared_as_vectors():
    draw = np.random.default_rng(0)
    frozen, exact = draw.normal(size=(2, 1, 1, 3, 2, 4))
    got = lens.compare_kinds(jnp.asarray(frozen), jnp.asarray(exact))
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
    assert all(np.isnan(a).all() for a in lens.compare_kinds(nothing, nothing).values())


def test_exact_parts_are_the_jacobian_and_padding_changes_nothing(llama):
    """Sizes of frozen over exact, and cosines, against jacfwd and path sums of the layers left."""
    config, params = llama
    ids, source = np.array([3, 7, 1, 12, 5, 9]), 2
    v = np.random.default_rng(1).normal(size=config.d_model).astype(np.float32)
    probe = lens.Probe(np.array([source]), v[None], np.zeros_like(v)[None])
    got = lens.measure_texts(params, config, {"x": ids[None], "mask": None}, probe, LAYER)
    jacobian = jacobian_by_hand(params, config, ids, LAYER)
    exact = jacobian[:, :, source] @ v
    state = rc.apply(params, ids, config).hidden[LAYER + 1]
    fn = lens.name_states(params, config)
    placed = np.zeros((N, config.d_model), np.float32)
    placed[source] = v
    options = {"layer": LAYER, "branches": "attention", "skip": 0, "freeze": True}
    frozen = np.asarray(lens.transport(fn, ids, placed, **options).by_position.sum(0))
    for position, chosen in {"same": [source], "later": [3, 4, 5]}.items():
        a, b = frozen[chosen].ravel(), exact[chosen].ravel()
        norms = np.linalg.norm(a), np.linalg.norm(b)
        name = f"random/{position}"
        np.testing.assert_allclose(got[f"cosine/{name}"], a @ b / norms[0] / norms[1], rtol=1e-4)
        np.testing.assert_allclose(got[f"size_ratio/{name}"], norms[0] / norms[1], rtol=1e-4)
        for kind in lens.KINDS:
            share = got[f"share_{kind}/{name}"]
            assert share.shape == (1, config.depth - LAYER)
            assert_close(share.sum(), 1, atol=1e-5)
    # one attention at least leads to another token
    assert got["size_exact/random/later"][0, 0] < 1e-6 < got["size_exact/random/same"][0, 0]
    assert np.isnan(got["cosine/next/same"]).all()
    along = jacobian[:, :, source] @ np.asarray(state[source])
    assert abs(np.linalg.norm(along[source])) > 0 and np.isfinite(got["cosine/state/same"]).all()

    padded = {"x": np.array([[*ids, 0, 0]]), "mask": np.arange(8)[None] < N}
    again = lens.measure_texts(params, config, padded, probe, LAYER)
    for name, values in got.items():
        np.testing.assert_allclose(again[name], values, rtol=1e-4, atol=1e-5, err_msg=name)


def test_the_frozen_sum_along_the_states_is_the_network(llama):
    """Without biases, all frozen paths from the states after a layer give the last state."""
    config, params = llama
    ids = np.arange(1, 9)
    hidden = rc.apply(params, ids, config).hidden
    options = {"layer": LAYER, "branches": "attention", "skip": 0, "freeze": True}
    moved = lens.transport(lens.name_states(params, config), ids, hidden[LAYER + 1], **options)
    np.testing.assert_allclose(moved.arriving, hidden[-1], rtol=1e-4, atol=1e-5)


def test_ranks_are_those_of_the_jacobian(llama):
    config, params = llama
    ids = np.array([3, 7, 1, 12, 5, 9])
    inputs = {"x": ids[None], "mask": np.ones((1, N), bool)}
    ranks = lens.measure_ranks(params, config, inputs, [1], [N], LAYER)
    jacobian = jacobian_by_hand(params, config, ids, LAYER)
    want = [rc.effective_rank(jacobian[1 + m, :, 1]) for m in (0, 1, 2, 4)]
    np.testing.assert_allclose(ranks[0, :4], want, rtol=1e-3)
    assert np.isnan(ranks[0, 4:]).all()  # beyond the text


def test_draws_do_not_depend_on_how_many_texts_there_are(llama):
    source = pretrained.open_random(SETTINGS, jax.random.key(0))
    ids, counts = np.ones((5, 20), int), [20, 8, 4, 2, 13]
    whole = lens.draw_probe(source, ids, counts, 3)
    few = lens.draw_probe(source, ids[:2], counts[:2], 3)
    for a, b in zip(whole, few, strict=True):
        np.testing.assert_array_equal(a[:2], b)
    for position, count in zip(whole.source, counts, strict=True):
        assert count // 4 <= position < max(count // 4 + 1, count // 2) < count
    np.testing.assert_array_equal(whole.next[0], source.unembedding.table.rows([1])[0])
    with pytest.raises(ValueError, match="text 1 has fewer than 2 tokens"):
        lens.draw_probe(source, ids[:2], [3, 1], 0)


@pytest.mark.parametrize(
    ("depth", "start", "layer"), [(30, 0.13, 4), (30, 0.8, 24), (4, 0.8, 2), (12, 0.13, 2)]
)
def test_a_layer_follows_the_state(depth, start, layer):
    assert lens.choose_layer(depth, start) == layer
    with pytest.raises(ValueError, match="one layer"):
        lens.choose_layer(1, start)


def test_the_file_is_one_of_the_jacobian_lens(llama, tmp_path):
    """Means over sources from position 16 on, of sums over later ones but the last."""
    torch = pytest.importorskip("torch")
    config, params = llama
    ids = np.random.default_rng(0).integers(1, 20, (2, 21))
    mask = np.arange(21)[None] < np.array([[21], [20]])
    inputs = {"x": np.where(mask, ids, 0), "mask": mask}
    jacobians, count = lens_file.mean_jacobians(params, config, inputs)
    assert count == 2 and jacobians.shape == (3, 8, 8)
    for layer in range(3):
        want = []
        for text, valid in zip(ids, (slice(16, 20), slice(16, 19)), strict=True):
            whole = jacobian_by_hand(params, config, text, layer)
            want.append(whole[valid, :, valid].sum(0).mean(1))
        np.testing.assert_allclose(jacobians[layer], np.mean(want, axis=0), rtol=1e-3, atol=1e-5)
    assert_close(jacobians[-1], np.eye(8), atol=1e-6)
    lens_file.write_lens(tmp_path / "a.pt", jacobians, count)
    content = torch.load(tmp_path / "a.pt", map_location="cpu", weights_only=True)
    assert {name: content[name] for name in ("n_prompts", "source_layers", "d_model")} == {
        "n_prompts": 2,
        "source_layers": [0, 1],
        "d_model": 8,
    }
    assert content["J"][0].dtype == torch.float16 and [*content["J"]] == [0, 1]
    np.testing.assert_allclose(content["J"][1].float(), jacobians[1], rtol=1e-2, atol=1e-3)
    with pytest.raises(ValueError, match="no text has 18 tokens"):
        lens_file.mean_jacobians(params, config, {n: a[:, :17] for n, a in inputs.items()})


@pytest.mark.full
def test_a_run_writes_rows_and_lenses(tmp_path, capsys):
    tiny = [*run_lens.EXPERIMENT.presets["tiny"], "--max_tokens=18", "--start=0.13"]
    lenses = tmp_path / "lenses"
    assert run(run_lens, [*tiny, f"--lens_folder={lenses}"], tmp_path / "a") == 0
    assert [path.name for path in lenses.iterdir()] == ["llama.pt"]
    printed = capsys.readouterr().out
    assert "llama: " in printed and "effective rank of the Jacobian" in printed
    results, _ = result_of(run_lens, tmp_path / "a")
    table = rows(tmp_path / "a")
    first = next(row for row in table if row["direction"] == "random" and row["cosine"])
    shares = results.share_exact.isel(start=0, network=0, seed=0)
    shares = shares.sel(direction="random", position=first["position"])
    mean = float((shares * shares.length).sum())
    np.testing.assert_allclose(float(first["mean_length_exact"]), mean, rtol=1e-5)
    assert run(run_lens, [*tiny, "--max_tokens=17", f"--lens_folder={lenses}"], tmp_path / "b") == 2
    assert "--lens_folder needs --max_tokens=18 or more, not 17" in capsys.readouterr().err


def make_network(label, depth, **fields):
    settings = SETTINGS | {"num_hidden_layers": depth}
    source = pretrained.open_random(settings, jax.random.key(0))
    return networks.Network(label, source, {}, None, **fields)


def test_what_cannot_fail_is_not_tested_and_nothing_is_claimed_of_initial_weights():
    opened = [
        make_network("deep", 8),
        make_network("shallow", 4),
        make_network("drawn at init", 8, is_initialised=True),
    ]
    axes = {
        "start": [lens_results.EARLY],
        "network": [network.label for network in opened],
        "direction": [*lens.DIRECTIONS],
        "position": [*lens.POSITIONS],
        "seed": np.arange(8),
    }
    shape = [len(values) for values in axes.values()]
    names = ("mean_length_frozen", "mean_length_exact", "cosine")
    values = xr.DataArray(np.arange(np.prod(shape), dtype=float).reshape(shape), axes, [*axes])
    results = xr.Dataset({name: values + i / 10 for i, name in enumerate(names)})
    tested = {(row.key, row.setting): row for row in lens_results.judge_claims(results, opened)}
    assert {*tested} == {
        ("frozen lengths", "deep"),
        ("exact lengths", "deep"),
        ("frozen direction", "deep"),
        ("frozen direction", "shallow"),
    }
    draws = values.sel(start=0.13, network="deep", direction="random", position="later")
    row = tested["exact lengths", "deep"]
    assert_close(row.estimate, float(np.median(draws)) + 0.1)
    other = results.assign_coords(start=[0.5])
    assert not list(lens_results.judge_claims(other, opened))


def test_all_trained_networks_are_registered():
    directions = STATEMENTS["frozen direction"].settings
    lengths = {*STATEMENTS["exact lengths"].settings}
    assert {*directions} == {*networks.PACKAGES}
    assert lengths == {*STATEMENTS["frozen lengths"].settings}
    assert {*directions} - lengths == {"whisper-tiny-en"}


def test_networks_and_texts_that_are_not_there_are_named(tmp_path):
    for flags, reason in (
        ([f"--folder={tmp_path / 'none'}"], "--folder=.*none does not exist"),
        ([f"--folder={tmp_path}", "--text=nowhere.tsv"], "--text=nowhere.tsv does not exist"),
    ):
        options = cli.parse_flags(run_lens.FLAGS, flags)
        with pytest.raises(FileNotFoundError, match=reason):
            run_lens.open_networks(options)
    for flag in ("--init=gpt5", "--networks=gpt5"):
        options = cli.parse_flags(run_lens.FLAGS, ["--untrained", flag])
        with pytest.raises(ValueError, match=f"{flag} is not one of"):
            run_lens.open_networks(options)
