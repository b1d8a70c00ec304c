"""Run files: what is accepted, what is refused, and that every refusal is one line naming the key."""

from __future__ import annotations

import string
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from supervisor.config import ConfigError, check_script, parse_run_file, read_run_file, render_run_file, script_of
from supervisor.execute import split_environment
from supervisor.model import (
    CheckpointSpec,
    ContainerSpec,
    LivenessSpec,
    NodesSpec,
    ProgressSpec,
    RestartSpec,
    RunSpec,
    SlurmSpec,
    StragglerSpec,
)
from supervisor.sbatch_options import option_problem

HERE = Path("/data/team/run.toml")
TOP = 'name = "llama"\ncommand = ["train.py", "--lr", "1e-4"]\nroot = "/shared/runs"\n'
NODES = "[nodes]\nmin = 2\nmax = 4\n"
GOOD = TOP + NODES
_IMAGE = "[container]\nruntime = 'apptainer'\nimage = '/x.sif'\n"
_PYXIS = "[container]\nruntime = 'pyxis'\nimage = '/x.sqsh'\n"


def refusal(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_run_file(text, path=HERE)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("run.toml: ")
    return message


def told(text: str) -> str:
    """What is wrong with a run file; empty when nothing is."""
    try:
        parse_run_file(text, path=HERE)
    except ConfigError as error:
        return str(error)
    return ""


def test_a_short_run_file_gets_the_documented_defaults() -> None:
    spec = parse_run_file(GOOD, path=HERE)
    assert spec == RunSpec(
        name="llama",
        command=("train.py", "--lr", "1e-4"),
        root=Path("/shared/runs"),
        workdir=Path("/data/team"),
        nodes=NodesSpec(min=2, max=4),
    )
    assert spec.run_dir == Path("/shared/runs/llama")


def test_variables_of_a_run_file_reach_the_launcher() -> None:
    spec = parse_run_file(TOP + "environment = ['NCCL_DEBUG=INFO', 'X=a=b', 'E=']\n" + NODES, path=HERE)
    assert split_environment(spec) == {"NCCL_DEBUG": "INFO", "X": "a=b", "E": ""}


def test_relative_paths_start_at_the_run_files_folder() -> None:
    spec = parse_run_file(GOOD.replace('"/shared/runs"', '"../runs"\nworkdir = "code"'), path=HERE)
    assert (spec.root, spec.workdir) == (Path("/data/runs"), Path("/data/team/code"))


def test_the_trainings_own_checkpoint_folder_starts_there_too() -> None:
    table = '[checkpoint]\nlayout = "auto"\ndirectory = "../out"\n'
    spec = parse_run_file(GOOD + table, path=HERE)
    assert spec.checkpoint.directory == Path("/data/out")
    assert parse_run_file(render_run_file(spec), path=HERE) == spec


def test_whole_numbers_are_taken_where_a_number_is_expected() -> None:
    assert parse_run_file(GOOD + "[checkpoint]\nevery_s = 60\n", path=HERE).checkpoint.every_s == 60.0


def test_an_unknown_key_is_refused_with_the_nearest_known_one() -> None:
    assert refusal(TOP + "[nodes]\nmin = 1\nmaximum = 3\n") == (
        'run.toml: [nodes] has no key "maximum"; did you mean "max"?'
    )


@pytest.mark.parametrize(("line", "says"), [("", None), ("elastic = true\n", True), ("elastic = false\n", False)])
def test_a_run_can_say_whether_its_data_loader_changes_size(line: str, says: bool | None) -> None:
    spec = parse_run_file(GOOD + line, path=HERE)
    assert spec.nodes.elastic is says
    assert parse_run_file(render_run_file(spec), path=HERE) == spec
    assert "elastic: true or false is expected" in refusal(GOOD + 'elastic = "yes"\n')


def test_a_key_in_the_wrong_section_is_sent_to_its_section() -> None:
    assert '"partition" belongs in [slurm]' in refusal('partition = "gpu"\n' + GOOD)


def test_an_unknown_key_like_no_other_is_refused_with_the_known_ones() -> None:
    assert "known: min, max, multiple_of, spares, procs_per_node" in refusal(GOOD + "zzzz = 1\n")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "name is missing"),
        (TOP, "nodes is missing"),
        (TOP + "[nodes]\nmax = 3\n", "[nodes] min is missing"),
        (TOP + "[nodes]\nmin = 4\nmax = 3\n", "[nodes] min (4) is more than max (3)"),
        (TOP + "[nodes]\nmin = 0\nmax = 3\n", "[nodes] min must be at least 1"),
        (TOP + "[nodes]\nmin = 5\nmax = 7\nmultiple_of = 4\n", "no multiple of 4 lies between min (5) and max (7)"),
        (GOOD + "multiple_of = 0\n", "multiple_of must be at least 1"),
        (GOOD + "spares = -1\n", "spares must be 0 or more"),
        (GOOD + "procs_per_node = 0\n", "procs_per_node must be at least 1"),
        (TOP + "[nodes]\nmin = 2\nmax = '3'\n", "[nodes] max: a whole number is expected, not a text"),
        (TOP + "[nodes]\nmin = 2\nmax = 3.5\n", "[nodes] max: a whole number is expected"),
        (TOP + "[nodes]\nmin = 2\nmax = true\n", "[nodes] max: a whole number is expected, not true or false"),
        (TOP + "[nodes]\nmin = 2\nmax = 99999999999999999999\n", "[nodes] max: 99999999999999999999 is out of range"),
        ('nodes = 3\nname = "a"\n', "nodes must be a table"),
        (GOOD.replace('"llama"', '"a/b"'), "letters, digits, dot, dash and underscore"),
        (GOOD.replace('"llama"', '"../up"'), "letters, digits, dot, dash and underscore"),
        (GOOD.replace('"llama"', '""'), "letters, digits, dot, dash and underscore"),
        (GOOD.replace('"llama"', "7"), "name: a text in quotes is expected"),
        (GOOD.replace('["train.py", "--lr", "1e-4"]', "[]"), "command is empty"),
        (GOOD.replace('["train.py", "--lr", "1e-4"]', '"train.py"'), "command: a list is expected"),
        (GOOD.replace('["train.py", "--lr", "1e-4"]', '["train.py", 1]'), "command (in the list): a text in quotes"),
        (GOOD.replace('["train.py",', '["torchrun", "train.py",'), "torchrun itself"),
        (GOOD.replace("/shared/runs", "~/runs"), "write the path in full"),
        (GOOD.replace("/shared/runs", "$SCRATCH/runs"), "write the path in full"),
        (GOOD.replace("/shared/runs", "/shared/a\\nb"), "control characters"),
        (GOOD.replace('"/shared/runs"', "3"), "root: a path is expected"),
        (TOP + "environment = ['NCCL_DEBUG']\n" + NODES, 'environment: "NCCL_DEBUG" is no NAME=text'),
        (TOP + "environment = ['1X=2']\n" + NODES, 'environment: "1X=2" is no NAME=text'),
        (TOP + "environment = ['SLURM_JOB_ID=1']\n" + NODES, "SLURM_JOB_ID is set by the launcher or by Slurm"),
        (TOP + "environment = ['RANK=0']\n" + NODES, "RANK is set by the launcher or by Slurm"),
        (TOP + "environment = ['A=1', 'A=2']\n" + NODES, "A is given twice"),
        (TOP + 'environment = ["A=\\u001b"]\n' + NODES, "the text of A holds a control character"),
        (TOP + "environment = {A = '1'}\n" + NODES, "environment: a list is expected"),
        (GOOD + "[checkpoint]\nkeep_last = 1\n", "[checkpoint] keep_last must be at least 2"),
        (GOOD + '[checkpoint]\nlocal_dir = "scratch"\n', '[checkpoint] local_dir "scratch" is not an absolute path'),
        (GOOD + '[checkpoint]\nobject_url = "bucket/x"\n', '[checkpoint] object_url "bucket/x" is no URL'),
        (GOOD + '[checkpoint]\nobject_url = "s3://key:secret@bucket/x"\n', "credentials and options do not belong"),
        (GOOD + "[checkpoint]\nobject_keep_last = 1\n", "[checkpoint] object_keep_last must be at least 2"),
        (GOOD + "[checkpoint]\nupload_mb_per_s = -1\n", "[checkpoint] upload_mb_per_s must be 0 (no bound) or more"),
        (GOOD + "[checkpoint]\nevery_s = 0\n", "[checkpoint] every_s must be above 0"),
        (GOOD + "[checkpoint]\nevery_s = nan\n", "a finite number is expected"),
        (GOOD + '[checkpoint]\ndirectory = "out"\n', "name its layout too"),
        (GOOD + '[checkpoint]\nlayout = "torch"\n', "is none of supervisor, auto, dcp"),
        (GOOD + '[checkpoint]\nlayout = "dcp"\ndirectory = "/"\n', "the root of the file system"),
        (GOOD + '[checkpoint]\nlayout = "dcp"\ndirectory = "a\\tb"\n', "control characters"),
        (GOOD + "[progress]\npattern = 'step'\n", "must have one group"),
        (GOOD + "[progress]\npattern = '(step) (\\d+)'\n", "it has 2"),
        (GOOD + "[progress]\npattern = 'step ('\n", "is no regular expression"),
        (GOOD + f"[progress]\npattern = '({'x' * 600})'\n", "longer than 500 characters"),
        (GOOD + "[checkpoint]\nverify_on_head_max_bytes = -1\n", "must not be negative"),
        (GOOD + "[restart]\nbackoff_s = -1\n", "[restart] backoff_s must be 0 or more"),
        (GOOD + "[restart]\nbackoff_s = 20\nbackoff_max_s = 10\n", "backoff_max_s (10) is less than backoff_s (20)"),
        (GOOD + "[liveness]\nbeat_interval_s = 0\n", "[liveness] beat_interval_s must be above 0"),
        (GOOD + "[liveness]\nsuspect_after_s = 1.5\n", "one late heartbeat is no failure"),
        (GOOD + "[liveness]\ntimeout_s = 1\n", "one late heartbeat is no failure"),
        (GOOD + "[liveness]\ntimeout_s = 0\n", "[liveness] timeout_s must be above 0, not 0"),
        (GOOD + "[liveness]\ntimeout_s = -1\n", "[liveness] timeout_s must be above 0, not -1"),
        (GOOD + "[liveness]\ntimeout_s = 'soon'\n", "[liveness] timeout_s: a number is expected"),
        (GOOD + "[restart]\nstop_grace_s = -1\n", "[restart] stop_grace_s must be 0 or more"),
        (GOOD + "[restart]\nin_job = 1\n", "[restart] in_job: true or false is expected"),
        (GOOD + "[restart]\nworker_start = 'spawn'\n", '"spawn" is none of direct, torchrun, warm'),
        (GOOD + "[liveness]\ntimeout_s = 2.5\n", "timeout_s (2.5) is less than suspect_after_s (3)"),
        (GOOD + "[straggler]\naction = 'replace'\n", "needs a spare: [nodes] spares is 0"),
        (GOOD + "spares = 1\n[straggler]\naction = 'replace'\n[restart]\nin_job = false\n", "in_job = true"),
        (GOOD + "[health]\ntimeout_s = 10\n", "[health] is called [liveness]"),
        (GOOD + "[restart]\nworker_restarts = 2\n", "worker_restarts is gone: in_job = true"),
        (GOOD + "[restart]\nenvironment = ['A=1']\n", '"environment" stands below [restart]; it belongs above'),
        (GOOD + "[environment]\nA = '1'\n", 'a list is expected, environment = ["NAME=text"], above the first'),
        (GOOD + "[straggler]\nratio = 1.0\n", "[straggler] ratio must be 0 (off) or at least 1.1"),
        (GOOD + "[straggler]\nratio = -1\n", "[straggler] ratio must be 0 (off) or at least 1.1"),
        (GOOD + "[straggler]\nratio = 'x'\n", "[straggler] ratio: a number is expected"),
        (GOOD + "[straggler]\nwindow_steps = 0\n", "[straggler] window_steps must be at least 1"),
        (GOOD + "[straggler]\naction = 'kill'\n", '"kill" is none of report, replace'),
        (GOOD + "[container]\nruntime = 'docker'\n", '"docker" is none of none, pyxis, apptainer'),
        (GOOD + "[container]\nruntime = 'pyxis'\n", 'runtime = "pyxis" needs an image'),
        (GOOD + "[container]\nimage = 'x.sif'\n", 'runtime is "none": name the one'),
        (GOOD + _IMAGE + "mounts = ['data:/data']\n", '"data:/data" is no "/source:/target"'),
        (GOOD + _IMAGE + "mounts = ['/a:/b,/c:/d']\n", '"/a:/b,/c:/d" is no "/source:/target"'),
        (GOOD + _PYXIS + "options = ['--mem=0']\n", '"--mem=0" is none of pyxis'),
        (GOOD + _IMAGE + "[restart]\nworker_start = 'warm'\n", "can't be used in a container"),
        (GOOD + "[slurm]\ntime_limit = 04:00:00\n", "[slurm] time_limit: a text in quotes is expected, not a time"),
        (GOOD + '[slurm]\ntime_limit = "soon"\n', "[slurm] time_limit"),
        (GOOD + "[slurm]\ngpus_per_node = 0\n", "leave it out for none"),
        (GOOD + '[slurm]\npartition = "gpu --nodes=1"\n', "is not a partition name"),
        (GOOD + '[slurm]\naccount = "--uid=0"\n', "[slurm] account"),
        ("name = [", "not valid TOML"),
        ('name = "a"\nname = "b"\n', "line 2"),
        ('name = "a"\n\ncommand = [oops]\n', "line 3"),
        ("a = " + "[" * 10_000, "not valid TOML"),
    ],
)
def test_a_wrong_run_file_is_told_in_one_line(text: str, part: str) -> None:
    assert part in refusal(text)


