"""Hosts and slots: hostfiles, and what --include, --exclude, --num_nodes and --num_gpus leave of them.

What they are made of is in `polyreme.launch.hostfile`. No network."""

from __future__ import annotations

import base64
import json
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyreme.compat.deepspeed.launcher.constants import DLTS_HOSTFILE
from polyreme.launch.hostfile import Pool, ResourceError, read


class _Stderr(logging.Handler):
    """Shows what the launcher tells."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr)


logger = logging.getLogger("polyreme.deepspeed")
logger.addHandler(_Stderr())


def fetch_hostfile(hostfile_path: str) -> Pool | None:
    """The pool that a file of lines `HOST slots=N` describes; None, with a warning, where there is no file.

    Raises ResourceError for a line of another form, a host that is there twice, and a file without hosts."""
    if not Path(hostfile_path).is_file():
        level = logging.DEBUG if hostfile_path == DLTS_HOSTFILE else logging.WARNING
        logger.log(level, "no hostfile %s: only this machine is used", hostfile_path)
        return None
    return read(Path(hostfile_path))


def encode_world_info(world_info: Mapping[str, Any]) -> str:
    """As a word of a command line: base64 (for URLs) of JSON."""
    return base64.urlsafe_b64encode(json.dumps(world_info).encode()).decode()


def decode_world_info(word: str) -> dict[str, list[int]]:
    """Return the hosts and slots of a word that `encode_world_info` made.

    Raises ResourceError for any other word."""
    try:
        found = json.loads(base64.urlsafe_b64decode(word))
        return {str(host): [int(slot) for slot in slots] for host, slots in found.items()}
    except (ValueError, AttributeError, TypeError):
        raise ResourceError(
            f"--world_info={word!r} is no world; it is what encode_world_info gives, of hosts and their slots"
        ) from None


class LocalDevices:
    """The devices of this machine, as far as a launcher asks for them: CUDA's, or else the CPU.

    On the CPU there is one slot, as `polyreme launch` starts one rank (DeepSpeed has one for each NUMA node);
    DS_ACCELERATOR=cpu asks for it where there are GPUs."""

    def device_name(self) -> str:
        return "cuda" if self._gpus() else "cpu"

    def device_count(self) -> int:
        return self._gpus() or 1

    def _gpus(self) -> int:
        import torch

        # counted without CUDA, which would go on with the devices that are visible now
        return 0 if os.environ.get("DS_ACCELERATOR") == "cpu" else torch.cuda.device_count()

    def visible_devices_envs(self) -> list[str]:
        """Variables that say which devices a process sees."""
        return ["CUDA_VISIBLE_DEVICES"] if self.device_name() == "cuda" else []


def get_accelerator() -> LocalDevices:
    """Return the object that a launcher asks for devices."""
    return LocalDevices()
