"""Kinds of mistakes: which tokens differ, and how embeddings do."""

import numpy as np
import pytest

from rank_collapse.agree.differences import Difference
from rank_collapse.agree.kinds import name_embedding, name_kind

B, N, D = 2, 10, 6
WHOLE = np.ones((B, N), bool)


def make_difference(excess, part="attention", mask=WHOLE, *, spikes=None, change=None, **fields):
    """Makes a difference whose tokens have this excess; branches differ as nothing explains."""
    rng = np.random.default_rng(0)
    first, noise = rng.normal(size=(2, B, N, D))
    second = first + 0.3 * noise if change is None else change(first)
    states = rng.normal(size=(2, B, N, D))
    absent = np.where(mask, 0, np.nan)
    excess = np.broadcast_to(np.asarray(excess, float), (B, N)) + absent
    spikes = np.zeros((B, N), bool) if spikes is None else spikes
    usual = {"scale": 0.0, "coherence": 0.0} | fields
    return Difference(
        1, part, absent, excess, 1 + absent, spikes, usual["scale"], usual["coherence"], 9.0,
        first, second, fields.get("states", tuple(states)),
    )  # fmt: skip


def name(*args, mask=WHOLE, **options):
    return name_kind(make_difference(*args, mask=mask, **options), mask)


FROM_4 = np.r_[np.full(4, 0.5), np.full(6, 9.0)]


def test_no_token_or_every_token_differs():
    assert name(1.0) is None
    text = name(9.0)
    assert text.startswith("all tokens differ, the first too: where it attends to itself alone")
    assert name(9.0, part="layer") is None


def test_tokens_from_a_position_on():
    """A window begins with a jump; positions differ by and by."""
    assert name(FROM_4) == "only tokens from position 4 on differ: a window, or another mask"
    growing = np.r_[0.8, 1.1, 1.5, 2.0, np.full(6, 3.0)]
    assert name(growing).startswith("the difference grows with the position: positions differ")
    level = np.r_[np.full(4, 1.0), np.full(6, 3.0)]
    assert name(level).startswith("tokens from position 4 on differ most: positions differ")
    two = np.r_[np.full(2, 0.5), np.full(8, 9.0)]  # two tokens that agree show no trend
    assert name(two).startswith("tokens from position 2 on differ most")
    assert name(np.r_[np.full(2, 0.5), np.full(8, 21.0)]).startswith("only tokens from position 2")
    mask = WHOLE.copy()
    mask[1, 3:] = False  # padding neither agrees nor differs
    assert (
        name(FROM_4, mask=mask)
        == "only tokens from position 4 on differ: a window, or another mask"
    )
    few = FROM_4 * np.r_[np.ones(7), np.zeros(3)] + 0.5  # the last ones agree
    assert "from position" not in name(few)


def test_all_tokens_but_the_last():
    """Each example has its own last token, and padding does not count."""
    mask = WHOLE.copy()
    mask[1, 3:] = False
    excess = np.full((B, N), 9.0)
    excess[0, 9] = excess[1, 2] = 1.0
    expected = "all tokens but the last differ: a causal mask in one run alone"
    assert name(excess, mask=mask) == expected
    excess[1, 2], excess[1, 1] = 9.0, 1.0
    assert name(excess, mask=mask) != expected


def test_the_first_token_agrees():
    """Here a few others agree, so that it is no window."""
    excess = np.array([0.5, 3.0, 9.0, 0.5, 9.0, 0.5, 0.5, 9.0, 9.0, 0.5])
    words = "the first token, which attends to itself alone, agrees: queries and keys differ"
    assert name(excess).startswith(words)
    assert name(excess, part="layer").startswith(words)
    mild = np.where(excess > 1, 2.8, 2.0)  # no clear difference
    assert name(mild) is None
    first_agrees_in_one = np.where(np.arange(N) == 0, [[0.5], [2.0]], mild)
    assert name(first_agrees_in_one) is None  # the first token of each example counts
    # In a whole layer more has to show, and a spike hides what is added to it.
    low = np.where(excess > 1, 4.0, 1.0)
    assert name(low).startswith(words) and name(low, part="layer") is None
    spikes = np.zeros((B, N), bool)
    spikes[:, 0] = True
    assert name(excess, part="layer", spikes=spikes) is None
    assert name(excess, spikes=spikes).startswith(words)
    rare = np.where(np.isin(np.arange(N), (4, 7)), 9.0, 0.5)  # two of nine later tokens
    assert name(rare) is None
    one = excess * np.ones((B, 1))
    one[1, 0] = 9.0
    assert name(one) is None
    mask = WHOLE.copy()
    mask[:, 4:] = False  # two of three later tokens differ, or of nine with the padding
    assert name(excess, mask=mask).startswith(words)


