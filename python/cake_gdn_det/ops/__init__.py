"""The operator.

call.py and checks.py: what may come; torch_ops.py: torch.library operators over the C API; chunk.py: the function.
"""

from .chunk import chunk_gated_delta_rule, chunk_gated_delta_rule_det

__all__ = ["chunk_gated_delta_rule", "chunk_gated_delta_rule_det"]
