"""Descriptions of clusters: what is refused and how it is told, that a description written is the one read,
and the seconds of products, collectives and transfers against what their formulas say."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import threads
from examples import examples
from polyreme.distributed.gloo_direct import GlooDirect
from polyreme.distributed.mesh import Mesh, SimulatedMesh
from polyreme.distributed.process_group import ProcessGroup
from polyreme.errors import ConfigError, LaunchError
from polyreme.layout.mesh_axes import AXES
from polyreme.observer import OBSERVER
from polyreme.planner import measure
from polyreme.planner.flops import data_sheet
from polyreme.planner.hardware import PRESETS, Cluster, Device, Link
from polyreme.planner.recorder import Recorder
from polyreme.planner.trace import Compute

RATES = {"flops": {"bf16": 1e12}}


def plain(**given: Any) -> Cluster:
    """Hosts of 4 ranks, with links of round numbers."""
    links: dict[str, Any] = {
        "inside": {"bandwidth": 1e9, "latency": 1e-3},
        "between": {"bandwidth": 1e8, "latency": 1e-2},
    }
    return Cluster.load({"device": RATES, "ranks_per_host": 4, **links, **given})


# ---- loading


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_whole(name: str) -> None:
    cluster = Cluster.load(name)
    assert cluster == Cluster.load(cluster) == Cluster.load({"base": name})
    for dtype, peak in cluster.device.flops.items():
        sheet = (data_sheet(cluster.device.name) or ("", {}))[1]
        assert sheet.get(dtype, peak) == peak


@pytest.mark.parametrize("name", PRESETS)
def test_a_description_that_is_written_is_the_one_that_is_read(name: str, tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(Cluster.load(name).to_toml(), "utf-8")
    assert Cluster.load(file) == Cluster.load(name)


def test_a_description_takes_the_values_of_its_base_that_it_does_not_give() -> None:
    base = Cluster.load("h100")
    cluster = Cluster.load({"base": "H100", "device": {"memory": "96 GB"}, "ranks_per_host": 4})
    assert cluster.device.memory == 96_000_000_000
    assert cluster.device == base.device.model_copy(update={"memory": cluster.device.memory})
    assert (cluster.ranks_per_host, cluster.inside, cluster.host) == (4, base.inside, base.host)


def test_a_known_device_needs_no_rates() -> None:
    device = Cluster.load({"device": {"name": "NVIDIA A100-SXM4-80GB"}}).device
    assert device.rate("bf16") == 312e12
    assert (
        Cluster.load({"device": {"name": "NVIDIA A100", "flops": {"bf16": 2e14}}}).device.rate("bf16") == 2e14
    )


REFUSED: list[tuple[Any, str, str, str]] = [
    ("h1000", "h1000", "no preset of this name", "h100"),
    (None, "cluster = None", "it is a NoneType", "the path of a file"),
    (["h100"], "[h100]", "it is a list", "the path of a file"),
    ({"base": "tpu"}, "base = tpu", "no preset of this name", "h100"),
    ("none.toml", "none.toml", "no such file", "check the path"),
    ({"devise": RATES}, "devise", "no such key", 'did you mean "device"?'),
    ({"device": {**RATES, "bandwith": 1e9}}, "device.bandwith = 1000000000.0", "no such key", '"bandwidth"'),
    ({"device": 3}, "device = 3", "must be a table of keys", "[device]"),
    ({"device": {**RATES, "bandwidth": -1}}, "device.bandwidth = -1", "above 0", "write bandwidth ="),
    ({"device": {**RATES, "streaming": 1.5}}, "device.streaming = 1.5", "of at most 1", "write streaming ="),
    ({"device": {"flops": {"fp8": 1e12}}}, "device.flops.fp8", '"bf16"', "write flops ="),
    ({"device": RATES, "inside": {"latency": "slow"}}, "inside.latency = slow", "a number", "write latency"),
    ({"device": RATES, "ranks_per_host": 0}, "ranks_per_host = 0", "an integer of at least 1", "= 8"),
    ({}, "device.flops", "no rate of computing", "bf16 = 1e12"),
    (
        {"device": {"name": "NVIDIA H100", "flops": {"bf16": 1.979e15}}},
        "device.flops.bf16 = 1979000000000000.0", "without sparsity", "write 9.894e+14",
    ),
    ({"device": {**RATES, "memory": "1 GiB", "cache": "2 GiB"}}, "device.cache", "not larger", "in bytes"),
    ({"device": {**RATES, "units": 4, "collective_units": 4}}, "collective_units = 4", "none would", "fewer"),
    (
        {"device": RATES, "host": {"memory": "1 TiB", "bandwidth": 1e9, "read": 2e9}},
        "host.read = 2000000000.0", "disks are not faster", "bytes per second",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("source", "value", "reason", "fix"), REFUSED)
def test_errors_name_value_reason_and_fix(source: Any, value: str, reason: str, fix: str) -> None:
    with pytest.raises(ConfigError) as raised:
        Cluster.load(source)
    (problem,) = raised.value.problems
    told = str(raised.value)
    assert value in told.replace("'", ""), told
    assert reason in problem.reason and fix in problem.fix, told


def test_all_problems_of_a_file_are_told_at_once_with_its_name(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text("devise = 1\n[inside]\nbandwidth = 0\nlatencey = 1\n", "utf-8")
    with pytest.raises(ConfigError) as raised:
        Cluster.load(file)
    keys = {problem.key for problem in raised.value.problems}
    assert keys == {"devise", "inside.bandwidth", "inside.latencey"}
    assert str(file) in str(raised.value)


# ---- operators


def test_a_product_takes_whole_rounds_of_blocks() -> None:
    device = Device(flops={"bf16": 8e6}, units=4, tile=(10, 10))
    round_of_blocks = 4 * 10 * 10 * 2 * 100 / 8e6
    assert device.product((1, 20, 20, 100), "bf16") == pytest.approx(round_of_blocks)
    assert device.product((4, 20, 20, 100), "bf16") == pytest.approx(4 * round_of_blocks)
    assert device.product((1, 21, 20, 100), "bf16") == pytest.approx(2 * round_of_blocks)  # one row too many
    # of one block three units would have nothing to do: four of a quarter, which read twice as much
    assert device.product((1, 10, 10, 100), "bf16") == pytest.approx(round_of_blocks / 2)
    # or all four compute a part of the sums
    assert device.product((1, 10, 10, 4096), "bf16") == pytest.approx(round_of_blocks / 4 * 40.96)


SHAPE = st.tuples(st.integers(1, 4), *[st.integers(1, 5000)] * 3)


@given(SHAPE, st.sampled_from([*PRESETS]))
@examples(60)
def test_no_product_is_faster_than_the_peak(shape: tuple[int, ...], name: str) -> None:
    device = Cluster.load(name).device
    least = 2 * math.prod(shape) / (device.rate("bf16") * device.sustained)
    assert device.product(shape, "bf16") >= least * (1 - 1e-9)


@pytest.mark.parametrize("name", ["a100", "h100", "h200", "b200"])
def test_large_products_reach_most_of_what_the_device_sustains(name: str) -> None:
    device = Cluster.load(name).device
    flops = 2 * 8192**3
    assert (
        flops / device.product((1, 8192, 8192, 8192), "bf16") > 0.85 * device.rate("bf16") * device.sustained
    )


def test_a_dtype_without_a_rate_has_that_of_the_next_wider_one() -> None:
    device = Device(flops={"fp32": 2.0, "fp64": 1.0})
    assert [device.rate(each) for each in ("fp16", "bf16", "fp32", "fp64", "int64")] == [2, 2, 2, 1, 2]


def test_what_fits_the_cache_moves_as_fast_as_the_cache() -> None:
    given: dict[str, Any] = {"flops": {"bf16": 1.0}, "bandwidth": 100, "streaming": 0.5, "cache": 1000}
    device = Device(**given, cached={"mul": 400, "all": 200}, operators={"gather": 10})
    assert [device.moved(n, op) for n, op in ((1000, "mul"), (1000, "add"), (2000, "mul"))] == [2.5, 5, 40]
    assert device.moved(2000, "gather") == 200


# ---- collectives and transfers


def test_seconds_of_collectives_within_a_host() -> None:
    """Bytes as `Axis` counts them of n ranks and a tensor of s: (n - 1) / n s for a gather and for a
    reduce-scatter, twice that for an all-reduce."""
    cluster, ranks, sent = plain(), range(4), 3 * 10**6
    for verb in ("all_gather", "reduce_scatter"):
        assert cluster.collective(verb, sent, ranks) == ("inside", pytest.approx(3e-3 + 3e-3))
    assert cluster.collective("all_reduce", 2 * sent, ranks) == ("inside", pytest.approx(6e-3 + 6e-3))
    assert cluster.collective("send", sent, (0, 3)) == ("inside", pytest.approx(1e-3 + 3e-3))
    assert cluster.collective("all_to_all", sent, ranks) == ("inside", pytest.approx(3e-3 + 3e-3))


def test_seconds_of_collectives_between_hosts() -> None:
    cluster, sent = plain(), 10**6
    # eight ranks of two hosts: each four share what they have of the network
    wait = 6 * 1e-3 + 1e-2
    assert cluster.collective("all_gather", sent, range(8)) == ("between", pytest.approx(wait + sent / 4e8))
    # one rank of each host has only its own
    assert cluster.collective("all_gather", sent, (0, 4)) == ("between", pytest.approx(1e-2 + sent / 1e8))
    assert cluster.collective("send", sent, (0, 4)) == ("between", pytest.approx(1e-2 + sent / 1e8))
    # of what a rank gives to seven others, four sevenths leave its host
    link, seconds = cluster.collective("all_to_all", 7 * sent, range(8))
    assert (link, seconds) == ("between", pytest.approx(wait + 4 * sent / 1e8))


def test_a_sum_over_many_hosts_goes_along_a_tree() -> None:
    cluster = plain(inside={"bandwidth": 1e9}, between={"bandwidth": 1e8, "latency": 1e-2})
    seconds = cluster.collective("all_reduce", 0, range(4 * 1024))[1]
    assert seconds == pytest.approx(2 * 10 * 1e-2)


@given(
    verb=st.sampled_from(["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "send"]),
    nbytes=st.integers(1, 10**12),
    ranks=st.lists(st.integers(0, 4000), min_size=2, max_size=40, unique=True),
    inside=st.floats(1, 100),
    between=st.floats(1, 100),
)
@examples(60)
def test_more_bandwidth_is_never_slower(
    verb: str, nbytes: int, ranks: list[int], inside: float, between: float
) -> None:
    slow = plain()
    fast = plain(
        inside={"bandwidth": 1e9 * inside, "latency": 1e-3},
        between={"bandwidth": 1e8 * between, "latency": 1e-2},
    )
    assert fast.collective(verb, nbytes, ranks)[1] <= slow.collective(verb, nbytes, ranks)[1]
    assert slow.collective(verb, nbytes, ranks)[1] <= slow.collective(verb, nbytes + 10**6, ranks)[1]


def test_ranks_of_a_host_share_its_disks_and_memory() -> None:
    host = {"memory": "1 TB", "bandwidth": 4e9, "bus": 2e9, "read": 2e9, "write": 1e9}
    cluster = plain(host=host)
    assert cluster.transfer("host", "in", 10**9) == pytest.approx(1.0)  # a quarter of the memory's
    assert cluster.transfer("files", "in", 10**9) == pytest.approx(2.0)
    assert cluster.transfer("files", "out", 10**9) == pytest.approx(4.0)
    assert plain(host=host, ranks_per_host=1).transfer("host", "in", 10**9) == pytest.approx(0.5)  # its bus


def test_efficiency_is_of_the_bandwidth() -> None:
    assert Link(bandwidth=100, efficiency=0.8).rate == 80


def test_sums_reach_their_part_of_a_link() -> None:
    cluster = plain(inside={"bandwidth": 1e9, "latency": 0.0, "sums": 0.5})
    seconds = [cluster.collective(verb, 10**6, range(4))[1] for verb in ("all_gather", "reduce_scatter")]
    assert seconds == [pytest.approx(1e-3), pytest.approx(2e-3)]


# ---- prices and measured shapes


@pytest.mark.parametrize("name", PRESETS)
def test_a_price_has_its_source_and_its_date(name: str) -> None:
    cluster = Cluster.load(name)
    assert bool(cluster.price) == bool(re.search(r", USD, 20\d\d-\d\d-\d\d$", cluster.priced))


def test_a_product_is_as_fast_as_the_measured_one_of_the_nearest_shape() -> None:
    rates = {"fp32": {"64x64x64": 10.0, "64x64x1024": 20.0, "1024x1024x1024": 40.0}}
    device = Device(flops={"fp32": 1e3, "bf16": 80.0}, products=rates)  # type: ignore[arg-type]
    shapes = ((1, 60, 70, 64), (3, 64, 64, 900), (1, 4096, 2048, 512))
    taken = [2 * math.prod(shape) / device.product(shape, "fp32") for shape in shapes]
    assert taken == [pytest.approx(each) for each in (10, 20, 40)]
    assert 2 * 8**3 / device.product((1, 8, 8, 8), "bf16") == pytest.approx(80)  # not measured


def test_a_block_waits_for_its_first_numbers_and_stores_its_result() -> None:
    given: dict[str, Any] = {"flops": {"bf16": 8e6}, "units": 4, "tile": (10, 10), "bandwidth": 1e4}
    without, device = Device(**given), Device(**given, fill=0.5)
    stored = 10 * 10 * 2 * 4 / 1e4  # by four units at once
    shape = (1, 20, 20, 100)
    assert device.product(shape, "bf16") == pytest.approx(without.product(shape, "bf16") + 0.5 + stored)


@pytest.mark.parametrize("shape", ["64x64", "0x1x1", "64 x 64 x 64"])
def test_a_shape_has_three_sizes(shape: str) -> None:
    with pytest.raises(ConfigError, match=r"device\.products"):
        Cluster.load({"device": {**RATES, "products": {"bf16": {shape: 1.0}}}})


# ---- measuring


def measured(rank: int, size: int, folder: str) -> str:
    cluster, first = measure.measure_run(size, folder)
    assert first == (rank == 0)
    return cluster.to_toml()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measures once where it would measure for a while, and smaller tensors."""
    for name, value in (("SECONDS", 0.0), ("LONGEST", 1e-9), ("CACHED", 2**16), ("STREAMED", 2**18)):
        monkeypatch.setattr(measure, name, value)


