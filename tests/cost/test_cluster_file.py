"""Clusters in TOML: what is read, and what is said about mistakes."""

from dataclasses import replace
from pathlib import Path

import pytest

from jvpipe.cost.cluster_file import find_cluster
from jvpipe.cost.hardware import INFINITE, Accelerator, Cluster, Link
from jvpipe.cost.presets import PRESETS
from jvpipe.cost.tiling import Tiling

GOOD = """\
name = "lab"
devices_per_machine = 4
machines = 2
peer_uses_host = false
host_memory_bytes = "64GiB"

[device]
name = "ours"
memory_bytes = "24GiB"
memory_bytes_per_s = 7e11
flops_per_s = { float32 = 2e13, bfloat16 = 8e13 }
launch_s = 0

[host]
bytes_per_s = 1.2e10
latency_s = 1e-5

[peer]
bytes_per_s = 1e11

[network]
bytes_per_s = 3e9
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "lab.toml"
    path.write_text(text)
    return path


def test_a_whole_file_is_read(tmp_path: Path) -> None:
    device = Accelerator("ours", 24 * 2**30, 7e11, {"float32": 2e13, "bfloat16": 8e13}, 0.0)
    links = Link(1.2e10, 1e-5), Link(1e11), Link(3e9)
    expected = Cluster(
        "lab", device, 4, 2, *links, peer_uses_host=False, host_memory_bytes=64 * 2**30
    )
    assert find_cluster(written(tmp_path, GOOD)) == expected
    assert find_cluster(str(written(tmp_path, GOOD))) == expected


def test_a_file_of_a_few_lines(tmp_path: Path) -> None:
    found = find_cluster(
        written(tmp_path, 'devices_per_machine = 1\ndevice = "h200"\nhost.bytes_per_s = 1e9')
    )
    assert found == Cluster("lab", PRESETS["h200"].device, 1, 1, Link(1e9), INFINITE, INFINITE)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[network]\nbytes_per_s = 3e9", "", r"lab.toml: network is missing: it is a link"),
        ("[peer]\nbytes_per_s = 1e11", "", r"lab.toml: peer is missing"),
        ("bytes_per_s = 1e11", "", r"lab.toml:18: peer.bytes_per_s is missing"),
        (
            "bytes_per_s = 1e11",
            "bytes_per_s = -1e11",
            r"lab.toml:19: peer.bytes_per_s must be a finite number above 0, not -1",
        ),
        (
            "bytes_per_s = 1e11",
            "bytes_per_s = nan",
            r"lab.toml:19: peer.bytes_per_s must be a finite number above 0, not nan",
        ),
        (
            "latency_s = 1e-5",
            "latency_s = -1",
            r"lab.toml:16: host.latency_s must be a finite number of at least 0, not -1",
        ),
        (
            "latency_s",
            "latency",
            r"lab.toml:16: host.latency is unknown: unknown field 'latency': did you mean 'latency_s'",
        ),
        (
            "machines = 2",
            "machines = 0",
            r"lab.toml:3: machines must be a whole number of at least 1, not 0",
        ),
        ("machines = 2", "machines = 2.5", r"lab.toml:3: machines must be a whole number"),
        ("devices_per_machine = 4\n", "", r"lab.toml: devices_per_machine is missing"),
        ("machines = 2", "machine = 2", r"lab.toml:3: machine is unknown.*did you mean 'machines'"),
        (
            "peer_uses_host = false",
            "peer_uses_host = 0",
            r"lab.toml:4: peer_uses_host must be true or false, not 0",
        ),
        (
            '"24GiB"',
            '"24 gigs"',
            r"lab.toml:9: device.memory_bytes must be bytes, or a text such as '16GiB', not '24 gigs'",
        ),
        ('"24GiB"', "true", r"lab.toml:9: device.memory_bytes must be bytes"),
        ('"64GiB"', "-5", r"lab.toml:5: host_memory_bytes must be bytes"),
        ("float32 = 2e13, ", "", r"lab.toml:11: device.flops_per_s.float32 is missing"),
        (
            "float32 = 2e13",
            "float32 = '2e13'",
            r"lab.toml:11: device.flops_per_s.float32 must be a finite number above 0",
        ),
        (
            "bytes_per_s = 1e11",
            "bytes_per_s = inf",
            r"lab.toml:19: peer.bytes_per_s must be a finite number above 0, not inf",
        ),
        (
            "float32 = 2e13",
            "float32 = 0",
            r"lab.toml:11: device.flops_per_s.float32 must be a finite number above 0, not 0",
        ),
        (
            "launch_s = 0",
            "launch_s = inf",
            r"lab.toml:12: device.launch_s must be a finite number of at least 0, not inf",
        ),
        (
            "launch_s = 0",
            "elementwise_per_s = inf",
            r"lab.toml:12: device.elementwise_per_s must be a finite number above 0, not inf",
        ),
        (
            "launch_s = 0",
            "tiling = { cores = 80, winograd = 0.8 }",
            r"lab.toml:12: device.tiling.start is missing: it is a number",
        ),
        (
            "launch_s = 0",
            "tiling = { start = 32, winograd = 0.8 }",
            r"lab.toml:12: device.tiling.cores is missing: it is a whole number",
        ),
        (
            "launch_s = 0",
            "tiling = { cores = 80, start = nan, winograd = 0.8 }",
            r"lab.toml:12: device.tiling.start must be a finite number of at least 0, not nan",
        ),
        ('name = "ours"', "name = 5", r"lab.toml:8: device.name must be a text, not 5"),
        ("machines = 2", "machines = ", r"lab.toml is not TOML: .*line 3"),
        ("machines = 2", f"machines = {'9' * 5000}", r"lab.toml is not TOML: .* 5000 digits"),
        ("machines = 2", f"machines = {'[' * 5000}", r"lab.toml is not TOML: .*too deeply"),
        (
            "machines = 2",
            "machines = 2000000",
            r"lab.toml:3: machines must be at most 1000000, not 2000000",
        ),
        (
            "machines = 2",
            "machines = 500000",
            r"lab.toml:3: machines times devices_per_machine is 2000000 devices: at most 1000000",
        ),
        (
            "latency_s = 1e-5",
            "latency_s = 1e300",
            r"lab.toml:16: host.latency_s must be at most 1e\+12, not 1e\+300",
        ),
        (
            "bytes_per_s = 1e11",
            "bytes_per_s = 1e-300",
            r"lab.toml:19: peer.bytes_per_s must be at least 1, not 1e-300",
        ),
    ],
)
def test_a_mistake_is_named_with_its_file_line_and_field(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    assert old in GOOD
    with pytest.raises(ValueError, match=message):
        find_cluster(written(tmp_path, GOOD.replace(old, new, 1)))


MIXED = """\
host.bytes_per_s = 1e10
peer.bytes_per_s = 1e10
devices = ["a100-40gb", "2080ti", { like = "2080ti", name = "old card", memory_bytes = "8GiB" }]
"""
TABLES = """\
machines = 2
host.bytes_per_s = 1e10
network.bytes_per_s = 1e9

