"""Pairs of sentences: read, tokenized by a folder's files or a vocabulary of their own, padded."""

import hashlib
import json

import numpy as np
import pytest

from rank_collapse.text import pairs

pytest.importorskip("tokenizers")
VOCABULARY = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "c", "##c", "A")


def test_reading(tmp_path):
    path = tmp_path / "train.tsv"
    path.write_text("index\tsentence1\tsentence2\n0\tA b\tC\n1\tonly one\n2\tD\tE\n")
    assert pairs.read_pairs("RTE", str(tmp_path), 9) == [("A b", "C"), ("D", "E")]
    assert pairs.read_pairs("RTE", str(tmp_path), 1) == [("A b", "C")]
    path.write_text("index\tsentence1\n0\tA\n")
    with pytest.raises(ValueError, match=r"train\.tsv has no column sentence2"):
        pairs.read_pairs("RTE", str(tmp_path), 9)
    path.write_text("sentence1\tsentence2\n")
    with pytest.raises(ValueError, match=r"train\.tsv has no rows"):
        pairs.read_pairs("RTE", str(tmp_path), 9)
    with pytest.raises(FileNotFoundError, match=r"none/train\.tsv does not exist: GLUE's RTE"):
        pairs.read_pairs("RTE", str(tmp_path / "none"), 9)


def test_a_folders_vocabulary(tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join(VOCABULARY))
    given = [("A ac", "b"), ("b", "c")]
    tokenizer, origin = pairs.load_tokenizer(str(tmp_path), given)
    assert origin == "tokenizer from vocab.txt"
    ids, mask = pairs.encode_pairs(tokenizer, given, 128)
    np.testing.assert_array_equal(ids, [[2, 5, 5, 8, 3, 6, 3], [2, 6, 3, 7, 3, 0, 0]])
    np.testing.assert_array_equal(mask, ids > 0)
    cut, _ = pairs.encode_pairs(tokenizer, given, 5)  # the longer sentence loses its end
    np.testing.assert_array_equal(cut[0], [2, 5, 3, 6, 3])
    tokenizer, _ = pairs.load_tokenizer(str(tmp_path / "vocab.txt"), given)
    np.testing.assert_array_equal(pairs.encode_pairs(tokenizer, given, 128).ids, ids)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": False}))
    tokenizer, _ = pairs.load_tokenizer(str(tmp_path), given)
    assert pairs.encode_pairs(tokenizer, given, 128).ids[0, 1] == VOCABULARY.index("A")
    (tmp_path / "vocab.txt").unlink()
    with pytest.raises(ValueError, match=r"holds neither tokenizer\.json nor vocab\.txt"):
        pairs.load_tokenizer(str(tmp_path), given)


def test_rte_has_the_ids_it_always_had(shared_data):
    """Ids of the first commit whose vocabulary was deterministic; update with its algorithm."""
    given = pairs.read_pairs("RTE", str(shared_data / "RTE"), 500)
    tokenizer, _ = pairs.load_tokenizer("bert-base-uncased", given)
    ids, mask = pairs.encode_pairs(tokenizer, given, 128)
    assert tokenizer.get_vocab_size() == 10476 and ids.shape == (500, 128)
    digest = hashlib.sha256(ids.tobytes() + mask.tobytes()).hexdigest()
    assert digest.startswith("c8bf5b3779ed9507")
