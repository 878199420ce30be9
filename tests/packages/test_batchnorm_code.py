"""Every row of docs/batchnorm-code.md: code that says BatchNorm, run on a converted model."""

from __future__ import annotations

import copy
import os
import re
import tempfile
import warnings
from pathlib import Path

import pytest
import timm.layers
import timm.optim
import torch
import torchvision
from torch import nn
from torch.optim.swa_utils import AveragedModel, update_bn

import kalmannorm

PAGE = Path(__file__).parents[2] / "docs" / "batchnorm-code.md"


def block(channels, out):
    return nn.Sequential(nn.Conv2d(channels, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU())


def images(batches=3):
    return [torch.randn(4, 3, 8, 8) + i for i in range(batches)]


def net():
    return nn.Sequential(block(3, 4), block(4, 6), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 2))


def converted(**options):
    model = kalmannorm.convert(net(), images()[0], **options)
    for x in images():
        model(x)
    return model


def statistics(model):
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def is_a_batch_norm():
    model = converted()
    assert [n for n, m in model.named_modules() if isinstance(m, nn.BatchNorm2d)] == ["0.1", "1.1"]
    assert not any(isinstance(m, (nn.BatchNorm1d, nn.BatchNorm3d)) for m in model.modules())
    for dims, kind in enumerate((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), 1):
        for family in ("BatchKalmanNorm", "GhostBatchNorm", "BatchRenorm"):
            assert issubclass(getattr(kalmannorm, f"{family}{dims}d"), kind)
    synchronised = kalmannorm.convert(nn.SyncBatchNorm.convert_sync_batchnorm(net()), images()[0])
    assert isinstance(synchronised[0][1], nn.BatchNorm2d) and not isinstance(synchronised[0][1], nn.SyncBatchNorm)
    activated = nn.Sequential(nn.Conv2d(3, 4, 3), timm.layers.BatchNormAct2d(4))
    activated = kalmannorm.convert(activated, images()[0])
    assert isinstance(activated[1], timm.layers.BatchNormAct2d) and isinstance(activated[1], kalmannorm.GroupedNorm)


def is_not_exactly_one():
    assert not any(type(m) is nn.BatchNorm2d for m in converted().modules())


def freezes_by_eval():
    model = converted()
    before, x = statistics(model), images()[0]

    def freeze(m):
        if isinstance(m, nn.BatchNorm2d):
            m.eval()

    model.train().apply(freeze)
    y = model(x)
    assert all(torch.equal(value, before[name]) for name, value in statistics(model).items())
    torch.testing.assert_close(y, model.eval()(x))
    model.train()(x)
    assert not torch.equal(model[0][1].running_mean, before["0.1.running_mean"])
    kalmannorm.freeze_statistics(model)
    before = statistics(model)
    model.train()(x)
    assert all(torch.equal(value, before[name]) for name, value in statistics(model).items())


def takes_another_momentum():
    model, x = converted(), images()[1]
    for m in model.modules():
        if isinstance(m, nn.BatchNorm2d):
            m.momentum = 1.0
    model(x)
    torch.testing.assert_close(model[0][1].running_mean, model[0][0](x).mean((0, 2, 3)))


def stops_tracking():
    model, x = converted(), images()[0]
    y, before = model.eval()(x), statistics(model)
    for m in model.modules():
        if isinstance(m, nn.BatchNorm2d):
            m.track_running_stats = False
    model.train()(x)
    assert all(torch.equal(value, before[name]) for name, value in statistics(model).items())
    torch.testing.assert_close(model.eval()(x), y, rtol=0, atol=0)
    torch.testing.assert_close(kalmannorm.fold(model)(x), y)


def stays_and_joins_ranks(convert):
    model = converted()
    norm, activated = model[0][1], timm.layers.BatchNormAct2d(2)
    model.add_module("5", nn.Sequential(activated, kalmannorm.GhostBatchNorm2d(2)))
    result = convert(model)
    assert result[0][1] is norm and norm.process_group == "world"
    assert type(norm) is kalmannorm.BatchKalmanNorm2d
    assert isinstance(result[5][0], nn.SyncBatchNorm)  # torch's own norms change as before
    assert type(result[5][1]) is kalmannorm.GhostBatchNorm2d
    del result[5]
    result(images()[0]).sum().backward()
    assert norm.weight.grad is not None


def joins_ranks_by_torch():
    stays_and_joins_ranks(nn.SyncBatchNorm.convert_sync_batchnorm)
    chosen = converted()
    given = object()
    with pytest.raises(TypeError, match="ProcessGroup"):  # the group of the call reaches the norms
        nn.SyncBatchNorm.convert_sync_batchnorm(chosen, given)


