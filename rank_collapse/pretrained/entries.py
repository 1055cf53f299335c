"""Entries of a config.json: defaults, allowed values, and rotary positions."""

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from rank_collapse.checks import refuse_if
from rank_collapse.printed import quote_value

Settings = dict[str, Any]

# No published model has a tenth of it; what is built per layer would fill the memory beyond.
MAX_LAYERS = 10_000
_LARGEST = {int: 2**31 - 1, float: 3.4e38}  # what an index and a float32 can hold
_NAMES = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a string",
    list: "a list",
    dict: "an object",
}


class Entry(NamedTuple):
    """One entry of a config.json."""

    default: object  # What it is where it is absent or null
    kinds: tuple[type, ...]  # Its types
    # Of a number; None for the largest that there may be of its type
    least: float = 0
    most: float | None = None
    nullable: bool = False  # Whether null is a value of its own rather than the default


def as_entry(entry: object) -> Entry:
    """Convert the short forms of an entry: a default, or a type where the default is None."""
    if isinstance(entry, Entry):
        return entry
    return Entry(None, (entry,)) if isinstance(entry, type) else Entry(entry, (type(entry),))


def count_entry(default: int | None = None, most: int | None = None) -> Entry:
    """Make the `Entry` of a whole number that is 1 or more."""
    return Entry(default, (int,), least=1, most=most)


def check_entry(name: str, value: object, entry: Entry) -> None:
    """Raise an error for a value of another type, or beyond the limits of its entry.

    Args:
        name: Name of the entry, for the message.
        value: See config.json.
        entry: Allowed types and limits.
    """
    kinds = entry.kinds
    if type(value) not in kinds and not (float in kinds and type(value) is int):
        expected = " or ".join(_NAMES[kind] for kind in kinds)
        raise ValueError(f"{name}={quote_value(value)} is not {expected}")
    if type(value) not in _LARGEST:
        return
    most = _LARGEST[float if float in kinds else int] if entry.most is None else entry.most
    if not entry.least <= value <= most:
        raise ValueError(f"{name}={quote_value(value)} is not between {entry.least} and {most}")


def check_allowed(settings: Mapping[str, object], name: str, allowed: tuple[object, ...]) -> None:
    """Raise an error for values of an entry that the network has no field for.

    Args:
        settings: Settings of the model.
        name: Name of the entry.
        allowed: Supported values of the entry.
    """
    if settings[name] not in allowed:
        values, value = " or ".join(map(repr, allowed)), quote_value(settings[name])
        raise ValueError(
            f"{name}={value} of a {settings['model_type']} model is not supported, only {values}"
        )


KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
# Beyond what a text can have: the frequencies of every length.
ANY_LENGTH = 2**31


def rotary_entry(settings: Mapping[str, object], kind: str | None = None) -> Settings:
    """Select the entry on rotary positions, of one kind of layers.

    If both entries exist, the old one counts, as in transformers: users add it to extend the
    context.

    Args:
        settings: `rope_scaling` and `rope_parameters` among them.
        kind: "full_attention" or "sliding_attention" where each has its own.

    Raises:
        ValueError: An entry of the wrong type.
    """
    parameters = settings["rope_parameters"] or {}
    if kind is not None and kind in parameters:
        check_entry(f"rope_parameters.{kind}", parameters[kind], Entry(None, (dict,)))
        parameters = parameters[kind]
    return settings["rope_scaling"] or parameters


def rotary_fields(
    entry: Mapping[str, object], settings: Mapping[str, object], width: int, share: float = 1.0
) -> Settings:
    """Compute the fields of `TransformerConfig` for rotary positions.

    Args:
        entry: Entry from `rotary_entry`.
        settings: Settings with `rope_theta` and `max_position_embeddings`. If a family has
            `original_max_position_embeddings`, this takes precedence over the entry's own value.
        width: Width of a head.
        share: Share of the width that is rotated, where the entry does not say.

    Raises:
        ValueError: An unknown kind of scaling, or a missing number.

    Source: Chen et al. 2023 (linear), bloc97 2023 (dynamic NTK), Peng et al. 2023 (YaRN), Ding et
    al. 2024 (LongRoPE), Dubey et al. 2024 (Llama 3.1).
    """

    number = functools.partial(_positive_number, entry)
    base = settings["rope_theta"]
    theta = number("rope_theta", 10000.0 if base is None else base)
    rotated = int(width * number("partial_rotary_factor", share))
    fields = {"position": "rotary", "rotary_theta": theta}
    if rotated != width:
        fields["rotary_width"] = rotated
    kind = entry.get("rope_type", entry.get("type", "default"))
    if kind == "default":
        return fields
    positions = settings["max_position_embeddings"]
    original = settings.get("original_max_position_embeddings")
    if original is None and kind in ("llama3", "yarn", "longrope"):
        original = number("original_max_position_embeddings", float(positions))
    if kind == "linear":
        return fields | {"rotary_scaling": (number("factor"),)}
    if kind == "dynamic":
        return fields | {"rotary_scaling": (number("factor"), float(positions))}
    if kind == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor")
        return fields | {"rotary_scaling": (*map(number, names), float(original))}
    powers = theta ** (np.arange(0, rotated, 2) / rotated)
    if kind == "yarn":
        return fields | _yarn_fields(entry, number, powers, theta, original, positions)
    if kind in ("longrope", "su"):
        return fields | _longrope_fields(entry, number, powers, original, positions)
    raise ValueError(f"rope_type={kind!r} is not one of {KINDS}")


