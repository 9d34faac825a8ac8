"""Sections of a DeepSpeed config as objects, and readers of single keys."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict

from polyreme.compat.deepspeed.refusal import ArgumentError, OrderError
from polyreme.compat.deepspeed.utils.logging import logger


class DeepSpeedConfigModel(BaseModel):
    """A section: its fields are its keys, and others are an error of pydantic's.

    A field whose `json_schema_extra` has "deprecated" is an old name: with "new_param" its value, through
    "new_param_fn", goes to the field of that name, unless "set_new_param" is false."""

    model_config = ConfigDict(
        validate_default=True,
        validate_assignment=True,
        use_enum_values=True,
        populate_by_name=True,
        extra="forbid",
        arbitrary_types_allowed=True,
        protected_namespaces=(),
    )

    def __init__(self, strict: bool = False, **given: Any) -> None:
        """`strict`: "auto" is a value, and not the default's name."""
        super().__init__(**{key: v for key, v in given.items() if strict or not _is_auto(v)})
        for name, info in type(self).model_fields.items():
            extra = info.json_schema_extra
            if name in self.model_fields_set and isinstance(extra, dict) and extra.get("deprecated"):
                self._renamed(name, extra)

    def _renamed(self, old: str, extra: Mapping[str, Any]) -> None:
        new = str(extra.get("new_param") or "")
        logger.warning(f"the key {old} is an old name" + (f": write {new}" if new else ""))
        if not new or not extra.get("set_new_param", True):
            return
        value = extra.get("new_param_fn", lambda given: given)(getattr(self, old))
        *path, name = new.split(".")
        owner: Any = self
        for each in path:
            owner = getattr(owner, each)
        if name in owner.model_fields_set:
            raise OrderError(f"{old} is an old name of {new}, and both are given: remove {old}")
        delattr(self, old)
        setattr(owner, name, value)


def _is_auto(value: Any) -> bool:
    return isinstance(value, str) and value == "auto"


class pp_int(int):
    """An integer that is shown with commas, or as `custom_print_str`."""

    custom_print_str: str | None

    def __new__(cls, val: float, custom_print_str: str | None = None) -> pp_int:
        made = super().__new__(cls, val)
        made.custom_print_str = custom_print_str
        return made

    def __repr__(self) -> str:
        return self.custom_print_str or f"{int(self):,}"


def get_scalar_param(param_dict: Mapping[str, Any], param_name: str, param_default_value: Any) -> Any:
    """The value of a key, or the default."""
    return param_dict.get(param_name, param_default_value)


get_list_param = get_dict_param = get_scalar_param


def get_config_default(config: type[BaseModel], field_name: str) -> Any:
    """The default of a field of a section. Raises OrderError where it has none."""
    field = config.model_fields.get(field_name)
    if field is None or field.is_required():
        raise OrderError(f"{config.__name__} has no default of {field_name}: name a field that has one")
    return field.get_default(call_default_factory=True)


def dict_raise_error_on_duplicate_keys(ordered_pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """The pairs as a dictionary, for `json.load(object_pairs_hook=...)`. Raises ArgumentError for a key that
    comes twice."""
    pairs = list(ordered_pairs)
    twice = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
    if twice:
        raise ArgumentError(f"Duplicate keys in DeepSpeed config: {twice}: remove all but one of each")
    return dict(pairs)
