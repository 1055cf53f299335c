"""Texts of our own grammars: the same for a seed, closed by tokens, spectra between −1 and 1."""

import random
import re

import numpy as np
import pytest

from experiments.trained import generated_texts
from tests.support.closeness import assert_close


def test_a_reaction_has_one_arrow_and_a_product_that_begins_as_its_reactant():
    for seed in range(50):
        tokens = generated_texts.draw_reaction(random.Random(seed))
        assert tokens.count(">>") == 1 and "R" not in tokens and "{}" not in "".join(tokens)
        reactants, product = "".join(tokens).split(">>")
        assert product and product[:3] == reactants[:3]


def test_a_reaction_is_cut_as_a_vocabulary_of_smiles_has_it():
    """Atoms of two letters and of brackets are one token; a coupling is of two rings."""
    tokens = [t for s in range(200) for t in generated_texts.draw_reaction(random.Random(s))]
    assert {"Cl", "Br", "[Na+]", "[nH]"} <= {*tokens}
    assert {token for token in tokens if len(token) == 1} <= {*"BCNOFSPcnosn()=#-+.123"}
    amine, biaryl = ("".join(generated_texts.draw_reaction(random.Random(s))) for s in (6, 1))
    assert amine == (
        "Fc1ccc(C=O)cc1.NCCN(C)C.CC(=O)O[BH-](OC(C)=O)OC(C)=O.[Na+].ClCCl>>Fc1ccc(CNCCN(C)C)cc1"
    )
    assert biaryl == (
        "Cc1ccc(Br)nc1.OB(O)c2cccnc2.O=C([O-])[O-].[Na+].[Na+].C1COCCO1.O>>Cc1ccc(-c2cccnc2)nc1"
    )


def test_an_antibody_has_the_frameworks_of_its_chain_and_no_empty_place():
    patterns = [
        chain.replace("*", f"[{generated_texts._LOOP}]") for chain in generated_texts._CHAINS
    ]
    drawn = ["".join(generated_texts.draw_antibody(random.Random(seed))) for seed in range(20)]
    chains = [[bool(re.fullmatch(pattern, text)) for pattern in patterns] for text in drawn]
    assert all(sum(matches) == 1 for matches in chains)
    assert all(map(any, zip(*chains, strict=True)))  # each chain is drawn
    assert len({*drawn}) == 20  # and its loops differ


def test_a_seed_gives_the_same_lines_and_another_one_others():
    words = ["[CLS]", "[SEP]", *"ACDEFGHIKLMNPQRSTVWY"]
    first, again, other = (generated_texts.write_ids("antibodies", words, 4, s) for s in (1, 1, 2))
    assert first == again != other and first.count("\n") == 4
    rows = [list(map(int, line.split())) for line in first.splitlines()]
    assert all((row[0], row[-1]) == (0, 1) and min(row[1:-1]) > 1 for row in rows)


@pytest.mark.parametrize("kind", generated_texts.KINDS)
def test_a_vocabulary_that_lacks_a_word_is_refused_with_the_word(kind):
    """Whatever the word, the tokens around a text among them: no id stands for two words."""
    draw = random.Random(1)
    words = [
        "[CLS]",
        "[SEP]",
        *sorted({w for _ in range(9) for w in generated_texts.KINDS[kind](draw)}),
    ]
    whole = generated_texts.write_ids(kind, words, 9)
    assert {*map(int, whole.split())} == {*range(len(words))}
    for word in words:
        with pytest.raises(KeyError, match=re.escape(repr(word))):
            generated_texts.write_ids(kind, [w for w in words if w != word], 9)


def test_spectra_are_between_minus_one_and_one_and_tones_move():
    spectra = generated_texts.draw_spectrograms(20, 60, 3, seed=5)
    assert spectra.shape == (3, 20, 60) and spectra.dtype == np.float32
    assert spectra.min() == -1 and 0 < spectra.max() <= 1
    np.testing.assert_array_equal(spectra, generated_texts.draw_spectrograms(20, 60, 3, seed=5))
    assert len({int(i) for i in spectra[0].argmax(axis=0)}) > 3
    assert (spectra != generated_texts.draw_spectrograms(20, 60, 3, seed=6)).any()


def test_a_spectrum_is_of_one_tone_and_three_overtones_each_softer():
    """Against the formula at every bin and frame, of the second of two spectra."""
    (_, spectrum), draw = generated_texts.draw_spectrograms(90, 7, 2, seed=3), _skip_one()
    knots, levels = draw.uniform(4, 20, 12), draw.uniform(-0.5, 1, 40)
    for frame, time in enumerate(np.linspace(0, 1, 7)):
        pitch = np.interp(11 * time, np.arange(12), knots)
        level = np.interp(39 * time, np.arange(40), levels)
        tones = [level - 0.2 * n - (np.arange(90) - n * pitch) ** 2 / 8 for n in (1, 2, 3, 4)]
        expected = np.clip(np.max(tones, axis=0), -1, 1)
        assert_close(spectrum[:, frame], expected, atol=1e-6)


def _skip_one():
    draw = np.random.default_rng(3)
    draw.uniform(size=12 + 40)
    return draw
