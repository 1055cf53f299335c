"""rank_collapse.torch.record: what is recorded is what the model computes, and nothing changes."""

from types import SimpleNamespace

import numpy as np
import pytest

from tests.support.refusals import is_refused

torch = pytest.importorskip("torch")

from rank_collapse.agree.comparison import compare_files  # noqa: E402
from rank_collapse.agree.recording import open_recording  # noqa: E402
from rank_collapse.torch import record  # noqa: E402
from rank_collapse.torch.recording import _read_mask  # noqa: E402
from tests.oracles.recorded_torch import IDS, Block, Model  # noqa: E402
from tests.support.closeness import assert_close  # noqa: E402


def test_states_and_branches_are_those_of_the_model(tmp_path):
    model = Model().eval()
    plain = model(IDS)
    with record(model, tmp_path / "a.safetensors"):
        recorded = model(IDS, attention_mask=torch.ones(2, 3, dtype=torch.long))
    assert torch.equal(plain, recorded)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    recording = open_recording(tmp_path / "a.safetensors")
    assert recording.num_layers == 3 and recording.shape == (2, 3, 8)
    assert recording.metadata["layers"] == "blocks.0,blocks.1,blocks.2"
    np.testing.assert_array_equal(recording.read_token_ids(), IDS)
    x = model.embed(IDS)
    for block, layer in zip(model.blocks, recording.read_layers(), strict=True):
        np.testing.assert_array_equal(layer.before, x.detach())
        y = block.norm(x)
        attention = block.attn(y, y, y)[0]
        x = block(x)
        assert_close(layer.branches["attention_branch"], attention.detach(), atol=1e-6)
        total = layer.before + layer.branches["attention_branch"] + layer.branches["mlp_branch"]
        assert_close(total, x.detach(), atol=1e-6)


def test_bfloat16_is_kept(tmp_path):
    model = Model().eval()
    with record(model, tmp_path / "a.npz"):
        model(IDS)
    with record(model.bfloat16(), tmp_path / "b.npz"):
        model(IDS)
    stored = open_recording(tmp_path / "b.npz").arrays
    assert {stored[n].dtype.name for n in ("residual", "attention_branch")} == {"bfloat16"}
    answer = compare_files(tmp_path / "a.npz", tmp_path / "b.npz")
    assert answer.rounding.name == "bfloat16" and answer.agree


def test_calls_are_joined_along_the_tokens(tmp_path):
    model = Model()
    for block in model.blocks:  # without attention each token is on its own
        torch.nn.init.zeros_(block.attn.out_proj.weight)
    with record(model, tmp_path / "a.npz"):
        model(IDS)
    with record(model, tmp_path / "b.npz"):
        for token in range(3):
            model(IDS[:, token : token + 1])
    answer = compare_files(tmp_path / "a.npz", tmp_path / "b.npz")
    assert answer.agree


class Early(Model):
    """Runs a branch of its first layer before all layers, and takes a Bool before the ids."""

    def forward(self, is_late, ids):
        x = self.embed(ids)
        x = x + self.blocks[0].mlp(x)
        for block in self.blocks:
            x = block(x)
        return x


def test_a_branch_outside_of_the_layers_and_a_bool_are_no_arrays_of_theirs(tmp_path):
    model = Early()
    for name, calls in (("a", [slice(None)]), ("b", [slice(0, 1), slice(1, 3)])):
        with record(model, tmp_path / f"{name}.npz"):
            for tokens in calls:
                model(torch.ones(2, 3, dtype=torch.bool)[:, tokens], IDS[:, tokens])
        recording = open_recording(tmp_path / f"{name}.npz")
        np.testing.assert_array_equal(recording.read_token_ids(), IDS)
        start = model.embed(IDS)
        start = start + model.blocks[0].mlp(start)
        first = next(recording.read_layers())
        assert_close(first.before, start.detach(), atol=1e-6)
        added = first.before + sum(first.branches.values())
        assert_close(added, first.after, atol=1e-6)


@pytest.mark.parametrize(
    ("attention_norm", "mlp_norm"),
    [
        ("post_attention_layernorm", "post_feedforward_layernorm"),
        ("post_self_attn_layernorm", "post_mlp_layernorm"),
    ],
)
def test_a_branch_that_is_normed_is_what_is_added(tmp_path, attention_norm, mlp_norm):
    """In the layers of Gemma 2 and 3, OLMo 2 and GLM-4."""

    class NormedBlock(Block):
        def __init__(self, d):
            super().__init__(d)
            self.add_module(attention_norm, torch.nn.RMSNorm(d))
            self.add_module(mlp_norm, torch.nn.RMSNorm(d))

        def forward(self, x):
            x = x + getattr(self, attention_norm)(self.attn(x, x, x)[0])
            return x + getattr(self, mlp_norm)(self.mlp(x))

    model = Model()
    model.blocks = torch.nn.ModuleList(NormedBlock(8) for _ in range(2))
    with torch.no_grad(), record(model, tmp_path / "a.npz"):
        model(IDS)
    for layer in open_recording(tmp_path / "a.npz").read_layers():
        added = sum(layer.branches.values())
        assert_close(layer.before + added, layer.after, atol=1e-6)


