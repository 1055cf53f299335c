"""How folders are run for `agree`: by which library, in which form, and on whose inputs again."""

import types
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from rank_collapse.agree.recording import open_recording, write_recording
from rank_collapse.command import inputs, recorded
from rank_collapse.command.recorded import NOISE, Form, Tokens
from tests.support.refusals import is_refused

TORCH, JAX = Form("float32", "eager", "torch"), Form("float32", "eager", "jax")
HALF = Form("bfloat16", "sdpa", "torch")
IDS = np.array([[5, 8, 13], [7, 6, 0]])
TOKENS = Tokens(IDS, np.array([[1, 1, 1], [1, 1, 0]], bool))


def write(path, *, layers=2, tokens=3, mask=None, branches=True):
    rng = np.random.default_rng(0)
    arrays = {"residual": rng.normal(size=(layers + 1, tokens, 4)).astype("float32")}
    if branches:
        arrays["mlp_branch"] = rng.normal(size=(layers, tokens, 4)).astype("float32")
    arrays |= {} if mask is None else {"mask": np.array(mask, "uint8")}
    write_recording(path, arrays, {"noise": "0"})


@pytest.fixture
def replays(monkeypatch):
    """Returns the list of (folder, form, {file: options}) of the runs, which write recordings."""
    runs = []

    def replay(folder, tokens, form, plan):
        assert tokens is TOKENS
        runs.append((folder, form, {path.stem: options for path, options in plan}))
        for path, _ in plan:
            write(path)

    monkeypatch.setattr(recorded, "_replay", replay)
    return runs


@pytest.mark.parametrize(
    ("forms", "run"),
    [
        ((TORCH, JAX), 0),  # transformers is quicker
        ((JAX, TORCH), 1),
        ((TORCH, TORCH), 0),
        ((HALF, JAX), 1),  # the finer dtype
        ((HALF, TORCH), 1),
        ((TORCH, HALF), 0),
        ((Form("float16", "eager", "torch"), HALF), 0),
        ((None, JAX), 1),
        ((HALF, None), 0),
        ((Form("float64", "eager", "torch"), TORCH), 0),
    ],
)
def test_the_run_of_the_finer_dtype_takes_in_the_stream_of_the_other(tmp_path, replays, forms, run):
    """In coarse dtypes the probes run in float32, with a run without noise for comparison."""
    paths = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for path in paths:
        write(path)
    replay = recorded.record_replay(("first", "second"), paths, TOKENS, forms)
    form, other = forms[run], {"inputs": paths[1 - run]}
    noisy = {str(i): other | {"noise": NOISE, "seed": i} for i in (0, 1)}
    folder = ("first", "second")[run]
    if form.dtype in ("float32", "float64"):
        assert replays == [(folder, form, {"replay": other} | noisy)]
        first = "replay"
    else:
        wide = form._replace(dtype="float32")
        assert replays == [
            (folder, form, {"replay": other}),
            (folder, wide, {"still": other} | noisy),
        ]
        first = "still"
    assert replay.run == run and replay.recording.path.stem == "replay"
    assert [probe.path.stem for probe in replay.probes] == [first, "0", "1"]
    assert NOISE == 2.0**-10


def test_without_branches_there_is_nothing_to_probe(tmp_path, monkeypatch):
    def replay(folder, tokens, form, plan):
        for path, _ in plan:
            write(path, branches=False)

    monkeypatch.setattr(recorded, "_replay", replay)
    paths = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for path in paths:
        write(path)
    assert recorded.record_replay("ab", paths, TOKENS, (TORCH, TORCH)).probes == ()


@pytest.mark.parametrize(
    ("forms", "other"),
    [
        ((None, None), {}),
        ((TORCH, None), {"layers": 3}),
        ((TORCH, None), {"tokens": 4}),
        ((TORCH, TORCH), {"mask": [1, 1, 0]}),
    ],
)
def test_recordings_that_do_not_fit_are_not_replayed(tmp_path, replays, forms, other):
    paths = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    write(paths[0])
    write(paths[1], **other)
    assert recorded.record_replay("ab", paths, TOKENS, forms) is None and not replays


