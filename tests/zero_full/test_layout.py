"""Where every element lives: properties that hold for any sizes, any world, any alignment."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zero_full.layout import FlatLayout, Fragment, assign_work, backward_order, deal, round_robin

SIZES = st.lists(st.integers(0, 60), max_size=8)
LAYOUTS = st.builds(
    FlatLayout,
    SIZES.map(tuple),
    world=st.integers(1, 9),
    alignment=st.sampled_from([1, 2, 3, 8]),
    copies=st.integers(1, 4),
)


def pieces(layout: FlatLayout) -> list[tuple[int, Fragment]]:
    """(rank, fragment), rank after rank."""
    return [(rank, fragment) for rank in range(layout.world) for fragment in layout.fragments(rank)]


@given(LAYOUTS)
def test_fragments_cover_every_parameter_once_and_in_order(layout: FlatLayout) -> None:
    for index, numel in enumerate(layout.numels):
        ranges = [f.param_range for _, f in pieces(layout) if f.index == index]
        assert [element for low, high in ranges for element in range(low, high)] == list(range(numel))


@given(LAYOUTS)
def test_a_rank_has_at_most_one_piece_of_a_parameter_and_no_empty_one(layout: FlatLayout) -> None:
    owners = [(rank, fragment.index) for rank, fragment in pieces(layout)]
    assert len(owners) == len(set(owners))
    assert owners == sorted(owners)
    assert all(fragment.numel > 0 for _, fragment in pieces(layout))


@given(LAYOUTS)
def test_a_fragment_lies_in_its_owners_slice_at_its_parameters_place(layout: FlatLayout) -> None:
    for rank, fragment in pieces(layout):
        own, window = layout.slice_of(rank), layout.windows[fragment.index]
        low, high = fragment.flat_range
        assert own.start <= low < high <= own.stop
        assert (low - window.start, high - window.start) == fragment.param_range
        assert fragment.numel == high - low


@given(LAYOUTS)
def test_shares_say_who_has_how_much_of_a_parameter(layout: FlatLayout) -> None:
    for index, numel in enumerate(layout.numels):
        shares = [(rank, fragment.numel) for rank, fragment in pieces(layout) if fragment.index == index]
        assert layout.shares(index) == shares and sum(each for _, each in shares) == numel


WORKS = st.lists(
    st.tuples(st.integers(0, 50), st.lists(st.integers(0, 8), min_size=9, max_size=9)), max_size=20
)


@given(WORKS, st.integers(1, 9), st.integers(1, 5))
def test_work_is_dealt_evenly_and_each_round_is_so_too(
    drawn: list[tuple[int, list[int]]], world: int, rounds: int
) -> None:
    works = [work for work, _ in drawn]
    shares = [[(rank, n) for rank, n in enumerate(numels[:world]) if n] for _, numels in drawn]
    dealt = assign_work(works, shares, world, rounds)
    loads = [sum(w for w, (owner, _) in zip(works, dealt, strict=True) if owner == r) for r in range(world)]
    largest = max(works, default=0)
    assert sum(loads) == sum(works) and max(loads) * world <= sum(works) + largest * (world - 1)
    assert all(0 <= owner < world and 0 <= number < rounds for owner, number in dealt)
    for rank in range(world):
        begun = 0
        for number in range(rounds):  # what a rank has done after so many rounds, but for one tensor
            here = zip(works, dealt, strict=True)
            begun += sum(work for work, place in here if place == (rank, number))
            assert begun <= max(loads) * (number + 1) / rounds + largest


def test_a_tensor_stays_where_it_lies_if_that_costs_no_balance() -> None:
    on = [[(0, 9)], [(1, 5), (2, 4)], [(2, 9)]]
    assert [owner for owner, _ in assign_work([7, 7, 7], on, 3)] == [0, 1, 2]
    assert [owner for owner, _ in assign_work([7, 7, 7], [[(2, 9)], [(1, 9)], [(0, 9)]], 3)] == [2, 1, 0]
    assert sorted(owner for owner, _ in assign_work([7, 7, 7], [[(1, 9)]] * 3, 3)) == [0, 1, 2]
    # One rank has the large one to do, and the small ones are the others' whoever has them.
    assert [owner for owner, _ in assign_work([1, 1, 9], [[(0, 4)]] * 3, 3)][2] == 0
    assert 0 not in [owner for owner, _ in assign_work([1, 1, 9], [[(0, 4)]] * 3, 3)][:2]
    assert assign_work([], [], 3) == []


@given(LAYOUTS)
def test_slices_are_equal_side_by_side_and_multiples_of_what_all_ranks_need(layout: FlatLayout) -> None:
    slices = [layout.slice_of(rank) for rank in range(layout.world)]
    assert slices[0].start == 0 and slices[-1].stop == layout.total
    assert all(left.stop == right.start for left, right in pairwise(slices))
    assert {s.stop - s.start for s in slices} == {layout.shard_numel}
    assert layout.shard_numel % (layout.alignment * layout.copies) == 0


@given(LAYOUTS)
def test_parameters_start_aligned_and_do_not_overlap(layout: FlatLayout) -> None:
    windows = [layout.windows[index] for index in range(len(layout.numels))]
    assert all(window.start % layout.alignment == 0 for window in windows)
    assert [window.stop - window.start for window in windows] == list(layout.numels)
    assert all(left.stop <= right.start for left, right in pairwise(windows))
    assert not windows or windows[-1].stop <= layout.total


@given(LAYOUTS)
def test_padding_is_what_belongs_to_nobody_and_less_than_each_reason_for_it_allows(
    layout: FlatLayout,
) -> None:
    padding = layout.total - len({e for _, f in pieces(layout) for e in range(*f.flat_range)})
    assert padding == layout.total - sum(layout.numels)
    between = (layout.alignment - 1) * len(layout.numels)
    behind = layout.world * layout.alignment * layout.copies - 1
    assert 0 <= padding <= between + behind


@given(st.integers(0, 200), st.integers(1, 9))
def test_without_alignment_padding_is_that_of_the_division_alone(numel: int, world: int) -> None:
    layout = FlatLayout((numel,), world)
    assert layout.total - numel == -numel % world
    assert layout.shard_numel == -(-numel // world)


def test_empty_parameters_have_a_place_and_no_owner() -> None:
    layout = FlatLayout((0, 5, 0), world=2)
    assert [f.index for _, f in pieces(layout)] == [1, 1]
    assert layout.windows[2] == slice(5, 5)
    for nothing in (FlatLayout((), world=3), FlatLayout((0, 0), world=3, alignment=8, copies=2)):
        assert (nothing.shard_numel, nothing.total, pieces(nothing)) == (0, 0, [])


def test_a_world_larger_than_the_parameter_leaves_ranks_with_padding_only() -> None:
    layout = FlatLayout((3,), world=5)
    assert [len(layout.fragments(rank)) for rank in range(5)] == [1, 1, 1, 0, 0]
    assert layout.total == 5


def test_a_parameter_is_cut_where_the_slice_ends() -> None:
    layout = FlatLayout((6, 7), world=2, alignment=4)  # 6 + 2 padding + 7 + 1 padding
    assert layout.fragments(0) == [Fragment(0, (0, 6), (0, 6))]
    assert layout.fragments(1) == [Fragment(1, (0, 7), (8, 15))]
    thirds = FlatLayout((6, 7), world=3, alignment=4)
    assert thirds.fragments(1) == [Fragment(1, (0, 7), (8, 15))]
    assert FlatLayout((13,), world=2).fragments(1) == [Fragment(0, (7, 13), (7, 13))]


@pytest.mark.parametrize("wrong", [{"world": 0}, {"alignment": 0}, {"copies": 0}, {"numels": (3, -1)}])
def test_a_layout_that_cannot_be_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least 1: FlatLayout"):
        FlatLayout(**{"numels": (3,), "world": 1, **wrong})


# In which order, and who travels together --------------------------------------------------------

PARAMETERS = st.lists(st.tuples(st.integers(0, 30), st.sampled_from("abc")), max_size=20)


def dealt(parameters: Sequence[tuple[int, str]], limit: int) -> list[list[int]]:
    order = backward_order(len(parameters))
    return deal(order, [numel for numel, _ in parameters], [kind for _, kind in parameters], limit)


@given(PARAMETERS, st.integers(1, 40))
def test_every_parameter_is_dealt_once(parameters: list[tuple[int, str]], limit: int) -> None:
    buckets = dealt(parameters, limit)
    assert sorted(index for bucket in buckets for index in bucket) == list(range(len(parameters)))
    assert all(buckets)


@given(PARAMETERS, st.integers(1, 40))
def test_a_bucket_keeps_the_limit_or_holds_one_large_parameter(
    parameters: list[tuple[int, str]], limit: int
) -> None:
    for bucket in dealt(parameters, limit):
        assert sum(parameters[index][0] for index in bucket) <= limit or len(bucket) == 1


@given(PARAMETERS, st.integers(1, 40))
def test_a_bucket_has_one_kind_and_keeps_the_order(parameters: list[tuple[int, str]], limit: int) -> None:
    for bucket in dealt(parameters, limit):
        assert len({parameters[index][1] for index in bucket}) == 1
        assert bucket == sorted(bucket, reverse=True)


@given(PARAMETERS, st.integers(1, 40))
def test_buckets_are_sorted_by_when_they_are_complete(parameters: list[tuple[int, str]], limit: int) -> None:
    last = [min(bucket) for bucket in dealt(parameters, limit)]  # backward order: the lowest index comes last
    assert last == sorted(last, reverse=True)


@given(PARAMETERS, st.integers(1, 40))
def test_two_neighbouring_buckets_of_a_kind_would_not_fit_in_one(
    parameters: list[tuple[int, str]], limit: int
) -> None:
    buckets = dealt(parameters, limit)
    for kind in "abc":
        numels = [[parameters[i][0] for i in b] for b in buckets if parameters[b[0]][1] == kind]
        for left, right in pairwise(numels):
            assert sum(left) + right[0] > limit


def test_kinds_that_alternate_share_their_buckets() -> None:
    assert dealt([(2, "a"), (1, "b")] * 3, limit=100) == [[5, 3, 1], [4, 2, 0]]


def as_specified(tensors: Sequence[int], num_partitions: int) -> list[int]:
    """`_round_robin_reorder` of the specification, word for word."""
    partition_tensors: dict[int, list[int]] = {}
    for i, tensor in enumerate(tensors):
        j = i % num_partitions
        if j not in partition_tensors:
            partition_tensors[j] = []
        partition_tensors[j].append(tensor)
    reordered_tensors = []
    for partition_index in partition_tensors:
        for tensor in partition_tensors[partition_index]:
            reordered_tensors.append(tensor)
    return reordered_tensors


@given(st.integers(0, 40), st.integers(1, 9))
def test_round_robin_is_the_specifications_order(count: int, world: int) -> None:
    indices = [7 * index for index in range(count)]
    assert round_robin(indices, world) == as_specified(indices, world)


def test_the_orders_are_what_their_names_say() -> None:
    assert backward_order(3) == [2, 1, 0]
    assert round_robin([4, 3, 2, 1, 0], 2) == [4, 2, 0, 3, 1]
