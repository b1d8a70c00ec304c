"""Slurm asked for JSON, and given up on where a build, a wrapper or a release does not give what the text gives.

Whoever asks gets a listing, or None: "ask for text". Giving up lasts as long as the object lives and is said once. No
answer at all (the controller is down) is no reason to give up: that raises, as with text.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime
from typing import TypeVar

from slurm import commands, failures, parse_json
from slurm.run_tool import Completed
from slurm.types import JobListing, NodeListing

Notice = Callable[[str], None]
T = TypeVar("T", JobListing, NodeListing)

# A tool that does not know the option, or lacks the plugins that write JSON.
_NO_JSON = re.compile(r"unrecognized option|invalid option|serializer|data_parser|openapi|json", re.IGNORECASE)


class JsonForm:
    """Reads by `--json`. `call` runs a command; `on_notice` gets a sentence for the log, each once."""

    def __init__(self, call: Callable[[commands.Argv], Completed], on_notice: Notice) -> None:
        self._call = call
        self._on_notice = on_notice
        self._is_given_up = False
        self._is_accounting_given_up = False
        self._has_scontrol_json = True
        self._is_release_known = False

    def fetch_jobs(self) -> JobListing | None:
        """All jobs in the controller's memory; None: ask for text."""
        return self._fetch(commands.squeue_json_argv(), "jobs", parse_json.parse_squeue_json)

    def fetch_nodes(self) -> NodeListing | None:
        """All nodes; None: ask for text."""
        if self._has_scontrol_json and not self._is_given_up:
            argv = commands.show_nodes_json_argv()
            done = self._call(argv)
            if not _lacks_json(done):
                return self._take(argv, done, "nodes", parse_json.parse_nodes_json)
            self._has_scontrol_json = False  # 22.05
        return self._fetch(commands.sinfo_json_argv(), "nodes", parse_json.parse_nodes_json)

    def fetch_ended_jobs(self, *, since: datetime) -> JobListing | None:
        """Jobs of accounting; None: ask for text, also where the JSON says less than the text."""
        if self._is_accounting_given_up:
            return None
        return self._fetch(commands.sacct_json_argv(since), "jobs", self._parse_accounting)

    def _parse_accounting(self, document: parse_json.Row) -> JobListing | None:
        if parse_json.is_accounting_complete(document):
            return parse_json.parse_sacct_json(document)
        self._is_accounting_given_up = True
        self._on_notice("accounting is read as text: this release's sacct --json lacks submit lines or exit statuses")
        return None

    def _fetch(self, argv: commands.Argv, key: str, parse: Callable[[parse_json.Row], T | None]) -> T | None:
        return None if self._is_given_up else self._take(argv, self._call(argv), key, parse)

    def _take(
        self, argv: commands.Argv, done: Completed, key: str, parse: Callable[[parse_json.Row], T | None]
    ) -> T | None:
        if _lacks_json(done):
            self._give_up(argv, " ".join(done.stderr.split())[:200] or "too long to be read")
            return None
        failure = failures.read_failure(argv, done)
        if failure is not None:
            raise failure
        try:
            document = parse_json.load_document(done.stdout, key)
        except parse_json.JsonError:
            return None  # the text says better what is wrong, if it still is
        except parse_json.JsonUnusable as error:
            self._give_up(argv, str(error))
            return None
        self._note_release(document)
        listing = parse(document)
        why = _judge_listing(listing) if listing is not None else None
        if why is not None:
            self._give_up(argv, why)
            return None
        return listing

    def _give_up(self, argv: commands.Argv, why: str) -> None:
        if not self._is_given_up:
            self._is_given_up = True
            self._on_notice(f"Slurm is read as text from now on: the JSON of {argv[0]} can't be used: {why}")

    def _note_release(self, document: parse_json.Row) -> None:
        release = parse_json.read_release(document)
        if release is None or self._is_release_known:
            return
        self._is_release_known = True
        if release > parse_json.NEWEST_TESTED:
            tested = _shown(parse_json.NEWEST_TESTED)
            self._on_notice(f"Slurm {_shown(release)} is newer than the releases known here (up to {tested})")


def _shown(release: tuple[int, int]) -> str:
    return f"{release[0]}.{release[1]:02d}"


def _lacks_json(done: Completed) -> bool:
    if done.is_truncated:
        return True
    return done.returncode not in (0, None) and bool(_NO_JSON.search(done.stderr))


def _judge_listing(listing: JobListing | NodeListing) -> str | None:
    """Why a listing is of no use: rows, and none that can be read; or no node at all, since a cluster has nodes."""
    records = listing.nodes if isinstance(listing, NodeListing) else listing.jobs
    if records:
        return None
    if listing.unreadable:
        return listing.unreadable[0].why
    return "no node in it" if isinstance(listing, NodeListing) else None
