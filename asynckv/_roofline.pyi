from typing import final

import numpy as np
import numpy.typing as npt

__all__ = ["Roofline"]

@final
class Roofline:
    depth: int
    def __init__(self, depth: int) -> None: ...
    def close(self) -> None: ...
    def run(
        self,
        files: npt.NDArray[np.int32],
        offsets: npt.NDArray[np.uint64],
        sizes: npt.NDArray[np.uint32],
        writes: npt.NDArray[np.uint8],
        buffers: npt.NDArray[np.uint8],
        *,
        first: int = 0,
        seconds: float = 0.3,
        latencies: npt.NDArray[np.float64] | None = None,
    ) -> tuple[int, int, float]: ...
