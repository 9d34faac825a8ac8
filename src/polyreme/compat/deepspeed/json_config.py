"""Translate a DeepSpeed config to one of Polyreme's, with a note on each key of what became of it.

Pure: no process group, no model. Torch is imported only to look up an optimizer or a scheduler by its name.
Invariant: every key that was written has a note, or the config is refused with all that is wrong with it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from polyreme.compat.deepspeed.config_auto import fill
from polyreme.compat.deepspeed.config_keys import KEYS, TOP, Outcome, find
from polyreme.compat.deepspeed.config_optimizer import Named, Remarks, check_scheduler, named, optimizer_keys
from polyreme.compat.deepspeed.config_values import DeepSpeedConfigError, Source, Values, parse, read, values
from polyreme.config.describe import toml
from polyreme.config.loading import text_of
from polyreme.config.schema import LEAVES, SECTIONS
from polyreme.config.validate import COMPACT
from polyreme.errors import Problem

MEAN = {"batch.mean": "ranks"}
"""The translation's loss settings: a gradient is the mean, over ranks and micro-batches, of the losses that
`backward` is given."""


@dataclass(frozen=True)
class Note:
    """A note on what became of one key: its path, its value as it was written, the outcome, and a
    sentence."""

    key: str
    value: object
    outcome: Outcome
    text: str


@dataclass(frozen=True)
class Batch:
    """The batch as DeepSpeed counts it: the samples of a step (`size`), those of a micro-batch on one rank
    (`micro`), and the micro-batches of a step (`accumulation`). If the config divides the model by tensor
    parallelism, `size` counts those ranks, too."""

    size: int = 0
    micro: int = 0
    accumulation: int = 0


@dataclass(frozen=True)
class Translation:
    """The translation of a DeepSpeed config.

    source: the config as it was given, for `engine.config`. config: what `polyreme.initialize` takes. notes:
    one for each key that was written. values: every key of DeepSpeed's by its path ("fp16.loss_scale"), with
    its default where it was left out. optimizer, scheduler: what the config names, if anything."""

    source: dict[str, Any]
    config: dict[str, Any]
    notes: list[Note]
    values: Mapping[str, Any]
    batch: Batch
    optimizer: Named | None
    scheduler: Named | None

    @property
    def stage(self) -> int:
        return self.values["zero_optimization.stage"]

    @property
    def loss_scale(self) -> dict[str, Any] | float | None:
        """Return fp16's loss scale as a number, or the arguments of a dynamic one; None without fp16."""
        if not self.values["fp16.enabled"]:
            return None
        names = ("initial_scale_power", "loss_scale_window", "hysteresis", "consecutive_hysteresis")
        dynamic = {name: self.values[f"fp16.{name}"] for name in (*names, "min_loss_scale")}
        return self.values["fp16.loss_scale"] or dynamic

    @property
    def autocast(self) -> str | None:
        """Return the format of torch.autocast around forwards, "bf16" or "fp16"; None without autocast."""
        enabled = self.values["torch_autocast.enabled"]
        return _short(self.values["torch_autocast.dtype"] or "bf16") if enabled else None

    def section(self, name: str) -> dict[str, Any]:
        """Return all keys of a section, such as "flops_profiler" or "zero_optimization.offload_optimizer",
        with their values."""
        return {path[len(name) + 1 :]: v for path, v in self.values.items() if path.startswith(f"{name}.")}

    @property
    def warnings(self) -> list[Note]:
        return [note for note in self.notes if note.outcome == "warned"]

    def standalone(self) -> dict[str, Any]:
        """Return `config` for a run without DeepSpeed's functions. It has the learning rate schedule, too, if
        Polyreme has one like it."""
        if self.scheduler is None:
            return self.config
        schedule, highest = _lr_schedule(self.scheduler)
        if not schedule:
            return self.config
        optimizer = self.config["optimizer"] | ({} if highest is None else {"lr": highest})
        return self.config | {"optimizer": optimizer, "lr_schedule": schedule}


@dataclass
class _Work:
    """A translation under way: Polyreme's keys by their paths, the problems so far, and remarks on keys that
    count before those of the table."""

    values: Values
    ours: dict[str, Any] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    remarks: Remarks = field(default_factory=dict)

    def refuse(self, path: str, reason: str, fix: str) -> None:
        self.problems.append(Problem(path, self.values[path], reason, fix))


