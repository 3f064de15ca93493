"""Stage 3: parts of a model that are called by themselves, shared parameters, and reads past every call."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_full
from tests.worlds import POOL
from tests.zero_full.runs import assert_close, assert_same, data
from tests.zero_full.stage3_runs import WIDTH, Block, seeded, stage3

VOCABULARY = 50


def tokens(rank: int, length: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, VOCABULARY, (2, length), generator=generator)


class Stack(nn.Module):
    """An encoder, or a decoder: the embedding is somebody else's, too."""

    def __init__(self, embed: nn.Embedding) -> None:
        super().__init__()
        self.embed, self.blocks = embed, nn.ModuleList(Block() for _ in range(3))

    def forward(self, ids: Tensor, seen: Tensor | None = None) -> Tensor:
        """Hidden states."""
        h = self.embed(ids)
        for block in self.blocks:
            h = block(h)
        return h if seen is None else h + seen.mean(1, keepdim=True)


class Translator(nn.Module):
    """As T5: one table for encoder, decoder and head."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder, self.decoder = Stack(self.shared), Stack(self.shared)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.shared.weight

    def logits(self, ids: Tensor, seen: Tensor) -> Tensor:
        """What comes next."""
        return self.head(self.decoder(ids, seen))

    def forward(self, ids: Tensor) -> Tensor:
        """The loss of copying."""
        logits = self.logits(ids, self.encoder(ids))
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())

    @torch.no_grad()
    def generate(self, ids: Tensor, steps: int) -> Tensor:
        """Greedily, with the encoder called once; all logits."""
        seen, out, kept = self.encoder(ids), ids[:, :1], []
        for _ in range(steps):
            kept.append(self.logits(out, seen)[:, -1])
            out = torch.cat([out, kept[-1].argmax(-1, keepdim=True)], 1)
        return torch.stack(kept)


PARTS: dict[str, Callable[[Any, int], Tensor]] = {
    "encoder": lambda model, rank: model.encoder(tokens(rank)),
    "decoder": lambda model, rank: model.decoder(tokens(rank), torch.ones(2, 5, WIDTH)),
    "embedding": lambda model, rank: model.shared(tokens(rank)),
    "head": lambda model, rank: model.head(torch.ones(2, WIDTH)),
    "block": lambda model, rank: model.encoder.blocks[1](torch.ones(2, WIDTH)),
    "linear in a block": lambda model, rank: model.encoder.blocks[1].up(torch.ones(2, WIDTH)),
    "generate": lambda model, rank: model.generate(tokens(0), 6),
}


def parts(comm: Any) -> dict[str, tuple[Tensor, Tensor]]:
    """Each part's output, here and in plain torch, before and after a step of training."""
    plain, model = seeded(Translator), seeded(Translator)
    engine, *_ = zero_full.initialize(model=model, config=stage3())
    outputs = {}
    for moment in ("new", "trained"):
        for name, call in PARTS.items():
            outputs[f"{moment}: {name}"] = (call(model, comm.rank).detach(), call(plain, comm.rank).detach())
        engine.backward(engine(tokens(comm.rank)))
        engine.step()
        plain.load_state_dict(engine.module_state_dict())
    return outputs


@pytest.mark.parametrize("world", [2, 3])
def test_a_part_of_a_model_with_shared_parameters_may_be_called_by_itself(world: int) -> None:
    for outputs in POOL.run(parts, world):
        for name, (got, want) in outputs.items():
            torch.testing.assert_close(got, want, msg=lambda text, name=name: f"{name}: {text}")


