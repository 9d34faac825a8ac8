"""Reads the checkpoints that DeepSpeed's ZeRO stages 1, 2 and 3 write (https://arxiv.org/abs/1910.02054),
without DeepSpeed.

A rank's `*_optim_states.pt` has its partition of flat vectors: at stages 1 and 2 of one for each parameter
group, all its parameters end to end, cut among the ranks; at stage 3 each parameter is cut by itself into
equal parts, and a rank's vectors are the ends of its parts. `*_model_states.pt` has names, shapes, buffers,
and at stages 1 and 2 the weights in the dtype of the computation.
Invariant: files are mapped, and `read` touches the bytes asked for alone. No communication.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyreme.checkpoint.files import damaged, is_plain, locate, read_name, reading
from polyreme.checkpoint.formats import torch_archive
from polyreme.checkpoint.sources import MASTER, MODEL, TensorInfo
from polyreme.errors import CheckpointError
from polyreme.layout.intervals import Interval, ceil_div, overlap

OPTIMIZER_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
EXTRA = "deepspeed"
"""Where `DeepSpeedCheckpoint.extra` has what is not tensors."""
OWN = {
    *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params"),
    *("frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "skipped_steps"),
    *("sparse_tensor_module_names", "global_steps", "global_samples", "dp_world_size", "mp_world_size"),
    *("checkpoint_parallel_dimensions", "ds_config", "ds_version", "num_experts"),
    *("autotp_uc_info", "universal_checkpoint_info"),
}
"""What DeepSpeed itself writes beside the client state."""
MODEL_FILE = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")


def find(path: Path) -> Path | None:
    """The folder with a checkpoint's files: `path` itself, or the one in it that its file `latest` names;
    None if neither has any. Raises CheckpointError where `latest` names one that is elsewhere."""
    if _has_files(path):
        return path
    with reading(path):
        pointer = path / "latest"
        tag = read_name(pointer) if pointer.is_file() else ""
        target = path / tag
        if is_plain(tag) and "/" not in tag and not target.is_symlink():
            return target if _has_files(target) else None
    if _leads_to_files(target):
        raise CheckpointError(
            f"{pointer} names {tag!r}, which leads to {target.resolve()}: "
            "if you trust that, load it by its own path"
        )
    return None


def _leads_to_files(target: Path) -> bool:
    """Whether what a file names is a folder with files (see `_has_files`); it may be no path at all."""
    try:
        return _has_files(target)
    except (CheckpointError, ValueError):
        return False


def _has_files(folder: Path) -> bool:
    with reading(folder):
        return folder.is_dir() and any(MODEL_FILE.fullmatch(entry.name) for entry in folder.iterdir())


class DeepSpeedCheckpoint:
    """An open checkpoint of DeepSpeed: a `Source`.

    Kinds: the weights; where they are in a lower precision, "master"; and of the optimizer's states those
    that are one number for each of a parameter or one for all of them. A parameter with several names has
    each; `aliases` has the first one of each other. `zero_stage` and `mesh` say how it was written, `state`
    at which step. Opening raises CheckpointError for what is damaged, refused (see `torch_archive`) or of
    another kind of parallelism."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        folder = find(self.path)
        if folder is None:
            raise CheckpointError(
                f"{self.path} has no *_model_states.pt of DeepSpeed, "
                "nor a file `latest` that names a folder of such"
            )
        _check_names(folder)
        models, optimizers = _load_all(folder, MODEL_FILE), _load_all(folder, OPTIMIZER_FILE)
        self._files = [*models, *optimizers]
        try:
            model = next(iter(models.values()))
            _check_parallelism(folder, model)
            zero = _Zero(
                folder, list(models.values()), [each["optimizer_state_dict"] for each in optimizers.values()]
            )
            self._at, self.aliases = zero.locations(), zero.aliases
            self.zero_stage = zero.stage
            self.mesh = {"dp": len(optimizers) or model.get("dp_world_size", 1)}
            self.state = zero.state()
            self.scale = zero.scale()
            self._written, self._rates = model, zero.rates()
        except CheckpointError:
            raise
        except Exception as error:  # values may be of any type
            raise damaged(
                folder, f"its files are not as DeepSpeed writes them ({type(error).__name__}: {error})"
            ) from error
        self.tensors: Mapping[str, Mapping[str, TensorInfo]] = {
            kind: {name: location.info for name, location in locations.items()}
            for kind, locations in self._at.items()
        }

    @property
    def extra(self) -> Mapping[str, Any]:
        """Under EXTRA: `client_state`, `lr_scheduler` (its state), the counts `global_steps`,
        `global_samples` and `skipped_steps`, and `rates`, the learning rate of each group. Raises
        CheckpointError for objects among them that are not of Python's or torch's own kinds."""
        model = self._written
        found = {name: model.get(name, 0) for name in ("global_steps", "global_samples", "skipped_steps")}
        found |= {"lr_scheduler": model.get("lr_scheduler"), "rates": self._rates}
        found["client_state"] = {key: value for key, value in model.items() if key not in OWN}
        for name in ("client_state", "lr_scheduler"):
            _check_plain(self.path, name, found[name])
        return {EXTRA: found}

    def read(self, kind: str, name: str, start: int, stop: int) -> Tensor:
        """See `Source`."""
        if name not in self._at.get(kind, {}):
            raise CheckpointError(f"{self.path} has no {kind} of {name!r}")
        location = self._at[kind][name]
        elements = prod(location.info.shape)
        if not 0 <= start <= stop <= elements:
            raise CheckpointError(f"{self.path}: {name!r} has {elements} elements, not [{start}, {stop})")
        at = 0
        try:
            out = torch.empty(stop - start, dtype=location.info.dtype)
            for piece in location.pieces(start, stop):
                out[at : at + piece.numel()] = piece
                at += piece.numel()
        except (IndexError, RuntimeError) as error:
            raise damaged(self.path, f"{kind} of {name!r}: {error}") from error
        return out

    def contributions(self, part: int, parts: int) -> list[int]:
        """See `Source`: of each member of each file, as DeepSpeed's files are archives with the CRC-32 of
        every member."""
        return torch_archive.contributions(self._members, part, parts)

    def compare(self, contributions: Sequence[int]) -> None:
        """See `Source`."""
        torch_archive.compare(self._members, contributions, self.path)

    @cached_property
    def _members(self) -> list[torch_archive.ArchiveMember]:
        return [
            member
            for file in self._files
            for member in torch_archive.members(file, 0, locate(file.parent, file.name)[1])
        ]


