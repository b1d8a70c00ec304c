"""The service file as systemd itself reads it, without starting anything."""

import re
import subprocess
from pathlib import Path

import pytest

SYSTEMD = Path(__file__).parents[2] / "systemd"
DROP_INS = sorted(SYSTEMD.glob("*.conf"))

pytestmark = pytest.mark.systemd


def install(unit_dir: Path, *drop_ins: Path) -> Path:
    """The unit as a site would have it, with a command that exists."""
    command = unit_dir / "bin" / "supervisor"
    command.parent.mkdir(parents=True)
    command.write_text("#!/bin/sh\n")
    command.chmod(0o755)
    unit = unit_dir / "supervisor.service"
    unit.write_text(
        (SYSTEMD / "supervisor.service").read_text().replace("/opt/slurm-supervisor/bin/supervisor", str(command))
    )
    for drop_in in drop_ins:
        folder = unit_dir / "supervisor.service.d"
        folder.mkdir(exist_ok=True)
        (folder / drop_in.name).write_text(drop_in.read_text())
    return unit


def analyze(*args: str) -> str:
    done = subprocess.run(
        ["systemd-analyze", "--no-pager", *args],
        check=False, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def exposure(unit: Path) -> float:
    overall = re.search(
        r"Overall exposure level for supervisor.service: ([\d.]+)", analyze("security", "--offline=true", str(unit))
    )
    assert overall
    return float(overall[1])


@pytest.mark.parametrize("drop_ins", [[], DROP_INS], ids=["alone", "with every drop-in"])
def test_systemd_has_no_complaint_about_the_unit(tmp_path: Path, drop_ins: list[Path]) -> None:
    assert analyze("verify", "--man=no", str(install(tmp_path, *drop_ins))) == ""


def test_a_misspelt_setting_would_be_noticed(tmp_path: Path) -> None:
    unit = install(tmp_path)
    unit.write_text(unit.read_text().replace("ProtectClock=", "ProtectClocks="))
    assert "ProtectClocks" in analyze("verify", "--man=no", str(unit))


@pytest.mark.parametrize("drop_ins", [[], DROP_INS], ids=["alone", "with every drop-in"])
def test_the_service_is_well_confined(tmp_path: Path, drop_ins: list[Path]) -> None:
    assert exposure(install(tmp_path, *drop_ins)) <= 3.0


def test_sysusers_makes_the_account_that_the_unit_names(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    subprocess.run(
        ["systemd-sysusers", f"--root={tmp_path}", str(SYSTEMD / "sysusers.d" / "supervisor.conf")],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    user = re.search(r"^User=(.+)$", (SYSTEMD / "supervisor.service").read_text(), re.MULTILINE)
    assert user
    assert f"\n{user[1]}:" in "\n" + (tmp_path / "etc" / "passwd").read_text()
