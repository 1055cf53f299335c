"""The shipped text, and windows of its words."""

from rank_collapse.text import words


def test_windows():
    assert words.cut_windows("a b c d e", 3, 3) == ["a b c", "b c d", "c d e"]
    assert words.cut_windows("a b", 4, 5) == ["a b"]
    assert words.cut_windows("a b c", 9, 2) == ["a b", "b c"]
    assert words.cut_windows("a b c d e f", 2, 2) == ["a b", "e f"]
    assert words.cut_windows("a b c", 1, 2) == ["a b"]


def test_the_shipped_text_has_about_500_words():
    text = words.default_text()
    assert 400 < len(text.split()) < 600 and text.isascii()
