"""What the writers agree on in one save, decided by the writer of rank 0 from their messages. Pure: no I/O here.

A save goes on only when every rank has staged its bytes, is COMPLETE only when every file is durable, and VERIFIED only
when every file was read back by another node's rank. The first failure ends it for all. What is said about a save that
has ended is answered with how it ended. A save that is held is published only when rank 0 has confirmed it. A step that
is verified already is not written again: the save is that one if every rank holds the very bytes that are there, and
has failed if not.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

_REMEMBERED = 16
_OTHER_BYTES = (
    "this attempt has saved and verified the step already, with other contents: it stays, and nothing of this save is "
    "stored (each attempt saves a step once)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tell:
    """A message for the writer of one rank."""

    rank: int
    message: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """Make the folder of the save, empty."""

    save: str
    request: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Publish:
    """Every file is durable: write the manifest."""

    save: str
    request: Mapping[str, Any]
    files: tuple[Mapping[str, Any], ...]
    manifest: str = ""  # where it was made before, for the nodes' own disks


@dataclass(frozen=True, slots=True, kw_only=True)
class Describe:
    """Every rank's files are on its node's own disk: make the manifest."""

    save: str
    request: Mapping[str, Any]
    files: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Vouch:
    """Every file was read back: write the record of it. `bad`: files that are not what the manifest says."""

    save: str
    request: Mapping[str, Any]
    bad: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Discard:
    """Remove the folder of a save that failed before it was published."""

    save: str
    request: Mapping[str, Any]


Action = Tell | Open | Describe | Publish | Vouch | Discard


@dataclass(slots=True, kw_only=True)
class _Save:
    request: Mapping[str, Any] = field(default_factory=dict)  # what rank 0 was asked for
    staged: set[int] = field(default_factory=set)
    sealed: dict[int, list[Mapping[str, Any]]] = field(default_factory=dict)
    checked: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    nearby: dict[int, list[Mapping[str, Any]]] = field(default_factory=dict)  # on the nodes' own disks
    there: list[Mapping[str, Any]] | None = None  # files of the step that is verified already
    compared: dict[int, list[Mapping[str, Any]]] = field(default_factory=dict)
    manifest: str = ""
    is_confirmed: bool = False
    is_opening: bool = False
    is_describing: bool = False
    is_publishing: bool = False
    is_published: bool = False
    is_vouching: bool = False

    @property
    def may_publish(self) -> bool:
        return self.is_confirmed or not self.request.get("is_held", False)


class Coordinator:
    """The saves in flight, as rank 0's writer knows them."""

    def __init__(self, *, world: int, node_size: int) -> None:
        self._world = world
        self._distance = node_size if node_size < world else 1
        self._saves: dict[str, _Save] = {}
        self._ended: OrderedDict[str, dict[str, Any]] = OrderedDict()

    def handle(self, rank: int, message: Mapping[str, Any]) -> list[Action]:
        """What follows from a message of a rank's writer, or of the publisher here."""
        save_id = str(message["save"])
        if save_id in self._ended:
            return [Tell(rank=rank, message=self._ended[save_id])]
        save = self._saves.setdefault(save_id, _Save())
        match message["kind"]:
            case "begun":
                return []
            case "staged":
                return self._staged(save_id, save, rank, message)
            case "opened":
                return self._opened(save_id, save, message)
            case "compared":
                return self._compared(save_id, save, rank, message)
            case "confirm":
                save.is_confirmed = True
                return [*self._describe_if_ready(save_id, save), *self._publish_if_ready(save_id, save)]
            case "orphaned" if not save.may_publish:
                return self._fail(save_id, save, "rank 0: it ended before the ranks had agreed on the step")
            case "nearby":
                save.nearby[rank] = list(message["files"])
                return self._describe_if_ready(save_id, save)
            case "described":
                save.manifest = str(message["manifest"])
                told = {"kind": "nearby", "save": save_id, "manifest": save.manifest}
                return [*self._tell_all(told), *self._publish_if_ready(save_id, save)]
            case "written":
                return [self._tell_reader(save_id, rank, message)]
            case "sealed":
                return self._sealed(save_id, save, rank, message)
            case "published":
                save.is_published = True
                told = {"kind": "complete", "save": save_id, "manifest": message["manifest"]}
                return [*self._tell_all(told), *self._vouch_if_ready(save_id, save)]
            case "checked":
                save.checked[rank] = message
                return self._vouch_if_ready(save_id, save)
            case "vouched":
                return self._end(save_id, is_complete=True, is_verified=not message["error"], error=message["error"])
            case "failed":
                return self._fail(save_id, save, f"rank {rank}: {message['error']}")
        return []

    def lose(self, rank: int) -> list[Action]:
        """What follows from the end of a rank's writer: a save that still needs it has failed."""
        actions: list[Action] = []
        for save_id, save in list(self._saves.items()):
            if rank not in save.checked:
                actions += self._fail(save_id, save, f"rank {rank}: its writer ended in the middle of the save")
        return actions

    def reader_of(self, rank: int) -> int:
        """The rank that reads back what `rank` wrote: of another node where there is one."""
        return (rank + self._distance) % self._world

    def _staged(self, save_id: str, save: _Save, rank: int, message: Mapping[str, Any]) -> list[Action]:
        save.staged.add(rank)
        if rank == 0:
            save.request = message["request"]
        if len(save.staged) < self._world or save.is_opening:
            return []
        save.is_opening = True
        return [Open(save=save_id, request=save.request)]

    def _opened(self, save_id: str, save: _Save, message: Mapping[str, Any]) -> list[Action]:
        save.there = message["there"]
        if save.there is not None:
            return self._tell_all({"kind": "compare", "save": save_id})
        return self._tell_all({"kind": "open", "save": save_id, "path": message["path"]})

    def _compared(self, save_id: str, save: _Save, rank: int, message: Mapping[str, Any]) -> list[Action]:
        save.compared[rank] = list(message["files"])
        if len(save.compared) < self._world or save.there is None:
            return []
        if _all_files(save.compared) == _all_files({0: save.there}):
            return self._end(save_id, is_complete=True, is_verified=True, error="")
        return self._fail(save_id, save, _OTHER_BYTES)

    def _sealed(self, save_id: str, save: _Save, rank: int, message: Mapping[str, Any]) -> list[Action]:
        save.sealed[rank] = list(message["files"])
        return [self._tell_reader(save_id, rank, message), *self._publish_if_ready(save_id, save)]

    def _describe_if_ready(self, save_id: str, save: _Save) -> list[Action]:
        if len(save.nearby) < self._world or save.is_describing or save.is_publishing or not save.may_publish:
            return []
        save.is_describing = True
        return [Describe(save=save_id, request=save.request, files=_all_files(save.nearby))]

    def _publish_if_ready(self, save_id: str, save: _Save) -> list[Action]:
        is_described = bool(save.manifest) or not save.is_describing  # both tiers have the same manifest
        if len(save.sealed) < self._world or save.is_publishing or not is_described or not save.may_publish:
            return []
        save.is_publishing = True
        files = _all_files(save.sealed)
        manifest = save.manifest if files == _all_files(save.nearby) else ""
        return [Publish(save=save_id, request=save.request, files=files, manifest=manifest)]

    def _vouch_if_ready(self, save_id: str, save: _Save) -> list[Action]:
        if not save.is_published or len(save.checked) < self._world or save.is_vouching:
            return []
        bad = [problem for found in save.checked.values() for problem in found["bad"]]
        unknown = [problem for found in save.checked.values() for problem in found["unknown"]]
        if unknown and not bad:
            return self._end(save_id, is_complete=True, is_verified=False, error=_list(unknown))
        save.is_vouching = True
        return [Vouch(save=save_id, request=save.request, bad=tuple(bad))]

    def _fail(self, save_id: str, save: _Save, error: str) -> list[Action]:
        # Once it is published it stays: COMPLETE, and not vouched for.
        actions = self._end(save_id, is_complete=save.is_published, is_verified=False, error=error)
        if save.is_opening and not save.is_published and save.there is None:
            actions.append(Discard(save=save_id, request=save.request))
        return actions

    def _end(self, save_id: str, *, is_complete: bool, is_verified: bool, error: str) -> list[Action]:
        del self._saves[save_id]
        told = {
            "kind": "ended",
            "save": save_id,
            "is_complete": is_complete,
            "is_verified": is_verified,
            "error": error,
        }
        self._ended[save_id] = told
        while len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)
        return self._tell_all(told)

    def _tell_all(self, message: dict[str, Any]) -> list[Action]:
        return [Tell(rank=rank, message=message) for rank in range(self._world)]

    def _tell_reader(self, save_id: str, rank: int, message: Mapping[str, Any]) -> Tell:
        told = {**message, "save": save_id, "kind": f"peer_{message['kind']}"}
        return Tell(rank=self.reader_of(rank), message=told)


def _all_files(parts: Mapping[int, list[Mapping[str, Any]]]) -> tuple[Mapping[str, Any], ...]:
    return tuple(sorted((file for files in parts.values() for file in files), key=lambda file: str(file["path"])))


def _list(problems: Iterable[Mapping[str, Any]], shown: int = 3) -> str:
    lines = [f"{problem['path']} {problem['reason']}" for problem in problems]
    more = f" and {len(lines) - shown} more" if len(lines) > shown else ""
    return "; ".join(lines[:shown]) + more
