"""Cases of Lightning's Trainer with zero_full; see `__main__.py`.

A case returns what its test compares, which is equal on every rank.
"""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.lightning.models import Adversaries, Regression, loader
from zero_full.integrations.lightning import ZeroStrategy, consolidate
from zero_full.integrations.lightning.precision import ZeroPrecision

RANKS = int(os.environ.get("WORLD_SIZE", "1"))
RANK = int(os.environ.get("RANK", "0"))
SHARD_ALL = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
STAGES = ("ddp", 1, 2, 3)
QUIET = {
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "logger": False,
    "enable_checkpointing": False,
}
CASES: dict[str, Callable[[Path], Any]] = {}


def case(function: Callable[[Path], Any]) -> Callable[[Path], Any]:
    CASES[function.__name__] = function
    return function


def strategy_of(stage: Any, **config: Any) -> Any:
    return "ddp" if stage == "ddp" else ZeroStrategy(stage, (SHARD_ALL if stage == 3 else {}) | config)


def trainer_of(strategy: Any, **options: Any) -> lightning.Trainer:
    strategy = (
        strategy if isinstance(strategy, lightning.pytorch.strategies.Strategy) else strategy_of(strategy)
    )
    return lightning.Trainer(
        strategy=strategy,
        **(QUIET | {"accelerator": "cpu", "devices": RANKS, "max_epochs": 2} | options),  # type: ignore[arg-type]
    )


def rounded(numbers: Any) -> list[float]:
    return [float(f"{float(number):.6g}") for number in numbers]


def sum_of(trainer: lightning.Trainer) -> float:
    """The sum of the weights, whole."""
    module, engines = trainer.lightning_module, getattr(trainer.strategy, "engines", ())
    if not engines:
        return float(sum(p.detach().double().sum() for p in module.parameters()))
    return float(sum(v.double().sum() for e in engines for k, v in e.module_state_dict().items()))


def fit(stage: Any, module: Any = None, **options: Any) -> dict[str, Any]:
    module = module or Regression()
    if stage == "ddp" and isinstance(module, Adversaries):
        stage = DDPStrategy(find_unused_parameters=True)
    trainer = trainer_of(stage, **options)
    trainer.fit(module, loader(RANKS), loader(RANKS) if hasattr(module, "seen") else None)
    seen = rounded(getattr(module, "seen", []))
    return {"losses": rounded(module.losses), "seen": seen, "sum": rounded([sum_of(trainer)])}


