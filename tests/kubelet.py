"""A cluster of the tests: it runs the pods of an Indexed Job as processes on this machine.

Each pod has the network of a host of tests/hosts.py and PID, UTS and mount namespaces of its own: the host
name and the hosts file that its Job and headless Service give it, the variables of its container alone,
/dev/shm and the volumes where they are mounted. Jobs end, and pods are replaced, by the Job's policies."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hosts import Host


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


class Kubelet:
    """Runs Jobs on `nodes`, one pod on each. The image is this machine, with `variables` and the working
    folder `folder`; `claims` are its volumes."""

    def __init__(
        self, nodes: Sequence[Host], folder: Path, claims: Mapping[str, Path], variables: Mapping[str, str]
    ) -> None:
        self.nodes, self.folder, self.claims, self.variables = nodes, folder, claims, variables
        self.room = len(nodes)
        """Pods that there is room for now; others wait."""
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
            variables[each["name"]] = expanded(each["value"], variables)
        command = shlex.join(expanded(word, variables) for word in container["command"])
        lines = [
            f"hostname {shlex.quote(name)}",
            f"mount --bind {shlex.quote(str(self.etc))} /etc",
            *(self._mount(pod["volumes"], each) for each in container["volumeMounts"]),
            f"cd {shlex.quote(str(self.folder))}",
            f"exec env -i {shlex.join(f'{name}={value}' for name, value in variables.items())} {command}",
        ]
        output = self.folder / f"pod-{len(outcome.pods)}.txt"
        output.touch()
        lines.insert(0, f"exec > {shlex.quote(str(output))} 2>&1")
        isolated = ["unshare", "--pid", "--uts", "--mount", "--mount-proc", "--fork", "--kill-child"]
        process = self.nodes[index].popen(*isolated, "bash", "-ec", "\n".join(lines))
        outcome.pods.append(Pod(index, process, output))
        return outcome.pods[-1]

    def _mount(self, volumes: Sequence[Mapping[str, Any]], mount: Mapping[str, Any]) -> str:
        """The command that mounts a volume of the pod."""
        [volume] = [each for each in volumes if each["name"] == mount["name"]]
        path = shlex.quote(mount["mountPath"])
        if "emptyDir" in volume:
            size = volume["emptyDir"].get("sizeLimit", "64Mi").removesuffix("i")
            return f"mkdir -p {path} && mount -t tmpfs -o size={size} tmpfs {path}"
        if "configMap" in volume:
            source = self.folder / "configs" / volume["configMap"]["name"]
        else:
            source = self.claims[volume["persistentVolumeClaim"]["claimName"]]
        return f"mkdir -p {path} && mount --bind {shlex.quote(str(source))} {path}"


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
