"""Plans the parallelism of a training run before it starts; needs neither a device nor MindSpore.

:func:`plan` and :func:`predict` use all parts, and each part works alone: the integer program and the dynamic program
of Alpa, the scheduling of resharding between two meshes, a pipeline simulator, and a memory model. Read planning.py
first, then candidates.py and cost_model/.
"""

from mindnlp_dp.pipeline_schedules.resharding_layouts import UnitTask, unit_tasks
from mindnlp_dp.pipeline_schedules.resharding_schedule import Schedule, schedule_tasks
from mindnlp_dp.pipeline_schedules.simulation import Timeline, simulate_pipeline
from mindnlp_dp.planner.cost_model.memory_cost import MemoryUse, memory_of
from mindnlp_dp.planner.integer_program import Choice, InfeasibleError, choose_strategies
from mindnlp_dp.planner.plan import Plan, Plans
from mindnlp_dp.planner.planning import plan, predict
from mindnlp_dp.planner.profiles.cluster_profile import Cluster, load_cluster
from mindnlp_dp.planner.profiles.model_profiles import load_model
from mindnlp_dp.planner.stage_partition import Slicing, slice_stages

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
