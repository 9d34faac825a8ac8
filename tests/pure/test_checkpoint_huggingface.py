"""A directory is read as it was written, range by range; what is not as it was written is found."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
from collections.abc import Callable
from functools import reduce
from operator import xor
from pathlib import Path
from zlib import crc32

import pytest
import torch
from safetensors.torch import save_file

import models
from polyreme.checkpoint.formats.huggingface import Directory
from polyreme.checkpoint.manifest import File, Resume, write
from polyreme.checkpoint.safetensors import build, divide, file_names, index
from polyreme.checkpoint.sources import MASTER, MODEL, TensorInfo
from polyreme.errors import CheckpointError

Tensors = dict[str, torch.Tensor]


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def put(folder: Path, stem: str, tensors: Tensors, limit: int) -> None:
    """Files of `tensors`, with an index if there are several."""
    infos = {name: TensorInfo(tuple(t.shape), t.dtype) for name, t in tensors.items()}
    parts = divide(infos, limit)
    files = dict(zip(file_names(stem.rpartition("/")[2], len(parts)), parts, strict=True))
    within = (folder / stem).parent
    within.mkdir(parents=True, exist_ok=True)
    for file, names in files.items():
        head, header = build({name: infos[name] for name in names}, {"format": "pt"})
        data = bytearray(header.size)
        data[: len(head)] = head
        for name, entry in header.entries.items():
            data[entry.begin : entry.end] = raw(tensors[name])
        (within / file).write_bytes(data)
    if len(files) > 1:
        (folder / f"{stem}.safetensors.index.json").write_bytes(index(files, infos))


def listing(folder: Path) -> list[str]:
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())


def seal(folder: Path) -> None:
    """The resume.json of what is in the folder."""
    (folder / "resume.json").unlink(missing_ok=True)
    data = {name: (folder / name).read_bytes() for name in listing(folder)}
    write(folder, Resume({name: File(len(text), crc32(text)) for name, text in data.items()}, {"step": 7}))


def contents() -> dict[str, Tensors]:
    make = torch.Generator().manual_seed(0)
    shapes = {
        "embed.weight": (9, 4),
        "layers.0.w": (4, 4),
        "layers.1.w": (4, 4),
        "norm": (4,),
        "none": (0, 4),
        "scale": (),
    }
    master = {name: torch.randn(shape, generator=make) for name, shape in shapes.items()}
    states = {
        kind: {name: torch.randn(shape, generator=make) for name, shape in shapes.items()}
        for kind in ("exp_avg", "exp_avg_sq")
    }
    steps = {name: torch.tensor(7.0) for name in shapes}
    return {
        MODEL: {name: t.bfloat16() for name, t in master.items()},
        MASTER: master,
        **states,
        "step": steps,
    }


def make(folder: Path, limit: int = 10**9, ours: bool = True) -> dict[str, Tensors]:
    """A checkpoint: ours, or weights alone."""
    kinds = contents() if ours else {MODEL: contents()[MODEL]}
    for kind, tensors in kinds.items():
        put(folder, "model" if kind == MODEL else f"optimizer/{kind}", tensors, limit)
    (folder / "config.json").write_text('{"model_type": "tiny"}')
    (folder / "README.md").write_text("mine")
    if ours:
        seal(folder)
    return kinds


def check(folder: Path, parts: int = 1) -> Directory:
    """The directory, opened and compared."""
    opened = Directory(folder)
    shares = [opened.contributions(part, parts) for part in range(parts)]
    opened.compare([reduce(xor, each) for each in zip(*shares, strict=True)])
    return opened


def read_all(opened: Directory) -> dict[str, Tensors]:
    return {
        kind: {
            name: opened.read(kind, name, 0, math.prod(info.shape)).view(info.shape)
            for name, info in tensors.items()
        }
        for kind, tensors in opened.tensors.items()
    }


def bits(kinds: dict[str, Tensors]) -> dict[str, object]:
    return {
        kind: {name: (t.shape, t.dtype, raw(t)) for name, t in tensors.items()}
        for kind, tensors in kinds.items()
    }


def equal(a: dict[str, Tensors], b: dict[str, Tensors]) -> bool:
    return bits(a) == bits(b)


@pytest.mark.parametrize("limit", [10**9, 70])
@pytest.mark.parametrize("ours", [True, False])
def test_every_kind_is_read_from_one_file_and_from_several(limit: int, ours: bool, tmp_path: Path) -> None:
    kinds = make(tmp_path, limit, ours)
    opened = check(tmp_path, parts=3)
    assert equal(read_all(opened), kinds)
    assert (opened.resume is not None) == ours
    assert len(opened.headers) == len([name for name in listing(tmp_path) if name.endswith(".safetensors")])
    assert (len(opened.headers) > len(kinds)) == (limit == 70)


def test_any_range_is_read(tmp_path: Path) -> None:
    kinds = make(tmp_path)
    opened = Directory(str(tmp_path))
    for kind in (MODEL, MASTER):
        whole = kinds[kind]["embed.weight"].reshape(-1)
        for start in range(37):
            for stop in range(start, 37):
                assert torch.equal(opened.read(kind, "embed.weight", start, stop), whole[start:stop])
    for kind, name, start, stop in [
        (MODEL, "x", 0, 1),
        ("x", "norm", 0, 1),
        (MODEL, "norm", 0, 5),
        (MODEL, "norm", -1, 2),
        (MODEL, "norm", 3, 2),
    ]:
        with pytest.raises(CheckpointError, match=name):
            opened.read(kind, name, start, stop)


@pytest.mark.parametrize("parts", [1, 2, 3, 50])
def test_shares_of_any_number_make_the_checksums(
    parts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polyreme.checkpoint.formats.huggingface.CHUNK", 100)
    make(tmp_path, limit=70)
    check(tmp_path, parts)
    file = tmp_path / "optimizer/exp_avg-00001-of-00004.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(
        CheckpointError, match=r"optimizer/exp_avg-00001-of-00004\.safetensors \('embed\.weight'\)"
    ):
        check(tmp_path, parts)


def test_a_share_reads_its_own_bytes_alone(tmp_path: Path) -> None:
    make(tmp_path)
    opened = Directory(tmp_path)
    total = sum(file.size for file in opened._files.values())
    reads: list[int] = []
    contribution = opened._contribution
    opened._contribution = lambda name, start, stop, size: (
        reads.append(stop - start) or contribution(name, start, stop, size)
    )  # type: ignore[method-assign, func-returns-value]
    for part in range(4):
        reads.clear()
        opened.contributions(part, 4)
        assert abs(sum(reads) - total / 4) <= 1


def test_without_resume_json_there_is_nothing_to_compare(tmp_path: Path) -> None:
    make(tmp_path, ours=False)
    opened = Directory(tmp_path)
    assert opened.contributions(0, 2) == []
    opened.compare([])


def test_what_transformers_and_safetensors_write(tmp_path: Path) -> None:
    model = models.gpt2()
    for name, size in (("one", "1GB"), ("several", "10KB")):
        model.save_pretrained(tmp_path / name, max_shard_size=size)
        opened = Directory(tmp_path / name)
        whole = model.state_dict()
        assert set(whole) - set(opened.tensors[MODEL]) <= {"lm_head.weight"}
        assert all(torch.equal(t, whole[name]) for name, t in read_all(opened)[MODEL].items())
        assert (len(opened.headers) > 1) == (name == "several")
    (tmp_path / "plain").mkdir()
    save_file({"a": torch.ones(3, dtype=torch.bool)}, tmp_path / "plain/model.safetensors")
    assert read_all(Directory(tmp_path / "plain"))[MODEL]["a"].tolist() == [True] * 3


def test_a_folder_of_the_hugging_face_cache(tmp_path: Path) -> None:
    """Its files are links to blobs beside the snapshots; no other link may lead out."""
    snapshot, blobs = tmp_path / "models--a--b/snapshots/1234", tmp_path / "models--a--b/blobs"
    kinds = make(snapshot, ours=False)
    blobs.mkdir()
    for name in ("model.safetensors", "config.json"):
        (snapshot / name).rename(blobs / f"hash of {name}")
        (snapshot / name).symlink_to(f"../../blobs/hash of {name}")
    assert equal(read_all(Directory(snapshot)), kinds)
    (snapshot / "model.safetensors").unlink()
    (blobs / "hash of model.safetensors").rename(tmp_path / "elsewhere")
    (snapshot / "model.safetensors").symlink_to("../../../elsewhere")
    with pytest.raises(CheckpointError, match="leads out of the checkpoint"):
        Directory(snapshot)


Change = Callable[[Path], object]


def edit(file: str, change: Callable[[dict[str, str]], object]) -> Change:
    """A change of the index's weight_map."""

    def apply(folder: Path) -> None:
        tree = json.loads((folder / file).read_text())
        change(tree["weight_map"])
        (folder / file).write_text(json.dumps(tree))

    return apply


