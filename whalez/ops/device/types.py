"""Argument types of kernels: raw pointers that index directly (`p[i]`), and int64 sizes.

bf16 values travel as their 16 bits, in uint16; `ptx` converts.
"""

from numba.cuda import types

f32p = types.CPointer(types.float32)
bf16p = types.CPointer(types.uint16)
i32p = types.CPointer(types.int32)
i64p = types.CPointer(types.int64)
u64p = types.CPointer(types.uint64)
u32p = types.CPointer(types.uint32)
u8p = types.CPointer(types.uint8)
i64 = types.int64
i32 = types.int32
u32 = types.uint32
u64 = types.uint64
f32 = types.float32

#: Bytes that dynamic shared memory is aligned to: cp.async and ldmatrix take 16 at a time, and the swizzle of a tile
#: counts in rows of 128.
SHARED_ALIGN = 128
