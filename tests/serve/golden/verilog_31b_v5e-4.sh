# verilog_31b on v5e-4; estimated, where it says so
# TPU VM: runtime image v2-alpha-tpuv5-lite; another boots and cannot be reached
# vllm/vllm-tpu:gemma4: vLLM's own image; serve.container_image names another
# --privileged, --shm-size 16G, /dev/shm: libtpu needs the chips and shared memory
# --network host: vLLM itself listens on serve.host then, and nowhere else
# --max-model-len 15872: serve.max_model_len: a prompt and its output together
# --tensor-parallel-size 4: divides the 16 kv heads and 4 global ones of gemma4-31b
# memory: GB a device, estimated: fp8 weights 9.2, one sequence's keys and values 2.2, a forward pass 1.1; of 14.4 that vLLM may use
# --additional-config: weights in fp8: in bfloat16 they do not fit; Qwix makes them while they load, which tpu-inference calls deprecated; its matmuls are of bfloat16, so this saves memory alone
# --disable_chunked_mm_input: an image's tokens attend to each other, so it is not cut into chunks
# serve.images: is false, and images are taken all the same: no switch is known to leave their encoder out on a TPU
# VLLM_XLA_CACHE_PATH, ~/.cache/gemsmith/xla: the first start compiles for 8 to 10 minutes, others take that from the folder (https://github.com/vllm-project/tpu-inference/issues/606); a bucket would not do
# --max-num-batched-tokens 4096: an image has up to 2496 tokens and is not cut; vLLM may batch fewer, and die (https://github.com/vllm-project/vllm/issues/42687)
# warning: vllm/vllm-tpu:gemma4 is vLLM 0.19.0, whose vulnerabilities later ones mend; serve.container_image names one of those (https://arxiv.org/abs/2605.25645)
# warning: vLLM's image for TPUs refused a local folder, and took a hub id alone (https://arxiv.org/abs/2605.25645, its notes)
# warning: kv_cache_dtype auto was fp8_e5m2 on a v6e-8; --kv-cache-dtype in serve.arguments names it (https://arxiv.org/abs/2605.25645)
# not there yet: runs/verilog_31b/merged
docker run --rm --init \
  --privileged \
  --network host \
  --shm-size 16G \
  --entrypoint vllm \
  --volume "$PWD"/runs/verilog_31b/merged:/model:ro \
  --volume /dev/shm:/dev/shm \
  --volume "$HOME"/.cache/gemsmith/xla:/xla-cache \
  --env HF_HUB_OFFLINE=1 \
  --env VLLM_NO_USAGE_STATS=1 \
  --env DO_NOT_TRACK=1 \
  --env VLLM_XLA_CACHE_PATH=/xla-cache \
  vllm/vllm-tpu:gemma4 serve \
  /model \
  --served-model-name verilog_31b \
  --host 127.0.0.1 \
  --port 8000 \
  --dtype auto \
  --seed 0 \
  --chat-template-content-format string \
  --uvicorn-log-level warning \
  --enable-prefix-caching \
  --max-model-len 15872 \
  --tensor-parallel-size 4 \
  --additional-config '{"quantization": {"qwix": {"use_abstract_model": true, "rules": [{"module_path": ".*", "weight_qtype": "float8_e4m3fn"}]}}}' \
  --disable_chunked_mm_input \
  --max-num-batched-tokens 4096
