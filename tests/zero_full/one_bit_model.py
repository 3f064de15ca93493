"""1-bit Adam and LAMB and 0/1 Adam in fp64, on all ranks at once: what they come to, written down plainly."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

By = dict[str, Tensor]


@dataclass(frozen=True)
class Problem:
    """What is trained, and by which of them."""

    kind: str
    options: Mapping[str, Any]  # of the optimizer
    start: By  # what is trained, by name
    groups: Mapping[str, Mapping[str, Any]]  # the options of each one's group
    gradients: Callable[[int, int, By], By]  # of a step and a rank, which has these parameters
    clip: float = 0.0
    stage: int = 0
    live: Mapping[str, Tensor] = field(default_factory=dict)  # where momentum moves it, if not everywhere


def model_of(world: int, problem: Problem) -> "Model":
    """All ranks, before the first step."""
    return (LambModel if problem.kind == "OneBitLamb" else Model)(world, problem)


class Compressed:
    """The average at one bit each way, with the errors of all ranks."""

    def __init__(self, world: int, flat: bool, live: dict[str, Tensor]) -> None:
        self.world, self.live = world, live
        sizes = [int(each.sum()) for each in live.values()]
        total = sum(sizes)
        self.tensor = torch.cat([torch.full((n,), 0 if flat else i) for i, n in enumerate(sizes)])
        chunk = 8 * -(-total // (8 * world))
        self.part = self.tensor * world + torch.arange(total) // chunk
        self.worker, self.server = torch.zeros(world, total).double(), torch.zeros(total).double()

    def __call__(self, wanted: list[By]) -> By:
        """Everyone's; the same for all."""
        flats = torch.stack([torch.cat([w[name][live] for name, live in self.live.items()]) for w in wanted])
        if self.world == 1:
            return self._put(flats[0])
        said = []
        for rank, flat in enumerate(flats):
            asked = flat + self.worker[rank]
            said.append(_signs(asked, self.tensor))
            self.worker[rank] = asked - said[-1]
        asked = torch.stack(said).mean(0) + self.server
        answer = _signs(asked, self.part)
        self.server = asked - answer
        return self._put(answer)

    def _put(self, flat: Tensor) -> By:
        found = {}
        for name, live in self.live.items():
            found[name] = torch.zeros(live.shape).double()
            mine, flat = flat.split([int(live.sum()), flat.numel() - int(live.sum())])
            found[name][live] = mine
        return found


def _signs(values: Tensor, of: Tensor) -> Tensor:
    scales = {int(i): values[of == i].square().mean().sqrt() for i in of.unique()}
    spread = torch.stack([scales[int(i)] for i in of])
    return torch.where(values >= 0, spread, -spread)


