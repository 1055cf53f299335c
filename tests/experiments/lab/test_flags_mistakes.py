"""Mistakes in the flags of every experiment: a line that says what is wrong, exit 2, no folder."""

import importlib

import pytest

from experiments.lab.experiment import describe_experiment
from tests.support.folders import GOLDEN
from tests.support.runs import check_mistake

FILES = {
    "empty": b"",
    "one": b"word",
    "blank": b"\n",
    "latin": "naïve caf\xe9".encode("latin-1"),
    "ids": b"3 4 5 6 7 3 4\n8 9 10 11 12\n",
    "far": b"3 4\n5 99\n",
    "columns/train.tsv": b"a\tb\n1\t2\n",
    "rows/train.tsv": b"index\tsentence1\tsentence2\n",
}
BERT = "--checkpoints={golden}/bert --token_ids={tmp}/ids --initialisation=false"
# {experiment: {flags: what the line says}}, {tmp} the folder of the files above
MISTAKES = {
    "run_collapse": {
        "--variants=foo": "--variants=foo is not one of san, san_mlp",
        "--variants=": "--variants is empty",
        "--norm=twice": "--norm=twice",
        "--d_model=10 --num_heads=4": "num_heads=4 does not divide d_model=10",
        "--depth=0": "depth=0",
        "--num_seeds=0": "num_seeds=0",
        "--text=absent.txt": "absent.txt does not exist",
        "--text={tmp}/empty": "is empty",
        "--text={tmp}/latin": "is not UTF-8",
        "--text={tmp}/one": "the text has 1 token, fewer than the 2",
        "--inputs=gaussian --num_tokens=1": "num_tokens=1 is fewer than 2",
        "--weight_scale=nan": "finite",
        "--dtype=float32,float64": "dtype",  # of the whole run
        "--weight_scale=1,x": "could not convert string to float: 'x'",
        "--skip_gain=": "skip_gain",
        "--seed_chunk=0": "seed_chunk=0",
        "--mlp_gain=0": "mlp_gain",
        "--mlp_gain=1 --variants=san": "needs san_mlp",
        "--num_devices=9": "num_devices=9, but only 2 exist",
    },
    "run_transformer": {
        "--task=copy --seq_len=4 --min_len=0": "min_len=0 is not a whole number from 1 to 4",
        "--task=copy --seq_len=4 --min_len=5": "min_len=5 is not a whole number from 1 to 4",
        "--task=translation": "--num_tokens=3 has no effect: the grammar decides it",
        "--warmup=-1": "warmup=-1",
        "--label_smoothing=1": "label_smoothing=1",
        "--width=3": "width=3 does not divide d_model=4",
    },
    "run_stability": {
        "--designs=nowhere": "--designs=nowhere is not one of",
        "--designs=": "--designs is empty",
        "--depths=6": "--depths=6 has fewer than two depths",
        "--designs=branch_norm": "does not cover norm_placement='branch'",
        "--num_heads=3": "num_heads=3 does not divide d_model=4",
        "--update_size=0": "--update_size=0.0 does not change the weights",
        "--d_model=2": "d_model=2",
    },
    "run_trainability": {
        "--designs=best": "best",
        "--depths=0": "--depths",
        "--depths=1,": "--depths",
        "--depths=1,x": "--depths",
        "--warmup=-1": "-1",
        "--task=sum": "sum",
    },
    "run_attention_forms": {
        "--d_k=0": "d_k",
        "--trained_d_k=x": "trained_d_k",
        "--saturation=2": "saturation",
        "--num_queries=1": "num_queries",
    },
    "run_circle": {"--num_labels=3": "3", "--compare=everything": "everything", "--monitor": ""},
    "run_path_chains": {
        "--num_paths=0": "num_paths=0",
        "--dtype=float32,float64": "dtype",
        "--num_heads=3": "num_heads=3 does not divide d_model=4",
        "--skip_gain=nan": "skip_gain=nan",
        "--depth=0": "depth=0",
        "--text=nowhere.txt": "nowhere.txt",
    },
    "run_path_counts": {
        "--heads=2": "--",
        "--heads=2,3 --layers=4": "--",
        "--heads=0 --layers=4": "--",
        "--heads=2 --layers=x": "--",
        "--heads=2 --layers=1000000": "--",
        "--heads=2.5 --layers=2": "--",
    },
    "run_sort": {
        "--width=3": "width=3",
        "--depth=2 --path_len=3": "path_len=3",
        "--no_repeat --seq_len=5": "seq_len=5",
        "--n_epochs=-1": "n_epochs",
    },
    "run_sinks": {"--start=1.5": "start=1.5", "--max_tokens=3": "max_tokens=3"},
    "run_convex_hull": {"--num_labels=3": "num_labels=3"},
    "run_memorization": {
        "--data_dir=no/such/folder": "no/such/folder/train.tsv",
        "--task_name=MNLI": "task_name",
        "--data_dir={tmp}/columns": "sentence1",
        "--data_dir={tmp}/rows": "no rows",
    },
    "check_bounds": {"--cases=9x9x9": "--cases=9x9x9 is not one of 8x16x1", "--sizes=0": "--sizes"},
    "run_theorems": {"--theorems=pythagoras": "--theorems=pythagoras is not one of"},
    "run_architectures": {
        "--checkpoints={golden}/bert": "bert has none of tokenizer.json",
        "--checkpoints={tmp}/nowhere": "nowhere does not exist",
        "--models=gpt5": "gpt5 is not one of bert-base-cased",
        f"{BERT} --token_ids={{tmp}}/x": "does not exist",
        f"{BERT} --token_ids={{tmp}}/far": "99",
        "--checkpoints={golden}/bert --text={tmp}/blank": "no text",
        "--checkpoints={golden}/vit-wide": "vit-wide is a vit, which reads no tokens",
    },
}
# Experiments whose flags of the tiny size would hide the mistake.
BARE = ("run_architectures", "run_memorization", "run_path_counts")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("files")
    for name, content in FILES.items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [(name, *mistake) for name, mistakes in MISTAKES.items() for mistake in mistakes.items()],
)
def test_a_mistake_is_one_line(name, arguments, message, folder, tmp_path, capsys):
    tiny = () if name in BARE else describe_experiment(name).presets["tiny"]
    arguments = arguments.format(tmp=folder, golden=GOLDEN).split()
    early = name != "run_transformer"  # whose data are made in its folder
    module = importlib.import_module(f"experiments.{name}")
    check_mistake(module, [*tiny, *arguments], message, tmp_path, capsys, early=early)
