"""Model presets: their parameters against published counts, and how they are found."""

import dataclasses
from pathlib import Path

import pytest

from foretoken.domain.errors import InvalidRequestError, UnknownModelError
from foretoken.domain.lowering.graph import BatchShape, PrefillShape
from foretoken.domain.lowering.lower import lower_forward
from foretoken.domain.lowering.options import LoweringOptions
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.models.architecture import ModelArchitecture, all_models, find_model
from foretoken.domain.models.description import describe_model
from foretoken.domain.models.load import load_model
from foretoken.domain.models.parameters import count_parameters

# Parameters of the published weights, as Hugging Face counts them in the safetensors files (tied
# weights once; the draft module of DeepSeek-V3 left out).
_PUBLISHED = {
    "codellama-34b": 33_743_970_304,
    "deepseek-v3": 671_026_419_200,
    "gpt-neox-20b": 20_554_567_680,
    "gpt-oss-120b": 116_829_156_672,
    "gpt-oss-20b": 20_914_757_184,
    "gpt2-xl": 1_557_611_200,
    "internlm2-20b": 19_861_149_696,
    "internlm2-7b": 7_737_708_544,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-2-7b": 6_738_415_616,
    "llama-3-70b": 70_553_706_496,
    "llama-3-8b": 8_030_261_248,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.3-70b": 70_553_706_496,
    "llemma-7b": 6_738_546_688,
    "mistral-7b": 7_248_023_552,
    "mistral-large-2-123b": 122_610_069_504,
    "mistral-nemo-12b": 12_247_782_400,
    "mixtral-8x22b": 140_620_634_112,
    "mixtral-8x7b": 46_702_792_704,
    "phi-2": 2_779_683_840,
    "qwen2-0.5b": 494_032_768,
    "qwen2-1.5b": 1_543_714_304,
    "qwen2-72b": 72_706_203_648,
    "qwen2-7b": 7_615_616_512,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-72b": 72_706_203_648,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-14b": 14_768_307_200,
    "qwen3-235b-a22b": 235_093_634_560,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-32b": 32_762_123_264,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
}
# What the pages of those without such files say, rounded.
_PUBLISHED_ROUNDED = {
    "gpt-1t": 1008.0e9,
    "gpt-22b": 22e9,
    "gpt-530b": 529.6e9,
    "gpt3-175b": 174.6e9,
    "internlm-20b": 20.1e9,
    "internlm-7b": 7.32e9,
    "qwen-72b": 72.3e9,
}
# What their model cards say one token passes through, in billions.
_PUBLISHED_ACTIVE = {
    "deepseek-v3": 37.0,
    # Their card does not count the embedding: 5.13 and 3.61 without it.
    "gpt-oss-120b": 5.71,
    "gpt-oss-20b": 4.19,
    "mixtral-8x7b": 12.9,
    "mixtral-8x22b": 39.0,
    "qwen3-30b-a3b": 3.3,
    "qwen3-235b-a22b": 22.0,
}
# Those of today's models, whose published figures `test_model_configs.py` has.
_TODAY = {
    *(name for name, model in all_models().items() if model.layers or model.extras),
    *("kimi-k2", "qwen3-coder-480b-a35b", "qwen3-30b-a3b-fp8", "qwen3-32b-fp8"),
    *("qwen3-235b-a22b-fp8", "qwen3-235b-a22b-nvfp4", "qwen3-coder-480b-a35b-fp8"),
    *("qwen3-32b-fp8-static", "qwen3-32b-nvfp4", "llama-3.1-8b-fp8", "llama-3.1-70b-fp8"),
    "deepseek-r1-nvfp4",
} - {"deepseek-v3"}
_PRESETS = sorted(set(all_models()) - _TODAY)
_MOE = sorted(name for name in _PRESETS if find_model(name).moe)


def test_every_preset_but_our_own_has_a_published_count() -> None:
    assert sorted([*_PUBLISHED, *_PUBLISHED_ROUNDED, "tiny-llama"]) == _PRESETS


