"""From a training checkpoint to weights that can be served: the adapter, the merged checkpoint, and the proof that they are right.

checkpoints/<step>/model_params  ->  adapter/ (PEFT)
base safetensors + adapter       ->  merged/  (the base's files, W + scale * B A where there is an adapter)
"""
