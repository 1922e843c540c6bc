"""From a training checkpoint to weights that can be served: the adapter and the merged checkpoint.

checkpoints/<step>/model_params  ->  adapter/ (PEFT)
base safetensors + adapter       ->  merged/  (the base's files, W + scale * B A where there is an adapter)
"""
