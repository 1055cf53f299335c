"""run_trained and trained_weights: small networks, and the ALBERT of a package where it is there.

`pip install --no-deps rxnmapper==0.4.3` (3 MB) makes the last test run.
"""

import hashlib
import json
import pickle
import random
import warnings
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import rank_collapse as rc
from experiments import run_trained, trained_weights
from experiments.lab import cli
from experiments.paper.trained import convert, measure, networks, packages, results, texts
from rank_collapse import pretrained
from rank_collapse.text import tokens
from tests.support.closeness import assert_close
from tests.support.runs import result_of, rows, run

pytestmark = pytest.mark.full

ALBERT = "albert-reactions"


def test_all_lengths_are_the_whole_network_and_rows_have_intervals(tmp_path):
    tiny = [*run_trained.EXPERIMENT.presets["tiny"], "--networks=llama"]
    assert run(run_trained, tiny, tmp_path) == 0
    measures, opened = result_of(run_trained, tmp_path)
    for network in opened:  # the causal one; the other is that of test_contract
        arrays, depth = measures[network.label], network.source.config.depth
        assert arrays["paths/lengths"][0][-1] == depth
        for name in ("loss", "right"):
            for kind in ("frozen", "recomputed"):
                longest = arrays[f"paths/{name}_{kind}"][:, -1]
                np.testing.assert_allclose(longest, arrays[f"paths/{name}"], rtol=1e-4)
        # What is seen in floating point agrees with what is kept in logarithms, layer 1
        source, inputs = network.source, network.inputs
        group = pretrained.Group(
            (("states", measure.LogNorm()), ("ratio", measure.ProfilePass())),
            pretrained.AblationSpec("SAN", "text"),
        )
        ratios = pretrained.stream(source, inputs, {"": group})[""]["ratio"]["residual_ratio"]
        assert_close(arrays["log10_ratio/alone"][:, 1], np.log10(ratios[:, 1]), atol=1e-4)
    table = rows(tmp_path)
    assert {row["network"] for row in table} == {"llama"}
    assert all(float(r["low"]) <= float(r["mean"]) <= float(r["high"]) for r in table if r["low"])


def test_an_albert_is_judged_in_both_readings_each_with_its_own_skips(tmp_path):
    """Two readings of an ALBERT, each with arrays of its ablation; one of other networks."""
    flags = [*run_trained.EXPERIMENT.presets["tiny"], "--networks=albert,llama"]
    options = cli.parse_flags(run_trained.FLAGS, flags)
    opened = run_trained.open_networks(options)
    arrays = {n.label: measure.measure_residuals(n.source, n.inputs, 3) for n in opened}
    claims = []
    for network in opened:
        residuals = arrays[network.label]
        claims += results.judge_ablations(
            network.label, residuals, network.source.config.mask == "causal"
        )
    settings = {row.setting for row in claims if row.key == "trained skips stop"}
    assert settings == {"albert, as the text has it", "albert, as published", "llama"}
    source, inputs = opened[0].source, opened[0].inputs
    for name, reading in (("skips", "text"), ("skips, as published", "published")):
        ablation = pretrained.AblationSpec("SAN+skip", reading)
        group = pretrained.Group((("ratio", measure.ProfilePass()),), ablation)
        ratios = pretrained.stream(source, inputs, {"": group})[""]["ratio"]["residual_ratio"]
        np.testing.assert_allclose(10 ** arrays["albert"][f"log10_ratio/{name}"], ratios, rtol=1e-5)
    assert "log10_ratio/skips, as published" not in arrays["llama"]


def test_texts_are_disjoint_pieces_or_the_last_of_a_file(tmp_path, monkeypatch):
    """Every word of the texts has a number of its own, so that overlaps show."""
    numbers = [str(i) for i in range(1, 1001)]
    monkeypatch.setattr(networks.words, "default_text", lambda: " ".join(numbers))
    monkeypatch.setattr(
        networks.encoders,
        "load_tokenizer",
        lambda *_: lambda text: [int(word) for word in text.split()],
    )
    monkeypatch.setattr(
        networks.pretrained, "open_checkpoint", lambda _: SimpleNamespace(settings={})
    )
    pieces = networks.load_network(tmp_path, None, num_texts=32, max_tokens=64).inputs["x"]
    assert pieces.shape == (15, 64) and len(np.unique(pieces)) == pieces.size
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(" ".join(numbers[i : i + 3]) for i in range(0, 30, 3)))
    last_first = [28, 29, 30, 25, 26, 27]
    for are_last, expected in ((False, [1, 2, 3, 4, 5, 6]), (True, last_first)):
        network = networks.load_network(tmp_path, str(path), 2, 64, are_last=are_last)
        assert network.inputs["x"].ravel().tolist() == expected
    (tmp_path / "ids.txt").write_text(path.read_text())
    network = networks.load_network(tmp_path, None, 2, 64, are_last=True)
    assert network.inputs["x"].ravel().tolist() == last_first