[[devices]]
like = "a100-40gb"

[[devices]]
name = "ours"
memory_bytes = "11GiB"
memory_bytes_per_s = 5e11
flops_per_s = { float32 = 1e13 }
"""


def test_products_are_dealt_out_as_a_file_says_or_as_in_the_preset(tmp_path: Path) -> None:
    said = GOOD.replace("launch_s = 0", "tiling = { cores = 80, start = 32, winograd = 0.8 }")
    device = find_cluster(written(tmp_path, said)).device
    assert (device.cores, device.tiling) == (80, Tiling(32.0, 0.8))
    like = 'host.bytes_per_s = 1e10\ndevice = { like = "v100-a", memory_bytes = "8GiB" }'
    found = find_cluster(written(tmp_path, f"devices_per_machine = 1\n{like}"))
    assert found.device.tiling == PRESETS["v100-a"].device.tiling


def test_devices_may_be_unlike(tmp_path: Path) -> None:
    found = find_cluster(written(tmp_path, MIXED))
    assert (found.devices, found.devices_per_machine, found.device) == (
        3,
        3,
        PRESETS["a100-40gb"].device,
    )
    assert [x.name for x in found.accelerators] == ["A100 40 GB", "RTX 2080 Ti", "old card"]
    card = PRESETS["2080ti"].device
    assert found.accelerators[2] == replace(card, name="old card", memory_bytes=8 * 2**30)
    found = find_cluster(written(tmp_path, TABLES))
    assert (found.devices_per_machine, found.machines) == (1, 2)
    assert found.accelerators[1] == Accelerator("ours", 11 * 2**30, 5e11, {"float32": 1e13})


def test_devices_that_are_alike_are_as_one_device(tmp_path: Path) -> None:
    found = find_cluster(
        written(tmp_path, MIXED.replace('"2080ti", {', '"a100-40gb", {').split(", {")[0] + "]\n")
    )
    assert (found.unlike, found.devices, found.device.name) == ((), 2, "A100 40 GB")


@pytest.mark.parametrize(
    ("text", "old", "new", "message"),
    [
        (
            MIXED,
            '"2080ti", {',
            '"2080it", {',
            r"lab.toml:3: devices unknown hardware '2080it': did you mean '2080ti'",
        ),
        (MIXED, "like =", "lik =", r"lab.toml: devices\[2\].lik is unknown.*did you mean 'like'"),
        (
            TABLES,
            '"a100-40gb"',
            '"a100"',
            r"lab.toml:6: devices\[0\].like unknown hardware 'a100': did you mean",
        ),
        (
            TABLES,
            "5e11",
            "-5e11",
            r"lab.toml:11: devices\[1\].memory_bytes_per_s must be a finite number above 0",
        ),
        (
            TABLES,
            "5e11",
            "inf",
            r"lab.toml:11: devices\[1\].memory_bytes_per_s must be a finite number above 0, not inf",
        ),
        (
            TABLES,
            "machines = 2",
            "devices_per_machine = 3",
            r"devices names 2 devices, there are 1 x 3 = 3: name one",
        ),
        (
            TABLES,
            "machines = 2",
            'device = "p40"',
            r"lab.toml:1: device and devices are both there",
        ),
        (
            MIXED,
            '["a100-40gb", "2080ti", {',
            "[5, {",
            r"lab.toml:3: devices must be a table, or the name of a preset, not 5",
        ),
    ],
)
def test_a_mistake_in_a_list_of_devices(
    tmp_path: Path, text: str, old: str, new: str, message: str
) -> None:
    assert old in text
    with pytest.raises(ValueError, match=message):
        find_cluster(written(tmp_path, text.replace(old, new, 1)))


def test_a_link_that_is_a_number(tmp_path: Path) -> None:
    text = 'host = 5\ndevices_per_machine = 1\ndevice = "p40"'
    with pytest.raises(
        ValueError, match=r"lab.toml:1: host must be a link: a table with bytes_per_s, not 5"
    ):
        find_cluster(written(tmp_path, text))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("h20", "unknown hardware 'h20': did you mean 'h200'"),
        ("missing.toml", "there is no file missing.toml"),
        ("", "unknown hardware ''"),
    ],
)
def test_an_unknown_name_is_refused(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_cluster(name)


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="no file here fails when read")
def test_a_file_that_cannot_be_read_is_named() -> None:
    with pytest.raises(ValueError, match=r"/proc/self/mem cannot be read \(Input/output error\)"):
        find_cluster("/proc/self/mem")


def test_an_unknown_device_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"lab.toml:2: device unknown hardware 'v100': did you mean 'v100-"
    ):
        find_cluster(
            written(tmp_path, 'devices_per_machine = 1\ndevice = "v100"\nhost.bytes_per_s = 1e9')
        )
