"""Imports Lightning Fabric from `lightning_fabric` or from `lightning`, whichever is installed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_fabric import Fabric
    from lightning_fabric.plugins.environments.lightning import LightningEnvironment
    from lightning_fabric.plugins.environments.slurm import SLURMEnvironment
    from lightning_fabric.strategies.ddp import DDPStrategy
else:
    try:
        from lightning_fabric import Fabric
        from lightning_fabric.plugins.environments.lightning import LightningEnvironment
        from lightning_fabric.plugins.environments.slurm import SLURMEnvironment
        from lightning_fabric.strategies.ddp import DDPStrategy
    except ModuleNotFoundError:
        from lightning.fabric import Fabric
        from lightning.fabric.plugins.environments.lightning import LightningEnvironment
        from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
        from lightning.fabric.strategies.ddp import DDPStrategy

__all__ = ["DDPStrategy", "Fabric", "LightningEnvironment", "SLURMEnvironment"]
