"""Activation offload: inputs of blocks, in host memory or in files, from the forward to the recomputation in
backward.

Invariants: a storage moves out once, however many calls share it, comes back with its strides and offsets,
and is really freed on the device in between. The inputs of the last call of a forward stay on the device
until another forward begins, as its backward may come first. Calls of one forward are read ahead in reverse
order. Space is taken in steps, reused, and freed with the graph that it belongs to. One thread of the rank at
a time uses an ActivationOffload. No communication."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from polyreme.errors import ModelError
from polyreme.offload.copy_stream import copy_stream_to
from polyreme.offload.file import FileStore
from polyreme.offload.host import HostStore
from polyreme.offload.planned import PlannedStore
from polyreme.offload.store import Opened, Store, Traffic

AHEAD = 2
"""Calls read ahead of the one in backward."""
THREADS = 4


class ActivationOffload:
    """Keeps tensors of `device` in host memory, or in nameless files in `folder`, which is made if need be.

    Raises TierError where the folder cannot be used, and later where there is too little room or a transfer
    fails."""

    def __init__(self, device: torch.device, folder: Path | None = None) -> None:
        self.tier: Literal["host", "files"] = "host" if folder is None else "files"
        self.marker = torch.empty(0, device=device)
        """An empty tensor that shows the device of the tensors that are kept."""
        self._device = device
        self._stays: set[int] = set()  # ids of storages that stay
        self._copy_stream = copy_stream_to(device)
        self.store: Store = HostStore(device, self._copy_stream, "activations")
        if device.type == "meta":
            self.store = PlannedStore(folder is None)
        elif folder is not None:
            pin = device.type == "cuda"
            self.store = FileStore(
                [folder], 0, None, buffers=0, threads=THREADS, copy_stream=self._copy_stream, pin=pin
            )
        self.store.commit()
        # by the storage's id
        self._known: weakref.WeakValueDictionary[int, _StoredStorage] = weakref.WeakValueDictionary()
        self._on_device: list[weakref.ref[BlockCall]] = []  # calls with storages still on the device
        self._ends: dict[tuple[int, int], weakref.ref[BlockCall]] = {}  # the last call of each forward
        self._forward: tuple[int, int] = (0, 0)
        self._coming: tuple[int, int] | None = None
        self._before: weakref.ref[BlockCall] | None = None  # the call before this one, in the same forward

    def close(self) -> None:
        """End the threads, after their last transfers, and delete the files. No backward of an earlier
        forward may come."""
        self.store.close()

    @property
    def traffic(self) -> Traffic:
        """Bytes to and from host memory or files, after all transfers, and the seconds that this rank waited
        for them (its CPU, not its GPU, for host memory)."""
        self.store.settle()
        return self.store.traffic

    @property
    def memory(self) -> int:
        """Bytes of host memory that it takes: for activations there, or for buffers of the files."""
        return self.store.buffers

    @property
    def disk(self) -> int:
        """Bytes that its files take."""
        return 0 if self.store.in_memory else self.store.taken

    def leave(self, tensors: Iterable[Tensor]) -> None:
        """Never move these tensors, such as parameters and buffers. Replaces the tensors of an earlier
        call."""
        self._stays = {tensor.untyped_storage()._cdata for tensor in tensors}

    def at(self, stage: int, microbatch: int, coming: tuple[int, int] | None = None) -> None:
        """Set the (stage, micro-batch) of the coming forward or backward, and of the backward after it."""
        self._forward, self._coming, self._before = (stage, microbatch), coming, None
        self._copy_stream.settle()
        for key in (self._forward, coming):
            if (end := self._end(key)) is not None:
                self._read_ahead(end)
                self._return_ahead(end)

    def keep(self, value: Any) -> BlockCall:
        """Keep the tensors in nested tuples, lists and dictionaries, and move out those that were kept
        before."""
        self._copy_stream.settle()
        leaves, form = pytree.tree_flatten(value)
        views: dict[int, _View] = {}
        for leaf in leaves:
            if id(leaf) not in views and self._moves(leaf):
                views[id(leaf)] = _View(self._stored_of(leaf), leaf)
        call = BlockCall(self, [views.get(id(leaf), leaf) for leaf in leaves], form, self._before)
        for stored in call.storages:
            stored.due += 1
        self._let_go([call, self._end(self._coming) if self._coming != self._forward else None])
        self._before = self._ends[self._forward] = weakref.ref(call)
        self._on_device.append(self._before)
        return call

    def where(self, storage: int) -> tuple[bool, bool]:
        """Return whether the storage with that `_cdata` is on the device, and whether it is in host memory or
        a file."""
        stored = self._known.get(storage)
        return (True, False) if stored is None else (stored.bytes is not None, stored.extent is not None)

    # ---- out

    def _moves(self, leaf: object) -> bool:
        return (
            type(leaf) is Tensor and leaf.device.type == self._device.type and leaf.layout == torch.strided
            and not leaf.is_conj() and not leaf.is_neg()
            and leaf.untyped_storage().nbytes() > 0 and leaf.untyped_storage()._cdata not in self._stays
        )  # fmt: skip

    def _stored_of(self, tensor: Tensor) -> _StoredStorage:
        storage = tensor.untyped_storage()
        stored = self._known.get(storage._cdata)
        if stored is None or stored.version != tensor._version:
            stored = _StoredStorage(storage.nbytes(), tensor._version, StorageWeakRef(storage), self.store)
            self._known[storage._cdata] = stored
        stored.source, stored.bytes = tensor.detach(), bytes_of(storage)
        return stored

    def _let_go(self, staying: Sequence[BlockCall | None]) -> None:
        """Move out the storages of kept calls, but for those that the calls in `staying` share."""
        stay = {stored for call in staying if call is not None for stored in call.storages}
        for call in [call for ref in self._on_device if (call := ref()) is not None and call not in staying]:
            for stored in call.storages:
                if stored not in stay and stored.source is not None:
                    self._move_out(stored)
        self._on_device = [ref for ref in self._on_device if (call := ref()) is not None and call in staying]

    def _move_out(self, stored: _StoredStorage) -> None:
        stored.check()
        if stored.extent is None and stored.bytes is not None:
            stored.extent = self.store.reserve(stored.nbytes)
            with self.store.traffic.waiting():
                self.store.put(stored.extent, stored.bytes)
        stored.source = stored.bytes = None

    # ---- back

    def _come_back(self, call: BlockCall) -> list[Any]:
        """Bring the inputs of `call` back to the device, and return them."""
        self._copy_stream.settle()
        self._read_ahead(call)
        for stored in call.storages:
            stored.check()
            self._return(stored)
            self._copy_stream.wait(stored.arrived)
        self._return_ahead(call.before())
        tensors = {
            view: view.of(stored.bytes) for view in call.views if (stored := view.stored).bytes is not None
        }
        for stored in call.storages:
            stored.due -= 1
            if stored.due <= 0 and stored.source is None:
                stored.bytes = None
        return [tensors[leaf] if isinstance(leaf, _View) else leaf for leaf in call.leaves]

    def _read_ahead(self, call: BlockCall) -> None:
        """Begin to read the storages of `call` and of the calls before it from files."""
        for each, _ in zip(call.backwards(), range(1 + AHEAD), strict=False):
            for stored in each.storages:
                if stored.bytes is None and stored.opened is None:
                    assert stored.extent is not None
                    stored.opened = self.store.open(stored.extent)

    def _return_ahead(self, call: BlockCall | None) -> None:
        """Begin to copy the storages of `call` from host memory to a GPU. On a CPU an early copy would be of
        no use."""
        for stored in call.storages if call is not None and self._device.type == "cuda" else ():
            if stored.opened is not None and stored.opened.is_near():
                self._return(stored)

    def _return(self, stored: _StoredStorage) -> None:
        """Begin to copy the storage to the device, once it is in host memory."""
        if stored.bytes is not None:
            return
        assert stored.opened is not None
        left = stored.opened.arriving()
        with self.store.traffic.waiting():
            memory = stored.opened.memory[: stored.nbytes]
            stored.bytes, stored.arrived = self._copy_stream.back(memory, left)
        stored.opened.close(stored.arrived)
        stored.opened = None

    def _end(self, key: tuple[int, int] | None) -> BlockCall | None:
        ref = self._ends.get(key) if key is not None else None
        return ref() if ref is not None else None


class BlockCall:
    """The inputs of one call of a block, kept while this object lives."""

    def __init__(
        self,
        offload: ActivationOffload,
        leaves: Sequence[Any],
        form: Any,
        before: weakref.ref[BlockCall] | None,
    ) -> None:
        self.leaves, self._form, self._offload, self._before = leaves, form, offload, before
        self.views = {leaf for leaf in leaves if isinstance(leaf, _View)}
        self.storages = {leaf.stored: None for leaf in leaves if isinstance(leaf, _View)}.keys()

    def back(self) -> Any:
        """Return the value that was kept, in tensors that require grad where those did, without their
        history."""
        return pytree.tree_unflatten(self._offload._come_back(self), self._form)

    def before(self) -> BlockCall | None:
        """Return the call before this one, in the same forward, if it is still kept."""
        return self._before() if self._before is not None else None

    def backwards(self) -> Iterator[BlockCall]:
        """Yield this call and those before it."""
        call: BlockCall | None = self
        while call is not None:
            yield call
            call = call.before()


@dataclass(eq=False)
class _StoredStorage:
    """The bytes of one storage."""

    nbytes: int
    version: int
    storage: StorageWeakRef  # kept, so that no other storage gets its address
    store: Store
    # shares the kept storage and its version, until the storage has left the device
    source: Tensor | None = None
    bytes: Tensor | None = None  # all of its bytes on the device: the source's or a copy
    due: int = 0  # calls that have not come back for it
    arrived: Any = None  # the event for the end of the copy to the device
    extent: int | None = None  # its number in the store, once moved out
    opened: Opened | None = None  # open while it comes back

    def check(self) -> None:
        """Raise ModelError if the storage was changed since it was kept."""
        if self.source is not None and self.source._version != self.version:
            raise ModelError(
                f"a tensor of shape {tuple(self.source.shape)} that a block "
                "was given was changed in place before the block's backward, "
                "which recomputes the block: have the model make "
                'a new one, or set memory.activations = "keep"'
            )

    def __del__(self) -> None:
        if self.extent is not None:
            self.store.release(self.extent)


class _View:
    """A tensor as a view of its storage: offset, shape and strides."""

    def __init__(self, stored: _StoredStorage, tensor: Tensor) -> None:
        self.stored, self._dtype, self._requires_grad = stored, tensor.dtype, tensor.requires_grad
        self._geometry = tensor.storage_offset(), tensor.shape, tensor.stride()

    def of(self, whole: Tensor) -> Tensor:
        tensor = torch.empty(0, dtype=self._dtype, device=whole.device).set_(
            whole.untyped_storage(), *self._geometry
        )
        return tensor.requires_grad_(self._requires_grad)


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """Return all of a storage, as a flat tensor of uint8."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
