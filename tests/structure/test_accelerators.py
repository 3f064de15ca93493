"""zero_full asks torch.accelerator for devices, streams and memory, and names no kind of device."""

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "zero_full"
NAMES_CUDA = {  # files that do, with the reason
    "commands.py": "the operators are compiled for the CPU and for CUDA; a plan may be of a device not here",
    "config/messages.py": "cuda_aware and cuda_visible_devices are keys of DeepSpeed's",
    "construct/recorded_tensor.py": "Tensor.is_cuda is a property of a tensor",
    "construct/torch_functions.py": "Tensor.cuda is recorded like any other method of a tensor",
    "doctor/machine.py": "tells why a build of torch for CUDA or ROCm finds no device",
    "engine/accelerator.py": "torch.cuda.CUDAGraph is the remedy in a message of DeepSpeed's accelerator",
    "fit/choice.py": "the device of a machine, which need not be this one",
    "offload/arena.py": "torch has no call that page-locks memory which exists; CUDA's runtime has",
    "optim/build.py": "the kinds of devices on which torch has a fused kernel",
    "optim/one_bit.py": "cuda_aware is an argument of DeepSpeed's",
    "optim/one_bit_lamb.py": "cuda_aware is an argument of DeepSpeed's",
    "optim/zero_one_adam.py": "cuda_aware is an argument of DeepSpeed's",
    "plan/planning.py": "the device of a plan, which need not be here",
    "shard/group/released.py": "Tensor.cuda and is_cuda are members of a tensor",
    "shard/passes/backward.py": "torch.cuda.make_graphed_callables is the remedy in a message",
}


def is_text(node: ast.AST) -> bool:
    """Whether a statement is a docstring."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def words(tree: ast.AST) -> Iterator[str]:
    """Names, attributes, arguments and strings of a file, but no docstring."""
    texts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and is_text(node)}
    for node in ast.walk(tree):
        for field in ("id", "attr", "arg", "name", "module"):
            if isinstance(word := getattr(node, field, None), str):
                yield word
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts:
            yield node.value


def names_cuda(source: str) -> bool:
    """Whether the code of a file names CUDA, as torch does."""
    return any("cuda" in word for word in words(ast.parse(source)))


def test_only_these_files_name_cuda() -> None:
    files = [path for path in PACKAGE.rglob("*.py") if "kernels" not in path.relative_to(PACKAGE).parts]
    found = {str(path.relative_to(PACKAGE)) for path in files if names_cuda(path.read_text())}
    assert found == NAMES_CUDA.keys()


def test_the_search_finds() -> None:
    found = ("torch.cuda.synchronize()", "f(device='cuda:0')", "from torch import cuda", "def f(cuda): ...")
    assert all(map(names_cuda, found))
    assert not any(map(names_cuda, ('"""Of cuda."""', "x = 1  # cuda", "torch.accelerator.synchronize()")))
