"""The functions of the package `deepspeed` itself: `initialize`, and those that scripts call before it."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import polyreme
from polyreme.compat.deepspeed import comm, saving
from polyreme.compat.deepspeed.config_keys import MESH_CP, WHOLE_SEQUENCES
from polyreme.compat.deepspeed.config_values import DeepSpeedConfigError
from polyreme.compat.deepspeed.json_config import Translation, translate
from polyreme.compat.deepspeed.refusal import ArgumentError, OrderError, refused
from polyreme.compat.deepspeed.runtime import lr_schedules
from polyreme.compat.deepspeed.runtime.engine import DeepSpeedEngine
from polyreme.compat.deepspeed.runtime.pipe.engine import PipelineEngine, complete, placed, refuse_empty
from polyreme.compat.deepspeed.runtime.pipe.module import PipelineModule
from polyreme.compat.deepspeed.runtime.zero.partition_parameters import tag
from polyreme.compat.deepspeed.runtime.zero.utils import is_zero_supported_optimizer
from polyreme.compat.deepspeed.utils import groups
from polyreme.compat.deepspeed.utils.logging import log_dist
from polyreme.compat.deepspeed.utils.z3_leaf_module import z3_leaf_module
from polyreme.config import Config
from polyreme.distributed.environment import detect
from polyreme.distributed.mesh import everyone
from polyreme.errors import LaunchError, Problem
from polyreme.optim.groups import maker
from polyreme.zero.divided import make_whole, shaped
from polyreme.zero.parameter import GradReadPolicy, engine_of, record_of

FORMATS = {torch.float64: "fp64", torch.bfloat16: "bf16"}
"""The formats in which a model computes that was made in them, if the config says nothing else."""
BUFFERS = {"buffers": "rank0"}
"""The settings for buffers that forwards write, which DeepSpeed's configs have no key for."""
GRADIENTS = (
    "to clip, write gradient_clipping in the config; to read or change one, call safe_get_full_grad or "
    "safe_set_full_grad of deepspeed.utils on all ranks; for the norm of all, "
    "engine.get_global_grad_norm() after step()"
)


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Optimizer | Callable[[Any], Optimizer] | None = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: str | Path | Mapping[str, Any] | None = None,
    mesh_param: Any = None,
    config_params: str | Path | Mapping[str, Any] | None = None,
) -> tuple[DeepSpeedEngine, Any, Any, Any]:
    """Make `model` ready to train as a DeepSpeed config says. Returns the engine, its optimizer, a loader of
    `training_data` and the learning rate scheduler, with None for those that there are not.

    optimizer: a torch optimizer of the model's parameters, or a function that makes one of `model_parameters`
    (a list of parameters or groups; None: all that train); None: the config's. lr_scheduler: a scheduler of
    that optimizer, or a function that makes one of the engine's optimizer; None: the config's. config: a
    dictionary, the path of a file, or base64; `config_params` and `args.deepspeed_config` are other names for
    it.

    Raises DeepSpeedConfigError, with every problem, for a wrong config."""
    if model is None:
        raise OrderError("deepspeed.initialize() has nothing to train: give it model=, a torch.nn.Module")
    if mesh_param is not None:
        raise refused("initialize(mesh_param=...)", WHOLE_SEQUENCES, f"leave it out, {MESH_CP}")
    source = _source(args, config, config_params)
    tp = None if mpu is None else int(mpu.get_tensor_model_parallel_world_size())
    if not comm.is_initialized():
        _refuse_early(source, model, tp)
    comm.init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)
    _take_over(model)
    # a sampler of the script's may go by the seed of its random numbers, which is that of all ranks
    with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_available() else []):
        if isinstance(model, PipelineModule):
            if mpu is not None:
                raise OrderError(
                    "initialize(mpu=...) beside a PipelineModule, which has its own: leave it out"
                )
            front: DeepSpeedEngine = _pipeline(model, source, optimizer, model_parameters)
        else:
            given = _translated(model, source, everyone().size, tp)
            front = _plain(model, given, optimizer, model_parameters, mpu)
    translation = front.translation
    front.collate_fn, front.training_data = collate_fn, training_data
    front.client_optimizer, front.client_lr_scheduler = optimizer, lr_scheduler
    if front.dp_world_size == front.world_size:
        front.data_parallel_group = groups._get_data_parallel_group()
    if hasattr(args, "local_rank"):
        args.local_rank = comm.get_local_rank()
    _as_deepspeed(front)
    for note in translation.warnings:
        log_dist(f"{note.key} = {note.value!r}: {note.text}", ranks=[0], level=logging.WARNING)
    front.lr_scheduler = _scheduler(front, lr_scheduler, translation)
    if isinstance(front, PipelineEngine) and training_data is not None:
        front.build_data_iter(training_data)
    elif training_data is not None:
        front.training_dataloader = front.deepspeed_io(training_data)
    return front, front.optimizer, front.training_dataloader, front.lr_scheduler


