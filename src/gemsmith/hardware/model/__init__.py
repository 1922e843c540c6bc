"""What one training step has to do and to hold, by formula, from the zoo's tensors. No ML library is imported."""

from gemsmith.hardware.model.memory import choose_remat, memory_of, micro_batches
from gemsmith.hardware.model.work import ImageWork, StepCost, images_of, on_chips, step_cost

__all__ = ["ImageWork", "StepCost", "choose_remat", "images_of", "memory_of", "micro_batches", "on_chips", "step_cost"]
