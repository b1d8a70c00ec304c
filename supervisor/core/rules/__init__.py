"""The rules, by what they are about: each reads the draft and writes it. Their order is reconcile.py's."""