class Model:
    """All ranks."""

    def __init__(self, world: int, problem: Problem) -> None:
        self.world, self.problem, self.o = world, problem, problem.options
        start = {name: problem.start[name].double() for name in sorted(problem.start)}
        self.names = list(start)
        self.x = [{n: start[n].clone() for n in start} for _ in range(world)]
        self.m = [self.zeros() for _ in range(world)]
        self.v = self.zeros()
        self.t, self.n, self.k = 0, dict.fromkeys(start, 0), dict.fromkeys(start, 0)
        everywhere = {n: torch.ones(start[n].shape, dtype=torch.bool) for n in start}
        self.live, self.flat = everywhere | dict(problem.live), not self.o.get("per_tensor_scales", True)
        self.forget()
        self.exact, self.meeting, self.counted, self.local = 1, 1, 0, 0
        self.kinds: list[str] = []  # of the steps
        self.norms: list[float] = []
        self.begin_walk()

    def forget(self) -> None:
        """No errors."""
        self.c = Compressed(self.world, self.flat, self.live)

    def begin_walk(self) -> None:
        """All ranks are together."""
        self.anchor = {n: self.x[0][n].clone() for n in self.names}
        self.u = [self.zeros() for _ in range(self.world)]
        self.walked, self.kept = dict.fromkeys(self.names, 0.0), dict.fromkeys(self.names, 1.0)

    def zeros(self) -> By:
        """In the place of every parameter."""
        return {name: torch.zeros(each.shape).double() for name, each in self.problem.start.items()}

    def group(self, name: str) -> Mapping[str, Any]:
        return self.problem.groups[name]

    def gradients(self, step: int) -> list[By]:
        own = [self.problem.gradients(step, rank, x) for rank, x in enumerate(self.x)]
        return [{n: g.double() for n, g in each.items() if n in self.names} for each in own]

    def clip(self, gradients: list[By]) -> list[By]:
        squares = [sum(float(g.square().sum()) for g in each.values()) for each in gradients]
        self.norms.append(math.sqrt(sum(squares) / len(squares)))
        factor = min(1.0, self.problem.clip / (self.norms[-1] + 1e-6)) if self.problem.clip else 1.0
        return [{n: g * factor for n, g in each.items()} for each in gradients]

    def averaged(self, step: int) -> By:
        own = self.gradients(step)
        zeros = self.zeros()
        used = [n for n in self.names if any(n in each for each in own)]
        mean = {n: torch.stack([each.get(n, zeros[n]) for each in own]).mean(0) for n in used}
        return self.clip([mean])[0]

    def rate(self, name: str) -> float:
        corrected = 1 - self.group(name)["betas"][0] ** self.n[name]
        return self.group(name)["lr"] / (corrected if self.o.get("bias_correction", True) else 1)

    def spread(self, name: str) -> Tensor:
        corrected = 1 - self.group(name)["betas"][1] ** self.k[name]
        if self.problem.stage == 1:  # everyone has the root in bf16
            corrected = corrected if self.o.get("bias_correction", True) else 1
            root = (self.v[name] / corrected).float().sqrt().to(torch.bfloat16).double()
            eps = self.group(name)["eps"]
            return (root * root + eps).sqrt() if self.o.get("eps_inside_sqrt") else root + eps
        v, eps = (
            self.v[name] / (corrected if self.o.get("bias_correction", True) else 1),
            self.group(name)["eps"],
        )
        return (v + eps).sqrt() if self.o.get("eps_inside_sqrt") else v.sqrt() + eps

    def move(self, name: str) -> None:
        if self.k[name]:
            decay = 1 - self.group(name)["lr"] * self.group(name)["weight_decay"]
            for x, m in zip(self.x, self.m, strict=True):
                x[name] = x[name] * decay - self.rate(name) * m[name] / self.spread(name)

    def learn(self, step: int) -> None:
        for name, g in self.averaged(step).items():
            self.n[name] += 1
            self.k[name] += 1
            b1, b2 = self.group(name)["betas"]
            self.v[name] = b2 * self.v[name] + (1 - b2) * g * g
            for m in self.m:
                m[name] = b1 * m[name] + (1 - b1) * g
            self.move(name)

    def known(self, *more: str) -> list[str]:
        return [n for n in self.names if self.n[n] or n in more]

    def remembered(self, step: int) -> list[By]:
        """Everyone's momentum with the own gradient of this step."""
        found = []
        for m, own in zip(self.m, self.clip(self.gradients(step)), strict=True):
            zero = torch.zeros(()).double()
            betas = {n: self.group(n)["betas"][0] for n in self.names}
            found.append({n: betas[n] * m[n] + (1 - betas[n]) * own.get(n, zero) for n in self.names})
        return found

    def step(self, step: int) -> None:
        """The next one, with the gradients of this number."""
        self.t += 1
        if self.problem.kind == "OneBitAdam":
            self.one_bit(step)
        elif self.t <= self.o["var_freeze_step"]:
            self.together(step)
        else:
            self.alone(step)

    def one_bit(self, step: int) -> None:
        if self.t <= self.o["freeze_step"]:
            self.kinds.append("exact")
            return self.learn(step)
        self.kinds.append("one bit")
        mean = self.c(self.remembered(step))
        for name in self.known():
            self.n[name] += 1
            for m in self.m:
                m[name] = mean[name] * (self.v[name] > 0)
            self.move(name)
        return None

    def together(self, step: int) -> None:
        if self.t % self.exact == 0:
            self.kinds.append("exact")
            self.learn(step)
            self.counted += 1
            if self.counted == self.o["var_update_scaler"]:
                self.counted, self.exact = 0, 2 * self.exact
            return
        self.kinds.append("one bit")
        own = self.clip(self.gradients(step))
        mean = self.c([{**self.zeros(), **each} for each in own])
        for name in self.known(*(n for each in own for n in each)):
            self.n[name] += 1
            b1 = self.group(name)["betas"][0]
            for m in self.m:
                m[name] = b1 * m[name] + (1 - b1) * mean[name] * (self.v[name] > 0)
            self.move(name)

    def alone(self, step: int) -> None:
        if self.t == self.o["var_freeze_step"] + 1:
            self.forget()
            self.begin_walk()
        self.m = self.remembered(step)
        for name in self.known():
            self.n[name] += 1
            self.move(name)
            self.walked[name] += self.rate(name)
            self.kept[name] *= 1 - self.group(name)["lr"] * self.group(name)["weight_decay"]
            for u, m in zip(self.u, self.m, strict=True):
                u[name] += self.rate(name) * m[name]
        if self.t % self.meeting == 0:
            self.kinds.append("meeting")
            self.meet()
        else:
            self.kinds.append("silent")
        self.local += 1
        if self.local == self.o["local_step_scaler"]:
            self.local, self.meeting = 0, min(2 * self.meeting, self.o["local_step_clipper"])

    def meet(self) -> None:
        rates = {n: self.walked[n] / self.meeting or 1.0 for n in self.names}
        mean = self.c([{n: u[n] / rates[n] for n in self.names} for u in self.u])
        for name in self.known():
            quiet = mean[name] * (self.v[name] > 0)
            for x, m in zip(self.x, self.m, strict=True):
                x[name] = self.anchor[name] * self.kept[name] - rates[name] * quiet / self.spread(name)
                m[name] = quiet / self.meeting
        self.begin_walk()


