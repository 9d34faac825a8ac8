"""Reads the checkpoints that DeepSpeed's ZeRO stages 1, 2 and 3 write (https://arxiv.org/abs/1910.02054),
without DeepSpeed.

A rank's `*_optim_states.pt` has its partition of flat vectors. At stages 1 and 2 each parameter group is one
vector, of all its parameters end to end, which is cut among the ranks. At stage 3 each parameter is cut into
one equal shard for each rank, and a rank's vector is its shards end to end. `*_model_states.pt` has names,
shapes and buffers, and at stages 1 and 2 the weights in the dtype of the computation.
Invariant: files are mapped, and `read` touches only the bytes asked for. No communication.
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
"""The key of `DeepSpeedCheckpoint.extra`."""
OWN = {
    *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params"),
    *("frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "skipped_steps"),
    *("sparse_tensor_module_names", "global_steps", "global_samples", "dp_world_size", "mp_world_size"),
    *("checkpoint_parallel_dimensions", "ds_config", "ds_version", "num_experts"),
    *("autotp_uc_info", "universal_checkpoint_info"),
}
"""The keys that DeepSpeed itself writes; others are of the client state."""
MODEL_FILE = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")


def find(path: Path) -> Path | None:
    """Return the folder with a checkpoint's files: `path` itself, or the one in it that its file `latest`
    names; None if neither has any. Raises CheckpointError where `latest` names a folder outside of `path`."""
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
    """Whether `target` is a folder with a checkpoint's files; it may be no valid path at all."""
    try:
        return _has_files(target)
    except (CheckpointError, ValueError):
        return False


def _has_files(folder: Path) -> bool:
    with reading(folder):
        return folder.is_dir() and any(MODEL_FILE.fullmatch(entry.name) for entry in folder.iterdir())


class DeepSpeedCheckpoint:
    """An open checkpoint of DeepSpeed: a `Source`.

    Kinds: the weights; "master", where the weights are in a lower precision; and the optimizer's states that
    have one number for each element of a parameter, or one for all. A parameter with several names is listed
    under each; aliases: the first name, by each of the others. zero_stage, mesh: the layout that wrote it.
    state: how far training had come. Opening raises CheckpointError for files that are damaged, refused (see
    `torch_archive`) or written with other parallelism than data parallelism."""

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
        """The values that are not tensors, under EXTRA: `client_state`, `lr_scheduler` (its state), the
        counts `global_steps`, `global_samples` and `skipped_steps`, and `rates`, the learning rate of each
        group. Raises CheckpointError for objects among them that are not of Python's or torch's own types."""
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

    def contributions(self, share: int, shares: int) -> list[int]:
        """See `Source`; one number for each member of DeepSpeed's files, archives that have its CRC-32."""
        return torch_archive.contributions(self._members, share, shares)

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
    """Load the files of all ranks, in the order of the ranks. Raises CheckpointError where a rank's is
    missing."""
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
    """Raise CheckpointError for a file name of tensor, pipeline or expert parallelism."""
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
    """Raise CheckpointError for a stand-in in `value`, at any depth."""
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
    """A flat vector in pieces, one for each rank or group, by the first element of each."""

    def __init__(self, pieces: Mapping[int, Tensor]) -> None:
        self._starts, self._pieces = sorted(pieces), pieces

    def views(self, start: int, stop: int) -> Iterator[Tensor]:
        """Yield views of the pieces that make up [start, stop). Raises IndexError where a piece is too
        short."""
        while start < stop:
            begin = self._starts[bisect_right(self._starts, start) - 1]
            view = self._pieces[begin].detach().reshape(-1)[start - begin : stop - begin]
            if not view.numel():
                raise IndexError(f"a partition ends before element {start}")
            yield view
            start += view.numel()