def joins_ranks_by_timm():
    stays_and_joins_ranks(timm.layers.convert_sync_batchnorm)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), timm.layers.BatchNormAct2d(4), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4))
    model = kalmannorm.convert(model, images()[0])
    x = images()[0]
    y = model.eval()(x)
    model = timm.layers.convert_sync_batchnorm(model)
    assert model[1].process_group == "world" and list(model[1]._modules) == ["drop", "act"]
    torch.testing.assert_close(model(x), y, rtol=0, atol=0)


def joins_ranks_by_lightning():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its imports
        import lightning

    class Task(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = kalmannorm.convert(net(), images()[0])

        def training_step(self, batch, index):
            assert {m.process_group for m in self.net.modules() if isinstance(m, nn.BatchNorm2d)} == {"world"}
            return self.net(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.net.parameters(), 0.01)

    task = Task()
    norm, before = task.net[0][1], statistics(task.net)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    environment = dict(os.environ)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="lightning")  # of the number of workers
            trainer = lightning.Trainer(
                accelerator="cpu", devices=1, strategy="ddp", sync_batchnorm=True, max_epochs=1, **quiet
            )
            trainer.fit(task, torch.utils.data.DataLoader(torch.cat(images()), 4))
    finally:
        os.environ.clear()
        os.environ.update(environment)
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    assert task.net[0][1] is norm and int(norm.num_batches_tracked) == 3
    assert not torch.equal(norm.running_mean, before["0.1.running_mean"])


def updates_by_update_bn():
    model, data = converted(), images()
    other = copy.deepcopy(model)
    update_bn(data, model)
    kalmannorm.recalibrate(other, data)
    for m, n in ((model[0][1], other[0][1]), (model[1][1], other[1][1])):
        assert m.momentum == 0.1
        torch.testing.assert_close(m.running_mean, n.running_mean)
        torch.testing.assert_close(m.running_var, n.running_var)
    torch.testing.assert_close(model[0][1].running_mean, model[0][0](torch.cat(data)).mean((0, 2, 3)))


def averages_weights():
    model, data = converted(), images()
    average = AveragedModel(model)
    with torch.no_grad():
        model[0][0].bias += 3
    average.update_parameters(model)
    update_bn(data, average)
    norm, conv = average.module[0][1], average.module[0][0]
    torch.testing.assert_close(norm.running_mean, conv(torch.cat(data)).mean((0, 2, 3)))
    assert norm is not model[0][1]


def freezes_by_timm():
    model, x = converted(), images()[0]
    y = model.eval()(x)
    frozen = timm.layers.freeze_batch_norm_2d(copy.deepcopy(model))
    assert isinstance(frozen[0][1], torchvision.ops.FrozenBatchNorm2d)
    torch.testing.assert_close(frozen(x), y)
    part = copy.deepcopy(model).train()
    part[0] = timm.layers.freeze_batch_norm_2d(part[0])
    part(x).sum().backward()  # the norm behind it keeps its prior
    assert part[1][1].gain_logit.grad.abs().sum() > 0
    activated = nn.Sequential(nn.Conv2d(3, 4, 3), timm.layers.BatchNormAct2d(4, act_layer=nn.SiLU))
    activated = kalmannorm.convert(activated, x)
    activated(x)
    y = activated.eval()(x)
    torch.testing.assert_close(timm.layers.freeze_batch_norm_2d(activated)(x), y)


def keeps_frozen_norms():
    model = net()
    model[0][1] = torchvision.ops.FrozenBatchNorm2d(4)
    model = kalmannorm.convert(model, images()[0])
    assert isinstance(model[0][1], torchvision.ops.FrozenBatchNorm2d)
    assert kalmannorm.wiring(model).norms[0].wired


def freezes_by_lightning():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its imports
        from lightning.pytorch.callbacks import BaseFinetuning

    model = converted()
    before = statistics(model)
    BaseFinetuning.freeze(model[0], train_bn=False)
    model(images()[1])
    assert not any(p.requires_grad for p in model[0].parameters())
    for name, value in statistics(model).items():
        assert torch.equal(value, before[name]) == name.startswith("0.") or name.endswith("skipped_batches")


def loses_statistics():
    model, x = torch.func.replace_all_batch_norm_modules_(converted()), images()[0]
    assert model[0][1].running_mean is None
    torch.testing.assert_close(model.eval()(x), model.train()(x))


def fuses_into_a_convolution():
    model, x = converted().eval(), images()[0]
    fused = nn.utils.fusion.fuse_conv_bn_eval(model[0][0], model[0][1])
    torch.testing.assert_close(fused(x), model[0][1](model[0][0](x)))


DECAY = r"SGD applies weight decay to the filter of 1 norm, .*kalmannorm\.parameter_groups"