def _as_deepspeed(front: DeepSpeedEngine) -> None:
    """Give the module and its parameters the methods and attributes that they have under DeepSpeed's ZeRO."""
    stage, here = front.translation.stage, (front.polyreme, front.module)
    policy = GradReadPolicy(GRADIENTS, hidden=stage > 1)
    for record in map(record_of, front.module.parameters()):
        record.grad_reads, record.listed = policy, stage == 3
    methods: dict[str, Callable[..., Any]] = {"zero_grad": saving.zero_grad} if stage else {}
    if stage == 3:
        tag(*here)
        saving.keep_engine(*here)
        methods |= {"_apply": saving.applied}
        if front.global_rank:
            methods |= {"state_dict": saving.state_dict}
    for name, method in methods.items():
        front.polyreme.patches.attribute(front.module, name, MethodType(method, front.module))


def _refuse_early(source: Any, model: nn.Module, tp: int | None) -> None:
    """Raise DeepSpeedConfigError for a wrong config before the ranks meet, as later a rank that fails would
    leave others waiting."""
    try:
        ranks = detect().world_size
    except LaunchError:  # MPI may know
        return
    stages = model.num_stages if isinstance(model, PipelineModule) else 1
    translate(source, ranks, pp=stages, tp=tp, made_in=_made_in(model))


def _translated(model: nn.Module, source: Any, ranks: int, tp: int | None) -> Translation:
    """Translate the config `source` for `model` on `ranks` ranks. Accelerate, which writes the batch into it,
    takes CPU ranks for single processes unless it is told the backend; the error for such a batch says so."""
    try:
        return translate(source, ranks, tp=tp, made_in=_made_in(model))
    except DeepSpeedConfigError as error:
        state = sys.modules.get("accelerate.state")
        if (
            ranks == 1
            or state is None
            or not state.is_initialized()
            or state.PartialState().num_processes > 1
        ):
            raise
        fix = (
            'Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")]), or --use_cpu of a Trainer'
        )
        reason = f"Accelerate sees a single process, and there are {ranks}: on CPUs it has to be told so"
        told = Problem("num_processes", 1, reason, fix)
        raise DeepSpeedConfigError([told, *error.problems]) from None


def _made_in(model: nn.Module) -> str:
    """Return the format of a model's parameters, if they have the same one, and the engine needs no more to
    train in it (fp16 needs a loss scale); else "fp32"."""
    found = _dtypes(model)
    return FORMATS.get(found.pop(), "fp32") if len(found) == 1 else "fp32"


def _dtypes(model: nn.Module) -> set[torch.dtype]:
    return {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}


def _warn_of_format(model: nn.Module, translation: Translation) -> None:
    """Log a warning if a model is trained in another format than it was made in, and the config does not say
    so."""
    found = _dtypes(model)
    if found <= {torch.float32} or translation.config["precision"]["compute"] != "fp32":
        return
    names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in found))
    text = (
        f"parameters are in {names}, and neither bf16 nor fp16 is enabled: they are trained in fp32, where "
        "DeepSpeed leaves each as it is; enable one of the two, or make the model in one format"
    )
    log_dist(text, ranks=[0], level=logging.WARNING)


