"""Double: names of types, and how many processes there are."""

import tensorrt as trt

_NAMES = {
    "float32": trt.float32,
    "float16": trt.float16,
    "bfloat16": trt.bfloat16,
    "int32": trt.int32,
    "int64": trt.int64,
    "bool": trt.bool,
}


def str_dtype_to_trt(dtype):
    return _NAMES[dtype]


def mpi_world_size():
    return 1
