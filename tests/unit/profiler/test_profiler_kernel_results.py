"""Every kernel that runs on the CPU computes what its operator says, both ways, in each format."""

from pathlib import Path

import pytest
import torch
from kernel_references import ATTENTION, DRAWN, backward_error, forward_error, reference_of

from foretoken.domain.measurements.estimate import DType, Phase
from foretoken.profiler.kernel import TORCH_DTYPES, Kernel, all_kernels, find_kernels

CPU = torch.device("cpu")
_PAGE = Path(__file__).resolve().parents[3] / "docs" / "reference" / "kernels.md"
OPERATORS = sorted({name for name in all_kernels() if not name.startswith(ATTENTION)} - set(DRAWN))


def _cases(phase: Phase) -> list[tuple[Kernel, DType]]:
    return [
        (kernel, dtype)
        for name in OPERATORS
        for dtype in TORCH_DTYPES
        for kernel in find_kernels(name, dtype, phase, CPU)
    ]


def _name(value: object) -> str:
    if isinstance(value, Kernel):
        return f"{value.operator}-{value.source}-{value.variant}"
    return getattr(value, "name", str(value)).lower()


@pytest.mark.parametrize(("kernel", "dtype"), _cases(Phase.FORWARD), ids=_name)
def test_results_are_those_of_the_definition(kernel: Kernel, dtype: DType) -> None:
    assert 1.0 >= forward_error(kernel, dtype, CPU)


@pytest.mark.parametrize(("kernel", "dtype"), _cases(Phase.BACKWARD), ids=_name)
def test_gradients_are_those_of_the_definition(kernel: Kernel, dtype: DType) -> None:
    assert 1.0 >= backward_error(kernel, dtype, CPU)


@pytest.mark.parametrize("name", OPERATORS)
def test_every_kernel_has_a_definition_to_be_held_against(name: str) -> None:
    """Those for GPUs too, which are compared where there is one."""
    for kernel in all_kernels()[name].members:
        assert reference_of(kernel).dims


@pytest.mark.parametrize("name", sorted({*OPERATORS, *DRAWN}))
def test_the_reference_page_lists_every_kernel(name: str) -> None:
    """Its table has the kernel, its variants, number formats and passes."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in _PAGE.read_text(encoding="utf-8").splitlines()
        if line.startswith(f"| `{name}` |")
    ]
    listed = {
        (source, variant, dtype, passes)
        for _, source, variants, dtypes, passes in rows
        for variant in variants.split(", ")
        for dtype in dtypes.split(", ")
    }
    actual = {
        (
            f"`{kernel.source}`",
            f"`{kernel.variant}`" if kernel.variant else "plain",
            dtype.name.lower(),
            "both" if kernel.differentiable else "forward",
        )
        for kernel in all_kernels()[name].members
        for dtype in kernel.dtypes
    }
    assert listed == actual
