"""Make this process, and those that it starts, see the NPUs of a host that has none.

The cards are files of a folder in the place of /dev. Python imports a module sitecustomize from PYTHONPATH when it
starts, so what tests add to it runs in the launcher and in every rank, before the package is imported.
"""

from __future__ import annotations

import glob
import os
from pathlib import Path

SEES_THE_FOLDER = """
import glob

real = glob.glob

def in_the_folder(pattern, **options):
    return real(pattern.replace("/dev/", {folder!r} + "/", 1) if pattern.startswith("/dev/") else pattern, **options)

glob.glob = in_the_folder
"""

# Ranks are given their cards, and compute and communicate on the CPU.
ACCEPTS_NPUS = """
import sys

if "mindnlp_dp.launch.processes.worker" in sys.orig_argv:
    import mindspore

    real_device = mindspore.set_device

    def set_device(target, *card):
        if target != "Ascend":
            real_device(target, *card)

    mindspore.set_device = set_device
"""

# Ranks exchange arrays over MCCL as on a device: their updaters and checks are those of devices. MCCL (MindSpore 2.7 to
# 2.10) has no kernels of two collectives, which others emulate.
EXCHANGES_AS_ON_A_DEVICE = """
import sys

if "mindnlp_dp.launch.processes.worker" in sys.orig_argv:
    import mindspore

    from mindnlp_dp.communication.transports.mindspore.mindspore_transport import MindSporeChannel, MindSporeTransport

    def reduce_scatter_async(self, x):
        length = x.shape[0] // self.world_size
        return self.sum(x)[self.slice_index * length : (self.slice_index + 1) * length].copy(), None

    def all_gather_flat(self, x):
        return mindspore.ops.cat(self._transport.calls.all_gather(x, self.world_size))

    MindSporeChannel.reduce_scatter_async, MindSporeChannel.all_gather_flat = reduce_scatter_async, all_gather_flat
    real_init = MindSporeTransport.__init__

    def init(self, ranks=None):
        real_init(self, ranks)
        self.waits_for_a_device = True

    MindSporeTransport.__init__ = init
"""


class NpuHost:
    """A host with NPUs; the environment has neither DEVICE_TARGET nor a list of visible cards."""

    def __init__(self, folder: Path, monkeypatch, num_cards: int = 8):
        self._dev, self._modules = folder / "dev", folder / "modules"
        self._dev.mkdir(parents=True)
        self._modules.mkdir()
        for card in range(num_cards):
            (self._dev / f"davinci{card}").touch()
        (self._dev / "davinci_manager").touch()
        self.inject(SEES_THE_FOLDER.format(folder=str(self._dev)))
        real = glob.glob
        monkeypatch.setattr(
            glob, "glob", lambda pattern, **options: real(pattern.replace("/dev/", f"{self._dev}/", 1), **options)
        )
        path = [str(self._modules), os.environ.get("PYTHONPATH", "")]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
        for name in ("DEVICE_TARGET", "ASCEND_RT_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "MINDNLP_DP_PYTHON"):
            monkeypatch.delenv(name, raising=False)

    def inject(self, code: str) -> None:
        """Make every new Python process run some code when it starts."""
        with open(self._modules / "sitecustomize.py", "a") as file:
            file.write(code)

    def install(self, name: str, text: str) -> None:
        """Write a module, such as ``hccl/__init__.py``, that every new process can import."""
        path = self._modules / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
