"""Models of GGUF files: what the metadata says, how tensors are stored, and what is refused."""

from pathlib import Path

import pytest
from gguf_files import (
    F16,
    F32,
    MXFP4,
    Q4_K,
    Q6_K,
    Q8_0,
    attention_tensors,
    decoder_keys,
    expert_tensors,
    mlp_tensors,
    trunk_tensors,
    under,
    write_gguf,
)

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.lowering.graph import BatchShape
from foretoken.domain.lowering.lower import lower_forward
from foretoken.domain.lowering.options import LoweringOptions
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.models.description import describe_model
from foretoken.domain.models.gguf_file import read_gguf
from foretoken.domain.models.load import load_model
from foretoken.domain.models.parameters import count_parameters
from foretoken.domain.models.quantization import find_quantization
from foretoken.domain.models.stack import stack_of

Tensors = dict[str, tuple[tuple[int, ...], int]]


def _dense(kind: int, *, has_output: bool = True, **changes: int) -> Tensors:
    tensors = trunk_tensors(kind, has_output=has_output)
    for layer in range(2):
        tensors |= {**attention_tensors(layer, kind, **changes), **mlp_tensors(layer, kind)}
    return tensors


def _routed(kind: int, count: int = 8, width: int = 512) -> Tensors:
    tensors = trunk_tensors(Q8_0)
    for layer in range(2):
        tensors |= attention_tensors(layer, Q8_0)
        tensors |= expert_tensors(layer, kind, count, width)
    return tensors


def test_a_llama_is_read_with_its_tensors_as_they_are_stored(tmp_path: Path) -> None:
    """As Q4_K_M has them: values and the head in Q6_K, all else in Q4_K."""
    tensors = {**_dense(Q4_K, v=Q6_K), "output.weight": ((256, 1024), Q6_K)}
    path = write_gguf(tmp_path / "small.Q4_K_M.gguf", under("llama", decoder_keys()), tensors)
    model = load_model(path)
    assert ("small.Q4_K_M", 2, 256, 4, 2, 64, 512, 1024) == (
        *(model.name, model.num_layers, model.hidden, model.num_heads, model.num_kv_heads),
        *(model.head_dim, model.intermediate, model.vocab),
    )
    assert not model.has_tied_embedding
    stored = find_quantization(model.quantization)
    # Of 768 columns 128 in 6.5625 bits, the others in 4.5.
    assert pytest.approx(4.5 + 128 / 768 * (6.5625 - 4.5), abs=1e-4) == stored.attention.bits
    assert (4.5, 4.5, 6.5625) == (stored.mlp.bits, stored.embedding.bits, stored.head.bits)
    assert ("int4_wo", "int8_wo") == (stored.mlp.variant, stored.head.variant)
    held = read_gguf(path).tensors
    assert count_parameters(model).total == sum(tensor.num_elements for tensor in held)
    # Norms are held in 32 bits and counted in 16.
    num_bytes = sum(tensor.num_bytes for tensor in held) - 5 * 256 * 2
    assert pytest.approx(num_bytes, rel=1e-4) == describe_model(model).num_bytes


def test_what_is_served_holds_the_bytes_of_the_file(tmp_path: Path) -> None:
    tensors = {**_dense(Q4_K, v=Q6_K), "output.weight": ((256, 1024), Q6_K)}
    model = load_model(write_gguf(tmp_path / "a.gguf", under("llama", decoder_keys()), tensors))
    options = LoweringOptions(dtype=DType.BF16, quantization=model.quantization)
    nodes = lower_forward(model, BatchShape(num_tokens=8, num_output_rows=8), options)
    held = sum(node.weights_bytes for node in nodes)
    assert pytest.approx(describe_model(model).num_bytes, rel=1e-6) == held
    variants = {node.role: node.variant for node in nodes if node.operator == "gemm"}
    assert ("quant=int4_wo", "quant=int8_wo") == (variants["mlp_up_proj"], variants["lm_head"])


