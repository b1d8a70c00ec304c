"""The control socket: who asks, what is bounded, and that no client can hold the daemon's loop."""

from __future__ import annotations

import json
import os
import select
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from supervisor import control
from supervisor.control import (
    ControlError,
    ControlServer,
    DaemonDown,
    DaemonSilent,
    Refused,
    Request,
    SocketInUse,
    ask,
    failure,
)


@contextmanager
def served(path: Path, handle: Callable[[Request], Mapping[str, Any]]) -> Iterator[ControlServer]:
    """A server that a thread drives, as the daemon's loop would."""
    is_over = threading.Event()
    with ControlServer(path) as server:

        def loop() -> None:
            while not is_over.is_set():
                server.serve(0.02, handle)

        thread = threading.Thread(target=loop)
        thread.start()
        try:
            yield server
        finally:
            is_over.set()
            thread.join()


def echo(request: Request) -> dict[str, Any]:
    return {"ok": True, "verb": request.verb, "uid": request.peer.uid, "pid": request.peer.pid}


def connected(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(5)
    sock.connect(str(path))
    return sock


def poll_until(server: ControlServer, is_done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not is_done():
        assert time.monotonic() < deadline
        server.poll(0.02)


def next_request(server: ControlServer) -> Request:
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        if requests := server.poll(0.02):
            return requests[0]
    raise AssertionError("no request arrived")


def test_the_daemon_learns_from_the_kernel_who_asks(tmp_path: Path) -> None:
    with served(tmp_path / "s", echo):
        reply = ask(tmp_path / "s", {"verb": "ping", "uid": 12345})
    assert (reply["uid"], reply["pid"]) == (os.getuid(), os.getpid())


def test_groups_of_the_peer_are_known(tmp_path: Path) -> None:
    with served(tmp_path / "s", lambda request: {"ok": True, "groups": sorted(request.peer.groups)}):
        reply = ask(tmp_path / "s", {"verb": "ping"})
    assert set(reply["groups"]) == {os.getgid(), *os.getgroups()}


def test_a_refusal_reaches_the_client_with_code_and_message(tmp_path: Path) -> None:
    with (
        served(tmp_path / "s", lambda _: failure("conflict", "run a is stopped already")),
        pytest.raises(Refused) as caught,
    ):
        ask(tmp_path / "s", {"verb": "stop", "run": "a"})
    assert (caught.value.code, caught.value.message) == ("conflict", "run a is stopped already")


def test_everyone_may_connect(tmp_path: Path) -> None:
    with ControlServer(tmp_path / "s"):
        assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o666


def test_a_socket_deep_in_folders_works(tmp_path: Path) -> None:
    path = tmp_path.joinpath(*["a-rather-long-name-of-a-folder"] * 5, "control.sock")
    with served(path, echo):
        assert ask(path, {"verb": "ping"})["ok"]


def test_no_daemon_is_told_with_how_to_start_it(tmp_path: Path) -> None:
    with pytest.raises(DaemonDown, match="supervisor daemon"):
        ask(tmp_path / "nothing", {"verb": "ping"})


def test_the_socket_of_a_dead_daemon_means_that_it_is_down(tmp_path: Path) -> None:
    dead = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    dead.bind(str(tmp_path / "s"))
    dead.close()
    with pytest.raises(DaemonDown, match="not running"):
        ask(tmp_path / "s", {"verb": "ping"})
    with served(tmp_path / "s", echo):
        assert ask(tmp_path / "s", {"verb": "ping"})["ok"]


def test_a_second_daemon_does_not_take_the_socket_of_a_living_one(tmp_path: Path) -> None:
    with served(tmp_path / "s", echo):
        with pytest.raises(SocketInUse):
            ControlServer(tmp_path / "s")
        assert ask(tmp_path / "s", {"verb": "ping"})["ok"]


def test_a_file_that_is_no_socket_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "s").write_text("precious")
    with pytest.raises(SocketInUse):
        ControlServer(tmp_path / "s")
    assert (tmp_path / "s").read_text() == "precious"


def test_a_folder_that_cannot_be_made_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ControlError, match=r"Not a directory|File exists"):
        ControlServer(tmp_path / "file/s")


def test_closing_removes_the_socket(tmp_path: Path) -> None:
    ControlServer(tmp_path / "s").close()
    assert list(tmp_path.iterdir()) == []


