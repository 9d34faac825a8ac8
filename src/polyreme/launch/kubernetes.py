"""Write the manifests that run ranks in pods, and submit them to a cluster.

`manifests` depends only on the request, and contacts no cluster. Communication: none."""

from __future__ import annotations

import posixpath
import re
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from pathlib import PurePosixPath
from typing import Any

import yaml

from polyreme.errors import LaunchError, Problem
from polyreme.launch.manifests import Manifest, build
from polyreme.launch.pod_request import CONTAINER, SCRATCH, Request, request_problems, volume_problems
from polyreme.launch.requests import RequestError
from polyreme.launch.strategic_merge import patched

SAVED = "checkpoint.folder"
GONE = ("emptyDir", "configMap", "secret", "downwardAPI", "projected", "ephemeral")
"""Kinds of volumes that end with their pod, or that cannot be written to."""


def manifests(request: Request) -> list[Manifest]:
    """Return the manifests for `kubectl apply`. Raises RequestError with all problems of `request`."""
    problems = list(request_problems(request))
    documents: list[Manifest] = []
    if not problems:
        documents, problems = patched(build(request), request.patches)
        problems += _folder_problems(request, documents)
    if problems:
        raise RequestError("Kubernetes", problems)
    return documents


def _folder_problems(request: Request, documents: Sequence[Manifest]) -> Iterator[Problem]:
    """Yield the folders to which a run cannot write, or whose files it would not find again."""
    [pod, *_] = _pods(documents)
    volumes = {each["name"]: each for each in pod.get("volumes", ())}
    mounts = {
        PurePosixPath(each["mountPath"]): volumes.get(each["name"], {})
        for container in pod["containers"]
        for each in container.get("volumeMounts", ())
        if container["name"] == CONTAINER[request.kind] and not each.get("readOnly")
    }
    kept = [str(path) for path, volume in mounts.items() if not {*GONE} & {*volume}]
    for key, folder in request.folders:
        path = PurePosixPath(posixpath.normpath(folder))
        place = next((each for each in (path, *path.parents) if each in mounts), None)
        if key == SAVED and str(place) not in kept:
            fix = f"give --volume CLAIM:{folder}"
            if [*volume_problems([f"claim:{folder}"])]:
                volume = "" if kept else "--volume CLAIM:/run/out and "
                fix = f"give {volume}--set {key}={[*kept, '/run/out'][0]}"
            yield Problem(key, folder, "it is on no volume, and so ends with its pod", fix)
        elif place is None:
            fix = f"give one below {SCRATCH}, or below the FOLDER of a --volume"
            yield Problem(key, folder, "the root of pods is read-only", fix)


def _pods(node: Any) -> Iterator[Manifest]:
    """Yield the specs of pods within a manifest."""
    if isinstance(node, dict) and "containers" in node:
        yield node
    elif isinstance(node, dict | list):
        for each in node.values() if isinstance(node, dict) else node:
            yield from _pods(each)


class _Dumper(yaml.SafeDumper):
    """Dumps YAML for kubectl. Quotes strings that kubectl's reader, but not Python's, takes for a number or a
    boolean: 1e-3, 08, y. Writes texts of several lines as blocks, and repeats objects instead of referring to
    them."""

    def analyze_scalar(self, scalar: str) -> Any:
        found = super().analyze_scalar(scalar)
        if "\n" in scalar:  # also with tabs, and blanks at ends of lines
            found.allow_block = super().analyze_scalar(re.sub("[ \t]", "", scalar)).allow_block
        return found

    def ignore_aliases(self, data: object) -> bool:
        return True


_NUMBER = r"[-+]?(0[xXbBoO][0-9a-fA-F_]+|(\.[0-9_]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?)"
_Dumper.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(rf"(?:{_NUMBER}|[yYnN])$"), list("-+.0123456789yYnN")
)
_Dumper.add_representer(
    str,
    lambda dumper, word: dumper.represent_scalar(
        "tag:yaml.org,2002:str", word, "|" if "\n" in word.strip("\n") else None
    ),
)


def text(documents: Iterable[Manifest]) -> str:
    """Return the manifests as YAML."""
    listed = list(documents)

    def written(as_it_is: bool) -> str:
        dumped: str = yaml.dump_all(
            listed, Dumper=_Dumper, sort_keys=False, explicit_start=True, width=110, allow_unicode=as_it_is
        )
        return dumped

    # YAML reads these as ends of lines
    return found if not re.search("[\x85\u2028\u2029]", found := written(True)) else written(False)


def apply(documents: Iterable[Manifest]) -> str:
    """Hand the manifests to the cluster of kubectl, and return its output.

    Raises LaunchError where there is no kubectl, or where it fails."""
    try:
        done = subprocess.run(
            ["kubectl", "apply", "-f", "-"],
            input=text(documents),
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError as error:
        raise LaunchError(
            f"--apply runs kubectl, which does not start: {error.strerror}; install it, or write the "
            "manifests with --output FILE and apply them elsewhere"
        ) from None
    if done.returncode:
        raise LaunchError(
            f"kubectl apply ended with status {done.returncode}: {done.stderr.strip()}; "
            "without --apply the manifests are only written"
        )
    return done.stdout
