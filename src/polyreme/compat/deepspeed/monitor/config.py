"""The config sections of the monitors and of the communication logger, as objects made of the table of
keys."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from polyreme.compat.deepspeed.config_keys import KEYS
from polyreme.compat.deepspeed.refusal import ArgumentError

_MONITORS = ("tensorboard", "comet", "wandb", "csv_monitor")


def section(name: str, given: Mapping[str, Any]) -> SimpleNamespace:
    """Return the config section `name` as an object, with an attribute for each key: as given, or DeepSpeed's
    default. Raises ArgumentError for a key that the section has not."""
    defaults = {
        path.partition(".")[2]: key.default for path, key in KEYS.items() if path.startswith(f"{name}.")
    }
    if unknown := sorted(given.keys() - defaults.keys()):
        raise ArgumentError(f"{name} has no key {', '.join(unknown)}: it has {', '.join(defaults)}")
    return SimpleNamespace(**{**defaults, **given})


class DeepSpeedMonitorConfig:
    """The config sections of all monitors, as attributes."""

    def __init__(self, **sections: Mapping[str, Any]) -> None:
        for name in _MONITORS:
            setattr(self, name, section(name, sections.get(name, {})))

    @property
    def enabled(self) -> bool:
        """Return whether there is any."""
        return any(getattr(self, name).enabled for name in _MONITORS)


def get_monitor_config(param_dict: Mapping[str, Any]) -> Any:
    """Return the sections of a DeepSpeed config that are about monitors."""
    return DeepSpeedMonitorConfig(**{name: param_dict[name] for name in _MONITORS if name in param_dict})


class DeepSpeedCommsConfig:
    """The section of the communication logger of a config, if it has one."""

    def __init__(self, ds_config: Mapping[str, Any]) -> None:
        self.comms_logger_enabled = "comms_logger" in ds_config
        if self.comms_logger_enabled:
            self.comms_logger = section("comms_logger", ds_config["comms_logger"])
