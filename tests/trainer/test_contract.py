"""The on-disk contract: what was written reads back the same; anything else is refused by one kind of error."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.contract import (
    PHASES,
    AttemptSpec,
    CheckResult,
    ContractError,
    ExitRecord,
    LaunchReport,
    Manifest,
    ManifestFile,
    NodeBeat,
    NodeReport,
    Outcome,
    Progress,
    RunPaths,
    VerificationRecord,
    attempt_environment,
    checkpoint_name,
    is_run_name,
    parse,
    parse_checkpoint_name,
    render_json,
    write_bytes,
    write_json,
)

_TEXT = st.text(max_size=20)
_WHOLE = st.integers(min_value=-(2**63) + 1, max_value=2**63 - 1)
_NUMBER = st.floats(allow_nan=False, allow_infinity=False)
_PATHS = st.lists(st.from_regex(r"[a-z_.]{0,3}[a-z0-9]{1,8}", fullmatch=True), min_size=1, max_size=3).map("/".join)
_FILES = st.builds(
    ManifestFile,
    path=_PATHS,
    size_bytes=st.integers(min_value=0, max_value=2**62),
    xxh3_128=st.from_regex(r"[0-9a-f]{32}", fullmatch=True),
)
_CHECKS = st.builds(
    CheckResult,
    check=_TEXT,
    ok=st.none() | st.booleans(),
    detail=_TEXT,
    value=st.none() | _NUMBER,
    limit=st.none() | _NUMBER,
)
_BEATS = st.builds(NodeBeat, state=_TEXT, age_s=_NUMBER, exit_code=st.none() | _WHOLE)


def _tuple(item: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(item, max_size=3).map(tuple)


RECORDS: st.SearchStrategy[Any] = st.one_of(
    st.builds(
        AttemptSpec,
        run=_TEXT,
        attempt=_WHOLE,
        command=_tuple(_TEXT),
        nodes=_WHOLE,
        resume_from=_TEXT,
        checkpoint_every_s=_NUMBER,
        start_checks=_tuple(_TEXT),
        environment=st.dictionaries(_TEXT, _TEXT, max_size=3),
    ),
    st.builds(
        Progress,
        attempt=_WHOLE,
        step=_WHOLE,
        final_step=st.none() | _WHOLE,
        loss=st.none() | _NUMBER,
        phase=st.sampled_from(PHASES),
        limit_s=st.none() | _NUMBER,
        time=_NUMBER,
        samples=st.none() | _WHOLE,
    ),
    st.builds(
        LaunchReport,
        attempt=_WHOLE,
        job_id=_WHOLE,
        seq=_WHOLE,
        time=_NUMBER,
        host=_TEXT,
        phase=_TEXT,
        nodes=st.dictionaries(_TEXT, _BEATS, max_size=3),
        silent=_tuple(_TEXT),
    ),
    st.builds(
        ExitRecord,
        attempt=_WHOLE,
        job_id=_WHOLE,
        exit_code=_WHOLE,
        reason=_TEXT,
        node=st.none() | _TEXT,
        time=_NUMBER,
        nodes=st.dictionaries(_TEXT, st.none() | _WHOLE, max_size=3),
    ),
    st.builds(Outcome, attempt=_WHOLE, exit_code=_WHOLE, message=_TEXT, checkpoint=_TEXT),
    st.builds(
        NodeReport,
        attempt=_WHOLE,
        node=_TEXT,
        host=_TEXT,
        time=_NUMBER,
        checks=_tuple(_CHECKS),
        exit_code=st.none() | _WHOLE,
        log_tail=_TEXT,
    ),
    st.builds(
        Manifest,
        run=_TEXT,
        attempt=_WHOLE,
        step=_WHOLE,
        samples=_WHOLE,
        world_size=_WHOLE,
        time=_NUMBER,
        files=_tuple(_FILES),
    ),
    st.builds(
        VerificationRecord,
        attempt=_WHOLE,
        step=_WHOLE,
        ok=st.booleans(),
        manifest_xxh3_128=_TEXT,
        bad_files=_tuple(_TEXT),
        time=_NUMBER,
    ),
)

KINDS = (AttemptSpec, Progress, LaunchReport, ExitRecord, Outcome, NodeReport, Manifest, VerificationRecord)

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(record=RECORDS)
def test_a_record_that_was_written_reads_back_the_same(record: Any) -> None:
    assert parse(type(record), render_json(record)) == record


@given(record=RECORDS)
def test_keys_that_a_newer_writer_adds_are_ignored(record: Any) -> None:
    data = json.dumps({**json.loads(render_json(record)), "added_later": [1, {}]}).encode()
    assert parse(type(record), data) == record


@given(kind=st.sampled_from(KINDS), data=st.binary(max_size=200) | _JSON.map(lambda v: json.dumps(v).encode()))
def test_garbage_is_refused_as_a_contract_error_and_as_nothing_else(kind: type, data: bytes) -> None:
    with pytest.raises(ContractError):
        parse(kind, data)


@given(record=RECORDS, choice=st.integers(min_value=0), value=_JSON)
def test_a_field_of_any_other_shape_gives_a_record_or_a_contract_error(record: Any, choice: int, value: Any) -> None:
    raw = json.loads(render_json(record))
    name = list(raw)[choice % len(raw)]
    try:
        read = parse(type(record), json.dumps({**raw, name: value}).encode())
    except ContractError:
        return
    assert isinstance(read, type(record))


@given(record=RECORDS, cut=st.integers(min_value=0))
def test_a_record_cut_off_anywhere_is_refused(record: Any, cut: int) -> None:
    data = render_json(record)
    with pytest.raises(ContractError):
        parse(type(record), data[: cut % len(data)])


@pytest.mark.parametrize(
    "data",
    [b"", b"\xff\xfe", b"[" * 100_000, b'{"attempt":1' + b"0" * 5000 + b"}", b'{"attempt":1,"step":1,"time":1e999}'],
)
def test_hostile_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ContractError):
        parse(Progress, data)


def test_a_whole_number_too_large_for_a_float_is_refused() -> None:
    with pytest.raises(ContractError):
        parse(Progress, b'{"attempt":1,"step":1,"time":1' + b"0" * 400 + b"}")


def test_another_version_is_refused() -> None:
    record = dataclasses.replace(Outcome(attempt=1, exit_code=75), version=2)
    with pytest.raises(ContractError, match="version 2"):
        parse(Outcome, render_json(record))


@pytest.mark.parametrize("path", ["", ".", "/etc/passwd", "../x", "a/../../x", "a\0b"])
def test_a_manifest_cannot_name_a_file_outside_its_folder(path: str) -> None:
    file = ManifestFile(path=path, size_bytes=1, xxh3_128="0" * 32)
    manifest = Manifest(run="r", attempt=1, step=1, samples=1, world_size=1, time=0.0, files=(file,))
    with pytest.raises(ContractError):
        parse(Manifest, render_json(manifest))


def test_a_loss_that_is_not_a_number_reads_as_none() -> None:
    record = Progress(attempt=1, step=1, time=0.0, loss=float("nan"))
    assert parse(Progress, render_json(record)).loss is None


@given(step=st.integers(min_value=0, max_value=10**15 - 1), attempt=st.integers(min_value=0, max_value=10**9 - 1))
def test_a_checkpoint_name_reads_back(step: int, attempt: int) -> None:
    assert parse_checkpoint_name(checkpoint_name(step, attempt)) == (step, attempt)


@pytest.mark.parametrize(
    "name",
    ["latest", "step-5", "step-5.a", "step--5.a1", "step-5.a1.tmp", "step-5.a1\n", "step-05.a1", "step-٣.a1", ""],
)
def test_other_names_are_no_checkpoints(name: str) -> None:
    assert parse_checkpoint_name(name) is None


@pytest.mark.parametrize("name", ["", ".hidden", "-rf", "a/b", "a..b", "a b", "x" * 101, "run\n"])
def test_names_that_could_leave_the_run_directory_are_no_run_names(name: str) -> None:
    assert not is_run_name(name)


def test_writing_replaces_the_whole_file_and_leaves_no_other_behind(tmp_path: Path) -> None:
    target = tmp_path / "new" / "record.json"
    write_json(target, Outcome(attempt=1, exit_code=75, message="x" * 1000))
    write_json(target, Outcome(attempt=2, exit_code=75))
    assert parse(Outcome, target.read_bytes()).attempt == 2
    assert [entry.name for entry in target.parent.iterdir()] == ["record.json"]


def test_a_failed_write_keeps_the_old_content(tmp_path: Path) -> None:
    target = tmp_path / "record.json"
    write_bytes(target, b"old")
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        write_bytes(tmp_path / "folder", b"new")  # a folder can't be replaced by a file
    assert target.read_bytes() == b"old"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["folder", "record.json"]


def test_the_environment_names_the_attempt(tmp_path: Path) -> None:
    spec = AttemptSpec(run="gpt", attempt=3, command=("train",), nodes=2, resume_from="/c/step-5.a2", resume_step=5)
    environment = attempt_environment(spec, tmp_path)
    assert environment["SUPERVISOR_ATTEMPT"] == "3"
    assert environment["SUPERVISOR_RESUME_FROM"] == "/c/step-5.a2"
    assert environment["SUPERVISOR_CHECKPOINT_EVERY_S"] == "600"


def test_each_file_of_a_run_has_its_place(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    assert paths.checkpoint(5, 2) == tmp_path / "checkpoints" / "step-5.a2"
    assert paths.progress(2) == tmp_path / "progress" / "a2.json"
    named = [paths.attempt_spec(1), paths.launch_report(1), paths.exit_record(1), paths.outcome(1), paths.logs(1)]
    assert {path.parent for path in named} == {paths.attempt_dir(1)}
    assert paths.node_report(1, "n1").name == "n1.json"
