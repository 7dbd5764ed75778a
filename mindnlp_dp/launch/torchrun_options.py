"""Handle torchrun's options that ``mindnlp-dp run`` does not have, for users who type torchrun's command from memory.

:mod:`mindnlp_dp.launch.run_options` calls it. Options that would change nothing here are ignored; the others end with
an error that says what to type instead.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, Union

_ELSEWHERE = "every rank's output goes to worker_R.log in --log-dir; --tee 0, all or none says whose is shown"
_REFUSED = {
    ("--no-python",): "ranks are Python's; start another program from a script, by subprocess",
    ("--run-path",): "scripts are run so anyway; leave it out",
    ("--redirects", "-r"): _ELSEWHERE,
    ("-t",): _ELSEWHERE,
    ("--local-ranks-filter",): _ELSEWHERE,
    ("--logs-specs",): _ELSEWHERE,
    ("--local-addr",): "hosts are known by the address that they come from; --rdzv-endpoint says where they meet",
    ("--event-log-handler",): "failures are written to failures.jsonl in --log-dir",
}
_WITHOUT_VALUE = ("--no-python", "--run-path")
# They would change nothing: there is only one kind of rendezvous, and failures are detected at once.
_PASSED_OVER = ("--monitor-interval", "--start-method", "--role")
_RENDEZVOUS = ("c10d", "static")


class _Refused(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Union[str, Sequence[Any], None],
        option_string: Union[str, None] = None,
    ) -> None:
        parser.error(f"{option_string} is torchrun's, and not taken here: {self.const}")


def add_torchrun_options(run: argparse.ArgumentParser) -> None:
    """Add torchrun's other options to the parser, after all of ``run``'s own; none of them is in its help."""
    for names, instead in _REFUSED.items():
        nargs = 0 if names[0] in _WITHOUT_VALUE else 1
        run.add_argument(
            *_spelt(names), action=_Refused, nargs=nargs, const=instead, help=argparse.SUPPRESS, dest="refused"
        )
    for name in _PASSED_OVER:
        run.add_argument(*_spelt((name,)), help=argparse.SUPPRESS, dest="passed_over")
    run.add_argument(*_spelt(("--rdzv-backend",)), choices=_RENDEZVOUS, help=argparse.SUPPRESS, dest="passed_over")


def _spelt(names: Sequence[str]) -> list[str]:
    """Return the names, and their spellings with underscores."""
    otherwise = ["--" + name[2:].replace("-", "_") for name in names if "-" in name[2:]]
    return [*names, *otherwise]
