"""Accelerate scripts through the DeepSpeed door against the same scripts over DistributedDataParallel."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from command import RANK_VARIABLES, SOURCE
from door_scripts import OFFLINE, SCRIPTS, run, same
from examples import ALL

pytestmark = pytest.mark.skipif(
    ALL not in os.environ, reason="its ranks import much anew, which takes long: run with --all-cases"
)

PLAIN = ("loop2", "dummies", "teacher", "two")
CASES = ("loop2", "loop3", "dummies", "teacher", "two")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The facts of the scripts over DistributedDataParallel."""
    return run(tmp_path_factory.mktemp("accelerate") / "plain", "hf_accelerate.py", PLAIN, door=False)


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run(tmp_path_factory.mktemp("accelerate") / "door", "hf_accelerate.py", CASES, door=True)


@pytest.mark.parametrize("case", CASES)
def test_same_numbers(plain: Any, door: Any, case: str) -> None:
    same(door[case], plain.get(case) or plain["loop2"])


@pytest.mark.parametrize("stage", [2, 3])
def test_accelerate_launch(plain: Any, tmp_path: Path, stage: int) -> None:
    """Its own command, with the file that `accelerate config` writes."""
    said = {
        "zero_stage": stage, "gradient_accumulation_steps": 2, "gradient_clipping": 0.5,
        "zero3_init_flag": False, "zero3_save_16bit_model": True,
        "offload_optimizer_device": "none", "offload_param_device": "none",
    }  # fmt: skip
    if stage == 3:  # or a config of DeepSpeed's is named there
        zero = {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "stage3_gather_16bit_weights_on_model_save": True,
        }
        batch = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": 2}
        file = tmp_path / "ds.json"
        file.write_text(json.dumps({**batch, "gradient_clipping": 0.5, "zero_optimization": zero}))
        said = {"deepspeed_config_file": str(file), "zero3_init_flag": False}
    config = {
        "compute_environment": "LOCAL_MACHINE", "distributed_type": "DEEPSPEED", "deepspeed_config": said,
        "num_machines": 1, "num_processes": 2, "machine_rank": 0, "main_process_port": 0, "use_cpu": False,
    }  # fmt: skip
    (tmp_path / "zero.yaml").write_text(yaml.safe_dump(config))
    case, accelerate = f"loop{stage}", Path(sys.executable).with_name("accelerate")
    words = ["launch", "--config_file", "zero.yaml", str(SCRIPTS / "hf_accelerate.py"), str(tmp_path), case]
    own = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    done = subprocess.run(
        [sys.executable, "-m", "polyreme", "door", str(accelerate), *words],
        cwd=tmp_path,
        env={**own, **OFFLINE, "PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )  # torchrun leaves a folder
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    same(json.loads((tmp_path / f"{case}.json").read_text()), plain["loop2"])
