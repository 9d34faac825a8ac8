"""The port and the timeout that DeepSpeed's launchers and process groups share."""

import os
from datetime import timedelta

TORCH_DISTRIBUTED_DEFAULT_PORT = 29500
"""The port at which ranks meet if mpirun started them."""

default_pg_timeout = timedelta(minutes=int(os.environ.get("DEEPSPEED_TIMEOUT", "10")))
"""The time that a collective waits for other ranks."""
