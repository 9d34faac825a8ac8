"""Which rank this process is before a process group is open."""

from polyreme.distributed.environment import detect


def get_local_rank_from_launcher() -> int:
    """This process's number on its host; 0 for a single process."""
    return detect().local_rank


def get_world_rank_from_launcher() -> int:
    """This process's number; 0 for a single process."""
    return detect().rank


def get_world_size_from_launcher() -> int:
    """How many processes were started; 1 for a single one."""
    return detect().world_size