def _load_all(folder: Path, pattern: re.Pattern[str]) -> dict[Path, Any]:
    """What the files of all ranks hold, in the order of the ranks."""
    with reading(folder):
        names = sorted(
            (int(match[1] or 0), match[0])
            for entry in folder.iterdir()
            if (match := pattern.fullmatch(entry.name))
        )
    ranks = [rank for rank, _ in names]
    if ranks != list(range(len(names))):
        raise CheckpointError(
            f"{folder} has files of the ranks {ranks} ({names[-1][1]}, "
            "...): one is missing, or has files of two runs"
        )
    return {(file := locate(folder, name)[0]): torch_archive.load(file, "deepspeed") for _, name in names}


def _check_names(folder: Path) -> None:
    """Raise CheckpointError for a file of a parallelism that divides the model in ways which the files do not
    tell."""
    with reading(folder):
        for entry in sorted(folder.iterdir()):
            match = OPTIMIZER_FILE.fullmatch(entry.name) or MODEL_FILE.fullmatch(entry.name)
            if (match and int(match[2])) or re.match(r"layer_|expert_|expp_", entry.name):
                raise _parallel(folder, entry.name)


def _check_parallelism(folder: Path, model: Mapping[str, Any]) -> None:
    degrees = {
        "mp_world_size": model.get("mp_world_size", 1),
        **(model.get("checkpoint_parallel_dimensions") or {}),
    }
    for name, degree in degrees.items():
        if degree != 1:
            raise _parallel(folder, f"{name} = {degree}")


def _check_plain(path: Path, where: str, value: Any) -> None:
    """Raise CheckpointError for an object in `value` of which only its arguments are known."""
    if isinstance(value, torch_archive.StandIn):
        raise CheckpointError(
            f"{path}: its {where} is a {type(value).__name__}, a class that is not imported: save the "
            "checkpoint again with numbers, texts, lists and dictionaries there, or leave it out "
            "(load_lr_scheduler_states=False, load_module_only=True)"
        )
    if isinstance(value, Mapping | list | tuple):
        for key, each in value.items() if isinstance(value, Mapping) else enumerate(value):
            _check_plain(path, f"{where}[{key!r}]", each)


