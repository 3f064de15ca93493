"""Lesson 6's tasks, one claim at a time; run on zero_min or on a learner's files in its place."""

import pytest
import torch
from torch import Tensor, nn

from lessons.evidence import same
from zero_min import compression, run_world, zero_one_adam
from zero_min.comm import Comm
from zero_min.formula import compressed_round


def test_pack_sets_a_bit_where_a_value_is_not_negative() -> None:
    x = torch.tensor([1.0, -1, -1, -1, -1, -1, -1, 1, -1, 1, 1, -1, -1, -1, -1, -1])
    got = compression.pack_signs(x).tolist()
    known = {"the bits stand in the opposite order in their bytes": [128 + 1, 64 + 32]}
    known["a bit is set where a value is negative"] = [126, 249]
    same("bytes of 16 signs", got, [1 + 128, 2 + 4], lookalikes=known)


def test_pack_counts_zero_as_plus() -> None:
    got = compression.pack_signs(torch.tensor([0.0, -0.0, -1, -1, -1, -1, -1, -1])).tolist()
    same("0, -0 and six times -1", got, [3], lookalikes={"zero counts as minus": [0]})


def test_pack_makes_bytes() -> None:
    got = compression.pack_signs(torch.ones(8))
    same("type of packed signs", got.dtype, torch.uint8, about="dtype")
    same("eight times plus", got.tolist(), [255])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_unpack_gives_signs_in_the_order_they_were_packed(dtype: torch.dtype) -> None:
    got = compression.unpack_signs(torch.tensor([129, 6], dtype=torch.uint8), dtype)
    expected = [1, -1, -1, -1, -1, -1, -1, 1, -1, 1, 1, -1, -1, -1, -1, -1]
    bits = {"bits are 0 and 1, and signs are -1 and +1": [(sign + 1) // 2 for sign in expected]}
    bits["the bits are read in the opposite order"] = [*expected[7::-1], *expected[:7:-1]]
    same("signs of bytes 129 and 6", got.tolist(), expected, lookalikes=bits)
    same("type of the signs", got.dtype, dtype, about="dtype")


def said(packed: Tensor, scales: Tensor, sizes: list[int], length: int) -> Tensor:
    """What a listener hears: each piece's signs with its scale, and nothing of the padding."""
    signs = compression.unpack_signs(packed, torch.float64)
    pieces = signs.split([*sizes, length - sum(sizes)])
    return torch.cat([scale * piece for scale, piece in zip([*scales.tolist(), 0], pieces, strict=True)])


ROOT = {(8,): [1.76777], (2,): [3.53553], (1, 1): [3.0, 4.0], (1, 0, 1): [3.0, 0.0, 4.0]}
MEAN = {(8,): [0.875], (2,): [3.5], (1, 1): [3.0, 4.0], (1, 0, 1): [3.0, 0.0, 4.0]}


@pytest.mark.parametrize(
    ("sizes", "l1", "expected"),
    [
        ([8], False, [1.76777]),
        ([8], True, [0.875]),
        ([2], False, [3.53553]),  # what lies behind is padding and must not dilute
        ([2], True, [3.5]),
        ([1, 1], False, [3.0, 4.0]),  # each piece has its own
        ([1, 0, 1], True, [3.0, 0.0, 4.0]),
    ],
    ids=str,
)
def test_compress_makes_one_scale_a_piece(sizes: list[int], l1: bool, expected: list[float]) -> None:
    x = torch.tensor([3.0, -4, 0, 0, 0, 0, 0, 0])
    scales = compression.compress(x, torch.zeros(8), sizes, l1)[1]
    got = scales.tolist()
    known = {"the root of the mean square, and `l1` asks for the mean absolute value": ROOT[tuple(sizes)]}
    known["the mean absolute value, and without `l1` it is the root of the mean square"] = MEAN[tuple(sizes)]
    known["padding is counted: the sum is divided by the whole length"] = [1.76777 if not l1 else 0.875]
    same(f"scales of {sizes}, l1={l1}", got, expected, near=1e-5, lookalikes=known)
    same("type of the scales", scales.dtype, torch.float32, about="dtype")


@pytest.mark.parametrize("l1", [False, True])
def test_compress_remembers_what_it_got_wrong(l1: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes, length = [7, 0, 5], 16
    x, error = torch.zeros(length, dtype=torch.float64), torch.zeros(length, dtype=torch.float64)
    for step in range(3):
        x[:12] = torch.randn(12, generator=generator, dtype=torch.float64)
        wanted, before = x + error, error[:12].tolist()
        packed, scales = compression.compress(x, error, sizes, l1)
        same("type of the scales of fp64 numbers", scales.dtype, torch.float32, about="dtype")
        heard = said(packed, scales, sizes, length)
        known = {"what was remembered before is not part of it": (x - heard)[:12].tolist()}
        what = f"round {step}: what is remembered"
        same(what, error[:12], (wanted - heard)[:12], near=1e-12, before=before, lookalikes=known)
        same("what the padding owes", error[12:], [0.0] * 4)


def test_compress_says_the_signs_of_what_is_wanted() -> None:
    error = torch.full((8,), -2.0)
    got = compression.compress(torch.ones(8), error, [8])[0].tolist()
    forgotten = {"the remembered error is not added": [255]}
    same("1 with an error of -2 is -1, all minus", got, [0], lookalikes=forgotten)


def test_compress_leaves_x_alone() -> None:
    x = torch.arange(8.0)
    compression.compress(x, torch.ones(8), [8])
    changed = {"x itself is changed: the error is added in place": [i + 1.0 for i in range(8)]}
    same("x after compress", x, [float(i) for i in range(8)], lookalikes=changed)


def two_pieces(comm: Comm) -> compression.CompressedMean:
    """Pieces of 12 and 4 for two ranks: chunk 0 has 8 of the first, chunk 1 has 4 of each."""
    return compression.CompressedMean(comm, [12, 4], torch.zeros(1))


PLUS, HALF, MIXED = 255, 15, 85  # eight times plus; four plus and four minus; in turn


def message(signs: int, scales: list[float]) -> Tensor:
    """One byte of signs, and two scales."""
    return compression._join(torch.tensor([signs], dtype=torch.uint8), torch.tensor(scales))


def opened(message: Tensor) -> tuple[list[int], list[float]]:
    """The bytes of signs and the scales in a message about two pieces."""
    got = (message.dtype, message.numel())
    assert got == (torch.uint8, 9), (
        f"a message with a byte of signs and two scales: expected 9 bytes (uint8), got {got[1]} of {got[0]}"
    )
    return message[:-8].tolist(), message[-8:].clone().view(torch.float32).tolist()


def test_send_gives_each_server_its_signs_and_everyone_s_scales() -> None:
    def body(comm: Comm) -> list[tuple[list[int], list[float]]]:
        sizes = torch.tensor([comm.rank + 1.0] * 12 + [10.0 * (comm.rank + 1)] * 4)
        minus = torch.tensor([1.0] * 8 + [1.0] * 4 + [-1.0] * 4) if comm.rank else torch.ones(16)
        return [opened(each) for each in two_pieces(comm).send(sizes * minus)]

    for rank, got in enumerate(run_world(body, 2)):
        expected = [([PLUS], [1.0, 10.0]), ([HALF if rank == 1 else PLUS], [2.0, 20.0])]
        what = f"bytes of signs and scales that come to rank {rank} from 0 and 1"
        scales = [rank + 1.0, 10.0 * (rank + 1)]
        own = [[[PLUS], scales], [[HALF if rank else PLUS], scales]]
        same(what, got, expected, lookalikes={"these are my own messages: nothing was exchanged": own})


def test_send_remembers_what_the_worker_got_wrong() -> None:
    def body(comm: Comm) -> list[float]:
        mean = two_pieces(comm)
        mean.send(torch.tensor([1.0, 7.0] * 8))  # the root of the mean square is 5
        return mean.worker_error.tolist()

    for rank, got in enumerate(run_world(body, 2)):
        expected = [-4.0, 2.0] * 8
        same(f"rank {rank}, worker_error", got, expected, near=1e-6, before=[0.0] * 16)


def test_serve_answers_with_the_mean_of_what_came() -> None:
    def body(comm: Comm) -> tuple[list[int], list[float]]:
        return opened(two_pieces(comm).serve([message(HALF, [1.0, 10.0]), message(HALF, [3.0, 30.0])]))

    got = run_world(body, 2)[1]
    expected = ([HALF], [2.0, 20.0])
    known = {"this is the sum over the ranks, not their mean": [[HALF], [4.0, 40.0]]}
    known["only the last message counts: the others were overwritten"] = [[HALF], [1.5, 15.0]]
    same("rank 1's answer, signs and scales", got, expected, lookalikes=known)


def test_serve_remembers_what_the_server_got_wrong() -> None:
    def body(comm: Comm) -> list[float]:
        mean = two_pieces(comm)
        mean.serve([message(PLUS, [3.0, 3.0]), message(MIXED, [4.0, 4.0])])  # 3.5, -0.5, 3.5, -0.5, ...
        return mean.server_error.tolist()

    for rank, got in enumerate(run_world(body, 2)):
        expected = [1.0, 2.0] * 4  # 3.5 is heard as 2.5, and -0.5 as -2.5
        same(f"rank {rank}, server_error", got, expected, near=1e-6, before=[0.0] * 8)


def test_collect_puts_all_answers_together() -> None:
    def body(comm: Comm) -> tuple[list[float], int]:
        scales = [2.0, 7.0] if comm.rank else [1.0, 5.0]
        return two_pieces(comm).collect(message(PLUS, scales)).tolist(), comm.ledger.total_sent()

    for rank, (got, sent) in enumerate(run_world(body, 2)):
        expected = [1.0] * 8 + [2.0] * 4 + [7.0] * 4  # nothing of the second piece lies in chunk 0
        mine = [4 * [1.0] + 4 * [5.0] + expected[8:], expected[:8] + 8 * [2.0]][1 - rank]
        known = {"every answer is opened with the lengths of my own chunk": mine}
        own = [8 * [1.0] + 4 * [1.0] + 4 * [5.0], 8 * [2.0] + 4 * [2.0] + 4 * [7.0]][rank]
        known["my own answer stands for everybody's: nothing was collected"] = own
        same(f"rank {rank}, the mean of 16 values", got, expected, lookalikes=known)
        same(f"bytes sent by rank {rank}, a message", sent, 9, about="bytes")


Heard = dict[str, Tensor]


def listen(comm: Comm, sizes: list[int], rounds: int) -> tuple[Heard, int]:
    numel = sum(sizes)
    mean = compression.CompressedMean(comm, sizes, torch.zeros(1, dtype=torch.float64))
    said_in, heard = torch.zeros(numel, dtype=torch.float64), torch.zeros(numel, dtype=torch.float64)
    for step in range(rounds):
        generator = torch.Generator().manual_seed(10 * step + comm.rank)
        x = torch.randn(numel, generator=generator, dtype=torch.float64)
        said_in += x
        heard += mean(x)
    server = torch.zeros_like(mean.worker_error)
    server[comm.rank * mean.chunk : (comm.rank + 1) * mean.chunk] = mean.server_error
    tensors = {"in": said_in, "heard": heard, "worker": mean.worker_error[:numel], "server": server[:numel]}
    return tensors, comm.ledger.total_sent()


def constant(comm: Comm) -> list[float]:
    mean = compression.CompressedMean(comm, [8, 16], torch.zeros(1))
    return mean(torch.cat([torch.full((8,), comm.rank + 1.0), torch.full((16,), -4.0 * comm.rank)])).tolist()


def test_mean_is_exact_where_all_values_are_equal() -> None:
    for rank, got in enumerate(run_world(constant, 2)):
        expected = [1.5] * 8 + [-2.0] * 16
        same(f"eight and sixteen equal values on rank {rank}", got, expected, near=1e-6)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("sizes", [[5], [30, 0, 7], [64]], ids=str)
def test_mean_loses_nothing(world: int, sizes: list[int]) -> None:
    answers = [tensors for tensors, _ in run_world(listen, world, sizes, 4)]
    truth = sum(a["in"] for a in answers) / world
    owed = sum(a["worker"] for a in answers) / world + sum(a["server"] for a in answers)
    for rank, a in enumerate(answers):
        off = float((a["heard"] + owed - truth).abs().max())
        assert off < 1e-5, f"rank {rank}: expected heard + remembered = mean, got a difference of {off:.3g}"
        assert torch.equal(a["heard"], answers[0]["heard"]), (
            f"rank {rank}: expected rank 0's bits, got others"
        )


@pytest.mark.parametrize("world", [2, 3])
def test_mean_sends_bits_and_scales_only(world: int) -> None:
    sizes = [30, 0, 7]
    got = sum(sent for _, sent in run_world(listen, world, sizes, 4))
    expected = 4 * compressed_round(sizes, world)
    same(f"bytes all {world} ranks send in 4 rounds", got, expected)


def test_interval_doubles_after_every_patience_counts() -> None:
    interval, got = zero_one_adam.Interval(patience=3), []
    for _ in range(9):
        interval.count()
        got.append(interval.length)
    expected = [1, 1, 2, 2, 2, 4, 4, 4, 8]
    known = {"it grows in every count: `patience` does nothing": [2, 4, 8, 16, 32, 64, 128, 256, 512]}
    known["the count never begins again, so it grows once only"] = [1, 1, 2, 2, 2, 2, 2, 2, 2]
    known["it grows by one, and does not double"] = [1, 1, 2, 2, 2, 3, 3, 3, 4]
    same("lengths after 1 to 9 counts", got, expected, before=[1] * 9, lookalikes=known)
    assert isinstance(interval.length, int), f"length: expected an int, got {interval.length!r}"


def test_interval_stops_at_the_longest() -> None:
    interval, got = zero_one_adam.Interval(patience=1, longest=6), []
    for _ in range(4):
        interval.count()
        got.append(interval.length)
    past = {"it grows past `longest`": [2, 4, 8, 16], "it stops before `longest`": [2, 4, 4, 4]}
    same("lengths up to 6", got, [2, 4, 6, 6], lookalikes=past)


LR, DECAY, BETA = 0.1, 0.5, 0.9


def frozen(comm: Comm) -> tuple[nn.Linear, zero_one_adam.ZeroOneAdam]:
    """Eight weights of 1, v frozen at 1 after the first step, and no meeting for a long time."""
    model = nn.Linear(4, 2, bias=False)
    nn.init.ones_(model.weight)
    optimizer = zero_one_adam.ZeroOneAdam(model, comm, lr=LR, freeze_step=1, weight_decay=DECAY)
    optimizer.steps = optimizer.variances = 1
    optimizer.v.fill_(1 - optimizer.betas[1])  # corrected for one update: 1
    optimizer.meeting.length = 1000
    return model, optimizer


def wander(comm: Comm) -> dict[str, float]:
    _, optimizer = frozen(comm)
    with torch.no_grad():
        for g in (1.0, 3.0):
            optimizer.steps += 1
            optimizer.local_step(torch.full_like(optimizer.x, g))
    numbers = {name: float(getattr(optimizer, name)[0]) for name in ("m", "u", "x")}
    return {**numbers, "walked": optimizer.walked, "shrunk": optimizer.shrunk}


def test_local_writes_down_where_the_rank_went() -> None:
    m, u, x, walked, shrunk = 0.0, 0.0, 1.0, 0.0, 1.0
    for step, g in ((2, 1.0), (3, 3.0)):
        rate = LR / (1 - BETA**step)
        m = BETA * m + (1 - BETA) * g
        x = x * (1 - LR * DECAY) - rate * m
        u, walked, shrunk = u + rate * m, walked + rate, shrunk * (1 - LR * DECAY)
    (got,) = run_world(wander, 1)
    for name, expected in {"m": m, "x": x, "u": u, "walked": walked, "shrunk": shrunk}.items():
        answer = got[name]
        start = {"m": 0.0, "x": 1.0, "u": 0.0, "walked": 0.0, "shrunk": 1.0}[name]
        known = {"only the last step's is kept": rate if name == "walked" else rate * m}
        what = f"{name} after two local steps"
        same(what, answer, expected, near=1e-05, before=start, lookalikes=known)


def test_local_sends_nothing() -> None:
    def body(comm: Comm) -> int:
        _, optimizer = frozen(comm)
        comm.ledger.clear_traffic()
        with torch.no_grad():
            optimizer.steps += 1
            optimizer.local_step(torch.full_like(optimizer.x, comm.rank + 1.0))
        return comm.ledger.total_sent()

    got = run_world(body, 2)
    same("bytes sent in a silent step", got, [0, 0], about="bytes")


def meeting(comm: Comm) -> dict[str, list[float]]:
    """Two ranks that have gone to different places meet; the first weight has never had a gradient."""
    model, optimizer = frozen(comm)
    optimizer.v[0] = 0.0
    with torch.no_grad():
        optimizer.x.fill_(10.0 * comm.rank)
        optimizer.m.fill_(7.0 * comm.rank)
        optimizer.anchor.fill_(5.0)
        optimizer.u.fill_(1.0 + 2.0 * comm.rank)
        optimizer.walked, optimizer.shrunk = 4.0, 0.5
        optimizer.meet()
    tensors = {name: getattr(optimizer, name).tolist() for name in ("x", "m", "u", "anchor")}
    weights = model.weight.flatten().tolist()
    return {**tensors, "weights": weights, "numbers": [optimizer.walked, optimizer.shrunk]}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("x", [2.5] + [0.5] * 7),  # 5 x 0.5 minus the mean walk of 2; the first weight is quiet
        ("weights", [2.5] + [0.5] * 7),  # the model's parameters are windows of x
        ("m", [0.0] + [0.5] * 7),  # 2 over the sum of rates, 4
        ("anchor", [2.5] + [0.5] * 7),
        ("u", [0.0] * 8),
        ("numbers", [0.0, 1.0]),
    ],
)
def test_meet_starts_from_the_anchor_and_takes_the_mean_walk(name: str, expected: list[float]) -> None:
    for rank, answer in enumerate(run_world(meeting, 2)):
        got = answer[name]
        before = {"x": [10.0 * rank] * 8, "weights": [10.0 * rank] * 8, "m": [7.0 * rank] * 8}
        before |= {"anchor": [5.0] * 8, "u": [1.0 + 2.0 * rank] * 8, "numbers": [4.0, 0.5]}
        what = f"{name} on rank {rank} after the meeting"
        known = {}
        if name in ("x", "weights"):
            known["it starts from where the rank was, not from the anchor"] = [5.0 * rank] + [
                5.0 * rank - 2
            ] * 7
            known["the rank has taken its own walk, not the mean"] = [2.5] + [1.5 - 2.0 * rank] * 7
        same(what, got, expected, near=1e-05, before=before[name], lookalikes=known)


def test_meet_leaves_the_same_bits_on_all_ranks() -> None:
    first, second = run_world(meeting, 2)
    for name in ("x", "m", "anchor"):
        same(f"{name} of rank 1, beside rank 0's bits", second[name], first[name])
