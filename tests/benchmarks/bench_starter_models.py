"""What the starter knows of today's models: a decode step of each on GPUs it has, and has not.

Of a step of 64 requests after 4,096 tokens under `vllm-0.25` it prints how much of its time rests
on points that were measured or are surrounded by such, and how wide the 90 % interval is in parts
of the time: of models that fit one device there, of others on eight (tp 8, and ep 8 with
experts), which is what a rank of more computes where it does not fit these either.

    python tests/benchmarks/bench_starter_models.py [--model NAME ...] [--device NAME ...]
"""

import argparse
import tempfile
from dataclasses import replace

import numpy as np

from foretoken.app.compose import Composition
from foretoken.app.config import AppConfig
from foretoken.app.starter import with_starter
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.frameworks.engine import EngineSpec
from foretoken.domain.lowering.graph import BatchShape, DecodeShape
from foretoken.domain.lowering.lower import lower_rank
from foretoken.domain.models.architecture import find_model
from foretoken.domain.models.stack import stack_of
from foretoken.domain.ports import PredictorPort
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.simulator.cost.answer import Questions, covered_rows
from foretoken.simulator.cost.latency_surfaces import query_of, replica_ranks, surface_spec
from foretoken.simulator.cost.substitute import Substitute, find_folded
from foretoken.simulator.serving.feasibility import judge_feasibility

_MODELS = (
    *("deepseek-v3.2", "deepseek-v3.2-nvfp4", "deepseek-v4-pro-fp8", "deepseek-v4-flash"),
    *("kimi-k2.5-int4", "kimi-k2.5-nvfp4", "qwen3.5-397b-a17b", "qwen3.5-397b-a17b-nvfp4"),
    *("glm-5-fp8", "glm-5-nvfp4", "minimax-m2.5", "minimax-m3", "minimax-m3-nvfp4"),
    *("gpt-oss-120b", "gemma-4-31b-nvfp4", "gemma-4-26b-a4b", "nemotron-3-nano-30b-a3b"),
    *("nemotron-3-super-120b-a12b-fp8", "nemotron-3-super-120b-a12b-nvfp4", "llama-3.1-8b"),
    *("llama-3.1-70b", "qwen3-32b", "deepseek-v3"),
)
_DEVICES = ("h100_sxm", "h200_sxm", "b200", "b300", "gb200")
_NUM_REQUESTS, _CONTEXT = 64, 4096


def main() -> None:
    """Ask the starter in a new home, and print the table."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--model", action="append", help=f"default: {', '.join(_MODELS)}")
    parser.add_argument("--device", action="append", help=f"default: {', '.join(_DEVICES)}")
    options = parser.parse_args()
    devices = options.device or _DEVICES
    print(f"| model | {' | '.join(name.partition('_')[0].upper() for name in devices)} |")
    print("|---" * (1 + len(devices)) + "|")
    with (
        tempfile.TemporaryDirectory() as home,
        Composition(with_starter(AppConfig(home=home), {})) as services,
    ):
        for name in options.model or _MODELS:
            cells = [_say_step(name, device, services.predictor) for device in devices]
            print(f"| {name} | {' | '.join(cells)} |", flush=True)


def _say_step(name: str, device: str, predictor: PredictorPort) -> str:
    model, engine = find_model(name), EngineSpec(profile="vllm-0.25")
    many = ParallelLayout(tp=8, ep=8 if stack_of(model).experts else 1)
    for layout in (ParallelLayout(), many):
        scenario = ServingScenario(model=model, device=device, layout=layout, engine=engine)
        try:
            _, problem = judge_feasibility(scenario, scenario.resolve_engine())
        except InvalidRequestError:
            # There is no such format on the device.
            return "-"
        if layout is many or not problem:
            covered, width = _price_step(scenario, predictor)
            return f"{covered:.0%}, {width:.1f}".replace("%", " %")
    return "-"


def _price_step(scenario: ServingScenario, predictor: PredictorPort) -> tuple[float, float]:
    """Return the share of a step that is covered, and the width of its interval."""
    spec = surface_spec(scenario, 2 * _CONTEXT)
    tokens, context = np.array([_NUM_REQUESTS]), np.array([_CONTEXT])
    decode = DecodeShape(num_seqs=tokens, kv_tokens=tokens * context, kv_tokens_max=context)
    shape = BatchShape(num_tokens=tokens, num_output_rows=tokens, decode=decode)
    nodes = [node for rank in replica_ranks(spec) for node in lower_rank(shape, spec.options, rank)]
    ways = [Substitute(node, spec, np.ones(1, dtype=np.bool_)) for node in nodes]
    questions = Questions()
    for way in ways:
        way.ask(questions)
    query = replace(query_of(spec), tables=questions.tables)
    found = questions.match(predictor.predict(query).tables)
    priced = [(node, way.answer(found)) for node, way in zip(nodes, ways, strict=True)]
    folded = find_folded(priced)
    whole, covered, width = 0.0, 0.0, 0.0
    for node, answer in priced:
        if node.role not in folded:
            time_us = node.repeat * float(np.max(answer.latency_us))
            whole += time_us
            covered += time_us * bool(covered_rows(answer).all())
            width += node.repeat * float(np.max(answer.high_us) - np.max(answer.low_us))
    return covered / whole, width / whole


if __name__ == "__main__":
    main()
