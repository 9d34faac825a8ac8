"""Checkpoints of real DeepSpeed runs (tests/data/deepspeed/make.py) are read, to the bit, without
DeepSpeed."""

from __future__ import annotations

import os
import random
import shutil
import sys
import types
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from damage import damage
from polyreme.checkpoint.formats import torch_archive
from polyreme.checkpoint.formats.deepspeed import DeepSpeedCheckpoint
from polyreme.checkpoint.sources import MASTER, MODEL
from polyreme.errors import CheckpointError

DATA = Path(__file__).parent.parent / "data" / "deepspeed"
CASES = sorted(path.name for path in DATA.iterdir() if path.is_dir() and path.name.startswith("stage"))


def whole(source: DeepSpeedCheckpoint, kind: str, name: str) -> torch.Tensor:
    shape = source.tensors[kind][name].shape
    return source.read(kind, name, 0, prod(shape)).view(shape)


@pytest.mark.parametrize("case", CASES)
def test_reads_what_deepspeed_had(case: str) -> None:
    source = DeepSpeedCheckpoint(DATA / case)
    expected = load_file(DATA / f"{case}.safetensors")
    if "fp32" in case:  # the weights themselves are the masters
        assert MASTER not in source.tensors
        expected = {key: tensor for key, tensor in expected.items() if not key.startswith("master/")}
    for key, tensor in expected.items():
        kind, _, name = key.partition("/")
        assert source.tensors[kind][name] == (tuple(tensor.shape), tensor.dtype)
        assert torch.equal(whole(source, kind, name), tensor), key
    for name in source.tensors.get(MASTER, ()):
        assert torch.equal(whole(source, MASTER, name).bfloat16(), whole(source, MODEL, name))
    trained = {key.removeprefix("exp_avg/") for key in expected if key.startswith("exp_avg/")}
    for kind, places in source.tensors.items():
        same = {key.removeprefix(f"{kind}/") for key in expected if key.startswith(f"{kind}/")} or trained
        assert set(places) == same | {"head.weight"}, kind
        assert torch.equal(whole(source, kind, "head.weight"), whole(source, kind, "embed.weight"))
    assert set(source.tensors) == {MODEL, "exp_avg", "exp_avg_sq", "step"} | (
        {MASTER} if "bf16" in case else set()
    )
    assert all(
        whole(source, "step", name) == 3 and not source.tensors["step"][name].shape for name in trained
    )
    assert (source.zero_stage, source.mesh) == (int(case[5]), {"dp": 2})
    assert source.state["step"] == 3 and source.state["samples"] == 12 and source.state["lr"] == 0.0025
    assert source.scale == {}, "a run in fp16 would go on without its loss scale"


@pytest.mark.parametrize("case", CASES)
def test_reads_any_range(case: str) -> None:
    source, rng = DeepSpeedCheckpoint(DATA / case), random.Random(0)
    for kind, places in source.tensors.items():
        for name, info in places.items():
            flat = whole(source, kind, name).flatten()
            for _ in range(5):
                start, stop = sorted(rng.choices(range(flat.numel() + 1), k=2))
                assert torch.equal(source.read(kind, name, start, stop), flat[start:stop])
            assert source.read(kind, name, 0, 0).dtype == info.dtype
            # DeepSpeed saves its masters as parameters
            assert not source.read(kind, name, 0, 1).requires_grad
    with pytest.raises(CheckpointError, match="has 78 elements, not"):
        source.read(MODEL, "embed.weight", 0, 79)
    with pytest.raises(CheckpointError, match="no exp_avg of 'scale'"):
        source.read("exp_avg", "scale", 0, 1)
    assert "deepspeed" not in sys.modules


def copied(tmp_path: Path, case: str) -> Path:
    return Path(shutil.copytree(DATA / case, tmp_path / case))


def rewrite(file: Path, **changes: Any) -> None:
    """A file's object with some entries changed."""
    # not in place: the old file is still mapped
    torch.save(torch_archive.load(file, "deepspeed") | changes, file.with_suffix(".new"))
    file.with_suffix(".new").replace(file)


class Evil:
    """Runs a command when it is unpickled by whoever lets it."""

    def __reduce__(self) -> Any:
        return os.system, ("touch evil-was-here",)


def test_refuses_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = copied(tmp_path, "stage1-fp32-aligned")
    file = folder / "global_step3" / "mp_rank_00_model_states.pt"
    rewrite(file, note=Evil())
    with pytest.raises(
        CheckpointError, match=r"mp_rank_00_model_states.pt is refused, as it names posix.system"
    ):
        DeepSpeedCheckpoint(folder)
    before = set(torch.serialization.get_safe_globals())
    torch.serialization.add_safe_globals([os.system])  # even where the process allows it
    try:
        with pytest.raises(CheckpointError, match=r"posix.system"):
            DeepSpeedCheckpoint(folder)
        assert set(torch.serialization.get_safe_globals()) == before | {os.system}
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals([*before])
    assert not (tmp_path / "evil-was-here").exists()