class LambModel(Model):
    """1-bit LAMB."""

    def __init__(self, world: int, problem: Problem) -> None:
        super().__init__(world, problem)
        defaults = {"min_coeff": 0.01, "max_coeff": 10.0, "coeff_beta": 0.9}
        factors = {"factor_max": 4.0, "factor_min": 0.5, "factor_threshold": 0.1}
        self.o = {"bias_correction": True, "eps_inside_sqrt": False, **defaults, **factors, **self.o}
        self.fresh, self.sizes = dict[str, Tensor](), dict[str, float]()
        self.learned: dict[str, tuple[float, float]] = {}
        self.last = dict.fromkeys(self.names, 1.0)
        self.coeffs: dict[str, float] = {}

    def root(self, v: Tensor, name: str) -> Tensor:
        eps = self.group(name)["eps"]
        return (v + eps).sqrt() if self.o["eps_inside_sqrt"] else v.sqrt() + eps

    def go(self, name: str, coeff: float) -> None:
        (b1, b2), lr = self.group(name)["betas"], self.group(name)["lr"]
        if self.o["bias_correction"]:
            lr *= math.sqrt(1 - b2 ** self.k[name]) / (1 - b1 ** self.n[name])
        self.coeffs[name] = coeff
        for x, m in zip(self.x, self.m, strict=True):
            x[name] = x[name] - lr * coeff * self.update(name, x, m)

    def update(self, name: str, x: By, m: By) -> Tensor:
        return m[name] / self.root(self.v[name], name) + self.group(name)["weight_decay"] * x[name]

    def step(self, step: int) -> None:
        """The next one, with the gradients of this number."""
        self.t += 1
        self.coeffs = {}
        if self.t <= self.o["freeze_step"]:
            self.kinds.append("exact")
            self.learn(step)
        else:
            self.kinds.append("one bit")
            self.at_one_bit(step)

    def learn(self, step: int) -> None:
        for name, g in self.averaged(step).items():
            self.n[name] += 1
            self.k[name] += 1
            b1, b2 = self.group(name)["betas"]
            self.v[name] = b2 * self.v[name] + (1 - b2) * g * g
            for m in self.m:
                m[name] = b1 * m[name] + (1 - b1) * g
            weight, change = self.x[0][name].norm(), self.update(name, self.x[0], self.m[0]).norm()
            coeff = 1.0
            if weight > 0 and change > 0:
                coeff = min(max(float(weight / change), self.o["min_coeff"]), self.o["max_coeff"])
                total, count = self.learned.get(name, (0.0, 0.0))
                beta = self.o["coeff_beta"]
                self.learned[name] = beta * total + (1 - beta) * coeff, beta * count + 1 - beta
            self.go(name, coeff)

    def at_one_bit(self, step: int) -> None:
        if not self.fresh:
            self.fresh = {name: self.v[name].clone() for name in self.known()}
            rms = {name: float(self.m[0][name].square().mean().sqrt()) for name in self.known()}
            usual = sum(rms.values()) / len(rms)
            self.sizes = {name: usual / rms[name] if self.flat else 1.0 for name in rms}
        wanted = self.remembered(step)
        mean = self.c([{n: w[n] * self.sizes.get(n, 1.0) for n in self.names} for w in wanted])
        for name in self.known():
            self.n[name] += 1
            b1, b2 = self.group(name)["betas"]
            new = mean[name] / self.sizes[name] * (self.v[name] > 0)
            g = (new - b1 * self.m[0][name]) / (1 - b1)
            self.fresh[name] = b2 * self.fresh[name] + (1 - b2) * g * g
            for m in self.m:
                m[name] = new
            self.go(name, self.coefficient(name))

    def coefficient(self, name: str) -> float:
        fresh, b2 = self.fresh[name], self.group(name)["betas"][1]
        if self.o["bias_correction"]:
            fresh = fresh * (1 - b2 ** self.k[name]) / (1 - b2 ** self.n[name])
        moves = self.v[name] > 0
        factor = (
            float((self.root(self.v[name], name) / self.root(fresh, name))[moves].max())
            if moves.any()
            else 1.0
        )
        along = float((self.m[0][name] / self.root(self.v[name], name)).norm())
        whole = float(self.update(name, self.x[0], self.m[0]).norm())
        if self.group(name)["weight_decay"] and whole:
            part = min(1.0, along / whole)
            factor = factor * part + 1 - part
        factor = min(max(factor, self.o["factor_min"]), self.o["factor_max"])
        change, last = self.o["factor_threshold"], self.last[name]
        self.last[name] = min(max(factor, last * (1 - change)), last * (1 + change))
        total, count = self.learned.get(name, (1.0, 1.0))
        return total / count * self.last[name]
