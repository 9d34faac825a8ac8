"""Directories of torch.distributed.checkpoint are read and written as torch itself does, and run no code."""

from __future__ import annotations

import itertools
import os
import pickle
import random
import re
import shutil
import warnings
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from damage import damage
from polyreme.checkpoint.formats.dcp import DCPCheckpoint, _boxes, write_dcp
from polyreme.checkpoint.formats.deepspeed import DeepSpeedCheckpoint
from polyreme.checkpoint.listing import listing
from polyreme.checkpoint.sources import MODEL
from polyreme.errors import CheckpointError


def save(state: dict[str, Any], path: Path, **options: Any) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=path, no_dist=True, **options)
    return path


def whole(source: DCPCheckpoint, kind: str, name: str) -> Tensor:
    shape = source.tensors[kind][name].shape
    return source.read(kind, name, 0, prod(shape)).view(shape)


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(torch.bfloat16)
    model.register_buffer("count", torch.arange(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    model(torch.randn(2, 5, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    return model, optimizer


def forms() -> dict[str, Any]:
    """What people save, by form: the same model and optimizer in each."""
    model, optimizer = trained()
    weights, states = get_state_dict(model, optimizer)
    _, flat = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    return {
        "model and optim": {"model": weights, "optim": states, "step": 3},
        "flattened": {"model": weights, "optimizer": flat},
        "in an object": {"app": {"model": weights, "optim": states}},
        "plain names": {**weights, "optimizer": flat, "loader": {"position": torch.tensor(3)}},
    }


@pytest.mark.parametrize("form", ["model and optim", "flattened", "in an object", "plain names"])
def test_forms(tmp_path: Path, form: str) -> None:
    model, optimizer = trained()
    source = DCPCheckpoint(save(forms()[form], tmp_path / "saved"))
    assert set(source.tensors) == {MODEL, "exp_avg", "exp_avg_sq", "step"}
    expected = model.state_dict()
    assert set(source.tensors[MODEL]) == set(expected)
    for name, tensor in expected.items():
        assert source.tensors[MODEL][name] == (tuple(tensor.shape), tensor.dtype)
        assert torch.equal(whole(source, MODEL, name), tensor)
    for name, parameter in model.named_parameters():
        for kind, tensor in optimizer.state[parameter].items():
            assert torch.equal(whole(source, kind, name), tensor)
    assert source.state["lr"] == 0.25 and source.ranks == 1
    assert source.others == (["loader.position"] if form == "plain names" else [])
    assert source.state.get("step") == (3 if form == "model and optim" else None)
    with pytest.raises(CheckpointError, match="no exp_avg of 'count'"):
        source.read("exp_avg", "count", 0, 1)
    with pytest.raises(CheckpointError, match="has 4 elements, not"):
        source.read(MODEL, "count", 2, 5)


def test_names_that_begin_with_model(tmp_path: Path) -> None:
    weights = {"model.a": torch.ones(2), "head": torch.zeros(3)}
    assert set(DCPCheckpoint(save(weights, tmp_path / "plain")).tensors[MODEL]) == set(weights)
    assert set(DCPCheckpoint(save({"model": weights}, tmp_path / "nested")).tensors[MODEL]) == set(weights)


class Cut(dcp.DefaultSavePlanner):
    """Saves every tensor in the boxes of a random grid, as many ranks would."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.random = random.Random(seed)

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        items = []
        for item in plan.items:
            tensor = self.state_dict[item.index.fqn]
            for box in self.grid(tuple(tensor.shape)):
                offsets, sizes = torch.Size([a for a, _ in box]), torch.Size([b - a for a, b in box])
                data = TensorWriteData(
                    ChunkStorageMetadata(offsets, sizes),
                    TensorProperties.create_from_tensor(tensor),
                    tensor.size(),
                )
                items.append(
                    WriteItem(MetadataIndex(item.index.fqn, offsets), WriteItemType.SHARD, tensor_data=data)
                )
        self.random.shuffle(items)
        return SavePlan(items, planner_data=plan.planner_data)

    def grid(self, shape: tuple[int, ...]) -> list[Any]:
        edges = [
            sorted({0, size, *self.random.choices(range(size + 1), k=2)}) if size else [0, 0]
            for size in shape
        ]
        return list(itertools.product(*(itertools.pairwise(each) for each in edges)))

    def resolve_data(self, item: WriteItem) -> Any:
        assert item.tensor_data is not None
        chunk, tensor = item.tensor_data.chunk, self.state_dict[item.index.fqn]
        for dim, (offset, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
            tensor = tensor.narrow(dim, offset, size)
        return tensor


@pytest.mark.parametrize("seed", range(4))
def test_any_chunks_any_range(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    shapes = [(), (1,), (17,), (5, 7), (7, 1, 3), (3, 4, 5), (2, 3, 2, 5)]
    dtypes = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8]
    tensors = {str(shape): torch.randint(0, 100, shape).to(rng.choice(dtypes)) for shape in shapes}
    tensors["turned"] = torch.randn(6, 5).t()
    tensors["empty"] = torch.empty(0, 3)
    path = save({"model": tensors}, tmp_path / "saved", planner=Cut(seed))
    source = DCPCheckpoint(path)
    for name, tensor in tensors.items():
        assert torch.equal(whole(source, MODEL, name), tensor)
        for _ in range(10):
            start, stop = sorted(rng.choices(range(tensor.numel() + 1), k=2))
            assert torch.equal(source.read(MODEL, name, start, stop), tensor.flatten()[start:stop])


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_boxes_are_the_range(shape: list[int], data: st.DataObject) -> None:
    numbers = torch.arange(prod(shape)).view(shape)
    start = data.draw(st.integers(0, numbers.numel()))
    stop = data.draw(st.integers(start, numbers.numel()))
    found, boxes = [], list(_boxes(tuple(shape), start, stop))
    for at, box in boxes:
        assert at == sum(map(len, found))
        found.append(
            numbers[tuple(slice(a, a + n) for a, n in zip(box.offsets, box.sizes, strict=True))].flatten()
        )
    assert torch.equal(torch.cat([torch.empty(0, dtype=torch.int64), *found]), torch.arange(start, stop))
    assert len(boxes) <= 2 * len(shape) - 1


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch evil-was-here",)


def test_refuses_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = save({"model": {"a": torch.ones(3)}}, tmp_path / "saved")
    pickled = (path / ".metadata").read_bytes()
    metadata = pickle.loads(pickled)
    for where in ("planner_data", "version"):
        bad = pickle.loads(pickled)
        setattr(bad, where, Evil())
        (path / ".metadata").write_bytes(pickle.dumps(bad))
        with pytest.raises(CheckpointError, match=r"\.metadata is refused, as it names posix\.system"):
            DCPCheckpoint(path)
    for stream in (
        b"cbuiltins\neval\n.",
        b"ctorch\nload\n.",
        b"cpathlib\nPath\n.",
        b"cpolyreme.train\nrun\n.",
    ):
        (path / ".metadata").write_bytes(stream)
        with pytest.raises(CheckpointError, match="is refused, as it names"):
            DCPCheckpoint(path)
    # a stand-in's own class is not changed for the next file
    (path / ".metadata").write_bytes(
        b"ctorch.distributed.checkpoint.metadata\nMetadata\n(N(dVstate_dict_metadata\n(dstb."
    )
    with pytest.raises(CheckpointError):
        DCPCheckpoint(path)
    (path / ".metadata").write_bytes(pickled)
    DCPCheckpoint(path).read(MODEL, "a", 0, 3)
    data = path / "__0_0.distcp"
    evil = tmp_path / "evil.pt"
    torch.save(Evil(), evil)
    data.write_bytes(evil.read_bytes().ljust(data.stat().st_size))
    next(iter(metadata.storage_data.values())).length = evil.stat().st_size
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp is refused, as it names posix\.system"):
        DCPCheckpoint(path).read(MODEL, "a", 0, 3)
    assert not (tmp_path / "evil-was-here").exists()


@pytest.mark.parametrize(("change", "message"), [
    (lambda info, _: setattr(info, "relative_path", "../away.distcp"), "is not the name of a "
                                                                       "file within the folder"),
    (lambda info, _: setattr(info, "relative_path", "/etc/passwd"), "is not the name of a "
                                                                    "file within the folder"),
    (lambda info, _: setattr(info, "relative_path", "gone.distcp"), "gone.distcp cannot "
                                                                    "be read: No such file"),
    (lambda info, _: setattr(info, "length", 1 << 40), "and should have"),
    (lambda info, _: setattr(info, "offset", -1), "are not sizes"),
    (lambda info, _: setattr(info, "transform_descriptors", ["zstd"]), "is transformed by"),
    (lambda _, item: item.chunks.append(item.chunks[0]), "leave gaps, or overlap"),
    (lambda _, item: setattr(item, "size", torch.Size([4])), "leave gaps, or overlap"),
    (lambda _, item: setattr(item, "size", torch.Size([2**25, 2**25])), "leave gaps, or overlap"),
    (lambda _, item: setattr(item, "chunks", None), "is not as DCP writes it"),
    (lambda _, item: setattr(item.properties, "dtype", torch.int32), "are not the part of "
                                                                     "'model.a' that should be there"),
])  # fmt: skip
def test_lies_are_found(tmp_path: Path, change: Any, message: str) -> None:
    path = save({"model": {"a": torch.ones(3)}}, tmp_path / "saved")
    metadata = pickle.loads((path / ".metadata").read_bytes())
    change(next(iter(metadata.storage_data.values())), metadata.state_dict_metadata["model.a"])
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=re.escape(message)):
        DCPCheckpoint(path).read(MODEL, "a", 0, 3)


def test_numbers_that_no_file_has_are_not_shown(tmp_path: Path) -> None:
    path = save({"model": {"a": torch.ones(3)}}, tmp_path / "saved")
    metadata = pickle.loads((path / ".metadata").read_bytes())
    metadata.state_dict_metadata["model.a"].size = torch.Size([2**50])
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"the parts of 'model\.a' leave gaps"):
        listing(path)  # what `polyreme inspect` shows


def check(path: Path, parts: int = 3) -> None:
    shares = [DCPCheckpoint(path).contributions(part, parts) for part in range(parts)]
    combined = shares[0]
    for share in shares[1:]:
        combined = [a ^ b for a, b in zip(combined, share, strict=True)]
    DCPCheckpoint(path).compare(combined)


def test_corruption_is_found_or_harmless(tmp_path: Path) -> None:
    model = {"a": torch.randn(31, 5), "b": torch.randn(9, 4, dtype=torch.bfloat16)}
    good = save(
        {"model": model, "optim": {"state": {"a": {"step": torch.tensor(3.0)}}}},
        tmp_path / "good",
        planner=Cut(0),
    )
    check(good)
    rng, found = random.Random(1), 0
    for trial in range(60):
        path = Path(shutil.copytree(good, tmp_path / str(trial)))
        file = path / rng.choice([".metadata", "__0_0.distcp"])
        damage(file, rng, truncate=trial % 4 == 0)
        try:
            check(path)
            source = DCPCheckpoint(path)
            assert all(
                torch.equal(whole(source, MODEL, name), tensor)
                for name, tensor in model.items()
                if name in source.tensors[MODEL]
            )
            found += set(source.tensors[MODEL]) != set(model)  # the loader misses them
        except CheckpointError:
            found += 1
    assert found > 30


DEEPSPEED = Path(__file__).parent.parent / "data" / "deepspeed" / "stage3-bf16"


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    source = DeepSpeedCheckpoint(DEEPSPEED)
    written = DCPCheckpoint(write_dcp(source, tmp_path / "written"))
    assert set(written.tensors) == set(source.tensors) - {"master"}
    for kind, infos in written.tensors.items():
        assert set(infos) == set(source.tensors[kind])
        for name in infos:
            of = "master" if kind == MODEL and name in source.tensors["master"] else kind
            assert torch.equal(whole(written, kind, name), whole(source, of, name))  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="is not empty"):
        write_dcp(source, tmp_path / "written")


def test_torch_loads_what_is_written(tmp_path: Path) -> None:
    model, optimizer = trained()
    names = [name for name, _ in model.named_parameters()]
    source = DCPCheckpoint(save(forms()["model and optim"], tmp_path / "torch"))
    group = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    path = write_dcp(source, tmp_path / "ours", [{**group, "lr": 0.5, "params": names}])

    other = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(torch.bfloat16)
    other.register_buffer("count", torch.zeros(4, dtype=torch.int64))
    theirs = torch.optim.AdamW(other.parameters())
    weights, states = get_state_dict(other, theirs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load({"model": weights, "optim": states}, checkpoint_id=path)
    set_state_dict(other, theirs, model_state_dict=weights, optim_state_dict=states)
    for (name, tensor), found in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(tensor, found), name
    for parameter, found in zip(model.parameters(), other.parameters(), strict=True):
        assert all(
            torch.equal(tensor, theirs.state[found][kind])
            for kind, tensor in optimizer.state[parameter].items()
        )
    assert theirs.param_groups[0]["lr"] == 0.5
