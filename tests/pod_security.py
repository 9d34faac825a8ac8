"""The Pod Security Standard "restricted": which of its controls the spec of a pod breaks.

They are read off https://kubernetes.io/docs/concepts/security/pod-security-standards by hand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

VOLUMES = {
    *("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected"),
    "secret",
}
SYSCTLS = {
    *("kernel.shm_rmid_forced", "net.ipv4.ip_local_port_range", "net.ipv4.ip_unprivileged_port_start"),
    *("net.ipv4.tcp_syncookies", "net.ipv4.ping_group_range", "net.ipv4.ip_local_reserved_ports"),
    *("net.ipv4.tcp_keepalive_time", "net.ipv4.tcp_fin_timeout", "net.ipv4.tcp_keepalive_intvl"),
    "net.ipv4.tcp_keepalive_probes",
}
SELINUX = {"container_t", "container_init_t", "container_kvm_t", "container_engine_t"}
APPARMOR = "container.apparmor.security.beta.kubernetes.io/"


def broken(pod: Mapping[str, Any], annotations: Mapping[str, str] | None = None) -> set[str]:
    """The controls that the spec of a pod breaks, with the annotations of its template."""
    return {*_of_pod(pod, annotations or {})}


def pods(node: Any) -> Iterator[tuple[dict[str, Any], dict[str, str]]]:
    """The specs of pods, wherever they are, and the annotations of their templates."""
    if isinstance(node, list):
        for each in node:
            yield from pods(each)
    elif isinstance(node, dict):
        if "containers" in node.get("spec", {}):
            yield node["spec"], node.get("metadata", {}).get("annotations", {})
        yield from pods([*node.values()])


def _of_pod(pod: Mapping[str, Any], annotations: Mapping[str, str]) -> Iterator[str]:
    security = pod.get("securityContext", {})
    if any(pod.get(name) for name in ("hostNetwork", "hostPID", "hostIPC")):
        yield "Host Namespaces"
    if any(each.get("name") not in SYSCTLS for each in security.get("sysctls", ())):
        yield "Sysctls"
    for volume in pod.get("volumes", ()):
        kinds = {*volume} - {"name"}
        if "hostPath" in kinds:
            yield "HostPath Volumes"
        if not kinds <= VOLUMES:
            yield "Volume Types"
    values = [value for name, value in annotations.items() if name.startswith(APPARMOR)]
    if any(value != "runtime/default" and not value.startswith("localhost/") for value in values):
        yield "AppArmor"
    yield from _of_both(security)
    containers = [
        each for kind in ("initContainers", "containers", "ephemeralContainers") for each in pod.get(kind, ())
    ]
    for container in containers:
        own = container.get("securityContext", {})
        yield from _of_both(own)
        yield from _of_container(container, own)
        if own.get("runAsNonRoot", security.get("runAsNonRoot")) is not True:
            yield "Running as Non-root"
        if "seccompProfile" not in own and "seccompProfile" not in security:
            yield "Seccomp"


def _of_both(security: Mapping[str, Any]) -> Iterator[str]:
    """Of what a pod and a container may both say."""
    if security.get("windowsOptions", {}).get("hostProcess"):
        yield "HostProcess"
    if security.get("runAsUser") == 0:
        yield "Running as Non-root user"
    if security.get("seccompProfile", {"type": "Localhost"})["type"] not in ("RuntimeDefault", "Localhost"):
        yield "Seccomp"
    if security.get("appArmorProfile", {"type": "Localhost"})["type"] not in ("RuntimeDefault", "Localhost"):
        yield "AppArmor"
    options = security.get("seLinuxOptions", {})
    if options.get("type", "") not in {"", *SELINUX} or options.get("user") or options.get("role"):
        yield "SELinux"


def _of_container(container: Mapping[str, Any], own: Mapping[str, Any]) -> Iterator[str]:
    capabilities = own.get("capabilities", {})
    probes = [container.get(kind, {}) for kind in ("livenessProbe", "readinessProbe", "startupProbe")]
    probes += container.get("lifecycle", {}).values()
    if own.get("privileged"):
        yield "Privileged Containers"
    if own.get("procMount", "Default") != "Default":
        yield "/proc Mount Type"
    if any(each.get("hostPort") for each in container.get("ports", ())):
        yield "Host Ports"
    if any(probe.get(kind, {}).get("host") for probe in probes for kind in ("httpGet", "tcpSocket")):
        yield "Host Probes / Lifecycle Hooks"
    if own.get("allowPrivilegeEscalation") is not False:
        yield "Privilege Escalation"
    if "ALL" not in capabilities.get("drop", ()) or not {*capabilities.get("add", ())} <= {
        "NET_BIND_SERVICE"
    }:
        yield "Capabilities"
