"""Errors of `rank-collapse check` and `depth`: one line each, and an exit code."""

import sys

import pytest

from rank_collapse.command import inputs, main
from rank_collapse.runs import files
from tests.support.folders import REPOSITORY

GOLDEN = REPOSITORY / "tests" / "golden" / "bert"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no/such/folder"], "no/such/folder"),
        ([str(GOLDEN), "--inputs=x.npy"], "--inputs=x.npy"),
        ([str(GOLDEN.parent / "vit-wide"), f"--inputs={__file__}"], "is not an array of numbers"),
        ([str(GOLDEN), "--max_tokens=9223372036854775808"], "--max_tokens 9223372036854775808"),
        ([str(GOLDEN), "--out=x.png"], "--out x.png"),
        ([str(GOLDEN), "--token_ids=no.txt"], "no.txt"),
        (["chekc"], "check, depth, watch"),
        (
            ["depth", str(GOLDEN)],
            "bert (bert) has no head that predicts the next token, and the depth report needs one; "
            "its head predicts masked tokens",
        ),
        (
            ["depth", str(GOLDEN.parent / "vit-wide")],
            "vit-wide (vit) has no head that predicts the next token, and the depth report needs "
            "one\n",
        ),
        ([str(GOLDEN), "--text", __file__], "bert has none of tokenizer.json, vocab.json with"),
        ([str(GOLDEN), "--tokenizer=no/such"], "no/such has none of tokenizer.json"),
        ([str(GOLDEN), "--ids=5,x"], "--ids does not hold token ids"),
        ([str(GOLDEN), "--ids=5,100000"], "token id 100000 of text 0"),
        ([str(GOLDEN), "--ids=5"], "text 0 has fewer than 2 tokens"),
        ([str(GOLDEN), "--ids=5,6", "--text=x"], "--ids excludes --text"),
        (["random:bert-base-cased", "--text", "no.txt"], "no.txt"),
        (["random:bert-base-cased", "--num_texts", "-1"], "--num_texts -1"),
        (["random:bert-base-cased", "--out", "no/folder/page.html"], "no/folder/page.html"),
        (["random:bert-base-cased", "--out", "."], "--out ."),
    ],
)
def test_what_cannot_be_read_is_one_line_and_exit_code_2(arguments, message, capsys):
    assert main(arguments) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("error: ") and printed.count("\n") == 1 and message in printed


@pytest.mark.parametrize("command", ["check", "agree"])
def test_where_nothing_can_be_written_nothing_is_measured(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(files.os, "access", lambda *arguments: False)
    assert main([command, str(GOLDEN), *[str(GOLDEN)] * (command == "agree")]) == 2
    assert capsys.readouterr().err == f"error: cannot write to {tmp_path}: permission denied\n"


def test_a_plain_name_that_is_no_folder_names_the_others(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for arguments in (["bert-base-cased"], ["gpt2"], ["check", "gpt2"], ["depth", "gpt2"]):
        assert main(arguments) == 2
        err = capsys.readouterr().err
        drawn = arguments[-1] if arguments[-1] == "bert-base-cased" else "NAME"
        assert f"hf:{arguments[-1]} is" in err and f"random:{drawn} " in err
        assert err.count("\n") == 1 and err.startswith("error: ")


def test_output_that_is_closed_is_an_error(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", None)
    assert main([str(GOLDEN), "--ids=5,8,13,7", "--json"]) == 2
    assert capsys.readouterr().err.startswith("error: standard output is closed")


def test_an_interrupt_is_one_line(monkeypatch, capsys):
    def interrupt(source):
        raise KeyboardInterrupt

    monkeypatch.setattr(inputs, "open_source", interrupt)
    assert main(["random:bert-base-cased"]) == 130
    assert capsys.readouterr().err == "\ninterrupted\n"


def test_without_the_extra_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main([str(GOLDEN)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: --out rank_collapse.html needs matplotlib") and "--json" in err
    assert err.count("\n") == 1
