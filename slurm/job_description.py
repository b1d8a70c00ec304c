"""What `scontrol -o show job N` says of one job, as a record. Pure; asked once, when a job is adopted.

The record is one line of `Key=value` in a fixed order, and values that their owner chose (name, comment, command) may
hold blanks and anything else. A line is cut at the keys that Slurm prints; a text that holds one of those keys twice
may be somebody's name that imitates a field, and is not believed.
"""

from __future__ import annotations

import re

from slurm.states import parse_job_state
from slurm.types import JobDescription, Unreadable

# Of releases 22.05 to 26.05.
_KEYS = """
JobId SLUID ArrayJobId ArrayTaskId ArrayTaskThrottle HetJobId HetJobOffset HetJobIdSet JobName UserId GroupId MCS_label
Priority Nice Account QOS WCKey JobState Reason FailedNode Dependency Requeue Restarts BatchFlag Reboot ExitCode
DerivedExitCode RunTime TimeLimit TimeMin SubmitTime EligibleTime AccrueTime ResvStartTime ResizeTime StartTime EndTime
Deadline PreemptEligibleTime PreemptTime SuspendTime SecsPreSuspend LastSchedEval Scheduler BatchFeatures Partition
AllocNode:Sid ReqNodeList ExcNodeList NodeList SchedNodeList BatchHost StepMgrEnabled NumNodes NumCPUs NumTasks
CPUs/Task ReqB:S:C:T ReqTRES AllocTRES TRES Socks/Node NtasksPerN:B:S:C CoreSpec ThreadSpec MinCPUsNode MinMemoryNode
MinMemoryCPU MinTmpDiskNode Features Prefer ClusterFeatures DelayBoot Reservation OverSubscribe Exclusive Contiguous
Licenses LicensesAlloc Network Command SubmitLine WorkDir AdminComment SystemComment Comment Extra StdErr StdIn StdOut
Container ContainerID ContainerType Power CpusPerTres MemPerTres TresBind TresFreq TresPerJob TresPerNode TresPerSocket
TresPerTask NtasksPerTRES SegmentSize OOMKillStep MailUser MailType KillOInInvalidDependent BurstBuffer
BurstBufferState Switches Switches@Wait JOB_GRES SELinuxContext Resources CPUFreqReq CompletingTime ConsolidateSegments
CronJob CrontabSpec ExpeditedRequeue FedOrigin FedViableSiblings FedActiveSiblings GresAllowTaskSharing
GresOneTaskPerSharing KillOnInvalidDependent ResvPorts SpreadJob SpreadSegments
"""
_AT_KEY = re.compile(r"(?:^| )(" + "|".join(map(re.escape, _KEYS.split())) + r")=")
_USER = re.compile(r"(.*)\(([0-9]{1,10})\)")
_NUMBER = re.compile(r"[0-9]{1,10}")
_NEXT_JOB = re.compile(r"\n(?=JobId=[0-9]+ )")
_NOTHING = frozenset({"(null)", "N/A", "None"})
_GPUS = re.compile(r"(?:gres[:/])?gpu(?:[:/][^:=,]+)?[:=]([0-9]{1,6})")
_EVIDENCE_CHARS = 400


def parse_job_description(text: str) -> JobDescription | Unreadable:
    """The first job in the text; of an array or a heterogeneous job that is one element of several."""
    line = _NEXT_JOB.split(text.strip("\n"), maxsplit=1)[0]
    fields = _split_fields(line)
    if isinstance(fields, str):
        return Unreadable(text=line[:_EVIDENCE_CHARS], why=fields)
    user = _USER.fullmatch(fields["UserId"])
    nodes = re.match(r"[0-9]{1,9}", fields["NumNodes"])
    if user is None or nodes is None or not _NUMBER.fullmatch(fields["JobId"]):
        return Unreadable(text=line[:_EVIDENCE_CHARS], why="job id, user or number of nodes can't be read")
    return _describe(fields, user=user[1], uid=int(user[2]), nodes=int(nodes[0]))


_NEEDED = ("JobId", "JobName", "UserId", "JobState", "NumNodes", "Partition", "Command", "WorkDir")


def _split_fields(line: str) -> dict[str, str] | str:
    """Values by key, or why they can't be told apart."""
    found = list(_AT_KEY.finditer(line))
    ends = [match.start() for match in found[1:]] + [len(line)]
    fields: dict[str, str] = {}
    for match, end in zip(found, ends, strict=False):  # nothing found: no field, and one end
        if match[1] in fields:
            return f"{match[1]} stands in it twice"
        value = line[match.end() : end]
        fields[match[1]] = value if match[1] == "Command" else value.strip()  # a blank at its end: an empty argument
    missing = [key for key in _NEEDED if key not in fields]
    return f"no {', '.join(missing)} in it" if missing else fields


def _describe(fields: dict[str, str], *, user: str, uid: int, nodes: int) -> JobDescription:
    def text(key: str) -> str:
        value = fields.get(key, "")
        return "" if value in _NOTHING else value

    state, flags = parse_job_state(fields["JobState"])
    tres_per_node = text("TresPerNode")
    gpus = _GPUS.search(tres_per_node)
    tasks = fields.get("NumTasks", "")
    return JobDescription(
        job_id=int(fields["JobId"]),
        name=fields["JobName"],
        user=user,
        uid=uid,
        state=state,
        flags=flags,
        raw_state=fields["JobState"],
        partition=fields["Partition"],
        account=text("Account"),
        qos=text("QOS"),
        reservation=text("Reservation"),
        dependency=text("Dependency"),
        time_limit=text("TimeLimit"),
        nodes=nodes,
        node_list=text("NodeList"),
        batch_host=text("BatchHost"),
        ntasks=int(tasks) if _NUMBER.fullmatch(tasks) else None,
        cpus_per_task=text("CPUs/Task"),
        memory_per_node=text("MinMemoryNode"),
        features=text("Features"),
        exclude=text("ExcNodeList"),
        node_list_asked=text("ReqNodeList"),
        tres_per_node=tres_per_node,
        gpus_per_node=int(gpus[1]) if gpus else None,
        work_dir=fields["WorkDir"],
        command=text("Command"),
        submit_line=text("SubmitLine"),
        stdout=text("StdOut"),
        stderr=text("StdErr"),
        comment=fields.get("Comment", ""),
        is_requeue=fields.get("Requeue") == "1",
        is_batch=fields.get("BatchFlag") != "0",
        is_array="ArrayJobId" in fields,
        is_het="HetJobId" in fields,
    )
