"""path_lengths of models whose forward pass has blocks of code, such as `torch.autocast`."""

import contextlib

import pytest

from tests.support.refusals import is_refused

torch = pytest.importorskip("torch")

from rank_collapse.torch import path_lengths  # noqa: E402
from tests.oracles.small_torch_stack import HIDDEN, LAYERS, Attention, Model  # noqa: E402
from tests.support.closeness import assert_close  # noqa: E402

BRANCHES = {"first": r"layers\.0", "second": r"layers\.1"}


class EnablesGradients(Attention):
    def forward(self, x):
        with torch.enable_grad():
            y = x * 1.0
        return super().forward(y)


class Chooses(Attention):
    """`torch.cond` inside of the attention."""

    def forward(self, x):
        chosen = torch.cond(x.sum() > -1e9, lambda y: y * 1.0, lambda y: y * 2.0, (x,))
        chosen = torch.cond(x.sum() < -1e9, lambda y: y * 2.0, lambda y: y * 1.0, (chosen,))
        return super().forward(chosen)


class Counts(Attention):
    """Changes a buffer and its input in place."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        y = x.clone()
        y *= 1.0
        return super().forward(y)


class Around(Model):
    """A block around the call of the first layer."""

    def __init__(self, block, attention=Attention):
        super().__init__(attention)
        self.block = block

    def forward(self, hidden):
        x = hidden
        with self.block():
            first = self.layers[0](x)
        x = x + first
        return self.norm(x + self.layers[1](x))


def split(model, **options):
    return path_lengths(model, hidden=HIDDEN, branches=BRANCHES, output=None, **options)


@pytest.mark.full
@pytest.mark.parametrize("attention", [EnablesGradients, Chooses, Counts])
@pytest.mark.parametrize("freeze", [False, True])
def test_code_inside_of_a_branch(attention, freeze):
    models = []
    for kind in (Attention, attention):
        torch.manual_seed(0)
        models.append(Model(kind))
    plain, paths = (split(model, freeze=freeze) for model in models)
    assert_close(paths.by_length, plain.by_length, atol=1e-12)
    assert attention is not Counts or models[1].layers[0].count == 0


@pytest.mark.full
@pytest.mark.parametrize("is_enabled", [False, True])
def test_a_branch_in_a_block_that_turns_gradients_on_or_off(is_enabled):
    torch.manual_seed(0)
    plain = path_lengths(Around(torch.no_grad), HIDDEN, branches=LAYERS)
    torch.manual_seed(0)
    block = torch.enable_grad if is_enabled else torch.inference_mode
    with torch.set_grad_enabled(not is_enabled):
        paths = path_lengths(Around(block), HIDDEN, branches=LAYERS)
    assert len(paths.by_length) == 3 and paths.by_length[2].norm() > 0
    assert_close(paths.by_length, plain.by_length, atol=1e-12)


def test_a_branch_in_a_block_of_autocast_is_refused():
    model = Around(lambda: torch.autocast("cpu", enabled=False))
    message = "is inside of a torch.autocast block, in which torch.export forgets the names of"
    is_refused(message, path_lengths, model, HIDDEN, branches=LAYERS)
    is_refused(message, path_lengths, model, HIDDEN, branches=r"layers\.1", start="layers.0.q")


@contextlib.contextmanager
def nested_blocks():
    with torch.autocast("cpu", enabled=False), torch.autocast("cpu", torch.bfloat16, False):
        yield


def test_a_branch_in_a_block_of_a_block_is_refused():
    message = "is inside of a torch.autocast block, in which torch.export forgets the names of"
    is_refused(message, path_lengths, Around(nested_blocks), HIDDEN, branches=LAYERS)


class Small(torch.nn.Module):
    """A skip around one branch, after what `begin` makes of the state."""

    def __init__(self, begin):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.scale, self.branch = (torch.nn.Linear(4, 4) for _ in range(3))
        self.begin = begin

    def forward(self, x):
        state = self.begin(self, x)
        return state + self.branch(state)


@torch.no_grad()
def test_paths_pass_the_graphs_that_torch_cond_chooses_outside_of_branches():
    """They have no weights, so that they can hide no branch."""
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    first = lambda x: torch.cond((x * x).sum() < 0, lambda y: 2 * y, lambda y: 3 * y, (x,))  # noqa: E731
    second = lambda x: torch.cond((x * x).sum() > 0, lambda y: 5 * y, lambda y: 7 * y, (x,))  # noqa: E731
    model = Small(lambda self, x: second(first(x)))
    by_length = path_lengths(model, x, branches="branch").by_length
    torch.testing.assert_close(by_length[0], 15 * x)
    torch.testing.assert_close(by_length[1], 15 * x @ model.branch.weight.T)


@torch.no_grad()
def test_torch_cond_with_weights_may_come_before_the_start():
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))

    def begin(self, x):
        return self.scale(torch.cond((x * x).sum() > 0, self.first, lambda y: 1.0 * y, (x,)))

    model = Small(begin)
    by_length = path_lengths(model, x, branches="branch", start="scale").by_length
    state = model.scale(model.first(x))
    torch.testing.assert_close(by_length[0], state)
    torch.testing.assert_close(by_length[1], state @ model.branch.weight.T)


@torch.no_grad()
def test_a_number_of_tokens_that_values_decide():
    """It is one of the graph's unknown sizes, with which the model computes shapes."""
    x = torch.tensor([[1.0, 2, 3, 4], [0, 0, 0, 0], [3, 1, -1, 2]])

    def begin(self, x):
        chosen = (x.detach().abs().sum(1) > 0).nonzero()[:, 0]
        return x[chosen].reshape(chosen.shape[0] * 2, 2).reshape(chosen.shape[0], 4)

    model = Small(begin)
    by_length = path_lengths(model, x, branches="branch").by_length
    torch.testing.assert_close(by_length[0], x[[0, 2]])
    torch.testing.assert_close(by_length[1], x[[0, 2]] @ model.branch.weight.T)


