"""Whatever the format of a checkpoint, it is opened, and `polyreme inspect` tells what is in it and whether
it is whole."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from typer.testing import CliRunner

from polyreme.checkpoint.formats.dcp import DCPCheckpoint
from polyreme.checkpoint.formats.deepspeed import DeepSpeedCheckpoint
from polyreme.checkpoint.formats.huggingface import Directory
from polyreme.checkpoint.manifest import File, Resume, write
from polyreme.checkpoint.open import open_source
from polyreme.cli import main
from polyreme.errors import CheckpointError

DEEPSPEED = Path(__file__).parent.parent / "data" / "deepspeed" / "stage3-bf16"
LAYERS = 3


def weights(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    shapes = {
        "embed.weight": (7, 4),
        **{f"layers.{i}.{part}.weight": (4, 4) for i in range(LAYERS) for part in ("up", "down")},
        "scale": (),
    }
    return {name: torch.ones(shape, dtype=dtype) for name, shape in shapes.items()}


def save_plain(folder: Path) -> Path:
    folder.mkdir(parents=True)
    save_file(weights(torch.bfloat16), folder / "model.safetensors", {"format": "pt"})
    return folder


def save_ours(folder: Path) -> Path:
    save_plain(folder)
    (folder / "optimizer").mkdir()
    trained = {name: tensor for name, tensor in weights().items() if name != "scale"}
    for kind in ("master", "exp_avg"):
        save_file(trained, folder / "optimizer" / f"{kind}.safetensors")
    files = {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*.safetensors")}
    table = {name: File(len(data), crc32(data)) for name, data in files.items()}
    state = {"step": 1200, "lr": 3e-5, "options": {"more": 1}}
    write(
        folder,
        Resume(table, state, {"dp": 2, "tp": 4, "order": ["dp", "tp"]}, 2, versions={"polyreme": "0.1.0"}),
    )
    return folder


def save_dcp(folder: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": weights(), "step": 5}, checkpoint_id=folder, no_dist=True)
    return folder


def inspect(*words: Any) -> tuple[int, str]:
    result = CliRunner().invoke(main.app, ["inspect", *map(str, words)], env={"COLUMNS": "80"})
    return result.exit_code, result.output


def inspected(path: Path) -> dict[str, Any]:
    status, output = inspect(path, "--json")
    found: dict[str, Any] = json.loads(output)
    assert status == (1 if found["integrity"]["problem"] else 0)
    return found


def test_a_folder_of_checkpoints_that_are_not_called_by_their_step_names_them(tmp_path: Path) -> None:
    save_ours(tmp_path / "final")
    with pytest.raises(CheckpointError, match=r"is no checkpoint, but has final: .* called step-N"):
        open_source(tmp_path)


def test_the_format_is_found(tmp_path: Path) -> None:
    assert isinstance(open_source(save_plain(tmp_path / "plain")), Directory)
    assert isinstance(open_source(save_ours(tmp_path / "ours")), Directory)
    assert isinstance(open_source(save_dcp(tmp_path / "dcp")), DCPCheckpoint)
    assert isinstance(open_source(DEEPSPEED), DeepSpeedCheckpoint)
    both = Path(shutil.copytree(DEEPSPEED, tmp_path / "both"))  # as Hugging Face's trainer does
    save_file(weights(), both / "model.safetensors")
    assert isinstance(open_source(both), DeepSpeedCheckpoint)
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "notes.txt").write_text("")
    with pytest.raises(
        CheckpointError, match=r"pickled has no checkpoint that can be read.*it has notes\.txt"
    ):
        open_source(pickled)
    (pickled / "pytorch_model.bin").write_text("")
    with pytest.raises(CheckpointError, match=r"has its weights in a pickle"):
        open_source(pickled)
    with pytest.raises(CheckpointError, match=r"txt is not a folder, but a file: .*load_state_dict"):
        open_source(pickled / "notes.txt")
    with pytest.raises(CheckpointError, match=r"nothing is not a folder$"):
        open_source(pickled / "nothing")


def test_inspect_ours(tmp_path: Path) -> None:
    save_ours(tmp_path / "run" / "step-900")
    path = save_ours(tmp_path / "run" / "step-1200")
    status, output = inspect(tmp_path / "run")  # the newest of a run
    assert status == 0
    lines = [" ".join(line.strip("│┃ \n").replace("│", " ").split()) for line in output.splitlines()]
    assert "format Polyreme" in lines and "written by 8 ranks: dp 2 x tp 4, ZeRO stage 2" in lines
    assert (
        "state step 1,200, lr 3e-05" in lines and "integrity whole: all 3 checksums are as written" in lines
    )
    assert "model 8 125 250 B bf16" in lines and "exp_avg 7 124 496 B fp32" in lines
    assert f"{LAYERS} layers.{{0-2}}.up.weight 4x4 bf16 all" in lines and "1 scale () bf16 none" in lines

    found = inspected(path)
    assert (found["mesh"], found["zero_stage"], found["state"]["options"]) == (
        {"dp": 2, "tp": 4},
        2,
        {"more": 1},
    )
    assert len(found["tensors"]) == 8
    assert {"name": "embed.weight", "same_as": None, "kinds": {
        "model": {"shape": [7, 4], "dtype": "bfloat16"}, "master": {"shape": [7, 4], "dtype": "float32"},
        "exp_avg": {"shape": [7, 4], "dtype": "float32"}}} in found["tensors"]  # fmt: skip
    assert found["kinds"][0] == {
        "name": "model",
        "tensors": 8,
        "elements": 125,
        "bytes": 250,
        "dtypes": ["bfloat16"],
    }


def test_inspect_finds_damage(tmp_path: Path) -> None:
    path = save_ours(tmp_path / "step-1")
    file = path / "optimizer" / "master.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert "optimizer/master.safetensors" in inspected(path)["integrity"]["problem"]
    status, output = inspect(path)
    assert status == 1 and "damaged" in output and "layers.{0-2}.up.weight" in output
    file.write_bytes(data[:-1])
    status, output = inspect(path)
    assert status == 1 and "error: " in output


def test_inspect_others(tmp_path: Path) -> None:
    found = inspected(DEEPSPEED)
    assert (found["format"], found["mesh"], found["zero_stage"], found["state"]["step"]) == (
        "DeepSpeed",
        {"dp": 2},
        3,
        3,
    )
    assert {kind["name"]: kind["tensors"] for kind in found["kinds"]} == {
        "model": 11,
        "master": 9,
        "exp_avg": 9,
        "exp_avg_sq": 9,
        "step": 9,
    }
    assert [row["name"] for row in found["tensors"] if row["same_as"] == "embed.weight"] == ["head.weight"]
    assert "head.weight = embed.weight" in inspect(DEEPSPEED)[1]
    found = inspected(save_dcp(tmp_path / "dcp"))
    assert (found["format"], found["state"], found["kinds"][0]["tensors"]) == (
        "torch.distributed.checkpoint",
        {"step": 5},
        8,
    )
    found = inspected(save_plain(tmp_path / "plain"))
    assert found["integrity"] == {"checksums": 0, "problem": None}
    assert "there are no checksums" in inspect(tmp_path / "plain")[1]
    assert inspect(tmp_path / "plain", "-n", "2")[0] == 2


def test_long_names_are_folded_after_dots(tmp_path: Path) -> None:
    long = "model.encoder.layers.0.cross_attention.output_projection.adapter.weight"
    save_file({long: torch.zeros(2)}, tmp_path / "model.safetensors")
    status, output = inspect(tmp_path)
    rows = [line.split("│")[2].strip() for line in output.splitlines() if line.startswith("│")]
    assert status == 0
    assert rows[-2:] == ["model.encoder.layers.0.cross_attention.", "output_projection.adapter.weight"]
