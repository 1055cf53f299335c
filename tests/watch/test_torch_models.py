"""Which models can be watched, and which of their attentions are numbered."""

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from rank_collapse.torch import watch  # noqa: E402
from rank_collapse.watch.torch_models import check_model, plain_name, read_layers  # noqa: E402


class FullyShardedDataParallel(nn.Module):
    """A model as the older FSDP wraps it, by its name."""


class DTensor(nn.Parameter):
    """A parameter of which this process has a part, by its name."""


class FSDPModule(nn.Linear):
    """A model under FSDP2, by its name."""


def spread(model):
    model.weight.__class__ = DTensor
    return model


def stack():
    """Eleven layers of two attentions each: `1` begins the names of two layers."""
    layers = [nn.ModuleDict({"attn": nn.Linear(2, 2), "cross": nn.Linear(2, 2)}) for _ in range(11)]
    return nn.ModuleDict({"layers": nn.ModuleList(layers)})


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (None, r"model=None is not a torch\.nn\.Module"),
        ("gpt2", r"model='gpt2' is not a torch\.nn\.Module"),
        (
            nn.Sequential(nn.Linear(2, 2), FullyShardedDataParallel()),
            "a model under FullyShardedDataParallel is not measured",
        ),
        (
            nn.Sequential(spread(nn.Linear(2, 2))),
            "0.weight is a DTensor: a model under tensor parallelism is not measured",
        ),
    ],
)
def test_a_model_that_cannot_be_watched_is_refused(model, message):
    with pytest.raises(ValueError, match=message):
        check_model(model)
    with pytest.raises(ValueError, match=message):
        watch(model)


def test_a_model_under_fsdp2_may_have_spread_parameters():
    check_model(nn.Sequential(spread(FSDPModule(2, 2))))


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ("layers.11", "layers='layers.11' is not one of the 35 modules of the model, such as 'lay"),
        (
            ["layers.1", "decoder"],
            "layers='decoder' is not one of the 35 modules of the model, such as "
            r"'layers', 'layers\.0', 'layers\.0\.attn'$",
        ),
        ([], r"layers=\[\] is neither a list of numbers or names of modules nor a function"),
        ([0, "layers"], r"layers=\[0, 'layers'\] is neither"),
        (-1, "layers=-1 is neither"),
        ([2, -1], r"layers=\[2, -1\] is neither"),
        (True, "layers=True is neither"),
        (1.0, "layers=1.0 is neither"),
    ],
)
def test_a_wrong_choice_of_layers_is_refused(layers, message):
    with pytest.raises(ValueError, match=message):
        read_layers(stack(), layers)


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("", ""),
        ("_orig_mod", ""),
        ("module", ""),
        ("_orig_mod.h.0", "h.0"),
        ("module.h.0", "h.0"),
        ("module._orig_mod.h.0", "h.0"),
        ("_orig_mod.module.h.0", "module.h.0"),  # a part of the model that is called so
        ("h.0._orig_mod.attn", "h.0.attn"),
        ("h.0._orig_mod", "h.0"),
        ("h.module.0", "h.module.0"),
        ("modules.0", "modules.0"),
        ("h._orig_modes", "h._orig_modes"),
    ],
)
def test_names_are_without_the_wrappers_of_compilation_and_of_several_processes(name, plain):
    assert plain_name(name) == plain


EVERY = [f"layers.{l}.{part}" for l in range(11) for part in ("attn", "cross")]


@pytest.mark.parametrize(
    ("layers", "names", "numbers"),
    [
        (None, EVERY, ()),
        (3, EVERY, (3,)),
        ((0, 70), EVERY, (0, 70)),
        ("layers", EVERY, ()),
        ("layers.1", ["layers.1.attn", "layers.1.cross"], ()),
        (["layers.10.attn", "layers.2"], ["layers.2.attn", "layers.2.cross", "layers.10.attn"], ()),
        (lambda name, module: "cross" in name, [n for n in EVERY if "cross" in n], ()),
        (lambda name, module: isinstance(module, nn.Conv1d), [], ()),
    ],
)
def test_attentions_are_numbered_by_their_names_or_a_function(layers, names, numbers):
    model = stack()
    select, chosen = read_layers(model, layers)
    assert [name for name in EVERY if select(name, model.get_submodule(name))] == names
    assert chosen == numbers


def test_one_of_two_lists_by_its_name():
    model = nn.Transformer(8, 2, 1, 2, 16, batch_first=True)
    watched = watch(model, 1, layers="decoder.layers")
    x = torch.randn(2, 5, 8)
    model(x, x).square().mean().backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    watched.close()
    assert len(watched.rows[0]["residual_ratio"]) == 2
