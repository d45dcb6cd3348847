"""What every CUDA kernel of whalez stands on: types, inline PTX, the kernel registry, compilation without a GPU, streams."""
