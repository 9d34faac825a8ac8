"""DeepSpeed's communication: torch.distributed by DeepSpeed's names, with a record of what it costs."""

from polyreme.compat.deepspeed.comm.comm import *  # noqa: F403
from polyreme.compat.deepspeed.comm.constants import *  # noqa: F403
from polyreme.compat.deepspeed.comm.utils import *  # noqa: F403
