"""Published names of models: what is no name has no suggestion."""

import pytest

from rank_collapse.pretrained.published import suggest_names


@pytest.mark.parametrize("name", ["", "/no/such", "./gpt2", "a/b/gpt2", "~/gpt2"])
def test_a_path_is_no_name_of_a_model(name):
    assert suggest_names(name) == ""
