"""The two ways to attend with log-sum-exps agree, and parts of a context add up to the whole."""

from __future__ import annotations

import pytest
import torch

from daskinfer.engines.lm import attention
from daskinfer.engines.lm.attention import attention_with_sums


def made(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def general(*args: object, **kwargs: object) -> tuple[torch.Tensor, torch.Tensor]:
    """The implementation for other devices, on the CPU: it is chosen where keys and values differ in width."""
    query, keys, values, *rest = args
    assert isinstance(values, torch.Tensor)
    wide = torch.cat([values, torch.zeros_like(values[..., :1])], dim=-1)
    o, lse = attention_with_sums(query, keys, wide, *rest, **kwargs)  # type: ignore[arg-type]
    return o[..., :-1], lse


@pytest.mark.parametrize("heads", [2, 6])
@pytest.mark.parametrize(("causal", "masked"), [(False, False), (False, True), (True, False)])
def test_the_cpu_and_the_general_way_agree(heads: int, causal: bool, masked: bool) -> None:
    query, keys, values = made(2, heads, 5, 8), made(2, 2, 5, 8, seed=1), made(2, 2, 5, 8, seed=2)
    mask = torch.zeros(5, 5).masked_fill_(torch.ones(5, 5).triu(1) > 0, -torch.inf) if masked else None
    ours, theirs = (f(query, keys, values, mask, None, causal=causal) for f in (attention_with_sums, general))
    torch.testing.assert_close(ours[0], theirs[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours[1], theirs[1], atol=1e-5, rtol=1e-5)


def test_parts_add_up() -> None:
    query, keys, values = made(1, 4, 3, 8), made(1, 2, 20, 8, seed=1), made(1, 2, 20, 8, seed=2)
    whole, total = attention_with_sums(query, keys, values, None, 0.3)
    parts = [attention_with_sums(query, keys[:, :, a:b], values[:, :, a:b], None, 0.3) for a, b in ((0, 7), (7, 20))]
    sums = torch.logaddexp(parts[0][1], parts[1][1])
    added = sum(o * (lse - sums).exp()[..., None] for o, lse in parts)
    torch.testing.assert_close(sums, total, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(added, whole, atol=1e-5, rtol=1e-5)


def test_other_devices_get_no_cpu_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: object, **kwargs: object) -> None:
        raise AssertionError("the CPU's own operation was used")

    monkeypatch.setattr(attention, "_flash_cpu", never)
    general(made(1, 2, 3, 8), made(1, 2, 3, 8), made(1, 2, 3, 8), None, None)
