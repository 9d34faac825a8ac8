"""Changes of a model after it was placed, noticed before a step.

Freezing is no change: a parameter without a gradient is left alone, as in torch. No communication."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from operator import is_

from torch import nn

from polyreme.errors import ModelError, named


@dataclass(frozen=True)
class Changes:
    """Names of the parameters that a script has changed."""

    unfrozen: list[str]
    added: list[str]
    replaced: list[str]
    removed: list[str]

    @property
    def new(self) -> set[str]:
        return {*self.added, *self.replaced}

    @property
    def only_unfrozen(self) -> bool:
        return not (self.added or self.replaced or self.removed)

    def __str__(self) -> str:
        changes = [f"{what} {named(names)}" for what, names in vars(self).items() if names]
        return "; ".join(changes) or "nothing"


class ModelSnapshot:
    """The modules and parameters of `model` at one time, and which of them train. buffers: names of its
    buffers."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._named = dict(model.named_parameters(remove_duplicate=False))
        self.buffers = {name for name, _ in model.named_buffers()}
        self._shapes = [p.shape for p in self._named.values()]
        self._dtypes = [p.dtype for p in self._named.values()]
        self._frozen = [p for p in model.parameters() if not p.requires_grad]
        self._record()

    def _record(self) -> None:
        self._dicts = [
            held for module in self._model.modules() for held in (module._modules, module._parameters)
        ]
        self._members = self._present()

    def check(self, model: nn.Module) -> None:
        """Raise ModelError that names what was unfrozen, added, replaced or removed since, or if `model` is
        another one. Takes 0.1 ms for 400 modules."""
        if model is not self._model:
            raise ModelError(f"engine.module was replaced by another {type(model).__name__}: "
                             "to train it, call engine.refresh() on every "
                             "rank; what it shares with the model "
                             "before keeps its optimizer states")  # fmt: skip
        if self._dtypes != [p.dtype for p in self._named.values()]:
            raise ModelError(
                f"the model was converted since initialize: {self._converted()}. "
                "The dtype that an engine computes in is precision.compute "
                "of its config, in place of module.half(), .float() or .to(dtype); make the engine anew"
            )
        present = self._present()
        same = len(present) == len(self._members) and all(map(is_, present, self._members))
        same = same and self._shapes == [p.shape for p in self._named.values()]
        if same and not any(p.requires_grad for p in self._frozen):
            return
        changes = self.changes(model)
        if str(changes) != "nothing":
            raise ModelError("the model was changed since initialize, and its buckets "
                             f"do not have that: {changes}. To train it as it is "
                             "now, call engine.refresh() on every "
                             "rank: what stays keeps its optimizer states")  # fmt: skip
        self._record()  # modules without parameters came or went

    def _converted(self) -> str:
        pairs = zip(self._named.items(), self._dtypes, strict=True)
        return next(f"{name} from {before} to {p.dtype}" for (name, p), before in pairs if p.dtype != before)

    def changes(self, model: nn.Module) -> Changes:
        """Return how `model` differs from the snapshot."""
        now = dict(model.named_parameters(remove_duplicate=False))
        frozen = {id(p) for p in self._frozen}
        shapes = dict(zip(self._named, self._shapes, strict=True))
        return Changes(
            unfrozen=[name for name, p in now.items() if id(p) in frozen and p.requires_grad],
            added=[name for name in now if name not in self._named],
            replaced=[
                name
                for name, p in now.items()
                if name in shapes and (p is not self._named[name] or p.shape != shapes[name])
            ],
            removed=[name for name in self._named if name not in now],
        )

    def _present(self) -> list[nn.Module | nn.Parameter | None]:
        return list(chain.from_iterable(map(dict.values, self._dicts)))  # type: ignore[arg-type]
