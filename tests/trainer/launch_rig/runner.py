"""Stands for trainer/torchrun.py: one worker per node, without torch."""

import argparse
import json
import os
import socket
import subprocess
import sys

report = os.fdopen(int(sys.argv[1]), "w", buffering=1)
report.write('{"type":"ready"}\n')
line = sys.stdin.readline()
if not line:
    sys.exit(0)
request = json.loads(line)
options = [word for word in request["argv"] if word.startswith("--")]
program = request["argv"][len(options) :]
parser = argparse.ArgumentParser(allow_abbrev=False)
parser.add_argument("--node-rank", type=int)
parser.add_argument("--nnodes")
parser.add_argument("--master-addr")
parser.add_argument("--master-port", type=int)
parser.add_argument("--rdzv-id")
known, _ = parser.parse_known_args(options)
if known.node_rank == 0:
    listener = socket.create_server((known.master_addr, known.master_port))
    peers = 0
    while peers < int(known.nnodes) - 1:  # as torchrun, it begins when all are there; the agent's knocking is none
        peers += listener.accept()[0].recv(1) == b"x"
else:
    socket.create_connection((known.master_addr, known.master_port)).send(b"x")
environment = {**os.environ, **request["environment"]}
environment |= {"MASTER_ADDR": known.master_addr, "TORCHELASTIC_RUN_ID": known.rdzv_id}
environment |= {"RANK": str(known.node_rank), "LOCAL_RANK": "0", "WORLD_SIZE": known.nnodes}
code = subprocess.Popen([sys.executable, *program], env=environment, start_new_session=True).wait()
if code:
    shown = 128 - code if code < 0 else code
    failure = {"type": "failed", "rank": known.node_rank, "local_rank": 0, "exit_code": shown, "error_file": ""}
    report.write(json.dumps(failure) + "\n")
    sys.exit(shown)
