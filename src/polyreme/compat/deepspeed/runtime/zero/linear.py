"""DeepSpeed's linear layer for ZeRO 3, which keeps no gathered weight for its backward. Here it is torch's
own, as the engine keeps none for any layer."""

from torch import nn
from torch.nn import functional

LinearModuleForZeroStage3 = nn.Linear
zero3_linear_wrap = functional.linear
