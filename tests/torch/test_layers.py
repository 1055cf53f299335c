"""Which modules of a PyTorch model are its layers and the branches of its layers."""

import pytest

torch = pytest.importorskip("torch")

from rank_collapse.torch.layers import CROSS, find_branches, find_layers, find_part  # noqa: E402
from tests.oracles.recorded_torch import Model  # noqa: E402


def make_block(*names):
    """Makes a layer of modules with these dotted names, in this order."""
    block = torch.nn.Module()
    for name in names:
        *outer, last = name.split(".")
        place = block
        for part in outer:
            if not hasattr(place, part):
                place.add_module(part, torch.nn.Module())
            place = getattr(place, part)
        place.add_module(last, torch.nn.Identity())
    return block


LAYERS_BY_LIBRARY = {
    "BERT": ("attention.self", "attention.output.dense", "output.dense"),
    "DistilBERT": ("attention.q_lin", "attention.out_lin", "ffn.lin1", "ffn.lin2"),
    "Llama": ("self_attn", "mlp"),
    "Falcon": ("self_attention", "mlp"),
    "GPT-2": ("attn", "mlp"),
    "GPT-NeoX": ("attention", "mlp"),
    "feed_forward": ("attention", "feed_forward"),
    "XLNet": ("mha", "ff"),
    "ffn": ("attn", "ffn"),
    "experts": ("self_attn", "moe"),
    "MPT": ("attn", "ffn.up_proj", "ffn.down_proj"),
    "BLOOM": ("self_attention.dense", "mlp", "mlp.dense_4h_to_h"),
    "torch": ("self_attn", "linear1", "linear2"),
    "OPT": ("self_attn", "fc1", "fc2"),
    "ALBERT": ("attention", "ffn", "ffn_output"),
    "Mixtral": ("self_attn", "block_sparse_moe"),
    "RecurrentGemma": ("temporal_block", "mlp"),
    "T5": ("layer.0.SelfAttention", "layer.1.DenseReluDense"),
    "T5's decoder": ("layer.0.SelfAttention", "layer.1.Enc", "layer.2.DenseReluDense"),
}


BY_BRANCH = {"DistilBERT": (1, 3), "BERT": (1, 2), "ALBERT": (0, 1)}


@pytest.mark.parametrize("library", LAYERS_BY_LIBRARY)
def test_a_branch_is_the_module_of_a_whole_name(library):
    """Modules whose names only begin or end so, such as norms, come before it and after it."""
    names = LAYERS_BY_LIBRARY[library]
    chosen = BY_BRANCH.get(library, (0, -1))
    others = [f"{name.replace('.', '_')}_norm" for name in names]
    others += [f"pre_{name.replace('.', '_')}" for name in names]
    block = make_block(*others, *names, *(f"{name}.norm" for name in names))
    for branch, index in zip(("attention_branch", "mlp_branch"), chosen, strict=True):
        assert find_branches(block)[branch] is block.get_submodule(names[index])
    assert find_branches(make_block(*others)) == dict.fromkeys(("attention_branch", "mlp_branch"))


def test_patterns_are_tried_in_their_order():
    block = make_block("mlp", "attn", "first.attn")
    assert find_part(block, ["nothing", r"first\.attn", "mlp"]) is block.first.attn
    parts = find_branches(block, attention=r".*\.attn", mlp=["x", "attn"])
    assert parts == {"attention_branch": block.first.attn, "mlp_branch": block.attn}
    normed = ("post_attention_layernorm", "post_feedforward_layernorm")
    block = make_block("attn", "mlp", *normed)
    assert list(find_branches(block).values()) == [block.get_submodule(name) for name in normed]
    assert find_branches(block, attention="attn")["mlp_branch"] is block.mlp  # names that are given
    one = make_block("attn", "mlp", normed[0])
    assert find_branches(one) == {"attention_branch": one.attn, "mlp_branch": one.mlp}


@pytest.mark.parametrize(
    ("attention_norm", "mlp_norm"),
    [
        ("post_attention_layernorm", "post_feedforward_layernorm"),
        ("post_self_attn_layernorm", "post_mlp_layernorm"),
        ("post_self_attn_layernorm", "post_feedforward_layernorm"),
    ],
)
def test_norms_of_both_branches_come_before_the_branches(attention_norm, mlp_norm):
    block = make_block("self_attn", "mlp", attention_norm, mlp_norm)
    parts = find_branches(block)
    assert parts["attention_branch"] is block.get_submodule(attention_norm)
    assert parts["mlp_branch"] is block.get_submodule(mlp_norm)


@pytest.mark.parametrize(
    "name",
    [
        "post_cross_attn_layernorm",
        "crossattention.output.dense",  # BERT
        "encoder_attn",  # BART
        "cross_attn",
        "crossattention",  # GPT-2
        "cross_attention",
        "multihead_attn",  # torch
        "layer.1.EncDecAttention",  # T5
    ],
)
def test_attention_to_an_encoder_by_its_name(name):
    other = f"{name.replace('.', '_')}_norm"
    block = make_block("self_attn", "mlp", other, name, f"{name}.norm")
    assert find_part(block, CROSS) is block.get_submodule(name)
    assert find_branches(block)["attention_branch"] is block.self_attn
    assert find_part(make_block("self_attn", other), CROSS) is None


def test_layers_are_those_of_a_whole_name_in_the_order_of_the_model():
    model = Model()
    model.blocks_norm = torch.nn.Identity()
    assert find_layers(model, r"blocks\.\d") == list(model.blocks)
    assert find_layers(model, "blocks") == [model.blocks]
    assert find_layers(model, [model.blocks[2], model.blocks[0]]) == [
        model.blocks[2],
        model.blocks[0],
    ]


def test_of_lists_of_one_length_the_larger_one_has_the_layers():
    model = torch.nn.Module()
    model.small = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(3))
    model.large = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))
    model.long = torch.nn.Sequential(torch.nn.Linear(9, 9), *[torch.nn.ReLU() for _ in range(9)])
    assert find_layers(model) == list(model.large)
    assert find_layers(model.long) == list(model.long)  # no other list
    model.large_too = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(4))
    assert find_layers(model) == list(model.large_too)  # beside `large`, not inside it


def test_a_list_has_the_layers_of_a_model_whatever_lists_they_hold():
    blocks = torch.nn.ModuleList(make_block("attn") for _ in range(2))
    for block in blocks:
        block.experts = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(5))
    model = torch.nn.Module()
    model.blocks = blocks
    assert find_layers(model) == find_layers(blocks) == list(blocks)


def test_a_list_without_modules_is_no_list_of_layers():
    """As the prompts of a model that has none."""
    model = torch.nn.Module()
    model.prompts = torch.nn.ModuleList()
    model.steps = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    assert find_layers(model) == list(model.steps)
