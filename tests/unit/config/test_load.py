"""Loading, overriding, checking and showing the configuration."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from millpond.config.load import Origin, load_config
from millpond.config.sections import Config, from_json, to_json
from millpond.config.show import field_docs, show_config
from millpond.config.topology import GroupSpec, HostSpec
from millpond.control.group_scheduler import GroupRole
from millpond.core.errors import ConfigError

EXAMPLE = """
[engine]
kv_memory = "1.5 GiB"

[gateway]
port = 8100
served_names = ["small", "default"]

[[host]]
name = "left"
cnic = "127.0.0.2"
arena = "64 MiB"

[[group]]
name = "m0"
role = "mixed"
hosts = ["left"]
threads_per_rank = 2

[[link]]
a = "left"
net = "snic"
rate = "400 Mbit/s"
"""


@pytest.fixture
def example(tmp_path: Path) -> Path:
    path = tmp_path / "millpond.toml"
    path.write_text(EXAMPLE)
    return path


def refusal(tmp_path: Path, text: str, *overrides: str) -> str:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return caught.value.message


def test_the_default_is_one_prefill_and_one_decode_process_on_loopback():
    config = load_config().config
    assert [(group.name, group.role) for group in config.groups] == [
        ("p0", GroupRole.PREFILL),
        ("d0", GroupRole.DECODE),
    ]
    assert config.hosts == (HostSpec("h0"),)
    assert config.gateway.host == "127.0.0.1"
    assert config.engine.model == "smollm2-135m"


def test_a_file_replaces_values_and_whole_tables(example: Path):
    config = load_config(example).config
    assert config.engine.kv_memory == 3 << 29
    assert config.gateway.served_names == ("small", "default")
    assert config.hosts == (HostSpec("left", cnic="127.0.0.2", arena=64 << 20),)
    assert config.groups == (GroupSpec("m0", GroupRole.MIXED, hosts=("left",), threads_per_rank=2),)
    assert config.links[0].rate == 400_000_000


def test_overrides_win_over_the_file_in_order(example: Path):
    loaded = load_config(
        example, ["gateway.port=1", "gateway.port=2", "group.m0.ranks=3", "engine.model=synthetic"]
    )
    assert loaded.config.gateway.port == 2
    assert loaded.config.groups[0].ranks == 3
    assert loaded.config.groups[0].threads_per_rank == 2
    assert loaded.config.engine.model == "synthetic"


def test_overrides_reach_into_default_tables():
    config = load_config(None, ["group.d0.device='cuda:0'", "host.h0.dram=1 MiB"]).config
    assert config.group("d0").device == "cuda:0"
    assert config.group("p0").device == "cpu"
    assert config.host("h0").dram == 1 << 20


def test_by_default_there_is_a_pool_of_one_node_on_the_first_host(tmp_path: Path):
    config = load_config(None, ["storage.s0.capacity=1 GiB"]).config
    assert [(node.name, node.host, node.targets) for node in config.storage] == [("s0", "h0", 12)]
    assert config.storage[0].capacity == 1 << 30
    path = tmp_path / "named.toml"
    path.write_text("[[host]]\nname = 'left'\n[[group]]\nname = 'm'\nrole = 'mixed'\nhosts = ['left']\n")
    assert load_config(path).config.storage[0].host == "left"
    assert load_config(None, ["pool.enabled=false"]).config.storage == ()


def test_state_lies_in_the_users_state_home(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", "/nowhere/someone")
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    assert load_config().config.supervise.state_dir == "/nowhere/someone/.local/state/millpond"
    monkeypatch.setenv("XDG_STATE_HOME", "/var/state")
    assert load_config().config.supervise.state_dir == "/var/state/millpond"
    monkeypatch.setenv("XDG_STATE_HOME", "not/absolute")
    assert load_config().config.supervise.state_dir == "/nowhere/someone/.local/state/millpond"


def test_records_within_records_are_tables_within_tables(tmp_path: Path):
    path = tmp_path / "nested.toml"
    path.write_text("[dispatch.place]\nslack_ratio = 0.5\n")
    loaded = load_config(path, ["dispatch.place.slack_ratio=0.25"])
    assert loaded.config.dispatch.place.slack_ratio == 0.25
    assert "[dispatch.place]" in show_config(loaded)
    assert "slack_ratio = 0.25  # --set" in show_config(loaded)
    assert "dispatch.place.slack_rato: no such setting; did you mean 'slack_ratio'?" in refusal(
        tmp_path, "", "dispatch.place.slack_rato=1"
    )
    assert "dispatch.place = 3: must be" in refusal(tmp_path, "[dispatch]\nplace = 3")


def test_every_value_has_an_origin(example: Path):
    origins = load_config(example, ["gateway.drain_s=1"]).origins
    assert origins["gateway.port"] is Origin.FILE
    assert origins["group[0].role"] is Origin.FILE
    assert origins["gateway.drain_s"] is Origin.SET
    assert "gateway.host" not in origins


def test_the_shown_config_loads_to_the_same_config(example: Path, tmp_path: Path):
    loaded = load_config(example, ["gateway.drain_s=1.5"])
    shown = show_config(loaded)
    assert "port = 8100  # file" in shown
    assert "drain_s = 1.5  # --set" in shown
    assert 'model = "smollm2-135m"  # default' in shown
    again = tmp_path / "again.toml"
    again.write_text(shown)
    assert load_config(again).config == loaded.config
    assert tomllib.loads(shown)["host"][0]["arena"] == 64 << 20


def test_every_setting_is_shown_with_its_docstring():
    shown = show_config(load_config())
    for record in (HostSpec, GroupSpec):
        for name, text in field_docs(record).items():
            assert f"\n{name} = " in shown
            assert f"# {text}\n{name} = " in shown or len(text) > 100


def test_a_child_process_reads_what_the_supervisor_wrote(example: Path):
    config = load_config(example).config
    assert from_json(to_json(config)) == config
    assert from_json(to_json(config)).digest == config.digest
    with pytest.raises(ConfigError):
        from_json(b'{"gateway": {"port": "x"}}')


def test_the_digest_tells_configs_apart():
    assert load_config().config.digest == load_config().config.digest
    assert load_config().config.digest != load_config(None, ["engine.max_num_seqs=3"]).config.digest


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[gatway]\n", "gatway: no such section; did you mean 'gateway'?"),
        ("[gateway]\nprot = 1", "gateway.prot: no such setting; did you mean 'port'?"),
        ("[gateway]\nport = '8000'", "gateway.port = '8000': must be a valid integer"),
        ("[gateway]\nport = true", "gateway.port = True: must be a valid integer"),
        ("[gateway]\nport = 70000", "gateway.port = 70000: must be less than or equal to 65535"),
        ("[gateway]\ndrain_s = -1", "gateway.drain_s = -1: must be greater than or equal to 0"),
        ("[gateway]\ndrain_s = nan", "gateway.drain_s = nan: must be a finite number"),
        ("[gateway]\nport = 2020-01-01", "gateway.port = '2020-01-01': must be a valid integer"),
        ("gateway = 3", "gateway = 3: must be a table, [gateway]"),
        ("[group]\nname = 'x'", "group: write [[group]], once for each group"),
        ("group = [3]", "group[0] = 3: must be a table"),
        ("[[group]]\nname = 'x'", "group[0].role: must be given"),
        (
            "[[group]]\nname = 'x'\nrole = 'prefil'",
            "group[0].role = 'prefil': must be 'prefill', 'decode' or 'mixed'",
        ),
        ("[[group]]\nname = 'x'\nrole = 'prefill'", "group: a service needs a prefill and a decode group"),
        ("[[group]]\nname = 'x'\nrole = 'mixed'\nhosts = []", "group[0].hosts = []: name at least one host"),
        (
            "[[group]]\nname = 'x'\nrole = 'mixed'\nhosts = ['h9']",
            "group[0].hosts = 'h9': no such host; there are h0",
        ),
        ("[[group]]\nname = 'x/y'\nrole = 'mixed'", "group[0].name = 'x/y': use letters, digits, - and _"),
        ("[[group]]\nname = 'x'\nrole = 'mixed'\nranks = 0", "group[0].ranks = 0: must be from 1 to 1024"),
        ("[[host]]\nname = 'h0'\n[[host]]\nname = 'h0'", "host: 'h0' is named twice"),
        ("[[storage]]\nname = 's0'\nhost = 'h7'", "storage[0].host = 'h7': no such host; there are h0"),
        ("[[storage]]\nname = 's0'\ntargets = 0", "storage[0].targets = 0: must be at least 1"),
        (
            "[[storage]]\nname = 's0'\ncapacity = '4 MiB'",
            "storage[0].capacity = 4194304: must be at least 3145728 for each of its 12 targets",
        ),
        ("storage = []", "storage: a pool needs at least one [[storage]] node"),
        ("[pool]\ndata_shards = 33", "pool: 1 to 32 data shards and at most 4 parity shards"),
        (
            "[supervise]\npool_stop_s = 5",
            "supervise.pool_stop_s = 5.0: must be longer than node.flush_s = 5.0, or what",
        ),
        ("[engine]\nkv_memory = '1 potato'", "engine.kv_memory = '1 potato': write a size such as 512 MiB"),
        ("[engine]\nkv_memory = '0.5 B'", "engine.kv_memory = '0.5 B': 0.5 B is not a whole number"),
        ("[engine]\ndtype = 'int4'", "engine.dtype = 'int4': must be one of auto, bf16, fp32"),
        ("[engine]\nnumerics = 'Exact'", "engine.numerics = 'Exact': must be one of fast, exact"),
        ("[engine]\nnum_kept_tokens = -1", "engine.num_kept_tokens = -1: must be"),
        (
            "[engine]\nnum_kept_tokens = 140\nnumerics = 'exact'",
            "engine.num_kept_tokens = 140: it approximates, so engine.numerics = 'exact' cannot have it; use",
        ),
        ("[[link]]\na = 'h0'\nnet = 'x'", "link[0].net = 'x': must be one of snic, cnic"),
        ("[engine]\nmax_num_seqs = 0", "engine.max_num_seqs = 0: must be from 1 to 65536"),
        ("[gateway.efforts]\nmax = 101", "gateway.efforts.max = 101: must be from 1 to 100"),
        ("[engine]\nweights = 'zip'", "engine.weights = 'zip': must be one of unpacked, packed"),
        ("[transfer]\nring_bytes = 0", "transfer.ring_bytes = 0: must be from 65536 to 1073741824"),
        (
            "[synthetic]\nnum_layers = 1_000_000_000_000",
            "synthetic.num_layers = 1000000000000: must be from 1 to 1024",
        ),
        (
            "[[group]]\nname = 'x'\nrole = 'mixed'\ndevice = 'gpu'",
            "group[0].device = 'gpu': must be one of cpu, cuda",
        ),
        ("[gateway]\ndrain_s = 40", "supervise.drain_s = 35.0: must be longer than gateway.drain_s = 40.0"),
        ("[gateway]\nport = ", "bad.toml: Invalid value"),
    ],
)
def test_what_is_wrong_is_named_with_path_value_and_remedy(tmp_path: Path, text: str, expected: str):
    assert expected in refusal(tmp_path, text)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("gateway.port", "write section.key=value"),
        ("port=1", "write section.key=value"),
        ("gateway..port=1", "write section.key=value"),
        ("group.p0=1", "write group.name.key=value"),
        ("group.p9.ranks=1", "no group is named 'p9'; there are: p0, d0"),
        ("gateway.prot=1", "gateway.prot: no such setting"),
        ("gateway.port=eight", "gateway.port = 'eight': must be a valid integer"),
        ("nowhere.x=1", "nowhere: no such section"),
    ],
)
def test_a_wrong_override_is_named(tmp_path: Path, override: str, expected: str):
    assert expected in refusal(tmp_path, "", override)


def test_an_unreadable_file_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"nowhere\.toml: No such file"):
        load_config(tmp_path / "nowhere.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8 at byte 0"):
        load_config(tmp_path / "bytes.toml")


def test_a_run_folder_too_long_for_sockets_is_refused():
    with pytest.raises(ConfigError, match="choose a shorter one"):
        load_config(None, [f"supervise.run_dir=/{'x' * 80}"])


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ConfigError, match="no group is named 'p7'"):
        Config().group("p7")