def test_a_maximum_of_zero_turns_a_phases_detection_off() -> None:
    assert parse_run_file(GOOD + "[progress]\nstep_max_s = 0\n", path=HERE).progress.bounds("step") == (7.0, 0.0)


@pytest.mark.parametrize("value", ["-1", "'abc'", "nan", "inf", "true", "[]"])
@pytest.mark.parametrize("key", ["start_max_s", "step_max_s", "save_max_s", "eval_max_s", "end_max_s", "step_min_s"])
def test_a_limit_that_is_negative_or_no_number_is_refused(key: str, value: str) -> None:
    assert f"[progress] {key}" in refusal(f"{GOOD}[progress]\n{key} = {value}\n")


def test_a_limit_below_its_own_minimum_is_refused() -> None:
    assert "step_min_s (7) is more than step_max_s (2)" in refusal(f"{GOOD}[progress]\nstep_max_s = 2\n")


@pytest.mark.parametrize("limit", ["90", "90:30", "4:00:00", "2-0", "2-12:30", "2-12:30:00", "UNLIMITED", "infinite"])
def test_every_form_of_slurms_time_limit_is_taken(limit: str) -> None:
    assert parse_run_file(f'{GOOD}[slurm]\ntime_limit = "{limit}"\n', path=HERE).slurm.time_limit == limit