@pytest.mark.parametrize("name", sorted(_PUBLISHED))
def test_parameters_match_the_published_weights(name: str) -> None:
    """The few that lack some biases or norms miss by less than a ten-thousandth."""
    assert pytest.approx(_PUBLISHED[name], rel=1e-4) == count_parameters(find_model(name)).total


@pytest.mark.parametrize("name", sorted(_PUBLISHED_ROUNDED))
def test_parameters_match_the_rounded_figure(name: str) -> None:
    expected = _PUBLISHED_ROUNDED[name]
    assert pytest.approx(expected, rel=5e-3) == count_parameters(find_model(name)).total


@pytest.mark.parametrize("name", _MOE)
def test_active_parameters_match_the_model_card(name: str) -> None:
    found = count_parameters(find_model(name)).active_total
    assert pytest.approx(_PUBLISHED_ACTIVE[name] * 1e9, rel=0.02) == found


def test_parameters_of_models_of_the_autumn_are_those_of_their_own_files() -> None:
    """GLM-5.3-Flash as transformers 5.24 builds it; DeepSeek-V4.1-Flash as its card counts.

    552 billion and tables of 196, of which 16 billion are active. Its checkpoint of 475.3 GiB has
    heads that draft as well: three layers with 128 experts each.
    """
    glm, deepseek = (find_model(name) for name in ("glm-5.3-flash", "deepseek-v4.1-flash"))
    assert pytest.approx(313_890_426_878, rel=1e-6) == count_parameters(glm).total
    count = count_parameters(deepseek)
    tables = next(part for part in count.parts if part.part.kind == "engram")
    assert pytest.approx(552e9, rel=5e-3) == count.total - tables.total
    assert pytest.approx(196e9, rel=5e-3) == tables.total
    assert pytest.approx(16e9, rel=0.02) == count.active_total - count.embedding
    drafts = 3 * 128 * 3 * 5120 * 2304 * 4.25 / 8
    found = describe_model(deepseek).num_bytes + drafts
    assert pytest.approx(475.3 * 2**30, rel=0.01) == found


def test_every_token_passes_through_all_of_a_dense_model() -> None:
    for name in set(_PRESETS) - set(_MOE):
        count = count_parameters(find_model(name))
        assert count.total == count.active_total


def test_the_parts_of_a_count_by_hand() -> None:
    count = count_parameters(find_model("llama-2-7b"))
    assert 32000 * 4096 == count.embedding == count.lm_head
    assert 4 * 4096**2 == count.per_layer("attention")
    assert 3 * 4096 * 11008 == count.per_layer("mlp")
    assert (32 * 8192, 4096, 0) == (count.norms, count.final_norm, count.per_layer("experts"))


def test_a_tied_head_counts_once() -> None:
    tied = find_model("qwen2-0.5b")
    untied = dataclasses.replace(tied, has_tied_embedding=False)
    assert 0 == count_parameters(tied).lm_head
    difference = count_parameters(untied).total - count_parameters(tied).total
    assert tied.vocab * tied.hidden == difference


def test_queries_of_latent_attention_need_no_compression() -> None:
    """DeepSeek-V2-Lite has none."""
    model = find_model("deepseek-v3")
    assert model.mla is not None
    plain = dataclasses.replace(model, mla=dataclasses.replace(model.mla, q_lora_rank=0))
    difference = count_parameters(plain).per_layer("latent")
    difference -= count_parameters(model).per_layer("latent")
    q_width = 128 * (128 + 64)
    assert 7168 * q_width - 1536 * (7168 + 1 + q_width) == difference


def test_tiny_llama_is_small_enough_for_a_cpu() -> None:
    assert 20e6 < count_parameters(find_model("tiny-llama")).total < 40e6


@pytest.mark.parametrize("name", sorted(set(_PRESETS) - {"deepseek-v3"}))
def test_lowering_holds_the_weights_that_are_counted(name: str) -> None:
    """Two ways to the same number, but for biases, which lowering leaves out."""
    model = find_model(name)
    shape = BatchShape(
        num_tokens=1,
        num_output_rows=1,
        prefill=PrefillShape(num_seqs=1, q_tokens=1, kv_tokens=1, score_pairs=1),
    )
    nodes = lower_forward(model, shape, LoweringOptions(dtype=DType.BF16))
    lowered = sum(node.num_weights for node in nodes)
    assert pytest.approx(count_parameters(model).total, rel=2e-3) == lowered


