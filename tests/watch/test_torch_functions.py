"""Which axes two multiplied tensors have in common, by the letters of their product."""

import pytest

torch = pytest.importorskip("torch")

from rank_collapse.watch import torch_functions as functions  # noqa: E402
from rank_collapse.watch.torch_functions import Product, read_product  # noqa: E402
from rank_collapse.watch.torch_origins import Origins  # noqa: E402

F, Tensor = torch.nn.functional, torch.Tensor

EQUATIONS = [
    ("...nd,...md->...nm", (2, 3, 5, 4), (2, 3, 6, 4)),
    ("...nd,...md->...nm", (2, 3, 5, 4), (3, 6, 4)),  # dots of two axes and of one, of the right
    ("...nd,...md->...nm", (3, 5, 4), (7, 2, 3, 6, 4)),
    ("n...d,m...d->...nm", (5, 3, 4), (6, 2, 3, 4)),
    ("...nd,md->...nm", (2, 3, 5, 4), (6, 4)),
    ("...nm,...mA->A...n", (2, 5, 6), (3, 2, 6, 4)),
    ("...nA,...mA->...nm", (2, 3, 5, 4), (2, 3, 6, 4)),  # a letter that the result lacks
    ("b h n d, b h m d -> b h n m", (2, 3, 5, 4), (2, 3, 6, 4)),
]


@pytest.mark.parametrize(("equation", "first", "second"), EQUATIONS)
def test_an_equation_with_dots_has_the_letters_of_the_same_product(equation, first, second):
    """As torch.einsum computes it: the letters alone, without dots, give the same numbers."""
    torch.manual_seed(0)
    a, b = torch.randn(first), torch.randn(second)
    product = read_product(torch.einsum, (equation, a, b), {})
    assert product.first is a and product.second is b
    letters = product.letters
    assert [len(axes) for axes in letters[:2]] == [a.ndim, b.ndim]
    spelled = torch.einsum(f"{letters[0]},{letters[1]}->{letters[2]}", a, b)
    torch.testing.assert_close(spelled, torch.einsum(equation, a, b))


MATRICES = [
    ("matmul", (2, 3, 5, 4), (3, 4, 6)),
    ("matmul", (3, 5, 4), (2, 3, 4, 6)),
    ("matmul", (2, 3, 5, 4), (2, 1, 4, 6)),
    ("bmm", (2, 5, 4), (2, 4, 6)),
    ("linear", (2, 5, 4), (6, 4)),
    ("linear", (4,), (6, 4)),
]


@pytest.mark.parametrize(("name", "first", "second"), MATRICES)
def test_a_product_of_matrices_has_the_letters_of_the_same_equation(name, first, second):
    torch.manual_seed(0)
    a, b = torch.randn(first), torch.randn(second)
    function = torch.nn.functional.linear if name == "linear" else getattr(torch, name)
    product = read_product(function, (a, b), {})
    # An axis of one that is used again and again has a letter of its own, which is summed over.
    equation = "{},{}->{}".format(*product.letters)
    torch.testing.assert_close(torch.einsum(equation, a, b), function(a, b))


def map_tokens(origins, d=8):
    """Returns tokens [2, 5, d] that a linear map made, whose entries are numbered."""
    torch.manual_seed(0)
    x, weight = torch.randn(2, 5, 4), torch.nn.Parameter(torch.randn(d, 4))
    return call(origins, F.linear, x, weight)


def call(origins, function, *args, **kwargs):
    """Calls a function of torch, and records where its result comes from."""
    result = function(*args, **kwargs)
    product = read_product(function, args, kwargs) if function in functions.MAPS else None
    origins.see_function(function, product, args, kwargs, result)
    return result


