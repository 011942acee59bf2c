"""The operators of whole steps as `transformers` runs them."""

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretoken.domain.lowering.eager import ModelForm, lower_step
from foretoken.domain.lowering.graph import OperatorNode
from foretoken.domain.measurements.estimate import DType, Phase
from foretoken.domain.measurements.profiling import STEP_KINDS, ClosureStep
from foretoken.domain.models.architecture import find_model
from foretoken.simulator.validation.steps import count_kernels

_LLAMA, _GPT2 = find_model("tiny-llama"), find_model("gpt2-xl")
_GPT2_FORM = ModelForm(model_type="gpt2", activation="gelu_new")


def _step(kind: str, mode: str = "eager") -> ClosureStep:
    return ClosureStep(kind=kind, batch_size=2, num_tokens=16, mode=mode)


def _roles(nodes: Iterable[OperatorNode]) -> dict[str, OperatorNode]:
    return {node.role: node for node in nodes}


def test_llama_has_a_product_for_each_projection() -> None:
    """Their widths are those of the fused ones the serving engines run."""
    nodes = _roles(lower_step(_step("prefill"), _LLAMA, DType.FP32, ModelForm()))
    widths = [nodes[f"attn_{part}_proj"].dims["n"] for part in ("q", "k", "v")]
    assert [512, 256, 256] == widths
    assert [1408, 1408] == [nodes[f"mlp_{part}_proj"].dims["n"] for part in ("gate", "up")]
    assert not {"attn_qkv_proj", "mlp_activation_product"} & set(nodes)


def test_gpt2_has_one_product_for_all_heads_and_a_chain_of_activations() -> None:
    """As its modeling file has it."""
    nodes = _roles(lower_step(_step("prefill"), _GPT2, DType.FP32, _GPT2_FORM))
    assert 3 * 1600 == nodes["attn_qkv_proj"].dims["n"]
    assert ("gelu", "form=eager") == (
        nodes["mlp_activation"].operator,
        nodes["mlp_activation"].variant,
    )


def test_norms_and_rotation_are_chains_unless_compiled() -> None:
    """A compiler fuses them."""
    for is_compiled, variant in ((False, "form=eager"), (True, "")):
        form = ModelForm(model_type="qwen3", is_compiled=is_compiled)
        nodes = _roles(lower_step(_step("decode"), find_model("qwen3-0.6b"), DType.BF16, form))
        roles = ("input_norm", "q_norm", "k_norm", "attn_rope", "post_attention_norm")
        assert {variant} == {nodes[role].variant for role in roles}


def test_a_decoding_step_sees_its_context_and_the_new_token() -> None:
    """Two sequences of sixteen tokens and one more."""
    nodes = _roles(lower_step(_step("decode"), _LLAMA, DType.FP32, ModelForm()))
    assert 2 * 17 == nodes["attention_decode"].dims["kv_tokens"]
    assert 2 == nodes["lm_head"].dims["m"] == nodes["attn_q_proj"].dims["m"]


def test_a_prompt_has_logits_of_its_last_token_alone() -> None:
    """The layers see all tokens, the head one of each sequence."""
    nodes = _roles(lower_step(_step("prefill"), _LLAMA, DType.FP32, ModelForm()))
    assert (32, 2) == (nodes["attn_q_proj"].dims["m"], nodes["lm_head"].dims["m"])


def test_training_adds_up_the_gradients_of_an_input_of_several_products() -> None:
    """Two additions for queries, keys and values, one for gate and up."""
    nodes = lower_step(_step("training"), _LLAMA, DType.FP32, ModelForm())
    sums = [node.role for node in nodes if node.role.endswith("_sum")]
    expected = ["mlp_gate_proj_dgrad_sum", "attn_k_proj_dgrad_sum", "attn_q_proj_dgrad_sum"]
    assert expected == sums
    assert {Phase.FORWARD} == {node.phase for node in nodes if node.role.endswith("_sum")}


def test_only_a_tied_table_adds_up_two_gradients() -> None:
    """The first gradient of a step is kept as it is."""
    for model, form, count in ((_LLAMA, ModelForm(), 0), (_GPT2, _GPT2_FORM, 1)):
        nodes = lower_step(_step("training"), model, DType.FP32, form)
        assert count == sum(node.operator == "gradient_accumulation" for node in nodes)


@pytest.mark.parametrize("kind", STEP_KINDS)
@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "deepseek-v3", "gpt-neox-20b", "phi-2"])
def test_other_families_can_be_lowered(name: str, kind: str) -> None:
    """Experts and latent attention have their operators, and a count of kernels."""
    model = find_model(name)
    step = _step(kind)
    nodes = lower_step(step, model, DType.BF16, ModelForm(model_type="other"))
    assert count_kernels(nodes, step, model, DType.BF16) > model.num_layers


@given(
    kind=st.sampled_from(STEP_KINDS),
    batch_size=st.integers(1, 64),
    num_tokens=st.integers(1, 4096),
)
def test_the_kernels_of_a_step_do_not_depend_on_its_size(
    kind: str, batch_size: int, num_tokens: int
) -> None:
    """The same operators run, on more or fewer tokens."""
    small = ClosureStep(kind=kind, batch_size=1, num_tokens=1)
    large = ClosureStep(kind=kind, batch_size=batch_size, num_tokens=num_tokens)
    counts = [
        count_kernels(lower_step(step, _LLAMA, DType.FP32, ModelForm()), step, _LLAMA, DType.FP32)
        for step in (small, large)
    ]
    assert counts[0] == counts[1]