def _parallel(folder: Path, sign: str) -> CheckpointError:
    return CheckpointError(
        f"{folder} was written with tensor, pipeline or expert parallelism "
        f"({sign}); of DeepSpeed's checkpoints those of data parallelism "
        "alone (ZeRO stages 1 to 3) are read. Merge it into whole tensors with the program that wrote it"
    )


class _Flat:
    """A flat vector of which ranks or groups have parts, each from some element on."""

    def __init__(self, parts: Mapping[int, Tensor]) -> None:
        self._starts, self._parts = sorted(parts), parts

    def views(self, start: int, stop: int) -> Iterator[Tensor]:
        """The parts' views that make up [start, stop)."""
        while start < stop:
            begin = self._starts[bisect_right(self._starts, start) - 1]
            view = self._parts[begin].detach().reshape(-1)[start - begin : stop - begin]
            if not view.numel():
                raise IndexError(f"a partition ends before element {start}")
            yield view
            start += view.numel()


@dataclass(frozen=True)
class _TensorLocation:
    """Where a tensor is: its elements [i * part, (i + 1) * part) are in lines[i], from `offset` on."""

    info: TensorInfo
    lines: Sequence[_Flat]
    offset: int
    part: int

    def pieces(self, start: int, stop: int) -> Iterator[Tensor]:
        for i in range(start // self.part, ceil_div(stop, self.part)) if start < stop else ():
            begin = i * self.part
            low, high = overlap(Interval(start - begin, stop - begin), Interval(0, self.part))
            yield from self.lines[i].views(self.offset + low, self.offset + high)


def _whole(tensor: Tensor) -> _TensorLocation:
    return _TensorLocation(
        TensorInfo(tuple(tensor.shape), tensor.dtype), [_Flat({0: tensor})], 0, max(tensor.numel(), 1)
    )


@dataclass(frozen=True)
class _Slot:
    """A trained parameter: its shape, the group that it is in, the vectors it lies in and where in them (see
    `_TensorLocation`)."""

    shape: tuple[int, ...]
    group: int
    lines: slice
    offset: int
    part: int


class _Zero:
    """What the files of all ranks say together."""

    def __init__(
        self, folder: Path, models: Sequence[Mapping[str, Any]], optimizers: Sequence[Mapping[str, Any]]
    ) -> None:
        self.folder, self.models, self.optimizers, self.ranks = folder, models, optimizers, len(optimizers)
        config = models[0].get("ds_config") or {}
        self.aliases: Mapping[str, str] = models[0].get("shared_params") or {}
        self.stage: int = config.get("zero_optimization", {}).get("stage", 0)
        if not optimizers and self.stage == 3:
            raise CheckpointError(
                f"{folder} is of stage 3 and has no *_optim_states.pt, "
                "in which its weights are: copy these files, too"
            )
        if optimizers:
            self.stage = (
                3
                if "fp32_flat_groups" in optimizers[0]
                else _number(optimizers[0].get("zero_stage", self.stage))
            )
            self._check_ranks()
        key = "fp32_flat_groups" if self.stage == 3 else "single_partition_of_fp32_groups"
        self.masters: list[list[Tensor]] = [each[key] for each in optimizers]
        self.sizes = [self._size(group) for group in range(len(self.masters[0]))] if optimizers else []
        self.states = [self._states(each) for each in optimizers]
        shapes: list[Mapping[str, Sequence[int]]] = (models[0]["param_shapes"] or []) if optimizers else []
        self.slots = self._slots_of_stage_3(shapes) if self.stage == 3 else self._slots_of_groups(shapes)

    def locations(self) -> dict[str, dict[str, _TensorLocation]]:
        """Every tensor, by kind and name."""
        masters = self._lines(self.masters)
        found = {MODEL: self._weights(masters)}
        full = {
            name: self._placed(masters, slot, self.masters[0][slot.group].dtype)
            for name, slot in self.slots.items()
        }
        if any(location.info.dtype != found[MODEL][name].info.dtype for name, location in full.items()):
            found[MASTER] = full
        for kind in sorted({kind for states in self.states for state in states for kind in state}):
            found[kind] = self._state(kind)
        for alias, name in self.aliases.items():
            for locations in found.values():
                if name in locations:
                    locations[alias] = locations[name]
        return {kind: locations for kind, locations in found.items() if locations}

    def state(self) -> dict[str, Any]:
        """How far training had come."""
        model = self.models[0]
        keys = {
            "step": "global_steps",
            "samples": "global_samples",
            "skipped": "skipped_steps",
            "deepspeed": "ds_version",
        }
        found = {name: model[key] for name, key in keys.items() if key in model}
        if rates := sorted({*self.rates()}):
            found["lr"] = rates[0] if len(rates) == 1 else rates
        return found | {key: value for key, value in self.scale().items() if key == "loss_scale"}

    def scale(self) -> dict[str, Any]:
        """Where the loss scale is, as `TrainingProgress.state_dict` says it."""
        scaler = self.optimizers[0].get("loss_scaler") if self.optimizers else None
        known = vars(scaler) if isinstance(scaler, torch_archive.StandIn) else {}
        if not isinstance(known.get("cur_scale"), float | int):
            return {}
        found: dict[str, Any] = {"loss_scale": float(known["cur_scale"])}
        if {"cur_iter", "last_overflow_iter", "scale_window", "delayed_shift", "cur_hysteresis"} <= {*known}:
            good = known["cur_iter"] - known["last_overflow_iter"] - 1
            found["good_steps"] = (good - 1) % known["scale_window"] if good else -1
            found["overflows"] = known["delayed_shift"] - known["cur_hysteresis"]
        elif known["cur_scale"] == 1:  # what it has without fp16, and beside torch's GradScaler
            return {}
        return found

    def rates(self) -> list[float]:
        """The learning rate of each group, where that is known."""
        groups = _base(self.optimizers[0]).get("param_groups", []) if self.optimizers else []
        found = [float(group["lr"]) for group in groups if "lr" in group]
        return found or [*map(float, (self.models[0].get("lr_scheduler") or {}).get("_last_lr", []))]

    def _check_ranks(self) -> None:
        counts = self.optimizers[0].get("partition_count", self.ranks)
        counts = set(counts) if isinstance(counts, list) else {counts}
        models = self.ranks if self.stage == 3 else 1
        if counts != {self.ranks} or len(self.models) != models:
            said = " and ".join(map(str, sorted(counts)))
            raise CheckpointError(
                f"{self.folder} was written by {said} ranks at stage "
                f"{self.stage}, and has the optimizer's files of {self.ranks} "
                f"and the model's of {len(self.models)}: copy the files of every rank"
            )

    def _states(self, optimizer: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The optimizer's state by kind, for each group of one rank."""
        base = _base(optimizer)
        if "state" not in base:  # stages 1 and 2 with elastic_checkpoint: a list
            return list(base["groups"])
        found = []
        for group in base["param_groups"]:
            common = {"step": group["step"]} if "step" in group else {}  # DeepSpeed's own Adam counts there
            found += [{**common, **base["state"].get(index, {})} for index in group["params"]]
        return found

    def _slots_of_groups(self, shapes: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, _Slot]:
        """Stages 1 and 2: a vector for each group, all ranks' partitions end to end."""
        found = {}
        for group, named in enumerate(shapes):
            end = 0
            every = self.optimizers[0].get("param_alignment_paddings")
            gaps = every[group] if every else [0] * len(named)
            for (name, shape), gap in zip(named.items(), gaps, strict=True):
                found[name] = _Slot(tuple(shape), group, slice(group, group + 1), end, max(prod(shape), 1))
                end += prod(shape) + gap
            padding = sum(each["group_paddings"][group] for each in self.optimizers)
            if end + padding != self.sizes[group] * self.ranks:
                raise ValueError(
                    f"group {group} has {self.sizes[group]} elements on "
                    f"each rank, not {end} in all and {padding} of padding"
                )
        return found

    def _slots_of_stage_3(self, shapes: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, _Slot]:
        """Stage 3: a vector for each rank, all groups' end to end, in which each parameter has an equal
        part."""
        ends = list(accumulate(self.sizes))
        found, end = {}, 0
        for name, shape in (item for named in shapes for item in named.items()):
            part = ceil_div(prod(shape), self.ranks)
            found[name] = _Slot(tuple(shape), bisect_right(ends, end), slice(None), end, max(part, 1))
            end += part
        if end != ends[-1]:
            offloaded = ": states that are offloaded to files are not in a checkpoint" if not ends[-1] else ""
            raise ValueError(
                f"each rank should have {end} elements of the parameters, and has {ends[-1]}{offloaded}"
            )
        return found

    def _size(self, group: int) -> int:
        """Elements of every rank's partition of a group, with padding: some of DeepSpeed's optimizers save
        it, and some take it away."""
        sizes = [masters[group].numel() for masters in self.masters]
        if len(set(sizes)) > 1 and self.stage < 3:
            sizes = [
                size + each["group_paddings"][group]
                for size, each in zip(sizes, self.optimizers, strict=True)
            ]
        if len(set(sizes)) != 1:
            raise ValueError(f"the ranks' partitions of group {group} have {sizes} elements")
        return sizes[0]

    def _lines(self, parts: Sequence[Sequence[Tensor | None]]) -> list[_Flat]:
        """The vectors that the ranks' `parts` of every group make up; of some groups there may be none."""
        if self.stage == 3:
            starts = list(accumulate(self.sizes, initial=0))[:-1]
            return [
                _Flat({start: part for start, part in zip(starts, each, strict=True) if part is not None})
                for each in parts
            ]
        by_group = enumerate(zip(*parts, strict=True))
        return [
            _Flat({self.sizes[group] * rank: part for rank, part in enumerate(each) if part is not None})
            for group, each in by_group
        ]

    def _placed(self, lines: Sequence[_Flat], slot: _Slot, dtype: torch.dtype) -> _TensorLocation:
        return _TensorLocation(TensorInfo(slot.shape, dtype), lines[slot.lines], slot.offset, slot.part)

    def _weights(self, masters: Sequence[_Flat]) -> dict[str, _TensorLocation]:
        """Weights and buffers. At stage 3 only the latter are whole; where the weights should be there is
        something empty."""
        module = self.models[0]["module"]
        found: dict[str, _TensorLocation] = {}
        frozen = self.models[0].get("frozen_param_shapes") or {}
        buffers = self.models[0]["buffer_names"]
        for name, tensor in module.items():
            slot = self.slots.get(name)
            if not isinstance(tensor, Tensor) or name in self.aliases:
                continue
            shape = slot.shape if slot else tuple(frozen.get(name, tensor.shape))
            if slot and self.stage == 3:
                found[name] = self._placed(masters, slot, tensor.dtype)
            elif self.stage < 3 or name in buffers:
                found[name] = _whole(tensor)
            else:
                parts = [model["frozen_param_fragments"][name] for model in self.models]
                line = _Flat(
                    {rank * ceil_div(prod(shape), self.ranks): part for rank, part in enumerate(parts)}
                )
                found[name] = _TensorLocation(
                    TensorInfo(shape, parts[0].dtype), [line], 0, max(prod(shape), 1)
                )
        return found

    def _state(self, kind: str) -> dict[str, _TensorLocation]:
        """A state of each parameter of the groups that have it."""
        values = [[state.get(kind) for state in states] for states in self.states]
        parts = [
            [self._of_elements(value, rank, group) for group, value in enumerate(each)]
            for rank, each in enumerate(values)
        ]
        lines = self._lines(parts)
        found: dict[str, _TensorLocation] = {}
        for name, slot in self.slots.items():
            value: Any = values[0][slot.group]
            if all(part[slot.group] is not None for part in parts):
                found[name] = self._placed(lines, slot, value.dtype)
            elif isinstance(value, int | float) or (isinstance(value, Tensor) and not value.dim()):
                found[name] = _whole(torch.as_tensor(value))
        return found

    def _of_elements(self, value: Any, rank: int, group: int) -> Tensor | None:
        """`value`, where it is a number for each element of a rank's partition of a group, with or without
        its padding."""
        sizes = (self.masters[rank][group].numel(), self.sizes[group])
        return value if isinstance(value, Tensor) and value.dim() and value.numel() in sizes else None


def _base(optimizer: Mapping[str, Any]) -> Mapping[str, Any]:
    """The state of the optimizer that DeepSpeed wraps."""
    base = (
        optimizer["optimizer_state_dict"]
        if "fp32_flat_groups" in optimizer
        else optimizer["base_optimizer_state"]
    )
    return base if isinstance(base, Mapping) else {"groups": base}


def _number(stage: Any) -> int:
    """The number of a stage, which is a member of DeepSpeed's enumeration, or in older files a number."""
    return int(stage.args[0]) if isinstance(stage, torch_archive.StandIn) else int(stage)