def test_only_examples_with_padding():
    mask = WHOLE.copy()
    mask[1, 6:] = False
    excess = np.ones((B, N))
    excess[1, ::2] = 9.0
    expected = "only examples with padding differ: attention to padding"
    assert name(excess, mask=mask) == expected
    excess[0, 3] = 9.0
    assert name(excess, mask=mask) != expected


def test_of_an_mlp_few_tokens_by_much_are_experts():
    excess = np.ones((B, N))
    excess[0, 2] = excess[1, 7] = 14.0
    assert name(excess, part="mlp").startswith("few tokens differ, by much: if the layer has exp")
    assert name(excess.clip(max=12.9), part="mlp") is None
    mask = WHOLE.copy()
    mask[1, 5:] = False  # two of fifteen tokens are few, two of ten are not
    excess[1, 7], excess[1, 2] = 1.0, 14.0
    assert name(excess, part="mlp", mask=mask) is not None
    mask[0, 5:] = False
    assert name(excess, part="mlp", mask=mask) is None
    excess[:, :2] = 14.0
    assert name(excess, part="mlp") is None


@pytest.mark.parametrize("part", ["attention", "mlp"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda a: a + np.arange(D) / 3.0, "one vector is added to all tokens: a bias"),
        (lambda a: a * np.linspace(0.2, 2.0, D), "each feature has its own factor"),
        (
            lambda a: a * (np.random.default_rng(1).uniform(size=a.shape) > 0.3) / 0.7,
            "dropout is on in the second run",
        ),
    ],
)
def test_a_spike_decides_no_kind(part, change, words):
    """One token of a thousandfold size differs in another way than all others."""
    spikes = np.zeros((B, N), bool)
    spikes[0, 3] = True

    def change_most(a):
        return np.where(
            spikes[..., None], 1000 * np.random.default_rng(5).normal(size=D), change(a)
        )

    assert name(9.0, part, change=change_most, spikes=spikes).startswith(words)
    assert not (name(9.0, part, change=change_most) or "").startswith(words)


@pytest.mark.parametrize(("run", "other"), [("first", "second"), ("second", "first")])
def test_a_branch_that_one_run_does_not_have(run, other):
    difference = make_difference(9.0)
    small = getattr(difference, run) * 1e-4
    text = f"the {run} run adds nothing here: the sublayer is absent"
    assert name_kind(difference._replace(**{run: small}), WHOLE) == text
    assert name_kind(difference._replace(**{run: 20 * small}), WHOLE) != text


@pytest.mark.parametrize("run", ["first", "second"])
def test_zeros_in_one_run_alone_are_dropout(run):
    rng = np.random.default_rng(1)
    full = rng.normal(size=(B, N, D))
    kept = rng.uniform(size=full.shape) > 0.3
    share = 1 - kept.mean()
    dropped = full * kept / (1 - share)
    pair = {"first": full, "second": full, run: dropped}
    difference = make_difference(9.0)._replace(**pair)
    expected = f"dropout is on in the {run} run: {share:.0%} of the numbers are 0"
    assert name_kind(difference, WHOLE) == expected
    unscaled = name_kind(difference._replace(**{run: full * kept}), WHOLE)
    assert "dropout" not in (unscaled or "")


@pytest.mark.parametrize(
    ("scale", "text"),
    [
        (-0.2, "the output is multiplied by 0.8"),
        (-3e-7, "the output is multiplied by 1 - 3.0e-07"),
        (4e-6, "the output is multiplied by 1 + 4.0e-06"),
        (-1.5, "the output is multiplied by -0.5: a sign"),
        (np.sqrt(D) - 1, f"the output is multiplied by {np.sqrt(D):.4g}, the root of the width 6"),
        (1 / np.sqrt(D) - 1, f"the output is multiplied by {D**-0.5:.4g}, 1 over the root of the "
         "width 6"),
    ],
)  # fmt: skip
def test_one_factor(scale, text):
    fields = {"change": lambda a: (1 + scale) * a, "scale": scale, "coherence": 1.0}
    assert name(9.0, **fields) == name(9.0, part="mlp", **fields) == text
    assert (name(9.0, **fields | {"coherence": 0.5}) or "") != text


