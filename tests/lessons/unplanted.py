"""Wrong answers that are in no museum, and what `check` must say of each; run it for those of one lesson."""

import contextlib
import io
import json
import sys
import tempfile
from pathlib import Path

from lessons import judge, replace
from lessons.exercise import find_lesson, unmarked
from lessons.last_words import Watch

# by lesson: the task, what stands in the answer once, what is written instead, a part of the first difference
MISTAKES = {
    "0": [
        ("adam", "lr, (beta1, beta2)", "lr, (beta2, beta1)", "`beta2` is 0.9"),
        ("average", ".div_(self.comm.world_size)", ".div_(2)", "each is 0.5 times that"),
    ],
    "1/2": [
        (
            "all_reduce",
            "pieces[comm.rank].copy_(reduce_scatter(comm, pieces))",
            "reduce_scatter(comm, pieces)",
            "`tensor` is [0, 1, 102",
        ),
        (
            "all_reduce",
            "    pieces[comm.rank].copy_(reduce_scatter(comm, pieces))\n",
            "    for _ in neighbours(comm):\n        comm.send(tensor, neighbours(comm)[1])\n"
            "        tensor += comm.receive(tensor, neighbours(comm)[0])\n",
            "calls send; the answer does never here",
        ),
        ("all_reduce", ".tensor_split(comm.world_size)", ".chunk(comm.world_size)", "`len(pieces)` is 2"),
    ],
    "1": [
        ("partition", "rank < remaining", "rank <= remaining", "`size` is 3"),
        ("reduce", ".div_(self.comm.world_size)", ".div_(len(grads))", "each is 2 times that"),
        ("reduce", "f.master.grad = my_grad", "f.grad = my_grad", "where the answer has nothing"),
    ],
    "2": [
        ("overlap", "(rank + 1) * slice_size)", "(rank + 1) * slice_size - 1)", "`high` is 3"),
        (
            "bucket",
            "bucket.reduced = True\n\n    def _add",
            "bucket.missing = 0\n\n    def _add",
            ".missing` is 0",
        ),
        ("bucket", ".reshape(-1) for w in", " for w in", "the same numbers in another shape; so line"),
    ],
    "3": [
        (
            "slice",
            "tensors_aligned([param.data], comm.world_size)",
            "tensors_aligned([param.data], 1)",
            "the last one is missing",
        ),
        (
            "before",
            "        for s in slices:\n            s.gather()",
            "        for s in slices[:1]:\n            s.gather()",
            "2 of 2 are not finite",
        ),
        (
            "next",
            "return self.recorded[here]\n",
            "return self.recorded[here][1:]\n",
            "`len(the result)` is 0",
        ),
        (
            "ahead",
            "self.current += (tuple(slices),)\n        self._collect(slices)",
            "self.current = (tuple(slices),)\n        self._collect(slices)",
            "in its 2nd call, `self.current[0][0].name` is 1.weight",
        ),
    ],
    "4": [
        ("scale", "= self.steps\n", "= self.steps + 1\n", "in its 3rd call, `self.last_overflow` is 3"),
        ("scale", "        self.steps += 1\n", "            self.steps += 1\n", "changes `self.steps`"),
        (
            "overflow",
            "all_reduce(bad) > 0",
            "all_reduce(bad) == self.comm.world_size",
            "returns a value which is False",
        ),
    ],
    "5": [
        ("down", "(window, part, piece, landing)", "(window, part, piece, piece)", "is the same memory as"),
        (
            "up",
            "f.master.grad = None\n\n    def hold",
            "f.grad = None\n\n    def hold",
            "no line of `gather_parameters`",
        ),
    ],
    "6": [
        (
            "serve",
            "self.lengths[self.comm.rank]\n",
            "self.lengths[0]\n",
            "rank 1 (right on rank 0), `lengths[0]` is 8",
        ),
        ("interval", "counted == self.patience", "counted > self.patience", "changes `self.length`"),
        ("meet", "copy_(mean / self.walked)", "copy_(mean)", "each is 4 times that"),
        (
            "meet",
            ".mul_(self.shrunk).addcdiv_(mean, self.spread(), value=-1)\n"
            "        self.m.copy_(mean / self.walked)\n        self.anchor.copy_(self.x)\n",
            "\n        self.anchor.copy_(self.x)\n        self.m.copy_(mean / self.walked)\n"
            "        self.x.mul_(self.shrunk).addcdiv_(mean, self.spread(), value=-1)\n",
            "no line of `meet` on rank 0 changes `self.anchor`",
        ),
    ],
    "7": [
        ("work", "2 * large + small", "2 * small + large", "returns a value which is 36"),
        (
            "back",
            "return self.comm.all_to_all(back, [part.numel() for part in outgoing])",
            "return back",
            "`visit` on rank 0",
        ),
        ("orthogonalize", "beta=B, alpha=C", "beta=C, alpha=B", "`factor` is"),
    ],
    "8": [
        ("back", "return grad, None  #", "return grad / 2, None  #", "each is 0.5 times that"),
        (
            "norm",
            "float((of_cut + of_whole).sqrt())",
            "float(of_cut + of_whole)",
            "returns a value which is 714",
        ),
    ],
    "9": [
        ("layers", "rank * size + min(rank, more)", "rank * size + more", "`starts[0]` is 2"),
        ("forward", "self.kept[i] = x, y", "self.kept[i] = y, x", "is float32, where the answer has int64"),
    ],
    "10": [
        ("forward", "return run(*inputs)", "return run(*inputs) * 2", "each is 2 times that"),
        ("backward", "output.backward(grad)", "output.backward(-grad)", "every sign is turned"),
        ("interval", "range(1, layers + 1)", "range(2, layers + 1)", "returns a value which is 2"),
    ],
    "11": [
        ("segment", "if size < OWN_SEGMENT:", "if size <= OWN_SEGMENT:", "10485760"),
        ("split", "Block(block.start + size, rest", "Block(block.start, rest", "start"),
    ],
}


def judged(number: str) -> list[tuple[list[str], str]]:
    """The tasks that are named for each of a lesson's mistakes, and the first difference."""
    lesson, found = find_lesson(number), []
    for _, right, wrong, _ in MISTAKES[number]:
        texts = {answer.name: unmarked(answer.read_text(encoding="utf-8")) for answer, _ in lesson.files}
        assert sum(text.count(right) for text in texts.values()) == 1, right
        with tempfile.TemporaryDirectory() as folder:
            works = [Path(folder) / name for name in texts]
            for work in works:
                work.write_text(texts[work.name].replace(right, wrong), encoding="utf-8")
            places = {f"zero_min.{work.stem}": str(work) for work in works}
            reporter = judge.Reporter(Watch(Path(folder) / "words"), works, lesson=lesson)
            with replace.swapped(places), contextlib.redirect_stdout(io.StringIO()):
                judge.run_task_tests(reporter, lesson, "-x")
                seen = judge.judged(lesson, reporter)
            found.append((seen.tasks, seen.evidence.words if seen.evidence else ""))
    return found


if __name__ == "__main__":
    print(json.dumps(judged(sys.argv[1])))