INDEX = torch.tensor([4, 0, 0])
PLACES = torch.randint(5, (2, 3, 8), generator=torch.Generator().manual_seed(0))
# {name of `MOVES`: arguments after the tensor}
MOVES = {
    "view": (2, 5, 2, 4),
    "reshape": ((10, 8),),
    "transpose": (1, 2),
    "permute": ((2, 0, 1),),
    "contiguous": (),
    "flatten": (0, 1),
    "unflatten": (-1, (2, 4)),
    "squeeze": (1,),
    "unsqueeze": (1,),
    "expand": (3, 2, 5, 8),
    "chunk": (3, -1),
    "split": (3, -1),
    "split_with_sizes": ([1, 7], -1),
    "tensor_split": (3, -1),
    "unbind": (1,),
    "__getitem__": ((slice(None), INDEX, slice(1, 6, 2)),),
    "narrow": (1, 2, 3),
    "select": (1, -1),
    "movedim": (0, 2),
    "moveaxis": (2, 0),
    "swapaxes": (0, 1),
    "swapdims": (0, 2),
    "repeat": (1, 2, 1),
    "tile": ((1, 1, 2),),
    "repeat_interleave": (2, 1),
    "broadcast_to": ((3, 2, 5, 8),),
    "roll": (2, 1),
    "flip": ((1,),),
    "index_select": (1, INDEX),
    "expand_as": (torch.zeros(3, 2, 5, 8),),
    "view_as": (torch.zeros(10, 8),),
    "gather": (1, PLACES),
    "take_along_dim": (PLACES, 1),
    "mT": (),
    "T": (),
    "view_as_complex": (),
    "view_as_real": (),
}
JOINS = ("cat", "concat", "stack", "hstack", "vstack")


def list_functions(name):
    """Lists the functions of a name, of torch and of tensors."""
    if name in ("mT", "T"):
        return [getattr(Tensor, name).__get__]
    return [getattr(place, name) for place in (torch, Tensor) if hasattr(place, name)]


def test_every_function_that_moves_entries_is_tested():
    names = [*MOVES, *JOINS]
    assert {f for name in names for f in list_functions(name)} == functions.MOVES
    assert {f for name in JOINS for f in list_functions(name)} == functions.JOINS


@pytest.mark.parametrize("name", [n for n in MOVES if not n.startswith("view_as_")])
@pytest.mark.filterwarnings("ignore:The use of `x.T`")
def test_numbers_of_entries_move_with_a_tensor(name):
    """As the same function moves them."""
    for function in list_functions(name):
        origins = Origins([])
        x = map_tokens(origins)
        numbers = origins.tags[x].followers["entries"]()
        assert sorted(numbers.flatten().tolist()) == list(range(x.numel()))
        if name == "squeeze":
            x, numbers = call(origins, torch.unsqueeze, x, 1), numbers[:, None]
        results = call(origins, function, x, *MOVES[name])
        expected = function(numbers, *MOVES[name])
        several = isinstance(results, tuple | list)
        for result, moved in zip(
            *((results, expected) if several else ([results], [expected])), strict=True
        ):
            tag = origins.tags[result]
            assert torch.equal(tag.followers["entries"](), moved) and tag.maps
            assert torch.equal(x.flatten()[moved - numbers.min()], result)


@pytest.mark.parametrize("name", JOINS)
def test_numbers_are_joined_as_the_tensors_are(name):
    for function in list_functions(name):
        origins = Origins([])
        x, y, other = map_tokens(origins), map_tokens(origins), torch.randn(2, 5, 8)
        result = call(origins, function, [x, other, y])
        numbers = [origins.tags[a].followers["entries"]() for a in (x, y)]
        numbers.insert(1, torch.full((2, 5, 8), -1))
        assert torch.equal(origins.tags[result].followers["entries"](), function(numbers))
        assert origins.tags[result].maps == origins.tags[x].maps | origins.tags[y].maps


def test_complex_numbers_have_the_numbers_of_both_parts():
    origins = Origins([])
    x = map_tokens(origins)
    pairs = call(origins, torch.unflatten, x, -1, (4, 2))
    result = call(origins, torch.view_as_complex, pairs)
    back = call(origins, torch.view_as_real, result)
    for tensor in (pairs, back):
        numbers = origins.tags[tensor].followers["entries"]()
        assert torch.equal(x.flatten()[numbers], tensor)


