"""Models of run_architectures: their weights, inputs and names."""

from experiments import run_architectures
from experiments.architectures import published_models
from experiments.lab import cli


def test_the_first_seed_chooses_the_initialisations():
    options = cli.parse_flags(run_architectures.FLAGS, ["--first_seed=3", "--num_seeds=2"])
    weights = published_models.list_weights(
        options, [published_models.Model("a", "a", {}, False, {})]
    )
    assert [w.name for w in weights] == ["a/init3", "a/init4"]
