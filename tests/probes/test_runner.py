from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from supervisor.probes import runner
from supervisor.probes.limits import Limits, parse_limits
from supervisor.probes.runner import ProbeReport
from trainer import contract
from trainer.contract import CheckResult


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "supervisor.probes.runner", *arguments]
    return subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)


def test_one_line_holds_the_results_of_this_node(tmp_path: Path) -> None:
    limits = {"disk_paths": [str(tmp_path)], "disk_min_free_bytes": 0, "disk_min_free_fraction": 0}
    done = run("--limits", json.dumps(limits), "--shared", str(tmp_path), "--head-time", str(time.time()))
    assert done.returncode == 0
    (line,) = done.stdout.splitlines()
    report = contract.parse(ProbeReport, line.encode())
    assert report.node
    assert {result.check for result in report.results} == {
        f"disk:{tmp_path}",
        "memory",
        "shm",
        f"shared:{tmp_path}",
        "clock",
    }


@pytest.mark.parametrize(
    "arguments",
    [
        ("--limits", "["),
        ("--limits", "[]"),
        ("--limits", '{"unknown": 1}'),
        ("--limits", '{"disk_paths": "/tmp"}'),
        ("--limits", '{"clock_max_skew_s": "x"}'),
        ("--limits", '{"clock_max_skew_s": NaN}'),
        ("--limits", '{"disk_min_free_fraction": -1}'),
        ("--limits", '{"disk_min_free_bytes": 1e999}'),
        ("--deadline", "0"),
        ("--deadline", "nan"),
        ("--head-time", "noon"),
        ("--head-time", "inf"),
        ("surplus",),
    ],
)
def test_garbage_arguments_end_with_2_and_one_reason(
    arguments: Sequence[str], capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        runner.main(arguments)
    assert ended.value.code == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert "Traceback" not in err


def test_a_probe_that_hangs_is_unknown_and_holds_nobody_up() -> None:
    def hang() -> tuple[CheckResult, ...]:
        signal.pause()
        return ()

    good = CheckResult(check="good", ok=True)
    started = time.monotonic()
    results = runner.run_probes((("hung", hang), ("good", lambda: (good,))), 0.3)
    assert time.monotonic() - started < 2.0
    assert [(r.check, r.ok) for r in results] == [("hung", None), ("good", True)]


def test_a_probe_that_fails_dies_or_talks_nonsense_is_unknown() -> None:
    def fail() -> tuple[CheckResult, ...]:
        raise OSError(5, "Input/output error")

    def die() -> tuple[CheckResult, ...]:
        os._exit(3)

    results = runner.run_probes((("fails", fail), ("dies", die)), 5.0)
    assert [(r.check, r.ok) for r in results] == [("fails", None), ("dies", None)]


def test_limits_survive_the_way_through_json() -> None:
    raw = {"disk_paths": ["/a", "/b"], "clock_max_skew_s": 2, "shared_paths": []}
    assert parse_limits(json.loads(json.dumps(raw))) == Limits(disk_paths=("/a", "/b"), clock_max_skew_s=2.0)


def test_it_starts_without_anything_heavy() -> None:
    code = (
        "import sys; import supervisor.probes.runner; "
        "print(*(m for m in ('torch', 'psutil', 'pynvml', 'msgspec', 'rich', 'asyncio') if m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.strip() == ""