def translate(
    source: Source,
    world_size: int = 1,
    *,
    pp: int = 1,
    tp: int | None = None,
    fill_auto: bool = False,
    made_in: str = "fp32",
) -> Translation:
    """Translate a DeepSpeed config for `world_size` ranks.

    source: a mapping, the path of a JSON file, or base64 of one. pp: pipeline stages, of the PipelineModule.
    tp: tensor-parallel ranks of the caller's mpu; None: those of the config. fill_auto: replace "auto" by the
    Trainer's defaults, and say so in the notes. made_in: the format of the model's parameters, "fp64", "fp32"
    or "bf16", which it computes in if neither bf16 nor fp16 is enabled.

    Raises DeepSpeedConfigError with every key that is unknown, wrong or refused."""
    tree = read(source)
    read_as, said = fill(tree, world_size) if fill_auto else (tree, {})
    problems: list[Problem] = []
    work = _Work(values(read_as, problems), problems=problems)
    batch = _batch(work, world_size, pp, tp)
    _zero(work)
    _precision(work, made_in)
    optimizer, scheduler = (named(work.values, name, problems) for name in ("optimizer", "scheduler"))
    _optimizer(work, optimizer)
    if scheduler is not None:
        check_scheduler(scheduler, problems)
    _monitor(work)
    if problems:
        raise DeepSpeedConfigError(problems, None if isinstance(source, Mapping) else _shown(source))
    if scheduler is not None:
        work.remarks["scheduler.type"] = ("kept", _told(scheduler))
    work.ours = {key: value for key, value in work.ours.items() if key in LEAVES}
    notes = [note for path, value in work.values.written.items() for note in _notes(work, path, value)]
    notes = [_filled(note, said[note.key]) if note.key in said else note for note in notes]
    return Translation(tree, _nested(work.ours), notes, work.values.of, batch, optimizer, scheduler)


def _filled(note: Note, more: str) -> Note:
    """Return the note on a key that was "auto"."""
    value = "" if note.outcome == "translated" else f": {note.value}"
    return replace(note, value="auto", text=f"{note.text}{value}{more}")


def _shown(source: Any) -> str:
    return str(source) if len(str(source)) < 256 else "base64"


def is_deepspeed(path: Path) -> bool:
    """Return whether a file is a DeepSpeed config: it has a key that only DeepSpeed knows, and none that only
    Polyreme knows."""
    if path.suffix.lower() != ".json":
        return False
    try:
        tree = parse(text_of(path))
    except (OSError, ValueError, RecursionError):
        return False
    if not isinstance(tree, dict):
        return False
    own = {*SECTIONS, *(key for key in LEAVES if "." not in key)}
    theirs = {*TOP, "bfloat16", *(key.partition(".")[0] for key in KEYS)}
    if any(isinstance(tree.get(name), dict) and "type" in tree[name] for name in ("optimizer", "scheduler")):
        return not tree.keys() & (own - theirs)
    return bool(tree.keys() & (theirs - own)) and not tree.keys() & (own - theirs)