def record_nothing(model, path, **options):
    with record(model, path, **options):
        pass


def test_what_cannot_be_recorded_is_one_line(tmp_path):
    path = tmp_path / "a.npz"
    is_refused("was not called", record_nothing, Model(), path)
    is_refused("has no list of modules", record_nothing, torch.nn.Linear(2, 2), path)
    is_refused("matches the name of no module", record_nothing, Model(), path, layers="x")
    is_refused("layers= is empty", record_nothing, Model(), path, layers=[])
    is_refused("not a module", record_nothing, Model(), path, layers=[1])

    def record_widths():
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 5))
        with record(model, path):
            model(torch.ones(1, 2, 4))

    is_refused("the stream has shape", record_widths)
    compiled = Model()
    compiled.blocks[1].compile(backend="eager")
    for model in (torch.compile(Model(), backend="eager"), compiled):
        is_refused("is compiled, and its graphs call no hooks", record_nothing, model, path)
    assert not path.exists()


def test_an_error_of_the_model_is_its_own_and_leaves_no_hook(tmp_path):
    model = Model()
    with pytest.raises(IndexError), record(model, tmp_path / "a.npz"):
        model(IDS + 100)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert not (tmp_path / "a.npz").exists()


class WithLogits(Model):
    """Returns an object with logits, as models of transformers do."""

    def __init__(self, **options):
        super().__init__(**options)
        self.head = torch.nn.Linear(8, 10)

    def forward(self, input_ids=None, attention_mask=None, mask=None, inputs_embeds=None, **others):
        x = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        for block in self.blocks:
            x = block(x)
        return SimpleNamespace(logits=self.head(x))


def record_calls(path, calls, model=None):
    model = model or WithLogits().eval()
    with torch.no_grad(), record(model, path):
        outputs = [model(*args, **keywords) for args, keywords in calls]
    return outputs, open_recording(path)


def test_ids_masks_and_logits_are_recorded_by_name(tmp_path):
    """The ids are those named so, and no positions; the mask is no other matrix."""
    mask, positions = torch.tensor([[1, 1, 1], [1, 1, 0]]), torch.arange(3).expand(2, 3)
    keywords = {"position_ids": positions, "attention_mask": mask, "input_ids": IDS}
    (output,), recording = record_calls(tmp_path / "a.safetensors", [((), keywords)])
    np.testing.assert_array_equal(recording.read_token_ids(), IDS)
    np.testing.assert_array_equal(recording.read_mask(), mask)
    np.testing.assert_array_equal(recording.read_logits(), output.logits)
    assert recording.metadata == {
        "torch": torch.__version__,
        "model": "WithLogits",
        "layers": "blocks.0,blocks.1,blocks.2",
    }
    _, recording = record_calls(tmp_path / "b.safetensors", [((IDS,), {"mask": mask.bool()})])
    np.testing.assert_array_equal(recording.read_token_ids(), IDS)
    np.testing.assert_array_equal(recording.read_mask(), mask)


def test_what_has_other_axes_is_not_recorded(tmp_path):
    """Ids of embeddings, masks of pairs, logits of examples."""
    embedded = WithLogits().embed(IDS).detach()
    options = {"inputs_embeds": embedded, "attention_mask": torch.ones(2, 1, 3, 3)}
    options |= {"labels": torch.arange(2), "flags": torch.ones(2, 3, dtype=torch.bool)}
    _, recording = record_calls(tmp_path / "a.safetensors", [((), options)])
    assert recording.arrays.keys() == {"residual", "attention_branch", "mlp_branch", "logits"}
    model = Model()
    with torch.no_grad(), record(model, tmp_path / "b.safetensors"):
        model(IDS)  # a tensor, no logits
    assert "logits" not in open_recording(tmp_path / "b.safetensors").arrays


def test_steps_are_joined_with_their_ids_logits_and_the_last_mask(tmp_path):
    mask = torch.tensor([[1, 1, 1], [0, 1, 1]])
    calls = [
        ((IDS[:, :2],), {"attention_mask": mask[:, :2]}),
        ((IDS[:, 2:],), {"attention_mask": mask}),
    ]
    outputs, recording = record_calls(tmp_path / "a.safetensors", calls)
    np.testing.assert_array_equal(recording.read_token_ids(), IDS)
    np.testing.assert_array_equal(recording.read_mask(), mask)
    expected = torch.cat([output.logits for output in outputs], dim=1)
    np.testing.assert_array_equal(recording.read_logits(), expected)
    assert recording.shape == (2, 3, 8)


