"""Targets and numbers of ranks of tests whose ranks are processes."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from rank_process import programs_for

from hostweave.build.cuda import gpus

GPUS = len(gpus())
NOTICED = 4  # Time limit in seconds to notice a lost rank. The documentation says about one second, but other tests slow the machine down.
# Programs with sends and recvs, with puts, and with puts that Options.choices selects.
ENDLESS, SIGNALLED, CHOSEN = "matmul_rs_flat", "mlp_put", "chosen"


@dataclass(frozen=True)
class RankSetup:
    target: str
    programs: str
    ranks: int  # number of ranks that run the programs
    killed: int  # number of ranks in tests that end or stop a rank
    trials: int  # repetitions of test_a_rank_is_killed; some tests run every fourth repetition

    @property
    def right(self) -> str:
        return f"{len(programs_for(self.ranks, self.programs))} programs are right"


CPU = RankSetup("cpu", "few", 2, 2, 1)
CUDA = RankSetup("cuda", "all", max((ranks for ranks in (1, 2, 4, 8) if ranks <= GPUS), default=1), max(2, min(4, GPUS)), 20)
SETUPS = [pytest.param(CPU, id="cpu"), pytest.param(CUDA, id="cuda", marks=pytest.mark.gpu)]
everywhere = pytest.mark.parametrize("setup", SETUPS)
