"""Count the processes that the kernel has killed for lack of memory, so that a rank's SIGKILL can be explained.

:class:`~mindnlp_dp.launch.processes.local_host.LocalHost` creates an :class:`OomKills` for each attempt.
"""

from __future__ import annotations

import re
from pathlib import Path

from mindnlp_dp.launch.processes.exit_status import read_text

_COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


class OomKills:
    """Counts such processes, of this process's cgroup or, if that has no counter, of the host, since its creation.

    Args:
        root: the folder of the root of the file system, for tests.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        files = [*_cgroup_files(root), root / "proc/vmstat"]
        self._file = next((file for file in files if _COUNT.search(read_text(file))), files[-1])
        self._before = self._count()

    def _count(self) -> int:
        found = _COUNT.search(read_text(self._file))
        return int(found[1]) if found else 0

    @property
    def number(self) -> int:
        """Return how many processes were killed since this object was created."""
        return max(0, self._count() - self._before)


def _cgroup_files(root: Path) -> list[Path]:
    """Return the files of this process's cgroup that may have the counter (Linux, cgroups(7)), of version 1 first."""
    files = []
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        # In a container, the path may be the host's, and the root of the hierarchy the container's own group.
        for group in (path.strip("/"), ""):
            if controllers == "memory":
                files.append(root / "sys/fs/cgroup/memory" / group / "memory.oom_control")
            elif not controllers:
                files.append(root / "sys/fs/cgroup" / group / "memory.events")
    return files
