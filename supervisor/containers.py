"""The container of a run file, as the launcher is told of it: options of srun, what stands before each rank. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from supervisor.model import RunSpec
from supervisor.tomlfile import Problem, has_control, one_line, shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrapping:
    """What puts the ranks into a container; both empty where there is none."""

    srun_options: tuple[str, ...] = ()
    command_prefix: tuple[str, ...] = ()


def wrap(spec: RunSpec, *, pythonpath: str = "") -> Wrapping:
    """How a run's ranks are put into its container. Raises trainer.container.ContainerRefused (a ValueError).

    `pythonpath`: where the nodes find this project's packages, where they are not installed for the interpreter.
    """
    container = spec.container
    if container.runtime == "none":
        return Wrapping()
    import trainer.container  # only a run file that asks for one pays for it

    first = next((part for part in pythonpath.split(":") if part), "")
    package = str(Path(first, "trainer")) if first else str(Path(trainer.container.__file__).parent)
    return Wrapping(
        srun_options=trainer.container.srun_options(
            runtime=container.runtime,
            image=container.image,
            mounts=container.mounts,
            options=container.options,
            workdir=str(spec.workdir),
            run_dir=str(spec.run_dir),
            package=package,
        ),
        command_prefix=trainer.container.command_prefix(
            runtime=container.runtime,
            image=container.image,
            mounts=container.mounts,
            options=container.options,
            workdir=str(spec.workdir),
            run_dir=str(spec.run_dir),
            package=package,
            has_gpus=bool(spec.slurm.gpus_per_node),
        ),
    )


def container_problems(spec: RunSpec) -> Iterator[Problem]:
    """What is wrong with the container of a run file."""
    container = spec.container
    is_wanted = container.runtime != "none"
    yield is_wanted and not container.image, f'[container] runtime = "{container.runtime}" needs an image'
    is_idle = bool(container.image or container.mounts or container.options) and not is_wanted
    yield is_idle, '[container] runtime is "none": name the one that is to be used, pyxis or apptainer'
    words = (("image", container.image), *(("mounts", m) for m in container.mounts))
    for key, word in (*words, *(("options", o) for o in container.options)):
        yield has_control(word), f'[container] {key}: "{shown(word)}" holds a control character'
    yield (
        is_wanted and spec.restart.worker_start == "warm",
        '[restart] worker_start = "warm" can\'t be used in a container: its workers are made on the node itself',
    )
    try:
        wrap(spec)
    except ValueError as error:
        yield True, one_line(str(error))


def has_own_checks(spec: RunSpec) -> bool:
    """False where the nodes can't run the host probes: the agent is in an image, which does not hold them."""
    return spec.nodes.start_checks and spec.container.runtime != "pyxis"
