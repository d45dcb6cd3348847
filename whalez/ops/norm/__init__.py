"""RMS and L2 normalisation of rows and heads (README.md)."""

from whalez.ops.norm.host import gated_rms_norm, l2_norm, rms_norm, warm

__all__ = ["gated_rms_norm", "l2_norm", "rms_norm", "warm"]