def local_theta(settings: Mapping[str, object], theta: float) -> float:
    """Return the base of the rotary positions of layers with a window, which are never scaled.

    Args:
        settings: Settings of the model.
        theta: Default, if the config does not have it.

    Raises:
        ValueError: These positions have a scaling, or their own share of the width.
    """
    name = "sliding_attention"
    entry = {"rope_theta": theta}
    if name in (settings["rope_parameters"] or {}):
        entry |= rotary_entry(settings | {"rope_scaling": None}, name)
    for key, usual in (("rope_type", "default"), ("partial_rotary_factor", 1.0)):
        if (value := entry.get(key, usual)) != usual:
            raise ValueError(
                f"rope_parameters.{name}.{key}={value!r} of a {settings['model_type']} model is "
                f"not supported, only {usual!r}"
            )
    return _positive_number(entry, "rope_theta")


def _yarn_fields(entry, number, powers, theta, original, positions):
    """Compute YaRN's frequencies: fast waves stay, slow ones are divided by the factor.

    In between the change is linear.

    Args:
        entry: Entry from `rotary_entry`.
        number: Reads a number of it.
        powers: Wavelengths of the pairs over 2 π.
        theta, original, positions: Base, positions of the first training, positions of the model.
    """
    width = 2 * len(powers)
    factor = number("factor", positions / original)

    def attention_scale(by=1.0):
        return 1.0 if factor <= 1 else 0.1 * by * math.log(factor) + 1.0

    if entry.get("attention_factor") is not None:
        size = number("attention_factor")
    elif entry.get("mscale") and entry.get("mscale_all_dim"):
        size = attention_scale(number("mscale")) / attention_scale(number("mscale_all_dim"))
    else:
        size = attention_scale()

    def rotation_pair(turns):
        """Return the pair that turns that many times within the original positions."""
        return width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = rotation_pair(number("beta_fast", 32.0)), rotation_pair(number("beta_slow", 1.0))
    if entry.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    span = 0.001 if high == low else high - low
    slow = np.clip((np.arange(len(powers)) - low) / span, 0, 1)
    frequencies = (slow / factor + (1 - slow)) / powers
    return {"rotary_tables": ((ANY_LENGTH, _as_floats(frequencies)),), "rotary_factor": size}


def _longrope_fields(entry, number, powers, original, positions):
    """Divide each wave by its own number, one set for short texts and one for long ones.

    Args:
        entry, number, powers, original, positions: See `_yarn_fields`.
    """
    factor = number("factor", positions / original)
    usual = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    tables = []
    for name, max_tokens in (("short_factor", int(original)), ("long_factor", ANY_LENGTH)):
        divisors = entry.get(name)
        check_entry(name, divisors, Entry(None, (list,)))
        refuse_if(
            len(divisors) != len(powers) or any(type(a) not in (int, float) for a in divisors),
            f"{name} is not a list of {len(powers)} numbers, one for each wave",
        )
        tables.append((max_tokens, _as_floats(1 / (np.asarray(divisors, float) * powers))))
    return {"rotary_tables": tuple(tables), "rotary_factor": number("attention_factor", usual)}


def _positive_number(entry, name, default=None):
    """Return a number of an entry on rotary positions, which must be positive.

    Args:
        entry: Entry from `rotary_entry`.
        name: Name of the number.
        default: Value if the entry is absent.
    """
    value = default if entry.get(name) is None else entry[name]
    check_entry(name, value, Entry(None, (float,)))
    refuse_if(value <= 0, f"{name}={value!r} of the rotary positions is not positive")
    return float(value)


def _as_floats(values):
    return tuple(float(a) for a in values)


def num_positions(entry: Mapping[str, object], settings: Mapping[str, object]) -> int:
    """Return the number of positions for which the model is made; more if the scaling extends it.

    Args:
        entry: Entry from `rotary_entry`.
        settings: Settings of the model.
    """
    positions, kind = settings["max_position_embeddings"], entry.get("rope_type", entry.get("type"))
    if kind not in ("dynamic", "yarn") or not entry.get("factor"):
        return positions
    factor = min(_positive_number(entry, "factor"), ANY_LENGTH)
    if kind == "dynamic":
        return int(factor * positions)
    original = _positive_number(entry, "original_max_position_embeddings", 1e-9)
    return max(positions, int(factor * original))
