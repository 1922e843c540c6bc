# gemma-4-E2B-it on cpu; estimated, where it says so
# --max-model-len 17408: a prompt of 16,384 tokens and 1,024 of output, or what the model reads
# --enforce-eager: compiling takes longer than it saves in a short life on a CPU
# $HF_TOKEN: taken from the environment of whoever runs this
HF_TOKEN="$HF_TOKEN" \
  VLLM_CPU_KVCACHE_SPACE=1 \
  VLLM_CPU_OMP_THREADS_BIND=nobind \
  OMP_NUM_THREADS=3 \
  VLLM_ENABLE_V1_MULTIPROCESSING=0 \
  PYTHONPATH=/gemsmith/src/gemsmith/serve/on_cpu \
  VLLM_NO_USAGE_STATS=1 \
  DO_NOT_TRACK=1 \
  .venv-serve/bin/python -m vllm.entrypoints.openai.api_server \
  --model google/gemma-4-E2B-it \
  --served-model-name gemma-4-E2B-it \
  --host 127.0.0.1 \
  --port 8000 \
  --dtype auto \
  --seed 0 \
  --chat-template-content-format openai \
  --uvicorn-log-level warning \
  --enable-prefix-caching \
  --max-model-len 17408 \
  --enforce-eager \
  --distributed-executor-backend uni \
  --no-enable-chunked-prefill \
  --limit-mm-per-prompt '{"video": 0, "audio": 0}' \
  --mm-processor-kwargs '{"max_soft_tokens": 280}' \
  --allowed-media-domains none.invalid
