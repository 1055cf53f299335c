"""Texts of our own grammars: the same for a seed, closed by tokens, spectra between −1 and 1."""

import random

import numpy as np

from experiments.trained import generated_texts


def test_a_reaction_has_one_arrow_and_a_product_that_begins_as_its_reactant():
    for seed in range(50):
        tokens = generated_texts.draw_reaction(random.Random(seed))
        assert tokens.count(">>") == 1 and "R" not in tokens and "{}" not in "".join(tokens)
        reactants, product = "".join(tokens).split(">>")
        assert product and product[:3] == reactants[:3]


def test_an_antibody_has_the_frameworks_of_its_chain_and_no_empty_place():
    lengths = {len(chain) for chain in generated_texts._CHAINS}
    for seed in range(20):
        letters = generated_texts.draw_antibody(random.Random(seed))
        assert len(letters) in lengths and "*" not in letters


def test_a_seed_gives_the_same_lines_and_another_one_others():
    words = ["[CLS]", "[SEP]", *"ACDEFGHIKLMNPQRSTVWY"]
    first, again, other = (generated_texts.write_ids("antibodies", words, 4, s) for s in (1, 1, 2))
    assert first == again != other and first.count("\n") == 4
    rows = [list(map(int, line.split())) for line in first.splitlines()]
    assert all((row[0], row[-1]) == (0, 1) and min(row[1:-1]) > 1 for row in rows)


def test_spectra_are_between_minus_one_and_one_and_tones_move():
    spectra = generated_texts.draw_spectrograms(20, 60, 3, seed=5)
    assert spectra.shape == (3, 20, 60) and spectra.dtype == np.float32
    assert spectra.min() == -1 and 0 < spectra.max() <= 1
    np.testing.assert_array_equal(spectra, generated_texts.draw_spectrograms(20, 60, 3, seed=5))
    assert len({int(i) for i in spectra[0].argmax(axis=0)}) > 3