def test_a_factor_of_a_layer_is_nearly_one():
    """The sum has other parts, too; of a sum it is a factor of a skip."""

    def change(a):
        return 0.8 * a + 0.1 * np.random.default_rng(2).normal(size=a.shape)

    fields = {"part": "layer", "change": change, "scale": -0.2, "coherence": 0.95}
    difference = make_difference(99.0, **fields)
    assert name_kind(difference, WHOLE) == "the output is multiplied by about 0.8"
    total = difference._replace(states=(difference.first, difference.second))
    skip = "the output is multiplied by about 0.8: a factor of a skip"
    assert name_kind(total, WHOLE) == skip
    assert "multiplied" not in (name_kind(total._replace(coherence=0.89), WHOLE) or "")


def test_each_feature_has_a_factor_or_one_vector_is_added():
    gain = np.linspace(0.2, 2.0, D)
    features = "each feature has its own factor: the weight of a norm or of a scale"
    assert name(9.0, change=lambda a: a * gain) == features
    vector = np.arange(D) / 3.0
    bias = "one vector is added to all tokens: a bias"
    assert name(9.0, change=lambda a: a + vector) == bias
    assert name(9.0, part="mlp", change=lambda a: a + vector) == bias
    layer = make_difference(9.0, part="layer", change=lambda a: a + vector)
    assert name_kind(layer, WHOLE) == (
        f"{bias}, or a change of an attention that is alike in all tokens"
    )
    total = layer._replace(states=(layer.first, layer.second))
    assert name_kind(total, WHOLE) == bias
    mask = np.zeros((B, N), bool)
    mask[0, :3] = True  # three tokens show neither
    for change in (lambda a: a * gain, lambda a: a + vector):
        assert name(9.0, mask=mask, change=change).startswith("all tokens differ")


@pytest.mark.parametrize("run", [0, 1])
@pytest.mark.parametrize("centred", [False, True])
def test_a_state_after_a_norm(run, centred):
    rng = np.random.default_rng(3)
    before = rng.normal(size=(B, N, D)) * rng.uniform(0.5, 3, (B, N, 1)) + 1.0
    x = before - before.mean(axis=-1, keepdims=True) if centred else before
    after = x / np.sqrt((x**2).mean(axis=-1, keepdims=True)) * np.linspace(0.5, 2, D)
    states = (after, before) if run == 0 else (before, after)
    difference = make_difference(9.0, part="layer", states=states)
    text = f"the state of the {('first', 'second')[run]} run is taken after a norm, the other's "
    assert name_kind(difference, WHOLE) == f"{text}before it"
    assert "norm, the" not in (name_kind(difference._replace(part="mlp"), WHOLE) or "")


def test_states_of_one_size_show_no_norm():
    """Where all states have the same norm, a norm with a gain is a factor of each feature."""
    rng = np.random.default_rng(3)
    before = rng.normal(size=(B, N, D))
    before /= np.sqrt((before**2).mean(axis=-1, keepdims=True))
    states = before, before * np.linspace(0.5, 2, D)
    for pair in (states, states[::-1]):
        assert "norm, the" not in (name(9.0, part="layer", states=pair) or "")


def test_factors_of_features_need_tokens_that_are_unlike_and_explain_nearly_all():
    """Where all tokens are alike, factors of features explain any change of all tokens."""
    rng = np.random.default_rng(4)
    common, other = 1 + rng.uniform(size=(2, D))
    spread, noise = rng.normal(size=(2, B, N, D))
    alike, unlike, gain = common + 0.02 * spread, spread, np.linspace(0.2, 2.0, D)
    change = (gain - 1) * unlike
    noise *= np.linalg.norm(change) / np.linalg.norm(noise)
    difference = make_difference(9.0)
    for first, second, is_named in (
        (unlike, unlike + change + 0.05 * noise, True),
        (unlike, unlike + change + 0.25 * noise, False),
        (alike, other + 0.02 * noise, False),
    ):
        kind = name_kind(difference._replace(first=first, second=second), WHOLE)
        assert ("own factor" in (kind or "")) == is_named


def test_embeddings():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 7, 16))
    cases = {
        "the embeddings are multiplied by 4, the root of the width 16": 4 * x,
        "the embeddings are multiplied by 0.25, 1 over the root of the width 16": x / 4,
        "the embeddings are multiplied by 3": 3 * x,
        "one vector is added to all embeddings": x + rng.normal(size=16),
        "a vector for each position is added: other positions": x + rng.normal(size=(7, 16)),
        "the embeddings differ": x + rng.normal(size=x.shape),
    }
    for text, other in cases.items():
        assert name_embedding(x, other) == text
    assert name_embedding(x, -3 * x) == "the embeddings differ"
    assert name_embedding(x[:1], x[:1] + rng.normal(size=(7, 16))) == "the embeddings differ"
