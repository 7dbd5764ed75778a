"""Which parallelism, before anything is launched: NumPy and SciPy alone, no device and no MindSpore.

Each part is of use by itself: the integer program and the dynamic program of Alpa, reshardings between two meshes as
scheduling, a simulator of pipelines, memory; :func:`plan` puts them together.
"""

from .cluster import Cluster, load_cluster
from .integer_program import Choice, InfeasibleError, choose_strategies
from .memory import MemoryUse, memory_of
from .models import load_model
from .plan_types import Plan, Plans
from .planning import plan, predict
from .resharding import UnitTask, unit_tasks
from .resharding_schedule import Schedule, schedule_tasks
from .simulate import Timeline, simulate_pipeline
from .slicing import Slicing, slice_stages

__all__ = [
    "Choice",
    "Cluster",
    "InfeasibleError",
    "MemoryUse",
    "Plan",
    "Plans",
    "Schedule",
    "Slicing",
    "Timeline",
    "UnitTask",
    "choose_strategies",
    "load_cluster",
    "load_model",
    "memory_of",
    "plan",
    "predict",
    "schedule_tasks",
    "simulate_pipeline",
    "slice_stages",
    "unit_tasks",
]
