"""Vocabularies that are trained here, and what the tokenizers package refuses."""

import pytest

from rank_collapse.text import encoders, vocabulary
from rank_collapse.text.words import default_text
from tests.support.refusals import is_refused

pytest.importorskip("tokenizers")


def test_what_the_package_refuses_is_one_line():
    def fail(*arguments, **options):
        raise Exception(f"{arguments}\n{options}" + 300 * "x")

    message = r"^it fails: \(1,\) \{'a': 2\}x{286}…$"
    is_refused(message, vocabulary.call_tokenizers, "it fails", fail, 1, a=2)
    assert vocabulary.call_tokenizers("", max, 1, 3) == 3
    for interruption in (KeyboardInterrupt, SystemExit):

        def interrupt(interruption=interruption):
            raise interruption

        with pytest.raises(interruption):
            vocabulary.call_tokenizers("it fails", interrupt)


def test_a_trained_vocabulary_keeps_case_and_accents_unless_it_is_lowercase():
    text = "Élan elan"
    frame, cased = [2, 3], encoders.trained_tokenizer([text], 40)(text)
    assert [cased[0], cased[-1]] == frame and len(set(cased[1:-1])) == 2
    for lowercase, pieces in ((False, ["Élan", "elan"]), (True, ["elan", "elan"])):
        tokenizer = vocabulary.train_wordpiece([text], 40, lowercase=lowercase)
        assert tokenizer.encode(text).tokens == pieces
        assert " " not in tokenizer.get_vocab() and "##l" in tokenizer.get_vocab()
        assert tokenizer.encode("z").tokens == ["[UNK]"]
        assert [tokenizer.id_to_token(i) for i in (0, 1, 4)] == ["[PAD]", "[UNK]", "[MASK]"]


def test_the_texts_words_are_whole_tokens():
    text = default_text()
    tokenizer = vocabulary.train_wordpiece([text], 30000, lowercase=True)
    pieces = tokenizer.encode(text).tokens
    assert pieces == [t for t in pieces if not t.startswith("##") and t != "[UNK]"]
    assert tokenizer.encode("The qqq").tokens[0] == "the"
    assert [tokenizer.token_to_id(t) for t in vocabulary.SPECIAL] == [0, 1, 2, 3, 4]


def test_the_size_is_kept_or_refused():
    small = vocabulary.train_wordpiece(["abc abd abc"], 20, lowercase=False)
    assert small.get_vocab_size() <= 20 and len(small.encode("abc").ids) == 1
    is_refused(
        "vocab_size=12 is less than the 13 special tokens",
        vocabulary.train_wordpiece,
        ["abc abd"],
        12,
        lowercase=False,
    )
    assert vocabulary.train_wordpiece(["abc abd"], 13, lowercase=False).get_vocab_size() == 13
