"""The MLA latent rows: their norm, and their place in the paged cache (README.md)."""

from whalez.ops.latent.host import latent_append, latent_gather, latent_norm

__all__ = ["latent_append", "latent_gather", "latent_norm"]