def test_no_alias_means_two_models() -> None:
    names = [
        name.lower() for model in all_models().values() for name in (model.name, *model.aliases)
    ]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("alias", "expected"),
    [
        ("meta-llama/Meta-Llama-3-8B", "llama-3-8b"),
        ("META-LLAMA/llama-3.1-8b", "llama-3.1-8b"),
        ("meta-llama/Llama-2-70b-hf", "llama-2-70b"),
        ("Qwen/Qwen-2-7B", "qwen2-7b"),
        ("Qwen/Qwen2-7B", "qwen2-7b"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3-30b-a3b"),
        ("Llama-3-8B", "llama-3-8b"),
        # Names of NVIDIA's measured runs.
        ("nvidia/DeepSeek-R1-NVFP4", "deepseek-r1-nvfp4"),
        ("nvidia/Llama-3.1-8B-Instruct-FP8", "llama-3.1-8b-fp8"),
        ("nvidia/Qwen3-32B-NVFP4", "qwen3-32b-nvfp4"),
        ("zhipuai/GLM-5", "glm-5"),
    ],
)
def test_a_preset_is_found_by_its_repository_in_any_case(alias: str, expected: str) -> None:
    assert expected == find_model(alias).name
    assert expected == load_model(alias).name


def test_an_unknown_model_suggests_the_nearest() -> None:
    with pytest.raises(UnknownModelError, match=r"did you mean llama-3-8b"):
        load_model("llama-3-8")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_layers", 0),
        ("vocab", -1),
        ("num_kv_heads", 0),
        ("num_kv_heads", 3),
        ("activation", "relu"),
        ("norm", "batch_norm"),
        ("position", "alibi"),
        ("num_kv_heads", 64),
        ("max_position", 0),
        ("intermediate", 0),
        ("sliding_window", -1),
        ("head_dim", 15),
    ],
)
def test_an_architecture_that_cannot_be_lowered_is_refused(field: str, value: object) -> None:
    fields = {
        item.name: getattr(find_model("tiny-llama"), item.name)
        for item in dataclasses.fields(ModelArchitecture)
    }
    with pytest.raises(InvalidRequestError, match="tiny-llama") as caught:
        ModelArchitecture(**{**fields, field: value})
    assert [field] == [v.field for v in caught.value.violations]


def test_everything_that_is_wrong_is_named_at_once() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        dataclasses.replace(find_model("tiny-llama"), hidden=0, vocab=0, norm="none")
    assert ["hidden", "vocab", "norm"] == [v.field for v in caught.value.violations]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"top_k": 9}, "top_k"),
        ({"top_k": 0}, "top_k"),
        ({"num_experts": 0}, "num_experts"),
        ({"expert_intermediate": 0}, "expert_intermediate"),
        ({"num_shared_experts": -1}, "num_shared_experts"),
    ],
)
def test_experts_that_no_token_can_visit_are_refused(changes: dict[str, int], field: str) -> None:
    experts = find_model("mixtral-8x7b").moe
    assert experts is not None
    with pytest.raises(InvalidRequestError) as caught:
        dataclasses.replace(experts, **changes)
    assert [field] == [v.field for v in caught.value.violations]


def test_layers_and_heads_that_contradict_each_other_are_refused() -> None:
    model = find_model("deepseek-v3")
    assert model.moe is not None
    with pytest.raises(InvalidRequestError, match="62 are more than the 61 layers"):
        dataclasses.replace(model, moe=dataclasses.replace(model.moe, num_dense_layers=62))
    with pytest.raises(InvalidRequestError, match=r"head_dim: 64 contradicts mla\.v_head_dim, 128"):
        dataclasses.replace(model, head_dim=64)


def test_a_path_is_read_where_no_preset_has_the_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="there is no file"):
        load_model(str(tmp_path / "config.json"))
    with pytest.raises(InvalidRequestError, match="cannot read"):
        load_model(str(tmp_path))