def test_one_example_without_an_axis(tmp_path):
    outputs, recording = record_calls(tmp_path / "a.safetensors", [((IDS[0],), {})])
    assert recording.shape == (1, 3, 8) and outputs[0].logits.ndim == 2
    np.testing.assert_array_equal(recording.read_token_ids(), IDS[:1])
    assert "logits" not in recording.arrays


@pytest.mark.parametrize("num_tokens", [5, 2])
@torch.no_grad()
def test_xlnet_whose_stream_has_tokens_first_is_recorded_by_example(num_tokens, tmp_path):
    """Its ids and its mask are kept, and a replay takes in these states."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.XLNetConfig(vocab_size=50, d_model=16, n_layer=2, n_head=2, d_inner=32)
    model = transformers.XLNetModel(config).eval()
    ids, mask = torch.randint(3, 50, (2, num_tokens)), torch.ones(2, num_tokens, dtype=torch.long)
    mask[1, 0] = 0
    batch = {"input_ids": ids, "attention_mask": mask}
    with record(model, tmp_path / "a.safetensors"):
        states = model(**batch, output_hidden_states=True).hidden_states
    recording = open_recording(tmp_path / "a.safetensors")
    np.testing.assert_array_equal(recording.read_token_ids(), ids)
    np.testing.assert_array_equal(recording.read_mask(), mask.bool())
    exists = mask.bool().numpy()
    mlps = []
    for block in model.layer:
        block.ff.layer_2.register_forward_hook(lambda m, a, out: mlps.append(out.transpose(0, 1)))
    model(**batch)
    for state, mlp, layer in zip(states[1:], mlps, recording.read_layers(), strict=True):
        np.testing.assert_array_equal(layer.after[exists], state.numpy()[exists])
        branch = layer.branches["mlp_branch"]
        np.testing.assert_array_equal(branch[exists], mlp.numpy()[exists])
    with record(model, tmp_path / "b.safetensors", inputs=tmp_path / "a.safetensors"):
        model(**batch)
    assert compare_files(tmp_path / "b.safetensors", tmp_path / "a.safetensors").agree


class TokensFirst(Model):
    def forward(self, ids):
        x = self.embed(ids).transpose(0, 1)
        for block in self.blocks:
            x = block(x)
        return x.transpose(0, 1)


@pytest.mark.parametrize("kind", ["xlnet", "fsmt"])
@torch.no_grad()
def test_models_whose_stream_has_tokens_first_are_recorded_by_example(kind, tmp_path):
    model = TokensFirst()
    model.config = SimpleNamespace(model_type=kind)
    with record(model, tmp_path / "a.npz"):
        output = model(IDS)
    *_, last = open_recording(tmp_path / "a.npz").read_layers()
    np.testing.assert_array_equal(last.after, output)


MASK = torch.tensor([[False, True, True], [True, True, False]])  # the tokens that exist
NEGATIVE = torch.zeros(2, 3).masked_fill(~MASK, -torch.inf)


@pytest.mark.parametrize(
    "keywords",
    [
        {"attention_mask": MASK, "mask": ~MASK},
        {"attention_mask": MASK[:, None], "mask": MASK, "key_padding_mask": MASK},
        {"attention_mask": None, "src_key_padding_mask": ~MASK},
        {"key_padding_mask": ~MASK},
        {"mask": torch.ones(3), "key_padding_mask": NEGATIVE},
    ],
)
def test_the_first_mask_of_tokens_says_which_exist(keywords):
    """Of torch's own modules: true, or −∞, for tokens that do not exist."""
    assert torch.equal(_read_mask(keywords), MASK)


def test_a_stream_with_tokens_first_is_refused(tmp_path):
    model = TokensFirst()

    def run():
        with record(model, tmp_path / "a.npz"):
            model(IDS)

    line = r"stream has \[3, 2\] states, and the token ids have shape \[2, 3\]: it has tokens first"
    is_refused(line, run)


class Skips(Model):
    """Skips its layers on demand, as an early exit does."""

    def forward(self, ids, is_short):
        return self.embed(ids) if is_short else super().forward(ids)


@torch.no_grad()
def test_a_call_without_layers_adds_no_tokens(tmp_path):
    model = Skips()
    with record(model, tmp_path / "a.safetensors"):
        for is_short in (True, False, True):
            model(IDS, is_short)
    recording = open_recording(tmp_path / "a.safetensors")
    assert recording.num_layers == 3 and recording.shape == (2, 3, 8)
    np.testing.assert_array_equal(next(recording.read_layers()).before, model.embed(IDS))


@torch.no_grad()
def test_a_mask_of_other_tokens_than_those_of_the_stream_is_not_recorded(tmp_path):
    """As where a model drops tokens before its layers."""
    model = WithLogits()
    embedded = model.embed(IDS)[:, :2]
    options = {"inputs_embeds": embedded, "attention_mask": torch.tensor([[1, 1, 1], [0, 1, 1]])}
    _, recording = record_calls(tmp_path / "a.safetensors", [((), options)], model)
    assert recording.shape == (2, 2, 8) and "mask" not in recording.arrays
