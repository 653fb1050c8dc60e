"""The stages of `profiles.gpu_suite`, in order: what is wrong shows before what is slow."""

from profiles.gpu_stages import attention, checks, engine, environment, steps
from profiles.gpu_stages.base import Stage

ORDER: tuple[Stage, ...] = (
    *environment.STAGES,
    *checks.STAGES,
    *engine.STAGES,
    *attention.STAGES,
    *steps.STAGES,
)
