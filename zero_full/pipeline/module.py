"""`PipelineModule`: a model as a list of layers, of which each rank builds those of its pipeline stages.

    model = PipelineModule(
        [TiedLayerSpec("embed", Embedding, 50_000, 512), *(LayerSpec(Block, 512) for _ in range(24)), head],
        num_stages=4,
        loss_fn=cross_entropy,
    )
    engine, *_ = zero_full.initialize(model=model, config="ds_config.json")
    loss = engine.train_batch(data_iter)

Layer N's parameters are named `layers.N.*`, and those of tied layers `tied.KEY.*`, at any number of stages.
So a checkpoint can be loaded at any other.

On torch's meta device (`with torch.device("meta")`) the module is a description for `plan`: it has the layers
of the first rank, needs no other ranks and cannot be trained.

[Note: stages and ranks] A pipeline has `num_stages` ranks with `stages_per_rank` stages each. Rank r of W has
place r // (W / num_stages) in its pipeline, and neighbouring ranks train on different data. The place p of P
has the stages

    "loop"  p, p + P, p + 2P, ...    interleaved schedules
    "v"     p and 2P - 1 - p         zero-bubble schedules of two stages per rank: the first place is the last
"""

import dis
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from zero_full.comm.topology import Topology, new_group, this_rank
from zero_full.nested import leaves
from zero_full.pipeline.partition import partition
from zero_full.start.launch import init_distributed
from zero_full.start.startup_checks import attempt, compare, gather_objects

PLACEMENTS = ("loop", "v")
TIED = (
    "{what} of layer {later} (stage {there}) is also in layer {first} (stage {here}). Each stage would train "
    "a copy of its own. Use TiedLayerSpec with one key for both layers"
)


class LayerSpec:
    """A layer that is built only on the ranks of its stage: its class or function, and the arguments."""

    def __init__(self, typename: Callable[..., Any], *module_args: Any, **module_kwargs: Any) -> None:
        if not callable(typename):
            raise TypeError(f"LayerSpec needs a class or a function that builds the layer, not {typename!r}")
        self.typename, self.module_args, self.module_kwargs = typename, module_args, module_kwargs

    @property
    def name(self) -> str:
        """The name of the layer's class."""
        return getattr(self.typename, "__name__", type(self.typename).__name__)

    def build(self) -> Any:
        """Construct the layer."""
        return self.typename(*self.module_args, **self.module_kwargs)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name})"


class TiedLayerSpec(LayerSpec):
    """A layer that shares its module with all layers of the same key, on whichever stages they are.

    key               name of the shared module
    forward_fn        called as `forward_fn(module, inputs)` instead of the module
    tied_weight_attr  the names of all parameters of the module, as in DeepSpeed; the whole module is tied
    """

    def __init__(
        self,
        key: str,
        typename: Callable[..., Any],
        *module_args: Any,
        forward_fn: Callable[[Any, Any], Any] | None = None,
        tied_weight_attr: str | Sequence[str] | None = None,
        **module_kwargs: Any,
    ) -> None:
        super().__init__(typename, *module_args, **module_kwargs)
        if not key or "." in key:
            raise ValueError(f"the key of a TiedLayerSpec must be a name without a dot, not {key!r}")
        self.key, self.forward_fn = key, forward_fn
        self.tied_weight_attr = [tied_weight_attr] if isinstance(tied_weight_attr, str) else tied_weight_attr


