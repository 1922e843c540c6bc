# demo on cpu; estimated, where it says so
# --max-model-len 352: serve.max_model_len: a prompt and its output together
# --enforce-eager: compiling takes longer than it saves in a short life on a CPU
# --enable-lora: vLLM may load a Gemma 4 adapter and ignore it (https://github.com/vllm-project/vllm/issues/41754); it is compared with the base once up
# not there yet: runs/demo/adapter
VLLM_CPU_KVCACHE_SPACE=1 \
  VLLM_CPU_OMP_THREADS_BIND=nobind \
  OMP_NUM_THREADS=3 \
  VLLM_ENABLE_V1_MULTIPROCESSING=0 \
  PYTHONPATH=/gemsmith/src/gemsmith/serve/on_cpu \
  HF_HUB_OFFLINE=1 \
  VLLM_NO_USAGE_STATS=1 \
  DO_NOT_TRACK=1 \
  .venv-serve/bin/python -m vllm.entrypoints.openai.api_server \
  --model /gemsmith/recipes/demo_base \
  --served-model-name demo-base \
  --host 127.0.0.1 \
  --port 8000 \
  --dtype float32 \
  --seed 0 \
  --chat-template-content-format string \
  --uvicorn-log-level warning \
  --enable-prefix-caching \
  --max-model-len 352 \
  --enforce-eager \
  --distributed-executor-backend uni \
  --no-enable-chunked-prefill \
  --hf-overrides '{"architectures": ["Gemma4ForCausalLM"]}' \
  --enable-lora \
  --max-loras 2 \
  --max-lora-rank 16 \
  --lora-modules demo=runs/demo/adapter