def raised(call: Callable[[], Any]) -> str:
    """The message of the error that a call raises, and its kind."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@case
def quick(folder: Path) -> Any:
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.3}
    return {str(stage): fit(stage, max_epochs=1, **options) for stage in ("ddp", 2, 3)}


@case
def fits(folder: Path) -> Any:
    found = {str(stage): fit(stage) for stage in STAGES}
    auto = {"zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}, "gradient_clipping": "auto"}
    return found | {"2 auto": fit(ZeroStrategy(config=auto))}


@case
def accumulates_and_clips(folder: Path) -> Any:
    options = {"accumulate_grad_batches": 4, "gradient_clip_val": 0.3}  # 6 micro-batches: the last step has 2
    return {str(stage): fit(stage, **options) for stage in STAGES}


@case
def bf16(folder: Path) -> Any:
    return {str(stage): fit(stage, precision="bf16-mixed") for stage in STAGES}


@case
def bf16_true(folder: Path) -> Any:
    return {str(stage): fit(stage, precision="bf16-true") for stage in STAGES}


@case
def fp16(folder: Path) -> Any:
    scale = {"fp16": {"initial_scale_power": 4}}  # no first steps that overflow
    found = {"ddp": fit("ddp")}
    for stage in (1, 2, 3):
        found[str(stage)] = fit(strategy_of(stage, **scale), plugins=[ZeroPrecision("16-mixed")])
    return found


@case
def manual(folder: Path) -> Any:
    return {str(stage): fit(stage, Adversaries(clip=0.2)) for stage in STAGES}


@case
def manual_without_zero_grad(folder: Path) -> Any:
    return {str(stage): fit(stage, Adversaries(clears=False)) for stage in STAGES}


@case
def manual_toggled(folder: Path) -> Any:
    return {str(stage): fit(stage, Adversaries(toggles=True)) for stage in STAGES}


class Checkpointed(Regression):
    """Its network is recomputed in backward."""

    def forward(self, inputs: Tensor) -> Any:
        return checkpoint(self.net, inputs, use_reentrant=False) * self.gain


@case
def compiled(folder: Path) -> Any:
    found: dict[str, Any] = {}
    for stage in STAGES:
        found[str(stage)] = fit(stage, Checkpointed())
        module = Regression()  # Lightning's own `log` cannot be compiled by torch 2.13, with DDP either
        module.net.compile(backend="eager")
        trainer = trainer_of(stage)
        trainer.fit(module, loader(RANKS), loader(RANKS))
        found[f"{stage} compiled"] = {"losses": rounded(module.losses), "seen": rounded(module.seen)}
    return found


@case
def averages_and_tunes(folder: Path) -> Any:
    """Callbacks that average weights, the tuner, and a schedule of accumulation; stage 3 cannot average."""
    found: dict[str, Any] = {}
    for stage in STAGES:
        stochastic, moving, tuned, scheduled = (Regression() for _ in range(4))
        for module, callback in (
            (stochastic, StochasticWeightAveraging(1e-2, swa_epoch_start=1)),
            (moving, EMAWeightAveraging()),
        ):
            trainer = trainer_of(stage, callbacks=[callback], max_epochs=3)
            if stage == 3:
                error = raised(lambda: trainer.fit(module, loader(RANKS)))  # noqa: B023
                found[f"refused {type(callback).__name__}"] = error
            else:
                trainer.fit(module, loader(RANKS), loader(RANKS))
        trainer = trainer_of(stage)
        Tuner(trainer).lr_find(tuned, loader(RANKS), num_training=5)
        trainer.fit(tuned, loader(RANKS))
        schedule = GradientAccumulationScheduler({0: 1, 1: 3})
        trainer_of(stage, callbacks=[schedule]).fit(scheduled, loader(RANKS))
        found[f"{stage} tuned"] = {"losses": rounded([*tuned.losses, *scheduled.losses])}
        if stage != 3:
            found[f"{stage} averaged"] = {
                "losses": rounded([*stochastic.losses, *moving.losses]),
                "seen": rounded([*stochastic.seen, *moving.seen]),
            }
    return found


@case
def odd_batches(folder: Path) -> Any:
    """31 samples: the last batch of an epoch is smaller, and DistributedSampler repeats one sample."""
    found: dict[str, Any] = {}
    for stage in STAGES:
        module = Regression()
        trainer_of(stage).fit(module, loader(RANKS, 31), loader(RANKS, 31))
        found[str(stage)] = {"losses": rounded(module.losses), "seen": rounded(module.seen)}
    return found


@case
def without_interruption(folder: Path) -> Any:
    return fit("ddp")


@case
def begin(folder: Path) -> Any:
    """The first epoch of two, whose checkpoints another world goes on from."""
    for stage in (1, 2, 3):
        at = folder / f"stage{stage}"
        best = ModelCheckpoint(at, "best", monitor="val_loss", save_top_k=1, save_last=True)
        weights = ModelCheckpoint(at, "weights", save_weights_only=True)
        trainer = trainer_of(stage, max_epochs=1, callbacks=[best, weights], enable_checkpointing=True)
        trainer.fit(Regression(), loader(RANKS), loader(RANKS))
    at = folder / "manual"
    trainer = trainer_of(3, max_epochs=1)
    trainer.fit(Adversaries(), loader(RANKS))
    trainer.save_checkpoint(at / "a.ckpt")
    trainer = trainer_of("ddp", max_epochs=1)
    trainer.fit(Regression(), loader(RANKS), loader(RANKS))
    trainer.save_checkpoint(folder / "ddp.ckpt")
    return sorted(path.name for path in (folder / "stage3").iterdir())


@case
def resume(folder: Path) -> Any:
    found: dict[str, Any] = {}
    for stage in (1, 2, 3):
        module = Regression()
        trainer = trainer_of(
            stage,
            enable_checkpointing=True,
            callbacks=[ModelCheckpoint(folder / f"stage{stage}", save_last=True)],
        )
        trainer.fit(module, loader(RANKS), loader(RANKS), ckpt_path="last")
        found[str(stage)] = {
            "losses": rounded(module.losses),
            "seen": rounded(module.seen),
            "sum": rounded([sum_of(trainer)]),
        }
        found[str(stage)]["steps"] = trainer.global_step
        found[str(stage)]["lr"] = rounded([trainer.optimizers[0].param_groups[0]["lr"]])
    module = Regression()  # another stage, from a path
    trainer = trainer_of(3)
    trainer.fit(module, loader(RANKS), loader(RANKS), ckpt_path=folder / "stage1" / "best.ckpt")
    found["1 to 3"] = {
        "losses": rounded(module.losses),
        "seen": rounded(module.seen),
        "sum": rounded([sum_of(trainer)]),
    }
    module = Regression()  # a file of DDP's, with its moments
    trainer = trainer_of(3)
    trainer.fit(module, loader(RANKS), loader(RANKS), ckpt_path=folder / "ddp.ckpt")
    found["ddp to 3"] = {
        "losses": rounded(module.losses),
        "seen": rounded(module.seen),
        "sum": rounded([sum_of(trainer)]),
    }
    adversaries = Adversaries()
    trainer = trainer_of(2)
    trainer.fit(adversaries, loader(RANKS), ckpt_path=folder / "manual" / "a.ckpt")
    found["manual"] = {"losses": rounded(adversaries.losses)}
    return found


@case
def evaluates_checkpoints(folder: Path) -> Any:
    """Evaluation of saved weights by a Trainer that has trained nothing."""
    found: dict[str, Any] = {}
    for name in ("stage1/best.ckpt", "stage3/best.ckpt", "stage3/weights.ckpt", "ddp.ckpt"):
        for stage in (2, 3):
            module = Regression()
            trainer_of(stage).test(module, loader(RANKS), ckpt_path=folder / name, verbose=False)
            found[f"{name} {stage}"] = rounded(module.seen)
    if RANK == 0:
        consolidate(folder / "stage3" / "best.ckpt", folder / "whole.ckpt")
        consolidate(folder / "stage3" / "weights.ckpt", folder / "whole_weights.ckpt")
        consolidate(folder / "manual" / "a.ckpt", folder / "whole_manual.ckpt")
        Adversaries.load_from_checkpoint(folder / "whole_manual.ckpt")
    dist.barrier()
    for name in ("whole", "whole_weights"):
        module = Regression.load_from_checkpoint(folder / f"{name}.ckpt")
        trainer_of("ddp").test(module, loader(RANKS), verbose=False)
        found[name] = rounded(module.seen)
    return found


@case
def one_run_after_another(folder: Path) -> Any:
    """Validate, fit, test, save, fit again and predict with one Trainer; then use the module with others."""
    found: dict[str, Any] = {}
    for stage in ("ddp", 1, 3):
        module, strategy = Regression(), strategy_of(stage)
        trainer = trainer_of(strategy, max_epochs=1)
        trainer.validate(module, loader(RANKS), verbose=False)
        trainer.fit(module, loader(RANKS), loader(RANKS))
        trainer.test(module, loader(RANKS), verbose=False)
        trainer.save_checkpoint(folder / f"after{stage}.ckpt")
        trainer.fit_loop.max_epochs = 2
        trainer.fit(module, loader(RANKS))
        trainer.validate(module, loader(RANKS), verbose=False)
        made = trainer.predict(module, loader(RANKS))
        trainer.fit_loop.max_epochs = 3
        trainer.fit(module, loader(RANKS), ckpt_path=folder / f"after{stage}.ckpt")
        total = sum(float(each.double().sum()) for each in made)  # type: ignore[union-attr, arg-type]
        found[str(stage)] = {
            "losses": rounded(module.losses),
            "seen": rounded(module.seen),
            "predicted": rounded([trainer.strategy.reduce(torch.tensor(total))]),
        }
        if stage == "ddp":
            continue
        module.seen.clear()
        second = trainer_of(stage)
        refused = raised(lambda: second.validate(module, loader(RANKS), verbose=False))  # noqa: B023
        strategy.release()
        second.validate(module, loader(RANKS), verbose=False)
        second.strategy.release()  # type: ignore[attr-defined]
        trainer_of("ddp").validate(module, loader(RANKS), verbose=False)
        found[f"afterwards {stage}"] = {"refused": refused, "seen": rounded(module.seen)}
    return found


@case
def init(folder: Path) -> Any:
    """Layers that `configure_model` makes inside zero_full.Init, which holds no values."""
    found: dict[str, Any] = {"ddp": fit("ddp")}
    for stage in (2, 3):
        found[str(stage)] = fit(stage, Regression(in_configure_model=True))
        found[f"{stage} bf16"] = fit(stage, Regression(in_configure_model=True), precision="bf16-mixed")
        found[f"{stage} bf16-true"] = fit(stage, Regression(in_configure_model=True), precision="bf16-true")
    return found


@case
def callbacks_and_loggers(folder: Path) -> Any:
    found: dict[str, Any] = {}
    for stage in ("ddp", 3):
        at = folder / f"callbacks{stage}"
        stops = EarlyStopping("val_loss", patience=0, min_delta=0.25)
        saves = ModelCheckpoint(at, "{step}", monitor="train_loss", save_top_k=2, every_n_train_steps=2)
        logger = CSVLogger(at, "log", version=0)
        module = Regression()
        trainer = trainer_of(
            stage,
            max_epochs=20,
            callbacks=[stops, saves, LearningRateMonitor("step")],
            enable_checkpointing=True,
            logger=logger,
            log_every_n_steps=1,
            enable_model_summary=True,
        )
        trainer.fit(module, loader(RANKS), loader(RANKS))
        best = Regression()
        trainer.test(best, loader(RANKS), ckpt_path="best", verbose=False)
        dist.barrier()
        found[str(stage)] = {
            "epochs": trainer.current_epoch,
            "left": sorted(path.name for path in at.glob("*.ckpt")),
            "logged": (at / "log" / "version_0" / "metrics.csv").read_text() if RANK == 0 else "",
            "losses": rounded(best.seen),
        }
    return found


class Shared(Adversaries):
    """Both optimizers have one parameter."""

    def configure_optimizers(self) -> Any:
        both = [*self.maker.parameters()], [*self.judge.parameters(), self.maker[0].weight]
        return [torch.optim.Adam(each) for each in both]  # type: ignore[arg-type]


class Direct(Adversaries):
    """A parameter of one of two optimizers lies in the root."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(5))

    def configure_optimizers(self) -> Any:
        both = [*self.maker.parameters(), self.gain], [*self.judge.parameters()]
        return [torch.optim.Adam(each) for each in both]


