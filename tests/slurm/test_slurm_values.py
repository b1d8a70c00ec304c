"""Slurm's small values: steps, GRES, TRES; times, durations and exit codes are in test_slurm_parse.py."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm import values
from slurm.values import Gres, StepId, count_gres, parse_gres, parse_job_id, parse_step_id, parse_time, parse_tres


@pytest.mark.parametrize(
    ("text", "step"),
    [
        ("55.0", StepId(job_id=55, name="0")),
        ("55.batch", StepId(job_id=55, name="batch")),
        ("55.extern", StepId(job_id=55, name="extern")),
        ("6564055.bat+", StepId(job_id=6564055, name="batch")),
        ("55.ext+", StepId(job_id=55, name="extern")),
        ("55.BATCH", StepId(job_id=55, name="batch")),
        ("21+0.0", StepId(job_id=21, name="0", component=0)),
        ("7_3.extern", StepId(job_id=7, name="extern", element=3)),
        ("7_3+1.12", StepId(job_id=7, name="12", element=3, component=1)),
        ("55", None),
        ("55.", None),
        (".0", None),
        ("55.+", None),
        ("55.other", None),
        ("0.0", None),
        ("", None),
    ],
)
def test_steps_are_read_with_their_job_and_component(text: str, step: StepId | None) -> None:
    assert parse_step_id(text) == step


@pytest.mark.parametrize(
    ("text", "gres"),
    [
        ("gpu:h100:8(S:0-1)", [Gres(name="gpu", type="h100", count=8, sockets=(0, 1))]),
        ("gpu:8", [Gres(name="gpu", count=8)]),
        ("gpu", [Gres(name="gpu")]),
        ("gpu:h100", [Gres(name="gpu", type="h100")]),
        ("gpu:a100:4(S:0,2-3),gpu:h100:4", [("gpu", "a100", 4, (0, 2, 3)), ("gpu", "h100", 4, ())]),
        ("gpu:h100:0(IDX:N/A)", [Gres(name="gpu", type="h100", count=0)]),
        ("gpu:1(IDX:0,3)", [Gres(name="gpu", count=1)]),
        ("gpu:2(S:x)", [Gres(name="gpu", count=2)]),
        ("gres/gpu:h100=8", [Gres(name="gpu", type="h100", count=8)]),
        ("gres:gpu:1", [Gres(name="gpu", count=1)]),
        ("shard:2K,license_x:no_consume:3", [Gres(name="shard", count=2048), Gres(name="license_x", count=3)]),
        ("(null)", []),
        ("N/A", []),
        ("", []),
        (",,:,=3", []),
    ],
)
def test_generic_resources_are_read_in_both_spellings(text: str, gres: list[Gres | tuple[object, ...]]) -> None:
    wanted = [g if isinstance(g, Gres) else Gres(name=g[0], type=g[1], count=g[2], sockets=g[3]) for g in gres]  # type: ignore[arg-type]
    assert list(parse_gres(text)) == wanted


def test_gpus_of_several_types_are_counted_together() -> None:
    assert count_gres("gpu:a100:4,gpu:h100:4(S:0),shard:16", "gpu") == 8


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        (
            "billing=128,cpu=128,mem=500G,node=1,gres/gpu=8,gres/gpu:h100=8",
            {"billing": 128, "cpu": 128, "mem": 512000, "node": 1, "gres/gpu": 8, "gres/gpu:h100": 8},
        ),
        ("mem=512000M", {"mem": 512000}),
        ("mem=512000", {"mem": 512000}),
        ("mem=1T,fs/disk=2K", {"mem": 1024**2, "fs/disk": 2048}),
        ("billing=12.5", {"billing": 12}),
        ("cpu=,=3,mem=x,energy", {}),
        ("", {}),
    ],
)
def test_tracked_resources_are_counted_by_name_with_memory_in_mebibytes(text: str, counts: dict[str, int]) -> None:
    assert parse_tres(text) == counts


@pytest.mark.parametrize(
    "text",
    [
        "2026-W10-1T08:00:00",
        "2026-03-02T08:00+01",
        "2026-03-02 08:00:00",
        "20260302T080000",
        "2026-03-0\u0662T08:00:00",
    ],
)
def test_other_forms_of_a_time_that_python_would_read_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="2"):
        parse_time(text)


@pytest.mark.parametrize("text", ["\u0665\u0665", "\u00b2", "5 5", "+5", "5e3"])
def test_a_job_id_is_plain_digits(text: str) -> None:
    with pytest.raises(ValueError, match="not a job id"):
        parse_job_id(text)


_ODD = st.one_of(st.text(), st.text(alphabet="0123456789:-+._,=()/gpuKMGS \n\u0665\u00b2"), st.integers().map(str))


@given(text=_ODD)
def test_no_garbage_makes_a_value_raise_what_is_not_announced(text: str) -> None:
    parse_gres(text)
    parse_tres(text)
    parse_step_id(text)
    values.parse_exit_code(text)
    values.parse_duration_s(text)
    for announced in (parse_time, parse_job_id):
        try:
            announced(text)
        except ValueError:
            continue


@given(job_id=st.integers(1, 2**32 - 1), step=st.integers(0, 10**9), component=st.none() | st.integers(0, 127))
def test_a_step_comes_back_as_it_was_written(job_id: int, step: int, component: int | None) -> None:
    text = f"{job_id}{'' if component is None else f'+{component}'}.{step}"
    assert parse_step_id(text) == StepId(job_id=job_id, name=str(step), component=component)
