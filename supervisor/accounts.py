"""Names of accounts, for people."""

from __future__ import annotations

import pwd


def user_name(uid: int) -> str:
    """The account's name; "uid N" for one that this host does not know."""
    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OverflowError):
        return f"uid {uid}"