def test_closing_leaves_the_socket_of_a_successor(tmp_path: Path) -> None:
    first = ControlServer(tmp_path / "s")
    (tmp_path / "s").unlink()
    with ControlServer(tmp_path / "s"):
        first.close()
        assert (tmp_path / "s").is_socket()


def test_a_daemon_that_does_not_answer_is_silent_not_down(tmp_path: Path) -> None:
    with ControlServer(tmp_path / "s"), pytest.raises(DaemonSilent):
        ask(tmp_path / "s", {"verb": "ping"}, timeout_s=0.1)


@pytest.mark.parametrize(
    "line", [b"", b"hello", b"[]", b"7", b'{"run": "a"}', b'{"verb": 3}', b"\xff\xfe", b"[" * 100_000, b'{"verb": "x"']
)
def test_garbage_gets_one_line_and_the_end(tmp_path: Path, line: bytes) -> None:
    with served(tmp_path / "s", echo), connected(tmp_path / "s") as sock:
        sock.sendall(line + b"\n")
        answer = b"".join(iter(lambda: sock.recv(4096), b""))
    assert answer.count(b"\n") == 1
    assert json.loads(answer)["code"] == "bad_input"


def test_a_request_without_end_is_refused_at_the_limit(tmp_path: Path) -> None:
    with served(tmp_path / "s", echo), connected(tmp_path / "s") as sock:
        try:
            sock.sendall(b"x" * (control.MAX_LINE_BYTES + 200_000))
        except OSError:
            pass  # closed while we were still sending: refused all the same
        else:
            assert json.loads(sock.recv(4096))["code"] == "bad_input"
        assert ask(tmp_path / "s", {"verb": "ping"})["ok"]


def test_a_request_in_small_pieces_is_one_request(tmp_path: Path) -> None:
    with served(tmp_path / "s", echo), connected(tmp_path / "s") as sock:
        for byte in b'{"verb": "ping"}\n':
            sock.sendall(bytes([byte]))
        assert json.loads(sock.recv(4096))["verb"] == "ping"


def test_a_client_that_says_nothing_holds_nobody_up_and_is_dropped(tmp_path: Path) -> None:
    now = [0.0]
    with ControlServer(tmp_path / "s", clock=lambda: now[0]) as server, connected(tmp_path / "s") as mute:
        server.poll(0)
        now[0] = control.CLIENT_TIMEOUT_S + 1
        server.poll(0)
        assert mute.recv(1) == b""


def test_a_client_that_never_reads_its_answer_holds_nobody_up(tmp_path: Path) -> None:
    now = [0.0]
    with ControlServer(tmp_path / "s", clock=lambda: now[0]) as server, connected(tmp_path / "s") as deaf:
        deaf.sendall(b'{"verb": "big"}\n')
        server.answer(next_request(server), {"ok": True, "text": "x" * 5_000_000})
        started = time.monotonic()
        server.poll(0)
        assert time.monotonic() - started < 1
        now[0] = control.CLIENT_TIMEOUT_S + 1
        server.poll(0)
        assert len(b"".join(iter(lambda: deaf.recv(65536), b""))) < 5_000_000


def test_a_client_that_leaves_before_its_answer_harms_nobody(tmp_path: Path) -> None:
    with ControlServer(tmp_path / "s") as server:
        with connected(tmp_path / "s") as hasty:
            hasty.sendall(b'{"verb": "ping"}\n')
            request = next_request(server)
        server.answer(request, {"ok": True})
        server.answer(request, {"ok": True})
        server.poll(0)


def test_one_account_cannot_take_every_place(tmp_path: Path) -> None:
    with ControlServer(tmp_path / "s") as server:
        socks = [connected(tmp_path / "s") for _ in range(control.MAX_CLIENTS_PER_UID + 1)]
        poll_until(server, lambda: bool(select.select([socks[-1]], [], [], 0)[0]))
        assert json.loads(socks[-1].recv(4096))["code"] == "busy"
        for sock in socks:
            sock.close()


def test_the_loop_can_wait_on_one_descriptor(tmp_path: Path) -> None:
    with ControlServer(tmp_path / "s") as server, connected(tmp_path / "s") as sock:
        assert select.select([server.fileno()], [], [], 5)[0]
        server.poll(0)
        assert not select.select([server.fileno()], [], [], 0)[0]
        sock.sendall(b'{"verb": "ping"}\n')
        assert select.select([server.fileno()], [], [], 5)[0]
