"""Tables of single kernels around attention: encoders, mHC, latent products, quantisation.

Source: collector/*/collect_{attn_encoder,mhc_module,mla_bmm,computescale}.py.
"""

from collections.abc import Iterator, Mapping

from foretoken.catalog.importers.aiconfigurator.formats import (
    CELL_DTYPES,
    MLA_HEAD_DIMS,
    MLA_LATENT_DIMS,
)
from foretoken.catalog.importers.aiconfigurator.perf_table import Circumstances, PerfTable
from foretoken.catalog.importers.aiconfigurator.points import Points, make_points
from foretoken.domain.measurements.estimate import DType

# TensorRT-LLM's kernel that has its weights in bf16 by then; its kernel of scaled blocks.
_UNPACKED, _BLOCKS = "_dequant_bf16", "_block_scaling_"


def read_encoder_attention(table: PerfTable) -> Iterator[Points]:
    """Yield the attention of encoders over equal sequences."""
    num_seqs, length = table.integers("batch_size"), table.integers("isl")
    dims = {
        "num_seqs": num_seqs,
        "num_tokens": num_seqs * length,
        "score_pairs": num_seqs * length * length,
        "num_heads": table.integers("num_heads"),
        "head_dim": table.integers("head_dim"),
    }
    described = table.describe(("attn_dtype",), lambda said: _plain(said, said["attn_dtype"]))
    yield make_points("encoder_attention", table, described, dims)


def read_hyper_connections(table: PerfTable) -> Iterator[Points]:
    """Yield hyper-connections; a row has the time of `num_sites` of them, one after the other."""
    described = table.describe((), lambda said: Circumstances.of(said, DType.BF16, {}))
    dims = {
        "num_tokens": table.integers("num_tokens"),
        "num_streams": table.integers("hc_mult"),
        "hidden": table.integers("hidden_size"),
        "sinkhorn_steps": table.integers("sinkhorn_iters"),
    }
    codes, names = table.coded("op_name")
    for code, name in enumerate(names):
        rows = described.where(codes == code)
        if name in ("pre", "post"):
            num_sites = table.integers("num_sites")
            yield make_points(f"mhc_{name}", table, rows, dims, num_calls=num_sites)
        else:
            table.leave_out(len(rows.rows), f"{name!r} of mHC is unknown here")


def read_latent_products(table: PerfTable) -> Iterator[Points]:
    """Yield the products that take queries to the latent space and values back, by head."""
    described = table.describe(("bmm_dtype",), _describe_product)
    codes, names = table.coded("op_name")
    inner, latent = MLA_HEAD_DIMS["qk_nope_head_dim"], MLA_LATENT_DIMS["kv_lora_rank"]
    sides = {"mla_gen_pre": (latent, inner), "mla_gen_post": (MLA_HEAD_DIMS["v_head_dim"], latent)}
    batch = {"batch": table.integers("num_heads"), "m": table.integers("num_tokens")}
    for code, name in enumerate(names):
        rows = described.where(codes == code)
        if name in sides:
            n, k = sides[name]
            yield make_points("batched_gemm", table, rows, {**batch, "n": n, "k": k})
        else:
            table.leave_out(len(rows.rows), f"{name!r} of latent attention is unknown here")


def read_quantize(table: PerfTable) -> Iterator[Points]:
    """Yield the parts of quantising activations: finding the scale, and scaling by it."""
    dims = {"num_tokens": table.integers("m"), "hidden": table.integers("k")}
    yield make_points("quantize", table, table.describe(("quant_dtype",), _describe_part), dims)


def _describe_part(said: Mapping[str, str]) -> Circumstances | str:
    parts = {"compute_scale": "scale", "scale_matrix": "convert"}
    if said["op_name"] not in parts:
        return f"{said['op_name']!r} is unknown here"
    return _plain(said, said["quant_dtype"], {"part": parts[said["op_name"]]})


def _describe_product(said: Mapping[str, str]) -> Circumstances | str:
    cell, kernel = said["bmm_dtype"], said["kernel_source"]
    if kernel.endswith(_UNPACKED):
        return _plain(said, "bfloat16", {"quant": cell})
    return _plain(said, cell, {"quant": "fp8_block" if _BLOCKS in kernel else ""})


def _plain(
    said: Mapping[str, str], cell: str, facts: Mapping[str, str] | None = None
) -> Circumstances | str:
    if cell not in CELL_DTYPES:
        return f"{said['op_name']} in {cell!r} is unknown here"
    return Circumstances.of(said, CELL_DTYPES[cell], facts or {})
