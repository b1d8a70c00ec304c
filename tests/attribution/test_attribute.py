"""Situations from public bug reports, and the cause that a person would name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm.types import JobRecord, JobState
from supervisor.attribution.attribute import attribute
from supervisor.model import Cause, RunView
from trainer.contract import ExitRecord, NodeReport


def report(node: str, text: str = "", *, code: int | None = 1) -> NodeReport:
    return NodeReport(attempt=1, node=node, host=node, time=1.0, exit_code=code, log_tail=text)


def attribute_logs(
    logs: dict[str, str], *, job_log: str = "", codes: dict[str, int | None] | None = None, named: str | None = None
) -> Cause:
    """The cause for node logs; `codes` as the launcher recorded them, `named` the node that it names."""
    record = ExitRecord(attempt=1, job_id=1, exit_code=1, reason="it failed", time=1.0, node=named, nodes=codes or {})
    reports = tuple(report(node, text) for node, text in logs.items())
    return attribute(RunView(attempt=1, exit=record, node_reports=reports, log_tail=job_log), None)


TRACEBACK = """\
[rank0]: Traceback (most recent call last):
[rank0]:   File "/w/train.py", line 12, in <module>
[rank0]:     main()
[rank0]:   File "/w/train.py", line 88, in step
[rank0]:     raise ValueError("batch size 3 not divisible by 2")
[rank0]: ValueError: batch size 3 not divisible by 2
"""
TIMEOUT = (
    "[rank{rank}]:[E302 16:48:25 ProcessGroupNCCL.cpp:683] [PG ID 0 PG GUID 0(default_pg) Rank {rank}] Watchdog caught "
    "collective operation timeout: WorkNCCL(SeqNum=1580, OpType=ALLREDUCE, NumelIn=80, NumelOut=80, "
    "Timeout(ms)=600000) ran for 600096 milliseconds before timing out.\n"
)
PEER = "[rank1]: RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:5200\n"
SIGTERM_BLOCK = "  exitcode  : -15 (pid: 4734)\n  traceback : Signal 15 (SIGTERM) received by PID 4734\n"


def test_a_traceback_with_peers_torn_down_is_the_program_and_blames_no_node() -> None:
    cause = attribute_logs({"n1": TRACEBACK, "n2": SIGTERM_BLOCK})
    assert cause.kind == "python_traceback"
    assert "ValueError: batch size 3 not divisible by 2 (train.py:88)" in cause.sentence
    assert not cause.blames_node
    assert cause.is_curable


def test_the_same_exception_on_all_nodes_names_none() -> None:
    cause = attribute_logs({"n1": TRACEBACK, "n2": TRACEBACK.replace("rank0", "rank2")})
    assert (cause.kind, cause.node) == ("python_traceback", None)


def test_interleaved_ranks_keep_their_own_tracebacks() -> None:
    other = TRACEBACK.replace("rank0", "rank1").replace("ValueError: batch", "KeyError: batch")
    mixed = "".join(a + b for a, b in zip(TRACEBACK.splitlines(True), other.splitlines(True), strict=True))
    cause = attribute_logs({"n1": mixed})
    assert {line.partition(": ")[2] for line in cause.evidence} == {
        "ValueError: batch size 3 not divisible by 2 (train.py:88)",
        "KeyError: batch size 3 not divisible by 2 (train.py:88)",
    }


def test_torchrun_s_own_traceback_is_second_hand() -> None:
    agent = (
        "Traceback (most recent call last):\n"
        '  File "/venv/lib/run.py", line 9, in main\n'
        "    run()\n"
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
    )
    assert attribute_logs({"n1": agent + TRACEBACK}).sentence.count("ChildFailedError") == 0
    assert attribute_logs({"n1": agent}).kind == "unknown"


def test_an_ecc_error_beats_the_time_outs_that_follow_it() -> None:
    cause = attribute_logs(
        {
            "n1": TIMEOUT.format(rank=3),
            "n2": "[rank11]: RuntimeError: CUDA error: uncorrectable ECC error encountered\n",
        }
    )
    assert (cause.kind, cause.node, cause.blames_node) == ("gpu", "n2", True)
    assert "rank" not in cause.sentence.partition(":")[0]


def test_an_xid_that_needs_a_reset_is_hardware_and_one_of_the_program_is_not() -> None:
    kernel = "kernel: NVRM: Xid (PCI:0000:c6:00): {}, pid=1, name=python, text\n"
    assert attribute_logs({"n1": TRACEBACK + kernel.format(79)}).blames_node
    assert attribute_logs({"n1": TRACEBACK + kernel.format(31)}).kind == "python_traceback"


def test_a_busy_gpu_is_hardware_only_with_the_kernel_s_word() -> None:
    busy = "RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable\n"
    reset = (
        "kernel: NVRM: nvAssertOkFailedNoLog: Assertion failed: Reset required [NV_ERR_RESET_REQUIRED] (0x00000062)\n"
    )
    alone, both = attribute_logs({"n1": busy}), attribute_logs({"n1": busy + reset})
    assert (alone.kind, alone.blames_node) == ("leftover_process", False)
    assert (both.kind, both.blames_node) == ("gpu", True)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB", "gpu_memory"),
        (
            (
                "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 112.00 MiB. GPU 2 has a total "
                "capacty of 15.78 GiB of which 27.19 MiB is free. Process 307065 has 15.75 GiB memory in use."
            ),
            "leftover_process",
        ),
        (
            (
                "torch.OutOfMemoryError: CUDA out of memory. Including non-PyTorch memory, this process has 21.24 GiB "
                "memory in use."
            ),
            "gpu_memory",
        ),
    ],
)
def test_gpu_memory_is_the_program_s_matter_unless_somebody_else_holds_it(text: str, kind: str) -> None:
    assert attribute_logs({"n1": text}).kind == kind


@pytest.mark.parametrize(
    "text",
    [
        "slurmstepd: error: Detected 2 oom-kill event(s) in step 375.batch cgroup.",
        "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=376.0. Some of your processes may have been killed",
        "slurmstepd: error: Detected 1 oom_kill event in StepId=377.0. Some of the step tasks have been OOM Killed.",
        "[2026-03-02T10:00:00.123] error: Detected 2 oom_kill events in StepId=378.0. Some of the step tasks",
        "srun: error: node-01: task 4: Out Of Memory",
    ],
)
def test_host_memory_in_every_form_that_slurm_gave_it(text: str) -> None:
    cause = attribute_logs({}, job_log=text + "\n" + PEER)
    assert (cause.kind, cause.blames_node) == ("host_memory", False)
    assert cause.node == ("node-01" if "node-01" in text else None)


def test_slurm_s_own_word_for_memory_counts() -> None:
    job = JobRecord(job_id=7, state=JobState.OUT_OF_MEMORY, raw_state="OUT_OF_MEMORY")
    assert attribute(RunView(attempt=1, node_reports=(report("n1", PEER),)), job).kind == "host_memory"


@pytest.mark.parametrize(
    ("text", "kind", "is_curable"),
    [
        ("OSError: [Errno 116] Stale file handle: '/lus/data/0001'", "filesystem", True),
        ("OSError: [Errno 108] Cannot send after transport endpoint shutdown", "filesystem", True),
        ("OSError: [Errno 107] Transport endpoint is not connected: '/mnt/x'", "filesystem", True),
        ("OSError: [Errno 28] No space left on device", "disk_full", False),
        ("OSError: [Errno 28] No space left on device: '/lus/run/checkpoints/x'", "disk_full", False),
        ("OSError: [Errno 28] No space left on device: '/tmp/torch/x'", "disk_full", True),
        ("OSError: [Errno 122] Disk quota exceeded", "disk_full", False),
        ("OSError: [Errno 30] Read-only file system", "filesystem", True),
        ("OSError: [Errno 5] Input/output error", "filesystem", True),
        (
            "RuntimeError: [enforce fail at inline_container.cc:471] . PytorchStreamWriter failed writing",
            "filesystem",
            True,
        ),
    ],
)
def test_file_system_failures_are_known_by_their_words(text: str, kind: str, is_curable: bool) -> None:
    traceback = f'Traceback (most recent call last):\n  File "/w/train.py", line 3, in save\n    save()\n{text} file\n'
    cause = attribute_logs({"n1": traceback.replace(" file\n", "\n") if "Pytorch" not in text else traceback})
    assert (cause.kind, cause.is_curable) == (kind, is_curable)


def test_a_full_disk_of_one_node_among_several_is_cured_by_other_nodes() -> None:
    full, quota = "OSError: [Errno 28] No space left on device\n", "OSError: [Errno 122] Disk quota exceeded\n"
    assert attribute_logs({"n1": full, "n2": PEER}).is_curable
    assert not attribute_logs({"n1": full, "n2": full}).is_curable
    assert not attribute_logs({"n1": full}).is_curable
    assert not attribute_logs({"n1": quota, "n2": PEER}).is_curable


# ---------------------------------------------------------------- networks and collectives


@pytest.mark.parametrize(
    "text",
    [
        (
            "node-b:5776:5902 [0] transport/net_ib.cc:1296 NCCL WARN NET/IB : Got completion from peer 10.0.0.5<33092> "
            "with error 12, opcode 0, len 0, vendor err 129 (Recv)"
        ),
        (
            "node-b:3468:3905 [4] ib_plugin.c:1615 NCCL WARN NET/IB : Got completion from peer 10.0.0.6<54862> with "
            "status=12 opcode=32616 len=0 vendor err 129 (Recv) localGid fd00::1 remoteGidsfd00::2"
        ),
        "node-b:1:2 [0] NCCL WARN NET/IB: Got completion from peer 10.0.0.7<1> with status=IBV_WC_RETRY_EXC_ERR(12)",
        "NET/IBP:Got completion from peer 10.0.0.7<36315> with status=12 opcode=32698 len=32696 vendor err 129 (Send)",
    ],
)
def test_completion_errors_of_all_forms_are_the_network_and_condemn_nobody(text: str) -> None:
    cause = attribute_logs({}, job_log=PEER + TIMEOUT.format(rank=1) + text)
    assert (cause.kind, cause.blames_node) == ("network", False)
    assert cause.node == ("node-b" if text.startswith("node-b") else None)


def test_a_flushed_completion_is_a_consequence_and_a_protection_error_is_not() -> None:
    flushed = "n1:1:2 [0] NCCL WARN NET/IB : Got completion with error 5, opcode 0, len 1, vendor err 244 (Recv)"
    protection = "n2:1:2 [0] NCCL WARN NET/IB : Got completion with error 4, opcode 8983, len 0, vendor err 81"
    assert attribute_logs({"n1": flushed}).kind == "peer_lost"
    cause = attribute_logs({"n1": flushed, "n2": protection})
    assert (cause.kind, cause.node) == ("network", "n2")


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (
            (
                "[rank5]:[E626 16:48:25.4 ProcessGroupNCCL.cpp:2268] [PG ID 0 PG GUID 0(default_pg) Rank 5]  failure "
                "detected by watchdog at work sequence id: 120049 PG status: last enqueued work: 120051"
            ),
            "collective_timeout",
        ),
        (
            (
                "[rank1]:[F ProcessGroupNCCL.cpp:1169] [PG 0 Rank 1] ProcessGroupNCCL's watchdog got stuck for 600 "
                "seconds without making progress in monitoring enqueued collectives."
            ),
            "hang",
        ),
        ("[rank1]:[E ProcessGroupNCCL.cpp:1316] [PG 0 Rank 1] Heartbeat monitor timed out! Process will be", "hang"),
    ],
)
def test_watchdog_lines_are_time_outs_or_hangs_and_blame_no_hardware(text: str, kind: str) -> None:
    cause = attribute_logs({"n1": text})
    assert (cause.kind, cause.blames_node) == (kind, False)


def test_of_a_collective_that_timed_out_the_silent_node_is_named_not_the_first_that_complains() -> None:
    logs = {f"n{i}": TIMEOUT.format(rank=i) for i in range(1, 4)}
    codes: dict[str, int | None] = {"n1": 1, "n2": 1, "n3": 1, "n4": None}
    cause = attribute_logs(logs, codes=codes)
    assert (cause.kind, cause.node, cause.blames_node) == ("collective_timeout", "n4", False)


def test_agents_that_lost_the_rendezvous_are_victims_of_the_host_that_is_silent() -> None:
    """TE-05"""
    text = (
        "The node 'gpu02_3427_0' has failed to send a keep-alive heartbeat to the rendezvous 'r1' due to an error "
        "of type RendezvousConnectionError."
    )
    codes: dict[str, int | None] = {"gpu01": None, "gpu02": 1, "gpu03": 1, "gpu04": 1}
    cause = attribute_logs(dict.fromkeys(("gpu02", "gpu03", "gpu04"), text), codes=codes)
    assert (cause.kind, cause.node, cause.blames_node) == ("peer_lost", "gpu01", False)


def test_victims_alone_name_nobody() -> None:
    cause = attribute_logs({"n1": PEER, "n2": PEER}, codes={"n1": 1, "n2": 1})
    assert (cause.kind, cause.node) == ("peer_lost", None)


def test_all_logs_are_read_not_only_the_last() -> None:
    logs = {f"n{i:02d}": "training...\n" for i in range(64)}
    logs["n13"] = "n13:1:2 [0] NCCL WARN NET/IB : Got completion from peer 10.0.0.5<3> with error 12, opcode 0\n" + PEER
    cause = attribute_logs(logs)
    assert (cause.kind, cause.node) == ("network", "n13")


def test_clients_that_never_reached_the_store_are_a_matter_of_the_start() -> None:
    """TE-14: of all of them it is the start, which is tried again within its bound; of one it is that one's network."""
    text = (
        "[E socket.cpp:860] [c10d] The client socket has timed out after 60s while trying to connect to 10.0.0.1:29500"
    )
    cause = attribute_logs(dict.fromkeys(("gpu02", "gpu03", "gpu04"), text))
    assert (cause.kind, cause.node, cause.blames_node, cause.is_curable) == ("rendezvous_start", None, False, True)
    alone = attribute_logs({"gpu01": "", "gpu02": "", "gpu03": text, "gpu04": ""})
    assert (alone.kind, alone.node, alone.blames_node) == ("rendezvous", "gpu03", False)


