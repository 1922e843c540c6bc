# gemma-4-31B-it on v6e-8; estimated, where it says so
# TPU VM: runtime image v2-alpha-tpuv6e; another boots and cannot be reached
# vllm/vllm-tpu:gemma4: vLLM's own image; serve.container_image names another
# --privileged, --shm-size 16G, /dev/shm: libtpu needs the chips and shared memory
# --network host: vLLM itself listens on serve.host then, and nowhere else
# --max-model-len 17408: a prompt of 16,384 tokens and 1,024 of output, or what the model reads
# --tensor-parallel-size 8: of the 16 kv heads and 4 global ones of gemma4-31b: 2 hold each of 4; one program has all chips
# memory: GB a device, estimated: bfloat16 weights 8.9, one sequence's keys and values 1.3, a forward pass 0.7; of 30.2 that vLLM may use
# --disable_chunked_mm_input: an image's tokens attend to each other, so it is not cut into chunks
# --limit-mm-per-prompt {"video": 0, "audio": 0}: images alone; their number is limited by --max-model-len
# --mm-processor-kwargs {"max_soft_tokens": 280}: data.image_tokens: as many soft tokens as an image was trained with
# --allowed-media-domains none.invalid: images come in the request as data: URLs; the server fetches none
# VLLM_XLA_CACHE_PATH, ~/.cache/gemsmith/xla: the first start compiles for 8 to 10 minutes, others take that from the folder (https://github.com/vllm-project/tpu-inference/issues/606); a bucket would not do
# --max-num-batched-tokens 4096: an image has up to 2496 tokens and is not cut; vLLM may batch fewer, and die (https://github.com/vllm-project/vllm/issues/42687)
# warning: vllm/vllm-tpu:gemma4 is vLLM 0.19.0, whose vulnerabilities later ones mend; serve.container_image names one of those (https://arxiv.org/abs/2605.25645)
# warning: kv_cache_dtype auto was fp8_e5m2 on a v6e-8; --kv-cache-dtype in serve.arguments names it (https://arxiv.org/abs/2605.25645)
# $HF_TOKEN: taken from the environment of whoever runs this
docker run --rm --init \
  --privileged \
  --network host \
  --shm-size 16G \
  --entrypoint vllm \
  --volume "$HOME"/.cache/huggingface:/root/.cache/huggingface \
  --volume /dev/shm:/dev/shm \
  --volume "$HOME"/.cache/gemsmith/xla:/xla-cache \
  --env VLLM_NO_USAGE_STATS=1 \
  --env DO_NOT_TRACK=1 \
  --env VLLM_XLA_CACHE_PATH=/xla-cache \
  --env HF_TOKEN \
  vllm/vllm-tpu:gemma4 serve \
  google/gemma-4-31B-it \
  --served-model-name gemma-4-31B-it \
  --host 127.0.0.1 \
  --port 8000 \
  --dtype auto \
  --seed 0 \
  --chat-template-content-format openai \
  --uvicorn-log-level warning \
  --enable-prefix-caching \
  --max-model-len 17408 \
  --tensor-parallel-size 8 \
  --limit-mm-per-prompt '{"video": 0, "audio": 0}' \
  --mm-processor-kwargs '{"max_soft_tokens": 280}' \
  --allowed-media-domains none.invalid \
  --disable_chunked_mm_input \
  --max-num-batched-tokens 4096
