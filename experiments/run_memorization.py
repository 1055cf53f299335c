"""Memorization: a network trained to memorize random labels of the tokens of real texts.

Reproduces the memorization panel of the path-length figure of Dong, Cordonnier and Loukas (2021,
section 4.2): pairs of sentences from GLUE's RTE, a random 0 or 1 for every token, evaluated on the
training data. The whole model and the baselines are measured, with error bars over seeds.

    python -m experiments.run_memorization --model_name_or_path bert-base-uncased --task_name RTE \\
        --do_train --data_dir data/RTE --max_seq_length 128 --per_device_eval_batch_size=32 \\
        --per_device_train_batch_size=8 --learning_rate 3e-4 --num_train_epochs 50 \\
        --output_dir snap/RTE --overwrite_output_dir --width 2 --depth 6 --hidden_dim 250 \\
        --n_repeat 5 --n_paths 5 --n_train_data 500 --no_sub_path --path_len 0

Needs RTE's train.tsv in --data_dir. --model_name_or_path names a local folder with a WordPiece
tokenizer; where it does not exist a vocabulary is trained on the data (nothing is downloaded).
Texts are packed: one row holds several whole texts, and each attends only to itself; see
--pack. Two CPU cores: 18.5 minutes for five seeds, other jobs running. Expected: whole-model
accuracy 0.858.
"""

from experiments.lab import cli, vocabulary
from experiments.paper.path_lengths import paths_experiment
from experiments.train import arguments, pairs as texts
from experiments.train.tasks import memorization_setup

FLAGS = arguments.make_flags(
    "memorization",
    d_model=250,
    num_tokens=128,
    num_labels=2,
    n_train_data=500,
    n_eval_data=88,
    n_epochs=50,
    batch_size=8,
    learning_rate=3e-4,
)
arguments.add_path_flags(FLAGS)
vocabulary.alias(
    FLAGS,
    max_seq_length="num_tokens",
    num_train_epochs="n_epochs",
    per_device_train_batch_size="batch_size",
    overwrite_output_dir="overwrite",
)
define = cli.definer(FLAGS)
define(
    "string",
    "model_name_or_path",
    "bert-base-uncased",
    "Folder or file of a WordPiece tokenizer; "
    "of any other name only a vocabulary trained on the data is made.",
)
define("enum", "task_name", "RTE", "Whose texts.", texts.TASKS)
define("string", "data_dir", "data/RTE", "Folder of the task's files.")
define(
    "integer",
    "per_device_eval_batch_size",
    32,
    "Texts evaluated at a time: memory, not results.",
    lower_bound=1,
)
define(
    "boolean",
    "pack",
    True,
    "Train on rows of whole texts one behind another, each attending to "
    "itself only, instead of one padded text a row. A step then takes about batch_size texts, and "
    "texts of a row are always in one batch; about twice as fast.",
)


EXPERIMENT = paths_experiment(
    "memorization",
    about=__doc__,
    order=70,
    brief="the same for random labels of texts learned by heart",
    flags=FLAGS,
    setup=memorization_setup,
    presets={
        # The 21 texts in three batches of one size, so that an evaluation is compiled once.
        "quick": "--task_name=shipped --depth=3 --d_model=64 --n_epochs=60 --learning_rate=2e-3 "
        "--per_device_eval_batch_size=7",
        "tiny": "--task_name=shipped --num_tokens=8",
    },
)
main = EXPERIMENT.main

if __name__ == "__main__":
    cli.run(main, FLAGS)