def test_a_loop_of_torch_is_refused_by_its_name():
    loop = pytest.importorskip("torch._higher_order_ops").while_loop

    def begin(self, x):
        return loop(lambda i, y: i < 2, lambda i, y: (i + 1, y * 2), (torch.tensor(0), x))[1]

    message = r"^while_loop in the model's own forward .* reads a value that depends on the start"
    is_refused(message, path_lengths, Small(begin), torch.ones(3, 4), branches="branch")


class ChoosesLayer(Model):
    def forward(self, hidden):
        x = torch.cond(hidden.sum() > -1e9, self.layers[0], lambda y: y * 1.0, (hidden,))
        return self.norm(x + self.layers[1](x))


def test_a_branch_that_torch_cond_calls_is_refused():
    message = "cond in the model's own forward.* is outside of all branches, and torch.export"
    is_refused(message, path_lengths, ChoosesLayer(), HIDDEN, branches=LAYERS)


def test_flex_attention_is_refused():
    flex = pytest.importorskip("torch.nn.attention.flex_attention")

    class Flex(Attention):
        def forward(self, x):
            q, k, v = (part(x)[:, None] for part in (self.q, self.k, self.v))
            return flex.flex_attention(q, k, v)[:, 0]

    message = "flex_attention in .* computes attention in one kernel"
    is_refused(message, path_lengths, Model(Flex), hidden=HIDDEN, branches=LAYERS)


def test_a_block_of_autocast_inside_of_a_branch():
    class Inside(Attention):
        def forward(self, x):
            with torch.autocast("cpu", enabled=False):
                return super().forward(x)

    results = []
    for kind in (Attention, Inside):
        torch.manual_seed(0)
        results.append(path_lengths(Model(kind), hidden=HIDDEN, branches=LAYERS).by_length)
    assert_close(*results, atol=1e-12)


class Cache:
    """Keeps the last states, as a cache of keys and values does."""

    def __init__(self):
        self.states, self.layers, self.named = None, [], {}

    def add(self, x):
        self.states = x
        self.layers.append(x)
        self.named["states"] = x


class Cached(Model):
    def forward(self, hidden, cache=None):
        cache.add(hidden)
        return super().forward(hidden=hidden)["last_hidden_state"]


def test_an_object_among_the_arguments_stays_as_it_was():
    cache = Cache()
    path_lengths(Cached(), HIDDEN, cache, branches=LAYERS, start="hidden")
    assert cache.states is None and cache.layers == [] and cache.named == {}


def test_a_cache_of_transformers_can_be_used_afterwards():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8,
        vocab_size=20,
    )  # fmt: skip
    model = transformers.LlamaModel(config).eval()
    ids = torch.arange(5)[None] + 3
    with torch.no_grad():
        expected = model(ids).last_hidden_state[:, 4:]
        cache = model(ids[:, :4]).past_key_values
    paths = path_lengths(
        model, ids[:, 4:], past_key_values=cache, branches=r"layers\.\d+\.self_attn",
        start="embed_tokens",
    )  # fmt: skip
    assert_close(paths.output, expected, atol=1e-5)
    assert cache.get_seq_length() == 4
    with torch.no_grad():
        after = model(ids[:, 4:], past_key_values=cache).last_hidden_state
    assert_close(after, expected, atol=1e-5)
