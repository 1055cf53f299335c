"""Folders that hold the checkpoint elsewhere: the message names it."""

import json
import shutil

from conftest import REPOSITORY

from rank_collapse.command import main
from rank_collapse.command.folders import check_folder

GOLDEN = REPOSITORY / "tests" / "golden" / "bert"


def test_the_checkpoint_in_a_folder_is_named(tmp_path, capsys):
    for step in (900, 1000):
        shutil.copytree(GOLDEN, tmp_path / "run" / f"checkpoint-{step}")
    (tmp_path / "run" / "checkpoint-best").mkdir()
    shutil.copytree(GOLDEN, tmp_path / "sentences" / "0_Transformer")
    (tmp_path / "sentences" / "modules.json").write_text("[]")
    pooling = tmp_path / "sentences" / "1_Pooling"
    pooling.mkdir()
    (pooling / "config.json").write_text(json.dumps({"word_embedding_dimension": 8}))
    named = {"run": "run/checkpoint-1000", "sentences": "sentences/0_Transformer"}
    named["sentences/1_Pooling"] = "sentences"
    for folder, checkpoint in named.items():
        assert main(["check", str(tmp_path / folder)]) == 2
        err = capsys.readouterr().err
        assert err.rstrip().endswith(f"rank-collapse check {tmp_path / checkpoint}")


def test_a_checkpoint_that_a_trainer_saved_at_the_top_is_read(tmp_path):
    """Its last weights stand beside the folders of its steps."""
    shutil.copytree(GOLDEN, tmp_path / "run")
    shutil.copytree(GOLDEN, tmp_path / "run" / "checkpoint-10")
    check_folder(tmp_path / "run")
