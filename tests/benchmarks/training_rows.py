"""Training steps that others measured and published, as scenarios.

One function for each source: what its table leaves open is filled in from the scripts and
documents named there. Nothing is chosen by how well it fits.
"""

import csv
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from foretoken.domain.frameworks.trainer import TrainerSpec
from foretoken.domain.hardware.device import find_device
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.models.architecture import MlaSpec, ModelArchitecture, MoeSpec
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.units import MS_PER_S

Row = Mapping[str, str]

_GPT2_VOCAB = 50257
_MEGATRON_VOCAB = 51200
_VOCAB_MULTIPLE = 128
_TERA = 1e12


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedStep:
    """A step: what was run, what it took, and the memory it peaked at where the source says (0).

    Memory is what tensors occupied, and what the allocator reserved for them.
    """

    source: str
    label: str
    scenario: TrainingScenario
    measured_ms: float
    peak_gib: float = 0.0
    reserved_gib: float = 0.0


def read_steps(folder: Path) -> Iterator[PublishedStep]:
    """Yield every row of the sources that are simulated, in the order of the table."""
    geometry = {row["config"]: row for row in _read(folder / "model_geometry.csv")}
    for row in _read(folder / "measured_steps.csv"):
        reader = next((read for key, read in _READERS.items() if key in row["source"]), None)
        if reader is not None:
            yield from reader(row, geometry)


def narrow_weight_rules(device: str) -> Mapping[str, str]:
    """Return what NVIDIA's recipes of FP8 scaled by tensor keep of weights, as rules of a trainer.

    Source: NVIDIA/NeMo, collections/llm/recipes/precision/mixed_precision.py (fp8_params), and
    NVIDIA-NeMo/Megatron-Bridge, training/mixed_precision.py (fp8_param_gather). B200's and GB200's
    products read either layout, so that no transposed copy is made: Transformer Engine,
    pytorch/utils.py (is_non_tn_fp8_gemm_supported).
    """
    has_copies = find_device(device).architecture != "blackwell"
    return {"keeps_narrow_weights": "true", "caches_weight_copies": str(has_copies).lower()}