# ---------------------------------------------------------------- exits

BLOCK = """\
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-03-02_16:48:32
  host      : gpu03
  rank      : 6 (local_rank: 6)
  exitcode  : -15 (pid: 4734)
  error_file: <N/A>
  traceback : Signal 15 (SIGTERM) received by PID 4734
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-03-02_16:48:31
  host      : gpu03
  rank      : 4 (local_rank: 4)
  exitcode  : -9 (pid: 4732)
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 4732
============================================================
"""


def test_a_killed_rank_beats_the_ranks_that_its_agent_tore_down() -> None:
    cause = attribute_logs({}, job_log=BLOCK)
    assert (cause.kind, cause.node) == ("killed", "gpu03")
    assert "rank 4" in cause.sentence


def test_a_rank_that_chose_its_exit_code_beats_the_peers_that_it_left() -> None:
    block = BLOCK.replace("exitcode  : -9", "exitcode  : 42").replace("Signal 9 (SIGKILL) received by PID 4732", "none")
    cause = attribute_logs({}, job_log=PEER + block)
    assert (cause.kind, cause.node) == ("exit_code", "gpu03")
    plain = BLOCK.replace("exitcode  : -9", "exitcode  : 1").replace("Signal 9 (SIGKILL) received by PID 4732", "none")
    assert attribute_logs({}, job_log=PEER + plain).kind == "peer_lost"


