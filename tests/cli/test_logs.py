"""Log lines: one event a line, JSON for programs, the fields that say what it is about."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator

import pytest
import structlog

from supervisor.logs import about, configure_logs


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    yield
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


def test_an_event_is_one_json_line_with_time_level_and_context() -> None:
    stream = io.StringIO()
    configure_logs(stream=stream)
    with about(run="llama", attempt=2, cycle=7):
        structlog.get_logger("x").info("attempt.submitted", job_id=5, reason="two\nlines", node=None)
    (line,) = stream.getvalue().splitlines()
    event = json.loads(line)
    assert event.pop("timestamp").endswith("Z")
    assert event == {
        "level": "info",
        "event": "attempt.submitted",
        "cycle": 7,
        "run": "llama",
        "attempt": 2,
        "job_id": 5,
        "reason": "two\nlines",
    }


def test_context_ends_with_its_block() -> None:
    stream = io.StringIO()
    configure_logs(stream=stream)
    with about(run="llama"):
        pass
    structlog.get_logger().info("cycle.finished")
    assert "run" not in json.loads(stream.getvalue())


def test_less_than_the_level_is_not_written() -> None:
    stream = io.StringIO()
    configure_logs(stream=stream, level="warning")
    structlog.get_logger().info("cycle.finished")
    structlog.get_logger().warning("node.drained")
    assert [json.loads(line)["event"] for line in stream.getvalue().splitlines()] == ["node.drained"]


def test_a_terminal_gets_keys_and_values() -> None:
    stream = io.StringIO()
    configure_logs(stream=stream, as_json=False)
    structlog.get_logger().info("node.drained", node="n1", reason="no heartbeat")
    assert 'event=node.drained node=n1 reason="no heartbeat"' in stream.getvalue()


def test_an_exception_is_one_json_line() -> None:
    stream = io.StringIO()
    configure_logs(stream=stream)
    structlog.get_logger().error("daemon.failed", exc_info=RuntimeError("boom"))
    (line,) = stream.getvalue().splitlines()
    assert "RuntimeError: boom" in json.loads(line)["exception"]


def test_a_reader_that_has_gone_away_ends_nobodys_work() -> None:
    class Gone(io.StringIO):
        def write(self, _: str) -> int:
            raise BrokenPipeError

    configure_logs(stream=Gone())
    structlog.get_logger().info("cycle.finished")
    closed = io.StringIO()
    configure_logs(stream=closed)
    closed.close()
    structlog.get_logger().info("cycle.finished")


def test_a_logger_that_was_made_earlier_obeys() -> None:
    early = structlog.get_logger("early")
    stream = io.StringIO()
    configure_logs(stream=stream)
    early.info("cycle.finished")
    assert json.loads(stream.getvalue())["event"] == "cycle.finished"
