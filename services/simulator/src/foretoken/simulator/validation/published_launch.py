"""How the servers of published runs were started, as far as no engine does so by itself.

InferenceMAX has scripts: SemiAnalysisAI/InferenceX, benchmarks/ and benchmarks/single_node/, one
for a model's format, device and engine: {dsr1,qwen3.5,glm5}_fp8_{b200,h200}.sh,
dsr1_fp8_h200_trt.sh, dsr1_{fp4,fp8}_b200_trt.sh, 70b_{fp4,fp8}_{b200,h200}_trt_slurm.sh,
70b_fp8_h200_slurm.sh, minimaxm2.5_fp8_{b200,h100,h200}.sh, kimik2.5_int4_h200.sh and
kimik2.5_fp4_b200.sh. Others are AIConfigurator's own runs, whose generator writes what starts them
(0.12, generator/rule_plugin/{vllm,sglang}.rule).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from foretoken.domain.measurements.estimate import DType
from foretoken.simulator.validation.published_run import PublishedRun

# Requests for each one that runs at a time. The first of them come at once and wait for each other,
# so means depend on it.
NUM_ROUNDS = 10
# The least that a step of TensorRT-LLM may hold, and what its limit is a multiple of.
_LEAST_STEP_TOKENS = 8192
_STEP_TOKENS_UNIT = 64
# Tokens of a step that AIConfigurator's generator adds to a prompt.
_SPARE_TOKENS = 1500
# Decode steps between two looks for new requests, from so many at a time on and below.
_MANY_REQUESTS, _RARELY, _OFTEN = 16, "30", "10"
# Llama under TensorRT-LLM waits for more prompts where these are the lengths, and on fewer devices.
_LENGTHS_THAT_WAIT, _DEVICES_THAT_DO_NOT = (1024, 1024), 8
_MEMORY_RATIOS_OF_VLLM = {
    ("kimi-k2.5-int4", "b200"): 0.9,
    ("kimi-k2.5-int4", "h200_sxm"): 0.95,
    ("minimax-m2.5", "b200"): 0.95,
    ("minimax-m2.5", "h100_sxm"): 0.9,
    ("minimax-m2.5", "h200_sxm"): 0.95,
}
# Whose scripts set `cudagraph_mode: PIECEWISE`.
_IN_PIECES = {("minimax-m2.5", "h100_sxm"), ("minimax-m2.5", "h200_sxm")}


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedLaunch:
    """What a launch sets: 0, nothing and empty leave it to the engine."""

    step_tokens: int = 0
    memory_ratio: float = 0.0
    kv_dtype: DType | None = None
    rules: Mapping[str, str] = field(default_factory=dict)
    num_rounds: int = NUM_ROUNDS


def find_launch(run: PublishedRun) -> PublishedLaunch:
    """Return how a run's server was started."""
    if run.engine == "trtllm":
        return _launch_trtllm(run)
    if not run.is_of_inference_max:
        return _launch_generated(run)
    if run.engine == "sglang":
        return _launch_sglang(run)
    return PublishedLaunch(
        step_tokens=_LEAST_STEP_TOKENS if run.model == "llama-3.1-70b" else 0,
        memory_ratio=_MEMORY_RATIOS_OF_VLLM.get((run.model, run.device), 0.0),
        rules={"graph_mode": "piecewise"} if (run.model, run.device) in _IN_PIECES else {},
    )


def limit_step_tokens(concurrency: int, input_tokens: int) -> int:
    """Return the tokens of a step that a prompt can join when all others run."""
    units = (concurrency + input_tokens + 2 * _STEP_TOKENS_UNIT - 1) // _STEP_TOKENS_UNIT
    return max(_LEAST_STEP_TOKENS, units * _STEP_TOKENS_UNIT)


def _launch_generated(run: PublishedRun) -> PublishedLaunch:
    """Let a step hold all that run and a prompt, and what is spare; SGLang's mix both.

    The generator's limit of prompts is not in SGLang's runs: 448 requests of Llama-3.1-8B, each of
    100 tokens, take 126 steps, and with the two prompts that it allows in a step would take 224.
    """
    if run.engine == "sglang":
        return PublishedLaunch(rules={"mixes_prefill": "true"})
    return PublishedLaunch(step_tokens=run.concurrency + run.input_tokens + _SPARE_TOKENS)


def _launch_trtllm(run: PublishedRun) -> PublishedLaunch:
    """TensorRT-LLM splits no prompt; by its default a long one waits until no request runs."""
    step_tokens = limit_step_tokens(run.concurrency, run.input_tokens)
    if not run.is_of_inference_max:
        return PublishedLaunch(step_tokens=step_tokens)
    if run.model == "llama-3.1-70b":
        return _launch_llama(run)
    if run.model != "deepseek-v3":
        return PublishedLaunch(step_tokens=step_tokens)
    return PublishedLaunch(
        step_tokens=step_tokens,
        memory_ratio=0.75 if run.device == "h200_sxm" else 0.8,
        kv_dtype=DType.FP8,
        rules={"balance_timeout_iters": "60"} if run.dp > 1 else {},
    )


def _launch_llama(run: PublishedRun) -> PublishedLaunch:
    """Let a step hold the longest request, and short prompts of short answers wait to fill one."""
    is_fp8_of_b200 = run.device == "b200" and run.formats[0].startswith("fp8")
    waits = (
        run.input_tokens,
        run.output_tokens,
    ) == _LENGTHS_THAT_WAIT and run.tp < _DEVICES_THAT_DO_NOT
    return PublishedLaunch(
        step_tokens=16384 if is_fp8_of_b200 else run.input_tokens + run.output_tokens,
        kv_dtype=DType.FP8,
        rules={"batch_wait_iters": "20", "batch_wait_tokens_ratio": "0.9"} if waits else {},
    )


def _launch_sglang(run: PublishedRun) -> PublishedLaunch:
    """Let the scheduler of large models look for requests every few steps only, on B200."""
    if run.model == "glm-5":
        num_rounds = 5 if run.device == "h200_sxm" else NUM_ROUNDS
        return PublishedLaunch(memory_ratio=0.85, num_rounds=num_rounds)
    if run.device not in ("h200_sxm", "b200"):
        return PublishedLaunch()
    if run.device == "h200_sxm":
        if run.model == "deepseek-v3":
            return PublishedLaunch(step_tokens=32768, memory_ratio=0.82)
        return PublishedLaunch(step_tokens=16384, memory_ratio=0.8, kv_dtype=DType.FP8)
    interval = _RARELY if run.concurrency >= _MANY_REQUESTS else _OFTEN
    is_nvfp4_deepseek = run.model == "deepseek-v3" and run.formats[0] == "nvfp4"
    return PublishedLaunch(
        step_tokens=16384 if is_nvfp4_deepseek else 32768,
        memory_ratio=0.85 if is_nvfp4_deepseek else 0.82,
        kv_dtype=DType.FP8,
        rules={"receive_interval": interval},
    )
