"""Train with Lightning's Trainer and zero_full, and resume from the last checkpoint.

    python -m zero_full.examples.lightning_trainer --out run --devices 2
    torchrun --standalone --nproc-per-node 3 -m zero_full.examples.lightning_trainer --out run --devices 3

Lightning starts the processes, or torchrun does. The second run resumes from the first one's last checkpoint,
at another number of ranks. A step is 12 samples with 1, 2, 3 or 4 of them, so the losses equal those of an
uninterrupted run, except for rounding. `--strategy ddp` trains without zero_full, with the same losses.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

import zero_full.integrations.lightning  # registers the strategies zero_full_1, zero_full_2, zero_full_3
from zero_full.examples.resume import samples

BATCH = 12  # samples of a step, over all ranks


class Regression(lightning.LightningModule):
    """A plain LightningModule, without any reference to zero_full."""

    def __init__(self) -> None:
        super().__init__()
        self.net: nn.Module | None = None

    def configure_model(self) -> None:
        """Make the layers, at stage 3 without memory for whole parameters."""
        if self.net is None:
            self.net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))

    def training_step(self, batch: Any, number: int) -> Tensor:
        """Return the loss of a batch."""
        inputs, wanted = batch
        assert self.net is not None
        loss = nn.functional.mse_loss(self.net(inputs), wanted)
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        """Return the optimizer and its learning rate schedule."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 20)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Losses(lightning.Callback):
    """Prints the loss of each step, as the mean of all ranks."""

    def on_train_batch_end(self, trainer: Any, *others: Any) -> None:
        """Print the loss that `training_step` has logged."""
        if trainer.is_global_zero:
            loss = float(trainer.callback_metrics["loss"])
            print(f"step {trainer.global_step}: loss {loss:.6f}, {trainer.world_size} ranks", flush=True)


def main() -> int:
    """Resume from the last checkpoint, or start."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="a folder that all hosts share")
    parser.add_argument("--devices", type=int, default=2, help="ranks of this host")
    parser.add_argument("--accelerator", default="cpu", help="cpu or gpu")
    parser.add_argument("--strategy", default="zero_full_3", help="such as zero_full_2 or ddp")
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    assert zero_full.integrations.lightning  # imported for its strategies

    lightning.seed_everything(0, verbose=False)
    trainer = lightning.Trainer(
        accelerator=args.accelerator,
        devices=args.devices,
        strategy=args.strategy,
        max_epochs=args.epochs,
        gradient_clip_val=1.0,
        callbacks=[Losses(), ModelCheckpoint(args.out, save_last=True)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(samples(), BATCH // trainer.world_size)
    trainer.fit(Regression(), loader, ckpt_path="last")
    return 0


if __name__ == "__main__":
    sys.exit(main())
