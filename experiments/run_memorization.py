"""Memorization: a network trained to learn random labels of the tokens of real texts by heart.

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
Texts are packed, several whole ones in a row of the network, each looking at itself alone; see
--pack. Two CPU cores: 18.5 minutes for five seeds, other jobs running. Expected: whole-model
accuracy 0.858.
"""

from absl import flags

from experiments.shell import cli
from experiments.trained import arguments, entry, experiment
from experiments.trained.texts import setup_of
from rank_collapse.text import pairs as texts
from rank_collapse.training.tasks import memorization

FLAGS = arguments.make_flags(
    "memorization",
    width=2,
    depth=6,
    hidden_dim=250,
    seq_len=128,
    num_labels=2,
    n_train_data=500,
    n_eval_data=88,
    n_epochs=50,
    batch_sz=8,
    learning_rate=3e-4,
    weight_decay=0.0,
)
arguments.add_path_flags(FLAGS)
flags.DEFINE_string(
    "model_name_or_path", "bert-base-uncased", "Folder or file of a WordPiece tokenizer; of any "
    "other name only a vocabulary trained on the data is made.", flag_values=FLAGS,
)  # fmt: skip
flags.DEFINE_enum("task_name", "RTE", texts.TASKS, "Whose texts.", flag_values=FLAGS)
flags.DEFINE_string("data_dir", "data/RTE", "Folder of the task's files.", flag_values=FLAGS)
flags.DEFINE_alias("max_seq_length", "seq_len", flag_values=FLAGS)
flags.DEFINE_alias("num_train_epochs", "n_epochs", flag_values=FLAGS)
flags.DEFINE_alias("per_device_train_batch_size", "batch_sz", flag_values=FLAGS)
flags.DEFINE_integer(
    "per_device_eval_batch_size", 32, "Texts evaluated at a time: memory, not results.",
    lower_bound=1, flag_values=FLAGS,
)  # fmt: skip
flags.DEFINE_boolean(
    "pack", True, "Train on rows of whole texts one behind another, each looking at itself only, "
    "instead of one padded text a row. A step then takes about batch_sz texts, and texts of a row "
    "are always in one batch; about twice as fast.", flag_values=FLAGS,
)  # fmt: skip
flags.DEFINE_boolean(
    "overwrite_output_dir", False, "Replace a finished run, or one of other flags, in output_dir; "
    "an interrupted run of the same flags is resumed.", flag_values=FLAGS,
)  # fmt: skip


def main(options: flags.FlagValues) -> None:
    experiment.run_experiment(options, make_setup(options))


def make_setup(options: flags.FlagValues) -> experiment.Setup:
    """The experiment of the flags; reads the texts.

    Raises:
        ValueError: Texts or tokenizer that cannot be read.
    """
    pairs = texts.read_pairs(options.task_name, options.data_dir, options.n_train_data)
    tokenizer, origin = texts.load_tokenizer(options.model_name_or_path, pairs)
    print(origin)
    ids, mask = texts.encode_pairs(tokenizer, pairs, options.seq_len)
    content = cli.content_hash(ids.tobytes() + mask.tobytes())
    # Rows of the table that no text uses get no gradient: leaving them out changes nothing.
    tokens, used = memorization.compact_vocabulary(ids)
    return setup_of(options, tokens, mask, len(used), {"texts": content})


ENTRY = entry.make_entry(
    title="Paths: memorization",
    task="memorization",
    quick=(
        "--num_seeds=4", "--task_name=shipped", "--depth=4", "--hidden_dim=64", "--n_epochs=60",
        "--n_paths=5",
        "--learning_rate=1e-3", "--n_repeat=3", "--no_sub_path",
    ),
    paper=("--num_seeds=8", "--no_sub_path"),
)  # fmt: skip


if __name__ == "__main__":
    cli.run(main, FLAGS)
