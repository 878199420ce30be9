"""For tests that change what launches are made of, or want to see them made."""

from __future__ import annotations


def forget():
    """No launch is ready."""
    from kalmannorm._ops import triton_launching
    from kalmannorm._ops.normalize import triton_run, triton_settled_run
    from kalmannorm._ops.predict import triton_predict

    for launches in (
        triton_run.forward_launches,
        triton_run.backward_launches,
        triton_run.again_launch,
        triton_run.reducing,
        triton_settled_run.forward_launches,
        triton_settled_run.backward_launch,
        triton_settled_run.sums_launch,
        triton_predict.launches_of,
        triton_launching.ready,
    ):
        launches.cache_clear()
