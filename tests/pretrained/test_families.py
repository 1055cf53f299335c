"""The table of families: its settings against `transformers`, what is refused, what is null."""

import warnings

import pytest

from rank_collapse import pretrained
from rank_collapse.pretrained import llama

SMALL = {"hidden_size": 24, "num_attention_heads": 3, "max_position_embeddings": 20}


def test_every_entry_stands_under_its_own_name():
    for name, family in pretrained.FAMILIES.items():
        assert family.model_type == name
        for part in family.parts or (None,):
            assert pretrained.config_of({"model_type": name}, part).depth > 1


@pytest.mark.parametrize("name", pretrained.FAMILIES)
def test_absent_entries_are_what_transformers_takes_them_for(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers = pytest.importorskip("transformers")
        expected = transformers.AutoConfig.for_model(name).to_dict()
    # None stands for what follows from other entries.
    ours = {k: v for k, v in pretrained.FAMILIES[name].defaults.items() if v is not None}
    shared = ours.keys() & expected.keys()
    assert len(shared) > 6
    assert {k: ours[k] for k in shared} == {k: expected[k] for k in shared}


def test_null_means_the_default_and_parts_are_checked():
    settings = pretrained.settings_of({"model_type": "bert", "hidden_size": None, "other": None})
    assert settings["hidden_size"] == 768 and settings["other"] is None
    assert pretrained.settings_of({"model_type": "t5"})["part"] == "encoder"
    assert pretrained.settings_of({"model_type": "mt5"}, "decoder")["part"] == "decoder"
    with pytest.raises(ValueError, match=r"part='both' of a t5 model is not one of \('encoder'"):
        pretrained.settings_of({"model_type": "t5"}, "both")
    with pytest.raises(ValueError, match=r"part='encoder' of a bert model is not one of \(\)"):
        pretrained.settings_of({"model_type": "bert"}, "encoder")
    with pytest.raises(ValueError, match="model_type='bart' is not one of"):
        pretrained.settings_of({"model_type": "bart"})


@pytest.mark.parametrize(
    ("name", "positions"), [("bert", 20), ("roberta", 18), ("xlm-roberta", 18), ("camembert", 18)]
)
def test_roberta_keeps_rows_of_its_positions_for_padding(name, positions):
    config = pretrained.config_of(SMALL | {"model_type": name})
    assert config.embedding.num_positions == positions


def test_sliding_windows():
    """A window that is used bounds the length up to which a model is the plain causal one."""

    def window(name, **entries):
        given = SMALL | {"model_type": name, "sliding_window": 7} | entries
        return llama.window(pretrained.settings_of(given))

    assert window("mistral") == 7 and window("mistral", use_sliding_window=False) == 20
    assert window("qwen2") == 20 and window("qwen2", use_sliding_window=True) == 7
    assert window("mistral", sliding_window=None) == 20
