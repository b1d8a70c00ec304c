"""Scripts that go on by themselves: what they do is seen, told, and made to fit."""

from __future__ import annotations

import pytest

from slurm.commands import sbatch_argv
from supervisor.own_restarts import asks_for_requeue, find_path_by_job_id, find_resubmission
from tests.execute.test_scripts import read, submission

REQUEUE = """\
#!/bin/bash
#SBATCH --signal=B:USR1@120
handler() { echo caught; scontrol requeue $SLURM_JOB_ID; exit 0; }
trap handler USR1
srun python train.py & wait
"""


@pytest.mark.parametrize(
    ("line", "asks"),
    [
        ("trap 'echo out of time; scontrol requeue $SLURM_JOB_ID' USR1", True),
        ('os.system("scontrol requeue " + job)', True),
        ('subprocess.call(["scontrol", "requeue", job])', True),
        ("scontrol -v \\\n  requeue $SLURM_JOB_ID", True),
        ("# scontrol requeue is not used here", False),
        ('echo "by hand: scontrol requeue"', False),
        ("scontrol show hostnames", False),
    ],
)
def test_a_script_that_has_itself_requeued_is_seen(line: str, asks: bool) -> None:
    assert asks_for_requeue(f"#!/bin/bash\n{line}\n") is asks


@pytest.mark.parametrize(
    ("line", "is_itself"),
    [
        ("sbatch $0", True),
        ("trap 'sbatch \"${BASH_SOURCE[0]}\"; exit' USR1", True),
        ("next=$(sbatch --dependency=afterany:$SLURM_JOB_ID jobs/train.sh | cut -d' ' -f4)", True),
        ("test -e done || exec supervisor sbatch train.sh", True),
        ('echo "Usage: sbatch $0 CONFIG" && exit 2', False),
        ("cd $(dirname $0) && sbatch evaluate.sh", False),
        ("# sbatch $0", False),
    ],
)
def test_a_script_that_hands_itself_in_again_is_seen(line: str, is_itself: bool) -> None:
    assert find_resubmission(f"#!/bin/bash\n\n{line}\n", "train.sh") == (3 if is_itself else None)


@pytest.mark.parametrize(
    ("line", "is_theirs"),
    [
        ("CKPT_DIR=/checkpoint/$USER/$SLURM_JOB_ID", True),
        ("python train.py --save-dir out/${SLURM_JOBID}", True),
        ("torchrun --rdzv_id $SLURM_JOB_ID train.py --checkpoint-dir out", False),
        ("srun --output log_$SLURM_JOB_ID python train.py", False),
    ],
)
def test_checkpoints_that_are_named_by_the_jobs_number_are_seen(line: str, is_theirs: bool) -> None:
    assert find_path_by_job_id(line) == (1 if is_theirs else None)


def test_a_script_that_has_itself_requeued_may_be_and_no_other() -> None:
    """Refused, `scontrol requeue` would let it end with 0, and the run look finished."""
    script = read(text=REQUEUE)
    assert "scontrol requeue" in script.notes[0]
    assert "after 3 times the run is held" in script.notes[0]
    assert "held" not in read("--supervise-checkpoint-dir=out", "train.sh", text=REQUEUE).notes[0]
    argv = sbatch_argv(submission(script))
    assert ("--requeue" in argv, "--no-requeue" in argv) == (True, False)
    script = read(text="#!/bin/bash\n#SUPERVISE --may-requeue\npython train.py\n")
    assert "--no-requeue" not in sbatch_argv(submission(script))
    script = read(text="#!/bin/bash\n#SBATCH --requeue\n")
    assert script.notes[0].startswith("--requeue is not passed on")
    assert "--no-requeue" in sbatch_argv(submission(script))


def test_a_script_that_hands_itself_in_or_saves_by_job_number_is_told_the_line() -> None:
    script = read(text="#!/bin/bash\nSAVE=/scratch/$SLURM_JOB_ID\npython train.py\nsbatch $0\n")
    assert [note.partition(" of the script")[0] for note in script.notes] == ["line 4", "line 2"]


def test_a_script_that_asks_slurm_where_it_lies_is_told_that_it_gets_a_copy() -> None:
    text = "#!/bin/bash\nhere=$(scontrol show job $SLURM_JOB_ID | awk -F= '/Command=/{print $2}')\n"
    assert "line 2 of the script asks Slurm where the script lies" in read(text=text).notes[0]
    assert read(text="#!/bin/bash\nscontrol show job $SLURM_JOB_ID\n").notes == ()


def test_later_submissions_count_as_slurm_counts_requeues() -> None:
    script = read(environment={"PATH": "/bin", "SLURM_RESTART_COUNT": "7"})
    assert "SLURM_RESTART_COUNT" not in submission(script).environment
    assert submission(script, 3, is_first=False).environment["SLURM_RESTART_COUNT"] == "2"