ORDERS = {
    "index_copy": (0, torch.tensor([1, 0]), torch.zeros(2, 5, 8)),
    "index_fill": (1, INDEX, 0.0),
    "index_add": (1, INDEX, torch.zeros(2, 3, 8)),
    "scatter": (1, PLACES, 0.0),
    "scatter_add": (1, PLACES, torch.zeros(2, 3, 8)),
    "take": (INDEX,),
    "sort": (),
    "msort": (),
    "topk": (2,),
    "masked_select": (torch.ones(5, 8) > 0,),
    "masked_scatter": (torch.ones(5, 8) > 0, torch.zeros(80)),
    "put": (INDEX, torch.zeros(3)),
}


@pytest.mark.parametrize("name", ORDERS)
def test_where_entries_go_elsewhere_by_indices_no_number_is_kept(name):
    for function in list_functions(name):
        origins = Origins([])
        x = map_tokens(origins)
        result = call(origins, function, x, *ORDERS[name])
        result = result if isinstance(result, Tensor) else result[0]
        assert not origins.tags[result].followers and origins.tags[result].maps


KEPT = ("relu", "abs", "neg", "clone", "add", "mul", "nan_to_num")


@pytest.mark.parametrize("name", KEPT)
def test_where_entries_stay_their_numbers_stay(name):
    origins = Origins([])
    x = map_tokens(origins)
    result = call(origins, getattr(torch, name), x, *([2.0] if name in ("add", "mul") else []))
    followers = [origins.tags[a].followers["entries"]() for a in (x, result)]
    assert torch.equal(*followers) and origins.tags[result].maps == origins.tags[x].maps


GATES = ("sigmoid", "sigmoid_", "tanh", "tanh_", "hardsigmoid", "softplus", "hardtanh", "softmax")
GATES += ("exp", "exp2", "special_expit")


def list_gates(name):
    """Lists the functions of a name, those of `torch.nn.functional` too."""
    if name == "special_expit":
        return [torch.special.expit]
    listed = list_functions(name)
    if name in ("sigmoid", "tanh", "hardsigmoid", "softplus", "hardtanh", "softmax"):
        listed.append(getattr(F, name))
    return listed


@pytest.mark.parametrize("name", GATES)
def test_bounded_functions_are_gates(name):
    listed = list_gates(name)
    assert listed
    for function in listed:
        origins = Origins([])
        gate = call(origins, function, map_tokens(origins), *([-1] if name == "softmax" else []))
        tag = origins.tags[gate]
        assert tag.is_gate and tag.is_exponential == name.startswith(
            "exp2" if "2" in name else "exp"
        )
        assert not origins.tags[map_tokens(origins)].is_gate


def test_every_gate_is_tested():
    assert {f for name in GATES for f in list_gates(name)} == functions.GATES
    assert {f for n in ("exp", "exp2") for f in list_functions(n)} == functions.EXPONENTIALS
    assert {F.softmax, torch.softmax, Tensor.softmax} == functions.SOFTMAX


FACTORS = ("mul", "mul_", "multiply", "multiply_", "__mul__", "__rmul__", "__imul__")
THREE = ("addcmul", "addcmul_", "lerp", "lerp_")
QUOTIENTS = ("div", "div_", "true_divide", "divide")


@pytest.mark.parametrize("name", FACTORS + THREE + QUOTIENTS)
@pytest.mark.parametrize("is_turned", [False, True])
def test_of_a_product_with_a_gate_the_other_factor_is_the_maker(name, is_turned):
    """Of a quotient what is divided; numbers are of what makes the product."""
    for function in list_functions(name):
        origins = Origins([])
        x, y = map_tokens(origins), map_tokens(origins)
        gate = call(origins, torch.sigmoid, y)
        pair = (gate, x) if is_turned else (x, gate)
        args = (torch.zeros(2, 5, 8), *pair) if name in THREE else pair
        if name in THREE:
            origins.tags[args[0]] = origins.tags.get(args[0]) or type(origins.tags[x])(
                is_constant=True
            )
        maker = pair[0] if name in QUOTIENTS else x
        numbers = origins.tags[maker].followers["entries"]()
        maps = origins.tags[maker].maps
        result = call(origins, function, *args)
        tag = origins.tags[result]
        assert tag.maps == maps and torch.equal(tag.followers["entries"](), numbers)


