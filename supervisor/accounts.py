"""Names of accounts, for people."""

from __future__ import annotations

import pwd


def find_account(name: str) -> tuple[int, int] | None:
    """(uid, gid) of an account by its name, or by its number as Slurm shows one without a name; None: not known."""
    try:
        entry = pwd.getpwuid(int(name)) if name.isdecimal() else pwd.getpwnam(name)
    except (KeyError, OverflowError, ValueError):
        return None
    return entry.pw_uid, entry.pw_gid


def user_name(uid: int) -> str:
    """The account's name; "uid N" for one that this host does not know."""
    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OverflowError):
        return f"uid {uid}"
