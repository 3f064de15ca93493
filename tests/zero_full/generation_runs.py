"""A small language model, its training, and a server that gets its weights, for the tests of generation."""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import zero_full
from tests.zero_full.runs import config
from tests.zero_full.stage3_runs import RELEASED, seeded

VOCABULARY, WIDTH, PROMPT, NEW = 24, 16, 3, 5


class Block(nn.Module):
    """Attention with a cache of keys and values, then two layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor, cache: list[Tensor] | None = None) -> Tensor:
        """The same shape. `cache`: keys and values of earlier tokens, which is extended."""
        q, k, v = self.qkv(x).chunk(3, -1)
        if cache is not None:
            if cache:
                k, v = torch.cat([cache[0], k], 1), torch.cat([cache[1], v], 1)
            cache[:] = [k, v]
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=q.shape[1] == k.shape[1])
        x = x + self.drop(self.out(mixed))
        return x + self.down(torch.tanh(self.up(x)))


class Language(nn.Module):
    """Blocks between an embedding and a head that share their weight; some parameters are frozen."""

    def __init__(self, depth: int = 3, width: int = WIDTH, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.ones(3))

    def forward(self, tokens: Tensor, caches: list[list[Tensor]] | None = None) -> Tensor:
        """The logits."""
        x = self.embedding(tokens)
        for number, block in enumerate(self.blocks):
            x = block(x, None if caches is None else caches[number])
        return self.head(x + self.frozen(x))

    @torch.no_grad()
    def generate(self, tokens: Tensor, new: int = NEW, cached: bool = True) -> Tensor:
        """The prompt and the likeliest tokens after it."""
        caches: list[list[Tensor]] | None = [[] for _ in self.blocks] if cached else None
        step = tokens
        for _ in range(new):
            following = self(step, caches)[:, -1:].argmax(-1)
            tokens = torch.cat([tokens, following], 1)
            step = following if cached else tokens
        return tokens


def tokens(step: int, rank: int, length: int = PROMPT + NEW) -> Tensor:
    """Every step and rank has its own."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(VOCABULARY, (2, length), generator=generator)


def engine_of(stage: int, precision: str, zero: Mapping[str, Any] | None = None, **keys: Any) -> Any:
    """An engine of a `Language`, by default with AdamW and at stage 3 without parameters that stay whole."""
    keys = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}, **keys}
    if precision != "fp32":
        keys[precision] = {"enabled": True, **keys.pop("more", {})}
    if precision == "fp16":
        keys[precision] |= {"initial_scale_power": 4}
    sharded = {**(RELEASED if stage == 3 else {}), **(zero or {})}
    made = config(stage, zero_optimization=sharded, **keys)
    return zero_full.initialize(model=seeded(Language), config=made)[0]


def train_step(engine: Any, step: int, rank: int) -> float:
    """Predict the next tokens, in all micro-batches of a step."""
    for micro in range(engine.gradient_accumulation_steps()):
        x = tokens(100 * step + micro, rank)
        loss = functional.cross_entropy(engine(x[:, :-1]).flatten(0, 1).float(), x[:, 1:].flatten())
        engine.backward(loss)
        engine.step()
    return float(loss.detach())


class Server:
    """What an inference server does with the weights: plain tensors by name."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.received = 0  # bytes of the last update
        self.sparse: set[str] = set()  # names of the last update that came as indices and values

    def update(self, items: Iterable[tuple[str, Tensor | None, Tensor]]) -> None:
        """Take what `engine.weights(delta=True)` yields."""
        self.received, self.sparse = 0, set()
        for name, indices, values in items:
            self.received += values.nbytes
            if indices is None:
                self.tensors[name] = values.clone()
                continue
            assert indices.dtype == torch.int32 and bool((indices[1:] > indices[:-1]).all())
            self.received += indices.nbytes
            self.tensors[name].view(-1)[indices.long()] = values
            self.sparse.add(name)

    def differs_from(self, state: Mapping[str, Tensor]) -> list[str]:
        """The names of tensors that are not bit-equal; a tied weight has its first name only."""
        wanted = {name: value for name, value in state.items() if name != "head.weight"}
        if wanted.keys() != self.tensors.keys():
            return sorted(wanted.keys() ^ self.tensors.keys())
        return [name for name, value in wanted.items() if not same_bits(value, self.tensors[name])]


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal as bytes."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def fingerprint(state: Mapping[str, Tensor]) -> str:
    """A hash of all tensors, without the second name of the tied weight."""
    made = hashlib.blake2b(digest_size=8)
    for name in sorted(state.keys() - {"head.weight"}):
        made.update(name.encode() + state[name].contiguous().view(torch.uint8).numpy().tobytes())
    return made.hexdigest()


# Reinforcement learning with a server in a process of its own ---------------------------------------

TRAINERS, SERVER = [0, 1], 2


def send(items: Iterable[tuple[str, Tensor | None, Tensor]]) -> None:
    """Rank 0 to the server: an update in one message."""
    dist.send_object_list([[(name, indices, values.clone()) for name, indices, values in items]], SERVER)


def receive() -> list[tuple[str, Tensor | None, Tensor]]:
    """The server: an update from rank 0."""
    told: list[Any] = [None]
    dist.recv_object_list(told, 0)
    return list(told[0])


def reinforce(comm: Any, stage: int, steps: int) -> tuple[list[str], list[int]]:
    """Two trainers and a server that generates for them. Returns hashes of weights, bytes of updates."""
    trainers = dist.new_group(TRAINERS)
    if comm.rank == SERVER:
        return _serve(steps)
    zero = RELEASED if stage == 3 else {}
    keys = {"bf16": {"enabled": True}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}}
    engine, _, _, _ = zero_full.initialize(
        model=seeded(Language), config=config(stage, zero_optimization=zero, **keys), process_group=trainers
    )
    hashes = []
    for step in range(steps):
        items = list(engine.weights(delta=True))
        if comm.rank == 0:
            send(items)
        if step % 10 == 9:
            hashes.append(fingerprint(engine.module_state_dict()))
        samples = torch.empty(4, PROMPT + NEW, dtype=torch.int64)
        dist.broadcast(samples, SERVER)
        rewards = (samples[:, PROMPT:] % 2).float().mean(1)
        advantages = ((rewards - rewards.mean()) / (rewards.std() + 1e-3))[comm.rank :: 2]
        mine = samples[comm.rank :: 2]
        chosen = engine(mine[:, :-1]).float().log_softmax(-1).gather(-1, mine[:, 1:, None])[..., 0]
        engine.backward(-(advantages * chosen[:, PROMPT - 1 :].mean(1)).mean())
        engine.step()
    engine.destroy()
    return hashes, []


def _serve(steps: int) -> tuple[list[str], list[int]]:
    model, server = Language().to(torch.bfloat16).eval(), Server()
    hashes, received = [], []
    generator = torch.Generator().manual_seed(5)
    for step in range(steps):
        server.update(receive())
        received.append(server.received)
        model.load_state_dict({**server.tensors, "head.weight": server.tensors["embedding.weight"]})
        if step % 10 == 9:
            hashes.append(fingerprint(server.tensors))
        prompts = torch.randint(VOCABULARY, (4, PROMPT), generator=generator)
        dist.broadcast(model.generate(prompts), SERVER)
    return hashes, received
