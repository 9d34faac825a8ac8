"""The section comms_logger of a config as an object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from polyreme.compat.deepspeed.comm.constants import COMMS_LOGGER, COMMS_LOGGER_PROF_ALL_DEFAULT
from polyreme.compat.deepspeed.runtime.config_utils import DeepSpeedConfigModel


class CommsLoggerConfig(DeepSpeedConfigModel):
    """What the communication logger records, and whether it writes each call to the log."""

    enabled: bool = False
    prof_all: bool = COMMS_LOGGER_PROF_ALL_DEFAULT
    prof_ops: list[str] = Field(default_factory=list)
    verbose: bool = False
    debug: bool = False


class DeepSpeedCommsConfig:
    """Whether a config has the section, and the section."""

    def __init__(self, ds_config: Mapping[str, Any]) -> None:
        self.comms_logger_enabled = COMMS_LOGGER in ds_config
        if self.comms_logger_enabled:
            self.comms_logger = CommsLoggerConfig(**ds_config[COMMS_LOGGER])
