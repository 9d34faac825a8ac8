"""resume.json: read as it was written, or refused with what is wrong."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyreme.checkpoint.manifest import KINDS, File, Resume, dump, read, write
from polyreme.errors import CheckpointError

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text(), JSON, max_size=3)
FILES = {"model.safetensors": File(5, 0xABC), "optimizer/exp_avg.safetensors": File(6, 2**32 - 1)}
RANDOM = {"0": {"cpu": "AP8="}}
RESUME = Resume(
    FILES,
    {"step": 3, "lr": 1e-3},
    {"dp": 2, "tp": 1},
    2,
    RANDOM,
    {"epoch": 1},
    {"seed": 0},
    {"polyreme": "0.1"},
    {"mine": [1, None]},
)


@given(OBJECTS.filter(lambda state: KINDS.keys().isdisjoint(state)), OBJECTS, st.integers(0, 3))
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, state: dict[str, Any], extra: dict[str, Any], stage: int
) -> None:
    folder = tmp_path_factory.getbasetemp()
    resume = Resume({"a/b.json": File(1, 2)}, state, zero_stage=stage, extra=extra)
    write(folder, resume)
    assert read(folder) == resume


def test_keys_that_are_numbers_and_values_that_are_not(tmp_path: Path) -> None:
    """JSON's keys are strings, in another order than numbers; and a loss may be NaN."""
    write(tmp_path, Resume(extra={"by step": {10: 1, 9: 2, 100: 3}, "loss": math.nan, "best": math.inf}))
    found = read(tmp_path)
    assert found is not None and found.extra["by step"] == {"9": 2, "10": 1, "100": 3}
    assert math.isnan(found.extra["loss"]) and found.extra["best"] == math.inf


def test_the_format_is_as_documented(tmp_path: Path) -> None:
    tree = json.loads(dump(RESUME))
    assert set(tree) == {
        "format",
        "version",
        "files",
        "state",
        "mesh",
        "zero_stage",
        "rng",
        "data",
        "config",
        "versions",
        "extra",
        "self",
    }
    assert tree["format"], tree["version"] == ("polyreme", 1)
    assert tree["files"] == {"model.safetensors": {"size": 5, "crc32": "00000abc"},
                             "optimizer/exp_avg.safetensors": {"size": 6, "crc32": "ffffffff"}}  # fmt: skip
    said = tree.pop("self")
    assert said == f"{crc32(json.dumps(tree, sort_keys=True, separators=(',', ':')).encode()):08x}"
    assert read(tmp_path) is None
    (tmp_path / "resume.json").write_text(json.dumps(tree | {"self": said}))
    assert read(tmp_path) == RESUME


def sealed(**changes: Any) -> str:
    """The text of RESUME with other values, and the checksum that belongs to them."""
    tree = json.loads(dump(RESUME)) | changes
    tree = {key: value for key, value in tree.items() if value is not ... and key != "self"}
    return json.dumps(
        tree | {"self": f"{crc32(json.dumps(tree, sort_keys=True, separators=(',', ':')).encode()):08x}"}
    )


def listed(name: str, size: Any = 1, crc: Any = "00000000") -> str:
    return sealed(files={name: {"size": size, "crc32": crc}})


