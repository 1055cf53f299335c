import json

import numpy as np
import pytest

pytest.importorskip("tokenizers")
TEXTS = ["The cat sat on the mat.", "A dog ran after the cat, and the cat ran too.", "Birds sing."]


def test_read_texts(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("One text\nover two lines.\n\nAnother.\n\n\n")
    assert tokens.read_texts(path) == ["One text over two lines.", "Another."]
    path.write_text("One.\nTwo.\n")
    assert tokens.read_texts(path, limit=1) == ["One."]
    path.write_text("  \n\n ")
    with pytest.raises(ValueError, match=r"a\.txt holds no text"):
        tokens.read_texts(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="not UTF-8"):
        tokens.read_texts(path)
    with pytest.raises(FileNotFoundError, match=r"none\.txt"):
        tokens.read_texts(tmp_path / "none.txt")


def test_read_table(tmp_path):
    path = tmp_path / "dev.tsv"
    path.write_text('index\tsentence1\tsentence2\tlabel\n0\tA "b\tC.\tentailment\n1\tD\tE\tnot\n')
    assert tokens.read_texts(path) == ['A "b C.', "D E"]
    assert tokens.read_texts(path, ["sentence2"]) == ["C.", "E"]
    with pytest.raises(ValueError, match="no column 'title'"):
        tokens.read_texts(path, ["title"])


def test_rte(shared_data):
    texts = tokens.read_texts(shared_data / "RTE" / "dev.tsv")
    assert len(texts) == 277 and texts[0].endswith("Christopher Reeve had an accident.")


def test_pad_and_ids(tmp_path):
    tokens = tokens.pad([[3, 4, 5], [6]], vocab_size=7)
    np.testing.assert_array_equal(tokens.ids, [[3, 4, 5], [6, 0, 0]])
    np.testing.assert_array_equal(tokens.lengths, [3, 1])
    for bad, message in (([[7]], "id 7 of text 0"), ([[1], [-2, 3]], "id -2 of text 1")):
        with pytest.raises(ValueError, match=message):
            tokens.pad(bad, vocab_size=7)
    with pytest.raises(ValueError, match="text 1 has no tokens"):
        tokens.pad([[1], []])
    with pytest.raises(ValueError, match="no texts"):
        tokens.pad([])
    path = tmp_path / "ids.txt"
    path.write_text("1 2 3\n4,5\n")
    assert tokens.read_ids(path) == [[1, 2, 3], [4, 5]]
    path.write_text("1 two\n")
    with pytest.raises(ValueError, match=r"ids\.txt does not hold token ids"):
        tokens.read_ids(path)


def test_encode_cuts_and_refuses():
    encoder = lambda t: [1, *map(len, t.split()), 2]  # noqa: E731
    tokens = tokens.encode(TEXTS, encoder, max_tokens=5)
    np.testing.assert_array_equal(tokens.ids[1], [1, 1, 3, 3, 2])
    np.testing.assert_array_equal(tokens.mask[2], [True] * 4 + [False])
    with pytest.raises(ValueError, match="text 1 is empty"):
        tokens.encode(["a", " "], encoder, max_tokens=5)
    with pytest.raises(ValueError, match="max_tokens=9 is more than the 8 positions"):
        tokens.encode(TEXTS, encoder, max_tokens=9, num_positions=8)


def test_windows_and_join():
    assert tokens.windows("a b c d e", 3, 3) == ["a b c", "b c d", "c d e"]
    assert tokens.windows("a b", 4, 5) == ["a b"]
    encoder = lambda t: [1, *map(len, t.split()), 2]  # noqa: E731
    assert tokens.join(["a b", "c d e", "f", "g h i j"], encoder, 6, 9) == [
        "a b c d e",
        "f g h i j",
    ]
    with pytest.raises(ValueError, match="fewer than 99 tokens"):
        tokens.join(TEXTS, encoder, 99, 9)


def vocabulary(folder):
    """A WordPiece vocabulary of the texts, in a folder; its tokenizer."""
    from tokenizers import BertWordPieceTokenizer

    tokenizer = BertWordPieceTokenizer(lowercase=True)
    tokenizer.train_from_iterator(TEXTS, vocab_size=80, min_frequency=1, show_progress=False)
    tokenizer.save_model(str(folder))
    return BertWordPieceTokenizer(str(folder / "vocab.txt"))


def test_tokenizer_files_agree(tmp_path):
    tokenizer = vocabulary(tmp_path)
    settings = {"model_type": "bert"}
    wordpiece = tokens.tokenizer_of(tmp_path, settings)
    expected = tokenizer.encode(TEXTS[0]).ids
    assert wordpiece(TEXTS[0]) == expected
    vocab = (tmp_path / "vocab.txt").read_text().split("\n")
    assert [vocab[i] for i in expected][:3] == ["[CLS]", "the", "cat"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": False}))
    assert tokens.tokenizer_of(tmp_path, settings)("The")[1:-1] != wordpiece("The")[1:-1]
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert tokens.tokenizer_of(tmp_path, settings)(TEXTS[0]) == expected
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer"):
        tokens.tokenizer_of(tmp_path, settings)
    assert tokens.tokenizer_of(tmp_path / "empty", settings) is None


def test_byte_level(tmp_path):
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer()
    special = ["<s>", "<pad>", "</s>"]
    tokenizer.train_from_iterator(
        TEXTS, vocab_size=300, special_tokens=special, show_progress=False
    )
    tokenizer.save_model(str(tmp_path))
    plain = tokens.tokenizer_of(tmp_path, {"model_type": "gpt2"})(TEXTS[0])
    assert tokenizer.decode(plain) == TEXTS[0]
    assert tokens.tokenizer_of(tmp_path, {"model_type": "roberta"})(TEXTS[0]) == [0, *plain, 2]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_sentencepiece(tmp_path):
    sentencepiece = pytest.importorskip("sentencepiece")
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS * 3))
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "texts.txt"), model_prefix=str(tmp_path / "spiece"), vocab_size=33,
        user_defined_symbols=["[CLS]", "[SEP]", "<sep>", "<cls>"], minloglevel=2,
        hard_vocab_limit=False,
    )  # fmt: skip
    model = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "spiece.model"))
    plain, id_of = model.encode(TEXTS[2]), model.piece_to_id

    def ids(kind):
        return tokens.tokenizer_of(tmp_path, {"model_type": kind})(TEXTS[2])

    assert ids("xlnet") == [*plain, id_of("<sep>"), id_of("<cls>")]
    assert ids("t5") == [*plain, id_of("</s>")]
    assert ids("llama") == [id_of("<s>"), *plain]
    assert ids("albert") == [id_of("[CLS]"), *model.encode(TEXTS[2].lower()), id_of("[SEP]")]
    (tmp_path / "spiece.model").write_bytes(b"no model")
    with pytest.raises(ValueError, match="not a sentencepiece model"):
        ids("t5")


def test_trained_tokenizer():
    encoder = tokens.trained_tokenizer(TEXTS, 100)
    first, second = encoder("the cat"), encoder("the dog")
    assert first[0] == second[0] and first[-1] == second[-1]
    assert first[1] == second[1] and first[2] != second[2]
    assert max(first + second) < 100
