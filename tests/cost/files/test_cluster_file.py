"""Clusters in TOML: what is read, and what is said about mistakes."""

from pathlib import Path

import pytest

from jvpipe.cost.files.cluster_file import find_cluster
from jvpipe.cost.hardware import INFINITE, Accelerator, Cluster, Link
from jvpipe.cost.presets import PRESETS

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


def test_a_whole_file(tmp_path: Path) -> None:
    device = Accelerator("ours", 24 * 2**30, 7e11, {"float32": 2e13, "bfloat16": 8e13}, 0.0)
    links = Link(1.2e10, 1e-5), Link(1e11), Link(3e9)
    expected = Cluster("lab", device, 4, 2, *links, peer_uses_host=False, host_memory_bytes=64 * 2**30)
    assert find_cluster(written(tmp_path, GOOD)) == expected
    assert find_cluster(str(written(tmp_path, GOOD))) == expected


def test_a_file_of_a_few_lines(tmp_path: Path) -> None:
    found = find_cluster(written(tmp_path, 'devices_per_machine = 1\ndevice = "h200"\nhost.bytes_per_s = 1e9'))
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
            r"lab.toml:19: peer.bytes_per_s must be a number above 0, not -1",
        ),
        ("bytes_per_s = 1e11", "bytes_per_s = nan", r"lab.toml:19: peer.bytes_per_s must be a number above 0, not nan"),
        ("latency_s = 1e-5", "latency_s = -1", r"lab.toml:16: host.latency_s must be a number of at least 0, not -1"),
        (
            "latency_s",
            "latency",
            r"lab.toml:16: host.latency is unknown: unknown field 'latency': did you mean 'latency_s'",
        ),
        ("machines = 2", "machines = 0", r"lab.toml:3: machines must be a whole number of at least 1, not 0"),
        ("machines = 2", "machines = 2.5", r"lab.toml:3: machines must be a whole number"),
        ("devices_per_machine = 4\n", "", r"lab.toml: devices_per_machine is missing"),
        ("machines = 2", "machine = 2", r"lab.toml:3: machine is unknown.*did you mean 'machines'"),
        ("peer_uses_host = false", "peer_uses_host = 0", r"lab.toml:4: peer_uses_host must be true or false, not 0"),
        (
            '"24GiB"',
            '"24 gigs"',
            r"lab.toml:9: device.memory_bytes must be bytes, or a text such as '16GiB', not '24 gigs'",
        ),
        ('"24GiB"', "true", r"lab.toml:9: device.memory_bytes must be bytes"),
        ('"64GiB"', "-5", r"lab.toml:5: host_memory_bytes must be bytes"),
        ("float32 = 2e13, ", "", r"lab.toml:11: device.flops_per_s.float32 is missing"),
        ("float32 = 2e13", "float32 = '2e13'", r"lab.toml:11: device.flops_per_s.float32 must be a number above 0"),
        ('name = "ours"', "name = 5", r"lab.toml:8: device.name must be a text, not 5"),
        ("machines = 2", "machines = ", r"lab.toml is not TOML: .*line 3"),
    ],
)
def test_a_mistake_is_named_with_its_file_line_and_field(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in GOOD
    with pytest.raises(ValueError, match=message):
        find_cluster(written(tmp_path, GOOD.replace(old, new, 1)))


def test_a_link_that_is_a_number(tmp_path: Path) -> None:
    text = 'host = 5\ndevices_per_machine = 1\ndevice = "p40"'
    with pytest.raises(ValueError, match=r"lab.toml:1: host must be a link: a table with bytes_per_s, not 5"):
        find_cluster(written(tmp_path, text))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("h20", "unknown hardware 'h20': did you mean 'h200'"),
        ("missing.toml", "there is no file missing.toml"),
        ("", "unknown hardware ''"),
    ],
)
def test_an_unknown_name(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_cluster(name)


def test_an_unknown_device(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"lab.toml:2: device unknown hardware 'v100': did you mean 'v100-"):
        find_cluster(written(tmp_path, 'devices_per_machine = 1\ndevice = "v100"\nhost.bytes_per_s = 1e9'))
