"""1-bit and 0/1 Adam in fp64, on all ranks at once: what the algorithms come to, written down plainly."""

import math
from typing import Any

import torch
from torch import Tensor

from tests.zero_full.one_bit_runs import GROUPS, SCHEDULES, SECOND, SHAPES, Run, Shapes, numbers

NAMES = sorted(name for name, shape in SHAPES.items() if math.prod(shape) and name != "frozen")
By = dict[str, Tensor]


class Compressed:
    """The average at one bit each way, with the errors of all ranks."""

    def __init__(self, world: int, flat: bool, live: dict[str, Tensor]) -> None:
        self.world, self.live = world, live
        sizes = [int(live[name].sum()) for name in NAMES]
        total = sum(sizes)
        self.tensor = torch.cat([torch.full((n,), 0 if flat else i) for i, n in enumerate(sizes)])
        chunk = 8 * -(-total // (8 * world))
        self.part = self.tensor * world + torch.arange(total) // chunk
        self.worker, self.server = torch.zeros(world, total).double(), torch.zeros(total).double()

    def __call__(self, wanted: list[By]) -> By:
        """Everyone's; the same for all."""
        flats = torch.stack([torch.cat([w[name][self.live[name]] for name in NAMES]) for w in wanted])
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
        for name in NAMES:
            found[name] = torch.zeros(SHAPES[name]).double()
            mine, flat = flat.split([int(self.live[name].sum()), flat.numel() - int(self.live[name].sum())])
            found[name][self.live[name]] = mine
        return found


def _signs(values: Tensor, of: Tensor) -> Tensor:
    scales = {int(i): values[of == i].square().mean().sqrt() for i in of.unique()}
    spread = torch.stack([scales[int(i)] for i in of])
    return torch.where(values >= 0, spread, -spread)


class Model:
    """All ranks."""

    def __init__(self, world: int, run: Run) -> None:
        self.world, self.run, self.o = world, run, {**SCHEDULES[run.kind], **run.options}
        start = {name: p.detach().double() for name, p in Shapes().parts.items()}
        self.x = [{n: start[n].clone() for n in NAMES} for _ in range(world)]
        self.m = [{n: torch.zeros(SHAPES[n]).double() for n in NAMES} for _ in range(world)]
        self.v = {n: torch.zeros(SHAPES[n]).double() for n in NAMES}
        self.t, self.n, self.k = 0, dict.fromkeys(NAMES, 0), dict.fromkeys(NAMES, 0)
        live = {n: torch.ones(SHAPES[n], dtype=torch.bool) for n in NAMES}
        if run.masked:
            live["wide"] = run.mask()
        self.live, self.flat = live, not self.o.get("per_tensor_scales", True)
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
        self.anchor = {n: self.x[0][n].clone() for n in NAMES}
        self.u = [{n: torch.zeros(SHAPES[n]).double() for n in NAMES} for _ in range(self.world)]
        self.walked, self.kept = dict.fromkeys(NAMES, 0.0), dict.fromkeys(NAMES, 1.0)

    def group(self, name: str) -> dict[str, Any]:
        return GROUPS[name in SECOND]

    def gradients(self, step: int) -> list[By]:
        found = []
        for rank in range(self.world):
            total: By = {}
            for micro in range(self.run.micro_batches):
                for name, each in numbers(step, micro, rank).items():
                    times = (2 if name == "tied" else 1) / self.run.micro_batches
                    total[name] = total.get(name, 0) + times * each.double()
            found.append({n: g for n, g in total.items() if n in NAMES})
        return found

    def clip(self, gradients: list[By]) -> list[By]:
        squares = [sum(float(g.square().sum()) for g in each.values()) for each in gradients]
        self.norms.append(math.sqrt(sum(squares) / len(squares)))
        factor = min(1.0, self.run.clip / (self.norms[-1] + 1e-6)) if self.run.clip else 1.0
        return [{n: g * factor for n, g in each.items()} for each in gradients]

    def averaged(self, step: int) -> By:
        own = self.gradients(step)
        mean = {n: torch.stack([each[n] for each in own]).mean(0) for n in own[0]}
        return self.clip([mean])[0]

    def rate(self, name: str) -> float:
        corrected = 1 - self.group(name)["betas"][0] ** self.n[name]
        return self.group(name)["lr"] / (corrected if self.o.get("bias_correction", True) else 1)

    def spread(self, name: str) -> Tensor:
        corrected = 1 - self.group(name)["betas"][1] ** self.k[name]
        if self.run.stage == 1:  # everyone has the root in bf16
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
        return [n for n in NAMES if self.n[n] or n in more]

    def remembered(self, step: int) -> list[By]:
        """Everyone's momentum with the own gradient of this step."""
        found = []
        for m, own in zip(self.m, self.clip(self.gradients(step)), strict=True):
            zero = torch.zeros(()).double()
            betas = {n: self.group(n)["betas"][0] for n in NAMES}
            found.append({n: betas[n] * m[n] + (1 - betas[n]) * own.get(n, zero) for n in NAMES})
        return found

    def step(self, step: int) -> None:
        """The next one, with the gradients of this number."""
        self.t += 1
        if self.run.kind == "OneBitAdam":
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
        zeros = {n: torch.zeros(SHAPES[n]).double() for n in NAMES}
        mean = self.c([{**zeros, **each} for each in own])
        for name in self.known(*own[0]):
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
        rates = {n: self.walked[n] / self.meeting or 1.0 for n in NAMES}
        mean = self.c([{n: u[n] / rates[n] for n in NAMES} for u in self.u])
        for name in self.known():
            quiet = mean[name] * (self.v[name] > 0)
            for x, m in zip(self.x, self.m, strict=True):
                x[name] = self.anchor[name] * self.kept[name] - rates[name] * quiet / self.spread(name)
                m[name] = quiet / self.meeting
        self.begin_walk()
