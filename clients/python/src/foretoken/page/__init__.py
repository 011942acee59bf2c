"""Pages as data: blocks over tables and metrics, charts as specifications, written as HTML."""
