"""Texts for networks of reactions, antibodies and speech, written by small grammars of our own.

The texts are not data: reactions of eight kinds between fragments that are drawn, antibodies whose
frameworks are those of common human genes and whose loops are drawn, and spectra of tones that
glide. A trained network knows the kinds, not the texts.
"""

import random
import re
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float

COUNT = 128  # texts in a file
_TOKEN = re.compile(r"\[[^\]]+\]|Br|Cl|>>|.")  # of SMILES, as Schwaller et al. 2019 cut it

# A ring with a place {} for a group, whose own rings have the numbers 2 and 3.
_RINGS = (
    "COc1ccc({})cc1",
    "Fc1ccc({})cc1",
    "Cc1ccc({})nc1",
    "N#Cc1cccc({})c1",
    "O=C(OC)c1ccc({})cc1",
    "Clc1ccc({})cc1F",
    "CC(C)c1cc({})ccn1",
    "FC(F)(F)c1ccc({})cc1",
    "CN(C)c1ccc({})cc1Cl",
)
_GROUPS = (
    "Cc2ccccc2",
    "CC(C)C",
    "CCOC",
    "C2CCCCC2",
    "CCN(C)C",
    "Cc2ccc(F)cc2",
    "CCc2c[nH]c3ccccc23",
    "c2ccc(OC)cc2",
    "c2cccnc2",
    "c2ccc(C#N)cc2",
)
_ARYLS = tuple(group for group in _GROUPS if group.startswith("c2"))
# (reactant in the ring's place, what is beside it, product in the ring's place); R is a group
_REACTIONS = (
    ("C(=O)O", "NR.CCN=C=NCCCN(C)C.On1nnc2ccccc21.CN(C)C=O", "C(=O)NR"),
    ("Br", "OB(O)R.O=C([O-])[O-].[Na+].[Na+].C1COCCO1.O", "-R"),
    ("C(=O)OCC", "[OH-].[Na+].CO.O", "C(=O)O"),
    ("[N+](=O)[O-]", "[Fe].[Cl-].[NH4+].CCO.O", "N"),
    ("NC(=O)OC(C)(C)C", "O=C(O)C(F)(F)F.ClCCl", "N"),
    ("N", "O=S(=O)(Cl)R.c1ccncc1.ClCCl", "NS(=O)(=O)R"),
    ("O", "BrCR.O=C([O-])[O-].[K+].[K+].CN(C)C=O", "OCR"),
    ("C=O", "NR.CC(=O)O[BH-](OC(C)=O)OC(C)=O.[Na+].ClCCl", "CNR"),
)
# Frameworks of heavy chains (IGHV3, IGHV1) and a light one (IGKV1), with * where a loop is drawn
_CHAINS = (
    "EVQLVESGGGLVQPGGSLRLSCAASGFTF****MSWVRQAPGKGLEWVSAI****GSTYYADSVKGRFTISRDNSKNTLYLQMNSLRAEDTAVYYCA"
    "K*********FDYWGQGTLVTVSS",
    "QVQLVQSGAEVKKPGASVKVSCKASGYTF****MHWVRQAPGQGLEWMGWI****GGTNYAQKFQGRVTMTRDTSISTAYMELSRLRSDDTAVYYCA"
    "R*******MDVWGQGTTVTVSS",
    "DIQMTQSPSSLSASVGDRVTITCRASQ****YLNWYQQKPGKAPKLLIY***SLQSGVPSRFSGSGSGTDFTLTISSLQPEDFATYYCQQ*****TFG"
    "QGTKVEIK",
)
_LOOP = "AADDEFGGGGIKLNNPQRSSSSTTTVWYYYY"  # letters as often as loops have them


def draw_reaction(draw: random.Random) -> list[str]:
    """Draws a reaction as SMILES, reactants and reagents >> product, cut into tokens."""
    ring, (reactant, reagents, product) = draw.choice(_RINGS), draw.choice(_REACTIONS)
    group = draw.choice(_ARYLS if product == "-R" else _GROUPS)
    text = f"{ring.format(reactant)}.{reagents}>>{ring.format(product)}"
    return _TOKEN.findall(text.replace("R", group))


def draw_antibody(draw: random.Random) -> list[str]:
    """Draws a variable domain, letter by letter."""
    return [draw.choice(_LOOP) if letter == "*" else letter for letter in draw.choice(_CHAINS)]


KINDS: dict[str, Callable[[random.Random], list[str]]] = {
    "reactions": draw_reaction,
    "antibodies": draw_antibody,
}


def write_ids(kind: str, vocabulary: Sequence[str], count: int = COUNT, seed: int = 1) -> str:
    """Writes texts of a kind as ids of a vocabulary, [CLS] before and [SEP] after, one a line.

    Args:
        kind: Kind of text, a key of `KINDS`.
        vocabulary: Words of the vocabulary.
        count: Texts.
        seed: Seed of the draws.
    """
    draw, numbers = random.Random(seed), {word: i for i, word in enumerate(vocabulary)}
    lines = []
    for _ in range(count):
        words = ["[CLS]", *KINDS[kind](draw), "[SEP]"]
        lines.append(" ".join(str(numbers[word]) for word in words) + "\n")
    return "".join(lines)


def draw_spectrograms(
    bins: int, frames: int, count: int = COUNT, seed: int = 0
) -> Float[np.ndarray, "b i t"]:
    """Draws log-mel spectra, from −1 to 1 as Whisper has them, of tones that glide with overtones.

    Args:
        bins: Mel bins i.
        frames: t.
        count: Spectra b.
        seed: Seed of the draws.
    """
    draw, time = np.random.default_rng(seed), np.linspace(0, 1, frames)
    spectra = np.full((count, bins, frames), -1.0, np.float32)
    for spectrum in spectra:
        knots = draw.uniform(4, 20, 12)
        pitch = np.interp(time, np.linspace(0, 1, 12), knots)
        loud = np.interp(time, np.linspace(0, 1, 40), draw.uniform(-0.5, 1, 40))
        for overtone in range(1, 5):
            away = np.arange(bins)[:, None] - overtone * pitch[None]
            spectrum[:] = np.maximum(spectrum, loud[None] - 0.2 * overtone - away**2 / 8)
    return np.clip(spectra, -1, 1)
