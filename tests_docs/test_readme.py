"""The Python examples of the README, the site and its notebooks run; what they link to exists."""

import json
import re

import numpy as np
import pytest

import rank_collapse as rc
from rank_collapse.measures.residuals import residual_ratio
from rank_collapse.runs import metrics
from tests.oracles import mp_network
from tests.support.closeness import assert_close
from tests.support.folders import REPOSITORY
from tests_docs.examples import BLOCK, DOCS, run_block

README, BUILD = (REPOSITORY / name for name in ("README.md", "BUILD.md"))
# Pages whose blocks stand alone. Those of monitoring are recipes, below; those of variants and the
# API run in test_site; others are parts of a program.
ALONE = (
    "measures",
    "networks",
    "paths",
    "checkpoints",
    "depth",
    "before_training",
    "attention_layer",
    "your_model",
    "seeds",
)
PAGES = [
    README,
    *(DOCS / f"{name}.md" for name in ALONE),
]
ELSEWHERE = {
    "monitoring.md",
    "monitoring_jax.md",
    "variants.md",
    "extending.md",  # test_extending
    "agree.md",  # test_agree_page
    "columns.md",  # test_recipes
    *(page.name for page in (DOCS / "api").glob("*.md")),
}
TEXTS = {page.name: page.read_text("utf-8") for page in PAGES}
BLOCKS = [(page, *groups) for page, text in TEXTS.items() for groups in BLOCK.findall(text)]


@pytest.mark.parametrize(
    "block",
    dict.fromkeys(block for *_, block in BLOCKS),
    ids=lambda b: b.strip().splitlines()[-1][:40],
)
def test_an_example_runs(block):
    run_block(block)


def test_every_block_of_python_is_run_somewhere():
    with_blocks = {p.name for p in DOCS.rglob("*.md") if "```python" in p.read_text("utf-8")}
    assert with_blocks == TEXTS.keys() - {"README.md"} | ELSEWHERE


def test_the_readme_prints_what_it_says():
    (block,) = BLOCK.findall(TEXTS["README.md"])
    scope = run_block(block[1])
    for name in ("full", "collapsed"):
        (printed,) = re.findall(
            rf"^print\(rc.profile\({name}\..*\)  # (.*)$", block[1], re.MULTILINE
        )
        ratios = rc.profile(scope[name].hidden)["residual_ratio"]
        assert_close(ratios[:-1], [float(v) for v in printed.split()[:-1]], atol=0.006)
        assert ratios[-1] < 1e-6 if name == "collapsed" else abs(ratios[-1] - 0.47) < 0.006


def test_the_network_of_the_page_falls_at_the_cubic_rate():
    scope = run_marked_block("network")
    assert abs(rc.local_rate(scope["profile"])[-1] - 3) < 1e-3
    total = scope["by_length"].sum(axis=0) + scope["offset"]
    np.testing.assert_allclose(total, scope["trace"].output, rtol=1e-4, atol=1e-5)


def test_a_checkpoint_of_the_page_collapses_without_skips():
    scope = run_marked_block("checkpoint")
    last = [float(residual_ratio(scope[name].output)) for name in ("trace", "collapsed")]
    assert last[1] < last[0] / 2


def run_marked_block(name):
    (block,) = {block for _, mark, block in BLOCKS if mark == name}
    return run_block(block)


def test_admin_keeps_apart_what_post_ln_makes_equal():
    scope = run_marked_block("designs")
    cosines = [float(rc.token_cosine(scope[name].output)) for name in ("trace", "collapsed")]
    assert_close(cosines, [0.81, 0.9999], atol=5e-3)


def test_the_sweep_is_that_of_single_networks():
    scope = run_marked_block("sweep")
    params, x, config = (scope[n] for n in ("params", "x", "config"))
    half = rc.apply(params, x, config.replace(skip_gain=0.5))
    assert scope["curves"].shape == (5, 13)
    np.testing.assert_allclose(
        scope["curves"][2], [residual_ratio(h) for h in half.hidden], rtol=1e-3
    )
    assert np.all(np.diff(scope["curves"][:, 3]) > 0)


