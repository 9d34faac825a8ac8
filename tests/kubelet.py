"""A cluster of the tests: it runs the pods of an Indexed Job as processes on this machine.

Each pod has the network of a host of tests/hosts.py and PID, UTS and mount namespaces of its own: the host
name and the hosts file that its Job and headless Service give it, the variables of its container alone, and
the volumes where they are mounted. It runs as the user, with the groups, capabilities and root file system
that its security contexts say, and does not begin as root where it must not. Jobs end, and pods are
replaced, by the Job's policies."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hosts import Host

IMAGE = "/srv/image"
"""The working folder of pods."""
CLAIM = "/srv/claim"
"""A folder where a volume may be."""


@dataclass
class Pod:
    """One run of a pod; `status` is its exit status, None while it runs."""

    index: int
    process: subprocess.Popen[str]
    output: Path
    disrupted: bool = False
    status: int | None = None

    def terminate(self) -> None:
        """What evicting it begins with: SIGTERM to the first process of its container."""
        self.disrupted = True
        process = self.process.pid
        for _ in ("nsenter", "unshare"):
            process = int(Path(f"/proc/{process}/task/{process}/children").read_text().split()[0])
        os.kill(process, signal.SIGTERM)


@dataclass
class Outcome:
    """How a Job ended: whether it is complete, and all pods that it had."""

    complete: bool
    pods: list[Pod] = field(default_factory=list)

    @property
    def said(self) -> str:
        """All that pods printed, for messages of failed tests."""
        return "\n".join(
            f"pod {each.index}, status {each.status}:\n{each.output.read_text()}" for each in self.pods
        )


class NotStartedError(Exception):
    """A container that its kubelet refuses to start."""


PRINTED = "/srv/printed"  # which only root can enter


class Kubelet:
    """Runs Jobs on `nodes`, one pod on each. The image is this machine, whose user is root, with `variables`
    and the files of `folder` in IMAGE; `claims` are volumes, and `secrets` the keys of Secrets."""

    def __init__(
        self,
        nodes: Sequence[Host],
        folder: Path,
        claims: Mapping[str, Path],
        variables: Mapping[str, str],
        secrets: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        self.nodes, self.folder, self.claims, self.variables = nodes, folder, claims, variables
        self.secrets = secrets or {}
        self.room = len(nodes)
        """Pods that there is room for now; others wait."""
        self.printed = folder / "printed"
        self.printed.mkdir(0o700)
        self.etc = folder / "etc"
        shutil.copytree("/etc", self.etc, symlinks=True, ignore_dangling_symlinks=True)
        (self.etc / "nsswitch.conf").write_text("hosts: files\n")

    def run(
        self,
        documents: Sequence[Mapping[str, Any]],
        watch: Callable[[list[Pod]], None] = lambda running: None,
    ) -> Outcome:
        """Run the Job in `documents` to its end. `watch` is called with the pods that run, all the time."""
        job = next(each for each in documents if each["kind"] == "Job")
        spec, outcome, done = job["spec"], Outcome(False), set[int]()
        self._prepare(documents, job)
        failures: Counter[int] = Counter()
        running: dict[int, Pod] = {}
        try:
            while True:
                waiting = [
                    each for each in range(spec["parallelism"]) if each not in running and each not in done
                ]
                for index in waiting[: max(0, self.room - len(running))]:
                    running[index] = self._pod(job, index, outcome)
                watch(list(running.values()))
                for index, pod in list(running.items()):
                    pod.status = pod.process.poll()
                    if pod.status is None:
                        continue
                    del running[index]
                    action = verdict(spec, pod)
                    failures[index] += action == "Count"
                    if action == "FailJob" or failures[index] > spec["backoffLimitPerIndex"]:
                        return outcome
                    if action == "Succeed":
                        done.add(index)
                if enough(spec, done):
                    outcome.complete = True
                    return outcome
                time.sleep(0.02)
        finally:
            for pod in running.values():
                pod.process.kill()  # unshare's --kill-child ends the rest
                pod.process.wait()

    def _prepare(self, documents: Sequence[Mapping[str, Any]], job: Mapping[str, Any]) -> None:
        """The names of the Service, if it is the pods', and the files of ConfigMaps."""
        pod, name = job["spec"]["template"]["spec"], job["metadata"]["name"]
        lines = ["127.0.0.1 localhost"]
        for each in documents:
            if (
                each["kind"] == "Service"
                and each["spec"] | {"selector": {"batch.kubernetes.io/job-name": name}} == each["spec"]
                and each["spec"]["clusterIP"] == "None"
                and each["metadata"]["name"] == pod.get("subdomain")
            ):
                names = [(node.address, f"{name}-{index}") for index, node in enumerate(self.nodes)]
                lines += [f"{address} {host}.{pod['subdomain']} {host}" for address, host in names]
            if each["kind"] == "ConfigMap":
                for file, text in each["data"].items():
                    path = self.folder / "configs" / each["metadata"]["name"] / file
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_text(text)
        (self.etc / "hosts").write_text("\n".join(lines) + "\n")

    def _pod(self, job: Mapping[str, Any], index: int, outcome: Outcome) -> Pod:
        pod = job["spec"]["template"]["spec"]
        [container] = pod["containers"]
        name = f"{job['metadata']['name']}-{index}"
        variables = {"JOB_COMPLETION_INDEX": str(index), "HOSTNAME": name, **self.variables}
        for each in container["env"]:
            if "valueFrom" in each:
                source = each["valueFrom"]["secretKeyRef"]
                variables[each["name"]] = self.secrets[source["name"]][source["key"]]
            else:
                variables[each["name"]] = expanded(each["value"], variables)
        command = shlex.join(expanded(word, variables) for word in container["command"])
        assignments = shlex.join(f"{name}={value}" for name, value in variables.items())
        lines = [
            f"hostname {shlex.quote(name)}",
            *self._image(pod),
            *(self._mount(pod, each) for each in container["volumeMounts"]),
            *read_only_root(container),
            f"cd {IMAGE}",
            f"exec {credentials(pod, container)} env -i {assignments} {command}",
        ]
        output = self.printed / f"pod-{len(outcome.pods)}.txt"
        output.touch()
        begin = ["mount -t tmpfs -o mode=755 tmpfs /srv", f"mkdir {PRINTED}"]
        begin += [f"mount --bind {shlex.quote(str(self.printed))} {PRINTED}"]
        lines = [*begin, f"exec > {PRINTED}/{output.name} 2>&1", *lines]
        isolated = ["unshare", "--pid", "--uts", "--mount", "--mount-proc", "--fork", "--kill-child"]
        process = self.nodes[index].popen(*isolated, "bash", "-ec", "\n".join(lines))
        outcome.pods.append(Pod(index, process, output))
        return outcome.pods[-1]

    def _image(self, pod: Mapping[str, Any]) -> list[str]:
        """Commands that put the image's folder, the files of /etc, this Python and the sources of volumes
        where any user sees them, and none is mounted over them."""
        lines = [
            f"mkdir {IMAGE} {CLAIM} /srv/python",
            f"mount --bind {shlex.quote(str(self.folder))} {IMAGE}",
            f"mount --bind {shlex.quote(str(self.etc))} /etc",
        ]
        python = Path(sys.base_prefix)
        for hidden in [each for each in reversed(python.parents) if not each.stat().st_mode & 1][:1]:
            base, place = shlex.quote(sys.base_prefix), shlex.quote(str(hidden))
            lines += [
                f"mount --bind {base} /srv/python",
                f"mount -t tmpfs -o mode=755 tmpfs {place}",
                f"mkdir -p {base}",
                f"mount --bind /srv/python {base}",
            ]
        for volume in pod["volumes"]:
            if source := self._source(volume, pod["securityContext"].get("fsGroup")):
                place = f"/srv/volumes/{volume['name']}"
                lines += [f"mkdir -p {place}", f"mount --bind {shlex.quote(str(source))} {place}"]
        return lines

    def _source(self, volume: Mapping[str, Any], group: int | None) -> Path | None:
        """The folder of a ConfigMap or claim, which `group` may write to."""
        if "configMap" in volume:
            return self.folder / "configs" / str(volume["configMap"]["name"])
        if "persistentVolumeClaim" not in volume:
            return None
        source = self.claims[volume["persistentVolumeClaim"]["claimName"]]
        if group is not None:
            subprocess.run(["chgrp", "-R", str(group), source], check=True)
            subprocess.run(["chmod", "-R", "g+rwXs", source], check=True)
        return source

    def _mount(self, pod: Mapping[str, Any], mount: Mapping[str, Any]) -> str:
        """The command that mounts a volume of the pod."""
        [volume] = [each for each in pod["volumes"] if each["name"] == mount["name"]]
        path = shlex.quote(mount["mountPath"])
        if "emptyDir" in volume:
            size = volume["emptyDir"].get("sizeLimit", "64Mi").removesuffix("i")
            return f"mkdir -p {path} && mount -t tmpfs -o mode=1777,size={size} tmpfs {path}"
        return f"mkdir -p {path} && mount --bind /srv/volumes/{volume['name']} {path}"