def test_a_folder_is_run_by_the_library_of_its_form(monkeypatch):
    calls = []
    monkeypatch.setattr(recorded, "_record_jax", lambda *args: calls.append(("jax", *args)))
    monkeypatch.setattr(recorded, "_run_torch", lambda *args: calls.append(("torch", *args)))
    recorded.record_folder("folder", "path", TOKENS, JAX)
    recorded.record_folder("folder", "path", TOKENS, HALF)
    assert calls == [
        ("jax", "folder", "path", TOKENS),
        ("torch", "folder", TOKENS, HALF, [("path", {})]),
    ]
    message = "--with=jax computes in float32, not in --dtype=bfloat16"
    form = JAX._replace(dtype="bfloat16")
    is_refused(message, recorded.record_folder, "folder", "path", TOKENS, form)


@pytest.mark.parametrize(
    ("architectures", "kind"),
    [
        (["LlamaForCausalLM"], "AutoModelForCausalLM"),
        (["GPT2LMHeadModel"], "AutoModelForCausalLM"),
        (["BertModel"], "AutoModel"),
        (["CausalLMHead"], "AutoModel"),
        (["BertModel", "BertLMHeadModel"], "AutoModelForCausalLM"),
        (None, "AutoModel"),
    ],
)
def test_transformers_runs_decoders_with_their_heads(tmp_path, monkeypatch, architectures, kind):
    """In the dtype and with the attention of the form, once for each recording."""
    torch = pytest.importorskip("torch")
    loaded, batches, missing = [], [], ["pooler.dense.bias"]

    class Layer(torch.nn.Module):
        def forward(self, x):
            return x + 1

    class Network(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList([Layer(), Layer()])

        def forward(self, input_ids, attention_mask):
            batches.append((input_ids, attention_mask, self.training, torch.is_grad_enabled()))
            x = input_ids[..., None].float()
            for layer in self.layers:
                x = layer(x)
            return x

    def make_loader(name):
        def load(folder, **options):
            assert options.pop("output_loading_info")
            loaded.append((name, folder, options))
            return Network(), {"missing_keys": missing}

        return types.SimpleNamespace(from_pretrained=load)

    library = types.SimpleNamespace(
        AutoConfig=types.SimpleNamespace(
            from_pretrained=lambda folder: types.SimpleNamespace(architectures=architectures)
        ),
        AutoModel=make_loader("AutoModel"),
        AutoModelForCausalLM=make_loader("AutoModelForCausalLM"),
    )
    modules = {"torch": torch, "transformers": library}
    monkeypatch.setattr(recorded.importlib, "import_module", modules.__getitem__)
    first, second = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    plan = [(first, {}), (second, {"inputs": first})]
    recorded._replay(Path("folder"), TOKENS, HALF, plan)
    options = {"dtype": torch.bfloat16, "attn_implementation": "sdpa"}
    assert loaded == [(kind, Path("folder"), options)] and len(batches) == 2
    for ids, mask, is_training, has_gradients in batches:
        np.testing.assert_array_equal(ids, TOKENS.ids)
        np.testing.assert_array_equal(mask, TOKENS.mask)
        assert mask.dtype == torch.long and not is_training and not has_gradients
    assert open_recording(second).metadata["inputs"] == "a.safetensors"
    np.testing.assert_array_equal(open_recording(first).read_mask(), TOKENS.mask)
    missing.append("encoder.weight")
    message = "folder: tensor 'encoder.weight' is missing; transformers draws it"
    is_refused(message, recorded._replay, Path("folder"), TOKENS, HALF, plan)


@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_a_missing_library_is_named(monkeypatch, missing):
    def load(name):
        if name == missing:
            raise ImportError(name=name)

    monkeypatch.setattr(recorded.importlib, "import_module", load)
    message = (
        f"folder is run by transformers, and {missing} is not installed: pip install torch "
        "transformers, or --with=jax"
    )
    is_refused(message, recorded.record_folder, Path("folder"), "path", TOKENS, TORCH)


def test_tokens_are_those_of_the_folder(monkeypatch):
    batch = inputs.Inputs(IDS, TOKENS.mask, "", "ids")
    opened = []
    monkeypatch.setattr(inputs, "open_source", opened.append)
    monkeypatch.setattr(inputs, "read_inputs", lambda flags, source: batch)
    flags = types.SimpleNamespace()
    tokens = recorded.read_tokens(flags, Path("a/folder"))
    assert tokens.ids is IDS and tokens.mask is TOKENS.mask
    assert opened == ["a/folder"] and flags.inputs is None
    batch = batch._replace(mask=None)  # of images
    message = "a/folder reads no tokens: record it in your own code"
    is_refused(message, recorded.read_tokens, flags, Path("a/folder"))


def test_a_recording_of_jax_has_layers_before_examples_and_its_inputs(tmp_path, monkeypatch):
    """Every example has its own mask; names and numbers are those of the trace."""

    def apply(params, ids, config, *, mask):
        assert (params, config) == ("params", "config")
        return jnp.where(mask, 2.0 * ids, -1.0)

    def collect(trace):
        return {"residual": jnp.stack([trace, 10 * trace, 100 * trace])}

    def add(trace, params, config):
        assert (params, config) == ("params", "config")
        return {"mlp_branch": trace[None]}

    written = {}
    monkeypatch.setattr(recorded.pretrained, "load", lambda folder: ("config", "params", folder))
    monkeypatch.setattr(recorded, "apply", apply)
    monkeypatch.setattr(recorded, "collect_trace", collect)
    monkeypatch.setattr(recorded, "compute_added_branches", add)
    monkeypatch.setattr(
        recorded, "write_recording", lambda path, arrays: written.update(arrays | {"path": path})
    )
    recorded.record_folder(Path("folder"), "file", TOKENS, JAX)
    trace = np.where(TOKENS.mask, 2.0 * IDS, -1.0)
    assert written.pop("path") == "file"
    assert written.keys() == {"residual", "mlp_branch", "mask", "token_ids"}
    np.testing.assert_array_equal(written["residual"], [trace, 10 * trace, 100 * trace])
    np.testing.assert_array_equal(written["mlp_branch"], [trace])
    assert written["mask"].dtype == np.uint8 and written["token_ids"] is IDS
    np.testing.assert_array_equal(written["mask"], TOKENS.mask)


def test_a_replay_of_jax_runs_each_example_with_its_mask(monkeypatch):
    calls = []

    def name_states(params, config, *, mask):
        assert params == "params" and config.kinds == ("attention", "mlp")
        return lambda x: jnp.where(mask, x, -x)

    def record(function, ids, path, *, branches, mask, token_ids, **options):
        assert ids is IDS and token_ids is IDS and mask.dtype == np.uint8
        assert branches == {"attention": "attention", "mlp": "mlp"}
        np.testing.assert_array_equal(mask, TOKENS.mask)
        calls.append((path, np.asarray(function(ids)).tolist(), options))

    config = types.SimpleNamespace(kinds=("attention", "mlp"))
    monkeypatch.setattr(recorded.pretrained, "load", lambda folder: (config, "params"))
    monkeypatch.setattr(recorded, "name_states", name_states)
    monkeypatch.setattr(recorded, "record_function", record)
    plan = [("a", {"inputs": "other"}), ("b", {"noise": NOISE, "seed": 1})]
    recorded._replay("folder", TOKENS, JAX, plan)
    states = np.where(TOKENS.mask, IDS, -IDS).tolist()
    assert calls == [(path, states, options) for path, options in plan]
    calls.clear()
    monkeypatch.setattr(recorded, "_run_torch", lambda *arguments: calls.append(arguments))
    recorded._replay("folder", TOKENS, HALF, plan)
    assert calls == [("folder", TOKENS, HALF, plan)]
