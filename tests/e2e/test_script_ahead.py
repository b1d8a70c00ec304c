"""The next job of a person's own script, queued behind the running one, on a real cluster."""

from __future__ import annotations

import pytest

from supervisor.model import AttemptEnd, CheckpointState
from tests.e2e.stage import Stage
from tests.e2e.test_sbatch import person

pytestmark = pytest.mark.slurm

ALWAYS_S = 2 * 365 * 86400  # Slurm gives a job without a time limit a year

# Saves five steps behind where it begins, as transformers does, and ends as it is told.
SCRIPT = f"""\
#!/bin/bash
#SBATCH --job-name=train
#SBATCH --output=logs/%x-%j.out
#SUPERVISE --checkpoint-dir=out --layout=huggingface --queue-ahead-s={ALWAYS_S}
from=$(readlink -e "$1") || from=
n=$((${{from##*-}} + 5))
echo "from=$from step=$2."
mkdir -p "out/checkpoint-$n"
cp model.safetensors "out/checkpoint-$n/"
echo "{{\\"global_step\\": $n}}" >"out/checkpoint-$n/trainer_state.json"
n=$SUPERVISOR_ATTEMPT
until [ -e "end.$n" ]; do sleep 0.1; done
exit $(cat "end.$n")
"""


def test_the_next_job_of_a_script_begins_from_where_its_link_points_and_the_last_one_is_not_needed(
    stage: Stage,
) -> None:
    ann = person(stage)
    header = b'{"w":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}'
    (ann.home / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"1234")
    (ann.home / "train.sh").write_text(SCRIPT)
    ann.sbatch("-N1", "train.sh", "{resume_from}", "{resume_step}")
    link = stage.run("train").spec.paths.resume_link(2)
    newest = ann.home / "out/checkpoint-5"
    stage.wait("its job and its link", lambda: len(stage.jobs()) == 2 and link.is_symlink())
    assert link.readlink() == newest
    ann.end(1, 75)
    assert ann.await_log(2) == f"from={newest} step=."
    first, second = stage.attempts("train")
    assert (first.end, second.job_id, second.resume_path) == (AttemptEnd.SAVED, 2, str(newest))
    assert first.over_at is not None
    assert second.submitted_at is not None
    assert second.submitted_at < first.over_at
    stage.wait("the job behind it", lambda: len(stage.jobs()) == 3)
    ann.end(2, 0)
    stage.await_state("finished", "train")
    stage.wait("no job", lambda: all(job.is_ended for job in stage.jobs()))
    assert [a.end for a in stage.attempts("train")] == [AttemptEnd.SAVED, AttemptEnd.FINISHED]
    counted = {c.step for c in stage.checkpoints("train") if c.state is not CheckpointState.FENCED}
    assert counted <= {5, 10}