def test_every_factor_is_tested():
    assert {f for n in FACTORS + THREE for f in list_functions(n)} == functions.FACTORS
    assert {f for n in QUOTIENTS for f in list_functions(n)} == functions.QUOTIENTS


def test_every_product_is_listed():
    names = ("einsum", "matmul", "mm", "bmm", "baddbmm", "__matmul__")
    products = {f for n in names for f in list_functions(n)}
    assert products == functions.PRODUCTS
    convolutions = {F.conv1d, F.conv2d, F.conv3d}
    assert convolutions == functions.CONVOLUTIONS
    linear = {F.linear, *list_functions("addmm")}
    assert products | convolutions | linear == functions.MAPS


X3, X4, X5 = torch.randn(2, 4, 7), torch.randn(2, 4, 7, 6), torch.randn(2, 4, 7, 6, 5)


@pytest.mark.parametrize(
    ("function", "x"), [(F.conv1d, X3), (F.conv2d, X4), (F.conv3d, X5)], ids=["1d", "2d", "3d"]
)
def test_a_convolution_has_the_letters_of_its_channels(function, x):
    kernel = torch.randn(3, 4, *[1] * (x.ndim - 2))
    product = read_product(function, (x, kernel), {})
    first, _, result = product.letters
    spelled = torch.einsum(f"{first},{result[1]}{first[1]}->{result}", x, kernel.reshape(3, 4))
    torch.testing.assert_close(spelled, function(x, kernel))
    assert product.first is x and product.second is kernel
    assert read_product(function, (x[0], kernel), {}) is None  # one example without an axis


def test_products_of_other_forms_are_not_read():
    a, b = torch.randn(3, 4), torch.randn(4)
    assert read_product(torch.matmul, (a, b), {}) is None
    assert read_product(F.linear, (a, a[0]), {}) is None  # a product with a vector
    assert read_product(torch.einsum, ("ij,jk", a, a.T), {}) is None  # without a result
    assert read_product(torch.einsum, ("ij,jk,kl->il", a, a.T, a), {}) is None
    assert read_product(torch.einsum, (a, [0, 1], a.T, [1, 2], [0, 2]), {}) is None
    product = read_product(torch.addmm, (b[:3], a, a.T), {})
    assert product.first is a and product.letters == ("xy", "yz", "xz")
    linear = read_product(F.linear, (a,), {"weight": a, "bias": None})
    assert linear.letters == ("xy", "zy", "xz")


def test_the_factors_of_a_product_are_exchanged_with_their_letters():
    a, b = torch.randn(3, 4), torch.randn(4, 5)
    product = read_product(torch.mm, (a, b), {})
    swapped = product.swap()
    assert swapped.first is b and swapped.second is a and swapped.letters == ("yz", "xy", "xz")
    assert not product.is_elementwise()
    for letters, is_elementwise in (
        (("bn", "bnd", "bnd"), True),
        (("bnd", "bn", "bnd"), True),
        (("bnd", "bnd", "bn"), False),
        (("bn", "bd", "bnd"), False),
        (("bnd", "bd", "bn"), False),
    ):
        assert Product(a, b, letters).is_elementwise() == is_elementwise


def test_tensors_are_listed_wherever_they_stand():
    a, b, c = torch.ones(1), torch.ones(1, dtype=torch.int64), torch.ones(1, dtype=torch.complex64)
    values = (a, [b, {"c": c}], 3, None)
    assert [*map(id, functions.tensors_in(values))] == [id(a), id(b), id(c)]
    assert [*map(id, functions.floats_in(values))] == [id(a), id(c)]
