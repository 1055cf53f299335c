"""A tokenizer whose replacements grow is refused before the memory is gone; others are not."""

import json

import pytest

from rank_collapse.text import encoders
from rank_collapse.text.growth import MOST_LETTERS, _bound_length, check_growth
from tests.support.refusals import is_refused

tokenizers = pytest.importorskip("tokenizers")
n, Regex = tokenizers.normalizers, tokenizers.Regex


def make_tokenizer(normalizer=None, pre_tokenizer=None):
    model = tokenizers.models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    return tokenizer


GROWING = {
    "each letter a hundred": n.Sequence([n.Replace("a", 100 * "a")] * 4),
    "in sequences": n.Sequence(
        [
            n.Sequence([n.Replace("a", 3000 * "a")]),
            n.Sequence([n.Strip(), n.Replace("a", 9999 * "a")]),
        ]
    ),
    "a regular expression": n.Sequence([n.Replace(Regex("."), 300 * "b")] * 4),
    "at every place": n.Sequence([n.Replace(Regex("x*"), 300 * "b")] * 4),
    "a letter that unfolds": n.Sequence(
        [n.Replace("a", 400 * "\ufdfa"), n.NFKC(), n.Replace("\u0644", 4000 * "a")]
    ),
    "put before": n.Sequence([n.Prepend(5000 * "a"), n.Replace("a", 5000 * "a")]),
}


@pytest.mark.parametrize("name", GROWING)
def test_what_grows_is_refused(name, tmp_path):
    make_tokenizer(GROWING[name]).save(str(tmp_path / "tokenizer.json"))
    encode = encoders.load_tokenizer(tmp_path, {"model_type": "bert"})
    message = (
        rf"tokenizer\.json encodes no text: its normalizers may make \d+ letters .* {MOST_LETTERS}"
    )
    is_refused(message, encode, "aaaa")
    is_refused(message, encode, 1000 * "a")


USUAL = {
    "none": None,
    "BERT": n.BertNormalizer(),
    "Llama": n.Sequence([n.Prepend("▁"), n.Replace(" ", "▁")]),
    "ALBERT": n.Sequence(
        [
            n.Replace("``", '"'),
            n.NFKD(),
            n.StripAccents(),
            n.Lowercase(),
            n.Replace(Regex(" {2,}"), " "),
        ]
    ),
    "Unicode's forms": n.Sequence([n.NFC(), n.NFD(), n.NFKC(), n.ByteLevel(), n.Lowercase()]),
    "much, of what this text has not": n.Replace("@", MOST_LETTERS * "b"),
}


@pytest.mark.parametrize("name", USUAL)
def test_usual_ones_take_long_texts(name):
    check_growth(make_tokenizer(USUAL[name]), 60_000 * "``a bé  c")


@pytest.mark.parametrize("name", [*GROWING, *USUAL])
def test_the_bound_is_a_bound(name):
    """Of each step by itself, on a text that has all that the steps look for."""
    normalizer = {**GROWING, **USUAL}[name]
    if normalizer is None or name.startswith("much"):
        return
    for step in list_steps(json.loads(normalizer.__getstate__())):
        single = n.NFC()
        single.__setstate__(json.dumps(step).encode())
        # Of one letter each, NFC makes 3, NFD 4, NFKC 18, bytes 4, small letters 2.
        letters = ("\U0001d160", "\u1f82", "\ufdfa", "\U00010000", "\u0130")
        for text in ("", "a", 'aa``  é@ \ufdfa\u0644"x', *letters):
            length = len(single.normalize_str(text))
            assert length <= _bound_length(step, len(text), text)
            assert _bound_length(step, len(text), text) <= _bound_length(step, len(text), None)


def list_steps(normalizer):
    if normalizer["type"] != "Sequence":
        return [normalizer]
    return [step for inner in normalizer["normalizers"] for step in list_steps(inner)]


@pytest.mark.parametrize("place", ["pre_tokenizer", "normalizer"])
def test_a_panic_of_rust_is_one_line(place, tmp_path, capfd):
    pattern = Regex("(a|aa)+$")
    parts = {
        "normalizer": n.Replace(pattern, "x"),
        "pre_tokenizer": tokenizers.pre_tokenizers.Split(pattern, "isolated"),
    }
    make_tokenizer(**{place: parts[place]}).save(str(tmp_path / "tokenizer.json"))
    encode = encoders.load_tokenizer(tmp_path, {"model_type": "bert"})
    is_refused("encodes no text: .*retry-limit-in-match", encode, 4000 * "a" + "b")
