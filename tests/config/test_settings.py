"""The service's settings: defaults, the order of files and variables, refusals, and the policy they give."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from supervisor import config
from supervisor.config import ConfigError, Settings, load_settings, parse_settings
from supervisor.model import DrainPolicy, Policy
from supervisor.probes.limits import parse_limits

HERE = Path("/etc/supervisor/supervisor.toml")


def test_an_empty_file_gives_the_defaults() -> None:
    assert parse_settings("", path=HERE) == Settings()


def test_the_defaults_are_the_policys_defaults() -> None:
    assert Settings().policy == Policy()


def test_settings_reach_the_policy() -> None:
    text = """
observe_only = true
[slurm]
poll_interval_s = 5
[loop]
cycle_interval_s = 0.5
[drain]
enabled = false
max_nodes = 1
max_fraction = 0.5
window_s = 60
sweeps_to_drain = 3
owner_tag = "night-shift"
"""
    policy = parse_settings(text, path=HERE).policy
    assert policy == Policy(
        drain=DrainPolicy(is_enabled=False, max_nodes=1, max_fraction=0.5, window_s=60.0, sweeps_to_drain=3),
        is_observe_only=True,
        poll_interval_s=5.0,
        cycle_interval_s=0.5,
        owner_tag="night-shift",
    )


def test_the_limits_of_a_sweep_survive_json() -> None:
    limits = parse_settings('[sweep.limits]\ndisk_paths = ["/scratch"]\n', path=HERE).sweep_limits
    assert json.loads(json.dumps(limits)) == limits
    assert limits["disk_paths"] == ["/scratch"]


def test_the_node_probes_take_the_limits_that_are_set() -> None:
    text = '[sweep.limits]\ndisk_paths = ["/scratch"]\ngpu_count = 8\nclock_max_skew_s = 2\n'
    limits = parse_limits(parse_settings(text, path=HERE).sweep_limits)
    assert (limits.disk_paths, limits.gpu_count, limits.clock_max_skew_s) == (("/scratch",), 8, 2.0)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("[slurms]\n", 'has no key "slurms"; did you mean "slurm"?'),
        ("[sweep.limit]\n", '[sweep] has no key "limit"; did you mean "limits"?'),
        ("[sweep.limits]\ndisk_pathes = []\n", '[sweep.limits] has no key "disk_pathes"; did you mean "disk_paths"?'),
        ('[slurm]\nclient = "rest"\n', '[slurm] client "rest" is none of auto, cli, pyslurm'),
        ("[slurm]\npoll_interval_s = 0\n", "[slurm] poll_interval_s must be above 0"),
        ("[loop]\ncycle_interval_s = -1\n", "[loop] cycle_interval_s must be above 0"),
        ("[drain]\nmax_fraction = 1.5\n", "must lie between 0 and 1"),
        ("[drain]\nsweeps_to_drain = 0\n", "must be at least 1"),
        ('[drain]\nowner_tag = "two words"\n', "is not one word"),
        ("[ledger]\npath = 3\n", "[ledger] path: a path is expected"),
        ('[sweep.limits]\ndisk_paths = ["scratch"]\n', "is not an absolute path"),
        ('[notify]\ncommand = "mail"\n', "[notify] command: a list is expected"),
        ("observe_only = 1\n", "observe_only: true or false is expected"),
        ("[sweep]\ninterval_s = 'often'\n", "[sweep] interval_s: a number is expected"),
    ],
)
def test_a_wrong_configuration_is_told_in_one_line(text: str, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_settings(text, path=HERE)
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


# ---------------------------------------------------------------- where they come from


@pytest.fixture
def no_system_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(config, "SYSTEM_CONFIG", tmp_path / "etc/supervisor.toml")
    monkeypatch.setattr(config, "SYSTEM_SOCKET", tmp_path / "run/control.sock")
    return tmp_path


def test_a_named_file_goes_before_the_variable(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('[ledger]\npath = "/a.db"\n')
    (tmp_path / "b.toml").write_text('[ledger]\npath = "/b.db"\n')
    env = {"SUPERVISOR_CONFIG": str(tmp_path / "b.toml")}
    assert load_settings(tmp_path / "a.toml", env).ledger.path == Path("/a.db")
    assert load_settings(None, env).ledger.path == Path("/b.db")


def test_a_named_file_that_is_missing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load_settings(None, {"SUPERVISOR_CONFIG": str(tmp_path / "gone.toml")})


def test_variables_go_before_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text('[ledger]\npath = "/a.db"\n[control]\nsocket = "/a.sock"\n')
    env = {"SUPERVISOR_LEDGER": "/env.db", "SUPERVISOR_SOCKET": "/env.sock", "SLURM_CONF": "/s/slurm.conf"}
    settings = load_settings(path, env)
    assert settings.ledger.path == Path("/env.db")
    assert settings.control.socket == Path("/env.sock")
    assert settings.slurm.conf == Path("/s/slurm.conf")


def test_paths_in_a_file_start_at_its_folder(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text('[ledger]\npath = "state/ledger.db"\n')
    assert load_settings(path, {}).ledger.path == tmp_path / "state/ledger.db"


def test_root_without_a_file_gets_the_systems_paths(no_system_files: Path) -> None:
    assert load_settings(None, {}, uid=0) == Settings()


def test_another_account_without_a_file_gets_its_state_directory(no_system_files: Path) -> None:
    settings = load_settings(None, {"HOME": "/home/ann"}, uid=1000)
    assert settings.ledger.path == Path("/home/ann/.local/state/supervisor/ledger.db")
    settings = load_settings(None, {"HOME": "/home/ann", "XDG_STATE_HOME": "/x"}, uid=1000)
    assert settings.control.socket == Path("/x/supervisor/control.sock")


def test_another_account_finds_the_systems_service(no_system_files: Path) -> None:
    (no_system_files / "run").mkdir()
    assert load_settings(None, {"HOME": "/home/ann"}, uid=1000).ledger.path == Settings().ledger.path