BAD = {
    "empty": ("", "no valid JSON"),
    "cut": (dump(RESUME).decode()[:-9], "no valid JSON"),
    "a list": ("[]", "a list, not an object"),
    "a key twice": ('{"self": 1, "self": 2}', "'self' comes twice"),
    "too deep": ('{"a": ' + "[" * 100_000, "no valid JSON"),
    "other format": (sealed(format="zip"), "its format is 'zip'"),
    "no version": (sealed(version=...), "version None"),
    "version of no kind": (sealed(version="2"), "version '2'"),
    "no checksum": (
        json.dumps({k: v for k, v in json.loads(dump(RESUME)).items() if k != "self"}),
        "it says None",
    ),
    "other state": (dump(RESUME).decode().replace('"step": 3', '"step": 4'), "its own checksum"),
    "no state": (sealed(state=...), "'state'"),
    "a list of files": (sealed(files=[]), "'files'"),
    "stage of no kind": (sealed(zero_stage=True), "'zero_stage'"),
    "absolute": (listed("/etc/passwd"), "'/etc/passwd'"),
    "a drive": (listed("C:x"), "'C:x'"),
    "above": (listed("../model.safetensors"), "'../model.safetensors'"),
    "above, from within": (listed("optimizer/../../x"), "'optimizer/../../x'"),
    "above, on Windows": (listed("..\\x"), "x"),
    "the folder": (listed("."), "'.'"),
    "no name": (listed(""), "''"),
    "two slashes": (listed("a//b"), "'a//b'"),
    "a control character": (listed("a\0b"), "b'"),
    "itself": (listed("resume.json"), "'resume.json'"),
    "no size": (listed("a", None), "'a'"),
    "negative size": (listed("a", -1), "'a'"),
    "checksum of no kind": (listed("a", 1, 7), "'a'"),
    "checksum that is no number": (listed("a", 1, "0x00 00+"), "'a'"),
    "files of no kind": (sealed(files={"a": 1}), "'a'"),
    "steps of no kind": (sealed(state={"step": "three"}), "'step' is 'three'"),
    "negative samples": (sealed(state={"samples": -1}), "'samples' is -1"),
    "a scale of no kind": (sealed(state={"loss_scale": None}), "'loss_scale' is None"),
    "a scale without end": (sealed(state={"loss_scale": float("inf")}), "'loss_scale' is inf"),
    "a rate of no kind": (sealed(state={"options": {"groups": [{"lr": "x"}]}}), "'options' are "),
    "a scheduler of no kind": (sealed(state={"options": {"scheduler": 5}}), "scheduler of 'options' is 5"),
    "text for a state": (sealed(state="text"), "'state' is not an object"),
    "a precision of no kind": (sealed(config={"precision": 8}), "'precision' is not an object"),
    "what was skipped of no kind": (sealed(state={"skipped": {"steps": 1.5}}), "'skipped' is"),
    "groups of no kind": (sealed(state={"options": {"groups": [1]}}), "'options' are [1]"),
    "options of no kind": (sealed(state={"options": {"made": [1]}}), "'made' of 'options' is [1]"),
    "random numbers of no kind": (sealed(rng={"0": 5}), "rng: that of '0'"),
    "random numbers in no base": (sealed(rng={"0": {"cpu": "?"}}), "rng: that of '0'"),
    "places of no kind": (sealed(data={"loaders": [3]}), "'loaders' is [3]"),
    "a batch of no kind": (sealed(config={"batch": 8}), "'batch' is not an object"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_is_refused(case: str, tmp_path: Path) -> None:
    text, what = BAD[case]
    (tmp_path / "resume.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"resume\.json is damaged") as caught:
        read(tmp_path)
    assert what in str(caught.value)


def test_a_newer_version_asks_for_a_newer_polyreme(tmp_path: Path) -> None:
    for text in (sealed(version=2), '{"format": "polyreme", "version": 2}'):
        (tmp_path / "resume.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"version 2 of the format.*use a Polyreme as new"):
            read(tmp_path)


def test_any_depth_is_read_or_refused(tmp_path: Path) -> None:
    """What is nested almost too deep to be read may be too deep to be checked."""
    for depth in (*range(100, 1100, 50), *range(2000, 100_000, 7000)):
        (tmp_path / "resume.json").write_text(
            '{"format": "polyreme", "version": 1, "a": ' + "[" * depth + "]" * depth + "}"
        )
        with pytest.raises(CheckpointError):
            read(tmp_path)


def test_what_json_cannot_hold_is_not_written(tmp_path: Path) -> None:
    for wrong, what in (
        (Resume(state={"a": object()}), "object"),
        (Resume({"../x": File(1, 1)}), "../x"),
        (Resume(rng=[1]), "rng"),  # type: ignore[arg-type]
        (Resume({"a": File(1, -1)}), "'a'"),
    ):
        with pytest.raises(CheckpointError, match=what):
            write(tmp_path, wrong)
    assert not list(tmp_path.iterdir())


def test_random_corruptions_are_refused_or_harmless(tmp_path: Path) -> None:
    random_, original = random.Random(0), dump(RESUME)
    refused = 0
    for _ in range(300):
        data = bytearray(original)
        for _ in range(random_.randrange(1, 3)):
            at = random_.randrange(len(data))
            if random_.random() < 0.5:
                data[at] ^= 1 << random_.randrange(8)
            else:
                del data[at : at + random_.randrange(1, 5)]
        (tmp_path / "resume.json").write_bytes(data)
        try:
            assert read(tmp_path) == RESUME
        except CheckpointError:
            refused += 1
    assert refused > 200
