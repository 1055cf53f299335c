"""Encoders of texts as token ids, from folders or trained here, and pairs of sentences."""

import functools
import hashlib
import json
import os

import numpy as np
import pytest

from rank_collapse.text import encoders, tokens
from rank_collapse.text.words import default_text
from tests.support.refusals import is_refused

pytest.importorskip("tokenizers")
TEXTS = ["The cat sat on the mat.", "A dog ran after the cat, and the cat ran too.", "Birds sing."]


def train_tokenizer(folder):
    """Trains a WordPiece vocabulary of the texts, and saves it; returns its tokenizer."""
    from tokenizers import BertWordPieceTokenizer, models

    tokenizer = BertWordPieceTokenizer(lowercase=True)
    tokenizer.train_from_iterator(TEXTS, vocab_size=80, min_frequency=1, show_progress=False)
    tokenizer.save_model(str(folder))
    return BertWordPieceTokenizer(models.WordPiece.read_file(str(folder / "vocab.txt")))


def test_tokenizer_files_agree(tmp_path):
    tokenizer = train_tokenizer(tmp_path)
    settings = {"model_type": "bert"}
    wordpiece = encoders.load_tokenizer(tmp_path, settings)
    expected = tokenizer.encode(TEXTS[0]).ids
    assert wordpiece(TEXTS[0]) == expected
    vocab = (tmp_path / "vocab.txt").read_text().split("\n")
    assert [vocab[i] for i in expected][:3] == ["[CLS]", "the", "cat"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": False}))
    assert encoders.load_tokenizer(tmp_path, settings)("The")[1:-1] != wordpiece("The")[1:-1]
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert encoders.load_tokenizer(tmp_path, settings)(TEXTS[0]) == expected
    (tmp_path / "tokenizer.json").write_text("{}")
    is_refused(r"tokenizer\.json is not a tokenizer", encoders.load_tokenizer, tmp_path, settings)
    os.truncate(tmp_path / "tokenizer.json", 100_000_001)
    message = r"tokenizer\.json .*has 100000001 bytes, more than 100000000"
    is_refused(message, encoders.load_tokenizer, tmp_path, settings)
    assert encoders.load_tokenizer(tmp_path / "empty", settings) is None


def test_byte_level(tmp_path):
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer()
    special = ["<s>", "<pad>", "</s>"]
    tokenizer.train_from_iterator(
        TEXTS, vocab_size=300, special_tokens=special, show_progress=False
    )
    tokenizer.save_model(str(tmp_path))
    plain = encoders.load_tokenizer(tmp_path, {"model_type": "gpt2"})(TEXTS[0])
    assert tokenizer.decode(plain) == TEXTS[0]
    encode = encoders.load_tokenizer(tmp_path, {"model_type": "roberta"})
    assert encode(TEXTS[0]) == [0, *plain, 2]
    assert encode(f"{TEXTS[0]}</s>") == [0, *plain, 2, 2]  # a special token in the text is one
    for kind in ("qwen2", "gpt_neox"):  # split digits, or compose accents
        is_refused(
            f"does not say how a {kind} model splits texts",
            encoders.load_tokenizer,
            tmp_path,
            {"model_type": kind},
        )


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
        return encoders.load_tokenizer(tmp_path, {"model_type": kind})(TEXTS[2])

    assert ids("xlnet") == [*plain, id_of("<sep>"), id_of("<cls>")]
    assert ids("t5") == [*plain, id_of("</s>")]
    assert ids("llama") == [id_of("<s>"), *plain]
    assert ids("albert") == [id_of("[CLS]"), *model.encode(TEXTS[2].lower()), id_of("[SEP]")]
    for first, second in (("mt5", "t5"), ("mistral", "llama"), ("mixtral", "llama")):
        assert ids(first) == ids(second)
    assert ids("gemma") == plain  # this vocabulary has no <bos>
    is_refused("which special tokens a bart model reads; give tokenizer.json", ids, "bart")
    for kind in ("camembert", "xlm-roberta"):
        is_refused(f"a {kind} model shifts its sentencepiece ids", ids, kind)
    assert encoders.load_tokenizer(tmp_path, {"model_type": "t5"}).unknown == model.unk_id()
    for folder in (tmp_path / "plain", tmp_path):
        folder.mkdir(exist_ok=True)
        (folder / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    assert ids("albert") == [id_of("[CLS]"), *plain, id_of("[SEP]")]
    options = {"add_bos_token": False, "add_eos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(options))
    assert ids("phi3") == [*plain, id_of("</s>")]
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "texts.txt"),
        model_prefix=str(tmp_path / "plain" / "spiece"),
        vocab_size=33,
        minloglevel=2,
        hard_vocab_limit=False,
    )
    unframed = encoders.load_tokenizer(tmp_path / "plain", {"model_type": "albert"})
    assert unframed(TEXTS[2])[0] > 2 and unframed(TEXTS[2])[-1] > 2  # it has no [CLS] and no [SEP]
    (tmp_path / "spiece.model").write_bytes(b"no model")
    is_refused("not a sentencepiece model", ids, "t5")


def test_the_files_of_a_folder_have_an_order(tmp_path):
    """A vocab.json alone is not enough; then vocab.txt counts, before sentencepiece's models."""
    tokenizer, settings = train_tokenizer(tmp_path), {"model_type": "gpt2"}
    (tmp_path / "vocab.json").write_text("no JSON")
    (tmp_path / "spiece.model").write_text("no model")
    load = functools.partial(encoders.load_tokenizer, tmp_path, settings)
    assert load()("cat") == tokenizer.encode("cat").ids
    (tmp_path / "merges.txt").write_text("")
    is_refused(r"vocab\.json is not a tokenizer", load)
    (tmp_path / "vocab.json").unlink()
    (tmp_path / "vocab.txt").unlink()
    for name in encoders.SENTENCEPIECE_FILES:
        (tmp_path / "spiece.model").rename(tmp_path / name)
        is_refused(f"{name} is not a sentencepiece model", load)
        (tmp_path / name).rename(tmp_path / "spiece.model")


def test_a_byte_level_text_is_framed_where_the_vocabulary_has_a_frame(tmp_path):
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    for special, kind, ids, unknown in (
        ((), "roberta", [0, 2], None),
        (("<s>",), "roberta", [0, 2], None),
        (("<s>", "</s>"), "roberta", [3, 0, 2, 4], None),
        (("<s>", "</s>", "<unk>"), "gpt2", [0, 2], 5),
        (("<s>", "</s>", "<unk>"), "bart", [3, 0, 2, 4], 5),
    ):
        vocabulary = {token: i for i, token in enumerate(("a", "b", "ab", *special))}
        (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
        encode = encoders.load_tokenizer(tmp_path, {"model_type": kind})
        assert (encode("aab"), encode.unknown) == (ids, unknown)


def test_what_is_beside_a_vocabulary_counts(tmp_path):
    """Case, accents, and Chinese characters, which are words of their own by default."""
    words = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "e", "é", "E", "É", "中", "中中")
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    for settings, expected in (
        (None, "e e 中 中"),
        ({}, "e e 中 中"),
        ({"do_lower_case": False}, "E É 中 中"),
        ({"strip_accents": False}, "e é 中 中"),
        ({"do_lower_case": False, "strip_accents": True}, "E E 中 中"),
        ({"tokenize_chinese_chars": False}, "e e 中中"),
    ):
        if settings is not None:
            (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        encode = encoders.load_tokenizer(tmp_path, {"model_type": "bert"})
        assert [words[i] for i in encode("E É 中中")] == ["[CLS]", *expected.split(), "[SEP]"]
        assert encode.unknown == 1


def test_the_unknown_token_is_that_of_the_model(tmp_path):
    from tokenizers import Tokenizer, models

    vocabulary = {"a": 2, "[UNK]": 1, "<oov>": 0}
    Tokenizer(models.WordLevel(vocabulary, "<oov>")).save(str(tmp_path / "tokenizer.json"))
    encode = encoders.load_tokenizer(tmp_path, {})
    assert encode("a") == [2] and encode("b") == [0] and encode.unknown == 0


def test_a_saved_tokenizer_neither_cuts_nor_pads(tmp_path):
    tokenizer = train_tokenizer(tmp_path)
    expected = tokenizer.encode(TEXTS[0]).ids
    tokenizer.enable_truncation(3)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert encoders.load_tokenizer(tmp_path, {})(TEXTS[0]) == expected
    tokenizer.no_truncation()
    tokenizer.enable_padding(length=50)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert encoders.load_tokenizer(tmp_path, {})(TEXTS[0]) == expected


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
    ],
)
def test_a_damaged_tokenizer_is_one_line(name, change, message, tmp_path):
    train_tokenizer(tmp_path).save(str(tmp_path / "tokenizer.json"))
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(content | {name: change}))
    with pytest.raises(ValueError, match=rf"tokenizer\.json .*{message}") as caught:
        encoders.load_tokenizer(tmp_path, {"model_type": "bert"})("zebra")
    assert "\n" not in str(caught.value)


def test_a_token_beyond_every_integer_is_one_line():
    is_refused("token id 4294967295 of text 0", tokens.pad_sequences, [[2**32 - 1]])


def test_every_process_makes_the_same_vocabulary():
    """The digest is of an earlier process; update it with the algorithm."""
    encode = encoders.trained_tokenizer([default_text()], 30000)
    ids = np.array(encode(default_text()), np.int64)
    assert hashlib.sha256(ids.tobytes()).hexdigest()[:16] == "4d6243f227047a14"