def test_one_type_is_one_scheme_and_16_bits_are_none(tmp_path: Path) -> None:
    for kind, name in ((Q8_0, "wo8.5bit"), (F16, ""), (F32, "")):
        path = write_gguf(tmp_path / "model.gguf", under("qwen3", decoder_keys()), _dense(kind))
        assert name == load_model(str(path)).quantization


def test_without_a_head_the_embedding_is_tied(tmp_path: Path) -> None:
    tensors = _dense(Q8_0, has_output=False)
    path = write_gguf(tmp_path / "model.gguf", under("gemma", decoder_keys()), tensors)
    assert load_model(path).has_tied_embedding


@pytest.mark.parametrize(
    ("architecture", "keys", "tensors", "top_k"),
    [
        ("llama", {"expert_count": 8, "expert_used_count": 2}, _routed(Q4_K), 2),
        (
            "qwen3moe",
            {"expert_count": 8, "expert_used_count": 4, "expert_feed_forward_length": 256},
            _routed(Q4_K, width=256),
            4,
        ),
    ],
)
def test_experts_are_read(
    tmp_path: Path, architecture: str, keys: dict[str, object], tensors: Tensors, top_k: int
) -> None:
    metadata = under(architecture, decoder_keys(**keys))
    model = load_model(write_gguf(tmp_path / "model.gguf", metadata, tensors))
    (experts,) = stack_of(model).experts
    assert (8, top_k) == (experts["num_experts"], experts["top_k"])
    stored = find_quantization(model.quantization)
    assert (4.5, 8.5) == (stored.experts.bits, stored.attention.bits)


def test_gpt_oss_sees_a_window_in_every_other_layer(tmp_path: Path) -> None:
    keys = {
        "expert_count": 8,
        "expert_used_count": 4,
        "expert_feed_forward_length": 512,
        "attention.sliding_window": 128,
        "attention.key_length": 64,
        "attention.value_length": 64,
    }
    metadata = under("gpt-oss", decoder_keys(**keys))
    model = load_model(write_gguf(tmp_path / "model.gguf", metadata, _routed(MXFP4)))
    assert [128, 0] == [part["window"] for part in stack_of(model).mixers]
    assert 4.25 == find_quantization(model.quantization).experts.bits


def test_gemma_3_sees_all_tokens_in_every_sixth_layer(tmp_path: Path) -> None:
    keys = decoder_keys(block_count=6, **{"attention.sliding_window": 1024})
    tensors = trunk_tensors(Q8_0, has_output=False)
    for layer in range(6):
        tensors |= {**attention_tensors(layer, Q8_0), **mlp_tensors(layer, Q8_0)}
    model = load_model(write_gguf(tmp_path / "model.gguf", under("gemma3", keys), tensors))
    windows = {part["window"]: len(layers) for part, layers in stack_of(model).mixers.items()}
    assert {1024: 5, 0: 1} == windows