def test_other_parallelism_is_refused(tmp_path: Path) -> None:
    folder = copied(tmp_path, "stage1-fp32-aligned")
    inner = folder / "global_step3"
    other = inner / "mp_rank_01_model_states.pt"
    shutil.copy(inner / "mp_rank_00_model_states.pt", other)
    with pytest.raises(
        CheckpointError, match=r"tensor, pipeline or expert parallelism \(mp_rank_01_model_states.pt\)"
    ):
        DeepSpeedCheckpoint(folder)
    other.unlink()
    rewrite(inner / "mp_rank_00_model_states.pt", mp_world_size=2)
    with pytest.raises(CheckpointError, match="mp_world_size = 2"):
        DeepSpeedCheckpoint(folder)


def test_missing_files_are_named(tmp_path: Path) -> None:
    folder = copied(tmp_path, "stage3-bf16")
    inner = folder / "global_step3"
    assert DeepSpeedCheckpoint(inner).tensors == DeepSpeedCheckpoint(folder).tensors
    (inner / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").rename(tmp_path / "away")
    with pytest.raises(
        CheckpointError,
        match="was written by 2 ranks at stage 3, and has the optimizer's files of 1 and the model's of 2",
    ):
        DeepSpeedCheckpoint(folder)
    (inner / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(CheckpointError, match="in which its weights are"):
        DeepSpeedCheckpoint(folder)
    (folder / "latest").write_text("../elsewhere")
    with pytest.raises(CheckpointError, match="nor a file `latest`"):
        DeepSpeedCheckpoint(folder)
    (folder / "latest").unlink()
    with (folder / "latest").open("wb") as sparse:
        sparse.write(b"global_step3")
        sparse.truncate(1 << 40)  # nobody has the memory to read it
    with pytest.raises(CheckpointError, match=r"latest names no folder, but begins with 'global_step3"):
        DeepSpeedCheckpoint(folder)
    plain = copied(tmp_path, "stage1-bf16")  # the model alone can still be read
    for file in plain.glob("*/*optim_states.pt"):
        file.unlink()
    assert set(DeepSpeedCheckpoint(plain).tensors) == {MODEL}


def check(path: Path, parts: int = 3) -> None:
    """All that can be known of a checkpoint's integrity, in shares."""
    shares = [DeepSpeedCheckpoint(path).contributions(part, parts) for part in range(parts)]
    combined = [0] * len(shares[0])
    for share in shares:
        combined = [a ^ b for a, b in zip(combined, share, strict=True)]
    DeepSpeedCheckpoint(path).compare(combined)


@pytest.mark.parametrize("case", ["stage2-bf16-round-robin", "stage3-fp32"])
def test_corruption_is_found_or_harmless(tmp_path: Path, case: str) -> None:
    check(DATA / case)
    good = DeepSpeedCheckpoint(DATA / case)
    content = {
        (kind, name): whole(good, kind, name) for kind, places in good.tensors.items() for name in places
    }
    rng, found = random.Random(1), 0
    for trial in range(40):
        folder = Path(shutil.copytree(DATA / case, tmp_path / str(trial)))
        file = rng.choice(sorted(folder.glob("*/*.pt")))
        damage(file, rng, truncate=trial % 4 == 0)
        try:
            check(folder)
            source = DeepSpeedCheckpoint(folder)
            assert {
                (kind, name) for kind, places in source.tensors.items() for name in places
            } == content.keys()
            assert all(torch.equal(whole(source, *key), tensor) for key, tensor in content.items())
        except CheckpointError:
            found += 1
    assert found > 20


class Odd:
    pass


def test_client_state_that_is_no_plain_value_is_refused(tmp_path: Path) -> None:
    shutil.copytree(DATA / "stage1-bf16", tmp_path / "run")
    file = tmp_path / "run" / "global_step3" / "mp_rank_00_model_states.pt"
    states = torch_archive.load(file, "deepspeed")
    states = {**states, "module": {name: tensor.clone() for name, tensor in states["module"].items()}}
    Odd.__module__, Odd.__qualname__ = "deepspeed.somewhere", "Odd"
    deepspeed = types.ModuleType("deepspeed.somewhere")
    deepspeed.Odd = Odd  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "deepspeed", types.ModuleType("deepspeed"))
        patch.setitem(sys.modules, "deepspeed.somewhere", deepspeed)
        torch.save({**states, "note": [1, {"odd": Odd()}]}, file)
    source = DeepSpeedCheckpoint(tmp_path / "run")  # whose tensors are read
    with pytest.raises(CheckpointError, match=r"client_state\['note'\]\[1\]\['odd'\] is a .*Odd"):
        _ = source.extra
