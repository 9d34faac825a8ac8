"""The header of a safetensors file: what others write is read, what we write others read, and nothing wrong
is believed."""

from __future__ import annotations

import json
import random
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

import models
from polyreme.checkpoint.safetensors import (
    ALIGN,
    DTYPES,
    Entry,
    build,
    divide,
    file_names,
    index,
    nbytes,
    parse,
)
from polyreme.checkpoint.sources import TensorInfo
from polyreme.errors import CheckpointError

INFOS = st.builds(
    TensorInfo, st.lists(st.integers(0, 5), max_size=3).map(tuple), st.sampled_from(list(DTYPES.values()))
)
TENSORS = st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=8), INFOS, max_size=6)


def random_tensor(info: TensorInfo) -> torch.Tensor:
    limit = 2 if info.dtype == torch.bool else 256
    return torch.randint(0, limit, (nbytes(info),), dtype=torch.uint8).view(info.dtype).view(info.shape)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and raw(a) == raw(b)


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def write(file: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> None:
    head, header = build({name: TensorInfo(tuple(t.shape), t.dtype) for name, t in tensors.items()}, metadata)
    data = bytearray(header.size)
    data[: len(head)] = head
    for name, entry in header.entries.items():
        data[entry.begin : entry.end] = raw(tensors[name])
    file.write_bytes(data)


@given(TENSORS, st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=2))
def test_what_is_built_is_parsed(tensors: dict[str, TensorInfo], metadata: dict[str, str]) -> None:
    head, header = build(tensors, metadata)
    with NamedTemporaryFile() as file:
        file.write(head)
        file.truncate(header.size)
        file.flush()
        parsed = parse(Path(file.name))
    assert parsed == header and list(parsed.entries) == list(header.entries)
    assert len(head) == header.data_start and len(head) % ALIGN == 0
    assert {name: entry.info for name, entry in header.entries.items()} == tensors
    assert header.metadata == metadata
    assert header.size == len(head) + sum(map(nbytes, tensors.values()))
    assert all(entry.begin % entry.info.dtype.itemsize == 0 for entry in header.entries.values())


def test_tensors_of_one_width_are_in_the_order_given() -> None:
    tensors = {name: TensorInfo((3,), torch.float32) for name in "zay"}
    assert list(build(tensors)[1].entries) == ["z", "a", "y"]


