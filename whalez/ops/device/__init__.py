"""What every CUDA kernel stands on: types, inline PTX, the kernel registry, compilation without a GPU, streams."""
