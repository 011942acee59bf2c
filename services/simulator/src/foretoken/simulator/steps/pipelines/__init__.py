"""When the ranks of a pipeline do what: schedules, run event by event or by formula."""
