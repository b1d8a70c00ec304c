"""The batch script that becomes the launcher."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from slurm.submission import render_batch_script

HOSTILE = Path("/runs/a b'$(touch x)/100%j/attempts/7")


def render(attempt_dir: Path = Path("/runs/a/attempts/7"), **more: object) -> str:
    return render_batch_script(
        python="/opt/venv/bin/python",
        attempt_dir=attempt_dir,
        job_name="sup-a",
        output=attempt_dir / "job.log",
        **more,  # type: ignore[arg-type]
    )


def directives(script: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]


def test_the_script_asks_for_what_every_attempt_needs_and_nothing_else() -> None:
    assert directives(render()) == [
        "--job-name=sup-a",
        "--no-kill",
        "--no-requeue",
        "--open-mode=append",
        "--output=/runs/a/attempts/7/job.log",
    ]


def test_the_script_ends_by_becoming_the_launcher() -> None:
    last = [line for line in render().splitlines() if line][-1]
    assert last == "exec /opt/venv/bin/python -P -m trainer.launch /runs/a/attempts/7"


def test_the_script_is_the_same_each_time() -> None:
    assert render() == render()


def test_further_options_and_a_signal_are_kept() -> None:
    script = render(options={"mem": "0", "exclusive": True, "signal": "B:USR1@120"})
    assert {"--mem=0", "--exclusive", "--signal=B:USR1@120"} < set(directives(script))


def test_hostile_paths_reach_the_launcher_unchanged(tmp_path: Path) -> None:
    # `exec echo` in place of the launcher shows which words the shell makes of the line.
    script = tmp_path / "batch.sh"
    spy = tmp_path / "spy"
    spy.write_text(f"#!{sys.executable}\nimport sys\nprint(repr(sys.argv[1:]))\n")
    spy.chmod(0o755)
    text = render(HOSTILE, pythonpath="/src/a b'c").replace("/opt/venv/bin/python", shlex.quote(str(spy)))
    script.write_text(text)
    done = subprocess.run(["bash", script], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.strip() == repr(["-P", "-m", "trainer.launch", str(HOSTILE)])
    assert not (tmp_path / "x").exists()


def test_a_percent_sign_in_the_log_path_is_no_pattern() -> None:
    (output,) = [line for line in directives(render(HOSTILE)) if line.startswith("--output")]
    assert shlex.split(output) == [f"--output={HOSTILE}/job.log".replace("%", "%%")]


@pytest.mark.parametrize("bad", ["/a\n#SBATCH --uid=0", "/a\0"])
def test_a_line_break_in_a_path_is_refused(bad: str) -> None:
    with pytest.raises(ValueError, match="line break"):
        render(Path(bad))
    with pytest.raises(ValueError, match="line break"):
        render(options={"mem": bad})
    with pytest.raises(ValueError, match="line break"):
        render(pythonpath=bad)


def test_importing_the_module_does_not_import_submitit() -> None:
    code = "import sys, slurm.submission, slurm.client; sys.exit('submitit' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
