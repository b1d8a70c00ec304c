"""Containers around the training: options for srun (pyxis with enroot), or a prefix of each rank's program. Pure.

With pyxis the node's agent and all its ranks run in the image, so the image needs Python 3.11 as `python3`. With
apptainer (or singularity, which takes the same words) the agent stays outside and each rank's program gets a prefix.
Of this package only the folder `trainer` is mounted, under a folder of its own: beside it lie the packages of the
service's environment, and they would hide the image's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

PACKAGE_TARGET = "/opt/slurm-supervisor"  # in the image; holds the folder `trainer`
IMAGE_PYTHON = "python3"

_IMAGE_OPTION = "--container-image="
_PATH = re.compile(r"^/[^\s,:\"'`$\\\x00-\x1f\x7f]*\Z")
_FLAGS = re.compile(r"^[a-z][a-z+-]{0,40}\Z")
_IMAGE = re.compile(r"^[^\s\-\"'`$\\,\x00-\x1f\x7f][^\s\"'`$\\,\x00-\x1f\x7f]*\Z")
_OWN_PYXIS = ("--container-image", "--container-mounts")
# The agent in the image finds this package, behind what the image has on its path.
_START = 'PYTHONPATH="${PYTHONPATH:+$PYTHONPATH:}$0"; export PYTHONPATH; exec "$@"'


class ContainerRefused(ValueError):
    """The run file's container can't be asked for; the message says what is wrong and what to do."""


def srun_options(
    *,
    runtime: str,
    image: str,
    mounts: Sequence[str] = (),
    options: Sequence[str] = (),
    workdir: str = "",
    run_dir: str,
    package: str,
) -> tuple[str, ...]:
    """Options of the training step's srun: pyxis's; none for another runtime.

    `mounts`: "/source:/target" or "/source:/target:flags" each. The run directory, the working directory and this
    package (`package`: its folder, named `trainer`) are mounted besides. Raises ContainerRefused.
    """
    if runtime != "pyxis":
        return ()
    _check_image(image)
    for option in options:
        name = option.partition("=")[0]
        if not name.startswith(("--container-", "--no-container-")):
            raise ContainerRefused(f'[container] options: "{option}" is none of pyxis: they begin with --container-')
        if name in _OWN_PYXIS:
            raise ContainerRefused(f"[container] options: {name} is made of image and mounts")
    binds = _binds(mounts, workdir=workdir, run_dir=run_dir, package=package)
    names = {option.partition("=")[0] for option in options}
    return (
        f"{_IMAGE_OPTION}{image}",
        f"--container-mounts={','.join(binds)}",
        *([f"--container-workdir={workdir}"] if workdir and "--container-workdir" not in names else []),
        *options,
    )


def command_prefix(
    *,
    runtime: str,
    image: str,
    mounts: Sequence[str] = (),
    options: Sequence[str] = (),
    workdir: str = "",
    run_dir: str,
    package: str,
    has_gpus: bool,
    program: str = "apptainer",
) -> tuple[str, ...]:
    """What stands in front of each rank's program: apptainer's; nothing for another runtime.

    `program`: "apptainer", "singularity" or a path of one. Raises ContainerRefused.
    """
    if runtime != "apptainer":
        return ()
    _check_image(image)
    binds = _binds(mounts, workdir=workdir, run_dir=run_dir, package=package)
    return (
        program,
        "exec",
        *(f"--bind={bind}" for bind in (*binds, "/tmp:/tmp")),  # noqa: S108 - ranks reach their agent there
        *([f"--pwd={workdir}"] if workdir else []),
        *(["--nv"] if has_gpus else []),
        f"--env=PYTHONPATH={PACKAGE_TARGET}",
        *options,
        image,
    )


def in_image(options: Iterable[str], agent: Sequence[str]) -> list[str]:
    """The agent's command as srun is to start it: in an image with the image's Python, else as it is."""
    if not any(option.startswith(_IMAGE_OPTION) for option in options):
        return list(agent)
    return ["sh", "-c", _START, PACKAGE_TARGET, IMAGE_PYTHON, *agent[1:]]


def _check_image(image: str) -> None:
    if not _IMAGE.match(image):
        raise ContainerRefused(
            f'[container] image: "{image}" can\'t be used: it must not begin with "-" nor hold spaces, commas or quotes'
        )


def _binds(mounts: Sequence[str], *, workdir: str, run_dir: str, package: str) -> list[str]:
    for mount in mounts:
        _check_mount(mount)
    own = {"the run directory": run_dir, "the working directory": workdir, "the package's folder": package}
    for what, path in own.items():
        if path and not _PATH.match(path):
            raise ContainerRefused(
                f'{what} "{path}" can\'t be mounted into a container: it must begin with / and hold no space, comma, '
                "colon, quote, $ or backslash"
            )
    targets = {mount.split(":")[1] for mount in mounts}
    shared = [path for path in dict.fromkeys((run_dir, workdir)) if path and path not in targets]
    return [*mounts, *(f"{path}:{path}" for path in shared), f"{package}:{PACKAGE_TARGET}/trainer"]


def _check_mount(mount: str) -> None:
    source, *rest = mount.split(":")
    is_good = _PATH.match(source) and 1 <= len(rest) <= 2 and _PATH.match(rest[0])
    if not is_good or (len(rest) == 2 and not _FLAGS.match(rest[1])):
        raise ContainerRefused(
            f'[container] mounts: "{mount}" is no "/source:/target" or "/source:/target:flags"; paths hold no space, '
            "comma, colon, quote, $ or backslash"
        )
