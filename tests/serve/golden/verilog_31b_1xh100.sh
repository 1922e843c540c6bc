# verilog_31b on 1xh100; estimated, where it says so
# vllm/vllm-openai:v0.32.0: vLLM's own image; serve.container_image names another
# --ipc host: GPUs exchange through shared memory
# --network host: vLLM itself listens on serve.host then, and nowhere else
# --max-model-len 15872: serve.max_model_len: a prompt and its output together
# --tensor-parallel-size 1: divides the 16 kv heads and 4 global ones of gemma4-31b
# memory: GB a device, estimated: bfloat16 weights 61.4, one sequence's keys and values 5.5, a forward pass 2.7; of 72.0 that vLLM may use
# --language-model-only: serve.images is false
# --max-num-batched-tokens 4096: with 8192 the sliding windows' keys and values would not fit next to the weights
# not there yet: runs/verilog_31b/merged
docker run --rm --init \
  --gpus all \
  --ipc host \
  --network host \
  --entrypoint vllm \
  --volume "$PWD"/runs/verilog_31b/merged:/model:ro \
  --env HF_HUB_OFFLINE=1 \
  --env VLLM_NO_USAGE_STATS=1 \
  --env DO_NOT_TRACK=1 \
  vllm/vllm-openai:v0.32.0 serve \
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
  --tensor-parallel-size 1 \
  --gpu-memory-utilization 0.90 \
  --language-model-only \
  --max-num-batched-tokens 4096
