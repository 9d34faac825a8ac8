"""What a config says of monitors."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid")
    enabled: bool = False


class TensorBoardConfig(_Section):
    """`output_path` and in it the folder `job_name`."""

    output_path: str = ""
    job_name: str = "DeepSpeedJobName"


class CSVConfig(TensorBoardConfig):
    """`output_path` and in it the folder `job_name`."""


class WandbConfig(_Section):
    """Of Weights & Biases."""

    group: str | None = None
    team: str | None = None
    project: str = "deepspeed"


class CometConfig(_Section):
    """Of Comet: figures of each `samples_log_interval` samples."""

    samples_log_interval: int = 100
    project: str | None = None
    workspace: str | None = None
    api_key: str | None = None
    experiment_name: str | None = None
    experiment_key: str | None = None
    online: bool | None = None
    mode: str | None = None


class DeepSpeedMonitorConfig(BaseModel):
    """All of them."""

    tensorboard: TensorBoardConfig = TensorBoardConfig()
    comet: CometConfig = CometConfig()
    wandb: WandbConfig = WandbConfig()
    csv_monitor: CSVConfig = CSVConfig()

    @property
    def enabled(self) -> bool:
        """Whether there is any."""
        return any(each.enabled for each in (self.tensorboard, self.comet, self.wandb, self.csv_monitor))


def get_monitor_config(param_dict: dict[str, Any]) -> DeepSpeedMonitorConfig:
    """What the sections of a DeepSpeed config say."""
    sections = {key: param_dict[key] for key in DeepSpeedMonitorConfig.model_fields if key in param_dict}
    return DeepSpeedMonitorConfig(**sections)
