"""`supervisor` as another account: `python as_user.py UID ARGUMENTS`, started by root.

The interpreter may lie where only root reads. So everything is imported first, and then the rights are dropped.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys

import slurm
import supervisor
from supervisor.cli.main import main

_ELSE = (
    "encodings.idna encodings.utf_8_sig encodings.ascii encodings.latin_1 tomllib sqlite3 _strptime zoneinfo "
    "unicodedata importlib.metadata difflib textwrap locale gettext shutil subprocess tempfile"
)


def import_all() -> None:
    """Whatever a command may import when it runs."""
    for package in (slurm, supervisor):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith(("__main__", "pyslurm_child")):
                importlib.import_module(module.name)
    for name in _ELSE.split():
        importlib.import_module(name)


if __name__ == "__main__":
    import_all()
    uid = int(sys.argv[1])
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    os.umask(0o077)
    main(sys.argv[2:])
