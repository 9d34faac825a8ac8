"""Names of backends, and of the communication logger's section of a config."""

NCCL_BACKEND = "nccl"
CCL_BACKEND = "ccl"
MPI_BACKEND = "mpi"
GLOO_BACKEND = "gloo"
SCCL_BACKEND = "sccl"
HCCL_BACKEND = "hccl"

COMMS_LOGGER = "comms_logger"
COMMS_LOGGER_ENABLED, COMMS_LOGGER_ENABLED_DEFAULT = "enabled", False
COMMS_LOGGER_VERBOSE, COMMS_LOGGER_VERBOSE_DEFAULT = "verbose", False
COMMS_LOGGER_PROF_ALL, COMMS_LOGGER_PROF_ALL_DEFAULT = "prof_all", True
COMMS_LOGGER_DEBUG, COMMS_LOGGER_DEBUG_DEFAULT = "debug", False
COMMS_LOGGER_PROF_OPS = "prof_ops"
COMMS_LOGGER_PROF_OPS_DEFAULT: list[str] = []