@pytest.mark.parametrize("value", ["-1", "65536"])
def test_a_warning_that_sbatch_cant_be_asked_for_is_refused(value: str) -> None:
    assert "[slurm] warn_before_limit_s" in refusal(f"{GOOD}[slurm]\nwarn_before_limit_s = {value}\n")


REFUSED = """
--job-name=x -Jx --comment=x --dependency=singleton -dafterok:1 --requeue --array=0-3 -a0-3 --nodes=3 -N3 --nod=3
--parsable --wait -W --output=x -ox --error=x -n4 --exclude=n1 -xn1 --nodelist=n1 -wn1 --export=ALL --uid=0 --chdir=/
--hold -H -QH --partition=gpu -pgpu --time=10 -t10 --no-kill=off -Mother --wrap=true --test-only -h -C gpu -- -
--no-k=off --priority=9 --prio=9 --nice=-5 --nic=-5 --reboot
"""
ALLOWED = """
--mem=0 --exclusive --constraint=a100 -Ca100 --reservation=x --gres=gpu:2 --cpus-per-task=4 -c4 --wait-all-nodes=1
--time-min=10 --ntasks-per-node=8 -Q --no-kill --signal=USR1@60 --nice --nice=5 --prefer=a100
"""


@pytest.mark.parametrize("option", [*REFUSED.split(), "", "--mem=0\n--uid=0"])
def test_an_option_that_would_break_supervision_is_refused(option: str) -> None:
    assert option_problem(option)


