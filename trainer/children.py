"""How a process of ours is started beside a training: with the modules that the training has, and nobody else's.

A file `queue.py` or a folder `trainer/` in the working directory, or beside a script, must not be taken for the
standard library's or for ours. The environment is left as it is: programs of any kind may be started from there.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

_HOME = str(Path(__file__).absolute().parent.parent)
_ARCHIVE = f"python{sys.version_info.major}{sys.version_info.minor}.zip"
_RUN = (
    "import sys; sys.path[:] = sys.argv.pop(1).split({!r}); "
    "import runpy; runpy.run_module({!r}, run_name='__main__', alter_sys=True)"
)


def python_command(module: str, *arguments: str) -> list[str]:
    """What runs a module of this package, with the Python of this process."""
    places = os.pathsep.join(order_places(sys.path))
    return [sys.executable, "-P", "-c", _RUN.format(os.pathsep, module), places, *arguments]


def order_places(path: Iterable[object]) -> list[str]:
    """The places of a `sys.path`, what nothing may shadow first: the standard library, ours, what is installed."""
    places = [os.path.abspath(place) for place in path if isinstance(place, str) and place]  # noqa: PTH100 - or files
    standard = [place for place in places if _is_standard(place)]
    installed = [place for place in places if place.endswith(("site-packages", "dist-packages"))]
    return list(dict.fromkeys([*standard, _HOME, *installed, *places]))


def _is_standard(place: str) -> bool:
    homes = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    folder, name = os.path.split(place)
    return place in homes or name == _ARCHIVE or (folder in homes and name == "lib-dynload")
