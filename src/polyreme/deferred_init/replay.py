"""Builds a model that is too big to build whole: records how it is built, then makes its tensors one at a
time.

Invariant: `record(build, seed).replay(sink)` passes on, bit for bit, the tensors of `torch.manual_seed(seed);
build()`, and leaves the generator in the same state, whatever the number of ranks. No communication: every
rank replays the same graph.

While recording, every tensor is fake: it claims to be on the CPU (so that libraries do not skip
initialisation as on the meta device), and has no numbers. Each operator that makes or writes numbers goes
into a graph (`graph`). Replay computes on demand, from the last value of each parameter and buffer: a value
that is overwritten is never computed, but its random draws are still made, in scratch memory, because they
advance the generator. The generator's state before each draw is kept (5 KB each), so that a value which was
dropped to save memory, or which the build reads (`.item()`, `if mask.any()`), can be computed again at any
time."""

from __future__ import annotations

import gc
import warnings
from collections import Counter, deque
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from polyreme.deferred_init.graph import Evaluator, Graph, Op, View
from polyreme.errors import ModelError

aten = torch.ops.aten
Sink = Callable[[str, Tensor], None]

_UNFAKEABLE = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
# In-place operators whose result does not depend on the tensor's old numbers.
_FILLS = {
    aten.zero_, aten.fill_, aten.copy_, aten.normal_, aten.uniform_, aten.random_, aten.bernoulli_,
    aten.exponential_, aten.geometric_, aten.cauchy_, aten.log_normal_,
}  # fmt: skip
# Operators that use the shape of their tensor argument, and never its numbers.
_SHAPE_ONLY = {
    aten.empty_like, aten.zeros_like, aten.ones_like, aten.full_like, aten.rand_like, aten.randn_like,
    aten.randint_like, aten.new_empty, aten.new_empty_strided, aten.new_zeros, aten.new_ones,
    aten.new_full,
}  # fmt: skip
_MARK = 1 << 62


