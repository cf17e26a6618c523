"""Splits the cases of a parametrized test between `make test` and `make test-all`."""

from collections.abc import Iterable

import pytest


def exhaustive_but(cases: Iterable, *kept) -> list:
    """All cases, those other than `kept` marked `exhaustive`."""
    cases = list(cases)
    unknown = [case for case in kept if case not in cases]
    assert kept and not unknown, f"no such case: {unknown}"
    return [case if case in kept else _marked(case) for case in cases]


def _marked(case):
    return pytest.param(*(case if type(case) is tuple else (case,)), marks=pytest.mark.exhaustive)