def _batch(work: _Work, world_size: int, pp: int, tp: int | None) -> Batch:
    """Translate the sizes of the batch and of the mesh's axes."""
    given = work.values
    inside = max(1, given["tensor_parallel.autotp_size"])
    if given["tensor_parallel.tp.tp_size"] not in (1, inside):
        work.refuse("tensor_parallel.tp.tp_size", f"tensor_parallel.autotp_size is {inside}", "leave it out")
    work.ours |= {key: size for key, size in (("mesh.tp", tp or inside), ("mesh.pp", pp)) if size > 1}
    if given["data_parallel_size"] is not None:
        work.ours["mesh.dp"] = given["data_parallel_size"]
    batch = _triple(work, max(1, world_size // (pp * (tp or 1))))
    size = batch.micro * batch.accumulation * max(1, world_size // (pp * (tp or inside)))
    work.ours |= {"batch.size": size, "batch.micro": batch.micro, **MEAN}
    return batch


def _triple(work: _Work, ranks: int) -> Batch:
    """Work out the three sizes of a batch from two of them or from one: train_batch_size is micro-batch times
    accumulation times ranks."""
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    size, micro, accumulation = (work.values[name] for name in names)
    if any(problem.key in names for problem in work.problems):
        return Batch()
    if size is None and micro is None:
        fix = f"write {names[0]} or {names[1]}"
        work.refuse(names[0], "neither the batch nor the micro-batch is given", fix)
        return Batch()
    if size is None:
        accumulation = accumulation or 1
        size = micro * accumulation * ranks
    elif micro is not None:
        accumulation = accumulation or size // micro // ranks
    else:
        accumulation = accumulation or 1
        micro = size // ranks // accumulation
    if size != micro * accumulation * ranks:
        share = micro * accumulation
        below = max(1, size // (max(share, 1) * ranks)) * max(share, 1) * ranks
        count = f"{ranks} rank{'s' if ranks > 1 else ''}"
        reason = f"is not micro-batch x accumulation x ranks, {micro} x {accumulation} x {ranks}"
        fix = f"write {below} for {count}"
        if share and size % share == 0:
            fix += f", or start {size // share}"
        work.refuse(names[0], reason, fix)
        return Batch()
    return Batch(size, micro, accumulation)


def _zero(work: _Work) -> None:
    """Translate the stage of ZeRO, and the places of what is kept off the device."""
    given, prefix = work.values, "zero_optimization."
    stage = work.ours["zero.stage"] = given[f"{prefix}stage"]
    threshold = f"{prefix}stage3_param_persistence_threshold"
    if stage == 3:
        work.ours["zero.persistence_threshold"] = min(given[threshold], sys.maxsize)
    else:
        work.remarks[threshold] = ("nothing to do", "below stage 3 parameters are whole")
    states = _home(work, "offload_optimizer", "cpu_offload")
    ratio = given[f"{prefix}offload_optimizer.ratio"]
    if states == "device" or ratio == 0:
        states = "device"
    elif ratio < 1:
        states = {states: ratio, "device": round(1 - ratio, 12)}
    params = _home(work, "offload_param", "cpu_offload_param")
    if params != "device" and stage != 3:
        why = "only stage 3 brings parameters to the device block by block: they stay there"
        for path in ("offload_param.device", "cpu_offload_param"):
            work.remarks[prefix + path] = ("warned", why)
        params = "device"
    if states != "device":
        work.ours["memory.states"] = states
    if params != "device":
        work.ours["memory.params"] = params
    if given["checkpoint.writer.decoupled"]:
        work.ours["checkpoint.background"] = True


def _home(work: _Work, section: str, old: str) -> Any:
    """Return the place that one of the two offload sections names: "device", "host" or a folder."""
    path = f"zero_optimization.{section}"
    device = work.values[f"{path}.device"]
    if work.values[f"zero_optimization.{old}"]:
        if any(name.startswith(f"{path}.") for name in work.values.written):
            work.refuse(f"zero_optimization.{old}", f"{section} is given too", f"remove {old}")
        device = "cpu"
    folder = work.values[f"{path}.nvme_path"]
    if device != "nvme":
        work.remarks[f"{path}.nvme_path"] = ("nothing to do", 'it counts with "device": "nvme" only')
        return "host" if device == "cpu" else "device"
    if not folder:
        work.refuse(f"{path}.nvme_path", "there is no folder for nvme", 'write one, such as "/local_nvme"')
        return "device"
    return folder if "/" in folder else f"./{folder}"


BITS = {"fp16": 16, "bf16": 16, "fp32": 32, "fp64": 64}


def _precision(work: _Work, made_in: str) -> None:
    """Translate the number formats and the loss scale."""
    given, ours = work.values, work.ours
    bf16, fp16 = given["bf16.enabled"], given["fp16.enabled"]
    if bf16 and fp16:
        work.refuse("fp16.enabled", "bf16 is enabled, too", "enable one of the two")
    compute = "bf16" if bf16 else "fp16" if fp16 else made_in
    wanted = given["data_types.param_dtype"]
    if wanted is not None and _short(wanted) != compute:
        fix = "leave it out" + (f", or enable {_short(wanted)}" if _short(wanted) != "fp32" else "")
        work.refuse("data_types.param_dtype", f"the model's format is {compute}", fix)
    ours["precision.compute"] = compute
    if given["torch_autocast.enabled"]:
        dtype = _short(given["torch_autocast.dtype"] or "bf16")
        if dtype == "fp32":
            fix = 'write "bfloat16" or "float16", or enabled: false'
            work.refuse("torch_autocast.dtype", "torch.autocast has nothing to cast to", fix)
        elif compute == "fp32":
            ours["precision.compute"] = f"autocast-{dtype}"
        else:
            text = f"parameters stay {compute}; around forwards, torch computes in fp32 what needs it"
            work.remarks["torch_autocast.enabled"] = work.remarks["torch_autocast.dtype"] = ("kept", text)
    ours["precision.on_nonfinite"] = "apply" if _trains_on(given) else "skip"
    _sums(work, compute)
    if fp16:
        _loss_scale(work)
    if given["bf16.bf16_optimizer_states"] and not given["bf16.bf16_master_weights_and_grads"]:
        fix = "write bf16_master_weights_and_grads: true, too"
        work.refuse("bf16.bf16_optimizer_states", "DeepSpeed takes it only with bf16 masters", fix)


def _trains_on(given: Values) -> bool:
    """Return whether DeepSpeed, without a loss scale, updates parameters by gradients with NaN or Inf in
    them. It does if its optimizer takes no norm of gradients, or does not look at it."""
    stage = given["zero_optimization.stage"]
    if given["bf16.enabled"]:
        return stage in (1, 2) and not given["bf16.check_grad_overflow"]
    return stage == 0 and not given["fp16.enabled"]


def _short(dtype: str) -> str:
    name = dtype.removeprefix("torch.")
    return {"float32": "fp32", "float": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16"}.get(
        name, name
    )


def _sums(work: _Work, compute: str) -> None:
    """Return the format that gradients are added up in: the widest one that is asked for, and none narrower
    than that of the gradients."""
    paths = [p for p in ("communication_data_type", "data_types.grad_accum_dtype") if work.values[p]]
    asked = {path: _short(work.values[path]) for path in paths}
    for path, dtype in asked.items():
        if dtype != compute and BITS[dtype] <= BITS[compute]:
            text = (
                f"{compute} gradients would lose digits or range in {dtype}: they are added up as by default"
            )
            work.remarks[path] = ("warned", text)
    fit = [dtype for path, dtype in asked.items() if path not in work.remarks]
    if fit:
        work.ours["precision.reduce"] = max(fit, key=lambda dtype: BITS[dtype])


def _loss_scale(work: _Work) -> None:
    """Translate fp16's loss scale."""
    given, ours = work.values, work.ours
    if given["fp16.loss_scale"] == float("inf"):
        work.refuse("fp16.loss_scale", "must be finite", "write 0 for a dynamic loss scale")
        return
    if given["fp16.loss_scale"]:
        ours["precision.loss_scale"] = float(given["fp16.loss_scale"])
        for name in ("initial_scale_power", "loss_scale_window", "min_loss_scale", "hysteresis"):
            work.remarks[f"fp16.{name}"] = ("nothing to do", "it counts with a dynamic loss scale only")
        return
    for name in ("loss_scale_window", "min_loss_scale"):
        if given[f"fp16.{name}"] <= 0:
            work.refuse(f"fp16.{name}", "must be above 0 with a dynamic loss scale", "write 1 or more")
    plain = not given["zero_optimization.stage"]  # then DeepSpeed's scale has neither
    if plain:
        for name in ("hysteresis", "consecutive_hysteresis"):
            work.remarks[f"fp16.{name}"] = ("nothing to do", "it counts at ZeRO stages 1 to 3 only")
    ours |= {
        "precision.loss_scale": "dynamic",
        "precision.initial_scale": 2.0 ** given["fp16.initial_scale_power"],
        "precision.growth_interval": given["fp16.loss_scale_window"],
        "precision.growth_delay": 1,
        "precision.on_min_scale": "stay" if plain else "error",
        "precision.min_scale": float(given["fp16.min_loss_scale"]),
        "precision.hysteresis": 1 if plain else given["fp16.hysteresis"],
        "precision.consecutive_hysteresis": not plain and given["fp16.consecutive_hysteresis"],
    }


def _optimizer(work: _Work, optimizer: Named | None) -> None:
    """Translate the optimizer, and the clipping of gradients."""
    made = {} if optimizer is None else optimizer_keys(optimizer, work.problems, work.remarks)
    clip = work.values["gradient_clipping"]
    work.ours |= {f"optimizer.{key}": value for key, value in made.items()}
    work.ours |= {"optimizer.no_decay": "none", "optimizer.clip": float(clip) if clip else None}
    work.ours["optimizer.unused"] = "zero"
    if work.values["bf16.bf16_optimizer_states"]:
        if made.get("name") in COMPACT and (made["name"] != "sgd" or made.get("momentum")):
            work.ours["optimizer.states"] = "bf16"
        else:
            text = "the states of such an optimizer stay fp32"
            work.remarks["bf16.bf16_optimizer_states"] = ("warned", text)


def _monitor(work: _Work) -> None:
    given = work.values
    for name in ("tensorboard", "wandb"):
        if given[f"{name}.enabled"]:
            work.ours[f"monitor.{name}"] = True
    if given["wandb.enabled"]:
        work.ours["monitor.project"] = given["wandb.project"]


def _nested(ours: Mapping[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for key, value in ours.items():
        section, _, name = key.rpartition(".")
        (made.setdefault(section, {}) if section else made)[name] = value
    return made


def _notes(work: _Work, path: str, value: Any) -> list[Note]:
    """Return the notes on a key that was written: one, or one for each argument of an optimizer or a
    scheduler."""
    if path == "scheduler.params":
        return [
            Note(f"{path}.{name}", each, "kept", "an argument of the schedule")
            for name, each in value.items()
        ]
    if path == "optimizer.params":
        return [_argument(work, name, each) for name, each in value.items()]
    if path in work.remarks:
        outcome, text = work.remarks[path]
        return [Note(path, value, outcome, text)]
    key = find(path)
    assert key is not None, path
    if key.outcome == "translated":
        return [_translated(key.to, path, value, work.ours)]
    if key.outcome in ("warned", "refused") and work.values[path] in key.but:  # else it was refused
        return [Note(path, value, "nothing to do", "as by default")]
    return [Note(path, value, key.outcome, key.says)]


def _argument(work: _Work, name: str, value: object) -> Note:
    """Return the outcome of an argument of the optimizer, and a sentence about it."""
    path, options = f"optimizer.params.{name}", work.ours.get("optimizer.options", {})
    if path in work.remarks:
        return Note(path, value, *work.remarks[path])
    if name in options:
        return Note(path, value, "translated", f"optimizer.options.{name} = {toml(options[name])}")
    muon = {"lr": ("lr", "matrix_lr"), "muon_lr": ("matrix_lr",), "adam_lr": ("lr",),
            "momentum": ("matrix_momentum",)}  # fmt: skip
    ours = muon.get(name, (name,)) if work.ours.get("optimizer.name") == "muon" else (name,)
    if name in ("adam_w_mode", "torch_adam"):
        ours = ("name",)
    return _translated(tuple(f"optimizer.{each}" for each in ours), path, value, work.ours)


def _translated(to: tuple[str, ...], path: str, value: object, ours: Mapping[str, Any]) -> Note:
    made = ", ".join(f"{name} = {toml(ours[name])}" for name in to if name in ours)
    return Note(path, value, "translated" if made else "nothing to do", made or "as by default")


def _told(scheduler: Named) -> str:
    """Return the sentence for the note on a schedule."""
    made, _ = _lr_schedule(scheduler)
    if not made:
        return "stepped by the engine; none of ours is like it, so that a config of ours has a constant rate"
    return (
        f"stepped by the engine; in a config of ours lr_schedule.name = {toml(made['name'])}, with a "
        "straight warm-up"
    )


def _lr_schedule(scheduler: Named) -> tuple[dict[str, Any], float | None]:
    """Return Polyreme's keys for one of DeepSpeed's schedules, with the highest rate if the schedule says it;
    none if Polyreme has no schedule like it. A warm-up that rises as a logarithm becomes one that rises as a
    straight line."""
    params = scheduler.params
    shapes = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
    if scheduler.name not in shapes:
        return {}, None
    made: dict[str, Any] = {
        "name": shapes[scheduler.name],
        "warmup": f"{params.get('warmup_num_steps', 1000)} steps",
    }
    if "total_num_steps" in params:
        made["total"] = f"{params['total_num_steps']} steps"
    highest = None if scheduler.name == "WarmupCosineLR" else float(params.get("warmup_max_lr", 0.001))
    if scheduler.name == "WarmupCosineLR":
        made |= {"start": params.get("warmup_min_ratio", 0.0), "final": params.get("cos_min_ratio", 1e-4)}
    elif highest:
        made |= {"start": float(params.get("warmup_min_lr", 0.0)) / highest, "final": 0.0}
    return made, highest
