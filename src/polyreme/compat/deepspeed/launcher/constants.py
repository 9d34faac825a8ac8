"""Names of DeepSpeed's launchers, and what its command lines have in common."""

import os

PDSH_LAUNCHER, OPENMPI_LAUNCHER, MPICH_LAUNCHER = "pdsh", "openmpi", "mpich"
IMPI_LAUNCHER, SLURM_LAUNCHER, MVAPICH_LAUNCHER = "impi", "slurm", "mvapich"
LAUNCHERS = (
    PDSH_LAUNCHER, OPENMPI_LAUNCHER, MPICH_LAUNCHER, IMPI_LAUNCHER, MVAPICH_LAUNCHER, SLURM_LAUNCHER,
)  # fmt: skip
PDSH_MAX_FAN_OUT = 1024
DLTS_HOSTFILE = "/job/hostfile"
TORCH_DISTRIBUTED_DEFAULT_PORT = 29500
ENVIRONMENT_FILE = os.getenv("DS_ENV_FILE", ".deepspeed_env")
"""The file, in the home folder and in the current one, with variables for all hosts."""
CROSS_RANK, CROSS_SIZE, LOCAL_SIZE = "CROSS_RANK", "CROSS_SIZE", "LOCAL_SIZE"
