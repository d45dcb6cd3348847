"""NoPE multi-head latent attention: expand, attend over one window of keys, absorbed decode (README.md)."""

from whalez.ops.mla.host import mla_attend, mla_decode, mla_expand

__all__ = ["mla_attend", "mla_decode", "mla_expand"]
