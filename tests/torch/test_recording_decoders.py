"""rank_collapse.torch.record: both attentions of a decoder, and layers that are computed again."""

from types import SimpleNamespace

import numpy as np
import pytest

from tests.support.refusals import is_refused

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from rank_collapse.agree.comparison import compare_files  # noqa: E402
from rank_collapse.agree.recording import open_recording  # noqa: E402
from rank_collapse.torch import record  # noqa: E402
from tests.oracles.recorded_torch import IDS, Model  # noqa: E402
from tests.support.closeness import assert_close  # noqa: E402

D = 16
X, MEMORY = torch.randn(2, 2, 12, D, generator=torch.Generator().manual_seed(0))


def make_decoder():
    torch.manual_seed(0)
    layer = nn.TransformerDecoderLayer(D, 2, 32, batch_first=True, norm_first=True)
    decoder = nn.TransformerDecoder(layer, 4).eval()
    for parameter in decoder.parameters():
        if parameter.ndim > 1:
            nn.init.xavier_normal_(parameter)
    return decoder


@torch.no_grad()
def run(model, path, *, memory=MEMORY, **options):
    with record(model, path, **options):
        model(X, memory)
    return open_recording(path)


def test_both_attentions_of_a_decoder_are_one_branch(tmp_path):
    layers = run(make_decoder(), tmp_path / "a.npz").read_layers()
    for layer in layers:
        assert_close(layer.before + sum(layer.branches.values()), layer.after, atol=1e-5)


def test_an_attention_by_name_is_one_branch_without_the_other(tmp_path):
    decoder = make_decoder()
    outputs = []
    for layer in decoder.layers:
        layer.self_attn.register_forward_hook(lambda module, args, out: outputs.append(out[0]))
    layers = run(decoder, tmp_path / "a.npz", attention="self_attn").read_layers()
    for layer, output in zip(layers, outputs, strict=True):
        np.testing.assert_array_equal(layer.branches["attention_branch"], output)


@pytest.mark.parametrize("wrong", ["self_attn", "multihead_attn", "linear2", None])
@pytest.mark.parametrize("is_replay", [False, True])
def test_a_mistake_in_either_attention_is_one_of_attention(wrong, is_replay, tmp_path):
    first, second = make_decoder(), make_decoder().to(torch.bfloat16)

    def scale(module, args, output):
        return (output[0] * 0.5, *output[1:]) if isinstance(output, tuple) else output * 0.5

    if wrong:
        second.layers[2].get_submodule(wrong).register_forward_hook(scale)
    with torch.no_grad(), record(second, tmp_path / "b.safetensors"):
        second(X.bfloat16(), MEMORY.bfloat16())
    inputs = {"inputs": tmp_path / "b.safetensors"} if is_replay else {}
    run(first, tmp_path / "a.safetensors", **inputs)
    answer = compare_files(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    part = {"linear2": "mlp", None: None}.get(wrong, "attention")
    assert answer.first == (part and {"layer": 2, "part": part}), answer.sentence


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("is_replay", [False, True])
def test_a_hook_that_scales_the_input_of_a_layer_is_no_mistake_of_its_mlp(
    norm_first, is_replay, tmp_path
):
    """With norms after the sums the recordings do not tell it: docs/agree.md says so."""

    def make():
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(D, 2, 32, batch_first=True, norm_first=norm_first)
        encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).train()
        for module in encoder.modules():
            if isinstance(module, nn.Dropout | nn.MultiheadAttention):
                module.dropout = module.p = 0.0
        return encoder

    first, second = make(), make()
    second.layers[2].register_forward_pre_hook(lambda module, args: (args[0] * 0.7, *args[1:]))
    with torch.no_grad(), record(second, tmp_path / "b.safetensors"):
        second(X)
    inputs = {"inputs": tmp_path / "b.safetensors"} if is_replay else {}
    with torch.no_grad(), record(first, tmp_path / "a.safetensors", **inputs):
        first(X)
    answer = compare_files(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert answer.first["layer"] == 2
    if norm_first:
        assert answer.first["part"] == "layer" and "layer 2's sum" in answer.sentence


def test_other_states_of_the_encoder_show_in_the_first_attention(tmp_path):
    run(make_decoder(), tmp_path / "a.npz")
    run(make_decoder(), tmp_path / "b.npz", memory=MEMORY.flip(0))
    answer = compare_files(tmp_path / "a.npz", tmp_path / "b.npz")
    assert answer.first == {"layer": 0, "part": "attention"}


class Again(nn.Module):
    """A layer, or what is inside of it, that gradient checkpointing computes again."""

    def __init__(self, block, use_reentrant):
        super().__init__()
        self.norm, self.attn, self.mlp = block.norm, block.attn, block.mlp
        self.compute, self.use_reentrant = block.forward, use_reentrant

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(self.compute, x, use_reentrant=self.use_reentrant)


class Checkpointed(Model):
    def __init__(self, is_whole, use_reentrant):
        super().__init__()
        self.is_whole, self.use_reentrant = is_whole, use_reentrant
        if not is_whole:
            self.blocks = nn.ModuleList(Again(block, use_reentrant) for block in self.blocks)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            if self.is_whole:
                reentrant = self.use_reentrant
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=reentrant)
            else:
                x = block(x)
        return x


