"""Models and data that the cases train, small and odd in size."""

from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

SAMPLES, BATCH = 36, 6  # of an epoch, and of a step over all ranks: 1, 2 or 3 of them


def samples(count: int = SAMPLES) -> TensorDataset:
    """Inputs and outputs of a fixed random function."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 7, generator=generator)
    return TensorDataset(inputs, torch.tanh(inputs @ torch.randn(7, 5, generator=generator)))


def loader(ranks: int, count: int = SAMPLES) -> Any:
    """Batches of one rank, in order."""
    return DataLoader(samples(count), BATCH // ranks, shuffle=False)


class Regression(lightning.LightningModule):
    """A small network with a parameter of its own, which stage 3 must gather around the whole step."""

    def __init__(self, lr: float = 1e-2, in_configure_model: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net: Any = None
        torch.manual_seed(0)
        if not in_configure_model:
            self.build()
        self.losses: list[float] = []  # of steps, mean over ranks
        self.seen: list[float] = []  # of validation or test batches, mean over ranks

    def build(self) -> None:
        self.net = nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 5))
        self.gain = nn.Parameter(torch.ones(5))

    def configure_model(self) -> None:
        if self.net is None:
            self.build()

    def forward(self, inputs: Tensor) -> Any:
        return self.net(inputs) * self.gain

    def loss_of(self, batch: Any) -> Tensor:
        inputs, wanted = batch
        return nn.functional.mse_loss(self(inputs).float(), wanted.float())

    def mean(self, loss: Tensor) -> float:
        return float(self.trainer.strategy.reduce(loss.detach().clone()))

    def training_step(self, batch: Any, number: int) -> Tensor:
        loss = self.loss_of(batch)
        self.losses.append(self.mean(loss))
        self.log("train_loss", loss, sync_dist=True)
        return loss + 0 * self.gain.sum()  # a use outside of forward

    def validation_step(self, batch: Any, number: int) -> None:
        loss = self.loss_of(batch) + 0 * self.gain.sum()
        self.seen.append(self.mean(loss))
        self.log("val_loss", loss, sync_dist=True)

    def test_step(self, batch: Any, number: int) -> None:
        self.validation_step(batch, number)

    def predict_step(self, batch: Any, number: int) -> Tensor:
        return self(batch[0])  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 20)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Adversaries(lightning.LightningModule):
    """Two networks with an optimizer each, one against the other: manual optimization."""

    def __init__(self, clip: float = 0.0, clears: bool = True, toggles: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.clip, self.clears, self.toggles = clip, clears, toggles
        torch.manual_seed(0)
        self.maker = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 5))
        self.judge = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 1))
        self.losses: list[float] = []

    def training_step(self, batch: Any, number: int) -> None:
        inputs, wanted = batch
        made_by, judged_by = self.optimizers()  # type: ignore[misc]
        for optimizer, loss_of in ((made_by, self.maker_loss), (judged_by, self.judge_loss)):
            if self.toggles:
                self.toggle_optimizer(optimizer)
            loss = loss_of(inputs, wanted)
            if self.clears:
                optimizer.zero_grad()
            self.manual_backward(loss)
            if self.clip:
                self.clip_gradients(optimizer, gradient_clip_val=self.clip, gradient_clip_algorithm="norm")
            optimizer.step()
            if self.toggles:
                self.untoggle_optimizer(optimizer)
            self.losses.append(float(self.trainer.strategy.reduce(loss.detach().clone())))
        for schedule in self.lr_schedulers():  # type: ignore[union-attr]
            schedule.step()  # type: ignore[call-arg]

    def maker_loss(self, inputs: Tensor, wanted: Tensor) -> Tensor:
        return -self.judge(self.maker(inputs)).float().mean()

    def judge_loss(self, inputs: Tensor, wanted: Tensor) -> Tensor:
        made = self.maker(inputs).detach()
        return (self.judge(made).float() - self.judge(wanted).float()).mean() + (
            self.judge(wanted) ** 2
        ).float().mean()

    def configure_optimizers(self) -> Any:
        makes = torch.optim.Adam(self.maker.parameters(), lr=1e-2)
        judges = torch.optim.SGD(self.judge.parameters(), lr=1e-1, momentum=0.9)
        schedules = [torch.optim.lr_scheduler.StepLR(each, 2, 0.5) for each in (makes, judges)]
        return [makes, judges], schedules