def test_the_network_by_hand_is_the_plain_one():
    """The page's weights through a forward pass of numpy, head by head, as Llama computes."""
    scope = run_marked_block("by hand")
    x = np.asarray(scope["trace"].hidden[0], np.float64)
    n, k, share = len(x), scope["k"], scope["h"] // scope["g"]
    angle = np.tile(np.arange(n)[:, None] * 10000.0 ** (-np.arange(0, k, 2) / k), 2)
    for w in scope["weights"]:
        y = mp_network.unit_norm(x, "rms", 1e-6) * w["norm_1"]
        for head in range(scope["h"]):
            maps = w["q"][head], w["k"][head // share]
            query, key = (mp_network.rotated(y @ a, np.cos(angle), np.sin(angle)) for a in maps)
            weights = mp_network.softmax(query @ key.T / np.sqrt(k), np.tri(n, dtype=bool))
            x = x + weights @ (y @ w["v"][head // share]) @ w["o"][head]
        y = mp_network.unit_norm(x, "rms", 1e-6) * w["norm_2"]
        x = x + (mp_network.activation("silu")(y @ w["gate"]) * (y @ w["up"])) @ w["down"]
    output = mp_network.unit_norm(x, "rms", 1e-6)
    assert_close(scope["trace"].output, output, atol=2e-4)


def test_one_attention_layer_is_the_plain_one():
    """Its loss and entropy by NumPy, head by head."""
    scope = run_marked_block("attention layer")
    params, batch = scope["params"], np.asarray(scope["batch"], np.float64)
    outputs, entropies = [], []
    for x in batch:
        out = x
        for head in range(scope["h"]):
            w_q, w_k, w_v, w_o = (
                np.asarray(getattr(params, name)[head], np.float64)
                for name in ("w_q", "w_k", "w_v", "w_o")
            )
            scores = x @ w_q @ (x @ w_k).T / np.sqrt(scope["k"])
            weights = mp_network.softmax(scores, np.tri(len(x), dtype=bool))
            out = out + weights @ x @ w_v @ w_o
            entropies.append(-(weights * np.log(np.where(weights > 0, weights, 1))).sum(axis=1))
        outputs.append(out)
    np.testing.assert_allclose(scope["value"], np.mean(np.square(outputs)), rtol=1e-5)
    np.testing.assert_allclose(scope["scalars"]["attention_entropy"], np.mean(entropies), rtol=1e-5)
    assert scope["gradient"].w_q.shape == (4, 32, 8)


def test_the_encoder_decoder_is_its_halves():
    scope = run_marked_block("encoder decoder")
    trace, lengths = scope["trace"], scope["lengths"]
    assert trace.logits.shape == (5, 13) and trace.decoder.cross_attention.shape == (2, 4, 5, 4)
    assert scope["target"].tolist() == [1, 5, 4, 8, 3] and scope["written"].shape == (5,)
    np.testing.assert_allclose(lengths.total, trace.decoder.output, rtol=1e-4, atol=1e-5)


def test_links_exist():
    """Commands are in test_commands."""
    pages = [README, BUILD, *(p for p in DOCS.rglob("*.md"))]
    for page in pages:
        text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)]+)\)", text):
            path = target.partition("#")[0]
            exists = "://" in target or not path or (page.parent / path).exists()
            assert exists, f"{page.name} links to {target}"


# Of docs/monitoring*.md: each runs as it stands, in a folder of its own.
RECIPE_PAGES = sorted(DOCS.glob("monitoring*.md"))
RECIPE_TEXT = "".join(page.read_text("utf-8") for page in RECIPE_PAGES)
RECIPES = dict(re.findall(r"<!-- test: (\w+) -->\n```python\n(.*?)```", RECIPE_TEXT, re.DOTALL))


@pytest.fixture
def run(tmp_path, monkeypatch):
    """run(recipe) → the names it defines."""
    monkeypatch.chdir(tmp_path)
    return lambda name: run_block(RECIPES[name])


def test_every_recipe_is_run():
    assert RECIPE_TEXT.count("```python") == len(RECIPES) == 8