@pytest.mark.usefixtures("quick")
def test_ranks_measure_their_machine_and_agree_on_it(tmp_path: Path) -> None:
    first, second = threads.run(2, measured, str(tmp_path))
    assert first == second
    file = tmp_path / "cluster.toml"
    file.write_text(first, "utf-8")
    cluster = Cluster.load(file)
    assert cluster.ranks_per_host == 2
    for value in (cluster.device.rate("fp32"), cluster.device.bandwidth, cluster.inside.bandwidth):
        assert 1e6 < value < 1e15
    assert 0 < cluster.device.launch < 1e-2 and 0 < cluster.inside.latency < 1
    assert cluster.host.read <= cluster.host.bandwidth and not [*tmp_path.glob(".polyreme*")]
    assert {"fp32", "bf16"} == {*cluster.device.products} and 0 < cluster.inside.sums <= 1
    assert {*measure.OPERATORS} < {*cluster.device.cached} and cluster.device.memory < cluster.host.memory


def test_hosts_with_different_numbers_of_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mesh, "open", lambda sizes: SimpleNamespace(host_of=["a", "a", "b"]))
    with pytest.raises(LaunchError, match=r"a: 2, b: 1.*equally many"):
        measure.measure_run(3)


def test_of_ranks_the_slowest_counts() -> None:
    ranks = [
        {"bandwidth": 3.0, "launch": 1.0, "products": {"1x1x1": 4.0}},
        {"bandwidth": 2.0, "launch": 5.0, "products": {"1x1x1": 6.0, "2x2x2": 1.0}},
    ]
    assert measure._slowest(ranks) == {"bandwidth": 2.0, "launch": 5.0, "products": {"1x1x1": 4.0}}


