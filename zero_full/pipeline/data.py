"""Read the micro-batches of a batch, and compare them between the ranks of a run."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zero_full.nested import mapped, tensors_in

END = object()  # of an iterator
Signature = tuple[tuple[tuple[int, ...], torch.dtype], ...]  # shape and dtype of each tensor


@dataclass(frozen=True)
class MicroBatches:
    """The micro-batches that a rank has read, or why it could not read them."""

    inputs: Sequence[Any] = ()
    labels: Sequence[Any] = ()
    signature: Signature = ()  # of the inputs, equal for all of them
    problem: str = ""
    ended: bool = False  # the iterator had no micro-batch left for this batch
    was_read: bool = True  # this rank reads data
    error: Exception | None = field(default=None, compare=False)


def read_micro_batches(
    data: Iterator[Any] | None, count: int, device: torch.device, first: bool, last: bool, always: bool
) -> MicroBatches:
    """Read `count` pairs (inputs, labels) on a rank with the first or the last stage. Never raises.

    first, last  whether this rank needs the inputs, and the labels
    always       read also on a rank that needs neither
    """
    if not (first or last or always):
        return MicroBatches(was_read=False)
    if data is None:
        return MicroBatches(
            problem="this rank has the first or the last stage and no data. Pass data_iter to train_batch, "
            "call set_dataiterator, or pass training_data to initialize"
        )
    inputs, labels = list[Any](), list[Any]()
    try:
        for number in range(count):
            if (pair := next(data, END)) is END:
                have = f"{number} of {count} micro-batches"
                return MicroBatches(problem=f"the data iterator ended after {have}", ended=number == 0)
            if not (isinstance(pair, (tuple, list)) and len(pair) == 2):
                what = f"{len(pair)} items" if isinstance(pair, (tuple, list)) else f"a {type(pair).__name__}"
                raise TypeError(f"a micro-batch must be a pair (inputs, labels), not {what}")
            if first:
                inputs.append(_moved(pair[0], device))
            if last:
                labels.append(_moved(pair[1], device))
        signatures = [_signature(each) for each in inputs]
        for number, found in enumerate(signatures):
            if found != signatures[0]:
                raise ValueError(
                    f"micro-batch {number} of the step has inputs of other shapes ({_words(found)}) than the "
                    f"first ({_words(signatures[0])}). Pad them, or drop the last incomplete batch "
                    "(dataloader_drop_last)"
                )
    except Exception as error:
        return MicroBatches(problem=f"{type(error).__name__}: {error}", error=error)
    return MicroBatches(inputs, labels, signatures[0] if signatures else ())


def _moved(tree: Any, device: torch.device) -> Any:
    return mapped(lambda leaf: leaf.to(device, non_blocking=True) if isinstance(leaf, Tensor) else leaf, tree)


def _signature(tree: Any) -> Signature:
    return tuple((tuple(t.shape), t.dtype) for t in tensors_in(tree))


def _words(signature: Signature) -> str:
    return " and ".join(f"{tuple(shape)}" for shape, _ in signature) or "no tensors"
