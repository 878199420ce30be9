"""Make the stored artefacts of a format: `python tests/artefacts/make.py format0`, at the last commit that writes it.

    FORMAT/finished       a run of digits at its end, and in evaluation.json what `evaluate` measured of it
    FORMAT/interrupted    the same run, stopped behind its fourth step, with checkpoints of steps 2 and 4
    FORMAT/nets.pt        state dicts of one net with each kind of norm, the input, and the outputs in each inference
    FORMAT/model.pt       such a net, pickled whole by torch.save(model)

The code of today must read them and come to the same numbers: `tests/lab/files/test_formats.py`. Never make those of
an older format again: they are what users have on disk. Make new ones, in a folder of their own, before the format
changes.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn

import kalmannorm
from kalmannorm._model.settings import norms
from kalmannorm.lab.recipes.recipe import Execution, Recipe
from kalmannorm.lab.training.train import train
from kalmannorm_command.app import run

RECIPE = Recipe(
    method="bkn-learned",
    gradient_batch=16,
    epochs=2,
    train_examples=48,
    test_examples=32,
    width=0.1,  # 369 parameters
)
EXECUTION = Execution(device="cpu", tensorboard=False, save_every=2, log_every=1)
NORMS = {
    "kalman-weights": {"to": "kalman", "transition": "weights"},
    "kalman-learned": {"to": "kalman", "transition": "learned", "rank": 1, "per_channel_gain": True},
    "ghost": {"to": "ghost"},
    "renorm": {"to": "renorm", "warmup_steps": 1, "r_steps": 2, "d_steps": 2},
}
"""Options of `convert`."""


def net(options: dict[str, object]) -> nn.Module:
    """Three convolutions with norms between them, converted with these options; weights are from the seed 0."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for before, after in ((1, 3), (3, 4), (4, 2)):
        layers += [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    return kalmannorm.convert(nn.Sequential(*layers), torch.zeros(2, 1, 4, 4), statistics_batch_size=2, **options)


def outputs(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """In every way of inference that the model has."""
    found = {}
    for mode in next(norm for _, norm in norms(model)).inference_modes:
        kalmannorm.set_inference(model.eval(), mode)
        with torch.no_grad():
            found[mode] = model(x)
    return found


def trained(options: dict[str, object], x: torch.Tensor) -> nn.Module:
    """After three steps, so that no parameter and no statistic is at its start."""
    model = net(options).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return model


def interrupted(folder: Path) -> None:
    def crash(event: dict[str, object]) -> None:
        if event.get("step") == 5:
            raise RuntimeError("crash")

    with suppress(RuntimeError):
        train(RECIPE, folder, EXECUTION, watch=crash)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    train(RECIPE, folder / "finished", EXECUTION)
    assert run(["evaluate", str(folder / "finished"), "--device", "cpu"]) == 0
    interrupted(folder / "interrupted")
    x = torch.randn(4, 1, 4, 4, generator=torch.Generator().manual_seed(1))
    nets = {}
    for name, options in NORMS.items():
        model = trained(options, x)
        nets[name] = {"state": model.state_dict(), "outputs": outputs(model, x)}
    torch.save({"x": x, "nets": nets}, folder / "nets.pt")
    torch.save(trained(NORMS["kalman-learned"], x), folder / "model.pt")
    for lock in folder.rglob(".lock"):
        lock.unlink()


if __name__ == "__main__":
    main(Path(__file__).parent / sys.argv[1])
