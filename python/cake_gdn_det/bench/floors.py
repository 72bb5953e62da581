"""What no rule can be faster than: the bytes and the operations of the operator over what the device can do."""

from __future__ import annotations

from .shapes import CHUNK, HEAD_SIZE, Shape

# Measured ceilings by a part of the device's name: bytes a second of a copy, operations a second of a bf16 product.
RATES = {"H200": (4.3e12, 790e12)}
E_BYTES, GATE_BYTES = 2, 6  # of an element; of fp32 g and bf16 beta


def rates(device_name: str) -> tuple[float, float] | None:
    return next((found for part, found in RATES.items() if part in device_name), None)


def _products(chunks: int, states: float, scores: float) -> float:
    """Operations of that many products per chunk of 64 rows with a 128 x 128 state, and of 64 x 64 scores with rows."""
    return 2 * chunks * CHUNK * HEAD_SIZE * (states * HEAD_SIZE + scores * CHUNK)


def work(shape: Shape) -> dict[str, tuple[float, float]]:
    """(bytes, operations) of the operator: every tensor moved once, nothing between a direction's stages stored.

    A training forward saves the states between chunks and the inverses A. The products of a chunk and value head:
    forward: states w S, k^T v_new, q S; scores k k^T, A k, A v, q k^T, (q k^T) v_new. Backward, with w, u, v_new formed
    again: states w S, q^T do, w^T dv, k dS, do S^T, v_new dS^T, dv S^T; scores A k, A v, q k^T, (q k^T)^T do,
    do v_new^T, its products with k and with q, A^T du, du v_new^T, k k^T, and the inverse's gradient with k.
    """
    x = shape.rows * shape.HV * HEAD_SIZE * E_BYTES
    q = shape.rows * shape.H * HEAD_SIZE * E_BYTES
    gates = shape.rows * shape.HV * GATE_BYTES
    saved = shape.later_chunks * shape.HV * HEAD_SIZE * HEAD_SIZE * E_BYTES + x * CHUNK // HEAD_SIZE
    chunks = shape.chunks * shape.HV
    forward = _products(chunks, 3, 5)
    return {
        "forward": (2 * q + 2 * x + gates, forward),
        "training forward": (2 * q + 2 * x + gates + saved, forward),
        "backward": (2 * q + 2 * x + gates + saved + 2 * q + x + gates, _products(chunks, 7, 11)),
    }


def milliseconds(moved: float, operations: float, device_rates: tuple[float, float]) -> float:
    bandwidth, rate = device_rates
    return 1e3 * max(moved / bandwidth, operations / rate)


def floors(shape: Shape, device_name: str) -> dict[str, float]:
    """Milliseconds of each phase; empty for a device whose ceilings are not known."""
    found = rates(device_name)
    if found is None:
        return {}
    floor = {phase: milliseconds(*amounts, found) for phase, amounts in work(shape).items()}
    floor["forward + backward"] = floor["training forward"] + floor["backward"]
    return floor


def stage_work(shape: Shape) -> dict[str, tuple[float, float]]:
    """(bytes, operations) of each stage of one forward and backward with saved states, as the stages are cut now."""
    rows, HV = shape.rows, shape.HV
    x = rows * HV * HEAD_SIZE * E_BYTES
    q = rows * shape.H * HEAD_SIZE * E_BYTES
    h = shape.later_chunks * HV * HEAD_SIZE * HEAD_SIZE * E_BYTES
    A = x * CHUNK // HEAD_SIZE

    def products(states: float, scores: float) -> float:
        return _products(shape.chunks * HV, states, scores)

    return {
        "pack": (8 * q, 0),
        "prep": (2 * rows * HV * 17, 0),
        "wy": (q + x + A + 2 * x, products(0, 2)),
        "fwd_scan": (q + 2 * x + x + h, products(2, 0)),
        "output": (2 * q + x + h + x, products(1, 1.5)),
        "wy_recompute": (q + x + A + h + 2 * x, products(1, 1)),
        "dv_local": (2 * q + x + x, products(0, 1.5)),
        "adjoint_scan": (2 * q + 3 * x + x + h, products(3, 0)),
        "dqkwg": (2 * q + 3 * x + 2 * h + 3 * x, products(3, 3)),
        "wy_backward": (q + 5 * x + A + 2 * x, products(0, 3.5)),
        "finalize": (2 * x + 2 * q + 2 * q, 0),
        "tail": (2 * q + 4 * x + A + 2 * h + 2 * q + x, products(3, 5)),
        "gate_backward": (rows * HV * 33, 0),
    }
