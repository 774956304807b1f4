"""Compiled operations compute what tensor operations do, in one thread and in several."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from daskinfer.engines.hf import Rounding
from daskinfer.engines.lm.compiled import CompiledOperations, CompiledRounding
from daskinfer.engines.lm.kernels import gathered
from daskinfer.engines.lm.operations import Norm, Operations

pytestmark = pytest.mark.usefixtures("require_kernel")
PLAIN = Operations()
TOKENS = [1, 7, 200]  # 200 of these widths are shared among threads


@pytest.fixture
def compiled() -> CompiledOperations:
    return CompiledOperations(gathered())


@pytest.fixture
def rounding() -> CompiledRounding:
    return CompiledRounding(gathered())


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("width", [1, 13, 96])
def test_add_and_norm(compiled: CompiledOperations, tokens: int, width: int) -> None:
    norm = Norm(torch.rand(width) + 0.5, torch.tensor([1e-5]))
    given, added = torch.randn(tokens, width), torch.randn(tokens, width)
    for more in (None, added):
        ours, theirs = given.clone(), given.clone()
        found, expected = compiled.add_and_norm(ours, more, norm), PLAIN.add_and_norm(theirs, more, norm)
        torch.testing.assert_close(found, expected)
        assert torch.equal(ours, theirs), "what was added stays in x"


def test_a_row_of_zeros_is_normed_by_its_epsilon(compiled: CompiledOperations) -> None:
    norm = Norm(torch.ones(4), torch.tensor([1e-6]))
    assert torch.equal(compiled.add_and_norm(torch.zeros(2, 4), None, norm), torch.zeros(2, 4))
    tiny = compiled.add_and_norm(torch.full((1, 4), 1e-4), None, norm)
    torch.testing.assert_close(tiny, torch.full((1, 4), 1e-4 / math.sqrt(1e-8 + 1e-6)))


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("heads", "turned", "width"), [(3, 2, 2), (15, 12, 64), (4, 4, 10)])
def test_turn(compiled: CompiledOperations, tokens: int, normed: bool, heads: int, turned: int, width: int) -> None:
    given = torch.randn(tokens, heads, width)
    cos, sin = torch.randn(tokens, 1, width), torch.randn(tokens, 1, width)
    norm = Norm(torch.rand(turned, width) + 0.5, torch.rand(turned, 1) / 100) if normed else None
    ours = given.clone()
    torch.testing.assert_close(
        compiled.turn(ours, turned, norm, cos, sin), PLAIN.turn(given, turned, norm, cos, sin), atol=1e-5, rtol=1e-5
    )
    assert torch.equal(ours[:, turned:], given[:, turned:]), "values are not turned"


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("width", [1, 13, 96])
def test_gate(compiled: CompiledOperations, tokens: int, width: int) -> None:
    both = torch.randn(tokens, 2 * width) * 5
    torch.testing.assert_close(compiled.gate(both, F.silu), PLAIN.gate(both, F.silu))
    torch.testing.assert_close(compiled.gate(both, F.gelu), PLAIN.gate(both, F.gelu))


def test_the_gate_of_large_numbers(compiled: CompiledOperations) -> None:
    gates = torch.tensor([-1e30, -200.0, -89.0, -88.0, -50.0, -0.0, 0.0, 1e-30, 50.0, 88.0, 200.0, 1e30])
    found = compiled.gate(torch.cat((gates, torch.ones_like(gates)))[None], F.silu)
    # below -88 the answer is 0 for all that float32 can tell: e**88 is the most that is divided by
    torch.testing.assert_close(found[0, 1:], F.silu(gates)[1:], atol=1e-35, rtol=5e-6)
    assert abs(float(found[0, 0])) < 1e-7


def test_the_gate_is_exact_to_rounding(compiled: CompiledOperations) -> None:
    gates = torch.linspace(-20, 20, 40_001)
    found = compiled.gate(torch.cat((gates, torch.ones_like(gates)))[None], F.silu)[0].double()
    exact = gates.double() / (1 + torch.exp(-gates.double()))
    error = ((found - exact) / exact)[gates != 0].abs().max()
    assert float(error) < 1.5e-6


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_stays_in_its_row(compiled: CompiledOperations, bad: float) -> None:
    x = torch.randn(3, 64)
    x[1, 5] = bad
    cos = sin = torch.ones(3, 1, 32)
    made = {
        "norm": compiled.add_and_norm(x.clone(), None, Norm(torch.ones(64), torch.tensor([1e-5]))),
        "turn": compiled.turn(x.clone().view(3, 2, 32), 2, None, cos, sin).reshape(3, 64),
        "gate": compiled.gate(x, F.silu),
    }
    for name, out in made.items():
        finite = out.isfinite().all(dim=1).tolist()
        assert finite == [True, False, True], name


def test_tensors_of_another_layout_are_refused(compiled: CompiledOperations) -> None:
    norm = Norm(torch.ones(4), torch.tensor([1e-6]))
    x = torch.zeros(3, 4)
    for other in (torch.zeros(4, 3).t(), torch.zeros(3, 4, dtype=torch.float64), torch.zeros(2, 4)):
        with pytest.raises(ValueError, match="one number behind the other"):
            compiled.add_and_norm(x, other, norm)
    with pytest.raises(ValueError, match="one number behind the other"):
        compiled.gate(torch.zeros(8, 3).t(), F.silu)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("width", [1, 13, 96])
@pytest.mark.parametrize("with_bias", [False, True])
def test_rounding(rounding: CompiledRounding, tokens: int, width: int, with_bias: bool) -> None:
    x, bias = torch.randn(tokens, width), torch.randn(width) if with_bias else None
    x[0] = 0
    (codes, scale), (expected, expected_scale) = rounding.codes(x), Rounding().codes(x)
    torch.testing.assert_close(scale, expected_scale)
    assert (codes.int() - expected.int()).abs().max() <= 1
    assert (codes != expected).sum() <= 1 + codes.numel() // 1000, "they differ where float rounding decides"
    product = torch.randn(tokens, width)
    torch.testing.assert_close(
        rounding.numbers(product.clone(), scale, bias), Rounding().numbers(product.clone(), scale, bias)
    )


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_rounding_shows_what_is_no_number(rounding: CompiledRounding, bad: float) -> None:
    x = torch.randn(3, 64)
    x[1, 5] = bad
    for way in (rounding, Rounding()):
        assert way.codes(x)[1].isfinite()[:, 0].tolist() == [True, False, True]


def test_rounding_takes_any_layout(rounding: CompiledRounding) -> None:
    x = torch.randn(8, 6)
    assert torch.equal(rounding.codes(x.t())[0], rounding.codes(x.t().contiguous())[0])
