"""Change manifests by strategic merge patches, as `kubectl patch` does.

Maps are merged, null deletes, and lists of MERGE_KEYS are merged by that key of their elements; every other
list is replaced. `$patch: replace` and `$patch: delete` are understood.
Invariants: a patch that changes nothing, or that changes how ranks find each other, is refused.
Communication: none."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from polyreme.errors import Problem
from polyreme.launch.pod_request import is_ours

Map = dict[str, Any]

MERGE_KEYS = {
    "containers": "name",
    "env": "name",
    "ephemeralContainers": "name",
    "hostAliases": "ip",
    "imagePullSecrets": "name",
    "initContainers": "name",
    "replicatedJobs": "name",
    "resourceClaims": "name",
    "runtimePatches": "manager",
    "schedulingGates": "name",
    "topologySpreadConstraints": "topologyKey",
    "volumeDevices": "devicePath",
    "volumeMounts": "mountPath",
    "volumes": "name",
}
"""The lists that Kubernetes, JobSet and Kubeflow merge, with the key of their elements. Tolerations are not
among them."""
FIXED = (
    *("apiVersion", "kind", "name", "namespace", "command", "data", "restartPolicy"),
    *("completions", "parallelism", "completionMode", "replicas", "numNodes", "numProcPerNode"),
    *("clusterIP", "selector", "publishNotReadyAddresses", "enableDNSHostnames", "subdomain"),
)
"""Keys by which ranks find each other and their config, so that no patch may change them."""
WITHIN = ("metadata", "spec", "template", "network", "mlPolicy", "trainer", "trainingRuntimeSpec")
WITHIN_LISTS = ("containers", "replicatedJobs", "runtimePatches")


class PatchError(ValueError):
    """A patch that cannot be applied."""


def patched(documents: Sequence[Map], patches: Mapping[str, str]) -> tuple[list[Map], list[Problem]]:
    """Return `documents` after `patches` (texts by the names of their files), and the problems of these."""
    found, problems = list(documents), []
    fix = "write what kubectl patch takes, with the kind (and metadata.name) of the manifest that it changes"
    for file, text in patches.items():
        try:
            for patch in [each for each in yaml.safe_load_all(text) if each is not None] or [None]:
                place = _place(found, patch)
                after = merged(found[place], patch)
                if after == found[place]:
                    raise PatchError(f"it changes nothing of {_name(after)}")
                if changed := list(_changed(found[place], after)):
                    raise PatchError(f"it changes {', '.join(changed)}, which the run depends on")
                found[place] = after
        except yaml.YAMLError as error:
            problems.append(Problem("--patch", file, f"it is no YAML: {' '.join(str(error).split())}", fix))
        except PatchError as error:
            problems.append(Problem("--patch", file, str(error), fix))
    return found, problems


def _name(document: Map) -> str:
    return f"{document['kind']} {document['metadata']['name']}"


def _place(documents: Sequence[Map], patch: Any) -> int:
    """Return the index of the document that a patch is for."""
    if not isinstance(patch, dict):
        raise PatchError("it has a document that is no map")
    metadata = patch.get("metadata")
    name = metadata.get("name") if isinstance(metadata, dict) else None
    for place, each in enumerate(documents):
        if each["kind"] == patch.get("kind") and name in (None, each["metadata"]["name"]):
            return place
    asked = " ".join(str(each) for each in (patch.get("kind", "no kind"), name) if each)
    raise PatchError(f"it is for {asked}, and there are {', '.join(map(_name, documents))}")


def merged(old: Map, patch: Map, where: str = "") -> Map:
    """Return a map after a patch. Raises PatchError for a deletion of a missing key, and for unknown
    directives."""
    patch = dict(patch)
    directive = patch.pop("$patch", "merge")
    if directive not in ("merge", "replace") or any(str(key).startswith("$") for key in patch):
        raise PatchError(f"{where or 'it'} has a directive other than $patch: replace and $patch: delete")
    found = copy.deepcopy(old) if directive == "merge" else {}
    for key, value in patch.items():
        place = f"{where}.{key}".removeprefix(".")
        if value is None or (isinstance(value, dict) and value.get("$patch") == "delete"):
            if key not in old:
                raise PatchError(f"it deletes {place}, which is not there")
            found.pop(key, None)
        elif isinstance(value, dict):
            inner = found.get(key)
            found[key] = merged(inner if isinstance(inner, dict) else {}, value, place)
        elif isinstance(value, list):
            found[key] = _merged_list(found.get(key) or [], value, MERGE_KEYS.get(key), place)
        else:
            found[key] = value
    return found


def _merged_list(old: list[Any], patch: list[Any], key: str | None, where: str) -> list[Any]:
    if key is None:
        return [merged({}, each, where) if isinstance(each, dict) else each for each in patch]
    if any(not isinstance(each, dict) for each in patch):
        raise PatchError(f"{where} has an element that is no map")
    given = [each for each in patch if each != {"$patch": "replace"}]
    found = [] if len(given) < len(patch) else list(old)
    for each in given:
        if key not in each:
            raise PatchError(f"{where} has an element without {key}, by which they are merged")
        place, named = f"{where}[{each[key]}]", {element[key]: element for element in found}
        if each.get("$patch") != "delete":
            named[each[key]] = merged(named.get(each[key], {}), each, place)
        elif named.pop(each[key], None) is None:
            raise PatchError(f"it deletes {place}, which is not there")
        found = [*named.values()]
    return found


def _changed(before: Map, after: Map, where: str = "") -> Iterator[str]:
    """Yield the fields that a run depends on and that have changed."""
    for key in FIXED:
        if before.get(key) != after.get(key):
            yield f"{where}.{key}".removeprefix(".")
    for key in [key for key in (*WITHIN, *WITHIN_LISTS, "env") if key in before]:
        place, old, new = f"{where}.{key}".removeprefix("."), before[key], after.get(key)
        if key == "env":
            old, new = (
                {each["name"]: each for each in variables or () if is_ours(each["name"])}
                for variables in (old, new)
            )
            yield from (f"{place}[{name}]" for name in {**old, **new} if old.get(name) != new.get(name))
        elif key in WITHIN_LISTS:
            elements = {each[MERGE_KEYS[key]]: each for each in new or ()}
            for each in old:
                name = each[MERGE_KEYS[key]]
                yield from _changed(each, elements.get(name, {}), f"{place}[{name}]")
        else:
            yield from _changed(old, new if isinstance(new, dict) else {}, place)
