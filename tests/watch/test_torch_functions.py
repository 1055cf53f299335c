"""Which axes two multiplied tensors have in common, by the letters of their product."""

import pytest

torch = pytest.importorskip("torch")

from rank_collapse.watch.torch_functions import read_product  # noqa: E402

EQUATIONS = [
    ("...nd,...md->...nm", (2, 3, 5, 4), (2, 3, 6, 4)),
    ("...nd,...md->...nm", (2, 3, 5, 4), (3, 6, 4)),  # dots of two axes and of one, of the right
    ("...nd,...md->...nm", (3, 5, 4), (7, 2, 3, 6, 4)),
    ("n...d,m...d->...nm", (5, 3, 4), (6, 2, 3, 4)),
    ("...nd,md->...nm", (2, 3, 5, 4), (6, 4)),
    ("...nm,...mA->A...n", (2, 5, 6), (3, 2, 6, 4)),
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
