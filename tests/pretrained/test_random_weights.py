"""Random weights: their laws against `transformers`, rows of a table that is drawn in part."""

import warnings

import jax
import numpy as np
import pytest

from rank_collapse import pretrained
from rank_collapse.pretrained.random_weights import Draw, Initialisation, RandomWeights
from tests.oracles.architecture_cases import CASES, FORMS
from tests.support.closeness import assert_close
from tests.support.marks import full_if

UNREAD = ("mask_token", "lm_head", "encoder.embed_tokens", "decoder.embed_", "head.dense")
WITHIN_TWO = 0.87963  # standard deviation of a normal number that is cut at two


def build(case):
    """Builds a model as `transformers` initialises it: (settings, {name: array})."""
    torch = pytest.importorskip("torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers = pytest.importorskip("transformers")
        torch.manual_seed(0)
        kind = getattr(transformers, case.model)
        model = kind(kind.config_class(**case.config))
    tensors = {name: a.detach().double().numpy() for name, a in model.state_dict().items()}
    return pretrained.settings_of(model.config.to_dict()), tensors


OTHER_FORMS = [name for name in {**CASES, **FORMS} if "-" in name]  # of families that have one


@pytest.mark.parametrize("name", full_if({**CASES, **FORMS}, *OTHER_FORMS))
def test_tensors_are_drawn_as_transformers_draws_them(name):
    """Constants, sinusoids and rows of padding are equal, deviations within five errors."""
    settings, tensors = build({**CASES, **FORMS}[name])
    family, compared = pretrained.FAMILIES[settings["model_type"]], 0
    for tensor, values in tensors.items():
        if any(word in tensor for word in UNREAD) or values.ndim == 0:
            continue
        law, compared = family.tensor_law(tensor, settings), compared + 1
        if callable(law.value):
            assert_close(values, law.value(*values.shape), atol=1e-5, err_msg=tensor)
        elif law.std is None:
            np.testing.assert_array_equal(values, np.full_like(values, np.float32(law.value)))
        else:
            if law.zero_row is not None and law.zero_row < len(values):
                assert not values[law.zero_row].any(), tensor
                values = np.delete(values, law.zero_row, axis=0)
            std = law.std * (WITHIN_TWO if law.truncate else 1)
            error = 5 / np.sqrt(2 * values.size)
            assert abs(values.std() / std - 1) < error + 0.01, tensor
            assert (np.abs(values).max() <= 2.0001 * law.std) or not law.truncate, tensor
    assert compared > 8


def test_the_first_end_of_a_name_that_has_a_law_decides():
    law = Initialisation(
        std="spread",
        gain=0.5,
        values={"w.bias": 3.0, "scale": "size"},
        padded=("table",),
        truncated=("table", "cut"),
        residual=("out",),
    )
    settings = {"spread": 0.1, "size": 7.0, "pad_token_id": 4}
    for name, expected in (
        ("a.bias", Draw(value=0.0)),
        ("w.bias", Draw(value=0.0)),  # of all biases
        ("a.scale", Draw(value=7.0)),
        ("InputNorm.weight", Draw(value=0.5)),
        ("ln_1.weight", Draw(value=0.5)),
        ("a.out", Draw(0.1 / 8**0.5)),
        ("a.table", Draw(0.1, zero_row=4, truncate=True)),
        ("a.cut", Draw(0.1, truncate=True)),
        ("a.weight", Draw(0.1)),
    ):
        assert law(name, settings, 4) == expected, name


def test_deviations_of_t5_are_its_factor_over_the_root_of_what_a_map_reads():
    """Of queries also over that of their width, which the scores are not divided by."""
    sizes = {"d_model": 8, "d_kv": 4, "num_heads": 3, "d_ff": 16, "initializer_factor": 2.0}
    settings = pretrained.settings_of({"model_type": "t5"} | sizes)
    for name, reads in (
        ("SelfAttention.q", 8 * 4),
        ("SelfAttention.k", 8),
        ("SelfAttention.v", 8),
        ("SelfAttention.o", 3 * 4),
        ("SelfAttention.relative_attention_bias", 8),
        ("DenseReluDense.wi", 8),
        ("DenseReluDense.wo", 16),
    ):
        law = pretrained.FAMILIES["t5"].tensor_law(
            f"encoder.block.0.layer.0.{name}.weight", settings
        )
        assert law == Draw(pytest.approx(2 / reads**0.5)), name
    for name, law in (("shared.weight", Draw(2.0)), ("layer_norm.weight", Draw(value=2.0))):
        assert pretrained.FAMILIES["t5"].tensor_law(name, settings) == law


def test_a_tensor_depends_on_the_key_and_its_name_alone():
    draws = {
        "normal": Draw(0.5),
        "ones": Draw(value=1.0),
        "padded": Draw(2.0, zero_row=1),
        "beyond": Draw(2.0, zero_row=3),
        "waves": Draw(value=lambda rows, width: np.full((rows, width), rows / width)),
    }
    weights, other = (RandomWeights(jax.random.key(k), draws.get) for k in (0, 1))
    normal = weights.take("normal", 400, 50)
    assert abs(normal.std() / 0.5 - 1) < 5 / np.sqrt(2 * normal.size) and normal.dtype == np.float32
    np.testing.assert_array_equal(weights.take("normal", 400, 50), normal)
    assert np.abs(other.take("normal", 400, 50) - normal).max() > 0.1
    np.testing.assert_array_equal(weights.take("ones", 3), np.ones(3))
    padded = weights.take("padded", 3, 50)
    assert not padded[1].any() and padded[[0, 2]].all() and abs(padded[0].std() - 2) < 1
    assert weights.take("beyond", 3, 50).all()
    np.testing.assert_array_equal(weights.take("waves", 2, 4), np.full((2, 4), 0.5))
    assert weights.has_tensor("any") and not weights.has_tensor("any.")


@pytest.mark.parametrize("truncate", [True, False])
def test_rows_of_a_table_that_is_drawn_in_part_are_those_of_the_whole_one(truncate):
    law = Draw(1.0, truncate=truncate, zero_row=3)
    weights = RandomWeights(jax.random.key(0), lambda _: law, lazy=True)
    expected = weights.take("table", 50, 8)
    assert (np.abs(expected).max() < 2) == truncate
    table = weights.table("table", 50, 8)
    np.testing.assert_array_equal(table.rows([2, 9]), expected[[2, 9]])
    np.testing.assert_array_equal(table.read(7, 50), expected[7:])