@pytest.mark.parametrize("option", ALLOWED.split())
def test_an_option_that_leaves_supervision_alone_is_taken(option: str) -> None:
    assert option_problem(option) is None


def test_a_refused_option_is_named_with_the_reason() -> None:
    message = refusal(GOOD + '[slurm]\noptions = ["--requeue"]\n')
    assert '"--requeue"' in message
    assert "the supervisor resubmits" in message


# ---------------------------------------------------------------- files


def test_a_run_file_that_is_not_there_is_told_by_its_path(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.toml: no such file"):
        read_run_file(tmp_path / "gone.toml")


def test_a_folder_in_place_of_a_run_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a regular file"):
        read_run_file(tmp_path)


def test_bytes_that_are_no_text_are_told_with_their_line(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(b'name = "a"\n# \xff\n')
    with pytest.raises(ConfigError, match="line 2: not UTF-8"):
        read_run_file(path)


def test_a_huge_run_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(b"#" * (2 * 1024 * 1024))
    with pytest.raises(ConfigError, match="larger than"):
        read_run_file(path)


def test_a_byte_order_mark_is_no_mistake(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    path = tmp_path / "run.toml"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.encode())
    assert read_run_file(path).name == "llama"


def test_a_script_that_is_not_there_is_refused_with_its_path(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(GOOD)
    with pytest.raises(ConfigError, match=f"script {tmp_path}/train.py not found"):
        read_run_file(path)


def test_a_workdir_that_is_not_there_is_refused(tmp_path: Path) -> None:
    spec = parse_run_file(TOP + f'workdir = "{tmp_path}/gone"\n' + NODES, path=HERE)
    with pytest.raises(ConfigError, match="is not a directory"):
        check_script(spec)


def test_the_script_is_the_first_word_that_ends_in_py() -> None:
    spec = parse_run_file(GOOD.replace('["train.py"', '["-m", "pkg/train.py", "other.py"'), path=HERE)
    assert script_of(spec) == Path("/data/team/pkg/train.py")
    module = parse_run_file(GOOD.replace('"train.py"', '"-m", "pkg.train"'), path=HERE)
    assert script_of(module) is None


# ---------------------------------------------------------------- properties

_words = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=20)
_names = st.text(string.ascii_letters + string.digits + "_-", min_size=1, max_size=30).filter(lambda n: n[0] != "-")
_seconds = st.floats(1, 1e6, allow_nan=False)
_paths = st.lists(_names, min_size=1, max_size=4).map(lambda parts: Path("/", *parts))
_nodes = st.tuples(st.integers(1, 100), st.integers(0, 100), st.integers(0, 5), st.none() | st.integers(1, 16)).map(
    lambda n: NodesSpec(min=n[0], max=n[0] + n[1], multiple_of=n[0], spares=n[2], procs_per_node=n[3])
)
_specs = st.builds(
    RunSpec,
    name=_names,
    command=st.lists(_words, max_size=4).map(lambda words: ("train.py", *words)),
    root=_paths,
    workdir=_paths,
    nodes=_nodes,
    slurm=st.builds(
        SlurmSpec,
        partition=st.none() | _names,
        account=st.none() | _names,
        time_limit=st.none() | st.just("2-00:00:00"),
        gpus_per_node=st.none() | st.integers(1, 8),
        options=st.lists(_names.map(lambda n: f"--constraint={n}"), max_size=3).map(tuple),
    ),
    checkpoint=st.builds(CheckpointSpec, every_s=_seconds, keep_last=st.integers(2, 9), resume_from_complete=...),
    progress=st.builds(ProgressSpec, step_max_s=st.just(0.0) | st.floats(20, 1e5)),
    restart=st.builds(RestartSpec, max_without_progress=st.integers(0, 9)),
    liveness=st.builds(LivenessSpec, timeout_s=st.floats(3, 60)),
    straggler=st.builds(StragglerSpec, ratio=st.just(0.0) | st.floats(1.1, 9), action=st.just("report")),
    container=st.just(ContainerSpec()) | st.builds(ContainerSpec, runtime=st.just("pyxis"), image=_names),
)


@settings(deadline=None)
@given(_specs)
def test_a_rendered_run_file_parses_to_the_same_spec(spec: RunSpec) -> None:
    assert parse_run_file(render_run_file(spec), path=Path("/elsewhere/other.toml")) == spec


@settings(deadline=None)
@given(st.text(max_size=200) | st.text(max_size=60).map(lambda tail: GOOD + tail))
def test_any_text_is_a_run_or_a_one_line_refusal(text: str) -> None:
    assert "\n" not in told(text)


_toml_values = st.sampled_from(
    ["1", "-1", "0", "1.5", "nan", "'x'", "[]", "['a']", "true", "{}", "{min=1}", "1979-05-27"]
)
_toml_keys = st.sampled_from(
    [
        "name",
        "command",
        "root",
        "workdir",
        "nodes",
        "slurm",
        "checkpoint",
        "progress",
        "restart",
        "liveness",
        "min",
        "max",
    ]
)


@settings(deadline=None)
@given(st.dictionaries(_toml_keys, _toml_values))
def test_any_value_under_any_key_is_a_run_or_a_one_line_refusal(raw: dict[str, str]) -> None:
    text = "".join(f"{key} = {value}\n" for key, value in raw.items())
    assert "\n" not in told(text)