def test_safetensors_reads_what_we_write_in_every_dtype_and_we_what_it_writes(tmp_path: Path) -> None:
    shapes = [(3,), (2, 3), (), (0,), (5, 0, 2)]
    tensors = {
        f"{code} {shape}": random_tensor(TensorInfo(shape, dtype))
        for code, dtype in DTYPES.items()
        for shape in shapes
    }
    write(tmp_path / "ours", tensors, {"format": "pt"})
    with safe_open(tmp_path / "ours", "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
        assert set(opened.keys()) == set(tensors)
        assert all(same(opened.get_tensor(name), tensor) for name, tensor in tensors.items())
    save_file(tensors, tmp_path / "theirs", {"format": "pt"})
    data = (tmp_path / "theirs").read_bytes()
    for file in (tmp_path / "ours", tmp_path / "theirs"):
        header, data = parse(file), file.read_bytes()
        assert header.metadata == {"format": "pt"}
        assert set(header.entries) == set(tensors)
        for name, entry in header.entries.items():
            assert (entry.info.shape, entry.info.dtype) == (tensors[name].shape, tensors[name].dtype)
            assert data[entry.begin : entry.end] == raw(tensors[name])


def test_transformers_opens_what_we_write_in_one_file_and_in_several(tmp_path: Path) -> None:
    model = models.llama()
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    infos = {name: TensorInfo(tuple(t.shape), t.dtype) for name, t in weights.items()}
    assert {
        name: entry.info for name, entry in parse(tmp_path / "model.safetensors").entries.items()
    } == infos
    for limit in (10**9, sum(map(nbytes, infos.values())) // 3):
        (tmp_path / "model.safetensors").unlink(missing_ok=True)
        parts = divide(infos, limit)
        files = dict(zip(file_names("model", len(parts)), parts, strict=True))
        for file, names in files.items():
            write(tmp_path / file, {name: weights[name] for name in names}, {"format": "pt"})
        if len(files) > 1:
            (tmp_path / "model.safetensors.index.json").write_bytes(index(files, infos))
        loaded, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
        assert not report["missing_keys"] and not report["unexpected_keys"]
        assert all(
            torch.equal(tensor, weights[name])
            for name, tensor in loaded.state_dict().items()
            if name in weights
        )
    assert len(files) > 1


@given(TENSORS, st.integers(1, 400))
def test_tensors_are_divided_in_order_within_the_limit(tensors: dict[str, TensorInfo], limit: int) -> None:
    files = divide(tensors, limit)
    assert [name for names in files for name in names] == list(tensors)
    for names in files:
        sizes = [nbytes(tensors[name]) for name in names]
        assert sum(sizes) <= limit or len(names) == 1
    assert all(files) or files == [[]]
    assert len(set(file_names("model", len(files)))) == len(files)


def test_names_are_those_of_hugging_face() -> None:
    assert file_names("model", 1) == ["model.safetensors"]
    assert file_names("model", 2) == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


def row(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def packed(table: object, data: int = 8, length: int | None = None) -> bytes:
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + bytes(data)


BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "0 bytes"),
    "no header": (b"1234567", "7 bytes"),
    "longer than the file": (packed({}, 0, 100), "100 bytes"),
    "absurdly long": (packed({}, 0, 2**63), "bytes"),
    "not text": (packed(b"\xff\xfe{}", 0), "no valid JSON"),
    "not JSON": (packed(b"{", 0), "no valid JSON"),
    "too deep": (packed(b"[" * 100_000, 0), "no valid JSON"),
    "an absurd number": (packed(b'{"a":' + b"9" * 5000 + b"}", 0), "no valid JSON"),
    "not an object": (packed([], 0), "a list, not an object"),
    "a name twice": (packed(b'{"a":1,"a":2}', 0), "'a' comes twice"),
    "not a tensor": (packed({"a": 3}), "'a'"),
    "without dtype": (packed({"a": {"shape": [2], "data_offsets": [0, 8]}}), "'a'"),
    "unknown dtype": (packed({"a": row("F33")}), "'a' has the dtype 'F33'"),
    "dtype of no kind": (packed({"a": row([])}), "'a' has the dtype"),
    "negative shape": (packed({"a": row(shape=[-2])}), "'a' has the shape"),
    "fractional shape": (packed({"a": row(shape=[2.0])}), "'a' has the shape"),
    "shape of bools": (packed({"a": row(shape=[2, True])}), "'a' has the shape"),
    "shape too large": (packed({"a": row(shape=[0, 2**63], offsets=[0, 0])}, 0), "'a' has the shape"),
    "too many dimensions": (packed({"a": row(shape=[1] * 65, offsets=[0, 4])}, 4), "'a' has the shape"),
    "one offset": (packed({"a": row(offsets=[8])}), "'a' has the shape"),
    "negative offset": (packed({"a": row(offsets=[-8, 0])}), "'a' has the shape"),
    "offsets reversed": (packed({"a": row(offsets=[8, 0])}), "'a' of shape"),
    "other size than its shape": (packed({"a": row(shape=[3])}), "'a' of shape"),
    "gap before": (packed({"a": row(offsets=[4, 12])}, 12), "'a' begins 4 bytes behind the header"),
    "gap between": (
        packed({"a": row(), "b": row(offsets=[9, 17])}, 17),
        "'b' begins 1 bytes behind tensor 'a'",
    ),
    "overlap": (packed({"a": row(), "b": row(offsets=[4, 12])}, 12), "'b' overlaps tensor 'a'"),
    "empty tensor inside another": (
        packed({"a": row(), "b": row(shape=[0], offsets=[4, 4])}, 8),
        "'b' overlaps tensor 'a'",
    ),
    "truncated": (packed({"a": row()}, 7), "'a' ends at byte"),
    "grown": (packed({"a": row()}, 9), "'a' ends at byte"),
    "grown without tensors": (packed({}, 1), "the header ends at byte"),
    "metadata of no kind": (packed({"__metadata__": 1}, 0), "__metadata__"),
    "metadata not of strings": (packed({"__metadata__": {"a": 1}}, 0), "__metadata__"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_is_refused(case: str, tmp_path: Path) -> None:
    data, what = BAD[case]
    (tmp_path / "x.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"x\.safetensors is damaged") as caught:
        parse(tmp_path / "x.safetensors")
    assert what in str(caught.value)


def test_a_header_of_nothing_is_fine(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(packed({}, 0))
    assert dict(parse(tmp_path / "x").entries) == {}
    (tmp_path / "x").write_bytes(
        packed({"b": row(shape=[], offsets=[0, 4]), "a": row(shape=[7, 0], offsets=[4, 4])}, 4)
    )
    start = parse(tmp_path / "x").data_start
    assert parse(tmp_path / "x").entries["b"] == Entry(TensorInfo((), torch.float32), start, start + 4)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    for file in (tmp_path, tmp_path / "none", tmp_path / ("x" * 300)):
        with pytest.raises(CheckpointError, match="cannot be read"):
            parse(file)


def test_what_the_format_does_not_have_is_not_built() -> None:
    for name, dtype in (("a", torch.complex128), ("a", torch.qint8), ("__metadata__", torch.float32)):
        with pytest.raises(CheckpointError, match=f"'{name}'"):
            build({name: TensorInfo((2,), dtype)})


def test_random_corruptions_are_refused_or_harmless(tmp_path: Path) -> None:
    """A header has no checksum: what is left to see is that safetensors itself agrees, and that every byte is
    in one tensor."""
    random_, file = random.Random(0), tmp_path / "x.safetensors"
    tensors = {
        "a": torch.rand(2, 3),
        "b.c": torch.tensor(3),
        "d": torch.ones(0, dtype=torch.bool),
        "e": torch.rand(9).bfloat16(),
    }
    write(file, tensors)
    original = file.read_bytes()
    end = original.rindex(b"}", 0, ALIGN) + 1  # behind it: spaces
    outcomes = {"refused": 0, "read": 0}
    for _ in range(600):
        data = bytearray(original)
        at = random_.randrange(end)
        kind = random_.choice(["bit", "byte", "delete", "insert", "digit", "cut"])
        if kind == "bit":
            data[at] ^= 1 << random_.randrange(8)
        elif kind == "byte":
            data[at] = random_.randrange(256)
        elif kind == "delete":
            count = random_.randrange(1, 9)
            data[ALIGN:ALIGN] = b" " * count
            del data[at : at + count]
        elif kind == "insert":
            text = random_.choice(
                [b"0", b"-", b",", b"}", b"\0", b'"', b"[", b"null", b" ", b"\n", b"1e9", b'"x":1,', b"{}"]
            )
            del data[ALIGN - len(text) : ALIGN]
            data[at:at] = text
        elif kind == "digit":
            data[random_.choice([i for i in range(8, end) if chr(data[i]).isdigit()])] = random_.choice(
                b"0123456789"
            )
        else:
            del data[at:]
        file.write_bytes(data)
        try:
            header = parse(file)
        except CheckpointError:
            outcomes["refused"] += 1
            continue
        outcomes["read"] += 1
        places = sorted((entry.begin, entry.end) for entry in header.entries.values())
        assert [place[0] for place in places] == [header.data_start, *(place[1] for place in places[:-1])]
        assert places[-1][1] == len(data)
        assert accepted_by_safetensors(file)
    assert min(outcomes.values()) > 5


def accepted_by_safetensors(file: Path) -> bool:
    try:
        with safe_open(file, "pt") as opened:
            return bool(opened.keys())
    except SafetensorError:
        return False


def test_a_header_as_long_as_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors: dict[str, Any] = {f"{i:0200d}": TensorInfo((1,), torch.int8) for i in range(100)}
    monkeypatch.setattr("polyreme.checkpoint.safetensors.LIMIT", 20_000)
    with pytest.raises(CheckpointError, match="100 tensors"):
        build(tensors)
