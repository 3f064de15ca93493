"""0/1 Adam beside the same algorithm in plain tensors. It holds the answers, so a release goes without it."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.zero_min.test_zero_one_adam import FAST, Line, walk
from zero_min import ZeroOneAdam, run_world


def plain_zero_one_adam(steps: int, options: dict[str, Any]) -> list[Tensor]:
    """The algorithm for one rank, written down straight: no compression, so no errors."""
    o = {"weight_decay": 0.0, "eps": 1e-8, **options}
    lr, (b1, b2) = o["lr"], o["betas"]
    model = Line()
    params = [p.detach() for p in model.parameters()]
    x = torch.cat([p.reshape(-1) for p in params])
    m, v, u, L = torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(x), 0.0
    k_v, c_v, k_l, c_l, seen, path, anchor, shrunk = 1, 0, 1, 0, 0, [], x.clone(), 1.0
    for t in range(1, steps + 1):
        with torch.no_grad():
            for p, piece in zip(model.parameters(), x.split([p.numel() for p in params]), strict=True):
                p.copy_(piece.view_as(p))
        model.zero_grad()
        model(t - 1, 0).backward()
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
        g = torch.cat([grad.reshape(-1) for grad in grads])
        m = b1 * m + (1 - b1) * g
        if t <= o["freeze_step"] and t % k_v == 0:
            v, seen = b2 * v + (1 - b2) * g * g, seen + 1
            c_v += 1
            if c_v == o["kappa"]:
                c_v, k_v = 0, 2 * k_v
        rate, spread = lr / (1 - b1**t), (v / (1 - b2**seen)).sqrt() + o["eps"]
        x = x * (1 - lr * o["weight_decay"]) - rate * m / spread
        if t <= o["freeze_step"]:
            anchor = x.clone()
        else:
            u, L, shrunk = u + rate * m, L + rate, shrunk * (1 - lr * o["weight_decay"])
            if t % k_l == 0:
                x = anchor * shrunk - u / spread
                m, u, L, anchor, shrunk = u / L, torch.zeros_like(u), 0.0, x.clone(), 1.0
            c_l += 1
            if c_l == o["local_kappa"]:
                c_l, k_l = 0, min(o["local_clip"], 2 * k_l)
        path.append(x.clone())
    return path


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_one_rank_is_the_uncompressed_algorithm(decay: float) -> None:
    options = {**FAST, "weight_decay": decay}
    (got,) = run_world(walk, 1, ZeroOneAdam, 40, options)
    for step, want in enumerate(plain_zero_one_adam(40, options)):
        torch.testing.assert_close(got[step]["x"], want, rtol=1e-10, atol=1e-12)
    assert all(entry["sent"] == 0 for entry in got)
