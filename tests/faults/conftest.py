from tests.faults.disk import small_disk

__all__ = ["small_disk"]