def _read(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8") as file:
        yield from csv.DictReader(file)


def _table_5(row: Row, _: Mapping[str, Row]) -> Iterator[PublishedStep]:
    """Read arXiv 2205.05198, table 5: full, or selective recomputation and sequence parallelism."""
    is_new = row["recompute"] != "full"
    yield _step(
        "2205.05198 table 5",
        row,
        _gpt(row, _MEGATRON_VOCAB),
        topology="a100_selene",
        trainer=TrainerSpec(profile="megatron-lm-2022"),
        recompute="selective" if is_new else "full",
        sequence_parallel=is_new,
    )


# Micro batch, layers of a virtual stage (0: not interleaved), by model size. Models of one
# pipeline stage run under PyTorch's DDP. Source: NVIDIA/Megatron-LM, examples/sc21/run_table_1.sh.
_TABLE_1 = {
    "1.7B": (16, 0),
    "3.6B": (16, 0),
    "7.5B": (16, 0),
    "18.4B": (8, 0),
    "39.1B": (4, 0),
    "76.1B": (2, 5),
    "145.6B": (2, 5),
    "310.1B": (1, 3),
    "529.6B": (1, 1),
    "1008.0B": (1, 0),
}
# PyTorch's DDP reduces buckets of 25 MiB of 16-bit gradients during the backward pass.
_DDP = {"overlaps_gradient_reduction": "true", "bucket_elements": str(25 * 2**20 // 2)}


def _table_1(row: Row, _: Mapping[str, Row]) -> Iterator[PublishedStep]:
    """Read arXiv 2104.04473, table 1: weak scaling on Selene."""
    micro_batch, layers = _TABLE_1[row["params"]]
    pp = int(row["pp"])
    yield _step(
        "2104.04473 table 1",
        row,
        _gpt(row, _MEGATRON_VOCAB),
        topology="a100_selene",
        trainer=TrainerSpec(profile="megatron-lm-2021", rules=_DDP if pp == 1 else {}),
        recompute="full",
        micro_batch_size=micro_batch,
        virtual_stages=int(row["layers"]) // pp // layers if layers else 1,
    )


def _table_2(row: Row, _: Mapping[str, Row]) -> Iterator[PublishedStep]:
    """Read arXiv 2104.04473, table 2: Megatron's parallelism against ZeRO-3.

    Source: the paper's text and table. Micro batches are 1 for pipelines, which are not interleaved
    where the text does not say so; ZeRO-3 runs one micro batch.
    """
    is_zero = "ZeRO-3" in row["zero_dist_opt"]
    share = int(row["gbs"]) // int(row["n_gpus"])
    yield _step(
        "2104.04473 table 2, ZeRO-3" if is_zero else "2104.04473 table 2",
        row,
        _gpt(row, _MEGATRON_VOCAB),
        topology="a100_selene",
        trainer=TrainerSpec(profile="deepspeed-zero3-2021" if is_zero else "megatron-lm-2021"),
        recompute="full",
        micro_batch_size=share if is_zero else 1,
        zero_stage=3 if is_zero else 0,
    )


def _megatron_v2(row: Row, _: Mapping[str, Row]) -> Iterator[PublishedStep]:
    """Read the tables of Megatron-LM's README at v2.0: each group runs its batch in one pass.

    Source: images/tables.tex; the FLOPs count a recomputed forward pass. In 2020 a DGX A100 had
    devices of 40 GB.
    """
    if "A100" in row["gpu"]:
        micro_batch = int(row["gbs"]) // int(row["dp"])
        yield _step(
            "Megatron-LM v2.0",
            row,
            _gpt(row, _MEGATRON_VOCAB),
            device="a100_sxm_40",
            topology="a100_40_selene",
            trainer=TrainerSpec(profile="megatron-lm-2021"),
            recompute="full",
            micro_batch_size=micro_batch,
        )


def _mt_nlg(row: Row, _: Mapping[str, Row]) -> Iterator[PublishedStep]:
    """Read arXiv 2201.11990, section 2.4; its FLOP/s count a recomputed forward pass.

    Source: the paper, section 3 (bfloat16); the optimizer that DeepSpeed has for it is by an author
    of the paper.
    """
    yield _step(
        "2201.11990 MT-NLG",
        row,
        _gpt(row, _MEGATRON_VOCAB),
        topology="a100_selene",
        trainer=TrainerSpec(profile="megatron-deepspeed-bf16"),
        recompute="full",
        dtype=DType.BF16,
        micro_batch_size=1,
        zero_stage=1,
    )


def _vtrain(row: Row, _: Mapping[str, Row]) -> Iterator[PublishedStep]:
    is_single = "single" in row["source"]
    source = "vTrain, one node" if is_single else f"vTrain, {row['params']}"
    yield _step(
        source,
        row,
        _gpt(row, _GPT2_VOCAB),
        topology="a100_hdr_4x",
        trainer=TrainerSpec(profile="megatron-deepspeed"),
        recompute="full",
    )


def _internlm(row: Row, _: Mapping[str, Row]) -> Iterator[PublishedStep]:
    """Read InternEvo's train_performance.md; optimizer states are shared out over all or some.

    The document is as old as InternLM's first release, and names its kernels. Where layers are not
    recomputed, their norms are: model/modeling_internlm.py there, dropout_selective_checkpoint,
    which configs/7B_sft.py leaves on.
    """
    sharding = row["zero_dist_opt"]
    is_whole, is_full = "within" not in sharding, row["recompute"] == "full"
    hidden, heads = int(row["hidden"]), int(row["heads"])
    model = ModelArchitecture(
        name=row["model"],
        num_layers=int(row["layers"]),
        hidden=hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        # 8/3 of hidden, rounded up to 256.
        intermediate=-(-hidden * 8 // 3 // 256) * 256,
        vocab=int(row["vocab"]),
        max_position=int(row["seq"]),
        has_qkv_bias=True,
    )
    yield _step(
        "InternLM 7B",
        row,
        model,
        topology="a100_roce_4x",
        trainer=TrainerSpec(profile="internlm-2023"),
        recompute="full" if is_full else "selective",
        recompute_modules=() if is_full else ("layernorm",),
        dtype=DType.BF16,
        zero_stage=1,
        shard_degree=0 if is_whole else int(sharding.split()[-1]),
    )


def _simumax(row: Row, geometry: Mapping[str, Row]) -> Iterator[PublishedStep]:
    """Read SimuMax's B200 records, run by Megatron-LM with Transformer Engine.

    Source: SimuMax, docs/b200/b200_real_repro_guide.md: cp_comm_type a2a.
    """
    name = row["model"].split()[0]
    known = geometry[{"llama3-405b": "llama3-405b_padding_128"}.get(name, name)]
    tp = int(row["tp"])
    yield _step(
        "SimuMax B200",
        row,
        _of_geometry(row, known),
        device="b200",
        topology="b200_hgx",
        trainer=TrainerSpec(profile="megatron-core", rules={"overlaps_tensor_gradients": "false"}),
        recompute="none",
        dtype=DType.BF16,
        virtual_stages=int(row["vpp"] or 1),
        sequence_parallel=tp > 1,
        context_parallel="all_to_all",
        zero_stage=1,
        expert_tp=1 if known["model_type"] == "moe" else 0,
    )


_READERS: Mapping[str, Callable[[Row, Mapping[str, Row]], Iterator[PublishedStep]]] = {
    "2205.05198": _table_5,
    "2104.04473 Table 1": _table_1,
    "2104.04473 Table 2": _table_2,
    "Megatron-LM tag v2.0": _megatron_v2,
    "2201.11990": _mt_nlg,
    "vTrain": _vtrain,
    "InternEvo": _internlm,
    "SimuMax": _simumax,
}


def _step(source: str, row: Row, model: ModelArchitecture, **options: object) -> PublishedStep:
    """Return a step of an A100's in fp16 unless `options`, fields of a scenario, say otherwise."""
    layout = ParallelLayout(
        tp=int(row["tp"] or 1),
        pp=int(row["pp"] or 1),
        dp=int(row["dp"] or 1),
        cp=int(row["cp"] or 1),
        ep=int(row["ep"] or 1),
    )
    chosen = {
        "device": "a100_sxm_80",
        "dtype": DType.FP16,
        "virtual_stages": int(row["vpp"] or 1),
        **options,
    }
    chosen.setdefault("micro_batch_size", int(row["mbs"] or 0))
    scenario = TrainingScenario(
        model=model,
        framework="pytorch",
        layout=layout,
        sequence_length=int(row["seq"]),
        global_batch_size=int(row["gbs"]),
        pipeline_schedule="interleaved" if chosen["virtual_stages"] != 1 else "one_f_one_b",
        **chosen,  # type: ignore[arg-type]
    )
    degrees = f"tp {layout.tp} pp {layout.pp} dp {layout.dp} cp {layout.cp} ep {layout.ep}"
    return PublishedStep(
        source=source,
        label=f"{model.name} l{model.num_layers} h{model.hidden} {degrees} "
        f"mbs {scenario.micro_batch_size}",
        scenario=scenario,
        measured_ms=_measured_ms(row),
        peak_gib=float(row["peak_alloc_gib"] or 0),
        reserved_gib=float(row["peak_reserved_gib"] or 0),
    )


def _gpt(row: Row, vocab: int) -> ModelArchitecture:
    """Return a GPT of Megatron's kind, its vocabulary padded for its tensor-parallel ranks."""
    hidden, heads = int(row["hidden"]), int(row["heads"])
    multiple = _VOCAB_MULTIPLE * int(row["tp"] or 1)
    return ModelArchitecture(
        name=row["model"].replace(" ", "-"),
        num_layers=int(row["layers"]),
        hidden=hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        intermediate=int(row["ffn"] or 4 * hidden),
        vocab=-(-int(row["vocab"] or vocab) // multiple) * multiple,
        max_position=int(row["seq"]),
        activation="gelu",
        is_gated=False,
        norm="layer_norm",
        position="learned",
        has_tied_embedding=True,
        has_bias=True,
        has_qkv_bias=True,
    )


def _of_geometry(row: Row, known: Row) -> ModelArchitecture:
    moe = mla = None
    if known["model_type"] == "moe":
        width = int(known["moe_ffn_hidden_size"])
        moe = MoeSpec(
            num_experts=int(known["expert_num"]),
            top_k=int(known["topk"]),
            expert_intermediate=width,
            num_shared_experts=int(known["moe_shared_expert_intermediate_size"] or 0) // width,
            # SimuMax's cases of few layers keep one dense layer.
            num_dense_layers=1,
        )
    if known["attention_type"] == "mla":
        mla = MlaSpec(
            q_lora_rank=int(known["q_lora_rank"] or 0),
            kv_lora_rank=int(known["kv_lora_rank"]),
            qk_nope_head_dim=int(known["qk_head_dim"]),
            qk_rope_head_dim=int(known["qk_pos_emb_head_dim"]),
            v_head_dim=int(known["v_head_dim"]),
        )
    heads = int(known["head_num"])
    return ModelArchitecture(
        name=row["model"].split()[0],
        num_layers=int(row["layers"]),
        hidden=int(known["hidden_size"]),
        num_heads=heads,
        num_kv_heads=int(row["kv_heads"] or known["kv_head_num"] or heads),
        head_dim=int(known["v_head_dim"] or known["head_size"]),
        intermediate=int(known["intermediate_size"]),
        vocab=int(known["vocab_size"]),
        max_position=int(row["seq"]),
        moe=moe,
        mla=mla,
    )


def _measured_ms(row: Row) -> float:
    """Return the step time, worked out from the rate where a source gives no time."""
    if row["step_time_s"]:
        return float(row["step_time_s"]) * MS_PER_S
    if row["tokens_per_s_per_gpu"]:
        num_tokens = int(row["gbs"]) * int(row["seq"])
        rate_tps = float(row["tokens_per_s_per_gpu"]) * int(row["n_gpus"])
        return num_tokens / rate_tps * MS_PER_S
    rate = float(row["tflops_per_gpu"]) * _TERA * int(row["n_gpus"])
    return _hardware_flops(row) / rate * MS_PER_S


def _hardware_flops(row: Row) -> float:
    """Return a step's FLOPs with a recomputed forward pass. Source: arXiv 2104.04473, eq. 3."""
    layers, hidden, seq = int(row["layers"]), int(row["hidden"]), int(row["seq"])
    rest = seq / (6 * hidden) + _MEGATRON_VOCAB / (16 * layers * hidden)
    return 96.0 * int(row["gbs"]) * seq * layers * hidden**2 * (1 + rest)
