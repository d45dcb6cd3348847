"""Short causal depthwise convolution with SiLU (README.md)."""

from whalez.ops.conv.host import conv_tail, short_conv, short_conv_decode, warm

__all__ = ["conv_tail", "short_conv", "short_conv_decode", "warm"]