def outside(name: str) -> Change:
    def apply(folder: Path) -> None:
        (folder / name).rename(folder.parent / "elsewhere")
        (folder / name).symlink_to(folder.parent / "elsewhere")

    return apply


def loop(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("model.safetensors")


def pipe(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")


def with_file(name: str, text: str = "{}") -> Change:
    return lambda folder: (folder / name).write_text(text)


def without(name: str) -> Change:
    return lambda folder: (folder / name).unlink()


INDEX, PART = "model.safetensors.index.json", "model-00002-of-00003.safetensors"
FOREIGN: dict[str, tuple[bool, Change, str]] = {  # of a directory without resume.json: in several files?
    "no folder": (False, shutil.rmtree, "not a folder"),
    "no weights": (
        False,
        without("model.safetensors"),
        "no model.safetensors, nor the index of several: it has README.md",
    ),
    "a pickle": (
        False,
        lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
        "pytorch_model.bin.*not read.*save_pretrained",
    ),
    "a link out": (False, outside("model.safetensors"), "leads out of the checkpoint"),
    "a link to itself": (False, loop, "model.safetensors cannot be read"),
    "a pipe": (False, pipe, "not a file"),
    "a folder as a file": (True, lambda f: [without(PART)(f), (f / PART).mkdir()], f"{PART} is not a file"),
    "no index": (True, without(INDEX), "no model.safetensors"),
    "states without resume.json": (
        False,
        lambda f: [make(f), without("resume.json")(f)],
        "states and no resume.json",
    ),
    "a missing part": (True, without(PART), f"{PART} cannot be read"),
    "an index that is no JSON": (
        True,
        with_file(INDEX, "{"),
        "index.json is damaged: it holds no valid JSON",
    ),
    "an index without a map": (True, with_file(INDEX), "no weight_map"),
    "an index of nothing": (True, with_file(INDEX, '{"weight_map": {}}'), "or an empty one"),
    "a name upwards": (
        True,
        edit(INDEX, lambda m: m.update(norm="../x.safetensors")),
        "'norm' would be in '../x.safetensors'",
    ),
    "an absolute name": (
        True,
        edit(INDEX, lambda m: m.update(norm="/x.safetensors")),
        "'norm' would be in '/x.safetensors'",
    ),
    "a name of another folder": (
        True,
        edit(INDEX, lambda m: m.update(norm=f"sub/{PART}")),
        "'norm' would be in",
    ),
    "a pickle's name": (True, edit(INDEX, lambda m: m.update(norm="a.bin")), "'norm' would be in"),
    "a name of no kind": (True, edit(INDEX, lambda m: m.update(norm=3)), "'norm' would be in 3"),
    "a tensor elsewhere": (
        True,
        edit(INDEX, lambda m: m.update(norm=m["embed.weight"])),
        "'norm' would be in .*does not hold it",
    ),
    "a tensor nowhere": (
        True,
        edit(INDEX, lambda m: m.update(new=PART)),
        "'new' would be in .*does not hold it",
    ),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_what_is_wrong_with_any_directory(case: str, tmp_path: Path) -> None:
    several, change, what = FOREIGN[case]
    make(tmp_path / "step", 70 if several else 10**9, ours=False)
    change(tmp_path / "step")
    with pytest.raises(CheckpointError, match=what):
        Directory(tmp_path / "step")


OURS: dict[str, tuple[bool, Change, str]] = {
    "a missing file": (False, without("config.json"), "config.json cannot be read"),
    "a truncated file": (
        False,
        lambda f: os.truncate(f / "model.safetensors", 4100),
        "written with 4242 bytes and has 4100",
    ),
    "a grown file": (
        False,
        with_file("config.json", "{}" * 99),
        "config.json was written with 22 bytes and has 198",
    ),
    "an extra file": (False, with_file("tokenizer.json"), "'tokenizer.json' was not written with it"),
    "an extra state": (
        False,
        with_file("optimizer/x.safetensors"),
        "'optimizer/x.safetensors' was not written with it",
    ),
    "several": (
        True,
        lambda f: [without(PART)(f), with_file("x.json")(f)],
        f"{PART} cannot be read.*; 'x.json' was not",
    ),
    "the whole folder": (
        False,
        lambda f: shutil.rmtree(f / "optimizer"),
        "exp_avg.safetensors cannot be read.*step.safetensors cannot",
    ),
    "a resume.json that leads out": (False, outside("resume.json"), "leads out"),
    "a folder that is a link out": (False, outside("optimizer"), "leads out of the checkpoint"),
    "no index of a state": (
        True,
        lambda f: [without("optimizer/exp_avg.safetensors.index.json")(f), seal(f)],
        "no optimizer/exp_avg.s",
    ),
    "a tensor not in the index": (
        True,
        lambda f: [edit(INDEX, lambda m: m.pop("norm"))(f), seal(f)],
        "holds the tensor 'norm'",
    ),
}


@pytest.mark.parametrize("case", OURS)
def test_what_is_wrong_with_one_of_ours(case: str, tmp_path: Path) -> None:
    several, change, what = OURS[case]
    make(tmp_path / "step", 70 if several else 10**9)
    change(tmp_path / "step")
    with pytest.raises(CheckpointError, match=what):
        Directory(tmp_path / "step")


def test_files_of_other_kinds_may_be_added(tmp_path: Path) -> None:
    make(tmp_path)
    for name in ("NOTES.txt", "losses.svg", ".gitattributes"):
        (tmp_path / name).write_text("mine")
    check(tmp_path)


def test_a_file_that_ends_early_is_found_when_it_is_read(tmp_path: Path) -> None:
    make(tmp_path)
    opened = Directory(tmp_path)
    os.truncate(tmp_path / "optimizer/master.safetensors", 4100)
    with pytest.raises(CheckpointError, match=r"'embed\.weight'.*master\.safetensors is damaged: it ends"):
        opened.read(MASTER, "embed.weight", 0, 36)
    with pytest.raises(CheckpointError, match=r"master\.safetensors is damaged: it ends"):
        opened.contributions(0, 1)
    (tmp_path / "optimizer/master.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"'embed\.weight'.*master\.safetensors cannot be read"):
        opened.read(MASTER, "embed.weight", 0, 36)


def corrupt(folder: Path, random_: random.Random) -> str:
    """One change somewhere; says which."""
    kind = random_.choice(["flip", "flip", "zero", "truncate", "delete", "swap", "grow", "rename", "insert"])
    names = listing(folder)
    file = folder / random_.choice(names)
    data = bytearray(file.read_bytes())
    at = random_.randrange(len(data))
    if random_.random() < 0.5:  # where it hurts: beginnings and ends, not the padding
        at = random_.choice([*range(min(200, len(data))), *range(max(0, len(data) - 200), len(data))])
    if kind == "flip":
        data[at] ^= 1 << random_.randrange(8)
    elif kind == "zero":
        data[at : at + 16] = bytes(len(data[at : at + 16]))
    elif kind == "insert":
        data[at:at] = random_.randbytes(1)
    elif kind == "grow":
        data += random_.choice([b"\0", b" ", b"\n", b"}", random_.randbytes(4096)])
    elif kind == "truncate":
        del data[at:]
    file.write_bytes(data)
    if kind == "delete":
        file.unlink()
    elif kind == "rename":
        file.rename(
            file.with_name(
                random_.choice(
                    ["x.safetensors", "x.json", "model.safetensors", "resume.json", "x" + file.name]
                )
            )
        )
    elif kind == "swap":
        other = folder / random_.choice(names)
        other.rename(folder / "between")
        if file.exists():
            file.rename(other)
        (folder / "between").rename(file)
    return f"{kind} {file.name} at {at}"


@pytest.mark.parametrize("limit", [10**9, 70])
def test_random_corruptions_are_found_or_harmless(limit: int, tmp_path: Path) -> None:
    kinds = make(tmp_path / "original", limit)
    resume = Directory(tmp_path / "original").resume
    random_, found = random.Random(limit), 0
    for _ in range(300):
        shutil.copytree(tmp_path / "original", tmp_path / "step")
        what = corrupt(tmp_path / "step", random_)
        try:
            opened = check(tmp_path / "step")
            assert equal(read_all(opened), kinds), what
            assert opened.resume == resume, what
        except CheckpointError:
            found += 1
        shutil.rmtree(tmp_path / "step")
    assert 200 < found < 300
