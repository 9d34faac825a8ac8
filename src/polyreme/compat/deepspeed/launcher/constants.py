"""Names of DeepSpeed's launchers, and what its command lines have in common."""

import os

PDSH_LAUNCHER = "pdsh"
PDSH_MAX_FAN_OUT = 1024
OPENMPI_LAUNCHER = "openmpi"
MPICH_LAUNCHER = "mpich"
IMPI_LAUNCHER = "impi"
SLURM_LAUNCHER = "slurm"
MVAPICH_LAUNCHER = "mvapich"
MVAPICH_TMP_HOSTFILE = "/tmp/deepspeed_mvapich_hostfile"

DLTS_HOSTFILE = "/job/hostfile"
TORCH_DISTRIBUTED_DEFAULT_PORT = 29500
ENVIRONMENT_FILE = os.getenv("DS_ENV_FILE", ".deepspeed_env")
"""The file, in the home folder and in the current one, with variables for all hosts."""
CROSS_RANK = "CROSS_RANK"
CROSS_SIZE = "CROSS_SIZE"
LOCAL_SIZE = "LOCAL_SIZE"
LAUNCH_MODULE = "polyreme.compat.deepspeed.launcher.launch"
"""What a node of several runs."""
