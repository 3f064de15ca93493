"""Adam and AdamW against PyTorch's, and what they keep in memory."""

import pytest
import torch
from torch import Tensor, nn

from zero_min.adam import Adam, AdamW, clip_by_global_norm
from zero_min.ledger import held

OPTIONS = [
    {},
    {"lr": 0.1, "betas": (0.8, 0.99), "eps": 1e-6},
    {"weight_decay": 0.1},
    {"lr": 0.05, "betas": (0.0, 0.5), "weight_decay": 0.3},
]


def walk(optimizer_class: type, options: dict, steps: int = 50) -> list[Tensor]:
    """Fifty steps down a bumpy function, from the same start."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(5, 3), (7,), (), (0, 2)]
    params = [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64)) for shape in shapes]
    optimizer = optimizer_class([{"params": params}], **options)
    for step in range(steps):
        loss = sum((p.sin() * (step + 1 + i)).sum() + p.square().sum() for i, p in enumerate(params))
        for p in params:
            p.grad = None
        loss.backward()
        optimizer.step()
    return [p.detach() for p in params]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(
    ("ours", "theirs"), [(Adam, torch.optim.Adam), (AdamW, torch.optim.AdamW)], ids=["adam", "adamw"]
)
def test_fifty_steps_equal_torch(ours: type, theirs: type, options: dict) -> None:
    options = {"weight_decay": 0.0, **options}
    for got, want in zip(walk(ours, options), walk(theirs, options), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_weight_decay_of_adam_and_adamw_differ() -> None:
    options = {"weight_decay": 0.1}
    assert not torch.allclose(walk(Adam, options)[0], walk(AdamW, options)[0], atol=1e-3)


def test_adam_keeps_two_numbers_a_parameter() -> None:
    params = [nn.Parameter(torch.zeros(10, 3)), nn.Parameter(torch.zeros(5))]
    assert held(Adam([{"params": params}]).state()) == 2 * held(params)


def test_groups_may_set_their_own_options_and_only_known_ones() -> None:
    p = nn.Parameter(torch.ones(2))
    adam = Adam([{"params": [p], "lr": 0.5}], lr=0.1)
    assert adam.groups[0]["lr"] == 0.5
    with pytest.raises(ValueError, match="unknown option momentum; a group may set lr, betas"):
        Adam([{"params": [p], "momentum": 0.9}])


def test_a_parameter_without_gradient_stays() -> None:
    p = nn.Parameter(torch.ones(2))
    Adam([{"params": [p]}]).step()
    assert torch.equal(p, torch.ones(2))


def test_clipping_is_torch_s() -> None:
    grads = [torch.full((3,), 2.0, dtype=torch.float64), torch.full((2, 2), -1.0, dtype=torch.float64)]
    params = [nn.Parameter(torch.zeros_like(g)) for g in grads]
    for p, g in zip(params, grads, strict=True):
        p.grad = g.clone()
    want = nn.utils.clip_grad_norm_(params, 1.0)
    assert clip_by_global_norm(grads, 1.0) == pytest.approx(float(want), rel=1e-12)
    for p, g in zip(params, grads, strict=True):
        torch.testing.assert_close(g, p.grad, rtol=1e-12, atol=0)
    small = [torch.full((3,), 1e-3)]
    clip_by_global_norm(small, 1.0)
    assert torch.equal(small[0], torch.full((3,), 1e-3))  # below the limit nothing changes
