-- What was deleted on purpose, and when. A pruning has a number of the counter that batches and
-- reviews have: it never goes back, though the highest batch may be gone.
CREATE TABLE pruning (
    pruning_number BIGINT NOT NULL,
    older_than_days DOUBLE NOT NULL,
    device VARCHAR NOT NULL,
    tool VARCHAR NOT NULL,
    num_runs BIGINT NOT NULL,
    num_rows BIGINT NOT NULL,
    pruned_at TIMESTAMP NOT NULL
);
