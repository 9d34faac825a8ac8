"""A convolutional classifier of synthetic images, without ZeRO; DeepSpeed makes the loader."""

import deepspeed
import torch
from meter import STEPS, Meter
from torch import nn
from torch.utils.data import TensorDataset

MICRO = 16


def main() -> None:
    torch.manual_seed(0)
    images, labels = torch.randn(MICRO * 2 * STEPS, 3, 32, 32), torch.randint(10, (MICRO * 2 * STEPS,))
    net = nn.Sequential(
        nn.Conv2d(3, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 5 * 5, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip
    config = {
        "train_batch_size": MICRO * 2,
        "steps_per_print": 2000,
        "optimizer": {"type": "Adam", "params": {"lr": 0.001, "betas": [0.8, 0.999], "weight_decay": 3e-7}},
        "gradient_clipping": 1.0,
    }
    engine, _, loader, _ = deepspeed.initialize(
        model=net,
        model_parameters=net.parameters(),
        training_data=TensorDataset(images, labels),
        config=config,
    )
    meter, criterion = Meter(), nn.CrossEntropyLoss()
    for image, label in loader:
        loss = criterion(engine(image.to(engine.device)), label.to(engine.device))
        engine.backward(loss)
        engine.step()
        meter.step(loss.item())
    meter.done()


main()
