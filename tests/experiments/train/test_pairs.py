"""Pairs of sentences for training: files, vocabularies, and the ids of RTE."""

import hashlib
import json
from types import SimpleNamespace

import numpy as np
import pytest

from experiments.train import pairs
from rank_collapse.text import encoders
from tests.support.refusals import is_refused

pytest.importorskip("tokenizers")


def test_a_vocabulary_without_unknown_words_is_one_line(tmp_path):
    (tmp_path / "vocab.txt").write_text("[PAD]\n[CLS]\n[SEP]\nthe\n")
    is_refused(
        r"vocab\.txt encodes no text: .*Missing \[UNK\]",
        encoders.load_tokenizer(tmp_path, {"model_type": "bert"}),
        "zebra",
    )
    tokenizer, _ = pairs.load_tokenizer(str(tmp_path), [("a", "b")])
    is_refused("the tokenizer encodes no text", pairs.encode_pairs, tokenizer, [("zebra", "b")], 9)


VOCABULARY = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "c", "##c", "A")


def test_reading(tmp_path):
    path = tmp_path / "train.tsv"
    path.write_text("index\tsentence1\tsentence2\n0\tA b\tC\n1\tonly one\n2\tD\tE\n3\t\tF\n")
    assert pairs.read_pairs("RTE", str(tmp_path), 9) == [("A b", "C"), ("D", "E")]
    assert pairs.read_pairs("RTE", str(tmp_path), 1) == [("A b", "C")]
    path.write_text("index\tsentence1\n0\tA\n")
    is_refused(r"train\.tsv has no column sentence2", pairs.read_pairs, "RTE", str(tmp_path), 9)
    path.write_text("sentence1\tsentence2\n")
    is_refused(r"train\.tsv has no rows", pairs.read_pairs, "RTE", str(tmp_path), 9)
    is_refused(
        r"none/train\.tsv does not exist: take it from GLUE's RTE",
        pairs.read_pairs,
        "RTE",
        str(tmp_path / "none"),
        9,
        error=FileNotFoundError,
    )


def test_a_folders_vocabulary(tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join(VOCABULARY))
    sentences = [("A ac", "b"), ("b", "c")]
    tokenizer, origin = pairs.load_tokenizer(str(tmp_path), sentences)
    assert origin == "tokenizer from vocab.txt"
    ids, mask = pairs.encode_pairs(tokenizer, sentences, 128)
    np.testing.assert_array_equal(ids, [[2, 5, 5, 8, 3, 6, 3], [2, 6, 3, 7, 3, 0, 0]])
    np.testing.assert_array_equal(mask, ids > 0)
    cut, _ = pairs.encode_pairs(tokenizer, sentences, 5)  # the longer sentence loses its end
    np.testing.assert_array_equal(cut[0], [2, 5, 3, 6, 3])
    tokenizer, _ = pairs.load_tokenizer(str(tmp_path / "vocab.txt"), sentences)
    np.testing.assert_array_equal(pairs.encode_pairs(tokenizer, sentences, 128).ids, ids)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": False}))
    tokenizer, _ = pairs.load_tokenizer(str(tmp_path), sentences)
    assert pairs.encode_pairs(tokenizer, sentences, 128).ids[0, 1] == VOCABULARY.index("A")
    (tmp_path / "vocab.txt").unlink()
    is_refused(
        r"holds neither tokenizer\.json nor vocab\.txt",
        pairs.load_tokenizer,
        str(tmp_path),
        sentences,
    )


def test_rte_has_the_ids_it_always_had(shared_data):
    """The digest is of the first deterministic vocabulary; update it with the algorithm."""
    sentences = pairs.read_pairs("RTE", str(shared_data / "RTE"), 500)
    tokenizer, _ = pairs.load_tokenizer("bert-base-uncased", sentences)
    ids, mask = pairs.encode_pairs(tokenizer, sentences, 128)
    assert tokenizer.get_vocab_size() == 10476 and ids.shape == (500, 128)
    digest = hashlib.sha256(ids.tobytes() + mask.tobytes()).hexdigest()
    assert digest.startswith("c8bf5b3779ed9507")


def test_sentences_of_the_shipped_text_are_paired_with_the_next_one(monkeypatch):
    monkeypatch.setattr(pairs, "default_text", lambda: "One. Two\ntwo. .\nThree.  Four. ")
    expected = [("One", "Two two"), ("Two two", "Three"), ("Three", "Four")]
    assert pairs.read_pairs("shipped", "", 9) == expected
    assert pairs.read_pairs("shipped", "", 2) == expected[:2]


def test_a_tokenizer_s_own_file_counts_before_a_list_of_words(tmp_path):
    """Its rule is not ours: the words in capitals stay."""
    sentences = [("A a", "b")]
    (tmp_path / "vocab.txt").write_text("\n".join(VOCABULARY))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": False}))
    cased, _ = pairs.load_tokenizer(str(tmp_path), sentences)
    cased.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").unlink()
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        tokenizer, origin = pairs.load_tokenizer(str(path), sentences)
        assert origin == "tokenizer from tokenizer.json"
        ids = pairs.encode_pairs(tokenizer, sentences, 9).ids
        np.testing.assert_array_equal(ids, pairs.encode_pairs(cased, sentences, 9).ids)
        assert VOCABULARY.index("A") in ids
    lower, _ = pairs.load_tokenizer(str(tmp_path / "vocab.txt"), sentences)
    assert VOCABULARY.index("A") not in pairs.encode_pairs(lower, sentences, 9).ids


def test_a_vocabulary_of_the_data_is_as_large_as_that_of_bert_at_most(monkeypatch):
    trained = []

    def train(texts, size, *, lowercase):
        trained.append((texts, size, lowercase))
        return SimpleNamespace(get_vocab_size=lambda: 77)

    monkeypatch.setattr(pairs, "train_wordpiece", train)
    _, origin = pairs.load_tokenizer("no/such", [("a b", "c"), ("d", "e")])
    assert trained == [(["a b", "c", "d", "e"], 30522, True)]
    trained_here = "no/such is not a local path: trained a WordPiece vocabulary of 77 on the data"
    assert origin == trained_here