def _counting(settings: dict[str, Any], given: Any) -> dict[str, Any]:
    """Return `settings` without the optimizer's keys that have no effect on an optimizer that is made
    already."""
    if given is None or isinstance(given, type):
        return settings
    own = {key: value for key, value in settings["optimizer"].items() if key in ("clip", "unused", "states")}
    return {**settings, "optimizer": own}


def _plain(
    model: nn.Module, translation: Translation, optimizer: Any, parameters: Any, mpu: Any
) -> DeepSpeedEngine:
    _warn_of_format(model, translation)
    made = _optimizer(model, optimizer, parameters, translation)
    _refuse_untested(made, translation)
    settings = BUFFERS | translation.config
    if leaves := [name for name, module in model.named_modules() if name and z3_leaf_module(module)]:
        settings["zero"] = {**settings["zero"], "keep": leaves}
    if made is torch.optim.Muon:
        settings["optimizer"] = {**settings["optimizer"], "matrices": _matrices(model)}
    engine = polyreme.initialize(model, _counting(settings, _of_engine(made)), optimizer=_of_engine(made))
    return DeepSpeedEngine(engine, translation, made, mpu=mpu)


def _pipeline(model: PipelineModule, source: Any, optimizer: Any, parameters: Any) -> PipelineEngine:
    """Return the engine of a pipeline, whose optimizer on each rank has the parameters of its stage."""
    given = translate(source, everyone().size, pp=model.num_stages, made_in=_made_in(model))
    translation = placed(model, given)
    _warn_of_format(model, translation)
    if not translation.values["managed_gradient_accumulation"]:
        reason, fix = "train_batch of a PipelineModule takes whole windows", "leave it out"
        raise DeepSpeedConfigError([Problem("managed_gradient_accumulation", False, reason, fix)])
    if optimizer is not None or translation.optimizer is not None:
        refuse_empty(model)
    made = _optimizer(model, optimizer, parameters, translation)
    _refuse_untested(made, translation)
    if isinstance(made, Optimizer) and model.num_stages > 1:
        complete(made, model)
    engine = polyreme.initialize(
        model.sequence,
        _counting(BUFFERS | translation.config, _of_engine(made)),
        optimizer=_of_engine(made),
        loss_fn=model.loss_fn,
    )
    return PipelineEngine(engine, translation, made, model=model)


def _take_over(model: nn.Module) -> None:
    """Prepare the model for a new engine. One of an earlier `initialize`, as a trainer has that tests a model
    after training it, is closed, and its numbers stay in the model. Parameters that `zero.Init` divided have
    their shapes again; those of a PipelineModule are made whole."""
    engine = next(filter(None, map(engine_of, model.parameters())), None)
    if engine is not None and engine.module is model:
        engine.close(gather=True)
    # whose shapes say how it is cut, and which optimizer they have
    (make_whole if isinstance(model, PipelineModule) else shaped)(model.parameters())


def _source(args: Any, config: Any, config_params: Any) -> Any:
    """Return the config from the argument that a script gives it by. Raises OrderError if none has it, or two
    do."""
    named = getattr(args, "deepspeed_config", None) or getattr(args, "deepscale_config", None)
    given = [each for each in (config, config_params, named) if each is not None]
    if not given:
        raise OrderError(
            "deepspeed.initialize() has no config: give it config=, a dictionary or the path of a JSON file, "
            "or start the script with --deepspeed_config FILE"
        )
    if named is not None and config is not None:
        raise OrderError(
            f"two configs are given, args.deepspeed_config={named!r} and config=: leave one of them out"
        )
    return given[0]