@pytest.mark.parametrize("is_new", [True, False])
def test_latent_attention_is_read_from_files_old_and_new(tmp_path: Path, is_new: bool) -> None:
    """New ones give the widths of the cache's vectors, and those of heads by another name."""
    keys: dict[str, object] = {
        **decoder_keys(**{"attention.head_count_kv": 1 if is_new else 4}),
        "attention.q_lora_rank": 96,
        "attention.kv_lora_rank": 64,
        "rope.dimension_count": 32,
        "leading_dense_block_count": 1,
        "expert_count": 8,
        "expert_used_count": 2,
        "expert_shared_count": 1,
        "expert_feed_forward_length": 256,
        "expert_gating_func": 2,
    }
    lengths = {"attention.key_length": 96, "attention.value_length": 48}
    if is_new:
        lengths = {f"{name}_mla": value for name, value in lengths.items()}
        lengths |= {"attention.key_length": 96, "attention.value_length": 64}
    tensors = {**trunk_tensors(Q8_0), **mlp_tensors(0, Q8_0), **expert_tensors(1, Q4_K, 8, 256)}
    for layer in range(2):
        shapes = {
            "attn_q_a": (256, 96),
            "attn_q_b": (96, 4 * 96),
            "attn_kv_a_mqa": (256, 96),
            "attn_kv_b": (64, 4 * (64 + 48)),
            "attn_output": (4 * 48, 256),
        }
        tensors |= {f"blk.{layer}.{name}.weight": (shape, Q8_0) for name, shape in shapes.items()}
        for name, width in (("attn", 256), ("attn_q_a", 96), ("attn_kv_a", 64)):
            tensors[f"blk.{layer}.{name}_norm.weight"] = ((width,), F32)
    for name, shape in (("gate", (256, 256)), ("up", (256, 256)), ("down", (256, 256))):
        tensors[f"blk.1.ffn_{name}_shexp.weight"] = (shape, Q8_0)
    metadata = under("deepseek2", {**keys, **lengths})
    model = load_model(write_gguf(tmp_path / "model.gguf", metadata, tensors))
    (mixer,) = stack_of(model).mixers
    names = ("num_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim")
    assert (4, 96, 64, 64, 48) == tuple(mixer[name] for name in names)
    stored = find_quantization(model.quantization)
    assert (8.5, 4.5) == (stored.weight_of("latent").bits, stored.experts.bits)
    held = sum(tensor.num_elements for tensor in read_gguf(tmp_path / "model.gguf").tensors)
    assert held == count_parameters(model).total


def test_a_split_file_is_read_whole(tmp_path: Path) -> None:
    tensors = list(_dense(Q8_0).items())
    metadata = under("llama", decoder_keys())
    first = tmp_path / "model-00001-of-00002.gguf"
    write_gguf(first, metadata, dict(tensors[:4]))
    write_gguf(tmp_path / "model-00002-of-00002.gguf", {"split.no": 1}, dict(tensors[4:]))
    model = load_model(first)
    assert ("model", 1024) == (model.name, model.vocab)


@pytest.mark.parametrize(
    ("architecture", "keys", "why"),
    [
        ("mamba", {}, "'mamba' is not supported; supported are"),
        ("llama", {"attention.head_count_kv": [2, 1]}, "may change the operators"),
        ("llama", {"attention.value_length": 32}, "v_head_dim"),
        ("llama", {"ssm.state_size": 16}, "may change the operators"),
        ("llama", {"feed_forward_length": 2048}, "its tensors hold"),
    ],
)
def test_what_is_not_read_is_refused_by_name(
    tmp_path: Path, architecture: str, keys: dict[str, object], why: str
) -> None:
    metadata = under(architecture, decoder_keys(**keys))
    path = write_gguf(tmp_path / "model.gguf", metadata, _dense(Q8_0))
    with pytest.raises(InvalidRequestError, match=why):
        load_model(path)


def test_a_damaged_file_is_an_error(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "model.gguf", under("llama", decoder_keys()), _dense(Q8_0))
    content = whole.read_bytes()
    for broken, why in (
        (b"GGML" + content[4:], "is no GGUF file"),
        (content[:4] + b"\x01\0\0\0" + content[8:], "of version 1"),
        (content[:8] + b"\xff" * 16 + content[24:], "ends before"),
        *((content[:size], "ends before") for size in range(5, len(content), 97)),
    ):
        whole.write_bytes(broken)
        with pytest.raises(InvalidRequestError, match=why):
            load_model(whole)
    with pytest.raises(InvalidRequestError, match="there is no file"):
        load_model(str(tmp_path / "none.gguf"))


def test_a_file_with_no_embedding_is_refused(tmp_path: Path) -> None:
    tensors = _dense(Q8_0)
    del tensors["token_embd.weight"]
    path = write_gguf(tmp_path / "model.gguf", under("llama", decoder_keys()), tensors)
    with pytest.raises(InvalidRequestError, match="vocab_size"):
        load_model(path)