def test_hosts_are_translated_to_nodes_and_strangers_name_nobody() -> None:
    hosts = {"gpu03.cluster.example": "n3", "elsewhere": None}
    for host, node in hosts.items():
        reports = (NodeReport(attempt=1, node="n3", host="gpu03.cluster.example", time=1.0),)
        log = BLOCK.replace("host      : gpu03", f"host      : {host}")
        assert attribute(RunView(attempt=1, node_reports=reports, log_tail=log), None).node == node


def test_an_abort_after_a_time_out_is_its_consequence() -> None:
    block = BLOCK.replace("exitcode  : -9", "exitcode  : -6").replace("Signal 9 (SIGKILL)", "Signal 6 (SIGABRT)")
    assert attribute_logs({"n1": TIMEOUT.format(rank=4) + block}).kind == "collective_timeout"


@pytest.mark.parametrize(
    ("code", "kind", "is_curable"),
    [(127, "configuration", False), (126, "configuration", False), (137, "killed", True), (139, "crash", True)],
)
def test_exit_codes_speak_when_nothing_else_does(code: int, kind: str, is_curable: bool) -> None:
    cause = attribute(RunView(attempt=1, node_reports=(report("n1", code=code),)), None)
    assert (cause.kind, cause.is_curable) == (kind, is_curable)