def _optimizer(
    model: nn.Module, given: Any, parameters: Any, translation: Translation
) -> Optimizer | type[Optimizer] | None:
    """Return the optimizer of the model's parameters, or its class if the engine is to make it; None if
    neither the script nor the config names one."""
    if isinstance(given, Optimizer):
        return given
    groups = [p for p in model.parameters() if p.requires_grad] if parameters is None else list(parameters)
    if given is not None:
        made = given(groups)
        if not isinstance(made, Optimizer):
            raise ArgumentError(f"optimizer= returned a {type(made).__name__}, not a torch optimizer")
        return made
    if translation.optimizer is None:
        return None
    section = Config.load(translation.config).optimizer
    if section.name == "muon":  # which is two optimizers, that go by the model
        if {id(p) for p in groups} != {id(p) for p in model.parameters() if p.requires_grad}:
            raise refused(
                "model_parameters beside the config's Muon",
                "it is for all parameters that train, and makes its groups by the model",
                "leave model_parameters out, and freeze what is not to train",
            )
        return torch.optim.Muon
    make = maker(section)
    if not groups:
        if parameters is not None and any(p.requires_grad for p in model.parameters()):
            raise ArgumentError(
                "model_parameters is empty, and the model has parameters that require gradients: give those "
                "that train, or leave it out"
            )
        return torch.optim.SGD
    return make(groups)


def _matrices(model: nn.Module) -> list[str]:
    """Return the names of the parameters that DeepSpeed's Muon updates as matrices."""
    shapes = {name: getattr(p, "ds_shape", p.shape) for name, p in model.named_parameters()}
    others = ("embed", "lm_head")
    return [n for n, s in shapes.items() if len(s) == 2 and not any(part in n.lower() for part in others)]


def _of_engine(made: Optimizer | type[Optimizer] | None) -> Optimizer | type[Optimizer] | None:
    """Return the optimizer that Polyreme's engine is given: the one that was made, a class if nothing trains,
    or None for the one that its config names."""
    return torch.optim.SGD if made is None else None if made is torch.optim.Muon else made


def _refuse_untested(made: Any, translation: Translation) -> None:
    """Raise OrderError if ZeRO is to shard an optimizer that DeepSpeed has not been tried with, and the
    config does not allow it."""
    allowed = translation.values["zero_allow_untested_optimizer"]
    if (
        translation.stage
        and isinstance(made, Optimizer)
        and not allowed
        and not is_zero_supported_optimizer(made)
    ):
        raise OrderError(
            f"ZeRO stage {translation.stage} is to shard {type(made).__name__}, which DeepSpeed never tried: "
            'write {"zero_allow_untested_optimizer": true} in the config, or take AdamW'
        )


def _scheduler(engine: DeepSpeedEngine, given: Any, translation: Translation) -> Any:
    """Return the learning rate scheduler that a script gave, or the config's, of the engine's optimizer; None
    if there is none."""
    if given is not None:
        return given(engine.optimizer) if _is_factory(given) else given
    if translation.scheduler is None or engine.optimizer is None:
        return None
    name, params = translation.scheduler.name, translation.scheduler.params
    made = getattr(lr_schedules, name, None) or getattr(torch.optim.lr_scheduler, name)
    return made(engine.optimizer, **params)


def _is_factory(given: Any) -> bool:
    return callable(given) and not hasattr(given, "step")


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add DeepSpeed's arguments, `--deepspeed` and `--deepspeed_config FILE`, to a script's parser, and
    return it."""
    group = parser.add_argument_group("DeepSpeed", "what deepspeed.initialize reads of args")
    group.add_argument("--deepspeed", default=False, action="store_true", help="train by DeepSpeed's engine")
    group.add_argument("--deepspeed_config", default=None, type=str, help="its JSON file")
    group.add_argument("--deepscale", default=False, action="store_true", help=argparse.SUPPRESS)
    group.add_argument("--deepscale_config", default=None, type=str, help=argparse.SUPPRESS)
    return parser


def init_inference(model: Any, config: Any = None, **_: Any) -> Any:
    """Raise UnsupportedError, as Polyreme has no engine for inference."""
    raise refused(
        "deepspeed.init_inference",
        "Polyreme trains, and serves no models",
        "call the model itself, or transformers' generate, after engine.save_checkpoint",
    )


def tp_model_init(
    model: nn.Module, tp_size: int, dtype: Any = None, config: Any = None, **_: Any
) -> nn.Module:
    """Return the model as it is. `initialize` divides it over `tensor_parallel.autotp_size` ranks."""
    return model