class _Fakes(FakeTensorMode):
    """A set of fake tensors, which deep copies of its tensors belong to as well."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Fakes:
        return self


class _Recorder(TorchDispatchMode):
    """Runs every operator on fake tensors and records those that make or write numbers.

    The default generator draws nothing meanwhile: after each random row it is set to a mark, a state that
    stands for the end of that row. So the next draw sees whether the build called `torch.manual_seed`,
    `fork_rng` or `set_rng_state`."""

    def __init__(self) -> None:
        super().__init__()
        self.fake = _Fakes(allow_fallback_kernels=False)
        self.graph = Graph()
        self.evaluator = Evaluator(self.graph, pending=lambda value: value not in self._superseded)
        self._superseded: set[int] = set()
        self._current: dict[int, int] = {}  # address of a storage -> its latest value
        self._storages: dict[int, UntypedStorage] = {}  # kept, so that no address is used twice
        self._marks: dict[bytes, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)
        if func is aten.lift_fresh.default and not isinstance(args[0], FakeTensor):
            return self._constant(args[0])
        leaves = tree_leaves((args, kwargs))
        tensors = [t for t in leaves if isinstance(t, Tensor)]
        written = {id(t) for t in _leaves(func, args, kwargs, Tensor, _is_written)}
        random = torch.Tag.nondeterministic_seeded in func.tags
        if any(isinstance(leaf, UntypedStorage) and leaf._cdata not in self._current for leaf in leaves):
            raise ModelError(
                f"{func} puts a tensor on memory that was not seen being made, "
                "as torch.load does, while the model is built; load after "
                "building, or build the model whole and pass the module"
            )
        outside = tensors and not random and not any(isinstance(t, FakeTensor) for t in tensors)
        if not outside and all(isinstance(t, FakeTensor) for t in tensors if id(t) in written):
            try:
                return self._graph(
                    func,
                    tree_map_only(Tensor, self._as_fake, args),
                    tree_map_only(Tensor, self._as_fake, kwargs),
                    random,
                )
            except _UNFAKEABLE:
                pass
        if random or any(isinstance(t, FakeTensor) for t in tensors if id(t) in written):
            raise ModelError(
                f"{func} cannot be recorded while the model is "
                "built; build the model whole and pass the module"
            )
        return func(*tree_map_only(Tensor, self.read, args), **tree_map_only(Tensor, self.read, kwargs))

    def view(self, tensor: Tensor) -> View:
        """Return `tensor`, which may be a real one, as a view of the latest value of its storage."""
        tensor = self._as_fake(tensor)
        address = _storage(tensor, "the build")._cdata
        where = (tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()))
        return View(self._current[address], tensor.dtype, *where, tensor.is_conj(), tensor.is_neg())

    def read(self, tensor: Tensor) -> Tensor:
        """Return a real tensor with the numbers that `tensor` has at this point of the build."""
        return self.evaluator.tensor(self.view(tensor)) if isinstance(tensor, FakeTensor) else tensor

    def position(self) -> int | Tensor:
        """Return the default generator's position: the number of the row that ended there, or a state that
        the build set."""
        state = torch.get_rng_state()
        return self._marks.get(state.numpy().tobytes(), state)

    def _graph(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], random: bool) -> Any:
        seen_args = tree_map_only(Tensor, self.view, args)
        seen_kwargs = tree_map_only(Tensor, self.view, kwargs)
        reads = frozenset(v.value for v in _leaves(func, seen_args, seen_kwargs, View, _is_read))
        written = [
            (t.untyped_storage()._cdata, _covers(t)) for t in _leaves(func, args, kwargs, Tensor, _is_written)
        ]
        covers = any(covered for _, covered in written) and len(written) == 1 and _is_filled(func)
        old = {address: self._current[address] for address, _ in written}
        needs = reads if covers else reads | set(old.values())
        # fake kernels refuse a generator of another device
        blind = {"generator": None} if "generator" in kwargs else {}
        with self.fake:
            result = func(*args, **kwargs | blind)
        # its weak references keep `module.half()` from swapping parameters
        self.fake.fake_tensor_converter.tensor_memo.clear()
        outputs = tree_leaves(result)
        fresh: dict[int, int] = {}
        for i, tensor in enumerate(outputs):
            if isinstance(tensor, Tensor) and _storage(tensor, func)._cdata not in self._current:
                fresh.setdefault(tensor.untyped_storage()._cdata, i)
        if not old and not fresh:
            return result
        writes = tuple((value, self._new_value(address)) for address, value in old.items())
        creates = tuple((i, self._track(outputs[i])) for i in fresh.values())
        op = Op(
            func,
            seen_args,
            seen_kwargs | blind,
            reads,
            needs,
            writes,
            creates,
            torch.get_default_dtype(),
            random,
        )
        if random:
            self._draw(op, kwargs.get("generator"))
        else:
            self.graph.ops.append(op)
        return result

    def _draw(self, op: Op, generator: torch.Generator | None) -> None:
        """Append a random row, and set the default generator to a mark; or a generator that the build made to
        its state after the draw."""
        row = len(self.graph.ops)
        self.graph.ops.append(op)
        if generator is None or _same(generator, torch.default_generator):
            op.start = self.position()
            mark = torch.Generator().manual_seed(_MARK + row).get_state()
            self._marks[mark.numpy().tobytes()] = row
            torch.set_rng_state(mark)
            return
        if generator.device.type != "cpu":
            raise ModelError(
                f"{op.func} draws from a generator on {generator.device} "
                "while the model is built; build it on the CPU"
            )
        op.private, op.start = True, generator.get_state()
        self.evaluator.run(row, full=False)
        generator.set_state(self.evaluator.state(row))

    def _constant(self, real: Tensor) -> Tensor:
        """Make a fake tensor for a real one that the build got from Python numbers, an array or a file."""
        _storage(real, "something outside")
        held = real.detach().resolve_conj().resolve_neg().clone()
        with self.fake:
            fake = torch.empty_strided(held.shape, held.stride(), dtype=held.dtype, device="cpu")
        view = self._track(fake)
        self.graph.ops.append(
            Op(held.clone, (), {}, frozenset(), frozenset(), (), ((0, view),), torch.get_default_dtype())
        )
        return fake

    def _as_fake(self, tensor: Tensor) -> Tensor:
        return tensor if isinstance(tensor, FakeTensor) else self._constant(tensor)

    def _track(self, tensor: Tensor) -> View:
        """Enter a new storage, whose first value is the tensor's."""
        storage = tensor.untyped_storage()
        self._storages[storage._cdata] = storage
        self._new_value(storage._cdata)
        return self.view(tensor)

    def _new_value(self, address: int) -> int:
        """Add the value that the next row gives to this storage."""
        if address in self._current:
            self._superseded.add(self._current[address])
        self._current[address] = self.graph.new_value(self._storages[address].nbytes())
        return self._current[address]


