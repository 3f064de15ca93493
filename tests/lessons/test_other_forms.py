"""Right answers that are written in another way than the answer key pass the task tests."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lessons import exercise, replace
from lessons.registry import ROOT
from lessons.run_judge import QUICK
from tests import rotation

FORMS = {  # by lesson, task by task: the lines in the place of the answer key's
    "8": {
        "enter": "total = grad.contiguous().clone()\nctx.comm.all_reduce(total)\nreturn total, None",
        "leave": "whole = torch.empty(comm.world_size, *term.shape, dtype=term.dtype)\n"
        "comm.all_gather(whole, term.contiguous())\nreturn whole.sum(0)",
        "back": "return grad.clone(), None",
        "columns": "rows = weight.shape[0] // comm.world_size\n"
        "mine = slice(comm.rank * rows, (comm.rank + 1) * rows)\n"
        "self.weight = nn.Parameter(weight.detach()[mine].clone())\n"
        "self.bias = nn.Parameter(bias.detach()[mine].clone())",
        "rows": "return self.bias + leave(x @ self.weight.T, self.comm)",
        "heads": "parts = [part.chunk(ranks) for part in qkv.chunk(3)]\n"
        "return torch.cat([part[rank] for rank in range(ranks) for part in parts])",
        "norm": "total = torch.stack([p.grad.double().norm() ** 2 for p in cut]).sum().view(1)\n"
        "comm.all_reduce(total)\n"
        "total += sum(p.grad.double().norm() ** 2 for p in whole)\n"
        "return total.sqrt().item()",
    },
    "9": {
        "layers": "chunks = torch.arange(layers).tensor_split(ranks)\n"
        "return [range(int(c[0]), int(c[-1]) + 1) for c in chunks]",
        "gpipe": "order = [('F', i) for i in range(micro_batches)]\n"
        "return order + [('B', i) for i in reversed(range(micro_batches))]",
        "one_f_one_b": "order, f, b = [], 0, 0\n"
        "while b < micro_batches:\n"
        "    if f < micro_batches and f - b < ranks - rank:\n"
        "        order.append(('F', f))\n"
        "        f += 1\n"
        "    else:\n"
        "        order.append(('B', b))\n"
        "        b += 1\n"
        "return order",
        "forward": "if self.stage.first:\n"
        "    x = tokens\n"
        "else:\n"
        "    x = self.comm.receive(like, rank - 1)\n"
        "    x.requires_grad = True\n"
        "y = self.stage(x, self.targets[i])\n"
        "self.kept[i] = (x, y)\n"
        "if not self.stage.last:\n"
        "    self.comm.send(y.detach(), rank + 1)",
        "backward": "x, y = self.kept[i]\n"
        "del self.kept[i]\n"
        "last = self.stage.last\n"
        "grad = torch.tensor(1 / self.micro_batches) if last else self.comm.receive(y, rank + 1)\n"
        "torch.autograd.backward([y], [grad])\n"
        "if rank > 0:\n"
        "    self.comm.send(x.grad, rank - 1)",
        "tie": "other = last if rank == first else first\n"
        "self.comm.send(grad, other)\n"
        "grad.add_(self.comm.receive(grad, other))",
        "bubble": "end = max(row[-1].end for row in rows)\n"
        "idle = [end - sum(box.end - box.start for box in row) for row in rows]\n"
        "return sum(idle) / end / len(rows)",
    },
    "10": {
        "meter": "memory = tensor.untyped_storage()\n"
        "at, known = memory.data_ptr(), addresses(self.model)\n"
        "if at in known or at in self.kept:\n"
        "    return tensor\n"
        "self.kept[at] = len(memory)\n"
        "return tensor",
        "forward": "ctx.save_for_backward(*inputs)\n"
        "ctx.run = run\n"
        "ctx.random = torch.random.get_rng_state()\n"
        "with torch.no_grad():\n"
        "    output = run(*inputs)\n"
        "return output",
        "again": "now, inputs = torch.get_rng_state(), []\n"
        "for x in ctx.saved_tensors:\n"
        "    leaf = x.detach()\n"
        "    leaf.requires_grad = x.requires_grad\n"
        "    inputs.append(leaf)\n"
        "torch.set_rng_state(ctx.random)\n"
        "with torch.set_grad_enabled(True):\n"
        "    output = ctx.run(*inputs)\n"
        "torch.set_rng_state(now)\n"
        "return inputs, output",
        "backward": "inputs, output = Checkpoint.again(ctx)\n"
        "torch.autograd.backward([output], [grad])\n"
        "return (None, None, *[x.grad for x in inputs])",
        "interval": "best, fewest = 0, float('inf')\n"
        "for m in range(1, layers + 1):\n"
        "    segments = (layers + m - 1) // m\n"
        "    nbytes = segments * boundary + m * block\n"
        "    if nbytes < fewest:\n"
        "        best, fewest = m, nbytes\n"
        "return best",
        "to_host": "stays = tensor.untyped_storage().data_ptr() in addresses(self.model)\n"
        "if stays or tensor.numel() * tensor.element_size() < self.smallest:\n"
        "    return tensor\n"
        "copy = self.copied(tensor.flatten())\n"
        "return {'copy': copy, 'like': (tuple(tensor.shape), tensor.device)}",
        "from_host": "if not isinstance(packed, dict):\n"
        "    return packed\n"
        "self.host.wait()\n"
        "copy, (shape, device) = packed['copy'], packed['like']\n"
        "room = torch.zeros(copy.numel(), dtype=copy.dtype, device=device)\n"
        "self.host.up(copy, room)\n"
        "return room.reshape(shape)",
    },
    "11": {
        "block": "return SMALLEST * max(1, (nbytes + SMALLEST - 1) // SMALLEST)",
        "segment": "if size > SMALL:\n"
        "    return LARGE_SEGMENT if size < OWN_SEGMENT else size + -size % OWN_STEP\n"
        "return SMALL_SEGMENT",
        "find": "for block in sorted(self.free, key=lambda each: (each.size, each.start)):\n"
        "    if block.size >= size and block.small is (size <= SMALL):\n"
        "        return block\n"
        "return None",
        "split": "least, rest = SMALLEST if block.small else SMALL + 1, block.size - size\n"
        "if rest < least:\n"
        "    return\n"
        "new = Block(block.start + size, rest, block.small)\n"
        "new.before, new.after = block, block.after\n"
        "if new.after:\n"
        "    new.after.before = new\n"
        "block.after, block.size = new, size\n"
        "self.free.insert(0, new)",
        "merge": "first = block.before if block.before in self.free else block\n"
        "gone = [each for each in (block.after, first) if each in self.free]\n"
        "self.free = [each for each in self.free if each not in gone]\n"
        "if block.after in gone:\n"
        "    self._join(block)\n"
        "if first is not block:\n"
        "    self._join(first)\n"
        "return first",
    },
}


@pytest.mark.parametrize("number", rotation.one_of(list(FORMS)))
def test_a_right_answer_in_another_form_passes(number: str, tmp_path: Path) -> None:
    lesson = exercise.find_lesson(number)
    assert list(FORMS[number]) == exercise.tasks(lesson)
    ((answer, _),) = lesson.files
    lines = exercise.blank(answer, lesson.number).splitlines()
    for task, form in FORMS[number].items():
        (at,) = [i for i, line in enumerate(lines) if exercise.blank_line(lesson.number, task) in line]
        margin = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
        lines[at : at + 1] = [margin + line for line in form.splitlines()]
    file = tmp_path / answer.name
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    command = [sys.executable, "-m", "lessons.judge", str(tmp_path / "words"), "--tasks", number]
    env = {**os.environ, **replace.environment({f"zero_min.{answer.stem}": str(file)}), **QUICK}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and "failed: 0" in done.stdout, done.stdout + done.stderr