def trained_by_parts(comm: Any, stage3_config: dict[str, Any] | None) -> dict[str, Tensor]:
    """The loop calls encoder and head by themselves, never the model. None: plain torch, all ranks' data."""
    model: Any = seeded(Translator)

    def loss(rank: int) -> Tensor:
        logits = model.head(model.encoder(tokens(rank)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens(rank).flatten())

    if stage3_config is None:
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            sgd.zero_grad()
            sum(loss(rank) / 2 for rank in range(2)).backward()  # type: ignore[union-attr]
            sgd.step()
        return {name: p.detach().clone() for name, p in model.named_parameters()}
    engine, *_ = zero_full.initialize(model=model, config=stage3_config)
    for _ in range(3):
        engine.backward(loss(comm.rank))
        engine.step()
    return engine.module_state_dict()


def test_parts_that_are_called_by_themselves_are_trained() -> None:
    want = trained_by_parts(None, None)
    sgd = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    for got in POOL.run(trained_by_parts, 2, {**stage3(), **sgd}):
        assert_close({name: got[name] for name in want}, want)


# Reads past every call ---------------------------------------------------------------------------


class Borrows(nn.Module):
    """Its second block reads a weight of the first, in code that knows no modules."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        for block in self.blocks:
            x = block(x)
        x = nn.functional.linear(x, self.blocks[0].up.weight)  # type: ignore[union-attr, arg-type]
        return x.square().mean()


def errors_of_reads(comm: Any) -> list[str]:
    model: Any = seeded(Borrows)
    engine, *_ = zero_full.initialize(model=model, config=stage3())
    said = []
    for act in (
        lambda: engine(data(0, 0, comm.rank)),
        lambda: model.blocks[2].forward(torch.ones(1, WIDTH)),
        lambda: model.blocks[2].up.forward(torch.ones(1, WIDTH)),
        lambda: nn.functional.linear(torch.ones(1, WIDTH), model.blocks[2].up.weight),
    ):
        try:
            act()
            said.append("nothing")
        except RuntimeError as error:
            said.append(str(error))
    return said


def test_a_module_that_runs_with_a_released_parameter_raises_with_both_names() -> None:
    for said in POOL.run(errors_of_reads, 2):
        names = [re.match(r"(.*) is sharded .*, but (.*) uses it in linear\.", text) for text in said]
        assert said[1] == "nothing"
        assert [match and match.groups() for match in names] == [
            ("blocks.0.up.weight", "the model (Borrows)"),
            None,  # its parts are called, and gather for themselves
            ("blocks.2.up.weight, blocks.2.up.bias", "blocks.2.up (Linear)"),
            ("blocks.2.up.weight", "code outside of modules"),
        ]


# Transforms, generation, edits -------------------------------------------------------------------


def transformed(comm: Any) -> tuple[str, Tensor, Tensor]:
    """(the error outside, a gradient by torch.func inside GatheredParameters, and by autograd)."""
    engine, *_ = zero_full.initialize(model=seeded(Block), config=stage3())
    model, x, said = engine.module, torch.ones(2, WIDTH), ""

    def loss(weights: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, weights, (x,)).square().mean()

    try:
        torch.func.grad(loss)(dict(model.named_parameters()))
    except RuntimeError as error:
        said = str(error)
    with zero_full.GatheredParameters(list(model.parameters())):
        gradient = torch.func.grad(loss)({n: p.detach() for n, p in model.named_parameters()})["up.weight"]
    plain = seeded(Block)
    plain(x).square().mean().backward()
    assert plain.up.weight.grad is not None  # type: ignore[union-attr]
    one = engine(x).square().mean()
    engine.backward(one)
    engine.step()
    return said, gradient, plain.up.weight.grad  # type: ignore[union-attr, return-value]


def test_torch_func_works_where_parameters_are_whole_and_says_so_elsewhere() -> None:
    for said, gradient, want in POOL.run(transformed, 2):
        assert "GatheredParameters" in said
        torch.testing.assert_close(gradient, want)


def generates(comm: Any) -> tuple[Tensor, Tensor, int]:
    """(logits of this rank's own number of steps, plain torch's, what was sent meanwhile)."""
    model = seeded(Translator)
    engine, *_ = zero_full.initialize(model=model, config=stage3())
    steps = 3 + 4 * comm.rank
    with zero_full.unwrap_model_for_generation(engine) as whole:
        assert whole is model
        before = sum(engine.traffic().values())
        logits = whole.generate(tokens(comm.rank), steps)
        sent = sum(engine.traffic().values()) - before
    return logits, seeded(Translator).generate(tokens(comm.rank), steps), sent  # type: ignore[operator]


def test_ranks_may_generate_texts_of_different_lengths() -> None:
    for got, want, sent in POOL.run(generates, 2):
        torch.testing.assert_close(got, want)
        assert sent == 0


def edits_nothing(comm: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """In 16 bits: masters before and after a write of what is there already."""
    engine, *_ = zero_full.initialize(model=seeded(Block), config={**stage3(), "bf16": {"enabled": True}})
    engine.backward(engine(torch.ones(2, WIDTH, dtype=torch.bfloat16)).float().square().mean())
    engine.step()

    def masters() -> dict[str, Tensor]:
        named = engine.module.named_parameters()
        return {n: zero_full.safe_get_full_fp32_param(p).clone() for n, p in named}  # type: ignore[union-attr]

    before = masters()
    with zero_full.GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
        for param in engine.module.parameters():
            param.data.copy_(param.data.clone())
    return before, masters()


def test_masters_keep_their_low_bits_where_a_write_changes_nothing() -> None:
    for before, after in POOL.run(edits_nothing, 2):
        assert_same(after, before)
        assert any(not torch.equal(v, v.bfloat16().float()) for v in before.values())
