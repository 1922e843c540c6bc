"""From a training checkpoint to weights that can be served: the adapter, the merged checkpoint, and the proof that they are right.

checkpoints/<step>/model_params  ->  adapter/ (PEFT)
base safetensors + adapter       ->  merged/  (the base's files, W + alpha/rank * B A where there is an adapter)
"""

from gemsmith.export.adapters import Adapter, LowRank, read_peft_adapter, read_run_adapter, write_peft_adapter
from gemsmith.export.merge import Merged, merge

__all__ = ["Adapter", "LowRank", "Merged", "merge", "read_peft_adapter", "read_run_adapter", "write_peft_adapter"]
