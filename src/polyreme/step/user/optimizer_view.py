"""The optimizer of all shards as a loop or a learning rate scheduler of the user's sees it.

Communication: that of `Engine.step`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

from polyreme.errors import ModelError
from polyreme.layout.intervals import overlap
from polyreme.layout.region import Stored
from polyreme.optim.options import Options
from polyreme.zero.updates import Updates


class Steps(Protocol):
    """What steps: an engine."""

    def step(self, last: bool = False) -> Any: ...
    def zero_grad(self, set_to_none: bool = True) -> None: ...


class Source:
    """What views look at: the optimizer of the training that there is now, or was last. A refresh puts
    another in its place, and schedulers on a view go on."""

    options: Options
    updates: Updates

    def __init__(self) -> None:
        self._view: OptimizerView | None = None

    def follow(self, options: Options, updates: Updates) -> None:
        """Show these from now on."""
        self.options, self.updates = options, updates

    def view(self, engine: Steps) -> OptimizerView:
        """The optimizer as a user of `engine` sees it."""
        if self._view is None:
            self._view = OptimizerView(engine, self)
        return self._view


class OptimizerView(Optimizer):
    """`param_groups` are those whose options count at the next step; to change one (`group["lr"] = ...`), or
    to have a torch scheduler do so, changes it. Their parameters are the model's, or stand-ins for them where
    the config or a class made the groups."""

    is_of_engine = True
    """What tells others that a step of it is one of an engine."""
    _opt_called = True  # a torch scheduler warns where an optimizer has not stepped; the engine does so

    def __init__(self, engine: Steps, source: Source) -> None:
        self._engine, self._source = engine, source
        self._made = False
        super().__init__([{"params": []}], source.options.defaults)
        self._made = True

    @property
    def _updates(self) -> Updates:
        return self._source.updates

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._source.options.groups

    @param_groups.setter
    def param_groups(self, groups: Iterable[Any]) -> None:
        self._refuse_setting("param_groups")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the optimizer that was given to `initialize`, whose parameters train from the next
        step on. Raises ModelError where the engine made the groups."""
        if self._made and not self._source.options.add_group(param_group):  # torch's constructor adds one
            raise ModelError(
                "optimizer.add_param_group of an engine: add the parameters to the module, and call "
                "engine.refresh(), which makes the groups anew"
            )

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """This rank's part of the states, by parameter: flat tensors, and numbers such as `step`."""
        found: defaultdict[Tensor, Any] = defaultdict(dict)
        for update in self._updates:
            bucket = update.bucket
            for interval, states in update.state.by_interval():
                for parameter, slot in zip(bucket.parameters, bucket.layout.slots, strict=True):
                    if inside := overlap(interval, slot):
                        found[parameter].update(
                            {
                                kind: _part(value, inside.since(interval.start), interval.size)
                                for kind, value in states.items()
                            }
                        )
        return found

    @state.setter
    def state(self, state: Any) -> None:
        self._refuse_setting("state")

    def _refuse_setting(self, name: str) -> None:
        if self._made:  # torch's constructor sets empty ones
            raise ModelError(
                f"optimizer.{name} = ... of an engine, whose shards have what it tells of: set options in "
                "param_groups as they are, and states by engine.numbers(parameter)"
            )

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """End the step: `Engine.step`. Raises ModelError for a closure."""
        if closure is not None:
            raise ModelError(
                "optimizer.step(closure) of an engine, whose gradients are there already: call the "
                "forward and engine.backward before step()"
            )
        self._engine.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients since the last step: `Engine.zero_grad`."""
        self._engine.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Raises ModelError: states are spread over the ranks."""
        raise ModelError(SPREAD)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raises ModelError: states are spread over the ranks."""
        raise ModelError(SPREAD)


def _part(value: Any, part: slice, size: int) -> Any:
    """The numbers `part` of a state of `size` numbers; any other state as it is."""
    if isinstance(value, Stored):
        return value.fetch(part.start, part.stop)
    if isinstance(value, Tensor) and value.numel() == size and value.dim():
        return value.flatten()[part]
    return value


SPREAD = (
    "the optimizer's states are spread over the ranks: engine.save(path) writes and engine.load(path) reads "
    "them, for any number of ranks"
)
