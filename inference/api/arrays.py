"""Types of numpy arrays that requests, images and engines pass around."""

import numpy as np
import numpy.typing as npt

UInt8s = npt.NDArray[np.uint8]
Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
UInt64s = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float32]
Float64s = npt.NDArray[np.float64]
