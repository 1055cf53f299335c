"""The words that figures, tables and reports use for names of the code."""

from typing import Any

# {name, or "axis value" where a value alone says too little: words}
WORDS = {
    "san": "attention alone",
    "san_mlp": "attention and MLPs",
    "san_skip": "attention and skips",
    "transformer": "full model",
    "SAN": "attention alone",
    "SAN+MLP": "attention and MLPs",
    "SAN+skip": "attention and skips",
    "Transformer": "full model",
    "norm placement none": "no norm",
    "norm placement post": "Post-LN",
    "norm placement pre": "Pre-LN",
    "post": "Post-LN",
    "pre": "Pre-LN",
    "deepnorm": "DeepNorm",
    "depth_scaled": "Post-LN, branches / √L",
    "layernorm_scaling": "LayerNorm scaling",
    "admin": "Admin",
    "admin_log": "Admin, ω² ∝ ln N",
    "admin_const": "Admin, ω² = N",
    "rule sp": "standard parametrisation",
    "rule mup": "μP",
    "rule half": "α = ½",
    "rule completep": "CompleteP",
    "tied True": "tied weights",
    "tied False": "untied weights",
    "bert-base-cased": "BERT",
    "albert-base-v2": "ALBERT",
    "xlnet-base-cased": "XLNet",
}
# {axis of a grid: its value in words}; other axes are "axis value".
VALUES = {
    "num_paths": "{} sampled paths",
    "num_heads": "{} heads",
    "num_tokens": "{} tokens",
    "num_labels": "{} labels",
    "n_epochs": "{} epochs",
    "n_steps": "{} steps",
    "d_model": "width {}",
    "d_ff": "MLP width {}",
    "start": "from {:.0%} of the layers on",
    "how": "{}",
    "key": "{} key",
    "network": "{}",
    "bound": "bound ({})",
}
# {axis or column: its label}; of others the name with spaces
LABELS = {
    "mlp_gain": "gain of the MLPs",
    "gain_power": "gain 1/N to the power of",
    "log10_residual": "log10 of the residual",
    "ratio": "residual ratio",
}


def words(name: object) -> Any:
    """Returns a name of the code in words; anything else as it is."""
    return WORDS.get(name, name)


def name_axis(name: str) -> str:
    """Returns the label of an axis or a column: "weight scale", "gain of the MLPs"."""
    return LABELS.get(name, name.replace("_", " "))


def describe_value(axis: str, value: object) -> str:
    """Puts the value of an axis in words: "Post-LN", "weight scale 0.55", "5 sampled paths".

    Args:
        axis: Name of a flag or of a dimension of the results; "" where the value says enough.
        value: The value.
    """
    if axis in VALUES:
        text = VALUES[axis].format(value)
        return text.removesuffix("s") if text.startswith("1 ") else text
    text = f"{value:g}" if isinstance(value, float) else str(value)
    named = f"{axis.replace('_', ' ')} {text}".strip()
    return WORDS.get(named, WORDS.get(value, named))


SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def power_of_ten(exponent: float) -> str:
    """Writes 10 to a power: "10⁻²³⁰⁰⁰⁰" with two digits of the exponent, "0.5" near 1.

    Args:
        exponent: The decimal logarithm of the number.
    """
    if abs(exponent) < 2:
        return f"{10.0**exponent:.2g}"
    return "10" + f"{float(f'{exponent:.2g}'):.0f}".translate(SUPERSCRIPTS)
