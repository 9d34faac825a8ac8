"""What import-linter cannot say: which modules speak to torch.distributed and to transformers."""

from __future__ import annotations

import ast
from pathlib import Path

import polyreme

SOURCE = Path(polyreme.__file__).parent


def importers(package: str) -> set[str]:
    """Modules of polyreme that import `package` or anything in it, at the top or inside a function."""
    found = set()
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += (
                [f"{node.module}.{alias.name}" for alias in node.names]
                if isinstance(node, ast.ImportFrom) and node.module
                else []
            )
            if any(name == package or name.startswith(package + ".") for name in names):
                found.add(file.relative_to(SOURCE).as_posix())
    return found


def test_only_distributed_and_the_launcher_speak_to_torch_distributed() -> None:
    outside = {
        file for file in importers("torch.distributed") if not file.startswith(("launch/", "distributed/"))
    }
    assert outside == {"checkpoint/formats/dcp.py"}  # for its file format alone


def test_one_file_knows_transformers_models() -> None:
    assert {file for file in importers("transformers") if not file.startswith("data/")} <= {
        "models/huggingface.py",
        "checkpoint/save.py",
    }


def test_no_pickle_is_loaded() -> None:
    # whose unpickler imports nothing that a file names
    assert importers("pickle") == {"checkpoint/formats/dcp.py"}


def test_who_reads_which_rank_a_process_is() -> None:
    names = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    found = {
        file.relative_to(SOURCE).parts[0]
        for file in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.Constant) and node.value in names
    }
    assert found <= {"distributed", "launch"}