@dataclass(frozen=True)
class _TensorLocation:
    """The place of a tensor: its elements [i * length, (i + 1) * length) are in lines[i], from `offset`
    on."""

    info: TensorInfo
    lines: Sequence[_Flat]
    offset: int
    length: int

    def pieces(self, start: int, stop: int) -> Iterator[Tensor]:
        """Yield flat views that make up the elements [start, stop)."""
        for i in range(start // self.length, ceil_div(stop, self.length)) if start < stop else ():
            begin = i * self.length
            low, high = overlap(Interval(start - begin, stop - begin), Interval(0, self.length))
            yield from self.lines[i].views(self.offset + low, self.offset + high)


def _whole(tensor: Tensor) -> _TensorLocation:
    return _TensorLocation(
        TensorInfo(tuple(tensor.shape), tensor.dtype), [_Flat({0: tensor})], 0, max(tensor.numel(), 1)
    )


@dataclass(frozen=True)
class _Slot:
    """A trained parameter: its shape, its group, the vectors that it lies in, and the place in them (see
    `_TensorLocation`)."""

    shape: tuple[int, ...]
    group: int
    lines: slice
    offset: int
    length: int


class _Zero:
    """The contents of the files of all ranks, put together."""

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
        """The place of every tensor, by kind and name."""
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
        """The counts of steps, samples and skipped steps, the version, learning rates and loss scale, as far
        as the files have them."""
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
        """The state of dynamic loss scaling, in the form of `TrainingProgress.state_dict`; empty without
        it."""
        scaler = self.optimizers[0].get("loss_scaler") if self.optimizers else None
        known = vars(scaler) if isinstance(scaler, torch_archive.StandIn) else {}
        if not isinstance(known.get("cur_scale"), float | int):
            return {}
        found: dict[str, Any] = {"loss_scale": float(known["cur_scale"])}
        if {"cur_iter", "last_overflow_iter", "scale_window", "delayed_shift", "cur_hysteresis"} <= {*known}:
            good = known["cur_iter"] - known["last_overflow_iter"] - 1
            found["good_steps"] = (good - 1) % known["scale_window"] if good else -1
            found["overflows"] = known["delayed_shift"] - known["cur_hysteresis"]
        elif known["cur_scale"] == 1:  # as without fp16, and beside torch's GradScaler
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
            written_by = " and ".join(map(str, sorted(counts)))
            raise CheckpointError(
                f"{self.folder} was written by {written_by} ranks at stage "
                f"{self.stage}, and has the optimizer's files of {self.ranks} "
                f"and the model's of {len(self.models)}: copy the files of every rank"
            )

    def _states(self, optimizer: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The optimizer's states of one rank, by kind, for each group."""
        base = _base(optimizer)
        if "state" not in base:  # stages 1 and 2 with elastic_checkpoint: a list
            return list(base["groups"])
        found = []
        for group in base["param_groups"]:
            common = {"step": group["step"]} if "step" in group else {}  # DeepSpeed's own Adam counts there
            found += [{**common, **base["state"].get(index, {})} for index in group["params"]]
        return found

    def _slots_of_groups(self, shapes: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, _Slot]:
        """The trained parameters at stages 1 and 2, with a vector for each group: all ranks' partitions end
        to end."""
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
        """The trained parameters at stage 3, with a vector for each rank, all groups end to end, in which
        each parameter has an equal shard."""
        ends = list(accumulate(self.sizes))
        found, end = {}, 0
        for name, shape in (item for named in shapes for item in named.items()):
            length = ceil_div(prod(shape), self.ranks)
            found[name] = _Slot(tuple(shape), bisect_right(ends, end), slice(None), end, max(length, 1))
            end += length
        if end != ends[-1]:
            offloaded = ": states that are offloaded to files are not in a checkpoint" if not ends[-1] else ""
            raise ValueError(
                f"each rank should have {end} elements of the parameters, and has {ends[-1]}{offloaded}"
            )
        return found

    def _size(self, group: int) -> int:
        """The elements of a rank's partition of a group, with the padding, which only some of DeepSpeed's
        optimizers save. Raises ValueError where ranks differ."""
        sizes = [masters[group].numel() for masters in self.masters]
        if len(set(sizes)) > 1 and self.stage < 3:
            sizes = [
                size + each["group_paddings"][group]
                for size, each in zip(sizes, self.optimizers, strict=True)
            ]
        if len(set(sizes)) != 1:
            raise ValueError(f"the ranks' partitions of group {group} have {sizes} elements")
        return sizes[0]

    def _lines(self, pieces: Sequence[Sequence[Tensor | None]]) -> list[_Flat]:
        """Join `pieces`, given by rank and group (None: the group has none), into flat vectors: one for each
        rank at stage 3, else one for each group."""
        if self.stage == 3:
            starts = list(accumulate(self.sizes, initial=0))[:-1]
            return [
                _Flat({start: piece for start, piece in zip(starts, each, strict=True) if piece is not None})
                for each in pieces
            ]
        by_group = enumerate(zip(*pieces, strict=True))
        return [
            _Flat({self.sizes[group] * rank: piece for rank, piece in enumerate(each) if piece is not None})
            for group, each in by_group
        ]

    def _placed(self, lines: Sequence[_Flat], slot: _Slot, dtype: torch.dtype) -> _TensorLocation:
        return _TensorLocation(TensorInfo(slot.shape, dtype), lines[slot.lines], slot.offset, slot.length)

    def _weights(self, masters: Sequence[_Flat]) -> dict[str, _TensorLocation]:
        """The places of weights and buffers. At stage 3 only buffers are whole in the model's file; its
        weights are empty tensors, and lie in `masters` or, frozen, in fragments of every rank."""
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
                pieces = [model["frozen_param_fragments"][name] for model in self.models]
                line = _Flat(
                    {rank * ceil_div(prod(shape), self.ranks): piece for rank, piece in enumerate(pieces)}
                )
                found[name] = _TensorLocation(
                    TensorInfo(shape, pieces[0].dtype), [line], 0, max(prod(shape), 1)
                )
        return found

    def _state(self, kind: str) -> dict[str, _TensorLocation]:
        """The places of one kind of state, by name, for the parameters of groups that have it."""
        values = [[state.get(kind) for state in states] for states in self.states]
        pieces = [
            [self._of_elements(value, rank, group) for group, value in enumerate(each)]
            for rank, each in enumerate(values)
        ]
        lines = self._lines(pieces)
        found: dict[str, _TensorLocation] = {}
        for name, slot in self.slots.items():
            value: Any = values[0][slot.group]
            if all(each[slot.group] is not None for each in pieces):
                found[name] = self._placed(lines, slot, value.dtype)
            elif isinstance(value, int | float) or (isinstance(value, Tensor) and not value.dim()):
                found[name] = _whole(torch.as_tensor(value))
        return found

    def _of_elements(self, value: Any, rank: int, group: int) -> Tensor | None:
        """Return `value` if it has a number for each element of a rank's partition of a group, with or
        without padding; else None."""
        sizes = (self.masters[rank][group].numel(), self.sizes[group])
        return value if isinstance(value, Tensor) and value.dim() and value.numel() in sizes else None


def _base(optimizer: Mapping[str, Any]) -> Mapping[str, Any]:
    """The state dict of the optimizer that DeepSpeed wraps."""
    base = (
        optimizer["optimizer_state_dict"]
        if "fp32_flat_groups" in optimizer
        else optimizer["base_optimizer_state"]
    )
    return base if isinstance(base, Mapping) else {"groups": base}


def _number(stage: Any) -> int:
    """The number of a ZeRO stage, which files hold as a member of DeepSpeed's enumeration, or as a number."""
    return int(stage.args[0]) if isinstance(stage, torch_archive.StandIn) else int(stage)
