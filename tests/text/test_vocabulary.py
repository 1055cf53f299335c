"""Vocabularies trained on texts: the same in every process, and no larger than asked."""

import subprocess
import sys

import pytest

from rank_collapse.text import encoders, vocabulary
from rank_collapse.text.words import default_text

pytest.importorskip("tokenizers")
IDS = """
from rank_collapse.text import encoders, pairs, words
encoder = encoders.trained_tokenizer([words.default_text()], 30000)
given = pairs.read_pairs("shipped", "", 20)
tokenizer, _ = pairs.load_tokenizer("absent", given)
print(encoder(words.default_text()), pairs.encode_pairs(tokenizer, given, 128).ids.tolist())
"""


def test_every_process_makes_the_same_vocabulary():
    runs = [
        subprocess.run([sys.executable, "-c", IDS], capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    assert len(runs[0].stdout) > 5000 and runs[0].stdout == runs[1].stdout


def test_the_texts_words_are_whole_tokens():
    text = default_text()
    tokenizer = vocabulary.train_wordpiece([text], 30000, lowercase=True)
    found = tokenizer.encode(text).tokens
    assert found == [t for t in found if not t.startswith("##") and t != "[UNK]"]
    assert tokenizer.encode("The qqq").tokens[0] == "the"
    assert [tokenizer.token_to_id(t) for t in vocabulary.SPECIAL] == [0, 1, 2, 3, 4]


def test_the_size_is_kept_or_refused():
    small = vocabulary.train_wordpiece(["abc abd abc"], 20, lowercase=False)
    assert small.get_vocab_size() <= 20 and len(small.encode("abc").ids) == 1
    with pytest.raises(ValueError, match="vocab_size=12 is less than the 13 special tokens"):
        vocabulary.train_wordpiece(["abc abd"], 12, lowercase=False)


def test_case_is_kept_where_asked():
    encoder = encoders.trained_tokenizer(["The the"], 100)
    first, upper, lower, last = encoder("The the")
    assert (first, last) == (2, 3) and upper != lower