class PipelineModule(nn.Module):
    """A model as a list of layers; this rank has those of its stages. Every rank must construct it.

    num_stages       ranks of one pipeline
    num_layers       layers of the whole model
    stages           this rank's stages of all `total_stages`, in ascending order
    parts            the layers of each stage, of all ranks
    place            this rank's place in its pipeline
    owners           for each key of tied layers, the stages that use it; the first one owns the module
    """

    def __init__(
        self,
        layers: Sequence[Any],
        num_stages: int | None = None,
        topology: Topology | None = None,
        loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        *,
        stages_per_rank: int = 1,
        placement: str = "loop",
        base_seed: int | None = None,
    ) -> None:
        """
        layers                          `LayerSpec`, `TiedLayerSpec`, modules, and functions of the inputs.
                                        Each gets what the one before it has returned, as one argument
        num_stages                      ranks of one pipeline; the other ranks train on other data
        topology                        groups with `pipe`, in place of `num_stages`
        loss_fn                         makes a scalar of the last layer's output and the labels; None: the
                                        last layer returns the loss
        partition_method                "uniform", "parameters" or "type:REGEX": see `partition.py`
        activation_checkpoint_interval  recompute the activations of so many layers at a time in backward;
                                        0: keep all
        stages_per_rank, placement      see [Note: stages and ranks]
        base_seed                       layer N is built with the random seed `base_seed + N`, so its values
                                        do not depend on the number of stages; None: torch.initial_seed()
        """
        super().__init__()
        self.is_description = torch.get_default_device().type == "meta"
        if not self.is_description:
            init_distributed()
            if not dist.is_initialized():
                raise RuntimeError(
                    "PipelineModule needs torch.distributed: start the script with torchrun, with one rank "
                    'for each stage. To plan its memory, build it under torch.device("meta")'
                )
        self.given_topology, self.loss_fn = topology, loss_fn
        self.place, self.num_stages = _place(num_stages, topology, self.is_description)
        _check_counts(stages_per_rank, placement, activation_checkpoint_interval)
        self.stages_per_rank, self.placement = stages_per_rank, placement
        self.total_stages = self.num_stages * stages_per_rank
        self.partition_method = partition_method
        self.activation_checkpoint_interval = activation_checkpoint_interval
        self.specs = [*layers]
        self.num_layers = len(self.specs)
        self.layers = nn.ModuleDict()
        self.tied = nn.ModuleDict()
        self._calls: dict[int, Callable[[Any], Any]] = {}
        self.base_seed = torch.initial_seed() if base_seed is None else base_seed
        if self.is_description:
            self._build()
            return
        # Equal on all ranks: copies of a tied layer are built with it.
        seeds = gather_objects(self.base_seed, Topology())
        self.base_seed = seeds[min(seeds)]
        attempt(self._build, Topology())
        compare({"the layers of the PipelineModule": dict(self._facts())}, Topology())

    # Stages --------------------------------------------------------------------------------------

    def place_of(self, stage: int) -> int:
        """Return the place in the pipeline of the rank that has this stage."""
        turn, place = divmod(stage, self.num_stages)
        return self.num_stages - 1 - place if self.placement == "v" and turn % 2 else place

    def stage_of(self, layer: int) -> int:
        """Return the stage of a layer."""
        return next(stage for stage, part in enumerate(self.parts) if layer in part)

    def open_topology(self) -> Topology:
        """Open the process groups of this rank's pipeline and of the ranks with the same stages.

        Every rank must call this. The engine that uses the topology closes them.
        """
        if self.is_description:
            raise ValueError(
                "this PipelineModule was built on the meta device, which describes it for a plan. Build the "
                'model to be trained without torch.device("meta"): a LayerSpec builds only its rank\'s layers'
            )
        if self.given_topology is not None:
            return replace(self.given_topology, is_copy=self.is_copy)
        world = dist.group.WORLD
        assert world is not None
        width, rank = world.size() // self.num_stages, world.rank()
        first = self.place * width
        data = new_group([*range(first, first + width)], world)
        pipe = new_group([*range(rank % width, world.size(), width)], world)
        return Topology(data=data, pipe=pipe, is_copy=self.is_copy, opened=(data, pipe))

    # Building ------------------------------------------------------------------------------------

    def _build(self) -> None:
        """Choose the stages' layers, and build this rank's."""
        if not self.specs:
            raise ValueError("a PipelineModule needs at least one layer")
        for number, spec in enumerate(self.specs):
            if not (isinstance(spec, (LayerSpec, nn.Module)) or callable(spec)):
                raise TypeError(
                    f"layer {number} is {type(spec).__name__}. Pass a LayerSpec, a module or a function"
                )
        names = [_name_of(spec) for spec in self.specs]
        self.parts = partition(self.partition_method, names, self._numels, self.total_stages)
        self.stages = [s for s in range(self.total_stages) if self.place_of(s) == self.place]
        self.owners: dict[str, list[int]] = {}
        for number, spec in enumerate(self.specs):
            if isinstance(spec, TiedLayerSpec):
                stages = self.owners.setdefault(spec.key, [])
                if (stage := self.stage_of(number)) not in stages:
                    stages.append(stage)
        self._check_not_shared()
        for stage in self.stages:
            for number in self.parts[stage]:
                self._calls[number] = self._built(number, self.specs[number])
        self._check_arguments()

    def _facts(self) -> Iterator[tuple[str, Any]]:
        """Yield the facts that must be equal on every rank."""
        for name in ("num_stages", "stages_per_rank", "placement", "partition_method"):
            yield name, getattr(self, name)
        for number, spec in enumerate(self.specs):
            yield f"layer {number}", _name_of(spec)
        for stage, part in enumerate(self.parts):
            yield f"layers of stage {stage}", f"{part.start} to {part.stop - 1}"

    def _built(self, number: int, spec: Any) -> Callable[[Any], Any]:
        """Build a layer of this rank, register its module, and return its function of the inputs."""
        if isinstance(spec, TiedLayerSpec):
            first = next(n for n, s in enumerate(self.specs) if getattr(s, "key", None) == spec.key)
            if spec.key not in self.tied:
                made = self._make(first, self.specs[first])
                if not isinstance(made, nn.Module):
                    raise TypeError(f"layer {first} ({spec.name}) is tied, so it must be a module")
                self.tied[spec.key] = made
            _check_tied(number, spec, self.tied[spec.key])
            return _call_tied(self.tied[spec.key], spec.forward_fn)
        made = self._make(number, spec) if isinstance(spec, LayerSpec) else spec
        if isinstance(made, nn.Module):
            self.layers[str(number)] = made
        elif not callable(made):
            raise TypeError(f"layer {number} ({spec!r}) has built {type(made).__name__}, which is no layer")
        return made  # type: ignore[no-any-return]

    def _make(self, number: int, spec: LayerSpec) -> Any:
        """Build a layer with the random seed of its number. The global generators stay as they are."""
        try:
            with _forked_rng():
                torch.manual_seed(self.base_seed + number)
                return spec.build()
        except Exception as error:
            raise ValueError(
                f"layer {number} ({spec.name}) of stage {self.stage_of(number)} cannot be built: "
                f"{type(error).__name__}: {error}"
            ) from error

    def _numels(self) -> list[int]:
        """Return the number of trainable elements of each layer. Layers are built without memory for it."""
        numels = []
        for number, spec in enumerate(self.specs):
            made = spec
            if isinstance(spec, LayerSpec):
                try:
                    with _forked_rng(), torch.device("meta"):
                        made = spec.build()
                except Exception as error:
                    raise ValueError(
                        f"layer {number} ({spec.name}) cannot be built on the meta device, to count its "
                        f"parameters: {type(error).__name__}: {error}. Use partition_method='uniform'"
                    ) from error
            params = made.parameters() if isinstance(made, nn.Module) else ()
            numels.append(sum(p.numel() for p in params if p.requires_grad))
        return numels

    def _check_not_shared(self) -> None:
        """Raise ValueError if two stages use one module or parameter that is not tied."""
        seen: dict[int, int] = {}
        for number, spec in enumerate(self.specs):
            for what, param in _owned(spec):
                first = seen.setdefault(id(param), number)
                here, there = self.stage_of(first), self.stage_of(number)
                if here != there:
                    raise ValueError(
                        TIED.format(what=what, later=number, there=there, first=first, here=here)
                    )
        modules = [spec for spec in self.specs if isinstance(spec, nn.Module)]
        trained = {id(param) for module in modules for param in module.parameters()}
        if outside := [number for key, number in seen.items() if key not in trained]:
            raise ValueError(
                f"layer {outside[0]} is a function that uses a module which is no layer of this model, so "
                "its parameters would not be trained. Pass the module as a layer, or a LayerSpec of it"
            )

    def _check_arguments(self) -> None:
        """Raise ValueError if a layer of this rank has a parameter that a layer of another stage also gets.

        Arguments of a LayerSpec may be modules. Classes may use them, or copy them: only built layers tell.
        """
        users: dict[int, dict[int, None]] = {}  # by parameter, the layers whose specs refer to it
        keys = set[str]()
        for number, spec in enumerate(self.specs):
            if isinstance(spec, TiedLayerSpec):
                if spec.key in keys:  # the first one builds the module
                    continue
                keys.add(spec.key)
            for param in _referred(spec):
                users.setdefault(id(param), {})[number] = None
        for number, spec in enumerate(self.specs):
            module, key = self._module_of(number), getattr(spec, "key", None)
            for name, param in module.named_parameters() if module is not None else ():
                for other in users.get(id(param), ()):
                    here, there = self.stage_of(number), self.stage_of(other)
                    is_tied = key is not None and key == getattr(self.specs[other], "key", None)
                    if here != there and not is_tied:
                        raise ValueError(
                            TIED.format(what=name, later=number, there=here, first=other, here=there)
                        )

    def _module_of(self, layer: int) -> nn.Module | None:
        """Return a layer's module; None for a function, and if this rank has not built it."""
        spec = self.specs[layer]
        held, name = (self.tied, spec.key) if isinstance(spec, TiedLayerSpec) else (self.layers, str(layer))
        return next((module for key, module in held.items() if key == name), None)

    def modules_of(self, stage: int) -> list[nn.Module]:
        """Return the modules of one of this rank's stages."""
        found = map(self._module_of, self.parts[stage])
        return [module for module in found if module is not None]

    def shared_keys(self) -> list[str]:
        """Return the keys of tied layers that several ranks of a pipeline have."""
        return [key for key, stages in self.owners.items() if len({*map(self.place_of, stages)}) > 1]

    def is_copy(self, name: str, parameter: nn.Parameter | None = None) -> bool:
        """Return whether this is a tied parameter or buffer that a rank with an earlier stage owns."""
        kind, _, rest = name.partition(".")
        key = rest.partition(".")[0]
        return kind == "tied" and key in self.owners and self.place_of(self.owners[key][0]) != self.place

    # Running -------------------------------------------------------------------------------------

    def run(self, stage: int, inputs: Any) -> Any:
        """Run the layers of one of this rank's stages."""
        part, interval = self.parts[stage], self.activation_checkpoint_interval
        recomputes = interval > 0 and torch.is_grad_enabled()
        for first in range(part.start, part.stop, interval or len(part)):
            run = partial(self._run_layers, range(first, min(first + (interval or len(part)), part.stop)))
            inputs = checkpoint(run, inputs, use_reentrant=False) if recomputes else run(inputs)
        return inputs

    def _run_layers(self, layers: range, inputs: Any) -> Any:
        for number in layers:
            inputs = self._calls[number](inputs)
        return inputs

    def forward(self, inputs: Any) -> Any:
        """Run all layers, on a rank that has all stages."""
        if len(self.stages) < self.total_stages:
            raise RuntimeError(
                f"this rank has stages {self.stages} of {self.total_stages}, so it cannot run the model "
                "alone. Call train_batch or eval_batch of the engine on every rank"
            )
        for stage in self.stages:
            inputs = self.run(stage, inputs)
        return inputs