class ByLBFGS(Regression):
    """An optimizer that calls its closure several times."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


@case
def refusals(folder: Path) -> Any:
    def fitting(module: Any = None, config: Any = None, **options: Any) -> Callable[[], Any]:
        strategy = ZeroStrategy(2, config)
        return lambda: trainer_of(strategy, **options).fit(module or Regression(), loader(RANKS))

    def twice() -> None:
        strategy = ZeroStrategy(2)
        for precision in ("bf16-mixed", "32-true"):
            trainer_of(strategy, accelerator="auto", precision=precision)

    refused = {
        "find_unused_parameters": lambda: ZeroStrategy(find_unused_parameters=True),
        "start_method": lambda: ZeroStrategy(start_method="spawn"),
        "ddp_comm_hook": lambda: ZeroStrategy(ddp_comm_hook=print),
        "stage": lambda: ZeroStrategy(4),
        "zero_optimization.stage": lambda: ZeroStrategy(2, {"zero_optimization": {"stage": 3}}),
        "gradient_accumulation_steps": fitting(config={"gradient_accumulation_steps": 2}),
        "gradient_clipping": fitting(config={"gradient_clipping": 1.0}),
        "optimizer": fitting(config={"optimizer": {"type": "Adam"}}),
        "bf16.enabled": fitting(config={"bf16": {"enabled": True}}),
        "reduce_bucket_sizes": fitting(config={"zero_optimization": {"reduce_bucket_sizes": 1}}),
        "64-true": fitting(precision="64-true"),
        "16-true": fitting(precision="16-true"),
        "gradient_clip_algorithm": fitting(gradient_clip_val=1.0, gradient_clip_algorithm="value"),
        "sync_batchnorm": fitting(sync_batchnorm=True),
        "AsyncCheckpointIO": fitting(plugins=[AsyncCheckpointIO()]),
        "LBFGS": fitting(ByLBFGS()),
        "maker.0.weight": fitting(Shared()),
        "gain": fitting(Direct()),
        "16-mixed": fitting(Adversaries(), plugins=[ZeroPrecision("16-mixed")]),
        "parallel_devices": twice,  # by Lightning: a strategy object belongs to one Trainer
    }
    return {name: raised(call) for name, call in refused.items()}


class Differs(Regression):
    """On rank 1 one layer does not run."""

    def forward(self, inputs: Tensor) -> Any:
        layers = [self.net[0], self.net[1]] if RANK else [*self.net]
        for layer in layers:
            inputs = layer(inputs)
        return inputs[:, :5] * self.gain


@case
def forward_differs_by_rank(folder: Path) -> Any:
    """Stages 1 and 2 average the gradients that there are, as DDP that finds unused parameters does."""
    found = {}
    for stage in (DDPStrategy(find_unused_parameters=True), 1, 2):
        module = Differs()
        trainer_of(stage, max_epochs=1).fit(module, loader(RANKS))
        found[str(stage) if isinstance(stage, int) else "ddp"] = rounded(module.losses)
    return found


@case
def desync(folder: Path) -> Any:
    """Stage 3 cannot gather what only one rank needs: the launch ends with an error."""
    checks = {"debug": {"check_collectives": True, "timeout_s": 5}}
    trainer_of(strategy_of(3, **checks)).fit(Differs(), loader(RANKS))


class Dies(lightning.Callback):
    """Kills rank 1 in the first attempt of torchrun."""

    def on_train_batch_end(self, trainer: Any, *others: Any) -> None:
        first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if RANK == 1 and first and trainer.global_step == 8:
            os.kill(os.getpid(), signal.SIGKILL)


@case
def killed(folder: Path) -> Any:
    """A rank is killed; torchrun starts all again, and they go on from the last checkpoint."""
    module = Regression()
    saves = ModelCheckpoint(folder / "killed", save_last=True, every_n_train_steps=3)
    trainer = trainer_of(3, callbacks=[saves, Dies()], enable_checkpointing=True)
    trainer.fit(module, loader(RANKS), ckpt_path="last")
    return {"losses": rounded(module.losses)}
