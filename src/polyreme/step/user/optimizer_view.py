"""The optimizer of all shards, as a user's loop or learning rate scheduler sees it.

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
from polyreme.zero.sharded_optimizer import ShardedOptimizer


class Steps(Protocol):
    """An engine, for its `step` and `zero_grad`."""

    def step(self, last: bool = False) -> Any: ...
    def zero_grad(self, set_to_none: bool = True) -> None: ...


class ShownOptimizer:
    """The optimizer that views show: that of the current training, or of the last one. A refresh replaces it,
    and schedulers on a view go on."""

    options: Options
    sharded_optimizer: ShardedOptimizer

    def __init__(self) -> None:
        self._view: OptimizerView | None = None

    def follow(self, options: Options, sharded_optimizer: ShardedOptimizer) -> None:
        """Show these from now on."""
        self.options, self.sharded_optimizer = options, sharded_optimizer

    def view(self, engine: Steps) -> OptimizerView:
        """Return the optimizer as a user of `engine` sees it."""
        if self._view is None:
            self._view = OptimizerView(engine, self)
        return self._view


class OptimizerView(Optimizer):
    """A torch optimizer whose `param_groups` hold the options of the next step. Changing one (`group["lr"] =
    ...`), directly or by a torch scheduler, takes effect. Their parameters are the model's, or stand-ins
    where the config or a class made the groups."""

    is_of_engine = True
    """Marks a step of this optimizer as an engine's."""
    # keeps torch schedulers from warning of an optimizer that has not stepped: the engine steps
    _opt_called = True

    def __init__(self, engine: Steps, shown: ShownOptimizer) -> None:
        self._engine, self._shown = engine, shown
        self._made = False
        super().__init__([{"params": []}], shown.options.defaults)
        self._made = True

    @property
    def _sharded_optimizer(self) -> ShardedOptimizer:
        return self._shown.sharded_optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._shown.options.groups

    @param_groups.setter
    def param_groups(self, groups: Iterable[Any]) -> None:
        self._refuse_setting("param_groups")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the optimizer that was given to `initialize`. Its parameters train from the next
        step on. Raises ModelError where the engine made the groups."""
        # torch's constructor adds an empty group
        if self._made and not self._shown.options.add_group(param_group):
            raise ModelError(
                "optimizer.add_param_group of an engine: add the parameters to the module, and call "
                "engine.refresh(), which makes the groups anew"
            )

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """This rank's shards of the states, by parameter: flat tensors, and numbers such as `step`."""
        found: defaultdict[Tensor, Any] = defaultdict(dict)
        for optimizer in self._sharded_optimizer:
            bucket = optimizer.bucket
            for interval, states in optimizer.state.by_interval():
                for parameter, slot in zip(bucket.parameters, bucket.layout.slots, strict=True):
                    if inside := overlap(interval, slot):
                        found[parameter].update(
                            {
                                kind: _slice_state(value, inside.since(interval.start), interval.size)
                                for kind, value in states.items()
                            }
                        )
        return found

    @state.setter
    def state(self, state: Any) -> None:
        self._refuse_setting("state")

    def _refuse_setting(self, name: str) -> None:
        if self._made:  # torch's constructor sets both
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


def _slice_state(value: Any, elements: slice, size: int) -> Any:
    """Return these `elements` of a state of `size` numbers; any other state as it is."""
    if isinstance(value, Stored):
        return value.fetch(elements.start, elements.stop)
    if isinstance(value, Tensor) and value.numel() == size and value.dim():
        return value.flatten()[elements]
    return value


SPREAD = (
    "the optimizer's states are spread over the ranks: engine.save(path) writes and engine.load(path) reads "
    "them, for any number of ranks"
)
