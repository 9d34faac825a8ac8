"""The section compile of a config as an object. What becomes of each key, `polyreme inspect` tells."""

from __future__ import annotations

from typing import Any

from pydantic import create_model

from polyreme.compat.deepspeed.config_keys import KEYS
from polyreme.compat.deepspeed.runtime.config_utils import DeepSpeedConfigModel

_FIELDS: dict[str, Any] = {
    path.removeprefix("compile."): (Any if key.default is None else type(key.default), key.default)
    for path, key in KEYS.items()
    if path.startswith("compile.")
}
CompileConfig = create_model("CompileConfig", __base__=DeepSpeedConfigModel, **_FIELDS)
