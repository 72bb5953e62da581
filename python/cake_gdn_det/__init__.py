"""Deterministic chunked Gated DeltaNet for training: forward and gradients, the same bits on every run.

    from cake_gdn_det import chunk_gated_delta_rule

Importing the package needs no GPU, no driver and no torch: the operator, and with it torch and the compiled library,
is loaded when it is first asked for, so that `python -m cake_gdn_det info` can report an installation that is broken.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .ops import chunk_gated_delta_rule as chunk_gated_delta_rule
    from .ops import chunk_gated_delta_rule_det as chunk_gated_delta_rule_det

    __version__: str

__all__ = ["__version__", "chunk_gated_delta_rule", "chunk_gated_delta_rule_det"]


def __getattr__(name: str) -> object:
    if name == "__version__":
        value: object = _version()
    elif name in __all__:
        from . import ops

        value = getattr(ops, name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("cake-gdn-det")
    except PackageNotFoundError:  # a source tree on sys.path: nothing records which version it is
        return "0+unknown"
