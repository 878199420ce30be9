"""Counts changes of norms' settings, so that decisions which depend on settings are made once and not in every step."""

from __future__ import annotations


class Changes:
    """`count` increases whenever an attribute of a norm is set or deleted, and when a norm moves to another device."""

    count = 0
