# gemma-4-26B-A4B-it on 2xh100; estimated, where it says so
# vllm/vllm-openai:v0.32.0: vLLM's own image; serve.container_image names another
# --ipc host: GPUs exchange through shared memory
# --network host: vLLM itself listens on serve.host then, and nowhere else
# --max-model-len 17408: a prompt of 16,384 tokens and 1,024 of output, or what the model reads
# --tensor-parallel-size 2: divides the 8 kv heads and 2 global ones of gemma4-26b-a4b
# memory: GB a device, estimated: bfloat16 weights 26.4, one sequence's keys and values 1.1, a forward pass 1.4; of 72.0 that vLLM may use
# --limit-mm-per-prompt {"video": 0, "audio": 0}: images alone; their number is limited by --max-model-len
# --mm-processor-kwargs {"max_soft_tokens": 280}: data.image_tokens: as many soft tokens as an image was trained with
# --allowed-media-domains none.invalid: images come in the request as data: URLs; the server fetches none
# $HF_TOKEN: taken from the environment of whoever runs this
docker run --rm --init \
  --gpus all \
  --ipc host \
  --network host \
  --entrypoint vllm \
  --volume "$HOME"/.cache/huggingface:/root/.cache/huggingface \
  --env VLLM_NO_USAGE_STATS=1 \
  --env DO_NOT_TRACK=1 \
  --env HF_TOKEN \
  vllm/vllm-openai:v0.32.0 serve \
  google/gemma-4-26B-A4B-it \
  --served-model-name gemma-4-26B-A4B-it \
  --host 127.0.0.1 \
  --port 8000 \
  --dtype auto \
  --seed 0 \
  --chat-template-content-format openai \
  --uvicorn-log-level warning \
  --enable-prefix-caching \
  --max-model-len 17408 \
  --tensor-parallel-size 2 \
  --gpu-memory-utilization 0.90 \
  --limit-mm-per-prompt '{"video": 0, "audio": 0}' \
  --mm-processor-kwargs '{"max_soft_tokens": 280}' \
  --allowed-media-domains none.invalid
