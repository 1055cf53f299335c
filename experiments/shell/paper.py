"""The paper's claims, each with where it stands: what `reproduce` lists and its entries test.

Dong, Cordonnier and Loukas 2021, arXiv 2103.03404.
"""

from typing import NamedTuple


class Statement(NamedTuple):
    """What the paper says, in a sentence, and where."""

    section: str
    text: str


PAPER = {
    "decomposition": Statement(
        "Theorem 2.1", "The output is the sum over all paths, and a term of the biases."
    ),
    "rate": Statement(
        "Theorems 2.2, 2.3",
        "Pure attention loses rank doubly exponentially: the residual's logarithm triples with "
        "each layer.",
    ),
    "bound": Statement("Theorems 2.2, 2.3", "The residual stays below the bound."),
    "lemma": Statement("Appendix", "(I − D)P̃ ≤ P ≤ (I + 2D)P̃ where max D_ii ≤ 1.256."),
    "lengths": Statement(
        "Section 3.1", "With skips the lengths of paths are binomial, so that most paths are long."
    ),
    "skips": Statement("Section 3.1", "Skips keep the residual that pure attention loses."),
    "skips stop": Statement("Abstract", "Skips stop the output from degenerating."),
    "mlp bound": Statement("Corollary 3.2", "With MLPs the residual stays below the bound."),
    "mlps slow": Statement("Section 3.2", "MLPs slow the collapse down."),
    "mlps stop": Statement("Abstract", "MLPs stop the output from degenerating."),
    "norm": Statement("Section 3.3", "LayerNorm changes nothing about the rate of the collapse."),
    "curves": Statement(
        "Section 4.1",
        "The residual by layer of BERT, ALBERT and XLNet is the published curve.",
    ),
    "collapse": Statement(
        "Section 4.1", "Without skips BERT, ALBERT and XLNet lose nearly all of their residual."
    ),
    "chains": Statement(
        "Section 4.2", "Products of attention matrices along a path lose rank with its length."
    ),
    "short at first": Statement(
        "Section 4.2", "Short paths carry what tells tokens apart, although most paths are long."
    ),
    "short suffice": Statement("Section 4.2", "Short paths carry a trained network."),
    "one short": Statement(
        "Section 4.2", "A few short paths alone do most of what the network was trained for."
    ),
    "falls": Statement("Section 4.2", "The accuracy of a path falls with its length."),
    "circle": Statement(
        "Section 4.3", "Fed with its own output, attention lets two walkers fall together."
    ),
    "circle skip": Statement("Section 4.3", "A skip counteracts that."),
    "circle mlp": Statement("Section 4.3", "An MLP counteracts that."),
    "width": Statement(
        "Published code, test_width",
        "Depth buys nothing at equal parameters (implied by section 4.2, not stated).",
    ),
}


def said(name: str, where: str = "") -> dict[str, str]:
    """{"section", "statement"} of a claim, with what it is tested on added to the statement.

    Args:
        name: Of `PAPER`.
        where: The network, task or setting.
    """
    section, text = PAPER[name]
    return {"section": section, "statement": f"{text} [{where}]" if where else text}
