"""Cut a list of layers into consecutive parts, one for each pipeline stage."""

import re
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

METHODS = '"uniform", "parameters" or "type:REGEX"'


def partition(
    method: str, names: Sequence[str], numels: Callable[[], Sequence[int]], parts: int
) -> list[range]:
    """Return the layers of each stage, so that the heaviest stage is as light as possible.

    method  "uniform": layers weigh the same; "parameters": by trainable elements; "type:REGEX": only layers
            whose class name matches weigh
    names   class name of each layer
    numels  returns the trainable elements of each layer; called by "parameters" only
    """
    if parts > len(names):
        raise ValueError(
            f"{parts} pipeline stages, but the model has only {len(names)} layers. A stage needs at least "
            "one layer: use fewer stages"
        )
    kind, _, pattern = method.partition(":")
    if method == "uniform":
        weights = [1] * len(names)
    elif method == "parameters":
        weights = [*numels()]
    elif kind == "type" and pattern:
        weights = [int(re.search(pattern, name, re.IGNORECASE) is not None) for name in names]
        if not any(weights):
            raise ValueError(
                f"partition_method {method!r} matches no layer's class. The model has {sorted({*names})}"
            )
    else:
        raise ValueError(f"partition_method must be {METHODS}, not {method!r}")
    return balanced(weights, parts)


def balanced(weights: Sequence[int], parts: int) -> list[range]:
    """Cut `weights` into consecutive, non-empty parts with the smallest possible largest sum.

    Of equally good cuts, takes the one whose squared sums are smallest, so that no part is needlessly empty.
    """
    sums = [0, *accumulate(weights)]
    count = len(weights)
    # best[end]: (largest sum, sum of squares, starts of the parts) of the first `end` weights
    best: list[tuple[int, int, tuple[int, ...]] | None] = [None] * (count + 1)
    best[0] = (0, 0, ())
    for part in range(1, parts + 1):
        after: list[tuple[int, int, tuple[int, ...]] | None] = [None] * (count + 1)
        for end in range(part, count - (parts - part) + 1):
            cuts = []
            for start in range(part - 1, end):
                if (before := best[start]) is not None:
                    here = sums[end] - sums[start]
                    cuts.append((max(before[0], here), before[1] + here * here, (*before[2], start)))
            after[end] = min(cuts)
        best = after
    found = best[count]
    assert found is not None  # parts <= count
    starts = [*found[2], count]
    return [range(start, stop) for start, stop in pairwise(starts)]