def credentials(pod: Mapping[str, Any], container: Mapping[str, Any]) -> str:
    """The command that becomes what the security contexts of a pod and its container say. Raises
    NotStartedError where that is root, and must not be."""
    own = {**pod["securityContext"], **container["securityContext"]}
    user, group = own.get("runAsUser", 0), own.get("runAsGroup", 0)
    if own["runAsNonRoot"] and user == 0:
        raise NotStartedError("container has runAsNonRoot and image will run as root")
    words = ["setpriv", f"--reuid={user}", f"--regid={group}", f"--groups={own.get('fsGroup', group)}"]
    if own["capabilities"]["drop"] == ["ALL"]:
        words += ["--bounding-set=-all", "--inh-caps=-all"]
    if not own["allowPrivilegeEscalation"]:
        words.append("--no-new-privs")
    return shlex.join(words)


def read_only_root(container: Mapping[str, Any]) -> list[str]:
    """Commands after which only volumes can be written to, if the root of the container is to be so."""
    if not container["securityContext"]["readOnlyRootFilesystem"]:
        return []
    writable = [each["mountPath"] for each in container["volumeMounts"] if not each.get("readOnly")]
    kept = "|".join(shlex.quote(each) for each in ("/proc", "/dev", PRINTED, *writable))
    return [
        "while read -r _ target _; do",
        f'case "$target" in {kept}|/proc/*) continue;; esac',
        'mount -o remount,bind,ro "$target" 2>&9 || true',  # what is mounted over is not there
        "done < <(cat /proc/self/mounts) 9> /dev/null",
    ]


def expanded(word: str, variables: Mapping[str, str]) -> str:
    """A word of a container, as Kubernetes reads it: $(NAME) is a variable, and $$ a dollar."""

    def value(found: re.Match[str]) -> str:
        return "$" if found[0] == "$$" else variables.get(found[1], found[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", value, word)


def verdict(spec: Mapping[str, Any], pod: Pod) -> str:
    """What becomes of a pod that ended: Succeed, or by the first rule that matches Count, Ignore or
    FailJob."""
    if pod.status == 0:
        return "Succeed"
    for rule in spec["podFailurePolicy"]["rules"]:
        codes = rule.get("onExitCodes")
        matches = pod.status in codes["values"] if codes else pod.disrupted
        if matches:
            return str(rule["action"])
    return "Count"


def enough(spec: Mapping[str, Any], done: set[int]) -> bool:
    """Whether the pods that succeeded make the Job complete."""
    rules = spec.get("successPolicy", {}).get("rules", [])
    return len(done) == spec["completions"] or any(int(each["succeededIndexes"]) in done for each in rules)