def _storage(tensor: Tensor, maker: object) -> UntypedStorage:
    """The tensor's storage. Raises ModelError for a tensor that cannot be recorded; `maker`: its operator."""
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        raise ModelError(
            f"{maker} makes a {tensor.layout} tensor on {tensor.device} "
            "while the model is built; only dense tensors on the CPU can be "
            "recorded: build it there, or build the model whole and pass the module"
        )
    return tensor.untyped_storage()


def _same(a: torch.Generator, b: torch.Generator) -> bool:
    return getattr(a, "_cdata", a) == getattr(b, "_cdata", b)  # operators are given a new wrapper each time


def _leaves(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], kind: type, chosen: Callable[[Any, Any], bool]
) -> list[Any]:
    """The leaves of type `kind` in the arguments for which `chosen(func, argument of the schema)` is true."""
    schema = func._schema.arguments
    named = {argument.name: argument for argument in schema}
    pairs = [*zip(schema, args, strict=False), *((named[name], value) for name, value in kwargs.items())]
    return [
        leaf
        for argument, value in pairs
        if chosen(func, argument)
        for leaf in tree_leaves(value)
        if isinstance(leaf, kind)
    ]


def _is_written(func: Any, argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _is_read(func: Any, argument: Any) -> bool:
    if _is_written(func, argument):
        return not (_is_filled(func) or argument.kwarg_only)  # a keyword that is written is an `out=`
    return func.overloadpacket not in _SHAPE_ONLY


def _is_filled(func: Any) -> bool:
    """Whether the numbers that `func` writes do not depend on those that were there."""
    return func.overloadpacket in _FILLS or any(
        a.kwarg_only and _is_written(func, a) for a in func._schema.arguments
    )


def _covers(tensor: Tensor) -> bool:
    """Whether `tensor` covers each byte of its storage once."""
    step = 1
    for stride, size in sorted(
        (st, si) for st, si in zip(tensor.stride(), tensor.shape, strict=True) if si != 1
    ):
        if stride != step:
            return False
        step *= size
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


class _Reads(TorchFunctionMode):
    """Computes the numbers for reads that are not operators: `.numpy()` and `numpy.asarray`. The array is a
    read-only copy."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (Tensor.numpy, Tensor.__array__) or not isinstance(args[0], FakeTensor):
            return func(*args, **(kwargs or {}))
        with _disable_current_modes():
            array = func(self._recorder.read(args[0]).clone(), *args[1:], **(kwargs or {}))
        array.flags.writeable = False
        return array


class Recording:
    """A module whose tensors are on the meta device, and the record by which they can be made.

    parameters, buffers: the module's own meta tensors, by first name, in the order of registration.
    aliases: for each tied parameter or buffer, the other names by the first.
    order: names in the order in which `replay` makes them, the same on every rank.
    """

    def __init__(
        self, module: nn.Module, seed: int, graph: Graph, views: dict[str, View], final: int | Tensor
    ) -> None:
        self.module = module
        self.parameters: dict[str, Tensor] = dict(module.named_parameters())
        self.buffers: dict[str, Tensor] = dict(module.named_buffers())
        self.aliases: dict[str, tuple[str, ...]] = {}
        first: dict[int, str] = {}
        for named in (module.named_parameters, module.named_buffers):
            for name, tensor in named(remove_duplicate=False):
                known = first.setdefault(id(tensor), name)
                if known != name:
                    self.aliases[known] = (*self.aliases.get(known, ()), name)
        self.order = sorted(views, key=lambda name: graph.producer[views[name].value])
        self._seed, self._graph, self._views, self._final = seed, graph, views, final

    def replay(self, sink: Sink, names: Collection[str] | None = None) -> None:
        """Make each parameter and buffer, or those whose first name is in `names`, and pass it to `sink(name,
        tensor)`, once, under its first name. For the others only the random draws are made, one at a time,
        because they advance the generator.

        The tensor is whole, on the CPU, without gradient. It is freed after the call unless the sink keeps
        it; until the replay ends, the sink must not write to it, as later tensors may be computed from it.
        Afterwards the generators are as `torch.manual_seed(seed); build()` leaves them; if the sink raises,
        they are not changed. May be called again."""
        graph = self._graph
        wanted = deque(name for name in self.order if names is None or name in names)
        undelivered = Counter(self._views[name].value for name in wanted)
        live, consumers = graph.live(undelivered)

        def pending(value: int) -> bool:
            return undelivered[value] > 0 or any(
                row not in evaluator.executed for row in consumers.get(value, ())
            )

        def deliver(name: str) -> None:
            view = self._views[name]
            tensor = evaluator.tensor(view)
            undelivered[view.value] -= 1
            evaluator.release(view.value)
            sink(name, tensor)

        evaluator = Evaluator(graph, pending)
        with torch.no_grad():
            for row, op in enumerate(graph.ops):
                if op.random and not op.private:
                    evaluator.run(row, full=row in live)
                while wanted and graph.producer[self._views[wanted[0]].value] == row:
                    deliver(wanted.popleft())
        torch.manual_seed(self._seed)  # also for the generators of other devices
        torch.set_rng_state(evaluator.state(self._final))


def record(build: Callable[[], nn.Module], seed: int) -> Recording:
    """Run `build` without memory for its tensors, and record how `torch.manual_seed(seed); build()` makes
    them.

    build: makes the module on the CPU. It runs once, without gradients, on fake tensors. Numbers that it
        reads (`.item()`, `if mask.any()`, `.numpy()`) are computed at once, with the random draws before
        them. Subclasses of nn.Parameter become plain parameters.
    seed: of the default generator. Generators that the build makes are recorded as well; those of Python and
        NumPy are not.

    Tensors that the module keeps outside its parameters and buffers are made at once. Generator states are
    restored. Raises ModelError for a build on meta tensors or another device or of sparse tensors, for
    in-place operators that cannot run on fake tensors, and for parameters that are kept outside the module as
    well; errors of `build` itself are passed on."""
    recorder = _Recorder()
    state = torch.get_rng_state()
    torch.default_generator.manual_seed(seed)
    try:
        with torch.no_grad(), warnings.catch_warnings(), _Reads(recorder), recorder:
            warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
            module = build()
        final = recorder.position()
    except Exception as error:
        if "FakeTensor" in str(error):
            raise ModelError(
                f"the model's building cannot be recorded; build it whole and pass the module ({error})"
            ) from error
        error.add_note(
            "raised while the model's building was recorded on fake "
            "tensors; if it builds otherwise, pass the built module"
        )
        raise
    finally:
        torch.set_rng_state(state)
    if not isinstance(module, nn.Module):
        raise ModelError(
            "the function given as the model returned "
            f"{type(module)}, not a torch.nn.Module; return the module"
        )
    views = {
        name: recorder.view(t)
        for named in (module.named_parameters, module.named_buffers)
        for name, t in named()
    }
    names = _put_on_meta(module, recorder)
    _make_others(recorder, names)
    return Recording(module, seed, recorder.graph, views, final)


def _put_on_meta(module: nn.Module, recorder: _Recorder) -> dict[int, str]:
    """Replace the module's parameters and buffers by meta tensors, with the same ties. Returns the first
    names of the old parameters, by id."""
    with recorder.fake:
        internal = vars(torch.empty(0)).keys() | {"_is_param"}
    old = {
        id(t): (name, t) for named in (module.named_buffers, module.named_parameters) for name, t in named()
    }
    new: dict[int, Tensor] = {}
    for key, (_, tensor) in old.items():
        meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        if isinstance(tensor, nn.Parameter):
            meta = nn.Parameter(meta, tensor.requires_grad)
        meta.__dict__.update({k: v for k, v in vars(tensor).items() if k not in internal})
        new[key] = meta
    for owner in list(module.modules()):
        for held in (owner._parameters, owner._buffers):
            for attribute, current in list(held.items()):
                if current is not None:
                    # not into `held`: recurrent modules follow assignments
                    setattr(owner, attribute, new[id(current)])
    return {key: name for key, (name, tensor) in old.items() if isinstance(tensor, nn.Parameter)}


def _make_others(recorder: _Recorder, names: dict[int, str]) -> None:
    """Replace the fake tensors that outlive the build (plain attributes, items of lists, variables of
    closures) by real ones."""

    def survivors() -> list[FakeTensor]:
        return [o for o in gc.get_objects() if type(o) is FakeTensor and o.fake_mode is recorder.fake]

    if not survivors():
        return
    gc.collect()
    for tensor in survivors():
        if id(tensor) in names:
            raise ModelError(
                f"parameter {names[id(tensor)]} is also kept outside the "
                "module's parameters (in a plain list, attribute or closure), "
                "where it cannot be followed: keep it in an nn.ParameterList "
                "or not at all, or build the model whole and pass the module"
            )
        real = recorder.read(tensor).requires_grad_(tensor.requires_grad)
        torch.utils.swap_tensors(tensor, real)
