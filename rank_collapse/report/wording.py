"""Names of the code in the words of the figures."""

from typing import Any

# "flag value" where a value says too little.
WORDS = {
    "san": "attention alone",
    "san_mlp": "attention and MLPs",
    "san_skip": "attention and skips",
    "transformer": "whole network",
    "SAN": "attention alone",
    "SAN+MLP": "attention and MLPs",
    "SAN+skip": "attention and skips",
    "Transformer": "whole network",
    "norm placement none": "no norm",
    "norm placement post": "Post-LN",
    "norm placement pre": "Pre-LN",
    "post": "Post-LN",
    "pre": "Pre-LN",
    "deepnorm": "DeepNorm",
    "depth_scaled": "Post-LN, branches / √L",
    "admin": "Admin",
    "admin_log": "Admin, ω² ∝ ln N",
    "admin_const": "Admin, ω² = N",
    "bert-base-cased": "BERT",
    "albert-base-v2": "ALBERT",
    "xlnet-base-cased": "XLNet",
}


def words(name: object) -> Any:
    """Returns a name of the code in words; anything else as it is."""
    return WORDS.get(name, name)


SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def power_of_ten(exponent: float) -> str:
    """Writes 10 to a power: "10⁻²³⁰⁰⁰⁰" with two digits of the exponent, "0.5" near 1.

    Args:
        exponent: The decimal logarithm of the number.
    """
    if abs(exponent) < 2:
        return f"{10.0**exponent:.2g}"
    return "10" + f"{float(f'{exponent:.2g}'):.0f}".translate(SUPERSCRIPTS)