def _place(num_stages: int | None, topology: Topology | None, is_description: bool) -> tuple[int, int]:
    """Return this rank's place in its pipeline, and the pipeline's number of ranks."""
    if topology is not None:
        pipe = topology.pipe
        if pipe is None or num_stages not in (None, pipe.size()):
            has = "no `pipe` group" if pipe is None else f"a `pipe` group of {pipe.size()} ranks"
            raise ValueError(f"the topology of a PipelineModule with num_stages={num_stages} has {has}")
        return pipe.rank(), pipe.size()
    if not isinstance(num_stages, int) or isinstance(num_stages, bool) or num_stages < 1:
        raise ValueError(f"num_stages must be a number of ranks above 0, not {num_stages!r}")
    if is_description:
        return 0, num_stages
    world = dist.get_world_size()
    if world % num_stages:
        raise ValueError(
            f"{world} ranks cannot be divided into pipelines of {num_stages} stages. Start a multiple of "
            f"{num_stages} ranks"
        )
    return this_rank() // (world // num_stages), num_stages


def _name_of(spec: Any) -> str:
    """Return the name of a layer's class or function."""
    return spec.name if isinstance(spec, LayerSpec) else getattr(spec, "__name__", type(spec).__name__)


def _check_counts(stages_per_rank: int, placement: str, interval: int) -> None:
    if placement not in PLACEMENTS:
        raise ValueError(f"placement must be one of {', '.join(PLACEMENTS)}, not {placement!r}")
    for name, value, least in (
        ("stages_per_rank", stages_per_rank, 1),
        ("activation_checkpoint_interval", interval, 0),
    ):
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value < inf:
            raise ValueError(f"{name} must be a whole number of at least {least}, not {value!r}")
    if placement == "v" and stages_per_rank != 2:
        raise ValueError(f'placement "v" needs stages_per_rank=2, not {stages_per_rank}')


