"""sbatch's command line, variables and script lines: read as sbatch 22.05 read the same words."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from slurm import sbatch_line as line
from slurm.sbatch_line import BadSubmission, CommandLine, Directives, Effective, NodeCount
from slurm.sbatch_options import OPTIONS, Takes


def read(*words: str) -> tuple[str, ...]:
    return line.parse_command_line(words).options


def wanted(*words: str, script: str = "", env: dict[str, str] | None = None) -> Effective:
    directives = line.parse_directives("#!/bin/sh\n" + script)
    return line.effective(line.parse_command_line(words), line.read_variables(env or {}), directives)


# ---------------------------------------------------------------- words


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (("--nodes=2",), ("--nodes=2",)),
        (("--nodes", "2"), ("--nodes=2",)),
        (("-N2",), ("--nodes=2",)),
        (("-N", "2"), ("--nodes=2",)),
        (("-N=2",), ("--nodes==2",)),  # as getopt: the sign belongs to the value
        (("--node=2", "--job=a"), None),  # nodefile, nodelist, nodes
        (("--job=a", "--part", "p"), ("--job-name=a", "--partition=p")),
        (("-Hk", "-OsN4"), ("--hold", "--no-kill", "--overcommit", "--oversubscribe", "--nodes=4")),
        (("-koff",), ("--no-kill=off",)),
        (("-k", "off"), ("--no-kill",)),  # the value of an optional one stands in the same word
        (("--exclusive",), ("--exclusive",)),
        (("--exclusive=user",), ("--exclusive=user",)),
        (("--comment=", "--comment", ""), ("--comment=", "--comment=")),
        (("--comment", "--hold"), ("--comment=--hold",)),
        (("--tasks-per-node=8", "--cluster=c"), ("--ntasks-per-node=8", "--clusters=c")),
        (("--export=ALL,A=b=c",), ("--export=ALL,A=b=c",)),
        (("--container-image", "nv#torch"), ("--container-image=nv#torch",)),
        (("--site-option=3",), ("--site-option=3",)),  # of a plugin that is not known
        (("--res=r",), ("--reservation=r",)),  # ambiguous in 24.11 alone
        (("--container=x",), ("--container=x",)),
    ],
)
def test_options_are_found_as_getopt_finds_them(words: tuple[str, ...], options: tuple[str, ...] | None) -> None:
    if options is None:
        with pytest.raises(BadSubmission, match="ambiguous"):
            read(*words)
    else:
        assert read(*words) == options


def test_every_option_is_known_by_its_whole_name_and_by_its_letter() -> None:
    for form in OPTIONS:
        value = "=x" if form.takes is Takes.VALUE else ""
        (found,) = read(f"--{form.name}{value}")
        if form.letter:
            assert read(f"-{form.letter}{value[1:]}") == (found,)


@pytest.mark.parametrize(
    ("words", "stderr"),
    [
        (("--nosuch", "ok.sh"), "sbatch: unrecognized option '--nosuch'\n"),
        (("-Y", "ok.sh"), "sbatch: invalid option -- 'Y'\n"),
        (("--nodes",), "sbatch: option '--nodes' requires an argument\n"),
        (("-N",), "sbatch: option requires an argument -- 'N'\n"),
        (("--hold=yes",), "sbatch: option '--hold' doesn't allow an argument\n"),
    ],
)
def test_what_sbatch_cannot_read_ends_as_with_sbatch(words: tuple[str, ...], stderr: str) -> None:
    with pytest.raises(BadSubmission) as caught:
        read(*words)
    assert caught.value.stderr == f'{stderr}Try "sbatch --help" for more information\n'
    assert caught.value.exit_code == 255


def test_the_first_word_that_is_no_option_is_the_script_and_the_rest_are_its_arguments() -> None:
    found = line.parse_command_line(["-N2", "train.sh", "-N9", "--hold", "--", "x y", ""])
    assert found == CommandLine(options=("--nodes=2",), script="train.sh", arguments=("-N9", "--hold", "--", "x y", ""))
    assert line.parse_command_line(["-H", "--", "--hold"]).script == "--hold"
    assert line.parse_command_line(["-H"]).script is None
    assert line.parse_command_line(["-", "a"]).script == "-"


def test_a_question_is_answered_without_a_look_at_the_rest() -> None:
    found = line.parse_command_line(["-N2", "--help", "--nosuch", "ok.sh"])
    assert (line.effective(found).question, found.script) == ("help", None)
    assert line.effective(line.parse_command_line(["-V"])).question == "version"


# ---------------------------------------------------------------- variables


def test_sbatchs_variables_are_options_and_others_are_not() -> None:
    env = {
        "SBATCH_PARTITION": "gpu",
        "SBATCH_TIMELIMIT": "60",
        "SBATCH_MEM_PER_NODE": "10G",
        "SBATCH_REQ_SWITCH": "1",
        "SBATCH_WAIT4SWITCH": "5:00",
        "SBATCH_NO_SUCH": "x",
        "SLURM_JOB_ID": "7",
        "SLURM_CLUSTERS": "here",
        "PATH": "/bin",
    }
    assert set(line.read_variables(env)) == {
        "--partition=gpu",
        "--time=60",
        "--mem=10G",
        "--switches=1@5:00",
        "--clusters=here",
    }


@pytest.mark.parametrize(
    ("value", "is_set"),
    [("", True), ("yes", True), ("YES", True), ("1", True), ("0", False), ("no", False), ("true", False)],
)
def test_a_variable_turns_a_flag_on_by_nothing_yes_or_a_number(value: str, is_set: bool) -> None:
    assert line.read_variables({"SBATCH_OVERCOMMIT": value}) == (("--overcommit",) if is_set else ())


def test_the_command_line_wins_over_the_variables_and_these_over_the_script() -> None:
    script = "#SBATCH --partition=script --qos=script --account=script\n"
    env = {"SBATCH_PARTITION": "env", "SBATCH_QOS": "env"}
    found = wanted("--partition=line", "t.sh", script=script, env=env)
    assert (found.partition, found.qos, found.account) == ("line", "env", "script")


# ---------------------------------------------------------------- script lines


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("#SBATCH -N2 --hold\n#SBATCH\t-c 4\n", ("--nodes=2", "--hold", "--cpus-per-task=4")),
        ("#SBATCH --comment='a b' -J \"c d\"\n", ("--comment=a b", "--job-name=c d")),
        ('#SBATCH --comment=a\\ b\\"c\n', ('--comment=a b"c',)),
        ("#SBATCH -N2 # two nodes\n", ("--nodes=2",)),
        ("#SBATCH --comment=a#b -N2\n", ("--comment=a",)),  # a comment begins in the middle of a word
        ("#SBATCH --comment=a\\#b\n", ("--comment=a#b",)),
        ("#SBATCH -J\n#SBATCH name\n", ("--job-name=name",)),  # a value may stand in the next line
        ('#SBATCH --comment "" -N2\n#SBATCH -n3\n', None),
        ("#SBATCH-N2\n", ("--nodes=2",)),
        ("#SLURM -N2\n", ("--nodes=2",)),
        ("##SBATCH -N2\n #SBATCH -N3\n# SBATCH -N4\n", ()),
        ("\n  \n# a comment\n#SBATCH -N2\n", ("--nodes=2",)),
        ("true\n#SBATCH -N2\n", ()),
        (":\n#SBATCH -N2\n", ()),
        ("#SBATCH --quiet --wrap=x -v -n2\n", ("--ntasks=2",)),  # those count on the command line alone
        ("#SBATCH -n2", ("--ntasks=2",)),  # no line break at the end
    ],
)
def test_lines_of_a_script_are_read_as_sbatch_reads_them(text: str, options: tuple[str, ...] | None) -> None:
    if options is None:  # an empty pair of quotes is no word, and ends the line: -n3 becomes the comment
        options = ("--comment=-n3",)
    assert line.parse_directives(f"#!/bin/bash\n{text}").options == options


@pytest.mark.parametrize(
    ("text", "stderr", "exit_code"),
    [
        ("#SBATCH foo", "sbatch: error: Invalid directive found in batch script: foo\n", 255),
        ('#SBATCH --job-name="a', 'sbatch: fatal: quo.sh: line 2: Unmatched `"` in [--job-name="a]\n', 1),
        ("#SBATCH -N1 : -N2", "sbatch: fatal: quo.sh: line 2: Unexpected `:` in [ : -N2]\n", 1),
        (
            "#SBATCH --nosuch",
            "sbatch: unrecognized option '--nosuch'\nTry \"sbatch --help\" for more information\n",
            255,
        ),
    ],
)
def test_a_wrong_line_ends_as_with_sbatch(text: str, stderr: str, exit_code: int) -> None:
    with pytest.raises(BadSubmission) as caught:
        line.parse_directives(f"#!/bin/bash\n{text}\n", name="quo.sh")
    assert (caught.value.stderr, caught.value.exit_code) == (stderr, exit_code)


def test_lines_for_the_supervisor_are_read_by_the_same_rules_and_are_none_of_sbatchs() -> None:
    text = (
        "#!/bin/bash\n#SUPERVISE --min-nodes=2 --pattern 'step (\\\\d+)' # why\n#SBATCH -N4\n#SUPERVISED is a word\n"
        "srun x\n#SUPERVISE --restarts=1\n"
    )
    assert line.parse_directives(text) == Directives(
        options=("--nodes=4",), supervise=("--min-nodes=2", "--pattern", "step (\\d+)")
    )


# ---------------------------------------------------------------- what counts


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (("a/train.sh",), "train.sh"),
        (("--wrap=true",), "wrap"),
        ((), "sbatch"),
        (("-Jx", "train.sh"), "x"),
        (("--job-name=", "train.sh"), ""),
    ],
)
def test_a_job_is_named_as_sbatch_names_it(words: tuple[str, ...], name: str) -> None:
    assert wanted(*words).job_name == name


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("4", NodeCount(least=4, most=4)),
        ("2-4", NodeCount(least=2, most=4)),
        ("-4", NodeCount(least=1, most=4)),
        ("1k", NodeCount(least=1024, most=1024)),
        ("2,4,8", NodeCount(least=2, most=8, sizes=(2, 4, 8))),
        ("1-15:4", NodeCount(least=1, most=13, sizes=(1, 5, 9, 13))),
        ("2-4,8", NodeCount(least=2, most=8, sizes=(2, 3, 4, 8))),
    ],
)
def test_numbers_of_nodes_are_read(text: str, count: NodeCount) -> None:
    assert wanted(f"--nodes={text}", "t.sh").nodes == count
    assert wanted("t.sh").nodes is None


@pytest.mark.parametrize(
    ("words", "stderr", "exit_code"),
    [
        (("-N3-2",), "sbatch: error: Maximum node count 2 is less than minimum node count 3\n", 255),
        (("-Nx",), 'sbatch: error: "x" is not a valid node count\n', 255),
        (("-N9999999999",), 'sbatch: error: "9999999999" is not a valid node count\n', 255),
        (("-N1,999999999",), 'sbatch: error: "1,999999999" is not a valid node count\n', 255),
        (("-vQ",), "sbatch: error: don't specify both --verbose (-v) and --quiet (-Q)\n", 1),
        (("--wrap=true", "t.sh"), "sbatch: error: Script arguments not permitted with --wrap option\n", 1),
    ],
)
def test_a_conflict_ends_as_with_sbatch(words: tuple[str, ...], stderr: str, exit_code: int) -> None:
    with pytest.raises(BadSubmission) as caught:
        wanted(*words)
    assert (caught.value.stderr, caught.value.exit_code) == (stderr, exit_code)


def test_a_bad_number_of_nodes_in_the_script_is_found_though_the_command_line_overrides_it() -> None:
    with pytest.raises(BadSubmission, match="not a valid node count"):
        wanted("-N2", "t.sh", script="#SBATCH -Nmany\n")


@pytest.mark.parametrize(
    ("words", "script", "why"),
    [
        (("--array=1-3", "t.sh"), "", "arrays"),
        (("t.sh",), "#SBATCH -a 1-3\n", "arrays"),
        (("-N1", ":", "-N2", "t.sh"), "", "heterogeneous"),
        (("t.sh",), "#SBATCH -N1\n#SBATCH hetjob\n#SBATCH -N2\n", "heterogeneous"),
        (("t.sh",), "#SBATCH packjob -N2\n", "heterogeneous"),
        (("-Mother", "t.sh"), "", "other clusters"),
        (("--external",), "", "no script"),
        (("t.sh",), "#SBATCH --wait\n", "--wait"),
        (("t.sh",), "#SBATCH --test-only\n", "--test-only"),
        (("-wn1,n2", "-xn[2-4]", "t.sh"), "", "n2: asked for"),
        (("-N1", "-wn1,n2", "t.sh"), "", "names 2 nodes, and --nodes allows 1"),
        (("-N1-2", "t.sh"), "#SBATCH -w n[1-3]\n", "names 3 nodes, and --nodes allows 2"),
    ],
)
def test_what_cannot_be_supervised_is_refused_with_a_reason(words: tuple[str, ...], script: str, why: str) -> None:
    refused = line.refusal(wanted(*words, script=script))
    assert refused is not None
    assert why in refused


def test_an_ordinary_submission_is_not_refused() -> None:
    found = wanted("-N2", "--wait", "-wn1", "-xn2", "--parsable", "t.sh", ":", script="#SBATCH --time=60\n")
    assert line.refusal(found) is None
    assert (found.is_wait, found.is_parsable) == (True, True)


def test_options_about_this_one_call_are_not_kept_for_the_next_submission() -> None:
    found = wanted("-N2", "--wait", "--parsable", "-Q", "--hold", "t.sh", env={"SBATCH_QOS": "high"})
    assert found.submit_options == ("--qos=high", "--nodes=2", "--hold")


@pytest.mark.parametrize(
    ("words", "is_wanted"), [(("--no-requeue", "--requeue"), True), (("--requeue", "--no-requeue"), False), ((), None)]
)
def test_of_requeue_and_no_requeue_the_last_counts(words: tuple[str, ...], is_wanted: bool | None) -> None:
    assert wanted(*words).is_requeue_wanted is is_wanted


# ---------------------------------------------------------------- the script


@pytest.mark.parametrize(
    ("data", "stderr"),
    [
        (b"", "sbatch: error: Batch script is empty!\n"),
        (b"  \n\t\n", "sbatch: error: Batch script contains only whitespace!\n"),
        (
            b"\n#!/bin/sh\n",
            (
                "sbatch: error: This does not look like a batch script.  The first\n"
                "sbatch: error: line must start with #! followed by the path to an interpreter.\n"
                "sbatch: error: For instance: #!/bin/sh\n"
            ),
        ),
        (
            b"#!/bin/sh\necho \0\r\n",
            (
                "sbatch: error: The Slurm controller does not allow scripts that\n"
                "sbatch: error: contain a NULL character '\\0'.\n"
            ),
        ),
        (
            b"#!/bin/sh\ntrue\r\n",
            (
                "sbatch: error: Batch script contains DOS line breaks (\\r\\n)\n"
                "sbatch: error: instead of expected UNIX line breaks (\\n).\n"
            ),
        ),
        (
            b"#!/bin/sh\n".ljust(line.MAX_SCRIPT_BYTES, b"#"),
            "sbatch: error: Batch job submission failed: Pathname of a file, directory or other parameter too long\n",
        ),
    ],
)
def test_a_script_that_sbatch_does_not_take_is_refused_in_its_words(data: bytes, stderr: str) -> None:
    with pytest.raises(BadSubmission) as caught:
        line.check_text(data)
    assert (caught.value.stderr, caught.value.exit_code) == (stderr, 1)


def test_a_script_that_is_no_utf8_is_taken_and_stays_as_it_is() -> None:
    data = b"#!/bin/sh\necho \xff\xc3\xa9\n"
    assert line.check_text(data).encode("utf-8", "surrogateescape") == data


# ---------------------------------------------------------------- --export


@pytest.mark.parametrize(
    ("export", "value", "x"),
    [
        (None, "ALL", "mine"),
        ("", "ALL", "mine"),
        ("all", "ALL", "mine"),
        ("ALL,X=1", "ALL,X", "1"),
        ("all,X='a,b'", "ALL,X", "'a,b'"),  # the quotes stay, as with sbatch
        ("X=1,ALL", "ALL,X", "mine"),  # the environment comes after it
        ("ALL,Y", "ALL,Y", "mine"),
        ("Y,X=2", "Y,X=2,S1,S2", "mine"),
        ("NONE", "S1,S2", "mine"),
        ("none", "S1,S2", "mine"),
        ("NIL", "NIL", "mine"),
    ],
)
def test_the_persons_export_is_kept_and_our_names_are_added(export: str | None, value: str, x: str) -> None:
    assert line.merge_export(export, {"X": "mine"}, ("S1", "S2")) == (value, {"X": x})


def test_a_variable_that_the_environment_lacks_is_set_wherever_it_stands() -> None:
    assert line.merge_export("X=1,ALL", {}, ("S",)) == ("ALL,X", {"X": "1"})


# ---------------------------------------------------------------- the log's path


@pytest.mark.parametrize(
    ("pattern", "path"),
    [
        ("slurm-%j.out", "slurm-27.out"),
        ("%4j-%12A", "0027-0000000027"),
        ("%x.%u@%N", "nm.ada@n1"),
        ("%5x", "nm"),
        ("%J.%s.%n.%t.%3t", "27.batch.0.0.000"),
        ("100%%-%j", "100%-27"),
        ("%%j", "%j"),
        ("a\\%j", "a%j"),
        ("a\\\\%j", None),
        ("%a", None),
        ("%b", None),
        ("%r", None),
        ("%z", None),
        ("end%", None),
        ("%5", None),
        ("", ""),
    ],
)
def test_the_path_of_a_log_is_the_one_that_slurmd_makes_or_is_not_known(pattern: str, path: str | None) -> None:
    found = line.render_log_path(pattern, job_id=27, job_name="nm", user="ada", node="n1")
    assert found == path


def test_a_pattern_with_a_name_that_is_not_known_yet_gives_no_path() -> None:
    assert line.render_log_path("%N.out", job_id=27, job_name="nm", user="ada", node="") is None


# ---------------------------------------------------------------- answers


def test_an_accepted_job_is_told_as_sbatch_tells_it() -> None:
    assert line.render_submitted(7) == "Submitted batch job 7\n"
    assert line.render_submitted(7, is_parsable=True) == "7\n"
    assert line.render_submitted(7, cluster="c", is_parsable=True) == "7;c\n"
    assert line.render_submitted(7, cluster="c") == "Submitted batch job 7 on cluster c\n"
    assert line.render_submitted(7, is_parsable=True, is_quiet=True) == ""


# ---------------------------------------------------------------- garbage

WORDS = st.one_of(
    st.text(max_size=12),
    st.sampled_from(["--", "-", ":", "-N", "--nodes", "--wrap", "-xn[1-", "-wn[1-9999999]", "-N1-:", "--export", "-k"]),
    st.builds(lambda form, value: f"--{form.name}={value}", st.sampled_from(OPTIONS), st.text(max_size=8)),
)
LINES = st.one_of(st.text(max_size=30), st.builds("#SBATCH {}".format, st.text(max_size=30)))


@given(words=st.lists(WORDS, max_size=6), lines=st.lists(LINES, max_size=6), env=st.text(max_size=8))
@example(words=["-N" + "9" * 5000], lines=[], env="")
@example(words=["-wn[" + "1," * 5000 + "]"], lines=[], env="9" * 5000)
def test_whatever_is_given_is_read_or_refused_and_nothing_else_happens(
    words: list[str], lines: list[str], env: str
) -> None:
    variables = line.read_variables({"SBATCH_OVERCOMMIT": env, "SBATCH_EXPORT": env, "SBATCH_REQ_SWITCH": env})
    refused: BadSubmission | None = None
    try:
        found = line.effective(line.parse_command_line(words), variables, line.parse_directives("\n".join(lines)))
    except BadSubmission as error:
        refused = error
    if refused is not None:
        assert refused.stderr.startswith("sbatch: ")
        assert refused.exit_code in (1, 255)
        return
    line.refusal(found)
    assert isinstance(found.job_name, str)
    export, _ = line.merge_export(found.export, {"A": "b"}, ("S",))
    assert export


@given(pattern=st.text(max_size=20), data=st.binary(max_size=60))
def test_any_pattern_and_any_script_is_read_or_refused(pattern: str, data: bytes) -> None:
    line.render_log_path(pattern, job_id=1, job_name="a", user="b", node="c")
    try:
        line.parse_directives(line.check_text(data))
    except BadSubmission:
        return


@given(words=st.lists(WORDS, max_size=6))
def test_what_was_read_is_read_the_same_again(words: list[str]) -> None:
    try:
        first = line.parse_command_line(words)
    except BadSubmission:
        return
    assert line.parse_command_line(first.options).options == first.options
