"""The base class of a DeepSpeed config section as an object, classes made of the table of keys, and functions
that read single keys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, create_model

from polyreme.compat.deepspeed.config_keys import KEYS, Key
from polyreme.compat.deepspeed.refusal import ArgumentError, OrderError
from polyreme.compat.deepspeed.utils.logging import logger
from polyreme.config.loading import distinct


class DeepSpeedConfigModel(BaseModel):
    """A config section, whose keys are its fields. pydantic raises its ValidationError for a key that it has
    not.

    A field whose `json_schema_extra` has "deprecated" is an old name. Its value, through "new_param_fn", is
    that of the field "new_param", unless there is none or "set_new_param" is false."""

    # scripts derive classes from this one, with fields of any type and of names that pydantic keeps to itself
    model_config = ConfigDict(
        arbitrary_types_allowed=True, protected_namespaces=(), extra="forbid"
    ) | ConfigDict(
        populate_by_name=True, use_enum_values=True, validate_assignment=True, validate_default=True
    )

    def __init__(self, strict: bool = False, **given: Any) -> None:
        """Make the section of the keys that are given. strict: keep "auto" as a value; else such a key has
        its default."""
        auto = [key for key, value in given.items() if isinstance(value, str) and value == "auto"]
        super().__init__(**{key: value for key, value in given.items() if strict or key not in auto})
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


_TYPES: dict[str, Any] = {
    "bool": bool, "integer": int, "positive integer": Annotated[int, Field(gt=0)],
    "count": Annotated[int, Field(ge=0)], "number": Annotated[float, Field(allow_inf_nan=False)],
    "number >= 0": Annotated[float, Field(ge=0, allow_inf_nan=False)],
    "fraction": Annotated[float, Field(ge=0, le=1)], "text": str, "list": list[Any], "table": dict[str, Any],
}  # fmt: skip
"""The type for each kind of value that the table of keys has."""


def section(name: str, path: str, **others: tuple[Any, Any]) -> Any:
    """Return a class for the config section at `path`, with a field for each of its keys in the table, and
    for each of `others` (type and default). A field has the name of DeepSpeed's attribute, which is the
    second one of a key that has several."""
    fields: dict[str, Any] = {}
    for key in KEYS.values():
        above, _, own = key.path.rpartition(".")
        if above == path and key.takes != "anything":
            names = AliasChoices(own, *key.aka)
            fields[key.aka[0] if key.aka else own] = (
                _type(key), Field(key.default, validation_alias=names)
            )  # fmt: skip
    return create_model(name, __base__=DeepSpeedConfigModel, **{**fields, **others})


def _type(key: Key) -> Any:
    kind: Any = _TYPES[key.takes] if isinstance(key.takes, str) else Literal[key.takes]
    return kind | None if key.default is None else kind


def get_scalar_param(param_dict: Mapping[str, Any], param_name: str, param_default_value: Any) -> Any:
    """Return the value of a key, or the default if it is left out."""
    return param_dict.get(param_name, param_default_value)


get_list_param = get_dict_param = get_scalar_param


def dict_raise_error_on_duplicate_keys(ordered_pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs as a dictionary, for `json.load(object_pairs_hook=...)`. Raises ArgumentError for a
    key that comes twice."""
    try:
        return distinct(list(ordered_pairs))
    except ValueError as error:
        raise ArgumentError(f"the config has a key more than once ({error}): remove all but one") from None