@pytest.mark.usefixtures("quick")
def test_one_process_measures_itself() -> None:
    cluster = measure.measure()
    assert (cluster.ranks_per_host, cluster.between) == (1, Cluster.load("cpu").between)
    assert cluster.device.product((1, 64, 64, 64), "fp32") > 0 and not cluster.price


@pytest.mark.parametrize("name", measure.OPERATORS)
def test_operators_are_named_and_counted_as_a_dry_run_does(name: str) -> None:
    """In bytes of one tensor; the results of a sum and of a mean are small beside it."""
    run, times = measure.OPERATORS[name]
    a, b = torch.ones(64, 64), torch.ones(64, 64)
    with Recorder(nn.Identity(), "cpu") as recorder:
        run(a, b)
    found = {each.op: each.bytes for each in recorder.segments[0].events if isinstance(each, Compute)}
    assert found[name] == pytest.approx(times * a.nbytes, rel=0.05)


class Told:
    """Keeps what a simulated rank begins."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, str, int, int]] = []

    def collective(self, axis: str, verb: str, nbytes: int, ranks: int) -> Callable[[], None]:
        self.begun.append((axis, verb, nbytes, ranks))
        return lambda: None

    def action(self, action: tuple[object, ...]) -> None: ...

    def update(self, elements: int, nbytes: int) -> None: ...


@pytest.mark.parametrize(("device", "backend"), [("cuda", ProcessGroup), ("cpu", GlooDirect)])
def test_an_all_reduce_has_the_same_bytes_in_a_run_a_dry_run_and_in_time(device: str, backend: Any) -> None:
    tensor, sizes = torch.empty(1000, device="meta"), dict.fromkeys(AXES, 1) | {"dp": 4}
    mesh = SimulatedMesh.of(sizes, AXES, 0, tensor.device, stands_for=torch.device(device))
    told = Told()
    token = OBSERVER.set(told)
    try:
        mesh.dp.all_reduce(tensor).wait()
    finally:
        OBSERVER.reset(token)
    sent = backend.bytes_of_all_reduce(SimpleNamespace(_size=4), tensor.nbytes)
    assert sent == (2 * 3 * 1000 if device == "cuda" else 3 * 4000)
    assert told.begun == [("dp", "all_reduce", sent, 4)]
    assert mesh.traffic()["dp"] == {"all_reduce": (1, sent)}
    link = {"bandwidth": 1e3, "latency": 0.0}
    cluster = Cluster.load({"device": {"flops": {"bf16": 1.0}}, "inside": link, "between": link})
    assert cluster.collective("all_reduce", sent, range(4)) == ("inside", pytest.approx(sent / 1e3))
