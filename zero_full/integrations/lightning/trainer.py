"""`ZeroStrategy`: a strategy of Lightning's Trainer that trains with engines of zero_full.

Lightning's loops run as they are. The strategy replaces the optimizers of `configure_optimizers` by the
engines', and runs each step of the LightningModule inside a call of the module, where the engine's hooks are.

[Note: the engine's life] An engine begins in `setup` and stays after the run ends, so that `Trainer.test` and
`Trainer.save_checkpoint` continue with it. It ends when another module or another fit needs one, or by
`ZeroStrategy.release`.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn

import zero_full
from zero_full.engine.engine import Engine
from zero_full.integrations.lightning import folder
from zero_full.integrations.lightning.arguments import Arguments
from zero_full.integrations.lightning.configuration import engine_config
from zero_full.integrations.lightning.engines import make_engines, without_sync
from zero_full.integrations.lightning.precision import ZeroPrecision, check_clipping, name_of, unwrapped


class ZeroStrategy(Arguments, DDPStrategy):
    """Trains the LightningModule with ZeRO: `Trainer(strategy=ZeroStrategy(stage=3))`.

    stage    0, 1, 2 or 3; None: the configuration's, or 3
    config   a dict, or the path of a JSON file, with DeepSpeed's keys, without those that Lightning decides
    others   accelerator, parallel_devices, cluster_environment, process_group_backend, timeout and
             precision_plugin as in DDPStrategy

    engines  one for each optimizer; () before the first run
    """

    strategy_name = "zero_full"
    precision_argument = "precision_plugin"
    optimizers: Any  # Lightning's property

    def __init__(
        self, stage: int | None = None, config: Mapping[str, Any] | str | Path | None = None, **others: Any
    ) -> None:
        super().__init__(stage, config, **others)
        self.engines: tuple[Engine, ...] = ()
        self._sharded_module: nn.Module | None = None  # the module of the engines

    # What the Trainer decides --------------------------------------------------------------------

    @property
    def precision_plugin(self) -> ZeroPrecision:
        """The engine's precision, by the name that the Trainer got."""
        plugin = self._precision_plugin
        return plugin if plugin is not None else ZeroPrecision()

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        same = plugin is None or isinstance(plugin, ZeroPrecision)
        self._precision_plugin = plugin if same else ZeroPrecision(name_of(plugin))

    @property
    def checkpoint_io(self) -> Any:
        """The plugin that reads files of other strategies. The engine writes checkpoints of this one."""
        return TorchCheckpointIO()

    @checkpoint_io.setter
    def checkpoint_io(self, plugin: Any) -> None:
        if type(plugin) is not TorchCheckpointIO:
            raise ValueError(
                f"{type(plugin).__name__} is not used with zero_full: every rank writes its part of a "
                "checkpoint. Remove the plugin"
            )

    @property
    def _layer_sync(self) -> Any:
        """Lightning's plugin that converts BatchNorm layers: None, as no layer is converted."""
        return None

    @_layer_sync.setter
    def _layer_sync(self, conversion: Any) -> None:
        if conversion is not None:
            raise ValueError(
                "sync_batchnorm=True is not supported with zero_full: after a run Lightning would replace "
                "modules of the engine. Call torch.nn.SyncBatchNorm.convert_sync_batchnorm in the "
                "LightningModule's __init__"
            )

    def _check_trainer(self, trainer: Any) -> None:
        """Raise for options of the Trainer that this strategy does not support."""
        algorithm = trainer.gradient_clip_algorithm
        if algorithm is not None:
            check_clipping(str(getattr(algorithm, "value", algorithm)))

    # The engines: see [Note: the engine's life] --------------------------------------------------

    def setup(self, trainer: Any) -> None:
        """Make the engines for this run of the Trainer, or continue with those of the last run."""
        self._check_trainer(trainer)
        self.accelerator.setup(trainer)
        is_fit, module = trainer.state.fn == TrainerFn.FITTING, self.lightning_module
        if is_fit or self._sharded_module is not module:
            self.release()
            self.model = self.precision_plugin.convert_module(module)
            if is_fit:
                self.setup_optimizers(trainer)
            self._shard(is_fit)
        self.setup_precision_plugin()

    def _shard(self, is_fit: bool) -> None:
        """Make the engines, and replace the optimizers by theirs."""
        config = engine_config(self.stage, self.config, self.precision_plugin.precision)
        module: nn.Module = self.lightning_module
        engines, optimizers = make_engines(module, [*self.optimizers] if is_fit else [], config)
        self.engines, self._sharded_module = tuple(engines), module
        if is_fit:
            self.optimizers = optimizers

    def release(self) -> None:
        """End the engines and leave a whole module on every rank. Every rank must call this.

        Another Trainer, or plain torch, can use the module afterwards. At stage 3 this takes memory for the
        whole model on every rank.
        """
        engines, self.engines, self._sharded_module = self.engines, (), None
        for engine in engines:
            engine.destroy(gather=True)

    def teardown(self) -> None:
        """End a run. The engines stay, see [Note: the engine's life]."""
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    def model_to_device(self) -> None:
        """Do nothing: `initialize` moves the module."""

    def configure_ddp(self) -> None:
        """Do nothing: the engine averages gradients."""

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Make modules of `configure_model` without memory at stage 3; the engine fills its shards."""
        with zero_full.Init(enabled=self.stage == 3):
            yield

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Make tensors on the device, at stage 3 where `Init` records them."""
        if self.stage == 3:
            with self.precision_plugin.tensor_init_context():
                yield
        else:
            with super().tensor_init_context(empty_init):
                yield

    # Steps ---------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the LightningModule's `training_step`."""
        with self.precision_plugin.train_step_context():
            return self._run("training_step", args, kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the LightningModule's `validation_step`."""
        with self.precision_plugin.val_step_context():
            return self._run("validation_step", args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the LightningModule's `test_step`."""
        with self.precision_plugin.test_step_context():
            return self._run("test_step", args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the LightningModule's `predict_step`."""
        with self.precision_plugin.predict_step_context():
            return self._run("predict_step", args, kwargs)

    def _run(self, name: str, args: Any, kwargs: Any) -> Any:
        """Run a method of the LightningModule, inside a call of the module if it only runs forward.

        With manual optimization `training_step` also runs backward and steps, and the engine cannot step
        inside a forward. With several engines none of them has the whole module.
        """
        module = self.lightning_module
        method = getattr(module, name)
        steps = name == "training_step" and not module.automatic_optimization
        if steps or len(self.engines) != 1:
            return method(*args, **kwargs)
        return call_inside(self.engines[0], module, method, args, kwargs)

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss times the loss scale."""
        return self.engines[0].scale(loss) if len(self.engines) == 1 else loss

    def block_backward_sync(self) -> AbstractContextManager[Any]:
        """Return a context for backward passes that do not complete a step."""
        return without_sync(self.engines, self.stage)

    def on_exception(self, exception: BaseException) -> None:
        """Do nothing: DDPStrategy explains errors of DistributedDataParallel here."""

    # Checkpoints ---------------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: checkpoints are loaded once the engines are made, as each rank reads its own shards."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Whether Lightning restores optimizer state: from a file of another strategy only."""
        return self._loads_file

    _loads_file = False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return nothing: the engine saves the parameters of every rank."""
        return {}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return nothing: the engine saves the optimizer state of every rank."""
        return {}

    def save_checkpoint(self, checkpoint: Any, filepath: Any, storage_options: Any = None) -> None:
        """Save a folder: see `folder.py`. Every rank must call this."""
        if storage_options is not None:
            raise TypeError("storage_options is not supported with zero_full, which writes to a local folder")
        if not self.engines:
            raise RuntimeError("save_checkpoint before the first run: there is no engine yet")
        path = self.broadcast(str(filepath))
        if Path(path).is_file() and self.is_global_zero:
            Path(path).unlink()  # a file of another strategy, which a new checkpoint replaces
        save = folder.save if "optimizer_states" in checkpoint else folder.save_weights
        save(self.engines, path, checkpoint)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        """Load a folder into the engines, or return the dictionary of a file of another strategy."""
        self._loads_file = not folder.is_folder(checkpoint_path)
        if self._loads_file:
            return super().load_checkpoint(checkpoint_path, weights_only)
        module = self.lightning_module
        is_fit = module.trainer.state.fn == TrainerFn.FITTING
        loaded = folder.load(
            self.engines,
            checkpoint_path,
            states=is_fit,
            strict=module.strict_loading,
            weights_only=weights_only,
        )
        return {"state_dict": {}, **loaded}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load whole parameters from a file's dictionary. `load_checkpoint` has loaded those of a folder."""
        if not self._loads_file:
            return
        if len(self.engines) != 1:
            raise NotImplementedError(
                "loading a file of another strategy with several optimizers is not implemented. Load the "
                "state_dict into the LightningModule before the run"
            )
        self.engines[0].load_module_state_dict(checkpoint["state_dict"], strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load whole optimizer state from a file's dictionary: make the engines again, with it."""
        trainer = self.lightning_module.trainer
        self.release()
        self.setup_optimizers(trainer)
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            unwrapped(optimizer).load_state_dict(state)
        self._shard(is_fit=True)


def call_inside(engine: Engine, module: nn.Module, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run a method of a module inside a call of the engine, where the hooks of the module have run.

    The module's `forward` is the method until the method begins, so that it can call the module itself.
    """
    own: Any = vars(module).get("forward")  # Lightning sets one, for compiled modules

    def restore() -> None:
        if own is None:
            vars(module).pop("forward", None)
        else:
            vars(module)["forward"] = own

    def forward(*args: Any, **kwargs: Any) -> Any:
        restore()
        return method(*args, **kwargs)

    vars(module)["forward"] = forward
    try:
        return engine(*args, **kwargs)
    finally:
        restore()
