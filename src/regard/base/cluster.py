"""`cluster` joins the Ray cluster at RAY_ADDRESS, or starts Ray on this machine for the time of a with-block."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
from collections.abc import Iterator
from typing import Any

from regard.base.errors import MissingPackage, RegardError, first_line, nearest

#: The engines for work that many processes can share.
ENGINES = ("local", "ray")
#: Seconds in which a cluster must answer.
PATIENCE = 5


@contextlib.contextmanager
def cluster(operation: str) -> Iterator[Any]:
    """The module `ray`, joined to a cluster.

    >>> with cluster("analyze") as ray:  # doctest: +SKIP
    ...     ray.cluster_resources()["CPU"]
    2.0
    """
    with _printing_to_stderr():
        yield from _joined(_imported_ray(operation), operation)


def _joined(ray: Any, operation: str) -> Iterator[Any]:
    """Yield `ray`, joined to a cluster; what is joined or started here ends afterwards."""
    if ray.is_initialized():
        yield ray
        return
    address = os.environ.get("RAY_ADDRESS", "")
    local = {} if address else {"include_dashboard": False, "_node_ip_address": "127.0.0.1"}
    try:
        _check_listens(address)
        ray.init(log_to_driver=False, logging_level="ERROR", **local)
    except Exception as error:  # Ray raises this class itself where a node does not start in time
        reason = first_line(error) or type(error).__name__
        where = f"the Ray cluster at RAY_ADDRESS={address} cannot be joined" if address else "Ray cannot start here"
        remedy = " Start it with `ray start --head`, or unset RAY_ADDRESS to use this machine alone."
        raise RegardError(f"{operation}: {where} ({reason}).{remedy if address else ''}") from None
    try:
        yield ray
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _printing_to_stderr() -> Iterator[None]:
    """Send all output of the block to standard error, including that of code that is not Python.

    Ray and its core print when a worker dies, and standard output is for results only.
    """
    sys.stdout.flush()
    stdout = os.dup(1)
    try:
        os.dup2(2, 1)
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        sys.stdout.flush()
        os.dup2(stdout, 1)
        os.close(stdout)


def check_engine(operation: str, engine: str) -> None:
    """Refuse an engine that is not in `ENGINES`."""
    if engine not in ENGINES:
        raise RegardError(f"{operation}: there is no engine {engine!r}. {nearest(engine, ENGINES)}")


def workers_that_fit(ray: Any, operation: str, wanted: int | None, threads: int) -> int:
    """The number of workers with so many threads each: `wanted`, or as many as the cluster has processors for."""
    processors = int(ray.cluster_resources().get("CPU", 0))
    most = processors // threads
    if most < (wanted or 1):
        raise RegardError(
            f"{operation}: {wanted or 1} workers of {threads} threads need {(wanted or 1) * threads} processors, and "
            f"the cluster has {processors}. Ask for fewer --workers, or set OMP_NUM_THREADS lower."
        )
    return wanted or most


def _check_listens(address: str) -> None:
    """Raise an OSError if nothing listens at the address; Ray itself would wait for minutes."""
    match = re.fullmatch(r"(?:ray://)?\[?(.+?)\]?:(\d+)", address)
    if match:
        socket.create_connection((match[1], int(match[2])), timeout=PATIENCE).close()


def _imported_ray(operation: str) -> Any:
    """The module `ray`, which sends no usage statistics."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # without it Ray prints a warning
    try:
        import ray
    except ModuleNotFoundError:
        raise MissingPackage(operation, "ray", "ray") from None
    return ray
