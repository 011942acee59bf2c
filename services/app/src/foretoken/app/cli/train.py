"""`foretoken train`: learn latency models from the catalog."""

from typing import Annotated

import typer

from foretoken.app.cli.state import (
    build_table,
    format_ratio,
    open_composition,
    show_progress,
    state_of,
)
from foretoken.domain.ports import TrainRequest


def train(
    context: typer.Context,
    device: Annotated[str, typer.Option(help="Only this device's measurements.")] = "",
    operator: Annotated[str, typer.Option(help="Only this operator.")] = "",
    seed: Annotated[int, typer.Option(help="Seed of folds and sampling.")] = 0,
) -> None:
    """Train latency models on all measurements in the catalog and make them the active ones.

    The table shows how well each model predicts sizes it was not trained on, and how often the
    truth fell inside its 90 % interval.
    """
    state = state_of(context)
    request = TrainRequest(device=device, operator=operator, seed=seed)
    with open_composition(state) as services:
        with show_progress("train") as update:
            report = services.foretoken("predictor").train(request, on_progress=update)
        rows = [
            (
                entry.device,
                entry.operator,
                entry.num_rows,
                entry.num_held_out,
                format_ratio(entry.held_out_mape_ratio, entry.num_held_out),
                format_ratio(entry.held_out_p90_ratio, entry.num_held_out),
                format_ratio(entry.interval_coverage_ratio, entry.num_held_out),
            )
            for entry in report.operators
        ]
        columns = (
            "device",
            "operator",
            "rows",
            "held out",
            "mean error",
            "P90 error",
            "inside interval",
        )
        title = (
            f"Model {report.model_version} from {report.num_rows:,} rows"
            f" in {report.cpu_s:.1f} CPU seconds"
        )
        state.print_object(report, lambda: build_table(title, columns, rows))
