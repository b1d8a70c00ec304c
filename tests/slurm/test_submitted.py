"""How a job was submitted: read from what 22.05, 24.11 (with and without accounting) and 25.11 keep of its line."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm.commands import sacct_delimiter
from slurm.submitted import SubmittedAs, parse_submit_line, read_release, read_submitted
from slurm.types import JobDescription, JobState

V22, V24 = (22, 5), (24, 11)


def job(command: str, line: str = "", *, name: str = "t.sh", comment: str = "", nodes: int = 1) -> JobDescription:
    return JobDescription(
        job_id=7,
        name=name,
        user="ann",
        uid=1001,
        state=JobState.RUNNING,
        raw_state="RUNNING",
        nodes=nodes,
        comment=comment,
        command=command,
        submit_line=line,
    )


def known(arguments: tuple[str, ...], options: tuple[str, ...] | None = None, script: str = "/x/t.sh") -> SubmittedAs:
    return SubmittedAs(options=options, script=script, arguments=arguments, is_certain=True)


@pytest.mark.parametrize(
    ("read", "release", "expected"),
    [
        (job("/x/t.sh"), V22, known(())),
        (job("/x/t.sh a"), V22, known(("a",))),
        (job("/x/t.sh a", "sbatch --signal=B:USR1@60 t.sh a"), V22, known(("a",), ("--signal=B:USR1@60",))),
        (job("/x/t.sh", "sbatch -N2 t.sh -N9", nodes=2), V24, known(("-N9",), ("--nodes=2",))),
        (job("/x/t.sh", "sbatch -N1-4 t.sh", nodes=3), V24, known((), ("--nodes=1-4",))),
        (job("/x y/t r.sh", "sbatch ./x y/t r.sh a", name="t r.sh"), V24, known(("a",), script="/x y/t r.sh")),
        (job("/x/t.sh", "sbatch --comment=two words t.sh a", comment="two words"), V24, known(("a",))),
        (job("/x/t.sh", "sbatch --comment x --exclusive t.sh", comment="x --exclusive"), V24, known(())),
        (job("", "sbatch -N2", nodes=2), V24, known((), ("--nodes=2",), script="")),
        (job("", "sbatch --wrap=echo a b"), V24, known((), script="")),
        (job(""), None, known((), script="")),
    ],
)
def test_what_can_mean_one_thing_only_is_known(
    read: JobDescription, release: tuple[int, int], expected: SubmittedAs
) -> None:
    assert read_submitted(read, release=release) == expected


@pytest.mark.parametrize(
    ("read", "release", "arguments"),
    [
        (job("/x/t.sh a two words "), V22, ("a", "two", "words", "")),  # an empty one at the end
        (job("/x/t.sh "), V22, ("",)),
        (job("/x/t.sh", "sbatch t.sh --lr 3"), V24, ("--lr", "3")),
        (job("/x/t.sh", "sbatch -J a b t.sh c d", name="a b"), V24, ("c", "d")),
        (job("./x y/t.sh"), V22, ("y/t.sh",)),  # a folder "x y"
        (job("./t r.sh", name="t r.sh"), V22, ("r.sh",)),
        (job("/x/t.sh"), V24, None),
        (job("/x/t.sh a"), None, None),
        (job("/x/t.sh", "sbatch --comment=a t.sh of two t.sh a", comment="a t.sh of two"), V24, None),
    ],
)
def test_what_can_mean_several_things_is_not_certain(
    read: JobDescription, release: tuple[int, int] | None, arguments: tuple[str, ...] | None
) -> None:
    found = read_submitted(read, release=release)
    assert (found.arguments, found.is_certain) == (arguments, False)


WORDS = st.lists(st.text(alphabet="ab -='\"\t", max_size=4), max_size=4).map(tuple)


@given(WORDS)
def test_arguments_that_are_certain_are_those_that_were_given(words: tuple[str, ...]) -> None:
    text = " ".join(["t.sh", *words])
    for read, release in ((job(f"/x/{text}"), V22), (job("/x/t.sh", f"sbatch -N1 {text}"), V24)):
        found = read_submitted(read, release=release)
        assert not found.is_certain or found.arguments == words


@given(st.text(alphabet="-NJt.sh =1x:", max_size=30), st.text(alphabet="t.sh/ a", max_size=12))
def test_nothing_that_slurm_keeps_is_too_odd_to_be_read(line: str, command: str) -> None:
    for release in (V22, V24):
        read_submitted(job(command, line), release=release)


def test_a_line_of_another_job_with_the_same_number_is_not_believed() -> None:
    def printed(*values: str) -> str:
        return "".join(f"{value}{sacct_delimiter('m')}" for value in values) + "\n"

    def parse(text: str) -> str:
        return parse_submit_line(text, mark="m", job=job("/x/t.sh"))

    assert parse(printed("ann", "t.sh", "sbatch t.sh c\nd")) == "sbatch t.sh c\nd"
    assert parse(printed("bob", "t.sh", "sbatch t.sh")) == ""
    assert parse(printed("ann", "other", "sbatch t.sh")) == ""
    assert parse("") == parse("garbage") == parse(printed("ann", "t.sh", "a", "b")) == ""


@pytest.mark.parametrize(
    ("version", "release"), [("22.05.8", (22, 5)), ("25.11.0-0rc1", (25, 11)), ("", None), ("x", None)]
)
def test_a_release_is_year_and_month(version: str, release: tuple[int, int] | None) -> None:
    assert read_release(version) == release