def test_rate_is_that_of_a_cubic_fall_whatever_the_unit():
    fall = -0.3 * 3.0 ** np.arange(6)[None]
    assert_close(results.final_rate(fall), 3.0)
    assert_close(results.final_rate(fall + 2.0), 3.0)
    assert_close(results.final_rate(np.log10(0.5) * np.arange(6)[None]), 1.0)


def test_the_lemma_is_asked_of_the_attention_and_of_the_mean_token():
    """The first layer against numpy, where P̃ is one row: the softmax of the mean token's scores."""
    settings = run_trained.UNTRAINED["albert"] | {"initializer_range": 0.5}
    ids, key = np.arange(1, 7), jax.random.key(0)
    bounds = measure.measure_bounds(pretrained.open_random(settings, key), ids[None], 1)
    config, params = pretrained.random_like(settings, key)
    x = np.asarray(rc.apply(params, ids, config).hidden[0], np.float64)
    attention, mean_token = (
        jax.tree.map(np.asarray, rc.network.layer_params(params, config, 0).attention),
        x.mean(axis=0),
    )

    def softmax(scores):
        return np.exp(scores) / np.exp(scores).sum(axis=-1, keepdims=True)

    for head in range(config.num_heads):
        w_q, w_k = attention.w_q[head], attention.w_k[head] / np.sqrt(attention.w_k.shape[-1])
        weights, common = (
            softmax(x @ w_q @ (x @ w_k).T),
            softmax(mean_token @ w_q @ ((x - mean_token) @ w_k).T),
        )
        deviation = (x - mean_token) @ w_q @ ((x - mean_token) @ w_k).T
        spread = np.ptp(deviation, axis=1, keepdims=True)
        excess = np.maximum((1 - spread) * common - weights, weights - (1 + 2 * spread) * common)
        measured = bounds["bounds/whole/lemma"][0, 0, head] + measure.ROUNDING
        assert_close(measured, excess.max(), atol=1e-5)
        assert spread.max() > 0.1


def test_texts_are_of_the_vocabulary_and_masks_of_the_texts():
    draw, words = random.Random(0), set()
    for kind in texts.KINDS.values():
        words |= {word for _ in range(200) for word in kind(draw)}
    listed = sorted(words | {"[CLS]", "[SEP]"})
    for kind in texts.KINDS:
        lines = texts.write_ids(kind, listed, 5).splitlines()
        assert len(lines) == 5 and lines == texts.write_ids(kind, listed, 5).splitlines()
        assert {line.split()[0] for line in lines} == {str(listed.index("[CLS]"))}
    batch = tokens.pad_sequences([list(range(1, 9)), list(range(1, 6))], vocab_size=20)
    source = pretrained.open_random(run_trained.UNTRAINED["albert"], jax.random.key(0))
    task = measure.make_task(source, {"x": batch.ids, "mask": batch.mask}, 19, 2)
    assert (task.inputs["x"] == 19).sum(axis=1).tolist() == [1, 1, 1, 1]
    assert (task.targets == np.repeat(batch.ids, 2, axis=0)).all()
    assert ((task.inputs["x"] == 19) == task.chosen).all()
    assert not task.chosen[:, 0].any() and not task.chosen[2:, 4:].any()


@pytest.mark.parametrize(
    "arguments, named",
    [
        (["--folder=nowhere"], "nowhere"),
        (["--networks=none"], "none"),
        (["--text=absent.tsv", "--networks=bare"], "--text=absent.tsv"),
        (["--text=trained/bare/config.json", "--networks=bare"], "bare"),
    ],
)
def test_mistakes_are_one_line(arguments, named, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    source = tmp_path / "trained" / "bare"
    source.mkdir(parents=True)
    (source / "config.json").write_text(json.dumps(run_trained.UNTRAINED["llama"]))
    assert run(run_trained, arguments, tmp_path / "out") == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert named in line


def write_package(site, weights=None):
    """Writes what pip leaves of rxnmapper; returns the flags that read it."""
    about = site / "rxnmapper-0.4.3.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: rxnmapper\nVersion: 0.4.3\n")
    path = site / packages.PACKAGES[ALBERT].weights
    path.parent.mkdir(parents=True)
    if weights is not None:
        path.write_bytes(weights)
    return [f"--site={site}", f"--folder={site / 'made'}"]


@pytest.mark.parametrize("weights", [None, b"other weights"])
def test_a_package_that_cannot_be_read_is_skipped_with_a_line(weights, tmp_path, capsys):
    flags = write_package(tmp_path, weights)
    assert cli.execute(trained_weights.main, trained_weights.FLAGS, flags) == 2  # none is left
    skipped, *absent = capsys.readouterr().out.strip().splitlines()
    assert str(tmp_path / packages.PACKAGES[ALBERT].weights) in skipped
    assert ("SHA-256" in skipped) == (weights is not None)
    assert len(absent) == len(packages.PACKAGES) - 1 and not (tmp_path / "made").exists()