def test_a_file_is_read_back(run):
    run("file")
    rows = metrics.read("metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2] and rows[2]["loss"] == 2.3 / 3
    np.testing.assert_array_equal(rows[0]["residual_ratio"], [0.9, 0.8])


def test_a_scan_gives_scalars_and_gradients_by_layer(run):
    run("optax")
    for row in metrics.read("metrics.jsonl"):
        assert row.pop("step") < 3 and np.isfinite(row.pop("loss"))
        assert len(row) == 15 and {a.shape for a in row.values()} == {(3,)}
        assert all(np.isfinite(a).all() for a in row.values())


@pytest.mark.parametrize(("name", "layers"), [("linen", 3), ("nnx", 2), ("equinox", 3)])
def test_one_call_gives_scalars_by_layer(run, name, layers):
    scope = run(name)
    assert {a.shape for a in scope["scalars"].values()} == {(layers,)}
    assert ("attention_entropy" in scope["scalars"]) == (name != "equinox")
    if name != "linen":
        assert {a.shape for a in scope["norms"].values()} == {(layers,)} and len(
            scope["norms"]
        ) == 3


def test_packed_rows_in_a_step(run):
    scope = run("packed")
    x, ids = np.asarray(scope["x"], np.float64), np.asarray(scope["ids"])
    documents = [x[i, ids[i] == number] for i in range(2) for number in np.unique(ids[i]) if number]
    ratios = [residual_ratio(document) for document in documents]
    np.testing.assert_allclose(scope["scalars"]["residual_ratio"], np.mean(ratios), rtol=1e-5)


def test_a_watched_model_of_torch(run):
    watched = run("torch")["watched"]
    rows = metrics.read("metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 2, 4] and len(watched.rows) == 3
    assert rows[2]["residual_ratio"].shape == rows[2]["query_gradient"].shape == (3,)


def run_notebook(name):
    """Runs a notebook of docs/; returns the names that it defines."""
    cells = json.loads((DOCS / f"{name}.ipynb").read_bytes())["cells"]
    return run_block("\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code"))


def test_post_ln_has_no_gradient_of_queries_and_stays_at_a_guess():
    scope = run_notebook("deep_post_ln")
    ratio = {name: g["queries"][-1] / g["values"][-1] for name, g in scope["gradients"].items()}
    assert ratio["post"] < ratio["pre"] / 100 and ratio["post"] < ratio["deepnorm"] / 100
    losses = {name: float(outcome[1][-1]) for name, outcome in scope["after"].items()}
    assert losses["deepnorm"] < losses["post"] and losses["post"] > 2.2


def test_lengths_of_a_trained_model_are_worth_its_accuracy():
    scope = run_notebook("what_carries_the_output")
    assert scope["losses"][-1] < scope["losses"][0] / 2
    full, none = scope["frozen"][-1], scope["values"][0]
    assert_close(scope["shares"].sum(), full - none, atol=1e-5)
    assert_close(scope["truncated"][-1], full, atol=0.01)


def test_cures_keep_more_than_post_norm():
    scope = run_notebook("cures")
    means = {name: values.mean() for name, values in scope["residuals"].items()}
    assert min(means[name] for name in scope["designs"]) == means["post"] < -1
    assert means["deepnorm"] > -0.05 and means["retention"] > -0.1


def test_tokens_on_the_sphere_meet():
    scope = run_notebook("sphere")
    ends = {beta: np.asarray(states[-1]) for beta, states in scope["circles"].items()}
    assert (ends[1] @ ends[1].T).min() > 0.999  # one cluster
    assert (ends[16] @ ends[16].T).min() < 0 and (ends[64] @ ends[64].T).min() < 0
    first = np.asarray(scope["tokens"][0])
    least = {name: (np.asarray(x[-1]) @ first).min() for name, x in scope["masked"].items()}
    assert least[1, "causal"] > 0.999 > 0.9 > least[1, "none"] and least[16, "causal"] < 0
    assert max(scope["errors"].values()) < 0.03
    assert np.mean(scope["same"][:, -1] < 0) < 0.1 < 0.3 < np.mean(scope["random"][:, -1] < 0)


def test_a_model_layer_by_layer_in_a_notebook():
    scope = run_notebook("larger_than_memory")
    assert scope["layers_done"] == list(range(1, 9))


def test_a_model_of_ones_own_is_measured():
    scope = run_notebook("measure_your_model")
    with_skips, without = (scope["profiles"][skip]["residual_ratio"] for skip in (1.0, 0.0))
    assert without[-1] < 1e-3 < with_skips[-1] and scope["sizes"].shape == (13,)