@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_what_a_backward_pass_computes_again_is_not_recorded(is_whole, use_reentrant, tmp_path):
    plain, model = Model(), Checkpointed(is_whole, use_reentrant)
    with record(plain, tmp_path / "a.npz"):
        plain(IDS)
    with record(model, tmp_path / "b.npz"):
        model(IDS).square().mean().backward()
    first, second = (open_recording(tmp_path / f"{name}.npz") for name in "ab")
    assert first.num_layers == second.num_layers == 3
    for a, b in zip(first.read_layers(), second.read_layers(), strict=True):
        assert_close(a.after, b.after, atol=1e-6)
        for name, branch in a.branches.items():
            assert_close(branch, b.branches[name], atol=1e-6)


@torch.no_grad()
def test_calls_that_cannot_be_joined_are_refused(tmp_path):
    model = Model()
    message = r"the calls of the model have states of shapes \[2, 3, 8\], \[1, 3, 8\], but"

    def call_twice():
        with record(model, tmp_path / "a.npz"):
            model(IDS)
            model(IDS[:1])

    is_refused(message, call_twice)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@torch.no_grad()
def test_nested_tensors_are_refused_and_padding_is_recorded(tmp_path):
    layer = nn.TransformerEncoderLayer(D, 2, 32, batch_first=True)
    padding = torch.arange(12)[None] >= torch.tensor([[12], [7]])
    model = nn.TransformerEncoder(layer, 2).eval()

    def encode():
        with record(model, tmp_path / "a.npz"):
            model(X, src_key_padding_mask=padding)

    is_refused("is a nested tensor", encode)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train()
    encode()
    assert np.array_equal(open_recording(tmp_path / "a.npz").read_mask(), ~padding.numpy())


def test_a_module_that_adds_the_skip_itself_is_no_branch(tmp_path):
    """In BLOOM and MPT the last projection is the branch."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    bloom = transformers.BloomConfig(n_layer=2, n_head=2, hidden_size=16, vocab_size=20)
    mpt = transformers.MptConfig(d_model=16, n_heads=2, n_layers=2, max_seq_len=32, vocab_size=20)
    for model in (transformers.BloomModel(bloom).eval(), transformers.MptModel(mpt).eval()):
        with torch.no_grad(), record(model, tmp_path / "a.npz"):
            model(torch.arange(12).reshape(2, 6) + 3)
        for layer in open_recording(tmp_path / "a.npz").read_layers():
            assert_close(layer.before + sum(layer.branches.values()), layer.after, atol=1e-5)


@pytest.mark.parametrize("stack", ["encoder", "decoder"])
@torch.no_grad()
def test_ids_mask_and_logits_are_of_the_recorded_stack(stack, tmp_path):
    """Encoder and decoder have equally many tokens, so that shapes do not tell them apart."""

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            layer = nn.TransformerEncoderLayer(D, 2, 32, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
            self.embed, self.decoder = nn.Embedding(9, D), make_decoder()

        def forward(self, input_ids, attention_mask, decoder_input_ids, decoder_attention_mask):
            memory = self.encoder(self.embed(input_ids))
            return SimpleNamespace(logits=self.decoder(self.embed(decoder_input_ids), memory))

    ids = torch.randint(1, 9, (2, 2, 5))
    masks = torch.tensor([[[1, 1, 1, 0, 0]] * 2, [[1, 1, 1, 1, 0]] * 2])
    model = Both()
    with record(model, tmp_path / "a.npz", layers=rf"{stack}\.layers\.\d+"):
        model(ids[0], masks[0], decoder_input_ids=ids[1], decoder_attention_mask=masks[1])
    place, arrays = ["encoder", "decoder"].index(stack), np.load(tmp_path / "a.npz")
    np.testing.assert_array_equal(arrays["token_ids"], ids[place])
    np.testing.assert_array_equal(arrays["mask"], masks[place])
    assert ("logits" in arrays) == (stack == "decoder")