def _check_tied(number: int, spec: TiedLayerSpec, module: nn.Module) -> None:
    """Raise ValueError if `tied_weight_attr` names some of the module's parameters only."""
    names = {name for name, _ in module.named_parameters()}
    if spec.tied_weight_attr is not None and {*spec.tied_weight_attr} != names:
        raise ValueError(
            f"layer {number}: tied_weight_attr is {[*spec.tied_weight_attr]}, but {spec.name} has the "
            f"parameters {sorted(names)}. A TiedLayerSpec ties the whole module: give parameters that are "
            "not tied a layer of their own"
        )


def _call_tied(module: nn.Module, forward_fn: Callable[[Any, Any], Any] | None) -> Callable[[Any], Any]:
    return module if forward_fn is None else partial(forward_fn, module)


def _owned(spec: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters that a layer uses: those of a module, or of modules that a function refers to."""
    if isinstance(spec, LayerSpec):
        if isinstance(spec, TiedLayerSpec) and spec.forward_fn is not None:
            yield from _owned(spec.forward_fn)
        return
    if isinstance(spec, nn.Module):
        yield from (("module " + name, p) for name, p in spec.named_parameters(remove_duplicate=False))
        return
    cells = getattr(spec, "__closure__", None) or ()
    referred: list[Any] = [cell.cell_contents for cell in cells if _is_filled(cell)]
    referred += [getattr(spec, "__self__", None), *_globals_of(spec)]
    if isinstance(spec, partial):
        referred += [spec.func, *spec.args, *spec.keywords.values()]
    for each in leaves(referred):
        if isinstance(each, nn.Module):
            yield from _owned(each)
        elif isinstance(each, nn.Parameter):
            yield "a parameter", each


def _globals_of(function: Any) -> list[Any]:
    """Return the modules and parameters among the global variables that a function reads."""
    code, known = getattr(function, "__code__", None), getattr(function, "__globals__", {})
    if code is None:
        return []
    names = {each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL"}
    return [each for name in names if isinstance(each := known.get(name), (nn.Module, nn.Parameter))]


def _referred(spec: Any) -> list[nn.Parameter]:
    """Return the parameters of a module, or of the arguments of a LayerSpec."""
    given = [spec.module_args, spec.module_kwargs] if isinstance(spec, LayerSpec) else [spec]
    found = list[nn.Parameter]()
    for each in leaves(given):
        if isinstance(each, nn.Module):
            found += each.parameters()
        elif isinstance(each, nn.Parameter):
            found.append(each)
    return found


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # the variable has no value yet
        return False


def _forked_rng() -> AbstractContextManager[Any]:
    """Restore the random number generators of the CPU and of this rank's device at the end."""
    if not torch.accelerator.is_available():
        return torch.random.fork_rng(devices=[])
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    return torch.random.fork_rng([torch.accelerator.current_device_index()], device_type=kind.type)
