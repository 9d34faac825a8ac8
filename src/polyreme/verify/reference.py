"""Plain PyTorch on one device, to compare a parallel run with: forward, backward and a torch optimizer on the
whole model.

Invariant: nothing here divides, shards, gathers or reduces, and the weights of losses, the optimizer's groups
and clipping are computed here once more, so that a fault of the engine is not shared.
Communication: none."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode, _get_current_function_mode, has_torch_function
from torch.utils import _pytree as pytree

from polyreme.config import Config, Progress
from polyreme.errors import BatchError
from polyreme.models import huggingface
from polyreme.models.huggingface import ForwardSignature, tensors_in
from polyreme.models.trace import Key, Trace
from polyreme.optim.groups import maker
from polyreme.optim.lr_schedule import LRSchedule
from polyreme.sequence.documents import ENDS, IDS
from polyreme.step.batch.batches import leading_size
from polyreme.step.loss.objective import called

DROPOUTS: dict[Any, tuple[str, int]] = {
    F.scaled_dot_product_attention: ("dropout_p", 4),
    F.multi_head_attention_forward: ("dropout_p", 10),
    **dict.fromkeys(
        (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout), ("p", 1)
    ),
}
"""Functions that drop, and the name and position of their probability."""


class Exact(TorchFunctionMode):
    """Turns dropout off, or shows what is dropped of; and keeps float64 where a model goes to float32, which
    would hide what float64 is to show. Holds in a backward, too, which computes forwards again.

    updating: 16 bits are kept away, too, as from Muon's update. dropped: there was dropout."""

    def __init__(self, wide: bool, drops: Callable[[Tensor], object] | None = None) -> None:
        """wide: keep float64. drops: called with the input of each dropout, which then drops."""
        super().__init__()
        self.updating = self.dropped = False
        self._wide, self._drops = wide, drops

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in DROPOUTS:
            args, kwargs = self._dropping(*DROPOUTS[func], args, kwargs)
        if self._wide and args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            cast = func in (Tensor.to, Tensor.type) and args[1:2] == (torch.float32,)
            if func is Tensor.float or cast or (self.updating and func is Tensor.bfloat16):
                return args[0]
            if kwargs.get("dtype") == torch.float32:
                kwargs = {**kwargs, "dtype": torch.float64}
        return func(*args, **kwargs)

    def _dropping(self, name: str, at: int, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments of a function without its dropout."""
        p = args[at] if len(args) > at else kwargs.get(name, 0.5 if name == "p" else 0.0)
        training = name != "p" or (args[2] if len(args) > 2 else kwargs.get("training", True))
        if not (p and training):
            return args, kwargs
        self.dropped = True
        if self._drops is not None:
            self._drops(args[0])
            return args, kwargs
        if len(args) > at:
            return (*args[:at], 0.0, *args[at + 1 :]), kwargs
        return args, {**kwargs, name: 0.0}


def _is_overridden(tensors: Any) -> bool:
    """Whether torch gives a backward to a mode, which is off inside of it: not to `Exact`."""
    return not isinstance(_get_current_function_mode(), Exact) and has_torch_function(tensors)


torch.autograd.has_torch_function = _is_overridden  # type: ignore[assignment]


class Part(NamedTuple):
    """The input of one forward of the reference: micro-batch `micro` of data-parallel rank `data` (None: of
    all of them, one after the other)."""

    batch: Any
    micro: int
    data: int | None


def cut(batch: Any, count: int) -> list[Any]:
    """Cut a batch along its samples into `count` micro-batches; a list of micro-batches is cut already."""
    if isinstance(batch, list) and batch and not any(isinstance(each, Tensor) for each in batch):
        return batch
    leaves, spec = pytree.tree_flatten(batch)
    samples = _samples(batch) if tensors_in(batch) else leading_size(batch)
    if samples < count:
        raise BatchError(f"a batch of {samples} samples cannot be verified in {count} micro-batches")

    def rows(leaf: Any, start: int, stop: int) -> Any:
        return leaf[start:stop] if isinstance(leaf, Tensor) and leaf.shape[:1] == (samples,) else leaf

    return [
        pytree.tree_unflatten([rows(leaf, *each) for leaf in leaves], spec)
        for each in itertools.pairwise(samples * i // count for i in range(count + 1))
    ]


def joined(batches: Sequence[Any]) -> Any:
    """Join batches along their samples; None where they do not fit together."""
    leaves, specs = zip(*map(pytree.tree_flatten, batches), strict=True)
    forms = [[leaf.shape[1:] if isinstance(leaf, Tensor) else None for leaf in each] for each in leaves]
    fit = all(one == (specs[0], forms[0]) for one in zip(specs, forms, strict=True))
    if not fit or any(isinstance(leaf, Tensor) and not leaf.dim() for each in leaves for leaf in each):
        return None
    return pytree.tree_unflatten(
        [torch.cat(each) if isinstance(each[0], Tensor) else each[0] for each in zip(*leaves, strict=True)],
        specs[0],
    )


def _samples(batch: Any) -> int:
    return next((each.shape[0] for each in tensors_in(batch) if each.dim()), 1)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    floating = lambda t: t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t  # noqa: E731
    return huggingface.map_leaves(floating, value)


class Loss:
    """Calls a model on a batch and reads its loss, as `Engine.train_step` says that it does. equal: every
    micro-batch counts the same (batch.mean = "ranks")."""

    def __init__(
        self, model: nn.Module, loss_fn: Any, dtype: torch.dtype, equal: bool = False, separates: bool = False
    ) -> None:
        """separates: see `separated`."""
        self._model, self._loss_fn, self._dtype, self._equal = model, loss_fn, dtype, equal
        self._separates = separates
        self._signature = ForwardSignature.of(model)

    def _output(self, batch: Any) -> Any:
        own = self._loss_fn is None
        if not isinstance(batch, Mapping):
            inputs = batch if isinstance(batch, tuple | list) else (batch,)
            given = inputs[:-1] if inputs is batch and not own else inputs
            return called(self._model, _cast(tuple(given), self._dtype), {}, own)
        named = {
            name: value if name == "labels" else _cast(value, self._dtype)
            for name, value in batch.items()
            if own or (name != "labels" and (self._signature.any_name or name in self._signature.names))
            if name != huggingface.NUM_ITEMS
        }
        return called(self._model, (), {**huggingface.training_arguments(self._model), **named}, own)

    def __call__(self, batch: Any) -> tuple[Tensor, float]:
        """Return the sum of the losses of a batch, and the number that their mean is over."""
        if self._separates and isinstance(batch, Mapping):
            batch = separated(batch)
        output: Any = self._output(batch)
        weight: float | None = huggingface.count_labels(self._model, batch)
        if self._loss_fn is None:
            loss = output["loss"] if isinstance(output, Mapping) else getattr(output, "loss", output)
            loss = loss[0] if isinstance(loss, tuple | list) else loss
        else:
            target = batch[-1] if isinstance(batch, tuple | list) else batch
            if any(each.is_floating_point() for each in tensors_in(target)):
                wide = torch.promote_types(self._dtype, torch.float32)
                output, target = _cast(output, wide), _cast(target, wide)
            loss, weight = self._loss_fn(output, target), _classes(self._loss_fn, target)
        if not isinstance(loss, Tensor | tuple):
            raise BatchError(f"the loss must be a tensor, but is {type(loss).__name__}: return it in loss_fn")
        if isinstance(loss, tuple):
            if not self._equal:
                return loss[0].reshape(()), float(loss[1])
            loss = loss[0] / loss[1]
        count = 1.0 if self._equal else float(_samples(batch) if weight is None else weight)
        loss = loss.reshape(()) if count else loss.reshape(()).nan_to_num()  # 0 / 0
        return loss * count, count


def separated(batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a batch in which no token predicts the first one of the next document, as where sequences are
    divided over mesh.cp. Raises BatchError for documents that plain transformers does not separate."""
    if strange := [name for name in (*IDS, *ENDS) if batch.get(name) is not None]:
        raise BatchError(
            f"{strange[0]} tells documents apart to the engine, but not to one device, with which it is "
            "compared: give verify position_ids that begin anew at each document"
        )
    positions, labels = batch.get("position_ids"), batch.get("labels")
    if positions is None or labels is None:
        return batch
    return {**batch, "labels": labels.masked_fill(positions == 0, huggingface.IGNORED_LABEL)}


def _classes(loss_fn: Any, target: Any) -> float | None:
    """Return the number of targets that torch's cross entropy is the mean over; None for another loss."""
    known = loss_fn in (F.cross_entropy, F.nll_loss) or isinstance(loss_fn, nn.CrossEntropyLoss | nn.NLLLoss)
    if not known or not isinstance(target, Tensor) or target.is_floating_point():
        return None
    counted = target[target != getattr(loss_fn, "ignore_index", -100)]
    weights = getattr(loss_fn, "weight", None)
    return counted.numel() if weights is None else float(weights.double()[counted].sum())


def optimizers(model: nn.Module, config: Config, given: Any = None) -> list[Optimizer]:
    """Return the torch optimizers over the whole parameters of `model` that the config describes, or those
    that the user gave: a class, a function of the parameters, or an optimizer of the model's."""
    section = config.optimizer
    if isinstance(given, Optimizer):
        return [given]
    if given is not None and not isinstance(given, type):
        return [given([p for p in model.parameters() if p.requires_grad])]
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    muon = given is None and section.name == "muon"
    patterns = section.matrices
    blocks = huggingface.matrices(model) if patterns == "blocks" else set()

    def matches(many: Sequence[str], wanted: Sequence[str]) -> list[str]:
        return [pattern for pattern in wanted if any(fnmatchcase(name, pattern) for name in many)]

    groups: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    for parameter, many in names.items():
        own = muon and bool(blocks & {*many} or (patterns != "blocks" and matches(many, patterns)))
        spared = section.no_decay == "vectors" and parameter.dim() < 2
        spared |= not isinstance(section.no_decay, str) and bool(matches(many, section.no_decay))
        group: dict[str, Any] = {
            "lr": section.matrix_lr if own else section.lr,
            "weight_decay": 0.0 if spared else section.weight_decay,
            **{
                str(k): v
                for found in matches(many, [*section.groups])[:1]
                for k, v in section.groups[found].items()
            },
            "params": [parameter],
        }
        groups[own] += [group] * parameter.requires_grad
    rest = section.model_copy(update={"name": "adamw", "options": {}}) if muon else section
    found = [maker(rest, given)(groups[False])] if groups[False] else []
    if groups[True]:
        found.append(torch.optim.Muon(groups[True], momentum=section.matrix_momentum, **section.options))
    return found


class Reference:
    """A whole model under plain training.

    trace: what modules computed in the step. loss, norm, weight: of the step: its mean loss, the norm of its
    gradients, and what the loss is the mean over. losses: the sum and the weight of each part. gradients:
    those of the mean loss, by the first of each parameter's names. own: those of the sum of losses of one
    data-parallel rank. weights: in the master's dtype. lr: the highest of the last update."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        config: Config,
        loss_fn: Any,
        keeper: int = 0,
        compute: torch.dtype = torch.float64,
        master: torch.dtype = torch.float64,
        autocast: torch.dtype | None = None,
    ) -> None:
        """keeper: the data-parallel rank whose forwards count for buffers such as running means. compute,
        master: the dtypes of forwards, and of weights in the update. autocast: that of torch.autocast."""
        self.model, self._config, self._keeper = model, config, keeper
        self._compute, self._master, self._autocast = compute, master, autocast
        self.parameters = dict(model.named_parameters())
        for parameter in self.parameters.values():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(master)
        self._optimizers = optimizers(model, config, optimizer)
        self._groups = [(group, group["lr"]) for each in self._optimizers for group in each.param_groups]
        self.trace = Trace(model)
        self._loss = Loss(
            model, loss_fn, compute, config.batch.mean == "ranks",
            separates=config.mesh.cp > 1 or config.context.method != "auto",
        )  # fmt: skip
        self._progress, self._unit = Progress(), 1.0
        self.weights: dict[str, Tensor] = {}
        self._take_weights()

    def _take_weights(self) -> None:
        """Take the weights that the parameters have, and give these their dtype in forwards."""
        for name, parameter in self.parameters.items():
            parameter.grad, self.weights[name] = None, parameter.data
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(self._compute, copy=True)

    def begin(self, numbers: Mapping[str, Tensor]) -> None:
        """Set weights and buffers to these."""
        for name, parameter in self.parameters.items():
            parameter.data = numbers[name].to(self.weights[name], copy=True)
        for name, buffer in self.model.named_buffers():
            buffer.copy_(numbers.get(name, buffer))
        self._take_weights()

    def _forward(self, part: Part, keep: bool) -> tuple[Tensor, float]:
        """Return the loss of a part, and its weight. keep: the buffers, too, as they become."""
        before = [] if keep else [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        kind = next(iter(self.parameters.values())).device.type
        with torch.autocast(kind, self._autocast, enabled=self._autocast is not None):
            found = self._loss(part.batch)
        for buffer, kept in before:
            buffer.data = kept
        return found

    def look(self, batch: Any) -> tuple[float, float]:
        """Return the mean loss of a batch, which changes nothing, and what it is the mean over."""
        with torch.no_grad():
            loss, weight = self._forward(Part(batch, 0, None), keep=False)
        return (loss.item() / weight if weight else math.nan), weight

    def gradients_of(self, part: Part, own: int | None = None) -> dict[str, Tensor]:
        """Return the gradients of the sum of one part's losses. own: the data-parallel rank whose parts are
        traced; None: nothing is."""
        self.trace.micro = part.micro if own is not None and part.data in (own, None) else None
        loss, weight = self._forward(part, keep=own is not None and part.data in (self._keeper, None))
        self.losses += [] if own is None else [(loss.item(), weight)]
        if loss.requires_grad and weight:
            torch.autograd.backward([loss * self._unit])
        self.trace.micro = None
        given = {p for group, _ in self._groups for p in group["params"]}
        found = {name: p.grad for name, p in self.parameters.items() if p.grad is not None and p in given}
        for parameter in self.parameters.values():
            parameter.grad = None
        return found

    def backward(self, parts: Sequence[Part], own: int, unit: float = 1.0) -> None:
        """Compute the loss and the gradients of a step. The parts of data-parallel rank `own` are traced.
        unit: what the sum of losses is multiplied by meanwhile, as by a loss scale."""
        self._unit = unit
        self.losses: list[tuple[float, float]] = []
        self.own: dict[str, Tensor] = {}
        self.gradients: dict[str, Tensor] = {}
        wide = torch.promote_types(self._compute, torch.float32)
        for part in sorted(parts, key=lambda part: part.data not in (own, None)):
            for name, scaled in self.gradients_of(part, own).items():
                gradient = scaled.to(wide) / unit
                for sums in (self.own, self.gradients) if part.data in (own, None) else (self.gradients,):
                    sums[name] = sums[name] + gradient if name in sums else gradient
        self.weight = sum(weight for _, weight in self.losses)
        self.gradients = {name: total / (self.weight or 1.0) for name, total in self.gradients.items()}
        self.loss = sum(loss for loss, _ in self.losses) / (self.weight or math.nan)
        self.go_on_with(self.gradients)

    def go_on_with(self, gradients: Mapping[str, Tensor]) -> None:
        """Have the update take these gradients, where there are some, in place of its own."""
        self.gradients = {name: gradients.get(name, own).to(own) for name, own in self.gradients.items()}
        self.norm = math.sqrt(sum(g.double().square().sum().item() for g in self.gradients.values()))

    def traced(self, key: Key) -> Tensor:
        """Return a tensor of the trace, a gradient without the unit of its backward."""
        found = self.trace.values[key]
        return found.double() / self._unit if key.kind.endswith("gradient") else found

    def update(self, samples: int, tokens: int) -> None:
        """Clip, and update the weights, once `backward` was called."""
        limit, schedule = self._config.optimizer.clip, LRSchedule(self._config.lr_schedule)
        clip = 1.0 if limit is None else min(1.0, limit / (self.norm + 1e-6))
        for group, highest in self._groups:
            group["lr"] = highest * schedule.factor(self._progress)
        self.lr = max((group["lr"] for group, _ in self._groups), default=0.0)
        for name, parameter in self.parameters.items():
            parameter.data = self.weights[name].clone()
            if name in self.gradients:
                parameter.grad = (self.gradients[name] * clip).to(parameter.dtype)
            elif parameter.requires_grad and self._config.optimizer.unused == "zero":
                parameter.grad = torch.zeros_like(parameter)
        for each in self._optimizers:
            each.step()
        self._take_weights()
        steps, seen, read = self._progress
        self._progress = Progress(steps + 1, seen + samples, read + tokens)