def step(model, optimizer):
    model(images()[0]).square().sum().backward()
    optimizer.step()


def warns_of_decay():
    model = converted()
    sgd = torch.optim.SGD(model.parameters(), 0.01, weight_decay=1e-4)
    with pytest.warns(UserWarning, match=DECAY):
        step(model, sgd)
    step(model, sgd)  # once: a second warning would be an error
    step(model, torch.optim.SGD(model.parameters(), 0.01))
    step(model, torch.optim.SGD(kalmannorm.parameter_groups(model, 1e-4), 0.01))


def test_an_optimizer_meets_norms_that_are_batch_norms_again():
    x = torch.randn(4, 3, 8, 8)
    model = kalmannorm.convert(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), x)
    kalmannorm.to_batchnorm(model, inplace=True)
    model(x).sum().backward()
    torch.optim.SGD(model.parameters(), 0.01, weight_decay=1e-4).step()


def is_spared_by_timm():
    model = converted()
    groups = timm.optim.param_groups_weight_decay(model, 1e-4)
    assert any(p is model[1][1].gain_logit for group in groups if not group["weight_decay"] for p in group["params"])
    step(model, torch.optim.SGD(groups, 0.01))
    learned = converted(transition="learned")
    with pytest.warns(UserWarning, match=DECAY):
        step(learned, torch.optim.SGD(timm.optim.param_groups_weight_decay(learned, 1e-4), 0.01))


def warns_of_hugging_face():
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # imports of its dependencies
        import transformers

        trainer_class, arguments = transformers.Trainer, transformers.TrainingArguments

    class Task(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = kalmannorm.convert(net(), images()[0])

        def forward(self, x, labels):
            return {"loss": nn.functional.cross_entropy(self.net(x), labels)}

    data = [{"x": image, "labels": i % 2} for i, image in enumerate(torch.cat(images()))]

    def trained(trainer_class):
        model = Task()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            quiet = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "use_cpu": True}
            with tempfile.TemporaryDirectory() as folder:
                args = arguments(folder, max_steps=2, per_device_train_batch_size=4, weight_decay=0.01, **quiet)
                trainer = trainer_class(model, args, train_dataset=data)
                names = trainer.get_decay_parameter_names(model)
                trainer.train()
        assert int(model.net[0][1].num_batches_tracked) == 2
        return names, [str(w.message) for w in caught if "kalmannorm" in str(w.message)]

    class KalmanTrainer(trainer_class):  # as in docs/integrations.md
        def get_decay_parameter_names(self, model):
            decayed = kalmannorm.parameter_groups(model, 1.0)[0]["params"]
            return [name for name, p in model.named_parameters() if any(p is other for other in decayed)]

    names, said = trained(trainer_class)
    assert "net.1.1.gain_logit" in names and len(said) == 1 and "override get_decay_parameter_names" in said[0]
    names, said = trained(KalmanTrainer)
    assert names and "net.1.1.gain_logit" not in names and not said


ROWS = {
    "isinstance(m, nn.BatchNorm2d)": is_a_batch_norm,
    "type(m) is nn.BatchNorm2d": is_not_exactly_one,
    "if isinstance(m, nn.BatchNorm2d): m.eval()": freezes_by_eval,
    "m.momentum = 0.01": takes_another_momentum,
    "m.track_running_stats = False": stops_tracking,
    "nn.SyncBatchNorm.convert_sync_batchnorm(model)": joins_ranks_by_torch,
    "timm.layers.convert_sync_batchnorm(model)": joins_ranks_by_timm,
    "lightning.Trainer(sync_batchnorm=True)": joins_ranks_by_lightning,
    "torch.optim.swa_utils.update_bn(loader, model)": updates_by_update_bn,
    "AveragedModel(model)": averages_weights,
    "timm.layers.freeze_batch_norm_2d(model)": freezes_by_timm,
    "torchvision.ops.FrozenBatchNorm2d": keeps_frozen_norms,
    "BaseFinetuning.freeze(modules)": freezes_by_lightning,
    "torch.func.replace_all_batch_norm_modules_(model)": loses_statistics,
    "fuse_conv_bn_eval(conv, m)": fuses_into_a_convolution,
    "SGD(model.parameters(), weight_decay=1e-4)": warns_of_decay,
    "timm.optim.param_groups_weight_decay(model)": is_spared_by_timm,
    "transformers.Trainer(model, args)": warns_of_hugging_face,
}


def test_the_page_has_these_rows():
    rows = re.findall(r"^\| `([^`]+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert rows == list(ROWS)


@pytest.mark.parametrize("row", ROWS)
def test_row(row):
    ROWS[row]()