@pytest.mark.parametrize("config", ["[]", "{}"])  # of which the second has no vocabulary
def test_a_package_with_other_files_than_its_own_is_skipped(config, tmp_path, monkeypatch, capsys):
    flags = write_package(tmp_path, b"weights")
    package = packages.PACKAGES[ALBERT]
    package = package._replace(sha256=hashlib.sha256(b"weights").hexdigest())
    monkeypatch.setitem(packages.PACKAGES, ALBERT, package)
    (tmp_path / package.weights).with_name("config.json").write_text(config)
    (tmp_path / package.weights).with_name("vocab.txt").write_text("")
    assert cli.execute(trained_weights.main, trained_weights.FLAGS, flags) == 2
    assert f"{ALBERT}: skipped" in capsys.readouterr().out


def test_a_folder_that_is_not_there_is_a_mistake(tmp_path, capsys):
    flags = [f"--site={tmp_path / 'nowhere'}"]
    assert cli.execute(trained_weights.main, trained_weights.FLAGS, flags) == 2
    assert "nowhere" in capsys.readouterr().err


def test_an_interrupt_leaves_the_folder_of_before(tmp_path):
    def make(weights, folder):
        (folder / "config.json").write_text(weights)
        if weights == "new":
            raise KeyboardInterrupt

    package = packages.Package("a==1", "MIT", "w", "0", make)
    packages.make_folder(package, "old", tmp_path / "made")
    with pytest.raises(KeyboardInterrupt):
        packages.make_folder(package, "new", tmp_path / "made")
    assert [path.name for path in tmp_path.iterdir()] == ["made"]
    assert (tmp_path / "made" / "config.json").read_text() == "old"


@pytest.mark.parametrize("zipped", [True, False])
def test_tensors_of_torch_are_read_without_torch(zipped, tmp_path):
    """Slices, transposed and shared storages; both of torch's formats."""
    torch = pytest.importorskip("torch")
    values = torch.randn(4, 6)
    tensors = {"plain": values, "slice": values[1:3, ::2], "turned": values.T}
    tensors |= {"number": torch.tensor(3), "half": torch.randn(5).half(), "none": values[:0]}
    path = tmp_path / "pytorch_model.bin"
    torch.save(tensors, path, _use_new_zipfile_serialization=zipped)
    arrays = convert.read_torch(path)
    assert arrays.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(arrays[name], tensor.numpy(), strict=True)


def test_no_pickled_code_is_executed(tmp_path):
    path = tmp_path / "pytorch_model.bin"
    for call in (print, np.zeros, json.loads):
        for protocol in (0, 2, 4):
            path.write_bytes(pickle.dumps({"weight": Calls(call)}, protocol))
            with pytest.raises(pickle.UnpicklingError, match="is no tensor"):
                convert.read_torch(path)


class Calls:
    """Pickled as a call of a function."""

    def __init__(self, function):
        self.function = function

    def __reduce__(self):
        return self.function, ("1",)


@pytest.fixture(scope="module")
def albert(tmp_path_factory):
    """The folder of rxnmapper's ALBERT, whose weights torch reads."""
    pytest.importorskip("torch")
    weights = packages.find_weights(packages.PACKAGES[ALBERT], None)
    if weights is None:
        pytest.skip("rxnmapper is not installed")
    folder = tmp_path_factory.mktemp("albert")
    packages.PACKAGES[ALBERT].make(weights, folder)
    return folder


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_a_trained_albert_in_transformers_and_its_numbers(albert):
    """Its rate of collapse is 3; its accuracy and loss are those of transformers."""
    network = networks.load_network(albert, None, num_texts=2, max_tokens=32)
    source, inputs = network.source, network.inputs
    task = measure.make_task(source, inputs, network.mask_id, 1)
    measures = measure.measure_paths(source, task, [12], 4)
    log10_residual = measure.measure_residuals(source, inputs, 2)["log10_residual/alone"]
    assert np.abs(results.final_rate(log10_residual) - 3).max() < 0.05
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch = pytest.importorskip("torch")
        transformers = pytest.importorskip("transformers")
        model = transformers.AlbertForMaskedLM.from_pretrained(albert, attn_implementation="eager")
    torch_inputs = {
        "input_ids": task.inputs["x"],
        "attention_mask": task.inputs["mask"].astype(int),
    }
    with torch.no_grad():
        logits = model.eval()(
            **{n: torch.from_numpy(np.asarray(a)) for n, a in torch_inputs.items()}
        ).logits
    right = logits.argmax(dim=-1).numpy() == task.targets
    shares = [row[chosen].mean() for row, chosen in zip(right, task.chosen, strict=True)]
    np.testing.assert_allclose(measures["paths/right"], shares, rtol=1e-6)
    log_p = torch.log_softmax(logits.double(), dim=-1).numpy()
    nats = -np.take_along_axis(log_p, task.targets[..., None], axis=-1)[..., 0]
    loss = [row[chosen].mean() for row, chosen in zip(nats, task.chosen, strict=True)]
    np.testing.assert_allclose(measures["paths/loss"], loss, rtol=1e-4)
