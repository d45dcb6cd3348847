"""These tests need numba-cuda, of the extra `dev`: without it they are not collected, and the header says so."""

from importlib.util import find_spec

HAS_NUMBA_CUDA = find_spec("numba_cuda") is not None
collect_ignore_glob = [] if HAS_NUMBA_CUDA else ["test_*.py"]


def pytest_report_header() -> str:
    return "tests/cuda: " + (
        "kernels run in the harness" if HAS_NUMBA_CUDA else "left out, numba-cuda is not installed"
    )
