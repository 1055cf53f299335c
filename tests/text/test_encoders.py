"""Functions text -> token ids: files of checkpoint folders, vocabularies made here."""

import json

import pytest

from rank_collapse.text import encoders, pairs, tokens

pytest.importorskip("tokenizers")
TEXTS = ["The cat sat on the mat.", "A dog ran after the cat, and the cat ran too.", "Birds sing."]


def vocabulary(folder):
    """A WordPiece vocabulary of the texts, in a folder; its tokenizer."""
    from tokenizers import BertWordPieceTokenizer, models

    tokenizer = BertWordPieceTokenizer(lowercase=True)
    tokenizer.train_from_iterator(TEXTS, vocab_size=80, min_frequency=1, show_progress=False)
    tokenizer.save_model(str(folder))
    return BertWordPieceTokenizer(models.WordPiece.read_file(str(folder / "vocab.txt")))


def test_tokenizer_files_agree(tmp_path):
    tokenizer = vocabulary(tmp_path)
    settings = {"model_type": "bert"}
    wordpiece = encoders.tokenizer_of(tmp_path, settings)
    expected = tokenizer.encode(TEXTS[0]).ids
    assert wordpiece(TEXTS[0]) == expected
    vocab = (tmp_path / "vocab.txt").read_text().split("\n")
    assert [vocab[i] for i in expected][:3] == ["[CLS]", "the", "cat"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": False}))
    assert encoders.tokenizer_of(tmp_path, settings)("The")[1:-1] != wordpiece("The")[1:-1]
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert encoders.tokenizer_of(tmp_path, settings)(TEXTS[0]) == expected
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer"):
        encoders.tokenizer_of(tmp_path, settings)
    assert encoders.tokenizer_of(tmp_path / "empty", settings) is None


def test_byte_level(tmp_path):
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer()
    special = ["<s>", "<pad>", "</s>"]
    tokenizer.train_from_iterator(
        TEXTS, vocab_size=300, special_tokens=special, show_progress=False
    )
    tokenizer.save_model(str(tmp_path))
    plain = encoders.tokenizer_of(tmp_path, {"model_type": "gpt2"})(TEXTS[0])
    assert tokenizer.decode(plain) == TEXTS[0]
    assert encoders.tokenizer_of(tmp_path, {"model_type": "roberta"})(TEXTS[0]) == [0, *plain, 2]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_sentencepiece(tmp_path):
    sentencepiece = pytest.importorskip("sentencepiece")
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS * 3))
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "texts.txt"),
        model_prefix=str(tmp_path / "spiece"),
        vocab_size=33,
        user_defined_symbols=["[CLS]", "[SEP]", "<sep>", "<cls>"],
        minloglevel=2,
        hard_vocab_limit=False,
    )
    model = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "spiece.model"))
    plain, id_of = model.encode(TEXTS[2]), model.piece_to_id

    def ids(kind):
        return encoders.tokenizer_of(tmp_path, {"model_type": kind})(TEXTS[2])

    assert ids("xlnet") == [*plain, id_of("<sep>"), id_of("<cls>")]
    assert ids("t5") == [*plain, id_of("</s>")]
    assert ids("llama") == [id_of("<s>"), *plain]
    assert ids("albert") == [id_of("[CLS]"), *model.encode(TEXTS[2].lower()), id_of("[SEP]")]
    (tmp_path / "spiece.model").write_bytes(b"no model")
    with pytest.raises(ValueError, match="not a sentencepiece model"):
        ids("t5")


def test_trained_tokenizer():
    encoder = encoders.trained_tokenizer(TEXTS, 100)
    first, second = encoder("the cat"), encoder("the dog")
    assert first[0] == second[0] and first[-1] == second[-1]
    assert first[1] == second[1] and first[2] != second[2]
    assert max(first + second) < 100


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "model",
            {
                "type": "WordPiece",
                "unk_token": "[UNK]",
                "continuing_subword_prefix": "##",
                "max_input_chars_per_word": 100,
                "vocab": {"the": 0},
            },
            r"Missing \[UNK\]",
        ),
        ("model", {"type": "Unigram", "unk_id": None, "vocab": [["t", 0.0]]}, "unk_id"),
        # Panics of the Rust code, which are no Exceptions and print their stack.
        ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "AAAA"}, "Precompiled"),
        (
            "post_processor",
            {
                "type": "TemplateProcessing",
                "pair": [],
                "special_tokens": {},
                "single": [{"SpecialToken": {"id": "x", "type_id": 0}}],
            },
            "no entry",
        ),
    ],
)
def test_a_damaged_tokenizer_is_one_line(name, change, message, tmp_path, capfd):
    vocabulary(tmp_path).save(str(tmp_path / "tokenizer.json"))
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(content | {name: change}))
    with pytest.raises(ValueError, match=rf"tokenizer\.json .*{message}") as caught:
        encoders.tokenizer_of(tmp_path, {"model_type": "bert"})("zebra")
    assert "\n" not in str(caught.value) and capfd.readouterr().err == ""


def test_a_vocabulary_without_unknown_words_is_one_line(tmp_path):
    (tmp_path / "vocab.txt").write_text("[PAD]\n[CLS]\n[SEP]\nthe\n")
    with pytest.raises(ValueError, match=r"vocab\.txt encodes no text: .*Missing \[UNK\]"):
        encoders.tokenizer_of(tmp_path, {"model_type": "bert"})("zebra")
    tokenizer, _ = pairs.load_tokenizer(str(tmp_path), [("a", "b")])
    with pytest.raises(ValueError, match="the tokenizer encodes no text"):
        pairs.encode_pairs(tokenizer, [("zebra", "b")], 9)


def test_a_token_beyond_every_integer_is_one_line():
    with pytest.raises(ValueError, match="token id 4294967295 of text 0"):
        tokens.pad([[2**32 - 1]])
