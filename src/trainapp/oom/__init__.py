"""Out-of-memory errors: detection and recovery. These names are for users' code."""

from trainapp.memory.detection import is_out_of_memory
from trainapp.oom.decorator import NoExecutableBatchSize, find_executable_batch_size

__all__ = ["NoExecutableBatchSize", "find_executable_batch_size", "is_out_of_memory"]