@pytest.mark.parametrize(
    "text",
    [
        "slurmstepd: error: execve(): trian.py: No such file or directory",
        "python: can't open file '/w/trian.py': [Errno 2] No such file or directory",
        "bash: torchrum: command not found",
        'Traceback (most recent call last):\n  File "/w/t.py", line 1, in f\nModuleNotFoundError: No module named x',
    ],
)
def test_what_can_t_even_start_is_not_cured_by_a_restart(text: str) -> None:
    cause = attribute_logs({"n1": text, "n2": text})
    assert (cause.kind, cause.is_curable) == ("configuration", False)


def test_where_torch_is_missing_the_sentence_names_the_cure() -> None:
    text = 'Traceback (most recent call last):\n  File "/w/t.py", line 1, in f\nModuleNotFoundError: No module named {}'
    assert "pip install" in attribute_logs({"n1": text.format("'torch'")}).sentence
    assert "pip install" not in attribute_logs({"n1": text.format("'torchlike'")}).sentence


def test_without_any_sign_the_cause_is_unknown_and_says_what_was_recorded() -> None:
    assert attribute_logs({"n1": "all is well\n"}) == Cause(kind="unknown", sentence="it failed")
    assert attribute(RunView(attempt=1), None).kind == "unknown"


@given(st.text(), st.lists(st.sampled_from([TRACEBACK, PEER, BLOCK, TIMEOUT, "\n", "[rank", "Failures:", "[0]:"])))
def test_no_text_breaks_it(noise: str, parts: list[str]) -> None:
    text = noise.join(parts) + noise
    cause = attribute(RunView(attempt=1, node_reports=(report("n1", text),), log_tail=text), None)
    assert cause.sentence


def test_a_launcher_that_was_killed_is_named_and_not_the_agents_that_slurm_ended_after_it() -> None:
    job = JobRecord(job_id=7, state=JobState.FAILED, raw_state="FAILED", exit_code=0, exit_signal=9)
    reports = (report("n1", code=143), report("n2", code=143))
    cause = attribute(RunView(attempt=1, node_reports=reports), job)
    assert cause.sentence == "the launcher, on the batch host: SIGKILL"
    assert cause.is_curable
    assert not cause.blames_node
